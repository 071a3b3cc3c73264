"""The store in memory: what it gives back, and what makes room."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from quire.stores.memory import MemoryStore

from ..disk_runs import FakeRun, holds
from ..effort import tries

KIB = 1 << 10


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = MemoryStore(100 * KIB, pinned=False)
    yield made
    made.close()


def put(store: MemoryStore, *fakes: FakeRun) -> None:
    for fake in fakes:
        store.put(fake.run, fake.pack())


def test_the_least_recently_used_runs_make_room(store: MemoryStore) -> None:
    fakes = [FakeRun(number) for number in range(8)]  # 15 KiB each
    put(store, *fakes[:6])
    assert holds(store, fakes[0]) and store.wants(fakes[1].names) == [False, False]
    put(store, fakes[6], fakes[7])
    assert [holds(store, fake) for fake in fakes] == [True, True, False, False, True, True, True, True]
    assert store.stats()["bytes"] <= 100 * KIB and store.stats()["num_collected"] == 2
    put(store, FakeRun(9, extent_bytes=40 * KIB))
    assert store.stats()["num_put"] == 8, "larger than everything"


def test_runs_that_others_replaced_chunk_by_chunk_make_room_too(store: MemoryStore) -> None:
    """Attachments come later, each with a run of its last chunk alone."""
    whole = FakeRun(1, 2)
    end, begin = FakeRun(1, 1, start=1, attached=1), FakeRun(1, 2, attached=1)
    begin.run = replace(begin.run, names=whole.names[:1])
    put(store, whole, end, begin)
    assert store.find(whole.names[0]) is begin.run and store.find(whole.names[1]) is end.run
    assert store.stats()["chunks"] == 2, "nobody finds the first one any more"
    put(store, *(FakeRun(number) for number in range(2, 12)))
    assert store.stats()["bytes"] <= 100 * KIB


def test_runs_unused_for_their_lifetime_are_dropped() -> None:
    now = [0.0]
    store = MemoryStore(100 * KIB, pinned=False, lifetime=10.0, clock=lambda: now[0])
    put(store, FakeRun(1), FakeRun(2))
    now[0] = 9.0
    assert holds(store, FakeRun(1))
    now[0] = 11.0
    assert store.find(FakeRun(2).names[0]) is None and holds(store, FakeRun(1))
    now[0] = 30.0
    assert store.wants(FakeRun(1).names) == [True, True] and store.stats()["bytes"] == 0
    store.close()


def test_random_use_keeps_its_counts(store: MemoryStore, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(tries(300)):
        number = rng.randrange(30)
        start = number % 2
        fake = FakeRun(number % 5, number % 3 + 2 - start, start=start, attached=number // 15)
        if rng.random() < 0.7:
            put(store, fake)
        else:
            store.drop([rng.choice(fake.names)])
        runs = {*store._runs.values()}
        assert runs == {*store._kept} and store._bytes == sum(each.num_bytes for each in store._kept.values())
        assert store._bytes <= 100 * KIB
