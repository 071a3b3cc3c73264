"""Connections between the processes of a cluster: they carry messages, and with some messages extents of the cache.

Each connection has two threads, see `transport.connection`. Extents are packed while they are sent, one at a time. Each
belongs to the receiver only until it asks for the next one. Knows neither what messages say nor what extents are: an
extent has a checksum and a MAC of its own, which the handler verifies.

A message that waits is lost with its connection. Nothing is sent twice.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from quire.cluster.transport import TRANSPORTS, transport_of
from quire.cluster.transport.channel import MOST_EXTENTS, MOST_META, Credentials
from quire.cluster.transport.connection import MOST_QUEUED, Connection, QueuedMessage, finish_bulk
from quire.cluster.transport.sockets import SocketListener, SocketStream
from quire.cluster.transport.stream import TransportError
from quire.cluster.wire import WireError, encode
from quire.errors import ConfigError
from quire.rate_limited_warning import RateLimitedWarning

__all__ = ["MOST_QUEUED", "Bulk", "Handler", "PeerConnections", "TransportError"]

log = logging.getLogger("quire")

STALL_SECONDS = 10.0
"""A peer that takes no bytes for this long is lost."""
HANDSHAKE_SECONDS = 5.0
"""How long a peer may take to accept a connection and to prove who it is."""
CLOSE_SECONDS = 10.0
"""How long `close` waits for threads. Only a bulk that packs or a handler that works for longer is left behind."""
MOST_STRANGERS = 64
"""Connections whose peers have not yet proved who they are. A further one ends the oldest of them."""
MOST_STRANGER_THREADS = 2 * MOST_STRANGERS
"""Threads for such connections, those that end included. Without a free one a connection is refused."""


class Bulk(Protocol):
    """Extents that go with a message, packed while they are sent."""

    @property
    def num_extents(self) -> int:
        """How many `pack` yields."""

    def pack(self) -> Iterator[memoryview]:
        """Each extent is valid until the next one is taken. Called on the sending thread."""

    def done(self) -> None:
        """Everything is sent, or nothing more will be. Called exactly once, on the sending thread or by `send`."""


class Handler(Protocol):
    """What a process does with messages."""

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        """A message, on the connection's reading thread. Each extent is valid until the next one is taken, and none
        after this returns. Extents that it does not take are skipped. If the connection ends before all have come, they
        raise TransportError. An error that escapes ends the connection.
        """

    def connection_lost(self, name: str) -> None:
        """A connection has ended, or one that `send` began could not be made. Called once for each, on one of its
        threads, after its last message. There may be another connection to the peer. Not called for those that `close`
        ends.
        """


class PeerConnections:
    """The connections of a process. All methods may be called from any thread, also by the handler."""

    def __init__(
        self,
        name: str,
        secret: bytes,
        handler: Handler,
        transport: str = "tcp",
        *,
        compatibility_tag: bytes = b"",
        stall_seconds: float = STALL_SECONDS,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        """Nothing happens before `listen`, `connect` or `send`.

        name               of this process; no two of a cluster have the same one
        secret             that all processes of the cluster know
        transport          where `listen` listens: tcp or shm. An address says how to dial it
        compatibility_tag  what both sides must agree on, such as a digest of the model; a peer with another one is
                           refused
        """
        if transport not in TRANSPORTS:
            raise ConfigError(f"no transport {transport!r}; there are {', '.join(TRANSPORTS)}")
        self._transport = TRANSPORTS[transport]
        self.credentials, self.handler = Credentials(name, secret, compatibility_tag), handler
        self.handshake_seconds = handshake_seconds
        self.is_closed = False
        self.stranger_warnings = RateLimitedWarning(log)
        self._stall_seconds = stall_seconds
        self._changed = threading.Condition()  # guards everything else
        self._connections: dict[Connection, None] = {}  # established ones in the order in which they became so
        self._addresses: dict[str, str] = {}
        self._listener: SocketListener | None = None
        self._listening: threading.Thread | None = None

    def listen(self, host: str = "127.0.0.1") -> str:
        """Lets peers connect. Returns the address that they learn. Raises TransportError if that cannot be.

        host  for tcp; with a port, as in 10.0.0.1:4711, or without one
        """
        with self._changed:
            assert self._listener is None and not self.is_closed, "it listens already, or is closed"
            listener = self._listener = self._transport.listen(host, self._stall_seconds)
            self._listening = threading.Thread(
                target=self._accept, args=(listener,), name="quire-link-listen", daemon=True
            )
            self._listening.start()
        return listener.address

    def learn(self, name: str, address: str) -> None:
        """Where a peer listens. `send` dials it when it has something for it. Raises TransportError if it is no
        address.
        """
        transport_of(address)
        with self._changed:
            self._addresses[name] = address

    def forget(self, name: str) -> None:
        """Ends all connections to a peer, and forgets where it listens."""
        with self._changed:
            self._addresses.pop(name, None)
            connections = [connection for connection in self._connections if connection.peer == name]
        for connection in connections:
            connection.end("forgotten")

    def connect(self, name: str, seconds: float) -> None:
        """Connects to a peer unless there is a connection. Raises TransportError with the reason if there is none in
        time. A dial that takes longer goes on.
        """
        with self._changed:
            if (connection := self._newest(name)) is None:
                if (connection := self._new_connection(name)) is None:
                    raise TransportError(f"nobody has said where {name!r} listens, or these links are closed")
                self._begin(connection)
        connection.wait(seconds)

    def send(self, to: str, message: Any, bulk: Bulk | None = None) -> bool:
        """Queues a message, and never blocks. False if there is neither a connection nor an address, or too many
        messages wait; then the bulk is done. Raises WireError if the message cannot travel; then it is done too.
        """
        is_queued = False
        try:
            queued = _encoded(message, bulk)
            with self._changed:
                connection = self._newest(to)
                is_queued = connection is not None and connection.put(queued)
                if (connection is None or connection.is_ended) and (connection := self._new_connection(to)) is not None:
                    # Before it begins: a dial may fail at once.
                    connection.put(queued)
                    self._begin(connection)
                    is_queued = True
        finally:
            if bulk is not None and not is_queued:
                finish_bulk(bulk)
        return is_queued

    def close(self) -> None:
        """Ends all connections, threads and sockets. Messages that wait are dropped, and the handler hears no more."""
        with self._changed:
            self.is_closed = True
            connections = [
                connection for connection in self._connections if threading.current_thread() not in connection.threads
            ]
            for connection in self._connections:
                connection.end("closed here")
            if self._listener is not None:
                self._listener.close()
            until = time.monotonic() + CLOSE_SECONDS
            self._changed.wait_for(lambda: self._connections.keys().isdisjoint(connections), CLOSE_SECONDS)
        threads = [thread for connection in connections for thread in connection.threads]
        for thread in [*threads, *([self._listening] if self._listening is not None else [])]:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning("%s has not ended %g s after its link was closed", thread.name, CLOSE_SECONDS)
        self.stranger_warnings.end()

    def _new_connection(self, name: str) -> Connection | None:
        """A connection that will dial. None if the peer's address is not known."""
        if self.is_closed or (address := self._addresses.get(name)) is None:
            return None
        transport, endpoint = transport_of(address)
        dial = functools.partial(transport.dial, endpoint, self._stall_seconds, self.handshake_seconds)
        return Connection(self, name, dial)

    def _accept(self, listener: SocketListener) -> None:
        while True:
            try:
                stream = listener.accept()
            except TransportError:
                return
            try:
                with self._changed:
                    self._admit(Connection(self, None, functools.partial(_given, stream)))
            except (TransportError, RuntimeError) as error:
                self.stranger_warnings.warn(f"a connection is refused: {error}")
                stream.close()

    @property
    def num_strangers(self) -> int:
        """Connections whose peers have not proved who they are, those that end included."""
        return sum(connection.peer is None for connection in self._connections)

    def _admit(self, connection: Connection) -> None:
        """Starts a connection to a stranger. If there are too many, the oldest one ends: a peer that knows the secret
        needs milliseconds to prove it, so it gets through however many others dial and say nothing. Raises
        TransportError if these connections are closed or have no thread left, RuntimeError if the system has none.
        """
        if self.is_closed:
            raise TransportError("closed here")
        if (num_threads := self.num_strangers) >= MOST_STRANGER_THREADS:
            raise TransportError(f"{num_threads} strangers have not said who they are")
        strangers = [each for each in self._connections if each.peer is None and not each.is_ended]
        if len(strangers) >= MOST_STRANGERS:
            strangers[0].end("another connection took its place")
            self.stranger_warnings.warn(f"more than {MOST_STRANGERS} strangers have not said who they are")
        self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        """Starts a connection. Raises RuntimeError if there can be no more threads."""
        connection.start()
        self._connections[connection] = None

    def _newest(self, peer: str) -> Connection | None:
        """The connection that takes messages for a peer."""
        found = [connection for connection in self._connections if connection.peer == peer and not connection.is_ended]
        return next(
            (connection for connection in reversed(found) if connection.is_established), found[-1] if found else None
        )

    # ---- for its connections, on their threads ---------------------------------------------------------------------

    def on_established(self, connection: Connection, peer: str) -> None:
        """Gives the connection the name that the peer has proved. Raises TransportError if nobody wants the connection
        any more.
        """
        with self._changed:
            if self.is_closed or connection.is_ended:
                raise TransportError("closed here")
            del self._connections[connection]
            self._connections[connection] = None
            connection.peer = peer

    def on_ended(self, connection: Connection) -> None:
        """Both threads have ended, but for a few instructions."""
        with self._changed:
            del self._connections[connection]
            self._changed.notify_all()


def _encoded(message: Any, bulk: Bulk | None) -> QueuedMessage:
    encoded, num_extents = encode(message), 0 if bulk is None else bulk.num_extents
    if len(encoded) > MOST_META or not 0 <= num_extents <= MOST_EXTENTS:
        raise WireError(
            f"a message of {len(encoded)} bytes and {num_extents} extents; {MOST_META} and {MOST_EXTENTS} are possible"
        )
    return QueuedMessage(encoded, bulk, num_extents)


def _given(stream: SocketStream) -> SocketStream:
    """Opens what was accepted."""
    return stream
