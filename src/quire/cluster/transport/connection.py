"""A connection to a peer: one thread sends queued messages, another one passes received messages to the handler."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from quire.cluster.transport.channel import MESSAGE, MOST_EXTENTS, Channel, ExtentChannel, Frame, authenticate
from quire.cluster.transport.sockets import SocketStream
from quire.cluster.transport.stream import PeerClosedError, TransportError
from quire.cluster.wire import decode
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.cluster.connections import Bulk, PeerConnections

log = logging.getLogger("quire")

MOST_QUEUED = 4096
"""Maximum number of messages that wait for a peer."""


class QueuedMessage(NamedTuple):
    """An encoded message that waits to be sent, and its extents."""

    message: bytes
    bulk: Bulk | None
    num_extents: int


class Connection:
    """One connection, from before it is established. It ends once, for a reason, and never restarts.

    peer     name of the peer; None at a listener until the peer has proved it
    threads  threads that it has started
    """

    def __init__(self, owner: PeerConnections, peer: str | None, open_stream: Callable[[], SocketStream]) -> None:
        """peer: the dialled peer, None at a listener. open_stream: dials, or returns the accepted stream."""
        self.peer = peer
        self.threads: list[threading.Thread] = []
        self.is_established = self.is_ended = False
        self._owner = owner
        self._open = open_stream
        self._changed = threading.Condition()
        self._queue: deque[QueuedMessage] = deque()
        self._reason = ""
        self._stream: SocketStream | None = None
        self._channel: Channel | None = None
        self._extent_channel: ExtentChannel | None = None
        self._num_running = 0

    def start(self) -> None:
        """Starts to dial, or to authenticate the peer that dialled."""
        self._start("read" if self.peer is None else "send")

    def put(self, queued: QueuedMessage) -> bool:
        """Queues a message. Returns False if the connection has ended, or too many messages wait."""
        with self._changed:
            if self.is_ended or len(self._queue) >= MOST_QUEUED:
                return False
            self._queue.append(queued)
            self._changed.notify_all()
            return True

    def wait(self, seconds: float) -> None:
        """Waits until the connection is established. Raises TransportError if that fails or takes too long."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_established or self.is_ended, seconds)
            if self.is_ended:
                raise TransportError(f"no connection to {self.peer!r}: {self._reason}")
            if not self.is_established:
                raise TransportError(f"no connection to {self.peer!r} within {seconds:g} s")

    def end(self, reason: str) -> None:
        """Ends the connection; its threads do the rest. Never blocks."""
        with self._changed:
            if self.is_ended:
                return
            self.is_ended, self._reason = True, reason
            # Under the lock: once the stream is closed, its descriptor may belong to another one.
            if self._stream is not None:
                self._stream.shut()
            self._changed.notify_all()

    # ---- threads -----------------------------------------------------------------------------------------------------

    def _start(self, role: str) -> None:
        run = self._run_sending if role == "send" else self._run_reading
        thread = threading.Thread(target=run, name=f"quire-link-{self.peer or 'stranger'}-{role}", daemon=True)
        with self._changed:
            thread.start()
            self.threads.append(thread)
            self._num_running += 1

    def _run_sending(self) -> None:
        self._until_the_end(self._send_all)
        if self._drop_waiting() and not self.is_established:
            self._tell_lost()
        self._leave()

    def _run_reading(self) -> None:
        self._until_the_end(self._read_all)
        if self.is_established:
            self._tell_lost()
        self._leave()

    def _until_the_end(self, work: Callable[[], None]) -> None:
        try:
            work()
        except QuireError as error:
            if not self.is_ended:
                self._tell(error)
            self.end(str(error))
        except Exception as error:
            log.exception("connection to %s", self.peer)
            self.end(f"{type(error).__name__}: {error}")
        finally:
            self.end("its thread has ended")

    def _tell(self, error: QuireError) -> None:
        """Logs why the connection ends. The waiting code decides what that means."""
        text = f"connection to {self.peer or 'an unknown peer'}: {error}"
        if isinstance(error, PeerClosedError):  # a peer closes its connections when it ends
            log.debug("%s", text)
        elif self.peer is None:
            self._owner.stranger_warnings.warn(text)
        else:
            log.warning("%s", text)

    def _drop_waiting(self) -> int:
        """Drops all queued messages. Returns their number."""
        num_dropped = 0
        while self._queue:
            num_dropped += 1
            if (bulk := self._queue.popleft().bulk) is not None:
                finish_bulk(bulk)
        return num_dropped

    def _tell_lost(self) -> None:
        assert self.peer is not None, "a stranger is lost"
        if not self._owner.is_closed:
            try:
                self._owner.handler.connection_lost(self.peer)
            except Exception:
                log.exception("connection to %s: the handler failed when it was lost", self.peer)

    def _leave(self) -> None:
        with self._changed:
            self._num_running -= 1
            if self._num_running:
                return
            if self._extent_channel is not None:
                self._extent_channel.close()
            if self._stream is not None:
                self._stream.close()
        self._drop_waiting()  # messages are left if the sending thread could not start
        self._owner.on_ended(self)

    def _establish(self) -> None:
        stream = self._open()
        with self._changed:
            self._stream = stream
            if self.is_ended:
                raise TransportError(self._reason)
        channel = authenticate(stream, self._owner.credentials, self._owner.handshake_seconds, expected=self.peer)
        self._channel, self._extent_channel = channel, stream.extent_channel(channel)
        self._owner.on_established(self, channel.peer)
        with self._changed:
            self.is_established = True
            self._changed.notify_all()

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        if self._channel is None:
            self._establish()
            self._start("read")
        while (queued := self._next()) is not None:
            try:
                self._send(queued)
            finally:
                if queued.bulk is not None:
                    finish_bulk(queued.bulk)

    def _next(self) -> QueuedMessage | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self.is_ended)
            return None if self.is_ended else self._queue.popleft()

    def _send(self, queued: QueuedMessage) -> None:
        assert self._channel is not None and self._extent_channel is not None, "a connection that is not established"
        self._channel.send(MESSAGE, queued.num_extents, queued.message)
        if queued.bulk is None:
            return
        extents, left = queued.bulk.pack(), queued.num_extents
        try:
            for extent in extents:
                if not left:
                    raise TransportError(f"more extents were packed than the {queued.num_extents} announced")
                left -= 1
                self._extent_channel.send(extent.cast("B") if extent.ndim != 1 or extent.format != "B" else extent)
            if left:
                raise TransportError(f"{left} fewer extents were packed than the {queued.num_extents} announced")
        finally:
            # The generator holds the packed pages, and `done` may release them.
            if (close := getattr(extents, "close", None)) is not None:
                close()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        if self._channel is None:
            self._establish()
            threading.current_thread().name = f"quire-link-{self.peer}-read"
            self._start("send")
        assert self._channel is not None and self._extent_channel is not None and self.peer is not None
        while True:
            frame = self._channel.receive()
            if frame.kind != MESSAGE or frame.number > MOST_EXTENTS:
                raise TransportError(
                    f"a message was due, and a frame of kind {frame.kind} and number {frame.number} came"
                )
            extents = IncomingExtents(self._channel, self._extent_channel, frame.number)
            try:
                self._owner.handler.receive(self.peer, decode(frame.meta), extents)
            finally:
                extents.free()
            extents.skip()


