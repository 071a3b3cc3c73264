"""How a request marks the end of its body, and how an answer does so for a client of HTTP/1.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from httptools import HttpRequestParser
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from quire.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send


def check_codings(headers: list[tuple[bytes, bytes]], version: str) -> None:
    """Raises ApiError unless the body of a request is plain, or only chunked.

    RFC 9112, sections 6.1 and 6.3: 501 for an unknown coding, 400 for a body without an end. The parser passes the
    bytes of `gzip, chunked` on as if they were the body.
    """
    values = [value.decode("latin-1") for name, value in headers if name == b"transfer-encoding"]
    if not values:
        return
    codings = [coding.strip().lower() for coding in ",".join(values).split(",")]
    shown = repr(", ".join(codings)[:100])
    if version == "1.0":
        message = f"HTTP/1.0 has no Transfer-Encoding, and this request has {shown}; send a Content-Length"
        raise bad_request(message, code="invalid_transfer_encoding")
    if codings[-1] != "chunked" or codings.count("chunked") > 1:
        message = f"Transfer-Encoding is {shown}; the body has no end unless it is 'chunked', once and last"
        raise bad_request(message, code="invalid_transfer_encoding")
    if len(codings) > 1:
        message = f"Transfer-Encoding is {shown}; only 'chunked' alone is understood"
        raise ApiError(501, message, code="unsupported_transfer_encoding")


def parser_of_body(receiver: object, headers: list[tuple[bytes, bytes]], version: str) -> HttpRequestParser | None:
    """A parser that goes on behind the head of a request; None if the request has no body.

    httptools ends a request at its head if it offers an upgrade, even if a body follows.

    receiver  is called for the body and for all requests behind it
    headers   of the request, with names in lower case
    """
    framing = [(name, value) for name, value in headers if name in (b"content-length", b"transfer-encoding")]
    if all(value.strip(b"0 \t") == b"" for _, value in framing):
        return None
    skipped = _AfterHead(receiver)
    parser = HttpRequestParser(skipped)
    with contextlib.suppress(AttributeError):  # uvicorn does the same, for older releases of httptools
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    lines = [b"%s: %s\r\n" % each for each in framing]
    parser.feed_data(b"".join([f"POST / HTTP/{version}\r\n".encode(), *lines, b"\r\n"]))
    skipped.is_head = False
    return parser


class _AfterHead:
    """Passes on what a parser finds behind a head.

    is_head  whether the parser reads that head
    """

    def __init__(self, receiver: object) -> None:
        self._receiver = receiver
        self.is_head = True

    def __getattr__(self, name: str) -> Callable[..., None]:
        found: Callable[..., None] = getattr(self._receiver, name)
        return lambda *values: None if self.is_head else found(*values)


def is_old(cycle: RequestResponseCycle) -> bool:
    """Whether a request uses HTTP/1.0."""
    return cycle.scope["http_version"] == "1.0"


def unchunked(app: Any, cycle: RequestResponseCycle) -> Any:
    """Wraps an application. The end of the connection ends an answer without a length: uvicorn would send it in chunks,
    which HTTP/1.0 does not have.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_endless = False

        async def send_plain(message: Message) -> None:
            nonlocal is_endless
            if message["type"] == "http.response.start":
                is_endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_endless:
                    cycle.chunked_encoding = False
            elif is_endless:
                # uvicorn compares the body with this.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer
