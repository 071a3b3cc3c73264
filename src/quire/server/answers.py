"""Answers as JSON, in pieces: an answer of many log-probabilities must not hold up the event loop.

`json` encodes a value in one call, during which no other thread runs: 35 MB take half a second. Here lists are encoded
64 elements at a time, those of a prompt on a thread, those of generated tokens as they come. What several choices have
in common is encoded once and sent several times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import ApiError, bad_request, encode
from quire.server.shapes import Items

SLICE = 64
"""Elements of a list that are encoded in one call: with 20 alternatives each some 2 ms."""

FEW_SCORES = 2000
"""Log-probabilities of a prompt up to which they are encoded on the event loop, in some 3 ms."""

SENT_BYTES = 256 * 1024
"""Bytes that are handed to the connection at once; it says when it takes more."""

UNSENT_BYTES = 128 << 20
"""Bytes of answers with log-probabilities that may be made, or wait for their clients, together: three or four with as
many of prompts as there may be.
"""

UNCOUNTED_BYTES = 64 * 1024
"""The first bytes of each answer, which do not count: a thousand tokens without alternatives are never refused."""

Bytes = bytes | bytearray

# The answer, its choices, a choice, its log-probabilities: what lies deeper is encoded as a whole, or in slices.
_LEVELS = 4


def extend(part: bytearray, values: list[Any]) -> int:
    """Adds elements to those that are encoded already; returns how many bytes they take."""
    before = len(part)
    if values:
        part += b"," * bool(part) + encoded(values)
    return len(part) - before


def encoded(values: Iterable[Any]) -> bytes:
    """The elements of a list as JSON, without brackets; a few of an iterator's are there at a time."""
    if isinstance(values, list):
        return b",".join(_slices(values))
    return b",".join(map(_bytes, values))


def pieces(value: Any) -> Iterator[bytes]:
    """The JSON text of an answer in parts of at most SENT_BYTES, made one at a time."""
    small = bytearray()
    for piece in _pieces(value, 0):
        if len(small) + len(piece) > SENT_BYTES and small:
            yield bytes(small)
            small.clear()
        if len(piece) <= SENT_BYTES:
            small += piece
        else:
            view = memoryview(piece)
            yield from (bytes(view[begin : begin + SENT_BYTES]) for begin in range(0, len(piece), SENT_BYTES))
    if small:
        yield bytes(small)


def _pieces(value: Any, level: int) -> Iterator[Bytes]:
    if isinstance(value, Items):
        yield b"["
        for number, part in enumerate(value.parts):
            yield b"," * bool(number)
            yield part
        yield b"]"
    elif isinstance(value, dict) and level < _LEVELS:
        yield b"{"
        for number, (name, each) in enumerate(value.items()):
            yield b"," * bool(number) + _bytes(name) + b":"
            yield from _pieces(each, level + 1)
        yield b"}"
    elif isinstance(value, list) and level < _LEVELS:
        yield b"["
        for number, each in enumerate(value):
            yield b"," * bool(number)
            yield from _pieces(each, level + 1)
        yield b"]"
    elif isinstance(value, list):
        yield from (b"[", encoded(value), b"]")
    else:
        yield _bytes(value)


def _slices(values: list[Any]) -> Iterator[bytes]:
    for begin in range(0, len(values), SLICE):
        yield _bytes(values[begin : begin + SLICE])[1:-1]


def _bytes(value: Any) -> bytes:
    return encode(value).encode(errors="backslashreplace")


class Unsent:
    """Bytes of answers with log-probabilities that are being made or sent: long ones, and clients that do not read,
    must not fill the memory.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Counts the bytes of one answer within the context: the function that it gives is told of more, or of fewer.
        It raises ApiError 503 if others leave no room, 400 for more than one answer may have.
        """
        size = counted = 0

        def grow(more: int) -> None:
            nonlocal size, counted
            if size + more > UNSENT_BYTES:
                message = (
                    f"the answer's log-probabilities take more than {UNSENT_BYTES} bytes; ask for fewer, or stream it"
                )
                raise bad_request(message, "logprobs", "answer_too_large")
            added = max(0, size + more - UNCOUNTED_BYTES) - counted
            if added > 0 and self.num_bytes + added > UNSENT_BYTES:
                message = f"large answers of together {self.num_bytes} bytes are being made or sent; try again"
                raise ApiError(503, message, code="too_many_large_answers", headers={"Retry-After": "1"})
            size += more
            counted += added
            self.num_bytes += added

        try:
            yield grow
        finally:
            self.num_bytes -= counted


class ScoredAnswer(Response):
    """A JSON answer with `Items` in it, sent as fast as the client takes it.

    held  what is closed once it is sent, or will not be: the count of its bytes
    """

    media_type = "application/json"

    def __init__(self, content: Mapping[str, Any], held: ExitStack) -> None:
        super().__init__(headers={"Content-Length": str(sum(map(len, _pieces(content, 0))))})
        self.content = content
        # Also where nobody is left to send it to.
        self._close = weakref.finalize(self, held.close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer (ASGI)."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for part in pieces(self.content):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
