"""Streams between processes of a machine: a Unix socket for frames, shared memory for extents.

Each direction has a segment of anonymous memory from its first extent on. The sender copies extents into it as into a
ring, and the receiver reads them in place. An extent that does not fit before the end of the segment begins at its
start. So both sides compute each extent's position from the lengths alone.

    SEGMENT  frame; number: bytes of the segment; then one byte with two descriptors: the segment, and its eventfd
    RING     frame; number: bytes of an extent that lies in the segment

The receiver adds the bytes of an extent to the eventfd once it no longer needs the extent. An eventfd, not a frame: the
reading thread must never wait for a write, or two processes that send a lot to each other would block.

The socket's address is abstract and the segment has no name, so nothing is left of a killed process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct

import numpy as np

from quire.cluster.transport.channel import Channel, ExtentChannel, Frame
from quire.cluster.transport.sockets import SocketListener, SocketStream
from quire.cluster.transport.stream import ForeignUserError, TransportError

SHM_BYTES = 64 << 20
"""Bytes of a segment. Extents of more than half of it travel through the socket."""
_MOST_SHM = 1 << 30
"""Maximum bytes of a peer's segment."""
_ALIGNED = 64
_SOCKET_BYTES = 1 << 20
"""Bytes of the socket's buffers: for messages, and for extents that are too large for the segment."""

SEGMENT, RING = 16, 17

