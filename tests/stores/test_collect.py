"""Files that are collected: the least recently used first, pinned ones last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.stores.test_disk import CAP, Clock, Make, put
from tests.stores.test_disk import make as make

from ..disk_runs import NAMESPACE, FakeRun, disk_usage, holds


def test_the_cap_holds_and_the_least_recently_used_files_go_first(make: Make, tmp_path: Path) -> None:
    clock = Clock()
    store = make(clock=clock)
    fakes = [FakeRun(n, 2, 1_000_000) for n in range(40)]
    for number, fake in enumerate(fakes):
        clock.now += 1
        put(store, fake)
        if number:
            assert store.wants(fakes[0].names) == [False, False], "the first run is used all the time"
        assert store.flush(10)
        assert disk_usage(tmp_path / "store") <= CAP
    store.check()
    kept = [number for number, fake in enumerate(fakes) if holds(store, fake)]
    assert kept[0] == 0 and kept[1:] == list(range(40 - len(kept) + 1, 40)) and 10 < len(kept) < 25
    assert store.stats()["num_collected"] > 10


def test_pinned_files_go_last_and_at_most_half_may_be_pinned(make: Make) -> None:
    clock = Clock()
    store = make(clock=clock)
    fakes = [FakeRun(n, 2, 1_000_000) for n in range(40)]
    put(store, fakes[0], fakes[1])
    assert store.flush(10) and store.pin(fakes[0].names, clock.now + 1e6)
    assert not store.pin([b"z" * 16], clock.now + 1e6)
    for fake in fakes[2:]:
        clock.now += 1
        put(store, fake)
        assert store.flush(10)
    assert holds(store, fakes[0]) and not holds(store, fakes[2])
    (pinned,) = [stored for stored in store.stored() if stored.pinned_until]
    assert pinned.names == fakes[0].names and pinned.pinned_until == clock.now - 38 + 1e6
    num_pinned = sum(store.pin(fake.names, clock.now + 1e6) for fake in fakes if store.find(fake.names[0]))
    assert 2 <= num_pinned <= 10
    store.close()
    again = make(clock=clock)
    for number in range(40, 60):
        put(again, FakeRun(number, 2, 1_000_000))
        assert again.flush(10)
    assert holds(again, fakes[0]), "pins survive a restart"
    again.unpin([*fakes[0].names, *fakes[1].names])  # they share a file
    for number in range(60, 80):
        clock.now += 1
        put(again, FakeRun(number, 2, 1_000_000))
        assert again.flush(10)
    assert not holds(again, fakes[0])


def test_runs_of_other_models_are_not_found_and_are_collected_last(make: Make) -> None:
    clock = Clock()
    other = replace(NAMESPACE, model="other", salt="s")
    first = make(namespace=other, clock=clock)
    theirs = [FakeRun(n, 2, 1_000_000, namespace=other) for n in range(5)]
    put(first, *theirs)
    first.close()
    clock.now += 10
    store = make(clock=clock)
    assert not any(store.find(fake.names[0]) for fake in theirs)
    assert {(s.is_own_namespace, s.salt) for s in store.stored()} == {(False, "s")}
    assert store.stored(lambda salt: salt != "s") == []
    put(store, theirs[0])
    assert store.stats()["num_refused"] == 1
    for n in range(100, 130):
        clock.now += 1
        put(store, FakeRun(n, 2, 1_000_000))
        assert store.flush(10)
    assert len([s for s in store.stored() if not s.is_own_namespace]) == 5, "own files go first"
    clock.now += 8 * 24 * 3600
    for n in range(200, 205):
        put(store, FakeRun(n, 2, 1_000_000))
        assert store.flush(10)
    assert len([s for s in store.stored() if not s.is_own_namespace]) < 5, "unused for a week they go first"
    store.check()
