"""A connection to a peer: one thread sends what waits, another one gives what arrives to the handler."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.cluster.transport.channel import MESSAGE, MOST_EXTENTS, Channel, Frame, Party, authenticate
from quire.cluster.transport.stream import Carrier, ClosedError, LinkError, Stream
from quire.cluster.wire import decode
from quire.errors import QuireError
from quire.repeats import RepeatedWarning

if TYPE_CHECKING:
    from quire.cluster.links import Bulk, Handler

log = logging.getLogger("quire")

MOST_QUEUED = 4096
"""Messages that may wait for a peer."""

TRAFFIC = tuple(f"{what}_{way}" for way in ("sent", "received") for what in (
    "messages", "message_bytes", "extents", "extent_bytes"))  # fmt: skip
"""What a link counts. Frames around messages and extents do not count."""


class Waiting(NamedTuple):
    """An encoded message that waits to be sent, and its extents."""

    message: bytes
    bulk: Bulk | None
    num_extents: int


class Home(Protocol):
    """What a link needs of the process it belongs to."""

    party: Party
    handler: Handler
    handshake_seconds: float
    is_closed: bool
    stranger_warnings: RepeatedWarning

    def established(self, link: Link, peer: str) -> None:
        """Gives the link the name that the peer has proved. Raises LinkError if nobody wants the link any more."""

    def gone(self, link: Link) -> None:
        """Both threads have ended, but for a few instructions."""


class Link:
    """One connection, also before it is made. It ends once, for a reason, and never begins again.

    peer     its name; None at a listener until the peer has proved who it is
    threads  that it has started
    traffic  counts by the names of TRAFFIC
    """

    def __init__(self, home: Home, peer: str | None, open_stream: Callable[[], Stream]) -> None:
        """peer: who is dialled, None at a listener. open_stream: dials, or gives what was accepted."""
        self.peer = peer
        self.threads: list[threading.Thread] = []
        self.traffic = dict.fromkeys(TRAFFIC, 0)
        self.is_established = self.is_ended = False
        self._home = home
        self._open = open_stream
        self._changed = threading.Condition()
        self._waiting: deque[Waiting] = deque()
        self._reason = ""
        self._stream: Stream | None = None
        self._channel: Channel | None = None
        self._carrier: Carrier | None = None
        self._num_running = 0

    def start(self) -> None:
        """Starts to dial, or to find out who has dialled."""
        self._start("read" if self.peer is None else "send")

    def put(self, waiting: Waiting) -> bool:
        """Adds a message to those that wait. False if the link has ended, or too many wait."""
        with self._changed:
            if self.is_ended or len(self._waiting) >= MOST_QUEUED:
                return False
            self._waiting.append(waiting)
            self._changed.notify_all()
            return True

    def wait(self, seconds: float) -> None:
        """Waits until the link is established. Raises LinkError if it is not in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_established or self.is_ended, seconds)
            if self.is_ended:
                raise LinkError(f"no link to {self.peer!r}: {self._reason}")
            if not self.is_established:
                raise LinkError(f"no link to {self.peer!r} within {seconds:g} s")

    def end(self, reason: str) -> None:
        """Ends the link; its threads do the rest. Never blocks."""
        with self._changed:
            if self.is_ended:
                return
            self.is_ended, self._reason = True, reason
            # Under the lock: when the stream is closed its descriptor may belong to another one.
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
            log.exception("link to %s", self.peer)
            self.end(f"{type(error).__name__}: {error}")
        finally:
            self.end("its thread has ended")

    def _tell(self, error: QuireError) -> None:
        """Logs why the link ends. Whoever waits for the peer tells what it means."""
        text = f"link to {self.peer or 'a stranger'}: {error}"
        if isinstance(error, ClosedError):  # a peer that ends closes its connections
            log.debug("%s", text)
        elif self.peer is None:
            self._home.stranger_warnings.warn(text)
        else:
            log.warning("%s", text)

    def _drop_waiting(self) -> int:
        """Drops the messages that wait. Returns how many there were."""
        num_dropped = 0
        while self._waiting:
            num_dropped += 1
            if (bulk := self._waiting.popleft().bulk) is not None:
                finish(bulk)
        return num_dropped

    def _tell_lost(self) -> None:
        assert self.peer is not None, "a stranger is lost"
        if not self._home.is_closed:
            try:
                self._home.handler.lost(self.peer)
            except Exception:
                log.exception("link to %s: the handler failed when it was lost", self.peer)

    def _leave(self) -> None:
        with self._changed:
            self._num_running -= 1
            if self._num_running:
                return
            if self._carrier is not None:
                self._carrier.close()
            if self._stream is not None:
                self._stream.close()
        self._drop_waiting()  # some are left if there was no thread to send them
        self._home.gone(self)

    def _establish(self) -> None:
        stream = self._open()
        with self._changed:
            self._stream = stream
            if self.is_ended:
                raise LinkError(self._reason)
        channel = authenticate(stream, self._home.party, self._home.handshake_seconds, expected=self.peer)
        self._channel, self._carrier = channel, stream.carrier(channel)
        self._home.established(self, channel.peer)
        with self._changed:
            self.is_established = True
            self._changed.notify_all()

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        if self._channel is None:
            self._establish()
            self._start("read")
        while (waiting := self._next()) is not None:
            try:
                self._send(waiting)
            finally:
                if waiting.bulk is not None:
                    finish(waiting.bulk)

    def _next(self) -> Waiting | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_ended)
            return None if self.is_ended else self._waiting.popleft()

    def _send(self, waiting: Waiting) -> None:
        assert self._channel is not None and self._carrier is not None, "a link that is not established"
        self._channel.send(MESSAGE, waiting.num_extents, waiting.message)
        self.traffic["messages_sent"] += 1
        self.traffic["message_bytes_sent"] += len(waiting.message)
        if waiting.bulk is None:
            return
        extents, left = waiting.bulk.pack(), waiting.num_extents
        try:
            for extent in extents:
                if not left:
                    raise LinkError(f"more extents were packed than the {waiting.num_extents} announced")
                left -= 1
                self._carrier.send(extent.cast("B") if extent.ndim != 1 or extent.format != "B" else extent)
                self.traffic["extents_sent"] += 1
                self.traffic["extent_bytes_sent"] += extent.nbytes
            if left:
                raise LinkError(f"{left} fewer extents were packed than the {waiting.num_extents} announced")
        finally:
            # A generator holds what it packs, and `done` may end that.
            if (close := getattr(extents, "close", None)) is not None:
                close()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        if self._channel is None:
            self._establish()
            threading.current_thread().name = f"quire-link-{self.peer}-read"
            self._start("send")
        assert self._channel is not None and self._carrier is not None and self.peer is not None
        while True:
            frame = self._channel.receive()
            if frame.kind != MESSAGE or frame.number > MOST_EXTENTS:
                raise LinkError(f"a message was due, and a frame of kind {frame.kind} and number {frame.number} came")
            self.traffic["messages_received"] += 1
            self.traffic["message_bytes_received"] += len(frame.meta)
            extents = Incoming(self._channel, self._carrier, frame.number, self.traffic)
            try:
                self._home.handler.receive(self.peer, decode(frame.meta), extents)
            finally:
                extents.free()
            extents.skip()