class IncomingExtents(Iterator[memoryview]):
    """The extents of a message. They become invalid with the message, even if the handler keeps them."""

    def __init__(self, channel: Channel, extent_channel: ExtentChannel, num_extents: int) -> None:
        self._channel, self._extent_channel = channel, extent_channel
        self._left = num_extents
        self._extent: memoryview | None = None

    def __next__(self) -> memoryview:
        """The next extent; the previous one becomes invalid. Raises TransportError if the connection ends first."""
        self.free()
        if not self._left:
            raise StopIteration
        self._extent = extent = self._extent_channel.receive(self._next())
        return extent

    def free(self) -> None:
        """Invalidates the last extent: reading a view of it raises an error, unless arrays still refer to it."""
        if self._extent is not None:
            with contextlib.suppress(BufferError):
                self._extent.release()
            self._extent = None
            self._extent_channel.free()

    def skip(self) -> None:
        """Skips the extents that the handler has not taken."""
        while self._left:
            self._extent_channel.skip(self._next())

    def _next(self) -> Frame:
        self._left -= 1
        return self._channel.receive()


def finish_bulk(bulk: Bulk) -> None:
    """Calls the bulk's `done`, and logs its errors."""
    try:
        bulk.done()
    except Exception:
        log.exception("extents that were sent could not be freed")
