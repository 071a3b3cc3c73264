"""Sending answers: server-sent events, and cancellation of work when the client disconnects.

Knows HTTP and asyncio; nothing of the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import ApiError, ClientDisconnected, api_error, json_bytes

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

PING = b": ping\n\n"
"""A comment: clients of server-sent events ignore it."""


def sse_event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(data) + b"\n\n"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, cancels `work`, waits for it and raises
    ClientDisconnected.

    The body must have been read, so that the next message of `receive` is the disconnect.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        disconnected.cancel()
        task.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events, sent while they are generated.

    `events` yields events as bytes, a large one in parts. Nothing, not even the headers, is sent before the first
    event or comment, so an error before it becomes an ordinary error response with its own status code. A later error
    becomes an error event and ends the stream without [DONE]. `events` is always closed, and at once when the client
    disconnects.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], ping_seconds: float, failed: Callable[[ApiError], bytes]
    ) -> None:
        """
        ping_seconds  time without an event after which a comment is sent; 0: no comments
        failed        makes an error event
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events = events
        self.ping_seconds = ping_seconds
        self.failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream (ASGI)."""
        await unless_disconnected(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send, self.raw_headers)
        pinging = asyncio.ensure_future(writer.ping(self.ping_seconds)) if self.ping_seconds else None
        try:
            async with aclosing(self.events) as events:
                try:
                    async for data in events:
                        await writer.write(data)
                except Exception as error:
                    answer = api_error(error)
                    await _cancelled(pinging)
                    if not writer.is_started:
                        await answer.response()(scope, receive, send)
                        return
                    await writer.write(self.failed(answer))
        finally:
            await _cancelled(pinging)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Writer:
    """Sends the events of a stream, and comments between them. The first of them starts the response."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._headers = send, headers
        self._lock = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._wrote = self._clock()
        self._is_within_event = False
        self.is_started = False

    async def write(self, data: bytes) -> None:
        """Sends an event, or a part of one."""
        async with self._lock:
            if not self.is_started:
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                self.is_started = True
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._is_within_event = not data.endswith(b"\n\n")
            self._wrote = self._clock()

    async def ping(self, seconds: float) -> None:
        """Sends a comment whenever nothing was sent for some seconds, until cancelled."""
        while True:
            if (wait := self._wrote + seconds - self._clock()) > 0:
                await asyncio.sleep(wait)
            elif self._is_within_event or self._lock.locked():  # a client that does not read needs no comment
                await asyncio.sleep(seconds)
            else:
                await self.write(PING)


async def _cancelled(task: asyncio.Future[None] | None) -> None:
    """Ends a task."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def merge(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields the items of all `streams` with the index of their stream, in order of arrival. The first error ends it.

    Always closes all streams.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return

    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def follow(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    arrived.put_nowait((index, item))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.ensure_future(follow(index, stream)) for index, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            news = await arrived.get()
            if news is None:
                running -= 1
            elif isinstance(news, Exception):
                raise news
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
