"""Frames over a stream, between two processes that have proved to each other that they know the secret.

Both sides say hello. Each then proves that it knows the secret and has the same compatibility tag:

    hello              = magic, version, length of the name, nonce [32], name
    proof              = BLAKE3, keyed, of "proof", its role and both hellos
    compatibility_tag  = BLAKE3, keyed, of "about", its role, both hellos and the tag, which names the version of
                         Quire: both must be equal, but neither side learns the other's
    key                = BLAKE3, keyed, of "frames", the sender's role and both hellos

The roles are "dialer" and "listener", so that nobody can send a proof back. Then frames follow in both directions:

    frame  = counter [8], kind [1], zero [3], bytes of meta [4], number [8], MAC [16], meta, payload
    MAC    = first 16 bytes of BLAKE3, keyed with the direction's key, of the fields before it, and meta

The payload has no MAC here. A payload is an extent with its own MAC, and hashing it twice would halve the throughput.
Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import os
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from blake3 import blake3

from quire.cluster.transport.stream import TransportError
from quire.version import __version__

if TYPE_CHECKING:
    from quire.cluster.transport.sockets import SocketStream

MOST_META = 64 << 20
"""Maximum bytes of a message."""
MOST_EXTENT = 4 << 30
"""Maximum bytes of an extent."""
MOST_EXTENTS = 65536
"""Maximum extents of a message."""

MESSAGE, EXTENT = 1, 2
"""Kinds of frames. A transport may add others. number: the extents after the message; the bytes of the extent."""

_MAGIC, _VERSION = b"QLNK", 3
_HELLO = struct.Struct("<4sBB32s")
_HEADER = struct.Struct("<QB3xIQ")
_MAC_BYTES, _PROOF_BYTES = 16, 32
_PIECE = 1 << 20
"""Bytes of a payload skipped at a time."""


class Credentials:
    """The identity of a process towards its peers."""

    def __init__(self, name: str, secret: bytes, compatibility_tag: bytes) -> None:
        assert secret, "links without a secret"
        assert 0 < len(name.encode()) < 256, f"a name of {len(name.encode())} bytes; 1 to 255 are possible"
        self.name, self.compatibility_tag = name, compatibility_tag
        self.key = blake3(secret, derive_key_context="quire cluster links 1").digest()

    def mac(self, *parts: bytes) -> bytes:
        """A MAC of the parts, keyed with the cluster's secret."""
        return blake3(b"".join(parts), key=self.key).digest()


class Frame(NamedTuple):
    """A frame without its payload."""

    kind: int
    number: int
    meta: bytearray


class Channel:
    """An authenticated stream. One thread may send while another one receives.

    peer  name of the process at the other end
    """

    def __init__(self, stream: SocketStream, peer: str, send_key: bytes, receive_key: bytes) -> None:
        self.peer = peer
        self.stream = stream
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0
        self._head = memoryview(bytearray(_HEADER.size + _MAC_BYTES))

    def send(self, kind: int, number: int, meta: bytes = b"", payload: memoryview | None = None) -> None:
        """Sends a frame."""
        assert len(meta) <= MOST_META, f"{len(meta)} bytes of meta"
        header = _HEADER.pack(self._num_sent, kind, len(meta), number)
        self._num_sent += 1
        head = header + _mac(self._send_key, header, meta)
        parts = (head + meta,) if len(meta) < 4096 else (head, meta)
        self.stream.write(*parts) if payload is None else self.stream.write(*parts, payload)

    def receive(self) -> Frame:
        """Waits for the next frame. The caller reads its payload according to its kind. Raises TransportError if the
        frame is damaged or out of order.
        """
        self.stream.read(self._head, is_idle=True)
        counter, kind, length, number = _HEADER.unpack_from(self._head)
        if counter != self._num_received or length > MOST_META:
            raise TransportError(f"frame {self._num_received} says that it is frame {counter} and has {length} bytes")
        meta = bytearray(length)
        if length:
            self.stream.read(memoryview(meta))
        header, mac = bytes(self._head[: _HEADER.size]), bytes(self._head[_HEADER.size :])
        if not hmac.compare_digest(mac, _mac(self._receive_key, header, meta)):
            raise TransportError(f"frame {counter} is damaged, or not from {self.peer!r}: the MAC differs")
        self._num_received += 1
        return Frame(kind, number, meta)


