"""What a transport is: streams of bytes, and what waits for them.

Knows neither messages nor secrets. `channel` makes a stream trustworthy.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.cluster.transport.channel import Channel, Frame


class LinkError(QuireError):
    """A connection that cannot be made, or has ended. The message gives the reason."""


class ClosedError(LinkError):
    """The peer has closed the connection."""


class ForeignError(LinkError):
    """The peer belongs to another user, who may not dial. The message names the user."""


class Patience:
    """How long a stream waits for its peer: `stall_seconds` for the next bytes, or until a deadline for everything."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._until: float | None = None

    def limit(self, until: float | None) -> None:
        """See Stream."""
        self._until = until

    def seconds(self) -> float:
        """How long the next wait may take. Raises LinkError if the deadline is over."""
        if self._until is None:
            return self._stall_seconds
        if (left := self._until - time.monotonic()) <= 0:
            raise LinkError("the peer takes too long to say who it is")
        return left


class Stream(Protocol):
    """Bytes in both directions, in order. One thread may read while another one writes."""

    def limit(self, until: float | None) -> None:
        """Everything that follows must end by a time of `time.monotonic`. None: every wait may take as long as a peer
        may stall.
        """

    def read(self, into: memoryview, *, is_idle: bool = False) -> None:
        """Fills `into`. Raises LinkError if the stream ends or stalls before. is_idle: the first byte has time."""

    def write(self, *parts: bytes | memoryview) -> None:
        """Sends all the parts. The peer never sees memory of theirs. Raises LinkError if the peer stops taking them."""

    def shut(self) -> None:
        """Ends the stream: whoever reads or writes at either end gets LinkError. Never blocks."""

    def close(self) -> None:
        """Frees what the stream has. Nobody uses it any more."""

    def carrier(self, channel: Channel) -> Carrier:
        """How extents travel beside this stream."""


class Carrier(Protocol):
    """The bytes of extents. One thread sends while another one receives."""

    def send(self, extent: memoryview) -> None:
        """Sends an extent. Its memory may change as soon as this returns. Raises LinkError."""

    def receive(self, frame: Frame) -> memoryview:
        """The extent that a frame announces, valid until `free`. Raises LinkError."""

    def skip(self, frame: Frame) -> int:
        """Passes over the extent that a frame announces. Returns its bytes."""

    def free(self) -> None:
        """The last extent received is not needed any more."""

    def close(self) -> None:
        """Frees what it has. Nobody uses it any more."""


class Listener(Protocol):
    """Where peers dial."""

    address: str

    def accept(self) -> Stream:
        """Waits for the next stream. Raises LinkError when the listener is closed."""

    def close(self) -> None:
        """Wakes `accept`. Idempotent."""


class Transport(Protocol):
    """A way to reach a process: one row of `transport.TRANSPORTS`."""

    def listen(self, name: str, host: str, stall_seconds: float) -> Listener:
        """Starts to listen for a process of some name. Raises LinkError."""

    def dial(self, place: str, stall_seconds: float, seconds: float) -> Stream:
        """A stream to a listener. place: its address without scheme. Raises LinkError."""
