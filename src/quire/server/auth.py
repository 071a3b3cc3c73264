"""Access control: API keys from a file, and the addresses and host names of a server without keys."""

from __future__ import annotations

import hmac
import logging
import socket
import stat
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from quire.errors import ConfigError
from quire.safe_io import read_text
from quire.server.errors import ApiError
from quire.server.tenants import tenant_of

log = logging.getLogger("quire.server")


class ApiKeys:
    """The accepted API keys. Without keys every client is accepted.

    tenants  a name per key: a digest, never the key
    """

    def __init__(self, keys: list[str]) -> None:
        self.keys = [key.encode() for key in keys]
        self.tenants = [tenant_of(key) for key in self.keys]

    @classmethod
    def from_file(cls, path: str | Path | None) -> ApiKeys:
        """Reads one key per line; ignores empty lines and lines that begin with #. Raises ConfigError for a file
        without keys.
        """
        if path is None:
            return cls([])
        try:
            text = read_text(path)
            mode = Path(path).stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys of serve.api_key_file: {error}") from error
        keys = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        if not keys:
            raise ConfigError(f"serve.api_key_file {path} has no key; write one key per line")
        for number, key in enumerate(keys, 1):
            if not (key.isascii() and key.isprintable() and " " not in key):
                raise ConfigError(f"key {number} of {path} has spaces or characters that an HTTP header cannot carry")
        if mode & stat.S_IROTH:
            log.warning("API keys in %s are readable by every user of this machine; chmod 600 it", path)
        return cls(keys)

    def tenant(self, authorization: bytes) -> str | None:
        """The tenant of the key in the Authorization header; None for a missing or wrong key. Without keys the tenant
        is the empty name. The comparison takes constant time.
        """
        if not self.keys:
            return ""
        scheme, _, given = authorization.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        matches = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        return self.tenants[matches.index(True)] if any(matches) else None


def is_loopback(host: str) -> bool:
    """Whether every address of `host` is this machine's own."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host or None, 0, flags=socket.AI_PASSIVE)}
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"serve.host {host!r} is not an address of this machine: {error}") from error
    return all(ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def is_loopback_host(host: str) -> bool:
    """Whether a Host header is `localhost` or a loopback address. A page under another domain name cannot send that."""
    try:
        name = _name(host)
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """A Host header without its port, in lower case; empty if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class AllowedHosts:
    """The Host names that a local server without keys answers: loopback names, and serve.host.

    This stops DNS rebinding. A web page can make its domain name resolve to this machine. Its visitor's browser then
    sends requests here with that name as Host, and lets the page read the answers. Clients without a Host header are
    not browsers. A server with keys needs no check, because no page has a key. A public server answers any name.

    host    serve.host
    is_any  whether every name is accepted
    """

    def __init__(self, host: str, keys: ApiKeys, allow_public: bool) -> None:
        self.own = host.lower()
        self.is_any = bool(keys.keys) or allow_public or not is_loopback(host)

    def check(self, hosts: Sequence[str]) -> None:
        """Raises ApiError 403 for Host headers that name another machine."""
        others = [host for host in hosts if not (is_loopback_host(host) or _name(host) == self.own)]
        if self.is_any or not others:
            return
        raise ApiError(
            403,
            "without API keys this server answers only requests with a Host of this machine, such as 127.0.0.1 or"
            f" localhost, not {others[-1][:100]!r}; set serve.api_key_file, or serve.allow_public to serve everybody",
            code="host_not_allowed",
        )


def check_exposure(host: str, keys: ApiKeys, allow_public: bool) -> None:
    """Raises ConfigError if other machines can reach the server and it has neither keys nor serve.allow_public."""
    if not keys.keys and not allow_public and not is_loopback(host):
        raise ConfigError(
            f"serve.host {host!r} can be reached from other machines and there is no API key; "
            "set --serve.api_key_file FILE, or --serve.allow_public to serve everybody"
        )