class ExtentChannel:
    """Extents that travel in the stream after their frames. One thread may send while another one receives."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._buffer = np.empty(0, np.uint8)

    def send(self, extent: memoryview) -> None:
        """Sends an extent. Its memory may change once this returns. Raises TransportError."""
        if len(extent) > MOST_EXTENT:
            raise TransportError(f"an extent of {len(extent)} bytes; {MOST_EXTENT} are possible")
        self._channel.send(EXTENT, len(extent), payload=extent)

    def receive(self, frame: Frame) -> memoryview:
        """The extent that a frame announces, valid until `free`. Raises TransportError."""
        length = self._length(frame)
        if length > len(self._buffer):
            self._buffer = np.empty(length, np.uint8)
        extent = self._buffer.data[:length]
        self._channel.stream.read(extent)
        return extent.toreadonly()

    def skip(self, frame: Frame) -> None:
        """Skips the extent that a frame announces."""
        length, scratch = self._length(frame), memoryview(bytearray(_PIECE))
        for start in range(0, length, _PIECE):
            self._channel.stream.read(scratch[: length - start])

    def free(self) -> None:
        """Frees the last received extent; the next one reuses its memory."""

    def close(self) -> None:
        """Frees all memory. The channel must not be used afterwards."""

    def _length(self, frame: Frame) -> int:
        if frame.kind != EXTENT or frame.number > MOST_EXTENT:
            raise TransportError(f"an extent was due, and frame of kind {frame.kind} and number {frame.number} came")
        return frame.number


def authenticate(stream: SocketStream, credentials: Credentials, seconds: float, *, expected: str | None) -> Channel:
    """Turns a new stream into a channel. Raises TransportError with the reason. The stream's owner closes it.

    expected  name of the peer that was dialled; None at a listener
    """
    stream.set_deadline(time.monotonic() + seconds)
    roles = (b"dialer", b"listener") if expected is not None else (b"listener", b"dialer")
    name = credentials.name.encode()
    own = _HELLO.pack(_MAGIC, _VERSION, len(name), os.urandom(32)) + name
    if expected is not None:
        stream.write(own)
    peer, theirs = _hello(stream)
    if expected is None:
        stream.write(own)
    if peer == credentials.name:
        raise TransportError(f"the peer calls itself {peer!r} too; every process needs a name of its own")
    if expected is not None and peer != expected:
        raise TransportError(f"{peer!r} answers at the address of {expected!r}")
    both = own + theirs if expected is not None else theirs + own

    def proofs(role: bytes) -> tuple[bytes, bytes]:
        return credentials.mac(b"proof ", role, both), credentials.mac(
            b"about ", role, both, credentials.compatibility_tag
        )

    # Both sides send their proofs before they check the peer's, so that both learn the reason of a failure.
    stream.write(b"".join(proofs(roles[0])))
    received = bytearray(2 * _PROOF_BYTES)
    stream.read(memoryview(received))
    proof, compatibility_tag = proofs(roles[1])
    if not hmac.compare_digest(received[:_PROOF_BYTES], proof):
        raise TransportError(f"{peer!r} has another secret")
    if not hmac.compare_digest(received[_PROOF_BYTES:], compatibility_tag):
        raise TransportError(f"{peer!r} runs another version of Quire; this process runs version {__version__}")
    stream.set_deadline(None)
    return Channel(stream, peer, *(credentials.mac(b"frames ", role, both) for role in roles))


def _hello(stream: SocketStream) -> tuple[str, bytes]:
    """The peer's name, and its hello message."""
    fixed = bytearray(_HELLO.size)
    stream.read(memoryview(fixed))
    magic, version, length, _ = _HELLO.unpack(fixed)
    if magic != _MAGIC:
        raise TransportError(f"no process of a cluster: it begins with {magic!r}")
    if version != _VERSION:
        raise TransportError(f"the peer speaks version {version} of the links, and this is version {_VERSION}")
    name = bytearray(length)
    stream.read(memoryview(name))
    if not name:
        raise TransportError("a peer without a name")
    try:
        return name.decode(), bytes(fixed + name)
    except UnicodeDecodeError:
        raise TransportError(f"a peer's name is no text: {bytes(name)!r}") from None


def _mac(key: bytes, header: bytes, meta: bytes | bytearray) -> bytes:
    return blake3(header + meta, key=key).digest(_MAC_BYTES)
