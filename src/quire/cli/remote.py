"""Calls a running server over HTTP, for commands that show or change its state. Loads no model."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from quire.cli.shared import DEFAULT_URL, KEY_VARIABLE
from quire.errors import ConfigError, QuireError

TIMEOUT_SECONDS = 35.0
"""Longer than the 30 s for which the server waits for its engine."""
MAX_ANSWER_BYTES = 256 * 2**20

OWN_REFUSALS = ("no_cluster", "instance_not_found")
"""Codes of a 404 from an existing endpoint."""

_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/\S*)?")


def read_key(file: Path | None) -> str | None:
    """The first key of the file, or the key in the environment, or None. Raises ConfigError, without showing the key,
    if a header cannot carry it.
    """
    if file is not None:
        from quire.server.auth import ApiKeys

        return ApiKeys.from_file(file).keys[0].decode()
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{KEY_VARIABLE} has spaces or characters that an HTTP header cannot carry")
    return key or None


def call_server(
    url: str,
    path: str,
    key: str | None,
    flag: str,
    holds: str,
    body: Mapping[str, Any] | None = None,
    seconds: float = TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """The answer of a server, an object, to GET, or to POST with a body. Raises ConfigError for an invalid URL, and
    QuireError if no server answers, if it refuses, or if it is not Quire.

    path     path of the endpoint; the URL may also end with it, or with `/v1`
    flag     flag that had the URL
    holds    name of a list that the answer must have
    seconds  timeout of the answer
    """
    shown = _base(f"http://{url}" if _HOST_AND_PORT.fullmatch(url) else url, path, flag)
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"{shown}{path}", data, {"Accept": "application/json"})
    if data is not None:
        request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    # No redirects: they would send the key to another server. No proxies for addresses of this machine.
    local = urlsplit(shown).hostname in ("127.0.0.1", "::1", "localhost")
    opener = build_opener(_NoRedirect, *([ProxyHandler({})] if local else []))
    try:
        with opener.open(request, timeout=seconds) as answer:
            found = answer.read(MAX_ANSWER_BYTES + 1)
        result = json.loads(found) if len(found) <= MAX_ANSWER_BYTES else None
    except HTTPError as error:
        with error:
            raise QuireError(_refusal(shown, path, error, key)) from error
    except URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise QuireError(f"no server answers at {shown} ({plain(str(reason))[:200]})") from error
    except TimeoutError as error:
        raise QuireError(f"{shown} does not answer within {seconds:.0f} s") from error
    except Exception as error:  # http.client and json raise many types for invalid HTTP or JSON
        raise _not_quire(shown) from error
    if not (isinstance(result, dict) and isinstance(result.get(holds), list)):
        raise _not_quire(shown)
    return result


class _NoRedirect(HTTPRedirectHandler):
    """Treats a redirect as an error."""

    def redirect_request(self, *_: Any) -> None:
        """Follows no redirect."""


def _base(url: str, path: str, flag: str) -> str:
    """The server's address, without `/v1` or the path at the end of `url`."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known or not (url.isascii() and url.isprintable()) or " " in url or "@" in parts.netloc:
        raise ConfigError(f"{flag}: {plain(url)[:200]!r} is not a server address such as {DEFAULT_URL}")
    base = parts.path.rstrip("/").removesuffix(path).removesuffix("/v1")
    return urlunsplit((parts.scheme, parts.netloc, base, "", ""))


def _refusal(shown: str, path: str, error: HTTPError, key: str | None) -> str:
    try:
        said = json.loads(error.read(2**16))["error"]
        message, code = said["message"], said.get("code")
    except Exception:
        return str(_not_quire(shown))
    if error.code == 401:
        return f"{shown} " + (
            "does not accept this API key"
            if key is not None
            else f"needs an API key: give --api-key-file FILE, or set {KEY_VARIABLE} in the environment"
        )
    if error.code == 404 and code not in OWN_REFUSALS:
        return f"{shown} has no {path}: an older Quire, or another server"
    return f"{shown} refuses ({error.code}): {plain(str(message))[:300]}"


def _not_quire(shown: str) -> QuireError:
    return QuireError(f"the server at {shown} is not Quire")


@contextlib.contextmanager
def known_format() -> Iterator[None]:
    """Raises QuireError if a server's answer has an unknown format."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise QuireError("the server's answer has an unknown format; is it another version of Quire?") from error


def plain(text: str) -> str:
    """The text on one line, without terminal control characters."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
