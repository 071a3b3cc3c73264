"""Frames of strangers, of damaged streams and of refused peers reach nobody."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from quire.cluster import wire
from quire.cluster.connections import MOST_STRANGERS
from quire.cluster.transport import channel as channels
from quire.cluster.transport import transport_of
from quire.cluster.transport.channel import EXTENT, MESSAGE, MOST_EXTENTS, Channel, Credentials, authenticate
from quire.cluster.transport.sockets import SocketStream
from quire.cluster.transport.stream import TransportError
from quire.version import __version__
from tests.cluster.transport.test_connection import PATIENCE, SECRET, Cluster, ask, eventually, until_the_end
from tests.cluster.transport.test_connection import cluster as cluster


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"secret": b"another"}, "has another secret"),
        ({"compatibility_tag": b"x"}, f"runs another version of Quire; this process runs version {__version__}"),
        ({"name": "a"}, "calls itself 'a' too"),
    ],
)
def test_both_sides_refuse_a_peer_and_say_why(
    cluster: Cluster, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, from_b = cluster.add("a")
    b, from_a = cluster.add(**({"name": "b", "is_listening": False} | options))
    b.learn("a", cluster.addresses["a"])
    with pytest.raises(TransportError, match=reason):
        b.connect("a", PATIENCE)
    eventually(lambda: any(reason in each and "connection to an unknown peer" in each for each in caplog.messages))
    assert not a.send("b", ask())
    assert from_a.losses == from_b.losses == [] and from_b.messages == []


def test_a_peer_with_another_name_than_its_address_had_is_refused(cluster: Cluster) -> None:
    a, _, _, from_a = cluster.pair()
    a.learn("c", cluster.addresses["b"])
    with pytest.raises(TransportError, match="'b' answers at the address of 'c'"):
        a.connect("c", PATIENCE)
    assert from_a.losses == []


def hello(**changes: Any) -> bytes:
    parts = {"magic": b"QLNK", "version": channels._VERSION, "name": b"stranger", "length": None} | changes
    length = len(parts["name"]) if parts["length"] is None else parts["length"]
    return channels._HELLO.pack(parts["magic"], parts["version"], length, os.urandom(32)) + parts["name"]


@pytest.mark.parametrize("version", [2, 4])
def test_a_listener_refuses_a_peer_that_speaks_another_version_of_the_links(
    cluster: Cluster, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    b, inbox = cluster.add("b", handshake_seconds=0.4)
    stream = cluster.dial("b")
    with closing(stream):
        stream.write(hello(version=version))
        answered = until_the_end(stream)
    eventually(lambda: b.num_strangers == 0)
    refusal = f"connection to an unknown peer: the peer speaks version {version} of the links, and this is version 3"
    assert refusal in caplog.messages and inbox.losses == []
    assert answered == b"", "a listener answers only its own version"


@pytest.mark.parametrize("version", [2, 4])
def test_a_dialer_refuses_a_listener_that_speaks_another_version_of_the_links(cluster: Cluster, version: int) -> None:
    a, inbox = cluster.add("a", handshake_seconds=0.4)
    listener = transport_of(f"{cluster.transport}://any")[0].listen("127.0.0.1", PATIENCE)

    def answer() -> None:
        with closing(listener.accept()) as stream:
            stream.write(hello(version=version, name=b"b"))
            until_the_end(stream)
        with pytest.raises(TransportError, match="closed"):
            listener.accept()

    answering = threading.Thread(target=answer)
    answering.start()
    a.learn("b", listener.address)
    refusal = f"the peer speaks version {version} of the links, and this is version 3"
    try:
        with pytest.raises(TransportError, match=refusal):
            a.connect("b", PATIENCE)
    finally:
        listener.close()
        answering.join(PATIENCE)
    assert inbox.losses == []


def test_strangers_reach_nobody_and_cost_nothing(cluster: Cluster) -> None:
    b, inbox = cluster.add("b", handshake_seconds=0.4)
    a, _ = cluster.add("a")
    a.learn("b", cluster.addresses["b"])
    said = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nUser-Agent: nobody\r\n\r\n",
        b"\xff" * 1000,
        b"",
        b"Q",
        hello()[:20],
        hello(magic=b"\0\0\0\0"),
        hello(version=2),
        hello(version=4),
        hello(name=b"", length=0),
        hello(name=b"\xff\xfe"),
        hello(length=255),
        hello() + bytes(63),
        hello() + bytes(64),
        hello() + bytes(64) + channels._HEADER.pack(0, 1, 0xFFFFFFFF, 0) + bytes(16),
    ]
    gone, waiting = [cluster.dial("b") for _ in said], [cluster.dial("b") for _ in said]
    for streams in (gone, waiting):
        for stream, each in zip(streams, said, strict=True):
            stream.write(each)
    for stream in gone:
        stream.shut()
    assert a.send("b", ask())
    inbox.wait(1)
    for stream in waiting:
        until_the_end(stream)
    eventually(lambda: b.num_strangers == 0)
    assert inbox.messages == [("a", ask())] and inbox.losses == []
    for stream in (*gone, *waiting):
        stream.close()


def test_there_is_an_end_to_strangers(cluster: Cluster) -> None:
    b, _ = cluster.add("b")
    streams = [cluster.dial("b") for _ in range(MOST_STRANGERS)]
    eventually(lambda: b.num_strangers == MOST_STRANGERS)
    streams.append(cluster.dial("b"))
    assert until_the_end(streams[0]) == b"", "the oldest one keeps its place"
    eventually(lambda: b.num_strangers == MOST_STRANGERS)
    for stream in streams:
        stream.shut()
        stream.close()
    eventually(lambda: b.num_strangers == 0)


class Recorder:
    """A stream that remembers what was written to it."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self.written = b""

    def write(self, *parts: bytes | memoryview) -> None:
        self.written += b"".join(map(bytes, parts))
        self._stream.write(*parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def test_recorded_bytes_open_nothing(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    _, inbox = cluster.add("b")
    recorder = Recorder(cluster.dial("b"))
    channel = authenticate(recorder, Credentials("raw", SECRET, b""), PATIENCE, expected="b")
    channel.send(MESSAGE, 0, wire.encode(ask(1)))
    inbox.wait(1)
    recorder.shut()
    inbox.wait(losses=1)
    replay = cluster.dial("b")
    replay.write(recorder.written)
    until_the_end(replay)
    eventually(lambda: "'raw' has another secret" in caplog.text)
    assert inbox.messages == [("raw", ask(1))] and inbox.losses == ["raw"]
    recorder.close()
    replay.close()


def test_what_a_listener_says_proves_nothing_about_a_dialer(cluster: Cluster) -> None:
    """Reflecting a listener's proofs is no proof."""
    _, inbox = cluster.add("b")
    stream = cluster.dial("b")
    own = hello(name=b"mirror")
    stream.write(own)
    theirs = bytearray(len(hello(name=b"b")) + 64)
    stream.set_deadline(time.monotonic() + PATIENCE)
    stream.read(memoryview(theirs))
    stream.write(bytes(theirs[-64:]))
    until_the_end(stream)
    stream.close()
    assert inbox.losses == []


class Flipping:
    """A stream that flips a bit of what is written to it, once armed.

    bit  its number in the bytes of one write
    """

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self.bit: int | None = None

    def write(self, *parts: bytes | memoryview) -> None:
        written = bytearray().join(map(bytes, parts))
        if self.bit is not None:
            written[self.bit // 8 % len(written)] ^= 1 << self.bit % 8
            self.bit = None
        self._stream.write(bytes(written))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.mark.parametrize("where", ["message", "announcement of an extent"])
def test_a_flipped_bit_ends_the_connection_and_reaches_nobody(cluster: Cluster, where: str) -> None:
    _, inbox = cluster.add("b")
    head_bytes = channels._HEADER.size + channels._MAC_BYTES
    num_bits = 8 * (head_bytes + (len(wire.encode(ask(1))) if where == "message" else 0))
    bits = [*random.sample(range(num_bits), 12), 8 * 12, 8 * 12 + 31, 8 * 16, 8 * 23 + 7]
    for number, bit in enumerate(bits):
        stream = Flipping(cluster.dial("b"))
        channel = authenticate(stream, Credentials("raw", SECRET, b""), PATIENCE, expected="b")
        if where == "message":
            stream.bit = bit
            channel.send(MESSAGE, 0, wire.encode(ask(1)))
        else:
            channel.send(MESSAGE, 1, wire.encode(ask(1)))
            stream.bit = bit
            channel.send(EXTENT, 8, payload=memoryview(b"12345678"))
        if 8 * 12 <= bit < 8 * 16:
            stream.shut()  # a longer message is never complete
        inbox.wait(losses=number + 1)
        stream.close()
    assert inbox.messages == []


@pytest.mark.parametrize(
    ("send", "reason"),
    [
        (lambda peer: peer.send(MESSAGE, MOST_EXTENTS + 1, wire.encode(ask())), "a message was due"),
        (lambda peer: peer.send(EXTENT, 5, payload=memoryview(b"12345")), "a message was due"),
        (lambda peer: peer.send(99, 0), "a message was due"),
        (lambda peer: peer.send(MESSAGE, 0, b"\xc1"), "no message"),
        (lambda peer: peer.send(MESSAGE, 0, wire._ENCODER.encode(("Begin", {}))), "unknown class 'Begin'"),
        (
            lambda peer: peer.send(MESSAGE, 0, wire._ENCODER.encode(("ManifestRequest", {"attempt": [1, "x"]}))),
            "Expected `int`",
        ),
        (lambda peer: (peer.send(MESSAGE, 1, wire.encode(ask())), peer.send(MESSAGE, 0)), "an extent was due"),
        (lambda peer: (peer.send(MESSAGE, 1, wire.encode(ask())), peer.send(EXTENT, 1 << 40)), "an extent was due"),
        (lambda peer: (setattr(peer, "_num_sent", 5), peer.send(MESSAGE, 0, wire.encode(ask()))), "frame 5"),
        (lambda peer: peer.stream.write(bytes(12) + b"\xff" * 28), "4294967295 bytes"),
    ],
)
def test_frames_that_make_no_sense_end_the_connection(
    cluster: Cluster, send: Callable[[Channel], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, inbox = cluster.add("b")
    peer = cluster.raw("b")
    send(peer)
    inbox.wait(losses=1)
    assert inbox.messages == [] and inbox.losses == ["raw"]
    assert reason in caplog.text
    peer.stream.close()


def test_a_peer_that_stops_within_a_frame_is_lost(cluster: Cluster) -> None:
    _, inbox = cluster.add("b", stall_seconds=0.3)
    quiet, half = cluster.raw("b", "quiet"), cluster.raw("b", "half")
    half.stream.write(bytes(11))
    inbox.wait(losses=1)
    time.sleep(0.4)
    assert inbox.losses == ["half"], "one who has nothing to say is not lost"
    for peer in (quiet, half):
        peer.stream.shut()
        peer.stream.close()
    inbox.wait(losses=2)
