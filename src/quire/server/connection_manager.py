"""The connections of one server: limits of each, their number, and which one is closed for a new one."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from quire.server.connection import ConnectionState, HttpConnection
from quire.server.disconnect_probe import has_ended
from quire.server.errors import ApiError
from quire.server.start_throttle import StartThrottle

log = logging.getLogger("quire")


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of the connections of one server, in bytes and seconds."""

    head_bytes: int = 32 * 1024
    """Size of request line, headers, trailers and chunk sizes of one request together. Browsers with many cookies send
    8 KiB; proxies and tracing add 2. The parser and the list of headers take four times these bytes."""
    framing: int = 8
    """Additional bytes of chunk sizes per byte of a body. A client that writes single characters sends five,
    `1\\r\\nx\\r\\n`. Without this, head_bytes would end honest bodies with small chunks."""
    head_seconds: float = 10.0
    """Time from the first byte of a head, or from the start of the connection, to the end of the head."""
    body_seconds: float = 30.0
    """Pause within a body."""
    write_seconds: float = 30.0
    """Time in which the client reads no byte of the answer. Then it is dropped and its request aborted. Meanwhile the
    generated output waits in memory."""
    stalled_seconds: float = 5.0
    """Time in which the client reads no byte of the answer, after which its connection may be closed for a new one."""
    linger_seconds: float = 2.0
    """Time after the last answer of a connection in which incoming bytes are read and discarded. If the connection were
    closed at once, the kernel would reset it, and the client would often not see the answer."""
    sweep_seconds: float = 1.0
    """Interval between checks of all connections, and thus the precision of the times above."""
    pipelined: int = 16
    """Number of requests sent before their answers on one connection. Each takes 2 KB of objects; only load generators
    send any."""
    ahead_bytes: int = 16 << 20
    """Bytes of bodies, over all connections, that were read while earlier requests of the same connection are answered,
    or before the request had its turn. A connection reads 64 KiB ahead and what comes with them, up to 256 KiB: a
    thousand of them, 300 MB. Beyond this limit some are refused."""
    connections: int = 1024
    """Number of connections."""
    per_address: int | None = None
    """Number of connections from one address."""
    lingering: int = 64
    """Number of refused connections, beyond these, that may still read their answer. More would exhaust open files."""


class ConnectionManager:
    """The connections of one server, and their limits.

    refused         called with the status of each refusal, to count it
    start_throttle  of all requests
    freed           called with the bytes of requests that are answered or gone
    is_authorized   whether a request, by its ASGI scope, has the key that it needs
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        refused: Callable[[int], None],
        start_throttle: StartThrottle,
        freed: Callable[[int], None],
        is_authorized: Callable[[Scope], bool],
    ) -> None:
        self.limits = limits
        self.refused = refused
        self.start_throttle = start_throttle
        self.freed = freed
        self.is_authorized = is_authorized
        self.open: set[HttpConnection] = set()
        self.bytes_ahead = 0  # bytes; see ConnectionLimits.ahead_bytes
        self.addresses: Counter[str] = Counter()
        # Connections without a complete request, the oldest first.
        self.awaiting_request: dict[HttpConnection, None] = {}
        # Refused connections that stay open briefly, so that the client can read the answer; the oldest first.
        self.lingering: dict[HttpConnection, None] = {}

    async def watch(self) -> None:
        """Ends connections that take too long, until cancelled."""
        while True:
            await asyncio.sleep(self.limits.sweep_seconds)
            now = asyncio.get_running_loop().time()
            for connection in list(self.open):
                try:
                    self.check(connection, now)
                except Exception:  # keeps watching the others
                    log.exception("closing a connection, because checking it failed")
                    connection.abort()

    def check(self, connection: HttpConnection, now: float) -> None:
        """Ends a connection if it has waited too long."""
        limits = self.limits
        unsent = connection.transport.get_write_buffer_size()
        if unsent != connection.unsent or not unsent:
            connection.unsent, connection.unsent_since = unsent, now
        elif now - connection.unsent_since >= limits.write_seconds:
            connection.abort()
            return
        is_silent, is_paused = connection.is_silent(), connection.flow.read_paused
        # While the server reads nothing from the socket, asyncio does not report the end of the client's stream.
        if is_paused and not is_silent and has_ended(connection.transport.get_extra_info("socket").fileno()):
            connection.disconnect_probe.start()
        waited = now - connection.since
        if connection.is_closed and not unsent and waited >= limits.linger_seconds:
            connection.abort()
        elif connection.state is ConnectionState.HEAD and is_silent and waited >= limits.head_seconds:
            if connection.non_body_bytes:
                message = f"the request's head did not arrive within {limits.head_seconds:g} s"
                connection.refuse(ApiError(408, message, code="head_timeout"))
            else:
                connection.abort()  # it never sent a byte
        elif connection.waits_for_body and waited >= limits.body_seconds and not is_paused:
            message = f"no byte of the request's body arrived for {limits.body_seconds:g} s"
            connection.refuse(ApiError(408, message, code="body_timeout"))

    def _is_replaceable(self, connection: HttpConnection) -> bool:
        """Whether its client has read all that was sent, or has stopped reading."""
        stalled = connection.loop.time() - connection.unsent_since >= self.limits.stalled_seconds
        return stalled or not connection.transport.get_write_buffer_size()

    @property
    def is_full(self) -> bool:
        """Whether open files may run out."""
        return len(self.open) > self.limits.connections + self.limits.lingering

    def refuse_ahead(self, last: HttpConnection) -> None:
        """Refuses a connection because too many bytes were read ahead: the last one that read some, if it sends
        requests before the answers to earlier ones, as usual clients do not; otherwise the one that has read the most.
        """
        largest = last if last.pipeline else max(last, *self.open, key=lambda each: each.ahead.num_bytes)
        message = (
            f"bodies of {self.bytes_ahead} bytes wait for their turn or for the answers to earlier requests; try again"
        )
        largest.refuse(ApiError(503, message, code="too_many_large_bodies", headers={"Retry-After": "1"}))

    def close_unsent(self, error: ApiError) -> None:
        """Ends every connection with an incomplete request body. Answers `error`."""
        for connection in list(self.open):
            if connection.waits_for_body:
                connection.refuse(error)

    def add(self, connection: HttpConnection, address: str) -> None:
        """Adds a new connection. Raises ApiError if there is no place for it.

        If all places are taken, the oldest connection without a complete request is closed. So silent connections and
        slow bodies, however many, keep no client out. Refused connections take no place.
        """
        self.start_throttle.connection_arrived()
        self.open.add(connection)
        self.addresses[address] += 1
        if self.is_full and self.lingering:
            next(iter(self.lingering)).abort()
        most = self.limits.per_address
        if most is not None and self.addresses[address] > most:
            message = f"this address has {most} connections, its maximum (serve.max_connections_per_address)"
            raise ApiError(429, message, code="too_many_connections", headers={"Retry-After": "1"})
        if len(self.open) - len(self.lingering) > self.limits.connections:
            oldest = next(filter(self._is_replaceable, self.awaiting_request), None)
            if oldest is None:
                message = f"all {self.limits.connections} connections are in use (serve.max_connections)"
                raise ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"})
            oldest.abort()
        self.awaiting_request[connection] = None

    def remove(self, connection: HttpConnection, address: str) -> None:
        """Removes a closed connection."""
        if connection in self.open:
            self.open.remove(connection)
            self.awaiting_request.pop(connection, None)
            self.lingering.pop(connection, None)
            self.addresses[address] -= 1
            if not self.addresses[address]:
                del self.addresses[address]
