"""Answers as JSON, in pieces, so that an answer with many log-probabilities does not block the event loop.

`json` encodes a value in one call, during which no other thread runs: 35 MB take half a second. This module encodes
lists 64 elements at a time: those of a prompt on a thread, those of generated tokens as they arrive. Parts that several
choices share are encoded once and sent several times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import ApiError, bad_request, json_bytes
from quire.server.shapes import EncodedList

SLICE = 64
"""List elements encoded per call: with 20 alternatives each they take about 2 ms."""

FEW_NUMBERS = 2000
"""Up to this many log-probabilities are encoded on the event loop, in about 3 ms. Other numbers take less."""

SENT_BYTES = 256 * 1024
"""Bytes passed to the connection at once. It signals when it takes more."""

UNSENT_BYTES = 128 << 20
"""Total bytes of answers with log-probabilities or embeddings that are being built or wait for their clients: three or
four answers with the maximum number of prompt log-probabilities."""

UNCOUNTED_BYTES = 64 * 1024
"""The first bytes of an answer do not count, so that a thousand tokens without alternatives are never refused."""

Bytes = bytes | bytearray

# Levels of nesting that are encoded in pieces: as deep as the parts of an item of a response in an event.
# Log-probabilities lie deeper and are encoded in slices.
_LEVELS = 6


def extend(part: bytearray, values: list[Any]) -> int:
    """Appends encoded elements to `part`. Returns their number of bytes."""
    before = len(part)
    if values:
        part += b"," * bool(part) + encoded(values)
    return len(part) - before


def encoded(values: Iterable[Any]) -> bytes:
    """The elements of a list as JSON, without brackets. Consumes an iterator element by element."""
    if isinstance(values, list):
        return b",".join(_slices(values))
    return b",".join(map(json_bytes, values))


def pieces(value: Any) -> Iterator[bytes]:
    """Yields the JSON text of an answer in parts of at most SENT_BYTES."""
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
    if isinstance(value, EncodedList):
        yield b"["
        for number, part in enumerate(value.parts):
            yield b"," * bool(number)
            yield part
        yield b"]"
    elif isinstance(value, dict) and level < _LEVELS:
        yield b"{"
        for number, (name, each) in enumerate(value.items()):
            yield b"," * bool(number) + json_bytes(name) + b":"
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
        yield json_bytes(value)


def _slices(values: list[Any]) -> Iterator[bytes]:
    for begin in range(0, len(values), SLICE):
        yield json_bytes(values[begin : begin + SLICE])[1:-1]


class AnswerByteLimiter:
    """Limits the bytes of large answers that are being built or sent, so that they and clients that do not read cannot
    fill the memory.

    released  called with the bytes of each answer that has been sent or dropped
    """

    def __init__(self, released: Callable[[int], None] = lambda num_bytes: None) -> None:
        self.num_bytes = 0
        self._released = released

    @contextmanager
    def hold(self, what: str = "log-probabilities", param: str = "logprobs") -> Iterator[Callable[[int], None]]:
        """Counts the bytes of one answer within the context. Yields a function that adds (or subtracts) bytes. It
        raises ApiError 503 if other answers leave no room, and 400 if this answer exceeds the limit alone.

        what, param  for that error: the content that makes the answer large, and the parameter that requests it
        """
        size = counted = 0

        def grow(more: int) -> None:
            nonlocal size, counted
            if size + more > UNSENT_BYTES:
                raise bad_request(
                    f"the answer's {what} take more than {UNSENT_BYTES} bytes; ask for fewer in one request",
                    param,
                    "answer_too_large",
                )
            added = max(0, size + more - UNCOUNTED_BYTES) - counted
            if added > 0 and self.num_bytes + added > UNSENT_BYTES:
                message = f"large answers with {self.num_bytes} bytes in total are being built or sent; try again"
                raise ApiError(503, message, code="too_many_large_answers", headers={"Retry-After": "1"})
            size += more
            counted += added
            self.num_bytes += added

        try:
            yield grow
        finally:
            self.num_bytes -= counted
            self._released(size)


class LargeJsonResponse(Response):
    """A JSON answer that contains `EncodedList`, sent as fast as the client reads.

    held  closed when the answer has been sent or dropped: the count of its bytes
    """

    media_type = "application/json"

    def __init__(self, content: Mapping[str, Any], held: ExitStack) -> None:
        super().__init__(headers={"Content-Length": str(sum(map(len, _pieces(content, 0))))})
        self.content = content
        # Also if the client has disconnected before the answer is sent.
        self._close = weakref.finalize(self, held.close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer (ASGI)."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for part in pieces(self.content):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