_CREDENTIALS = struct.Struct("=iII")
"""Format of ucred: process, user and group."""
_TIMEVAL = struct.Struct("@ll")

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ShmStream(SocketStream):
    """A Unix socket that can pass descriptors."""

    def extent_channel(self, channel: Channel) -> RingExtentChannel:
        """See SocketStream."""
        return RingExtentChannel(channel, self)

    def write_descriptors(self, *numbers: int) -> None:
        """Sends a byte with descriptors."""
        try:
            socket.send_fds(self._socket, [b"\0"], numbers)
        except OSError as error:
            raise TransportError(f"the connection has ended: {error}") from None

    def read_descriptors(self, count: int) -> list[int]:
        """Reads a byte and the descriptors that must come with it. The caller owns the descriptors."""
        try:
            byte, numbers, _, _ = socket.recv_fds(self._socket, 1, count, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise TransportError(f"the connection has ended: {error}") from None
        if len(byte) != 1 or len(numbers) != count:
            for number in numbers:
                os.close(number)
            raise TransportError(f"{count} descriptors were due, and {len(numbers)} came")
        return list(numbers)

    def wait_for(self, number: int) -> None:
        """Waits until a descriptor is readable. Raises TransportError if the stream ends or the peer stalls first."""
        poll = select.poll()
        poll.register(number, select.POLLIN)
        poll.register(self._socket, 0)
        found = dict(poll.poll(self.seconds() * 1000))
        if self._socket.fileno() in found:
            raise TransportError("the connection has ended")
        if not found:
            raise TransportError("the peer takes no extents")


class _Outgoing:
    """The sender's end of a segment.

    credit  eventfd to which the receiver adds the bytes that it has freed
    """

    def __init__(self, num_bytes: int, channel: Channel, stream: ShmStream) -> None:
        """Creates a segment and sends it to the peer."""
        self.num_bytes = num_bytes
        self.credit = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stream = stream
        self._position = self._occupied = 0
        number = os.memfd_create("quire-extents", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(number, num_bytes)
            fcntl.fcntl(number, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(number, num_bytes)
            channel.send(SEGMENT, num_bytes)
            stream.write_descriptors(number, self.credit)
        except BaseException:
            os.close(self.credit)
            raise
        finally:
            os.close(number)

    def put(self, extent: memoryview) -> None:
        """Copies an extent into the segment once there is room."""
        offset, size = _locate(self._position, len(extent), self.num_bytes)
        while self._occupied + size > self.num_bytes:
            self._stream.wait_for(self.credit)
            freed = os.eventfd_read(self.credit)
            if freed > self._occupied:
                raise TransportError(f"the peer has freed {freed} bytes of extents, and had {self._occupied}")
            self._occupied -= freed
        if len(extent):
            # Not an assignment to the map, which would hold the interpreter's lock.
            room = np.frombuffer(self._map, np.uint8, len(extent), offset)
            np.copyto(room, np.frombuffer(extent, np.uint8))
        self._position += size
        self._occupied += size

    def close(self) -> None:
        """Frees the segment."""
        os.close(self.credit)
        _unmap(self._map)


class _Incoming:
    """The receiver's end of a segment, which is read-only."""

    def __init__(self, number: int, credit: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.credit = credit
        self._position = self._owed = 0
        if os.fstat(number).st_size != num_bytes or fcntl.fcntl(number, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise TransportError("the peer's segment has another size than it says, or could shrink")
        self._map = mmap.mmap(number, num_bytes, prot=mmap.PROT_READ)

    def receive(self, length: int) -> memoryview:
        """The next extent, in place."""
        offset, self._owed = _locate(self._position, length, self.num_bytes)
        self._position += self._owed
        with memoryview(self._map) as whole:
            return whole[offset : offset + length]

    def free(self) -> None:
        """Lets the sender overwrite the last extent."""
        if self._owed:
            try:
                os.eventfd_write(self.credit, self._owed)
            except OSError as error:
                raise TransportError(f"the peer's eventfd takes nothing: {error}") from None
            self._owed = 0

    def close(self) -> None:
        """Frees the segment."""
        os.close(self.credit)
        _unmap(self._map)


class RingExtentChannel(ExtentChannel):
    """Extents in shared memory, or in the socket if they are too large."""

    def __init__(self, channel: Channel, stream: ShmStream) -> None:
        super().__init__(channel)
        self._stream = stream
        self._outgoing: _Outgoing | None = None
        self._incoming: _Incoming | None = None

    def send(self, extent: memoryview) -> None:
        """See ExtentChannel."""
        if self._outgoing is None:
            try:
                self._outgoing = _Outgoing(SHM_BYTES, self._channel, self._stream)
            except OSError as error:
                raise TransportError(f"there is no shared memory for extents: {error}") from None
        if len(extent) > self._outgoing.num_bytes // 2:
            super().send(extent)
        else:
            self._outgoing.put(extent)
            self._channel.send(RING, len(extent))

    def receive(self, frame: Frame) -> memoryview:
        """See ExtentChannel."""
        frame = self._after_segment(frame)
        if frame.kind != RING:
            return super().receive(frame)
        if self._incoming is None or frame.number > self._incoming.num_bytes // 2:
            raise TransportError(f"an extent of {frame.number} bytes cannot lie in the peer's segment")
        return self._incoming.receive(frame.number)

    def skip(self, frame: Frame) -> None:
        """See ExtentChannel."""
        frame = self._after_segment(frame)
        if frame.kind == RING:
            self.receive(frame)
            self.free()
        else:
            super().skip(frame)

    def free(self) -> None:
        """See ExtentChannel."""
        if self._incoming is not None:
            self._incoming.free()

    def close(self) -> None:
        """See ExtentChannel."""
        for end in (self._incoming, self._outgoing):
            if end is not None:
                end.close()
        self._incoming = self._outgoing = None

    def _after_segment(self, frame: Frame) -> Frame:
        """The frame itself, or the next frame if this one brings the segment."""
        if frame.kind != SEGMENT:
            return frame
        number, credit = self._stream.read_descriptors(2)
        try:
            if self._incoming is not None or not 0 < frame.number <= _MOST_SHM or frame.number % (2 * _ALIGNED):
                raise TransportError(f"a second segment, or one of {frame.number} bytes")
            self._incoming = _Incoming(number, credit, frame.number)
        except (OSError, TransportError) as error:
            os.close(credit)
            raise TransportError(f"the peer's segment cannot be used: {error}") from None
        finally:
            os.close(number)
        return self._channel.receive()


class ShmTransport:
    """See Transport."""

    def listen(self, host: str, stall_seconds: float) -> SocketListener:
        """See Transport. The address is visible only in the same network namespace; `host` is ignored. Only processes
        of this process' user may connect, and they must know the secret.
        """
        endpoint = f"quire-{os.getpid()}-{secrets.token_hex(8)}"
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(f"\0{endpoint}")
        return SocketListener(bound, f"shm://{endpoint}", lambda accepted: _accepted(accepted, stall_seconds))

    def dial(self, endpoint: str, stall_seconds: float, seconds: float) -> ShmStream:
        """See Transport."""
        made = socket.socket(socket.AF_UNIX)
        try:
            # Not `settimeout`: a socket that does not block is refused as soon as the listener's queue is full, while
            # one that blocks gets the next place in it.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*_seconds_and_micros(seconds)))
            made.connect(f"\0{endpoint}")
            return _stream(made, stall_seconds)
        except OSError as error:
            made.close()
            raise TransportError(f"nothing answers at shm://{endpoint}: {error}") from None


def peer_user(connected: socket.socket) -> int:
    """The effective user id of a peer when it dialled, as recorded by the kernel."""
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(found)[1]
    return user


def _accepted(accepted: socket.socket, stall_seconds: float) -> ShmStream:
    # Root is refused too, unless we are root: the instances of a cluster all have our user id.
    if (user := peer_user(accepted)) != os.geteuid():
        raise ForeignUserError(f"user {user} dialled, and only user {os.geteuid()} may")
    return _stream(accepted, stall_seconds)


def _seconds_and_micros(seconds: float) -> tuple[int, int]:
    whole = int(seconds)
    return whole, max(int((seconds - whole) * 1e6), 0 if whole else 1)  # zeros would be no limit


def _stream(connected: socket.socket, stall_seconds: float) -> ShmStream:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
    return ShmStream(connected, stall_seconds)


def _unmap(mapped: mmap.mmap) -> None:
    """Unmaps memory; if views of it remain, the last view unmaps it."""
    with contextlib.suppress(BufferError):
        mapped.close()


def _locate(position: int, length: int, num_bytes: int) -> tuple[int, int]:
    """The position of the next extent in a segment, and the bytes that it takes, skipped bytes at the end included.

    position  total bytes of all earlier extents
    """
    length, offset = -(-length // _ALIGNED) * _ALIGNED, position % num_bytes
    return (offset, length) if offset + length <= num_bytes else (0, num_bytes - offset + length)