class Incoming(Iterator[memoryview]):
    """The extents that come with a message. They have an end even if somebody keeps this for longer."""

    def __init__(self, channel: Channel, carrier: Carrier, num_extents: int, traffic: dict[str, int]) -> None:
        self._channel, self._carrier, self._traffic = channel, carrier, traffic
        self._left = num_extents
        self._extent: memoryview | None = None

    def __next__(self) -> memoryview:
        """The next extent. The one before is not valid any more. Raises LinkError if the link ends before."""
        self.free()
        if not self._left:
            raise StopIteration
        self._extent = extent = self._carrier.receive(self._next())
        self._count(len(extent))
        return extent

    def free(self) -> None:
        """Ends the last extent, also for whoever still has it: reading it is an error then, unless arrays of it are
        left.
        """
        if self._extent is not None:
            with contextlib.suppress(BufferError):
                self._extent.release()
            self._extent = None
            self._carrier.free()

    def skip(self) -> None:
        """Passes over what nobody has taken."""
        while self._left:
            self._count(self._carrier.skip(self._next()))

    def _next(self) -> Frame:
        self._left -= 1
        return self._channel.receive()

    def _count(self, num_bytes: int) -> None:
        self._traffic["extents_received"] += 1
        self._traffic["extent_bytes_received"] += num_bytes


def finish(bulk: Bulk) -> None:
    """Tells a bulk that nothing more of it will be sent."""
    try:
        bulk.done()
    except Exception:
        log.exception("extents that were sent could not be freed")
