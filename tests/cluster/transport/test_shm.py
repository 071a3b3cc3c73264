"""Rings in shared memory: what a peer may say of them, and where extents lie."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster import wire
from quire.cluster.transport import shm
from quire.cluster.transport.channel import MESSAGE
from quire.cluster.transport.stream import TransportError
from tests.cluster.transport.test_connection import MIB, Cluster, Parcel, ask, nothing_is_left, open_things
from tests.cluster.transport.test_connection import cluster as cluster
from tests.effort import examples


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
