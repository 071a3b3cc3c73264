"""Who shares cached prefixes with whom: from an API key and a request's `cache_salt` to the engine's salt, and back.

Knows names of tenants, not their keys. All that keeps the prompts of one tenant from another stands here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence


def tenant_of(key: bytes) -> str:
    """The name of a key's tenant: a digest, 32 hexadecimal characters, the same in every process."""
    return hashlib.blake2b(key, digest_size=16, person=b"quire tenant").hexdigest()


class Tenants:
    """Tenants apart from each other. A tenant's salts are those that begin with its name and a slash; nobody else gets
    such a salt, whatever a request asks for.

    names  of the tenants, all of the same length; none: everybody is one tenant
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(names))

    @property
    def are_apart(self) -> bool:
        """Whether there is somebody to hide something from."""
        return bool(self.names)

    def salt(self, tenant: str, asked: str | None = None) -> str:
        """The engine's salt for a request of `tenant` with the `cache_salt` that was asked for."""
        if not self.are_apart:
            return asked or ""
        # Of what was asked for a digest: with the name before it, 256 characters would exceed the engine's own limit.
        own = hashlib.blake2b(asked.encode(), digest_size=16).hexdigest() if asked else ""
        return f"{tenant}/{own}"

    def sees(self, tenant: str) -> Callable[[str], bool]:
        """Which of the engine's salts are those of `tenant`."""
        if not self.are_apart:
            return lambda salt: True
        return lambda salt: salt.startswith(f"{tenant}/")

    @property
    def salts(self) -> list[str]:
        """The salts of requests that ask for none, one for each tenant."""
        return [self.salt(name) for name in self.names] or [self.salt("")]
