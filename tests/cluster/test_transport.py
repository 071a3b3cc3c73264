"""Connections between processes: what arrives, what ends a connection, and that each end is told once."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.cluster import messages, wire
from quire.cluster.connections import MOST_STRANGERS, PeerConnections
from quire.cluster.messages import Ack, Attempt, Failed, Manifest, ManifestRequest, Token
from quire.cluster.transport import channel as channels
from quire.cluster.transport import connection as link_module
from quire.cluster.transport import shm, transport_of
from quire.cluster.transport.channel import EXTENT, MESSAGE, MOST_EXTENTS, Channel, Credentials, authenticate
from quire.cluster.transport.sockets import SocketStream
from quire.cluster.transport.stream import TransportError
from quire.engine.outputs import CompletionOutput
from quire.errors import ConfigError
from quire.version import __version__

from .. import links_child
from ..effort import examples, tries

TRANSPORTS = ("tcp", "shm")
SECRET = links_child.SECRET
PATIENCE = 20.0
"""Seconds until a test gives up what should happen at once."""
MIB = 1 << 20


class Inbox:
    """A handler that keeps what it gets.

    take  what it does with extents; all of them are copied by default
    """

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []
        self.extents: list[list[bytes]] = []
        self.losses: list[str] = []
        self.take: Callable[[Iterator[memoryview]], list[bytes]] = lambda extents: [bytes(each) for each in extents]
        self._changed = threading.Condition()

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        taken = self.take(extents)
        with self._changed:
            self.messages.append((sender, message))
            self.extents.append(taken)
            self._changed.notify_all()

    def connection_lost(self, name: str) -> None:
        with self._changed:
            self.losses.append(name)
            self._changed.notify_all()

    def wait(self, num_messages: int = 0, *, losses: int = 0) -> None:
        """Waits until there are that many."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: len(self.messages) >= num_messages and len(self.losses) >= losses, PATIENCE
            )
        assert is_there, f"{len(self.messages)} messages and {len(self.losses)} losses, not {num_messages}, {losses}"


