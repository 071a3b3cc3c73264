"""Reads request bodies within limits: bytes, time and structure of one body, and the memory of all large bodies, as
text and parsed.

A thread parses and checks large bodies, so that they do not block the event loop. They wait until there is room.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from quire.errors import shown
from quire.server.byte_limiter import ByteLimiter
from quire.server.errors import ApiError, ClientDisconnected, api_error, bad_request
from quire.server.json_complexity import (
    MAX_DEPTH,
    MAX_VALUES,
    JsonComplexity,
    TooComplexError,
    check_complexity,
    too_complex,
)
from quire.server.memory_trimmer import MemoryTrimmer
from quire.server.start_throttle import StartThrottle

Body = TypeVar("Body", bound=BaseModel)

LARGE_BYTES = 32 * 1024
"""A body up to this size is parsed and checked on the event loop. This takes 5 ms at worst, and such a body cannot
exceed a limit of structure."""

DENSE_BYTES = 64 * 1024
"""Parsed size from which a small body takes room like a large one. 32 KiB of text take less; 900 messages of one letter
take 600 KB, so that a thousand such conversations would wait for the process that renders them."""

NUM_LARGEST = 4
"""The room for large bodies, in bodies of the maximum size: 32 MiB by default. If all bodies wait for each other, one
more body may exceed the room. A waiting body also holds the part for which it waits."""

PARSED_BYTES = 40 * MAX_VALUES
"""The room for large bodies once parsed, by `JsonComplexity.num_bytes`: one prompt of a million token ids, two or three
conversations of 12,000 calls, or thousands of ordinary conversations."""

BODY_SECONDS = 30.0
BODY_RATE = 64 * 1024
"""A large body may take BODY_SECONDS plus one second per BODY_RATE bytes received, so that it holds room only
briefly.
"""

CONTESTED_SECONDS = 1.0
CONTESTED_RATE = 256 * 1024
"""While others wait for room, a large body must arrive at CONTESTED_RATE bytes per second after CONTESTED_SECONDS."""

ROOM_SECONDS = 10.0
"""Total time for which a large body waits for room; then it gets 503. Reading and parsing a full room takes 2 s."""

MAX_WAITING = 128
"""Maximum number of large bodies that wait for room; further ones get 503. A connection may have read 320 KiB ahead."""

SWEEP_SECONDS = 0.25
"""Interval between checks for slow bodies while a body waits for room."""


class BodyReader:
    """Reads the bodies of one server.

    max_bytes     a larger body is answered 413
    body_seconds  see BODY_SECONDS
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.start_throttle = StartThrottle()
        self.body_seconds = BODY_SECONDS
        self.memory_limiter = BodyMemoryLimiter(NUM_LARGEST * max_bytes, ROOM_SECONDS)
        self.parsed = ByteLimiter(PARSED_BYTES)
        self.memory_trimmer = MemoryTrimmer()
        # One at a time, so that a body that is being checked has the other core.
        self._parsing = ThreadPoolExecutor(1, "quire-bodies")

    @asynccontextmanager
    async def read(self, request: Request, model: type[Body]) -> AsyncIterator[Body]:
        """Yields the body of `request`, parsed and checked, as a `model`. A large body keeps its room within the
        context.

        The body must be UTF-8 without lone surrogates, without NaN or Infinity, and within the limits of `structure`,
        together with its strings that are parsed as JSON. Raises ApiError 413 as soon as the body exceeds the limit
        (before parsing, with or without an announced length), 408 if it arrives too slowly, 503 if there is no room for
        it or for it once parsed, 415 if it is compressed, and 400 if it is not JSON or not a `model`.
        """
        _check_kind(request)
        length = request.headers.get("content-length", "")
        announced = int(length[:20]) if length.isdecimal() else None
        if announced is not None and announced > self.max_bytes:
            raise self._too_large()
        body = bytearray()
        # A small body holds no room, and the connection ends it if no byte arrives, so it needs no timer here.
        is_small = announced is not None and announced <= LARGE_BYTES
        due = asyncio.get_running_loop().time() + self.body_seconds
        with self.memory_limiter.body() as arriving:
            try:
                async with asyncio.timeout(None if is_small else self.body_seconds) as limit:
                    arriving.limit = limit
                    async for part in request.stream():
                        body += part
                        if len(body) > self.max_bytes:
                            raise self._too_large()
                        if len(body) > LARGE_BYTES:
                            await self.memory_limiter.grow(arriving, len(body))
                        if not is_small:
                            limit.reschedule(due + arriving.waited + len(body) / BODY_RATE)
            except ClientDisconnect as gone:
                raise ClientDisconnected from gone
            except TimeoutError as error:
                message = (
                    f"the body arrived more slowly than {BODY_RATE} bytes a second after {self.body_seconds:g} s, or"
                    f" than {CONTESTED_RATE} while others waited for room"
                )
                raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from error
            self.memory_limiter.mark_complete(arriving)
            if len(body) <= LARGE_BYTES:
                size = _most_bytes(body)
                try:
                    async with self._parsed_room(size if size > DENSE_BYTES else 0):
                        await self.start_throttle.acquire()
                        yield _parse(body, model)
                finally:
                    self.memory_trimmer.note_freed(size)
                return
            run = asyncio.get_running_loop().run_in_executor
            size = len(body)
            try:
                structure = await run(self._parsing, check_complexity, body)
                size = max(size, structure.num_bytes)
                async with self._parsed_room(structure.num_bytes):
                    parsed = await run(self._parsing, _parse, body, model, structure)
                    del body
                    try:
                        yield parsed
                    except BaseException:
                        # The error's traceback has frames with the body, and gets its answer after the room is free.
                        parsed.__dict__.clear()
                        raise
            finally:
                self.memory_trimmer.note_freed(size)

    @asynccontextmanager
    async def _parsed_room(self, size: int) -> AsyncIterator[None]:
        """Holds room for a parsed body within the context. Raises ApiError 503 if it waits too long."""
        async with AsyncExitStack() as held:
            try:
                await held.enter_async_context(self.parsed.hold(size, self.memory_limiter.seconds))
            except TimeoutError:
                used = self.parsed.size - self.parsed.free
                raise _full(f"parsed request bodies of {used} bytes in total are in use") from None
            yield

    def _too_large(self) -> ApiError:
        message = f"the body exceeds {self.max_bytes} bytes, the limit set by serve.max_request_bytes"
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


