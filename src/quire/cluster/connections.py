"""Connections between the processes of a cluster: they carry messages, some of which have extents of the cache.

Each connection has two threads, see `transport.connection`. Extents are packed while they are sent, one at a time. The
receiver may use an extent only until it asks for the next one. This module knows the contents of neither messages nor
extents: an extent has its own checksum and MAC, which the handler verifies.

A waiting message is lost with its connection. Nothing is sent twice.
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
"""Seconds after which a peer that takes no bytes is lost."""
HANDSHAKE_SECONDS = 5.0
"""Seconds in which a peer must accept a connection and authenticate."""
CLOSE_SECONDS = 10.0
"""Seconds for which `close` waits for threads. It leaves behind only a bulk or a handler that takes longer."""
MOST_STRANGERS = 64
"""Maximum number of connections with unauthenticated peers. A further one ends the oldest of them."""
MOST_STRANGER_THREADS = 2 * MOST_STRANGERS
"""Maximum number of threads for such connections, ending ones included. Beyond it, a connection is refused."""


class Bulk(Protocol):
    """The extents of a message, packed while they are sent."""

    @property
    def num_extents(self) -> int:
        """Number of extents that `pack` yields."""

    def pack(self) -> Iterator[memoryview]:
        """Yields the extents. Each is valid until the next one is taken. Called on the sending thread."""

    def done(self) -> None:
        """Everything was sent, or nothing more will be. Called exactly once, on the sending thread or by `send`."""


class Handler(Protocol):
    """Handles the messages of a process."""

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        """Handles a message, on the connection's reading thread. An extent is valid until the next one is taken, or
        until this returns. Extents that it does not take are skipped. If the connection ends before all have come, the
        iterator raises TransportError. An error that escapes ends the connection.
        """

    def connection_lost(self, name: str) -> None:
        """A connection has ended, or a connection that `send` started has failed. Called once for each, on one of its
        threads, after its last message. Another connection to the peer may exist. Not called for connections that
        `close` ends.
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
        """Starts nothing before `listen`, `connect` or `send`.

        name               name of this process, unique in the cluster
        secret             the cluster's secret
        transport          transport of `listen`: tcp or shm. An address names the transport to dial
        compatibility_tag  names the version of Quire; a peer with another one is refused
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
        self._connections: dict[Connection, None] = {}  # established ones, the oldest first
        self._addresses: dict[str, str] = {}
        self._listener: SocketListener | None = None
        self._listening: threading.Thread | None = None

    def listen(self, host: str = "127.0.0.1") -> str:
        """Lets peers connect. Returns the address for peers. Raises TransportError if it cannot listen.

        host  for tcp; with or without a port, such as 10.0.0.1:4711
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
        """Learns the address of a peer. `send` dials it when it has a message. Raises TransportError for an invalid
        address.
        """
        transport_of(address)
        with self._changed:
            self._addresses[name] = address

    def forget(self, name: str) -> None:
        """Ends all connections to a peer, and forgets its address."""
        with self._changed:
            self._addresses.pop(name, None)
            connections = [connection for connection in self._connections if connection.peer == name]
        for connection in connections:
            connection.end("forgotten")

    def connect(self, name: str, seconds: float) -> None:
        """Connects to a peer, unless a connection exists. Raises TransportError with the reason if that fails or takes
        longer than `seconds`. A slower dial continues.
        """
        with self._changed:
            if (connection := self._newest(name)) is None:
                if (connection := self._new_connection(name)) is None:
                    raise TransportError(f"the address of {name!r} is unknown, or these connections are closed")
                self._begin(connection)
        connection.wait(seconds)

    def send(self, to: str, message: Any, bulk: Bulk | None = None) -> bool:
        """Queues a message, and never blocks. Returns False if there is neither a connection nor an address, or if too
        many messages wait. Raises WireError if the message cannot be encoded. In both cases it calls the bulk's `done`.
        """
        is_queued = False
        try:
            queued = _encoded(message, bulk)
            with self._changed:
                connection = self._newest(to)
                is_queued = connection is not None and connection.put(queued)
                if (connection is None or connection.is_ended) and (connection := self._new_connection(to)) is not None:
                    # Before the start, because a dial may fail at once.
                    connection.put(queued)
                    self._begin(connection)
                    is_queued = True
        finally:
            if bulk is not None and not is_queued:
                finish_bulk(bulk)
        return is_queued

    def close(self) -> None:
        """Ends all connections, threads and sockets. Drops waiting messages, and calls the handler no more."""
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
                log.warning("%s has not ended %g s after its connection was closed", thread.name, CLOSE_SECONDS)
        self.stranger_warnings.end()

    def _new_connection(self, name: str) -> Connection | None:
        """A new connection that will dial; None if the peer's address is unknown."""
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
        """Number of connections with unauthenticated peers, ending ones included."""
        return sum(connection.peer is None for connection in self._connections)

    def _admit(self, connection: Connection) -> None:
        """Starts a connection to an unauthenticated peer. If there are too many, the oldest of them ends: a peer that
        knows the secret authenticates within milliseconds, so silent peers cannot keep it out. Raises TransportError if
        these connections are closed or the threads are used up, RuntimeError if the system has no thread.
        """
        if self.is_closed:
            raise TransportError("closed here")
        if (num_threads := self.num_strangers) >= MOST_STRANGER_THREADS:
            raise TransportError(f"{num_threads} unknown peers have not authenticated")
        strangers = [each for each in self._connections if each.peer is None and not each.is_ended]
        if len(strangers) >= MOST_STRANGERS:
            strangers[0].end("another connection took its place")
            self.stranger_warnings.warn(f"more than {MOST_STRANGERS} unknown peers have not authenticated")
        self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        """Starts a connection. Raises RuntimeError if the system has no thread."""
        connection.start()
        self._connections[connection] = None

    def _newest(self, peer: str) -> Connection | None:
        """The connection that carries the next message to a peer."""
        found = [connection for connection in self._connections if connection.peer == peer and not connection.is_ended]
        return next(
            (connection for connection in reversed(found) if connection.is_established), found[-1] if found else None
        )

    # ---- for its connections, on their threads ---------------------------------------------------------------------

    def on_established(self, connection: Connection, peer: str) -> None:
        """Registers a connection under the name that the peer has proved. Raises TransportError if the connection was
        closed or forgotten meanwhile.
        """
        with self._changed:
            if self.is_closed or connection.is_ended:
                raise TransportError("closed here")
            del self._connections[connection]
            self._connections[connection] = None
            connection.peer = peer

    def on_ended(self, connection: Connection) -> None:
        """Both threads of a connection have ended, except for a few instructions."""
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
    """The stream of an accepted connection."""
    return stream
