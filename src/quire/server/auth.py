"""Who may ask: API keys from a file, and where a server without keys may listen."""

from __future__ import annotations

import hmac
import logging
import socket
import stat
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from quire.errors import ConfigError
from quire.server.tenants import tenant_of

log = logging.getLogger("quire.server")


class ApiKeys:
    """The accepted keys; none means that everybody is accepted.

    tenants  a name for each key: a digest, never the key
    """

    def __init__(self, keys: list[str]) -> None:
        self.keys = [key.encode() for key in keys]
        self.tenants = [tenant_of(key) for key in self.keys]

    @classmethod
    def from_file(cls, path: str | Path | None) -> ApiKeys:
        """One key per line; empty lines and lines that begin with # do not count. Raises ConfigError without a key."""
        if path is None:
            return cls([])
        try:
            text = Path(path).read_text(encoding="utf-8")
            mode = Path(path).stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys of serve.api_key_file: {error}") from error
        keys = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        if not keys:
            raise ConfigError(f"serve.api_key_file {path} holds no key; write one key per line")
        for number, key in enumerate(keys, 1):
            if not (key.isascii() and key.isprintable() and " " not in key):
                raise ConfigError(f"key {number} of {path} holds blanks or characters that no HTTP header can carry")
        if mode & stat.S_IROTH:
            log.warning("API keys in %s are readable by every user of this machine; chmod 600 it", path)
        return cls(keys)

    def tenant(self, authorization: bytes) -> str | None:
        """Whose key the Authorization header carries: None if it carries none, the empty name if none is asked for. A
        wrong key takes the same time wherever it differs.
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
        raise ConfigError(f"serve.host {host!r} is no address of this machine: {error}") from error
    return all(ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def names_loopback(host: str) -> bool:
    """Whether a Host header names this machine by itself: then no page of another site sent the request under a name
    that was made to lead here.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, keys: ApiKeys, allow_public: bool) -> None:
    """Raises ConfigError for a server that others can reach and nobody has closed."""
    if not keys.keys and not allow_public and not is_loopback(host):
        raise ConfigError(
            f"serve.host {host!r} can be reached from other machines and there is no API key; "
            "set --serve.api_key_file FILE, or --serve.allow_public to serve everybody"
        )
