"""Streams within a process: for tests, and for a process that has two roles.

Bytes are copied on their way, as through a socket: a receiver never sees the sender's memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from quire.cluster.transport.channel import Channel, InlineExtentChannel
from quire.cluster.transport.stream import PeerClosedError, StreamTimeout, TransportError

_MOST_AHEAD = 4 << 20
"""Bytes that a sender may be ahead of its receiver."""
_PIECE = 1 << 20
_MOST_DIALLED = 128
"""Streams that may wait for `accept`."""

_listening: dict[str, LocalListener] = {}
_listening_lock = threading.Lock()


class _Pipe:
    """Bytes in one direction."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: deque[memoryview] = deque()
        self._num_ahead = 0
        self._is_shut = False

    def read(self, into: memoryview, seconds: float) -> int:
        """Takes the next bytes; 0 if none will come. Raises TimeoutError if none come in time."""
        with self._changed:
            self._wait(lambda: len(self._pieces) > 0, seconds)
            if not self._pieces:
                return 0
            piece = self._pieces.popleft()
            count = min(len(piece), len(into))
            into[:count] = piece[:count]
            if count < len(piece):
                self._pieces.appendleft(piece[count:])
            self._num_ahead -= count
            self._changed.notify_all()
            return count

    def write(self, piece: memoryview, seconds: float) -> None:
        """Adds a copy of some bytes. Raises TimeoutError if there is no room in time."""
        with self._changed:
            self._wait(lambda: self._num_ahead < _MOST_AHEAD, seconds)
            if self._is_shut:
                raise TransportError("the connection has ended")
            self._pieces.append(memoryview(bytes(piece)))
            self._num_ahead += len(piece)
            self._changed.notify_all()

    def shut(self) -> None:
        """Nothing more is written. What was written can still be read."""
        with self._changed:
            self._is_shut = True
            self._changed.notify_all()

    def _wait(self, is_ready: Callable[[], bool], seconds: float) -> None:
        if not self._changed.wait_for(lambda: is_ready() or self._is_shut, seconds):
            raise TimeoutError


class LocalStream(StreamTimeout):
    """A pipe in each direction."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, stall_seconds: float) -> None:
        super().__init__(stall_seconds)
        self._incoming, self._outgoing = incoming, outgoing

    def read(self, into: memoryview, *, is_idle: bool = False) -> None:
        """See ByteStream."""
        done = 0
        while done < len(into):
            try:
                count = self._incoming.read(into[done:], self.seconds())
            except TimeoutError:
                if is_idle and not done and self._until is None:
                    continue
                raise TransportError("the peer stopped in the middle of a frame") from None
            if not count:
                raise PeerClosedError("the peer has closed the connection")
            done += count

    def write(self, *parts: bytes | memoryview) -> None:
        """See ByteStream."""
        for part in parts:
            for start in range(0, len(part), _PIECE):
                try:
                    self._outgoing.write(memoryview(part)[start : start + _PIECE], self.seconds())
                except TimeoutError:
                    raise TransportError("the peer takes no bytes") from None

    def shut(self) -> None:
        """See ByteStream."""
        self._incoming.shut()
        self._outgoing.shut()

    def close(self) -> None:
        """See ByteStream."""
        self.shut()

    def extent_channel(self, channel: Channel) -> InlineExtentChannel:
        """See ByteStream."""
        return InlineExtentChannel(channel)


class LocalListener:
    """A name in this process that can be dialled."""

    def __init__(self, name: str, stall_seconds: float) -> None:
        self.address = f"local://{name}"
        self._name, self._stall_seconds = name, stall_seconds
        self._changed = threading.Condition()
        self._dialled: deque[LocalStream] = deque()
        self._is_closed = False
        with _listening_lock:
            if name in _listening:
                raise TransportError(f"something listens at {self.address} already")
            _listening[name] = self

    def join(self, stall_seconds: float) -> LocalStream:
        """The dialer's end of a new stream."""
        there, back = _Pipe(), _Pipe()
        with self._changed:
            if self._is_closed or len(self._dialled) >= _MOST_DIALLED:
                raise TransportError(f"nothing accepts at {self.address}")
            self._dialled.append(LocalStream(there, back, self._stall_seconds))
            self._changed.notify()
        return LocalStream(back, there, stall_seconds)

    def accept(self) -> LocalStream:
        """See StreamListener."""
        with self._changed:
            self._changed.wait_for(lambda: self._dialled or self._is_closed)
            if self._is_closed:
                raise TransportError("the listener is closed")
            return self._dialled.popleft()

    def close(self) -> None:
        """See StreamListener."""
        with _listening_lock:
            if _listening.get(self._name) is self:
                del _listening[self._name]
        with self._changed:
            self._is_closed = True
            for stream in self._dialled:
                stream.shut()
            self._dialled.clear()
            self._changed.notify_all()


class LocalTransport:
    """See Transport."""

    def listen(self, name: str, host: str, stall_seconds: float) -> LocalListener:
        """See Transport. There is only this process: `host` does not matter."""
        return LocalListener(name, stall_seconds)

    def dial(self, endpoint: str, stall_seconds: float, seconds: float) -> LocalStream:
        """See Transport."""
        with _listening_lock:
            listener = _listening.get(endpoint)
        if listener is None:
            raise TransportError(f"nothing listens at local://{endpoint}")
        return listener.join(stall_seconds)
