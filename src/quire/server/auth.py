"""Who may ask: API keys from a file, and where a server without keys may listen."""

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
from quire.server.errors import ApiError
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
        name = _name(host)
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """A Host header without its port, in small letters; empty if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Names:
    """The names under which a server without keys answers on the machine's own addresses: loopback ones, and its own.

    A page on the web can send its visitor's browser to this machine: its name, which it made to lead here, is in the
    Host header then, and the browser takes what comes back for the page's own. Whoever sends no Host is no browser.
    A key, which no page has, makes the check needless, and a public server answers to any name.

    host    serve.host
    is_any  whether every name is right
    """

    def __init__(self, host: str, is_any: bool) -> None:
        self.own = host.lower()
        self.is_any = is_any

    @classmethod
    def of(cls, host: str, keys: ApiKeys, allow_public: bool) -> Names:
        """The names of a server with these settings."""
        return cls(host, bool(keys.keys) or allow_public or not is_loopback(host))

    def check(self, hosts: Sequence[str]) -> None:
        """Raises 403 for Host headers that name another machine."""
        if self.is_any or all(names_loopback(host) or _name(host) == self.own for host in hosts):
            return
        raise ApiError(
            403,
            "without API keys this server answers only who asks for this machine by its own name, such as 127.0.0.1 or"
            f" localhost, not {hosts[-1][:100]!r}; set serve.api_key_file, or serve.allow_public to serve everybody",
            code="host_not_allowed",
        )


def check_exposure(host: str, keys: ApiKeys, allow_public: bool) -> None:
    """Raises ConfigError for a server that others can reach and nobody has closed."""
    if not keys.keys and not allow_public and not is_loopback(host):
        raise ConfigError(
            f"serve.host {host!r} can be reached from other machines and there is no API key; "
            "set --serve.api_key_file FILE, or --serve.allow_public to serve everybody"
        )