@dataclass(eq=False)
class IncomingBody:
    """A large body that is arriving.

    begun   time of its start
    limit   its timeout; rescheduling it to now ends the body
    size    bytes that have room
    waited  seconds spent waiting for room; while it waits, minus the time at which the current wait began
    """

    begun: float
    limit: asyncio.Timeout | None = None
    size: int = 0
    waited: float = 0.0


class BodyMemoryLimiter:
    """Limits the memory of large bodies, received and in use, over all connections.

    A body takes room for received bytes, not for announced ones, so connections that send little block nobody. If the
    room is full, bodies wait in line. Meanwhile bodies slower than CONTESTED_RATE are ended. If no complete body will
    release room, the oldest one continues without. So one body may exceed `size`.
    """

    def __init__(self, size: int, seconds: float) -> None:
        self.size = size
        self.seconds = seconds
        self.held = 0
        self._unfinished: dict[IncomingBody, None] = {}  # the oldest first
        self._waiting: dict[IncomingBody, tuple[int, asyncio.Future[None]]] = {}  # in order of waiting
        self._num_whole = 0
        self._is_watched = False

    @contextmanager
    def body(self) -> Iterator[IncomingBody]:
        """Yields a body, which holds its room within the context."""
        body = IncomingBody(asyncio.get_running_loop().time())
        try:
            yield body
        finally:
            self.held -= body.size
            if body in self._unfinished:
                del self._unfinished[body]
            elif body.size:
                self._num_whole -= 1
            self._lend()

    async def grow(self, body: IncomingBody, size: int) -> None:
        """Waits until there is room for `size` bytes of a body; its timeout pauses meanwhile. Raises ApiError 503 if
        all its waits together take too long, or if too many bodies wait.
        """
        if size <= body.size:
            return
        self._unfinished.setdefault(body)
        if not self._waiting and self._fits(body, size):
            self._take(body, size)
            return
        if len(self._waiting) >= MAX_WAITING:
            raise self._full()
        lent = asyncio.get_running_loop().create_future()
        self._waiting[body] = size, lent
        body.waited -= asyncio.get_running_loop().time()
        if body.limit is not None:
            body.limit.reschedule(None)
        self._lend()
        self._watch()
        try:
            async with asyncio.timeout_at(None if lent.done() else self.seconds - body.waited):
                await lent
        except TimeoutError:
            raise self._full() from None
        finally:
            if body in self._waiting:
                self._end_wait(body)
                self._lend()  # later bodies may have waited only for this one

    def mark_complete(self, body: IncomingBody) -> None:
        """Marks the body as complete. It keeps its room until its context ends."""
        if body in self._unfinished:
            del self._unfinished[body]
            self._num_whole += 1

    def _end_wait(self, body: IncomingBody) -> tuple[int, asyncio.Future[None]]:
        body.waited += asyncio.get_running_loop().time()
        return self._waiting.pop(body)

    def _fits(self, body: IncomingBody, size: int) -> bool:
        return self.held + size - body.size <= self.size

    def _take(self, body: IncomingBody, size: int) -> None:
        self.held += size - body.size
        body.size = size

    def _lend(self) -> None:
        """Gives room to the bodies at the front of the line."""
        while self._waiting:
            body = next(iter(self._waiting))
            if not self._fits(body, self._waiting[body][0]):
                body = next(iter(self._unfinished))
                if self._num_whole or body not in self._waiting:
                    return
            size, lent = self._end_wait(body)
            if not lent.done():
                self._take(body, size)
                lent.set_result(None)

    def _watch(self) -> None:
        """Checks for slow bodies every SWEEP_SECONDS while others wait."""
        if self._waiting and not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        self._is_watched = False
        if self._waiting:
            self._end_slow(asyncio.get_running_loop().time())
        self._watch()

    def _end_slow(self, now: float) -> None:
        for body in self._unfinished:
            seconds = now - body.begun - body.waited
            is_slow = seconds > CONTESTED_SECONDS and body.size < seconds * CONTESTED_RATE
            if is_slow and body not in self._waiting and body.limit is not None and not body.limit.expired():
                body.limit.reschedule(now)

    def _full(self) -> ApiError:
        return _full(f"request bodies with {self.held} bytes in total are being read")


