"""The connections of one server: how much each may take, how many there may be, and which is closed for a new one."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from quire.server.connection import Connection
from quire.server.errors import ApiError

log = logging.getLogger("quire")


@dataclass(frozen=True)
class Limits:
    """Bounds of the connections of one server, in bytes and seconds."""

    head_bytes: int = 32 * 1024
    """Request line, headers, trailers and chunk sizes of one request together. Browsers with many cookies send 8 KiB,
    proxies and tracing add 2; the parser and the list of headers keep four times what they are sent."""
    framing: int = 8
    """Bytes of chunk sizes that each byte of a body may bring besides: a client that writes single characters sends
    five, `1\\r\\nx\\r\\n`. Without this, head_bytes would end honest bodies of small chunks."""
    head_seconds: float = 10.0
    """From the first byte of a head, or from the connection's begin, to the head's end."""
    body_seconds: float = 30.0
    """Without a byte of a body that has been announced."""
    write_seconds: float = 30.0
    """Without a byte of the answer taken by the client, who is then dropped and its request aborted. What the engine
    generates meanwhile waits in memory."""
    stalled_seconds: float = 5.0
    """Without a byte of the answer taken, after which an answered connection may be closed for a new one."""
    linger_seconds: float = 2.0
    """After an answer that ends the connection, incoming bytes are read and discarded for so long. If it were closed at
    once, the kernel would reset it, and the client would often not see the answer."""
    sweep_seconds: float = 1.0
    """Between two checks of all connections: the seconds above are exact to this."""
    pipelined: int = 16
    """Requests sent ahead of answers on one connection. Each waits as 2 KB of objects; nobody but load generators
    sends any."""
    connections: int = 1024
    """Connections at once."""
    per_address: int | None = None
    """Connections at once from one address."""
    lingering: int = 64
    """Connections beyond these that are refused and may still read why. With more of them, files would run out."""


class Edge:
    """The connections of one server, and their bounds. `protocol` is what uvicorn makes connections with.

    refused  called with the status of each refusal, to count it
    """

    def __init__(self, limits: Limits, refused: Callable[[int], None] = lambda status: None) -> None:
        self.limits = limits
        self.refused = refused
        self.open: set[Connection] = set()
        self.addresses: Counter[str] = Counter()
        # Connections without a complete request, the oldest first.
        self.unasked: dict[Connection, None] = {}
        # Refused connections that stay open for a moment, so that the client sees why; the oldest first.
        self.lingering: dict[Connection, None] = {}

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> Connection:
        """A new connection."""
        return Connection(self, config, server_state, app_state, _loop)

    async def watch(self) -> None:
        """Ends what takes too long, until it is cancelled."""
        while True:
            await asyncio.sleep(self.limits.sweep_seconds)
            now = asyncio.get_running_loop().time()
            for connection in list(self.open):
                try:
                    connection.check(now)
                except Exception:  # the others are watched on
                    log.exception("a connection that cannot be checked is closed")
                    connection.abort()

    @property
    def is_full(self) -> bool:
        """Whether files may run out."""
        return len(self.open) > self.limits.connections + self.limits.lingering

    def close_unsent(self, error: ApiError) -> None:
        """Ends the connections whose request's body has not arrived; `error` is their answer."""
        for connection in list(self.open):
            if connection.waits_for_body:
                connection.refuse(error)

    def enter(self, connection: Connection, address: str) -> None:
        """A new connection came. Raises ApiError if there is no place for it.

        If all places are taken, the oldest connection without a complete request is closed. So connections that send
        nothing, or slow bodies, keep nobody out, however many they are. Refused connections take no place.
        """
        self.open.add(connection)
        self.addresses[address] += 1
        if self.is_full and self.lingering:
            next(iter(self.lingering)).abort()
        most = self.limits.per_address
        if most is not None and self.addresses[address] > most:
            message = f"this address holds {most} connections, the most it may (serve.max_connections_per_address)"
            raise ApiError(429, message, code="too_many_connections", headers={"Retry-After": "1"})
        if len(self.open) - len(self.lingering) > self.limits.connections:
            oldest = next((each for each in self.unasked if each.gives_way), None)
            if oldest is None:
                message = f"{self.limits.connections} connections are being served, the most at once"
                message += " (serve.max_connections)"
                raise ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"})
            oldest.abort()
        self.unasked[connection] = None

    def leave(self, connection: Connection, address: str) -> None:
        """A connection is closed."""
        if connection in self.open:
            self.open.remove(connection)
            self.unasked.pop(connection, None)
            self.lingering.pop(connection, None)
            self.addresses[address] -= 1
            if not self.addresses[address]:
                del self.addresses[address]
