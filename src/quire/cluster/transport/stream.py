"""What a transport is: streams of bytes, and what waits for them.

Knows neither messages nor secrets. `channel` makes a stream trustworthy.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.cluster.transport.channel import Channel, Frame


class TransportError(QuireError):
    """A connection that cannot be made, or has ended. The message gives the reason."""


class PeerClosedError(TransportError):
    """The peer has closed the connection."""


class ForeignUserError(TransportError):
    """The peer belongs to another user, who may not dial. The message names the user."""


class StreamTimeout:
    """How long a stream waits for its peer: `stall_seconds` for the next bytes, or until a deadline for everything."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._until: float | None = None

    def set_deadline(self, until: float | None) -> None:
        """See ByteStream."""
        self._until = until

    def seconds(self) -> float:
        """How long the next wait may take. Raises TransportError if the deadline is over."""
        if self._until is None:
            return self._stall_seconds
        if (left := self._until - time.monotonic()) <= 0:
            raise TransportError("the peer takes too long to say who it is")
        return left


class ByteStream(Protocol):
    """Bytes in both directions, in order. One thread may read while another one writes."""

    def set_deadline(self, until: float | None) -> None:
        """Everything that follows must end by a time of `time.monotonic`. None: every wait may take as long as a peer
        may stall.
        """

    def read(self, into: memoryview, *, is_idle: bool = False) -> None:
        """Fills `into`. Raises TransportError if the stream ends or stalls before. is_idle: the first byte has time."""

    def write(self, *parts: bytes | memoryview) -> None:
        """Sends all the parts. The peer never sees memory of theirs. Raises TransportError if the peer stops taking
        them.
        """

    def shut(self) -> None:
        """Ends the stream: whoever reads or writes at either end gets TransportError. Never blocks."""

    def close(self) -> None:
        """Frees what the stream has. Nobody uses it any more."""

    def extent_channel(self, channel: Channel) -> ExtentChannel:
        """How extents travel beside this stream."""


class ExtentChannel(Protocol):
    """The bytes of extents. One thread sends while another one receives."""

    def send(self, extent: memoryview) -> None:
        """Sends an extent. Its memory may change as soon as this returns. Raises TransportError."""

    def receive(self, frame: Frame) -> memoryview:
        """The extent that a frame announces, valid until `free`. Raises TransportError."""

    def skip(self, frame: Frame) -> int:
        """Passes over the extent that a frame announces. Returns its bytes."""

    def free(self) -> None:
        """The last extent received is not needed any more."""

    def close(self) -> None:
        """Frees what it has. Nobody uses it any more."""


class StreamListener(Protocol):
    """Where peers dial."""

    address: str

    def accept(self) -> ByteStream:
        """Waits for the next stream. Raises TransportError when the listener is closed."""

    def close(self) -> None:
        """Wakes `accept`. Idempotent."""


class Transport(Protocol):
    """A way to reach a process: one row of `transport.TRANSPORTS`."""

    def listen(self, name: str, host: str, stall_seconds: float) -> StreamListener:
        """Starts to listen for a process of some name. Raises TransportError."""

    def dial(self, endpoint: str, stall_seconds: float, seconds: float) -> ByteStream:
        """A stream to a listener. endpoint: its address without scheme. Raises TransportError."""
