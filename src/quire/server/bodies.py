"""Bodies of requests, read within bounds: of bytes, of time, of structure, and of all that are under way together.

A large body is parsed and checked on a thread, where it cannot hold up the event loop, and only while there is room.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from quire.server.errors import ApiError, ClientDisconnected, api_error, bad_request
from quire.server.structure import check_structure

Body = TypeVar("Body", bound=BaseModel)

LARGE_BYTES = 32 * 1024
"""A smaller body is parsed and checked on the event loop: 5 ms at worst, and it can reach no bound of structure."""

NUM_LARGEST = 4
"""How many bodies of the largest size may be in memory at once: 32 MiB by default. Smaller ones share that room."""

BODY_SECONDS = 30.0
BODY_RATE = 64 * 1024
"""A large body may take BODY_SECONDS, and a second for each BODY_RATE bytes that came: nobody holds room for long."""

ROOM_SECONDS = 10.0
"""How long a large body waits for room before it is answered 503. A full room is read and parsed within 2 s."""


class Bodies:
    """Reads the bodies of one server.

    max_bytes     a larger body is answered 413
    body_seconds  see BODY_SECONDS
    room_seconds  see ROOM_SECONDS
    """

    def __init__(self, max_bytes: int, body_seconds: float = BODY_SECONDS, room_seconds: float = ROOM_SECONDS) -> None:
        self.max_bytes = max_bytes
        self.body_seconds = body_seconds
        self.room_seconds = room_seconds
        self.room = Room(NUM_LARGEST * max_bytes)
        # One at a time: a parsed body may take eight times the memory of its text.
        self._parsing = ThreadPoolExecutor(1, "quire-bodies")

    @asynccontextmanager
    async def read(self, request: Request, model: type[Body]) -> AsyncIterator[Body]:
        """The body of `request`, parsed and checked, as a `model`. A large one keeps its room within the context.

        Strict: UTF-8 without lone surrogates, no NaN or Infinity, no more structure than `check_structure` lets
        through. Raises ApiError 413 as soon as the body is known to exceed the limit (before parsing, and whether or
        not a length was announced), 408 for one that comes too slowly, 503 if there is no room for it, 400 for
        everything that is not JSON or no `model`.
        """
        _check_kind(request)
        announced = _announced(request)
        if announced is not None and announced > self.max_bytes:
            raise self._too_large()
        taken = 0
        try:
            if announced is not None and announced > LARGE_BYTES:
                taken = await self._take(announced)
            body = bytearray()
            # A small body holds no room, and its connection ends it if it says nothing: it needs no timer of its own.
            is_small = announced is not None and announced <= LARGE_BYTES
            due = asyncio.get_running_loop().time() + self.body_seconds
            try:
                async with asyncio.timeout(None if is_small else self.body_seconds) as limit:
                    async for part in request.stream():
                        body += part
                        if len(body) > self.max_bytes:
                            raise self._too_large()
                        if len(body) > LARGE_BYTES and not taken:
                            taken = await self._take(self.max_bytes)
                        if not is_small:
                            limit.reschedule(due + len(body) / BODY_RATE)
            except ClientDisconnect as gone:
                raise ClientDisconnected from gone
            except TimeoutError as error:
                message = f"the body came slower than {BODY_RATE} bytes a second after {self.body_seconds:g} s"
                raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from error
            if len(body) <= LARGE_BYTES:
                parsed = _parse(body, model)
            else:
                run = asyncio.get_running_loop().run_in_executor
                parsed = await run(self._parsing, _check_and_parse, body, model)
            del body
            yield parsed
        finally:
            self.room.give(taken)

    async def _take(self, size: int) -> int:
        try:
            async with asyncio.timeout(self.room_seconds):
                await self.room.take(size)
        except TimeoutError as error:
            message = f"bodies of together {self.room.size} bytes are being read; try again"
            headers = {"Retry-After": "1", "Connection": "close"}
            raise ApiError(503, message, code="too_many_large_bodies", headers=headers) from error
        return size

    def _too_large(self) -> ApiError:
        message = f"the body exceeds {self.max_bytes} bytes, the limit set by serve.max_request_bytes"
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


class Room:
    """Bytes that are lent in the order of asking: a small demand never overtakes a large one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Wait until `size` bytes, at most all, are free, and take them."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append((size, mine))
        self._lend()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.cancelled():
                self._lend()  # those behind it may have waited for it alone
            else:
                self.give(size)
            raise

    def give(self, size: int) -> None:
        """Give `size` bytes back."""
        self.free += size
        self._lend()

    def _lend(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self.free):
            size, future = self._waiting.popleft()
            if not future.cancelled():
                self.free -= size
                future.set_result(None)


def _check_kind(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        # This also keeps web pages from posting to a server on the visitor's machine: browsers ask before sending this.
        raise bad_request(
            "the body must be JSON, with the header Content-Type: application/json", code="invalid_content_type"
        )


def _announced(request: Request) -> int | None:
    length = request.headers.get("content-length", "")
    return int(length[:20]) if length.isdecimal() else None


def _check_and_parse(body: bytearray, model: type[Body]) -> Body:
    check_structure(body)
    return _parse(body, model)


def _parse(body: bytearray, model: type[Body]) -> Body:
    """Raises ApiError; a ValidationError would keep all that was parsed as long as itself."""
    try:
        parsed = from_json(body, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from error
    try:
        return model.model_validate(parsed)
    except ValidationError as error:
        refusal = api_error(error)
    raise refusal
