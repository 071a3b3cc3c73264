"""The disk store gives back what was put, byte by byte, or nothing; also after a restart, and within its cap."""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cache.run import Run
from quire.errors import ConfigError
from quire.stores import disk, writer_folder
from quire.stores.direct import DirectFile
from quire.stores.disk import DiskStore
from quire.stores.folder import writer_bytes
from quire.stores.memory import MemoryStore
from quire.stores.quotas import free_bytes
from quire.stores.sizing import MEASURED_BYTES, MIN_MEASURED_BYTES, measure_disk

from ..disk_runs import LAYERS, MIB, NAMESPACE, FakeRun, FakeTransfer, disk_usage, fetch, holds, unsealed
from ..effort import tries

CAP = 64 * MIB
Make = Callable[..., DiskStore]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes stores in one folder; checks and closes them at the end."""
    stores: list[DiskStore] = []

    def make(cap: int = CAP, namespace: Any = NAMESPACE, folder: str = "store", **options: Any) -> DiskStore:
        stores.append(store := DiskStore(tmp_path / folder, cap, namespace, **options))
        for circuit_breaker in (store._writing, store._reading):
            circuit_breaker._clock = options.get("clock", circuit_breaker._clock)
        return store

    yield make
    for store in stores:
        store.close()
    assert not list(tmp_path.rglob("*.tmp")), "a file was left unfinished"


def put(store: DiskStore, *fakes: FakeRun) -> None:
    for fake in fakes:
        store.put(fake.run, fake.pack())


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def test_runs_come_back_byte_by_byte_and_in_the_order_of_layers(make: Make, seed: int) -> None:
    store, rng = make(), random.Random(seed)
    fakes = [
        FakeRun(seed + n, rng.randrange(1, 5), rng.choice([100, 4016, 70_000, 1_200_000]), attached=n % 2, start=n % 3)
        for n in range(12)
    ]
    put(store, *fakes)
    for is_on_disk in (False, True):
        assert not is_on_disk or store.flush(10)
        for fake in fakes:
            for name in fake.names:
                assert store.find(name) is fake.run
            assert holds(store, fake)
        transfer = fetch(store, tuple(name for fake in fakes[:4] for name in fake.names))
        assert transfer is not None and transfer.error is None
        for fake in fakes[:4]:
            layers = [layer for run, layer, _ in transfer.arrived if run is fake.run]
            assert sorted(layers) == list(range(LAYERS))
            found = {layer: unsealed(extent) for run, layer, extent in transfer.arrived if run is fake.run}
            assert [found[layer] for layer in range(LAYERS)] == fake.extents
    store.check()
    assert store.stats()["num_read"] > 0 and store.stats()["num_failed"] == 0


def test_one_reader_brings_the_oldest_transfer_first_and_layer_by_layer(make: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr("quire.stores.disk_reader.NUM_READERS", 1)
    store = make()
    fakes = [FakeRun(n, 2, 1_100_000) for n in range(4)]
    put(store, *fakes)
    assert store.flush(10)
    order: list[tuple[int, int, int]] = []
    transfers = []
    for age, pair in enumerate((fakes[:2], fakes[2:])):
        transfer = FakeTransfer([fake.run for fake in pair], delay=0.01)
        arrive = transfer.arrive

        def noted(run: Run, extent: memoryview, age: int = age, arrive: Any = arrive) -> None:
            order.append((age, int.from_bytes(extent[8:12], "little"), [f.run for f in fakes].index(run)))
            arrive(run, extent)

        transfer.arrive = noted  # type: ignore[method-assign]
        transfers.append(transfer)
        store.get(transfer, transfer.runs)  # type: ignore[arg-type]
    assert all(transfer.wait() for transfer in transfers)
    assert [each[:2] for each in order] == sorted(each[:2] for each in order) and len(order) == 4 * LAYERS


def test_a_closed_transfer_drops_its_reads(make: Make) -> None:
    store = make()
    fake = FakeRun(1, 2, 3 * MIB, layers=4)
    put(store, fake)
    assert store.flush(10)
    before = store.stats()["num_read"]
    transfer = FakeTransfer([fake.run])
    transfer.is_closed = True
    store.get(transfer, transfer.runs)  # type: ignore[arg-type]
    time.sleep(0.1)
    assert store.stats()["num_read"] == before and not transfer.arrived


@pytest.mark.parametrize("allows_direct", [True, False])
def test_a_restart_finds_everything(make: Make, monkeypatch: Any, allows_direct: bool) -> None:
    if not allows_direct:
        monkeypatch.setattr(writer_folder, "allows_direct", lambda folder: False)
    fakes = [
        FakeRun(n, 3, 50_000, attached=n % 2, start=n % 2, namespace=replace(NAMESPACE, salt=str(n))) for n in range(9)
    ]
    first = make()
    put(first, *fakes)
    first.close()
    second = make()
    assert second.stats()["chunks"] == 27
    for fake in fakes:
        found = second.find(fake.names[1])
        assert found is not None and found is not fake.run and holds(second, fake)
        for name in ("names", "is_shared", "num_attached", "namespace", "start", "parent"):
            assert getattr(found, name) == getattr(fake.run, name)
        for name in ("tokens", "kinds", "masks", "placed", "bases", "has_sidecar"):
            np.testing.assert_array_equal(getattr(found, name), getattr(fake.run, name))
    assert second.wants([*fakes[0].names, b"x" * 16]) == [False, False, False, True]
    second.check()


def test_what_is_stored_is_not_stored_twice(make: Make) -> None:
    store, fake = make(), FakeRun(1)
    put(store, fake, fake, FakeRun(1))
    assert store.stats()["num_put"] == 1 and store.flush(5)
    assert store.find(fake.names[0]) is fake.run
    assert [stored.names for stored in store.stored()] == [fake.names]


def test_a_run_with_an_attachment_takes_the_place_of_one_without(make: Make) -> None:
    store, plain, better = make(), FakeRun(1, 3), FakeRun(1, 3, attached=2)
    end = FakeRun(1, 1, start=2, attached=1)
    assert end.names == plain.names[2:] and better.names == plain.names
    put(store, plain, end)
    for _ in range(2):
        assert store.flush(5)
        found = [store.find(name) for name in plain.names]
        assert found[0] is found[1] and [run is not None and run.num_attached for run in found] == [0, 0, 1]
        assert holds(store, end)
        store.check()
        store.close()
        store = make()
    put(store, better, plain)
    assert store.stats()["num_put"] == 0
    store.drop([end.names[0]])
    assert not any(store.find(name) for name in plain.names), "with all copies"
    assert store.flush(5)
    store.check()
    assert store.stats()["chunks"] == 0 and store.stats()["files"] == 0


def test_dropped_runs_are_gone_after_a_restart_too(make: Make) -> None:
    store = make()
    fakes = [FakeRun(n) for n in range(6)]
    put(store, *fakes[:3])
    assert store.flush(5)
    put(store, *fakes[3:])
    store.drop([fakes[0].names[1], fakes[4].names[0]])
    assert store.flush(5)
    store.check()
    for again in (store, None):
        if again is None:
            store.close()
            again = make()
        assert [holds(again, fake) for fake in fakes] == [False, True, True, True, False, True]
    again.drop([fake.names[0] for fake in fakes])
    assert again.flush(5) and again.stats()["files"] == 0, "files without runs are removed"
    again.check()


def test_private_runs_end_with_the_process_and_are_in_no_index(make: Make, tmp_path: Path) -> None:
    store = make()
    fakes = [FakeRun(n, 2, 20_000, is_shared=False) for n in range(4)]
    before = store.stats()["bytes"]
    put(store, *fakes)
    assert store.flush(5) and all(holds(store, fake) for fake in fakes)
    assert not store.stored() and not list(tmp_path.rglob("*.runs"))
    taken = store.stats()["bytes"] - before
    assert taken > 4 * LAYERS * 20_000
    store.drop([fake.names[0] for fake in fakes[:2]])
    assert store.flush(5) and store.stats()["bytes"] - before == taken // 2
    assert store.find(fakes[0].names[0]) is None and holds(store, fakes[3])
    store.check()
    store.close()
    assert not any(make().find(fake.names[0]) for fake in fakes)


def test_a_run_larger_than_the_staging_memory_is_refused(make: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr(disk, "STAGING_BYTES", 1 << 20)
    store = make()
    put(store, FakeRun(1, 2, 400_000))
    assert store.stats()["num_refused"] == 1 and store.stats()["num_put"] == 0
    put(store, FakeRun(2, 2, 200_000))
    assert store.flush(5) and holds(store, FakeRun(2, 2, 200_000))
    store.check()


def test_full_staging_memory_wants_nothing(make: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr(disk, "STAGING_BYTES", 1 << 20)
    store = make()
    with store._writer.work:
        put(store, FakeRun(1, 2, 170_000))
        put(store, FakeRun(2, 2, 170_000))
        assert store.stats()["num_put"] == 2
        assert store.wants([b"a" * 16, b"b" * 16]) == [True, False], "there is room for a part of one"
        put(store, FakeRun(3, 2, 170_000), FakeRun(4, 2, 3000), FakeRun(5, 2, 100))
        assert store.stats()["num_refused"] == 2 and store.stats()["num_put"] == 3
    assert store.flush(5) and store.wants([b"a" * 16]) == [True]
    store.check()


def test_runs_unused_for_their_lifetime_are_not_found_and_their_files_go(make: Make) -> None:
    clock = Clock()
    store = make(clock=clock, lifetime=100.0)
    put(store, FakeRun(1))
    assert store.flush(5)
    put(store, FakeRun(2))
    assert store.flush(5)
    clock.now += 90
    assert holds(store, FakeRun(1))
    clock.now += 20
    assert store.find(FakeRun(2).names[0]) is None and holds(store, FakeRun(1))
    assert store.wants(FakeRun(2).names) == [True, True]
    assert store.flush(5)
    assert store.stats()["files"] == 1
    clock.now += 200
    put(store, FakeRun(1))
    assert holds(store, FakeRun(1)), "what comes anew is found again"


def test_a_pin_never_shortens_another_one(make: Make) -> None:
    store, begin, end = make(), FakeRun(1), FakeRun(2)
    put(store, begin, end)
    assert store.flush(5) and store.pin(begin.names, math.inf)
    assert store.pin([*begin.names, *end.names], time.time() + 60)  # as of a prompt that begins alike
    assert store.flush(5)
    until = {stored.names: stored.pinned_until for stored in store.stored()}
    assert until[begin.names] == math.inf > until[end.names] > 0


def test_what_a_pinned_prefix_goes_on_from_stays_pinned_if_the_pin_of_that_is_ended(make: Make) -> None:
    store, runs = make(), [FakeRun(1, start=start) for start in (0, 2, 4)]
    put(store, *runs)
    assert store.flush(5)
    until = time.time() + 60
    names = [name for run in runs for name in run.names]
    assert store.pin(names, until) and store.pin(names[:3], math.inf)
    store.unpin(names[:3])
    assert store._catalog.pins == dict.fromkeys(names, until)
    store.unpin(names)
    assert not store._catalog.pins


def test_pinned_runs_outlast_their_lifetime(make: Make) -> None:
    clock = Clock()
    store = make(clock=clock, lifetime=100.0)
    put(store, FakeRun(1))
    assert store.flush(5) and store.pin(FakeRun(1).names, clock.now + 1000)
    clock.now += 500
    put(store, FakeRun(2))
    assert store.flush(5)
    assert holds(store, FakeRun(1)) and store.stats()["files"] == 2
    clock.now += 600
    assert store.find(FakeRun(1).names[0]) is None
    put(store, FakeRun(3))
    assert store.flush(5)
    assert store.stats()["files"] == 1


def test_a_throttle_limits_reads_and_writes_together(make: Make) -> None:
    store = make(bandwidth=20e6)
    begun = time.monotonic()
    fake = FakeRun(1, 2, 2_000_000)
    put(store, fake)
    assert store.flush(10) and holds(store, fake)
    assert 0.9 * 12e6 / 20e6 - 0.05 < time.monotonic() - begun < 1.5
    assert 15e6 < (store.measure() or 0) < 22e6


def test_measuring_takes_free_room_alone(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    store, written = make(), list[bytes]()
    assert store.measure()
    for number in range(24):
        put(store, FakeRun(number, 2, 900_000))
        assert store.flush(10)
    files, num_collected = len(list(tmp_path.rglob("*.runs"))), store.stats()["num_collected"]
    real = DirectFile.write

    def write(self: DirectFile, views: list[memoryview], *args: Any) -> None:
        assert not self.path.exists(), "a kill would leave it"
        assert disk_usage(tmp_path / "store") <= CAP
        written.append(b"".join(views))
        real(self, views, *args)

    monkeypatch.setattr(DirectFile, "write", write)
    store.measure()
    assert measure_disk(tmp_path / "store") > 0 and measure_disk(tmp_path / "none" / "below") > 0
    monkeypatch.undo()
    assert store.stats()["num_collected"] == num_collected and len(list(tmp_path.rglob("*.runs"))) == files
    assert [len(each) for each in written[-2:]] == [MIN_MEASURED_BYTES, MEASURED_BYTES]
    assert all(len(zlib.compress(each)) > len(each) for each in written)
    store.close()
    room = CAP - 4 * MIB - writer_bytes(tmp_path / "store" / "v1" / "0")
    assert 0 <= free_bytes(tmp_path / "store") <= room
    (tmp_path / "store" / ".quire-measure-1").mkdir()
    (tmp_path / "store" / ".quire-measure-2.tmp").touch()
    make()
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["v1"]


def test_failing_reads_turn_the_tier_off_after_eight(make: Make, monkeypatch: Any, caplog: Any) -> None:
    clock = Clock()
    store = make(clock=clock)
    fakes = [FakeRun(n) for n in range(12)]
    put(store, *fakes)
    assert store.flush(5)
    real = DirectFile.read

    def broken(self: DirectFile, *args: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DirectFile, "read", broken)
    for fake in fakes[:8]:
        assert store.find(fake.names[0]) is not None and not holds(store, fake)
    assert store.find(fakes[9].names[0]) is None and not store.stats()["is_on"]
    assert len([text for text in warnings_of(caplog) if "is off" in text]) == 1
    monkeypatch.setattr(DirectFile, "read", real)
    clock.now += 31
    assert holds(store, fakes[9])
    wait_until(lambda: "works again" in caplog.text)
    assert store.flush(5)
    store.check()


def test_a_stuck_read_fails_its_transfer_and_others_go_on(make: Make, monkeypatch: Any) -> None:
    store = make()
    store._reader.stuck_seconds = 0.4
    fakes = [FakeRun(n, 2, 200_000) for n in range(4)]
    for fake in fakes:
        put(store, fake)
        assert store.flush(5)
    real, num_left = os.preadv, [3]

    def stuck(*args: Any) -> int:
        if num_left[0]:
            num_left[0] -= 1
            time.sleep(3)
        return real(*args)

    monkeypatch.setattr(os, "preadv", stuck)
    begun = time.monotonic()
    transfers = []
    for fake in fakes:
        transfers.append(FakeTransfer([fake.run]))
        store.get(transfers[-1], transfers[-1].runs)  # type: ignore[arg-type]
    failed = [transfer for transfer in transfers if not transfer.wait()]
    assert time.monotonic() - begun < 2.5
    assert len(failed) == 3  # whichever threads read first
    assert all("no progress" in str(transfer.error) for transfer in failed)


def test_a_read_is_not_failed_for_the_hang_of_the_one_before(make: Make, monkeypatch: Any) -> None:
    reads, failed = make()._reader, list[Any]()

    class Reader:
        """Its call ends as soon as it was looked at."""

        is_lost, thread, calls = False, None, iter([("hung", 0.0), ("next", time.monotonic())])

        @property
        def call(self) -> Any:
            return next(self.calls, None)

    monkeypatch.setattr(reads, "_replace", lambda reader, request: failed.append(request))
    reads.stuck_seconds, reads._readers = 5.0, [Reader()]  # type: ignore[list-item]
    wait_until(lambda: bool(failed))
    assert failed == ["hung"]


def test_a_run_is_read_while_its_file_gets_its_name(make: Make, monkeypatch: Any, caplog: Any) -> None:
    store, fake, found = make(), FakeRun(1), list[bool]()
    real = os.rename

    def rename(*args: Any) -> None:
        real(*args)
        found.append(holds(store, fake))

    put(store, fake)
    monkeypatch.setattr(os, "rename", rename)
    assert store.flush(5) and found == [True] and not warnings_of(caplog)


def test_a_staged_run_says_nothing_of_the_disk(make: Make, monkeypatch: Any, caplog: Any) -> None:
    clock = Clock()
    store = make(clock=clock)
    fakes = [FakeRun(n) for n in range(9)]
    put(store, *fakes[:8])
    assert store.flush(5)

    def broken(self: DirectFile, *args: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DirectFile, "read", broken)
    assert not any(holds(store, fake) for fake in fakes[:8])
    clock.now += 31
    with store._writer.work:
        put(store, fakes[8])
        assert holds(store, fakes[8])
        wait_until(lambda: store.stats()["num_read"] == 1)
    assert store.stats()["reason"] and "works again" not in caplog.text


def test_readers_that_hung_read_again(make: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr("quire.stores.disk_reader.MAX_STUCK", 2)
    clock = Clock()
    store = make(clock=clock)
    store._reader.stuck_seconds = 0.1
    fakes = [FakeRun(n, 1) for n in range(8)]
    put(store, *fakes)
    assert store.flush(5)
    real, hang = os.preadv, threading.Event()

    def stuck(*args: Any) -> int:
        hang.wait(10)
        return real(*args)

    monkeypatch.setattr(os, "preadv", stuck)
    transfers = [FakeTransfer([fake.run]) for fake in fakes[:4]]
    for transfer in transfers:
        store.get(transfer, transfer.runs)  # type: ignore[arg-type]
    assert not any(transfer.wait() for transfer in transfers)
    assert all(reader.is_lost for reader in store._reader._readers)
    assert not holds(store, fakes[5]), "nobody reads"
    hang.set()
    wait_until(lambda: not any(reader.is_lost for reader in store._reader._readers))
    assert len(store._reader._readers) == 2 and holds(store, fakes[6])


def test_a_run_may_be_lost_while_it_is_put_again(make: Make) -> None:
    store, fake = make(), FakeRun(1, 1)
    put(store, fake)
    assert store.flush(5)

    class Losing(dict[bytes, Any]):
        def __contains__(self, name: object) -> bool:
            found = super().__contains__(name)
            store._catalog.drop(list(store._catalog.entries.values()))  # as another thread does
            return found

    store._catalog.by_name = Losing(store._catalog.by_name)
    put(store, fake)
    store._catalog.by_name = dict(store._catalog.by_name)
    put(store, fake)
    assert store.flush(5) and holds(store, fake)
    store.check()


def test_extents_that_cannot_be_read_leave_no_staging_memory_behind(make: Make) -> None:
    store, fake = make(), FakeRun(1)

    def broken() -> Iterator[memoryview]:
        yield memoryview(fake.extents[0])
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input"):
        store.put(fake.run, broken())
    store.check()
    assert store._staging.free_bytes == store._staging.num_bytes


def test_pins_last_longer_than_lifetimes(make: Make) -> None:
    clock = Clock()
    store = make(clock=clock, lifetime=100.0)
    put(store, FakeRun(1))
    assert store.flush(5)
    put(store, FakeRun(2))
    assert store.flush(5) and store.pin(FakeRun(1).names, clock.now + 1000)
    clock.now += 200
    assert store.flush(5) and store.stats()["files"] == 1
    assert holds(store, FakeRun(1)) and store.find(FakeRun(2).names[0]) is None
    clock.now += 801
    assert store.find(FakeRun(2).names[0]) is None
    clock.now += 100
    assert store.flush(5) and store.stats()["files"] == 0


def test_runs_that_another_process_drops_are_not_found(make: Make) -> None:
    first, second = make(), make()
    fakes = [FakeRun(n) for n in range(3)]
    put(first, *fakes)
    assert first.flush(5)
    wait_until(lambda: all(second.find(fake.names[0]) is not None for fake in fakes))
    first.drop([fakes[1].names[0]])
    assert first.flush(5)
    wait_until(lambda: second.find(fakes[1].names[0]) is None)
    assert [holds(second, fake) for fake in fakes] == [True, False, True]


def test_what_another_process_reads_counts_as_used(make: Make) -> None:
    clock = Clock()
    first, second = make(clock=clock, lifetime=100.0), make(clock=clock)
    for number in (1, 2):
        put(first, FakeRun(number))
        assert first.flush(5)
    wait_until(lambda: second.find(FakeRun(2).names[0]) is not None)

    def read_and_tell() -> None:
        assert holds(second, FakeRun(1))
        with second._writer.work:
            second._writer._note_uses()

    clock.now += 60
    read_and_tell()
    with first._writer.work:
        first._writer_folder.indexed.note_uses()
        assert first._writer_folder.files[1].used == clock.now > first._writer_folder.files[2].used, (
            "it would be collected first"
        )
    clock.now += 60
    read_and_tell()
    assert first.flush(5) and list(first._writer_folder.files) == [1], "only the other one is unused"


def test_the_index_of_many_small_runs_counts(make: Make, tmp_path: Path) -> None:
    store, namespace = make(), replace(NAMESPACE, salt="\N{SLEEPING SYMBOL}" * 256)
    subfolder = tmp_path / "store" / "v1" / "0"
    for begin in (0, 900):
        with store._writer.work:
            put(store, *(FakeRun(begin + number, 1, 100, layers=1, namespace=namespace) for number in range(900)))
        wait_until(lambda: not store._writer._queue and not store._writer._is_busy, 60)
        with store._writer.work:
            assert store._writer_folder.has_draft
            expected = store._writer_folder.bytes
            store._writer_folder.commit()
            assert writer_bytes(subfolder) <= min(expected, store._writer_folder.bytes)


def test_memory_keeps_to_its_cap_whoever_has_the_names_of_a_run() -> None:
    """Column sums that came later took all names of the oldest run, one after the other."""
    store = MemoryStore(120_000, pinned=False)
    plain = FakeRun(1, 3)
    put(store, plain)
    for start in (2, 1, 0):
        end = FakeRun(1, 1, start=start, attached=1)
        put(store, end)
        assert store.find(end.names[0]) is end.run
    late = [FakeRun(number) for number in range(50, 60)]
    put(store, *late)
    assert plain.run not in store._kept and store.find(late[-1].names[0]) is late[-1].run
    assert store.stats()["bytes"] <= 120_000
    assert {*store._runs.values()} == {*store._kept}
    store.close()


def test_memory_forgets_what_is_unused_for_its_lifetime() -> None:
    clock = Clock()
    store = MemoryStore(1 << 20, pinned=False, lifetime=100.0, clock=clock)
    first, second = FakeRun(1), FakeRun(2)
    put(store, first, second)
    clock.now += 60
    assert store.wants(first.names) == [False, False] and store.find(second.names[0]) is second.run
    clock.now += 60
    assert holds(store, first) and store.find(second.names[0]) is None
    assert store.wants(second.names) == [True, True] and store.stats()["chunks"] == 2
    clock.now += 101
    put(store, first)
    assert holds(store, first)
    store.close()


def test_settings_that_cannot_be_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="at least 64MiB"):
        make(cap=10 * MIB)


def test_a_closed_store_answers_and_keeps_nothing(make: Make) -> None:
    store = make()
    put(store, FakeRun(1))
    found = store.find(FakeRun(1).names[0])
    assert found is not None
    store.close()
    store.close()
    assert store.find(FakeRun(1).names[0]) is None and store.wants([b"a" * 16]) == [False]
    put(store, FakeRun(2))
    transfer = FakeTransfer([found])
    store.get(transfer, transfer.runs)  # type: ignore[arg-type]
    assert not transfer.wait() and not store.flush(1)
    assert store.stats()["is_on"] is False


def test_random_use_agrees_with_a_dictionary(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    for round_number in range(tries(2)):
        store = make(folder=f"random-{round_number}")
        known: dict[int, FakeRun] = {}
        for step in range(120):
            match rng.randrange(8):
                case 0 | 1 | 2:
                    number = rng.randrange(60)
                    fake = FakeRun(number, number % 3 + 1, 3000 * (number % 7 + 1), is_shared=number % 5 > 0)
                    if store.find(fake.names[0]) is None:
                        put(store, fake)
                        known[number] = fake
                case 3 if known:
                    fake = known.pop(rng.choice(list(known)))
                    store.drop([rng.choice(fake.names)])
                case 4:
                    assert store.flush(10)
                    store.check()
                case 5 if rng.random() < 0.2:
                    store.close()
                    store = make(folder=f"random-{round_number}")
                    known = {number: fake for number, fake in known.items() if fake.run.is_shared}
                case _ if known:
                    assert holds(store, rng.choice(list(known.values()))), f"seed {seed}, step {step}"
        assert all(holds(store, fake) for fake in known.values())
        assert store.stats()["chunks"] == sum(len(fake.names) for fake in known.values())
        store.close()


def test_modes_are_private_whatever_the_umask(make: Make, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = make()
        put(store, FakeRun(1))
        assert store.flush(5)
    finally:
        os.umask(before)
    paths = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    names = {path.name for path in paths}
    assert {"secret", "lock", "index.db", "index.db-wal", "index.db-shm", "1.runs"} <= names
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
