"""Tenants: computes the engine's salt from an API key and a request's `cache_salt`, and decides which salts a tenant
sees.

Knows names of tenants, not their keys. Their isolation follows from the salts that this module makes. The grammar
compiler uses the part of a salt before the slash as the tenant, and limits each tenant's share of its queue and memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from quire.prefixes.cached import SaltFilter


def tenant_of(key: bytes) -> str:
    """The tenant of a key: a digest of 32 hexadecimal characters, the same in every process."""
    return hashlib.blake2b(key, digest_size=16, person=b"quire tenant").hexdigest()


class Tenants:
    """The tenants of a server. The salts of a tenant begin with its name and a slash. No request of another tenant gets
    such a salt.

    names  names of the tenants, all of the same length; without names all clients are one tenant
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(names))

    @property
    def are_isolated(self) -> bool:
        """Whether there are separate tenants."""
        return bool(self.names)

    def salt(self, tenant: str, cache_salt: str | None = None) -> str:
        """The engine's salt for a request of `tenant` with this `cache_salt`."""
        if not self.are_isolated:
            return cache_salt or ""
        # A digest of `cache_salt`: the name and 256 characters would exceed the engine's limit.
        own = hashlib.blake2b(cache_salt.encode(), digest_size=16).hexdigest() if cache_salt else ""
        return f"{tenant}/{own}"

    def visible_salts(self, tenant: str) -> SaltFilter:
        """The engine salts of `tenant`."""
        return SaltFilter(f"{tenant}/" if self.are_isolated else "")

    @property
    def salts(self) -> list[str]:
        """The default salt of each tenant."""
        return [self.salt(name) for name in self.names] or [self.salt("")]