class Parcel:
    """A bulk of some extents, all packed into one buffer.

    num_asked  how often an extent has been asked for
    num_done   how often `done` was called
    """

    def __init__(self, sizes: list[int], *, announced: int | None = None, fails_at: int = -1) -> None:
        self.num_extents = len(sizes) if announced is None else announced
        self.num_asked = self.num_done = 0
        self.gate = threading.Event()
        self.gate.set()
        self._sizes, self._fails_at = sizes, fails_at
        self._is_packing = False
        self._done = threading.Event()

    @property
    def expected(self) -> list[bytes]:
        return [self._bytes(index) for index in range(len(self._sizes))]

    def pack(self) -> Iterator[memoryview]:
        buffer = bytearray(max(self._sizes, default=0))
        self._is_packing = True
        try:
            for index, size in enumerate(self._sizes):
                self.num_asked += 1
                assert self.gate.wait(PATIENCE)
                if index == self._fails_at:
                    raise RuntimeError("cannot pack")
                buffer[:size] = self._bytes(index)
                yield memoryview(buffer)[:size]
                buffer[:] = b"\xff" * len(buffer)
        finally:
            self._is_packing = False

    def done(self) -> None:
        assert not self._is_packing, "done while it is packed"
        self.num_done += 1
        self._done.set()

    def wait(self) -> None:
        assert self._done.wait(PATIENCE), "nobody called done"

    def _bytes(self, index: int) -> bytes:
        block, size = random.Random(index).randbytes(1009), self._sizes[index]
        return (block * (size // len(block) + 1))[:size]


class Cluster:
    """Connections that are closed at the end."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.connections: list[PeerConnections] = []
        self.addresses: dict[str, str] = {}

    def add(
        self, name: str, secret: bytes = SECRET, *, is_listening: bool = True, **options: Any
    ) -> tuple[PeerConnections, Inbox]:
        inbox = Inbox()
        made = PeerConnections(name, secret, inbox, self.transport, **options)
        self.connections.append(made)
        if is_listening:
            self.addresses[name] = made.listen()
        return made, inbox

    def pair(self, **options: Any) -> tuple[PeerConnections, Inbox, PeerConnections, Inbox]:
        """a and b; a knows where b listens."""
        a, from_b = self.add("a", **options)
        b, from_a = self.add("b", **options)
        a.learn("b", self.addresses["b"])
        return a, from_b, b, from_a

    def dial(self, name: str) -> SocketStream:
        transport, place = transport_of(self.addresses[name])
        return transport.dial(place, PATIENCE, PATIENCE)

    def raw(self, name: str, own: str = "raw") -> Channel:
        """A peer that has authenticated itself, and may now send anything."""
        return authenticate(self.dial(name), Credentials(own, SECRET, b""), PATIENCE, expected=name)

    def close(self) -> None:
        for each in self.connections:
            each.close()


@pytest.fixture(params=TRANSPORTS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    before = open_things()
    made = Cluster(request.param)
    yield made
    made.close()
    nothing_is_left(before)


def open_things() -> list[str]:
    """Threads of links, and descriptors of what links use."""
    found = [thread.name for thread in threading.enumerate() if thread.name.startswith("quire-link")]
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(("socket:", "anon_inode:[eventfd", "/memfd:")):
            found.append(target.split(":")[0])
    return sorted(found)


def nothing_is_left(before: list[str]) -> None:
    if open_things() != before:
        gc.collect()
    eventually(lambda: open_things() == before, lambda: f"{open_things()} is open, and before {before}")


def eventually(is_true: Callable[[], bool], why: Callable[[], str] = lambda: "it never came") -> None:
    until = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < until, why()
        time.sleep(0.005)


def ask(number: int = 0) -> ManifestRequest:
    return ManifestRequest(Attempt(7, number))


# ---- what arrives ----------------------------------------------------------------------------------------------------


def test_messages_arrive_in_order_in_both_directions_of_one_connection(cluster: Cluster) -> None:
    a, from_b, b, from_a = cluster.pair()
    assert not b.send("a", ask()), "b has neither a connection nor an address"
    for number in range(200):
        assert a.send("b", ask(number))
    from_a.wait(200)
    manifest = Manifest(Attempt(7, 1), frozenset((1, 2)), Token(Attempt(7, 1), CompletionOutput(0, "", [3]), 2))
    assert b.send("a", manifest)
    from_b.wait(1)
    assert from_a.messages == [("a", ask(number)) for number in range(200)]
    assert from_b.messages == [("b", manifest)]
    assert from_a.extents == [[]] * 200


def test_extents_arrive_as_they_were_packed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the ring many times; extents of more than half of it go another way."""
    monkeypatch.setattr(shm, "SHM_BYTES", MIB)
    a, from_b, b, from_a = cluster.pair()
    half = MIB // 2
    cases = [[], [0], [1, 0, 63, 64, 65], [half, half - 1, half + 1, half, 3 * MIB, 5], [100_001] * 30, [half] * 5]
    parcels = [Parcel(sizes) for sizes in cases]
    for number, parcel in enumerate(parcels):
        assert a.send("b", ask(number), parcel)
    from_a.wait(len(parcels))
    assert from_a.extents == [parcel.expected for parcel in parcels]
    back = Parcel([200_000] * 20)
    assert b.send("a", ask(), back)
    from_b.wait(1)
    assert from_b.extents == [back.expected]
    for parcel in (*parcels, back):
        parcel.wait()
        assert parcel.num_done == 1 and parcel.num_asked == len(parcel.expected)


def test_extents_of_any_format_are_sent_as_bytes(cluster: Cluster) -> None:
    a, _, _, from_a = cluster.pair()
    numbers = np.arange(12, dtype=np.int32).reshape(3, 4)
    bulk = SimpleNamespace(num_extents=1, pack=lambda: iter([numbers.data]), done=lambda: None)
    assert a.send("b", ask(), bulk)
    from_a.wait(1)
    assert from_a.extents == [[numbers.tobytes()]]


def test_extents_are_packed_while_they_are_sent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that has one extent and asks for no more keeps the sender from packing the others."""
    monkeypatch.setattr(shm, "SHM_BYTES", 4 * MIB)
    a, _, _, from_a = cluster.pair()
    has_one, go_on = threading.Event(), threading.Event()

    def take(extents: Iterator[memoryview]) -> list[bytes]:
        taken = [bytes(next(extents))]
        has_one.set()
        assert go_on.wait(PATIENCE)
        return [*taken, *(bytes(each) for each in extents)]

    from_a.take = take
    parcel = Parcel([MIB] * 64)
    assert a.send("b", ask(), parcel)
    assert has_one.wait(PATIENCE)
    eventually(lambda: not is_moving(lambda: parcel.num_asked))
    assert 1 <= parcel.num_asked < 64 and not parcel.num_done
    go_on.set()
    from_a.wait(1)
    assert from_a.extents == [parcel.expected]


def is_moving(number: Callable[[], int]) -> bool:
    before = number()
    time.sleep(0.05)
    return number() != before


@pytest.mark.parametrize("num_taken", [0, 1, 3])
def test_extents_that_the_handler_does_not_take_are_skipped(cluster: Cluster, num_taken: int) -> None:
    a, _, _, from_a = cluster.pair()
    kept: list[Iterator[memoryview]] = []

    def take(extents: Iterator[memoryview]) -> list[bytes]:
        kept.append(extents)
        return [bytes(next(extents)) for _ in range(num_taken)]

    from_a.take = take
    parcels = [Parcel([2 * MIB, 70_000, 3, MIB]) for _ in range(3)]
    for parcel in parcels:
        assert a.send("b", ask(), parcel)
    from_a.wait(3)
    assert from_a.extents == [parcel.expected[:num_taken] for parcel in parcels]
    from_a.take = lambda extents: []
    assert a.send("b", ask())
    from_a.wait(4)
    assert [list(extents) for extents in kept] == [[], [], []], "they end with the message"


def test_extents_can_only_be_read(cluster: Cluster) -> None:
    a, _, _, from_a = cluster.pair()
    from_a.take = lambda extents: [b"read-only" for each in extents if each.readonly]
    assert a.send("b", ask(), Parcel([10, 20]))
    from_a.wait(1)
    assert from_a.extents == [[b"read-only"] * 2]


# ---- bulks are done once ---------------------------------------------------------------------------------------------


def test_a_bulk_that_cannot_be_sent_is_done_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, _, from_a = cluster.pair()
    parcel = Parcel([10])
    assert not a.send("nobody", ask(), parcel) and parcel.num_done == 1
    with pytest.raises(wire.WireError, match="no class of messages"):
        a.send("b", "text", parcel := Parcel([10]))
    assert parcel.num_done == 1
    with pytest.raises(wire.WireError, match="65537 extents"):
        a.send("b", ask(), parcel := Parcel([], announced=MOST_EXTENTS + 1))
    assert parcel.num_done == 1
    monkeypatch.setattr(link_module, "MOST_QUEUED", 2)
    slow = Parcel([10])
    slow.gate.clear()
    assert a.send("b", ask(), slow)
    eventually(lambda: slow.num_asked == 1)
    queued = [Parcel([10]), Parcel([10])]
    assert [a.send("b", ask(), each) for each in queued] == [True, True]
    assert not a.send("b", ask(), parcel := Parcel([10])) and parcel.num_done == 1, "too many wait"
    slow.gate.set()
    from_a.wait(3)
    for each in (slow, *queued):
        each.wait()
    a.close()
    assert not a.send("b", ask(), parcel := Parcel([10])) and parcel.num_done == 1
    assert [each.num_done for each in (slow, *queued)] == [1, 1, 1]


def test_without_a_thread_there_is_no_link(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    a, from_b, _, from_a = cluster.pair()
    with monkeypatch.context() as patch:
        patch.setattr(link_module.Connection, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        parcel = Parcel([10])
        with pytest.raises(RuntimeError, match="no thread"):
            a.send("b", ask(1), parcel)
        assert parcel.num_done == 1
        stream = cluster.dial("b")
        until_the_end(stream)
        stream.close()
    assert a.send("b", ask(2))
    from_a.wait(1)
    assert from_a.messages == [("a", ask(2))] and from_b.losses == []


@pytest.mark.parametrize("way", ["forget", "close", "peer closes"])
def test_a_link_that_ends_midway_is_done_with_all_its_bulks(cluster: Cluster, way: str) -> None:
    a, from_b, b, from_a = cluster.pair()
    parcels = [Parcel([1000] * 3), Parcel([5]), Parcel([6])]
    parcels[0].gate.clear()
    for each in parcels:
        assert a.send("b", ask(), each)
    eventually(lambda: parcels[0].num_asked == 1)
    ending = threading.Thread(target={"forget": lambda: a.forget("b"), "close": a.close, "peer closes": b.close}[way])
    ending.start()
    if way != "peer closes":
        from_a.wait(losses=1)
    if way != "close":
        from_b.wait(losses=1)
    assert not any(each.num_done for each in parcels), "it is still packing"
    parcels[0].gate.set()
    ending.join(PATIENCE)
    for each in parcels:
        each.wait()
    assert [each.num_done for each in parcels] == [1, 1, 1]
    assert from_a.messages == []
    assert (from_b.losses, from_a.losses) == {
        "forget": (["b"], ["a"]), "close": ([], ["a"]), "peer closes": (["b"], [])
    }[way]  # fmt: skip


@pytest.mark.parametrize(
    ("parcel", "reason"),
    [
        (lambda: Parcel([1000] * 3, fails_at=1), "cannot pack"),
        (lambda: Parcel([1000] * 3, announced=4), "1 fewer extents were packed than the 4 announced"),
        (lambda: Parcel([1000] * 3, announced=2), "more extents were packed than the 2 announced"),
    ],
)
def test_a_bulk_that_fails_ends_the_connection_with_a_reason(
    cluster: Cluster, parcel: Callable[[], Parcel], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, from_b, _, from_a = cluster.pair()
    failing = parcel()
    assert a.send("b", ask(), failing)
    from_a.wait(losses=1)
    from_b.wait(losses=1)
    failing.wait()
    assert failing.num_done == 1 and from_a.losses == ["a"] and from_b.losses == ["b"]
    assert reason in caplog.text
    if failing.num_extents != 2:
        assert from_a.messages == [], "not all that was announced came"


def test_a_bulk_whose_done_fails_is_logged_and_the_link_goes_on(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    a, _, _, from_a = cluster.pair()
    broken = SimpleNamespace(num_extents=1, pack=lambda: iter([memoryview(b"x")]), done=lambda: 1 / 0)
    assert a.send("b", ask(), broken) and a.send("b", ask())
    from_a.wait(2)
    assert "could not be freed" in caplog.text


# ---- ends of connections ---------------------------------------------------------------------------------------------


def test_a_handler_that_fails_ends_the_connection(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    a, from_b, _, from_a = cluster.pair()
    from_a.take = lambda extents: [b"%d" % (1 // 0)]
    assert a.send("b", ask())
    from_b.wait(losses=1)
    from_a.wait(losses=1)
    assert "ZeroDivisionError" in caplog.text
    assert from_b.losses == ["b"] and from_a.losses == ["a"]


def test_extents_whose_link_ends_raise_in_the_handler(cluster: Cluster) -> None:
    a, _, _, from_a = cluster.pair()
    seen: list[Exception] = []

    def take(extents: Iterator[memoryview]) -> list[bytes]:
        try:
            return [bytes(each) for each in extents]
        except TransportError as error:
            seen.append(error)
            raise

    from_a.take = take
    assert a.send("b", ask(), Parcel([1000] * 3, fails_at=2))
    from_a.wait(losses=1)
    assert len(seen) == 1 and from_a.messages == []


def test_after_a_loss_send_dials_again(cluster: Cluster) -> None:
    a, from_b, b, from_a = cluster.pair()
    assert a.send("b", ask(1))
    from_a.wait(1)
    b.close()
    from_b.wait(losses=1)
    assert a.send("b", ask(2)), "the address is known"
    from_b.wait(losses=2)
    again, from_a = cluster.add("b")
    a.learn("b", cluster.addresses["b"])
    assert a.send("b", ask(3), parcel := Parcel([50_000] * 4))
    from_a.wait(1)
    assert from_a.messages == [("a", ask(3))] and from_a.extents == [parcel.expected]
    assert again.send("a", ask(4))
    from_b.wait(1)
    a.forget("b")
    from_b.wait(losses=3)
    assert not a.send("b", ask(5)), "the address is forgotten"
    assert from_b.losses == ["b"] * 3


def test_a_connection_that_cannot_be_made_is_an_error_or_a_loss(cluster: Cluster) -> None:
    a, from_b, b, _ = cluster.pair()
    with pytest.raises(TransportError, match="the address of 'c' is unknown"):
        a.connect("c", 1)
    b.close()
    with pytest.raises(
        TransportError, match="no connection to 'b': nothing answers at|no connection to 'b': nothing listens at"
    ):
        a.connect("b", PATIENCE)
    assert from_b.losses == [], "nothing was sent"
    assert a.send("b", ask(), parcel := Parcel([10]))
    from_b.wait(losses=1)
    assert parcel.num_done == 1 and from_b.losses == ["b"]
    with pytest.raises(TransportError, match="is no address"):
        a.learn("b", "http://127.0.0.1")


def test_both_sides_may_dial_at_the_same_time(cluster: Cluster) -> None:
    a, from_b, b, from_a = cluster.pair()
    b.learn("a", cluster.addresses["a"])
    barrier = threading.Barrier(2)

    def run(connections: PeerConnections, peer: str) -> None:
        barrier.wait(PATIENCE)
        for number in range(100):
            assert connections.send(peer, ask(number), Parcel([5000]))

    threads = [threading.Thread(target=run, args=each) for each in ((a, "b"), (b, "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    from_a.wait(100)
    from_b.wait(100)
    for inbox, peer in ((from_a, "a"), (from_b, "b")):
        assert sorted(inbox.messages, key=lambda each: each[1].attempt) == [(peer, ask(n)) for n in range(100)]
        assert inbox.extents == [Parcel([5000]).expected] * 100 and inbox.losses == []


def test_close_may_be_called_twice_and_by_a_handler(cluster: Cluster) -> None:
    a, from_b, b, from_a = cluster.pair()

    def take(extents: Iterator[memoryview]) -> list[bytes]:
        b.close()
        return []

    from_a.take = take
    assert a.send("b", ask())
    from_b.wait(losses=1)
    b.close()
    a.close()
    a.close()
    assert from_a.losses == [], "whoever closes is not told"
    with pytest.raises(TransportError, match="these connections are closed"):
        a.connect("b", 1)


def test_a_peer_that_takes_nothing_is_lost_and_send_never_waits_for_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "SHM_BYTES", MIB)
    a, from_b = cluster.add("a", stall_seconds=0.4)
    _, from_a = cluster.add("b")
    a.learn("b", cluster.addresses["b"])
    let_go = threading.Event()
    from_a.take = lambda extents: [b"%d" % let_go.wait(PATIENCE)]
    parcels = [Parcel([MIB // 4] * 100) for _ in range(3)]
    longest = 0.0
    for each in parcels:
        begun = time.monotonic()
        assert a.send("b", ask(), each)
        longest = max(longest, time.monotonic() - begun)
    from_b.wait(losses=1)
    assert longest < 0.4, "send waited"
    for each in parcels:
        each.wait()
    assert [each.num_done for each in parcels] == [1, 1, 1] and from_b.losses == ["b"]
    let_go.set()
    from_a.wait(losses=1)
    assert from_a.losses == ["a"]


def test_messages_alone_fill_a_connection_too(cluster: Cluster) -> None:
    a, from_b = cluster.add("a", stall_seconds=0.4)
    _, from_a = cluster.add("b")
    a.learn("b", cluster.addresses["b"])
    let_go = threading.Event()
    from_a.take = lambda extents: [b"%d" % let_go.wait(PATIENCE)]
    assert all(a.send("b", Failed(Attempt(1, 1), "x" * MIB)) for _ in range(60))
    from_b.wait(losses=1)
    let_go.set()
    from_a.wait(losses=1)
    assert from_b.losses == ["b"]


def test_two_peers_that_flood_each_other_go_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who reads waits until he may write."""
    monkeypatch.setattr(shm, "SHM_BYTES", MIB)
    a, from_b, b, from_a = cluster.pair(stall_seconds=5.0)
    a.connect("b", PATIENCE)
    eventually(lambda: b.send("a", ask()))
    from_b.wait(1)
    for number in range(20):
        for connections, peer in ((a, "b"), (b, "a")):
            assert connections.send(peer, Failed(Attempt(1, number), "x" * 300_000), Parcel([200_000] * 5))
    from_a.wait(20)
    from_b.wait(21)
    assert from_a.losses == from_b.losses == []


# ---- who may connect -------------------------------------------------------------------------------------------------


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
    refusal = f"link to a stranger: the peer speaks version {version} of the links, and this is version 3"
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


def until_the_end(stream: SocketStream) -> bytes:
    """What comes before the stream ends."""
    received = bytearray()
    byte = bytearray(1)
    stream.set_deadline(time.monotonic() + PATIENCE)
    with pytest.raises(TransportError, match="closed|ended"):
        while True:
            stream.read(memoryview(byte))
            received += byte
    return bytes(received)


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


# ---- frames that the peer did not send -------------------------------------------------------------------------------


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


# ---- shared memory ---------------------------------------------------------------------------------------------------


def segment(num_bytes: int, seals: int) -> int:
    number = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(number, num_bytes)
    shm.fcntl.fcntl(number, shm.fcntl.F_ADD_SEALS, seals)
    return number


@pytest.mark.parametrize(
    ("said", "num_bytes", "seals", "ring", "reason"),
    [
        (MIB, MIB, shm._SEALS, MIB // 2 + 1, "cannot lie in the peer's segment"),
        (MIB, MIB // 2, shm._SEALS, 1, "another size than it says"),
        (MIB, MIB, shm.fcntl.F_SEAL_GROW, 1, "or could shrink"),
        (0, 0, shm._SEALS, 1, "one of 0 bytes"),
        (1 << 40, MIB, shm._SEALS, 1, "one of 1099511627776 bytes"),
        (None, 0, 0, 1, "cannot lie in the peer's segment"),
    ],
)
def test_segments_that_could_harm_are_refused(
    said: int | None, num_bytes: int, seals: int, ring: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_things()
    cluster = Cluster("shm")
    _, inbox = cluster.add("b")
    peer = cluster.raw("b")
    stream = peer.stream
    assert isinstance(stream, shm.ShmStream)
    peer.send(MESSAGE, 1, wire.encode(ask()))
    if said is not None:
        number, credit = segment(num_bytes, seals), os.eventfd(0)
        peer.send(shm.SEGMENT, said)
        stream.write_descriptors(number, credit)
        os.close(number)
        os.close(credit)
    try:
        peer.send(shm.RING, ring)
    except TransportError:
        assert said is not None, "it was refused already"
    inbox.wait(losses=1)
    assert inbox.messages == [] and reason in caplog.text
    stream.close()
    cluster.close()
    nothing_is_left(before)


@pytest.mark.parametrize("num_descriptors", [0, 1])
def test_a_segment_without_its_descriptors_is_refused(num_descriptors: int, caplog: pytest.LogCaptureFixture) -> None:
    before = open_things()
    cluster = Cluster("shm")
    _, inbox = cluster.add("b")
    peer = cluster.raw("b")
    stream = peer.stream
    assert isinstance(stream, shm.ShmStream)
    peer.send(MESSAGE, 1, wire.encode(ask()))
    peer.send(shm.SEGMENT, MIB)
    credit = os.eventfd(0)
    stream.write_descriptors(*[credit] * num_descriptors)
    os.close(credit)
    inbox.wait(losses=1)
    assert f"2 descriptors were due, and {num_descriptors} came" in caplog.text
    stream.close()
    cluster.close()
    nothing_is_left(before)


def test_a_peer_that_frees_more_than_it_had_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shm, "SHM_BYTES", MIB)
    monkeypatch.setattr(shm._Incoming, "free", lambda self: os.eventfd_write(self.credit, 10 * MIB))
    cluster = Cluster("shm")
    a, from_b, _, _ = cluster.pair()
    assert a.send("b", ask(), Parcel([MIB // 2] * 5))
    from_b.wait(losses=1)
    assert "the peer has freed" in caplog.text
    cluster.close()


@given(st.lists(st.integers(0, 512), min_size=1, max_size=60), st.sampled_from([1024, 2048]))
@examples(40, deadline=None)
def test_extents_of_a_ring_lie_in_it_and_never_over_each_other(lengths: list[int], num_bytes: int) -> None:
    """Each place is taken together with whatever it passes over; at most a whole ring is taken at once."""
    position, live = 0, []
    for length in lengths:
        offset, taken = shm._locate(position, length, num_bytes)
        assert offset + length <= num_bytes and length <= taken <= num_bytes and offset % 64 == 0
        while live and sum(each[2] for each in live) + taken > num_bytes:
            live.pop(0)
        for other, other_length, _ in live:
            assert offset + length <= other or other + other_length <= offset
        live.append((offset, length, taken))
        position += taken


# ---- two processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_killed_process_is_lost_and_leaves_nothing(transport: str) -> None:
    before, shared = open_things(), set(os.listdir("/dev/shm"))
    cluster = Cluster(transport)
    here, inbox = cluster.add("here")
    command = [sys.executable, "-m", "tests.links_child", transport, cluster.addresses["here"]]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as child:
        inbox.wait(5)
        parcel = Parcel([links_child.EXTENT_BYTES] * 10_000)
        assert here.send("child", ask(), parcel)
        eventually(lambda: parcel.num_asked > 5)
        child.send_signal(signal.SIGKILL)
    inbox.wait(losses=1)
    parcel.wait()
    assert inbox.losses == ["child"] and parcel.num_done == 1 and parcel.num_asked < 10_000
    expected = [bytes([index]) * links_child.EXTENT_BYTES for index in range(links_child.NUM_EXTENTS)]
    assert all(extents == expected for extents in inbox.extents)
    assert not here.send("child", ask())
    cluster.close()
    nothing_is_left(before)
    assert set(os.listdir("/dev/shm")) <= shared


# ---- tcp -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("127.0.0.1", ("127.0.0.1", 0)), ("10.0.0.1:4711", ("10.0.0.1", 4711)), ("::1", ("::1", 0)),
        ("[::1]", ("::1", 0)), ("[fe80::1]:80", ("fe80::1", 80)), ("node-3.example:65535", ("node-3.example", 65535)),
        ("::", ("::", 0)),
    ],
)  # fmt: skip
def test_hosts_may_have_ports(place: str, found: tuple[str, int]) -> None:
    from quire.cluster.transport.tcp import _split

    assert _split(place) == found


@pytest.mark.parametrize("place", ["", ":80", "host:", "host:x", "host:65536", "[::1", "[a]b", "127.0.0.1:-1"])
def test_what_is_no_host_is_refused(place: str) -> None:
    from quire.cluster.transport.tcp import _split

    with pytest.raises(TransportError, match="is no host with a port"):
        _split(place)


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        connections = PeerConnections("a", SECRET, Inbox())
        with pytest.raises(TransportError, match="cannot listen at 127.0.0.1"):
            connections.listen(f"127.0.0.1:{taken.getsockname()[1]}")


def test_an_unknown_transport_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no transport 'carrier pigeon'; there are tcp, shm"):
        PeerConnections("a", SECRET, Inbox(), "carrier pigeon")


# ---- bytes of messages -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    numbers: list[float]
    name: str | None = None


@dataclass
class Everything:
    """A message of all types that fields may have."""

    attempt: Attempt
    inner: Inner
    tokens: NDArray[np.int32]
    anything: NDArray[Any]
    truths: NDArray[np.bool_]
    data: bytes = b"\0\xff"
    seconds: float = 0.5
    parts: frozenset[int] = frozenset((1, 2))
    by_name: dict[str, list[Inner]] = field(default_factory=dict)


wire.register(Everything)

ATTEMPTS = st.builds(Attempt, st.integers(0, 2**63 - 1), st.integers(0, 2**31))


def ints_in(value: Any) -> Iterator[int]:
    """The integers anywhere in a message."""
    if isinstance(value, int):
        yield value
    elif is_dataclass(value):
        for each in fields(value):
            yield from ints_in(getattr(value, each.name))
    elif isinstance(value, dict):
        yield from ints_in([*value, *value.values()])
    elif isinstance(value, list | tuple | frozenset):
        for each in value:
            yield from ints_in(each)


@given(st.sampled_from(get_args(messages.Message)).flatmap(lambda kind: st.builds(kind, attempt=ATTEMPTS)))
@examples(60, deadline=None)
def test_every_message_of_the_protocol_survives(message: Any) -> None:
    if not all(-(2**63) <= value < 2**64 for value in ints_in(message)):
        with pytest.raises(wire.WireError):
            wire.encode(message)
        return
    again = wire.decode(wire.encode(message))
    assert again == message and type(again) is type(message)


def everything(rng: np.random.Generator) -> Everything:
    shape = tuple(rng.integers(0, 4, rng.integers(0, 4)).tolist())
    dtype = sorted(wire.DTYPES)[rng.integers(len(wire.DTYPES))]
    anything = np.asarray(rng.integers(0, 2, shape)).astype(dtype)
    tokens = np.arange(20, dtype=np.int32).reshape(4, 5)[:, :: int(rng.integers(1, 3))]
    return Everything(
        Attempt(1, np.int64(2)), Inner([1.5, 2], "ä"), tokens, anything, tokens > 3, by_name={"x": [Inner([])]}
    )  # fmt: skip


def test_arrays_survive_with_dtype_and_shape() -> None:
    rng = np.random.default_rng(random.randrange(2**32))
    for _ in range(tries(50)):
        message = everything(rng)
        again = wire.decode(wire.encode(message))
        for each in fields(Everything):
            before, after = getattr(message, each.name), getattr(again, each.name)
            if isinstance(before, np.ndarray):
                assert (after.dtype, after.shape) == (before.dtype, before.shape), each.name
                np.testing.assert_array_equal(after, before)
            else:
                assert after == before, each.name


@pytest.mark.parametrize(
    "array", [np.zeros(2, ">i4"), np.zeros(2, object), np.zeros(2, "M8[s]"), np.zeros(2, "U3"), np.zeros(2, "c8")]
)
def test_arrays_that_are_no_plain_numbers_do_not_travel(array: np.ndarray[Any, Any]) -> None:
    message = everything(np.random.default_rng(0))
    message.anything = array
    with pytest.raises(wire.WireError, match="do not travel"):
        wire.encode(message)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("tokens", ["<i8", [1], bytes(8)], "must be one of int32"),
        ("tokens", ["<i4", [2], bytes(7)], "7 bytes"),
        ("tokens", ["<i4", [-1, -1], bytes(4)], "shape"),
        ("tokens", ["<i4", [0, 2**62], b""], "too big"),
        ("tokens", ["<i4", [1] * 65, bytes(4)], "maximum supported dimension"),
        ("anything", ["|O8", [1], bytes(8)], "an array of '|O8'"),
        ("anything", [">i4", [1], bytes(4)], "an array of '>i4'"),
        ("anything", "text", "Expected `array`"),
        ("truths", ["|b1", [2], b"\1\2"], "truth values"),
        ("parts", ["x"], "Expected `int`"),
        ("inner", {"numbers": [1.0], "name": 3}, "Expected `str | null`"),
    ],
)
def test_fields_are_checked(name: str, value: Any, reason: str) -> None:
    kind, plain = msgspec.msgpack.decode(wire.encode(everything(np.random.default_rng(0))))
    plain[name] = value
    with pytest.raises(wire.WireError) as caught:
        wire.decode(msgspec.msgpack.encode((kind, plain)))
    assert reason in str(caught.value)


@given(st.binary(max_size=60), st.integers(0, 2**32 - 1))
@examples(150, deadline=None)
def test_bytes_that_are_no_message_raise_one_error(noise: bytes, seed: int) -> None:
    """Noise, noise in the place of the fields, and messages with a few bytes replaced or cut off."""
    rng = random.Random(seed)
    whole = bytearray(wire.encode(everything(np.random.default_rng(seed))))
    for _ in range(rng.randint(1, 4)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    name = rng.choice(list(wire.KINDS)).encode()
    for data in (noise, b"\x92" + bytes([0xA0 + len(name)]) + name + noise, whole, whole[: rng.randrange(len(whole))]):
        try:
            message = wire.decode(bytes(data))
        except wire.WireError:
            continue
        assert is_dataclass(message)


@pytest.mark.parametrize(
    "data", [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\x92\xa3Ask\x81\xa7attempt" + b"\x91" * 99_999]
)
def test_deep_and_endless_messages_raise_it_too(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(data)


def test_two_classes_of_one_name_are_a_mistake() -> None:
    wire.register(Ack)
    with pytest.raises(AssertionError, match="two classes of messages are called Ack"):
        wire.register(type("Ack", (ManifestRequest,), {}))
