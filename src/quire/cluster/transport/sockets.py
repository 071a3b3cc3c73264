"""Streams and listeners over sockets of any family."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable

from quire.cluster.transport.channel import Channel, ExtentChannel
from quire.cluster.transport.stream import ForeignUserError, PeerClosedError, TransportError
from quire.rate_limited_warning import RateLimitedWarning

log = logging.getLogger("quire")

_BACKLOG = 128
_PAUSE = 0.1
"""Seconds before a listener retries a failed accept."""


class SocketStream:
    """Bytes in both directions, in order. One thread may read while another one writes.

    Timeouts apply to single calls, so a slow peer has not stalled.
    """

    def __init__(self, connected: socket.socket, stall_seconds: float) -> None:
        """stall_seconds: maximum wait for the peer's next bytes, unless a deadline is set."""
        self._stall_seconds = stall_seconds
        self._until: float | None = None
        self._socket = connected
        connected.settimeout(stall_seconds)

    def set_deadline(self, until: float | None) -> None:
        """Sets a deadline for all following calls, by `time.monotonic`. None: no deadline; each wait may take as long
        as stall_seconds.
        """
        self._until = until
        self._socket.settimeout(self.seconds())

    def seconds(self) -> float:
        """Maximum time of the next wait. Raises TransportError if the deadline is over."""
        if self._until is None:
            return self._stall_seconds
        if (left := self._until - time.monotonic()) <= 0:
            raise TransportError("the peer takes too long to authenticate")
        return left

    def read(self, into: memoryview, *, is_idle: bool = False) -> None:
        """Fills `into`. Raises TransportError if the stream ends or stalls. is_idle: the first byte has no timeout."""
        done = 0
        while done < len(into):
            if self._until is not None:
                self._socket.settimeout(self.seconds())
            try:
                count = self._socket.recv_into(into[done:])
            except TimeoutError:
                if is_idle and not done and self._until is None:
                    continue
                raise TransportError("the peer stopped in the middle of a frame") from None
            except OSError as error:
                raise TransportError(f"the connection has ended: {error}") from None
            if not count:
                raise PeerClosedError("the peer has closed the connection")
            done += count

    def write(self, *parts: bytes | memoryview) -> None:
        """Sends all parts without a copy. The peer never sees their memory. Raises TransportError if the peer
        stops reading.
        """
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            if self._until is not None:
                self._socket.settimeout(self.seconds())
            try:
                count = self._socket.sendmsg(left, (), socket.MSG_NOSIGNAL)
            except TimeoutError:
                raise TransportError("the peer takes no bytes") from None
            except OSError as error:
                raise TransportError(f"the connection has ended: {error}") from None
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def shut(self) -> None:
        """Ends the stream: reads and writes at both ends raise TransportError. Never blocks."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the socket. The stream must not be used afterwards."""
        self._socket.close()

    def extent_channel(self, channel: Channel) -> ExtentChannel:
        """How extents travel beside this stream."""
        return ExtentChannel(channel)


class SocketListener:
    """A listening socket.

    stream  makes a stream of an accepted socket. Raises ForeignUserError for a peer that may not dial: its connection
            is closed before it costs anything, and before the next one is accepted
    """

    def __init__(self, bound: socket.socket, address: str, stream: Callable[[socket.socket], SocketStream]) -> None:
        self.address = address
        self._socket, self._stream = bound, stream
        self._refusals = RateLimitedWarning(log)
        bound.listen(_BACKLOG)

    def accept(self) -> SocketStream:
        """Waits for the next stream. Raises TransportError when the listener is closed."""
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):
                    self._socket.close()
                    self._refusals.end()
                    raise TransportError("the listener is closed") from None
                # What remains is about one connection, or passes when others end: there is no descriptor or memory.
                time.sleep(_PAUSE)
                continue
            try:
                return self._stream(accepted)
            except ForeignUserError as error:
                accepted.close()
                self._refusals.warn(f"a connection to {self.address} is refused: {error}")
            except OSError:
                accepted.close()

    def close(self) -> None:
        """Wakes `accept`, which closes the socket, so that its number cannot belong to another one meanwhile."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
