"""Connections between processes: what arrives, what ends a connection, and that each end is told once."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.cluster import wire
from quire.cluster.connections import PeerConnections
from quire.cluster.messages import Attempt, Failed, Manifest, ManifestRequest, Token
from quire.cluster.transport import connection as link_module
from quire.cluster.transport import shm, transport_of
from quire.cluster.transport.channel import MOST_EXTENTS, Channel, Credentials, authenticate
from quire.cluster.transport.sockets import SocketStream
from quire.cluster.transport.stream import TransportError
from quire.engine.outputs import CompletionOutput
from tests import links_child

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


# ---- two processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_killed_process_is_lost_and_leaves_nothing(transport: str) -> None:
    before, shared = open_things(), set(os.listdir("/dev/shm"))
    cluster = Cluster(transport)
    here, inbox = cluster.add("here")
    command = [sys.executable, "-m", "tests.links_child", transport, cluster.addresses["here"]]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3]) as child:
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