def _full(reason: str) -> ApiError:
    headers = {"Retry-After": "1", "Connection": "close"}
    return ApiError(503, f"{reason}; try again", code="too_many_large_bodies", headers=headers)


def _check_kind(request: Request) -> None:
    encoding = ", ".join(request.headers.getlist("content-encoding"))
    if any(each.strip().lower() not in ("", "identity") for each in encoding.split(",")):
        message = f"Content-Encoding is {shown(encoding)}; the server does not decode bodies; send the JSON itself"
        raise ApiError(415, message, code="unsupported_content_encoding")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        # This also stops web pages from posting to a server on the visitor's machine: browsers first ask the server.
        raise bad_request(
            "the body must be JSON, with the header Content-Type: application/json", code="invalid_content_type"
        )


def _most_bytes(body: bytearray) -> int:
    """Upper bound of the memory of a small body once parsed; see `JsonComplexity.num_bytes`. Counts JSON-like text
    within its strings, too.
    """
    structure = JsonComplexity()
    structure.values, structure.quotes, structure.names = body.count(b","), body.count(b'"'), body.count(b":")
    structure.containers, structure.chars = body.count(b"[") + body.count(b"{"), len(body)
    return structure.num_bytes


def _parse(body: bytearray, model: type[Body], structure: JsonComplexity | None = None) -> Body:
    """Parses the body. Raises ApiError and not ValidationError, which would keep the parsed body alive.

    structure  counts of the body, to which its strings with JSON add theirs; None: a small body, which is not counted
    """
    try:
        parsed = from_json(body, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise too_complex(TooComplexError("levels", MAX_DEPTH)) from error
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from error
    try:
        return model.model_validate(parsed, context=structure or JsonComplexity())
    except ValidationError as error:
        refusal = api_error(error)
    try:
        raise refusal
    finally:
        # Its traceback has this frame, which must keep alive neither the body nor the error itself.
        del refusal, parsed, body
