"""The disk store after kills, among several processes, and with damaged files: right bytes or none, within the cap."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.stores import disk_writer
from quire.stores.disk import DiskStore
from quire.stores.folder import run_files
from quire.stores.headers import RunHeader, common_digest, encode_run_header
from quire.stores.index import FileRow, RunIndex
from quire.stores.signer import ExtentSigner
from quire.stores.writer_folder import GROW_SECONDS

from ..disk_child import fake_of, start_child
from ..disk_runs import MIB, NAMESPACE, FakeRun, disk_usage, fetch, holds
from ..effort import EFFORT, IS_FULL, tries

CAP = 64 * MIB


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], DiskStore]]:
    stores: list[DiskStore] = []

    def opened() -> DiskStore:
        stores.append(DiskStore(tmp_path / "store", CAP, NAMESPACE))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_index_and_right_bytes(
    tmp_path: Path, opened: Callable[[], DiskStore], seed: int
) -> None:
    rng, folder, num_found = random.Random(seed), tmp_path / "store", 0
    for round_number in range({"short": 2, "quick": 6, "full": 10, "night": 50}[EFFORT]):
        extent_bytes = rng.choice([5000, 100_000, 700_000])
        child, count, _ = start_child(folder, CAP, 1000 * round_number, extent_bytes)
        wait_until(lambda count=count: count.value > 0)  # type: ignore[misc]
        end = time.monotonic() + rng.random() * 0.8
        while time.monotonic() < end:
            assert disk_usage(folder) <= CAP
            time.sleep(0.01)
        child.kill()
        child.join(10)
        store = opened()
        assert disk_usage(folder) <= CAP
        assert not list(folder.rglob("*.tmp"))
        store.check()
        assert store.stats()["num_failed"] == 0
        names = {name for stored in store.stored() for name in stored.names}
        for number in range(1000 * round_number, 1000 * round_number + count.value):
            fake = fake_of(number, extent_bytes)
            if fake.names[0] in names:
                assert holds(store, fake), f"seed {seed}, round {round_number}, run {number}"
                num_found += 1
        store.close()
    assert num_found > 10


@pytest.mark.slow
def test_two_processes_share_a_folder_within_its_cap(
    tmp_path: Path, opened: Callable[[], DiskStore], caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG, "quire")
    folder = tmp_path / "store"
    store = opened()
    mine = [fake_of(number, 600_000) for number in range(10_000, 10_030)]
    for fake in mine[:20]:
        store.put(fake.run, fake.pack())
        assert store.flush(10)
    assert int(store.stats()["bytes"] or 0) > 30 * MIB, "alone it may have more than half"
    child, count, stop = start_child(folder, CAP, 0, 600_000, pause=0.05)
    theirs: set[int] = set()
    end = time.monotonic() + (8 if IS_FULL else 4)
    while time.monotonic() < end or (len(theirs) < 5 and time.monotonic() < end + 20):
        assert disk_usage(folder) <= CAP
        fake = random.choice(mine)
        if all(store.wants(fake.names)):
            store.put(fake.run, fake.pack())
        number = random.randrange(count.value + 1)
        if holds(store, fake_of(number, 600_000)):
            theirs.add(number)
        time.sleep(0.01)
    quota = store.stats()["quota_bytes"]
    assert quota == (CAP - 4 * MIB) // 2, "each has its half"
    assert len(theirs) >= 5, "it does not find what the other has written"
    stop.set()
    child.join(20)
    assert child.exitcode == 0
    assert store.flush(10)
    store.check()
    assert disk_usage(folder) <= CAP
    assert "lost a run" not in caplog.text, "a file that was collected is a miss"
    assert ("was collected" in caplog.text) == (int(store.stats()["num_failed"] or 0) > 0)
    time.sleep(GROW_SECONDS)  # a quota that could not grow just now is not asked for again before
    for number in range(20_000, 20_040):  # alone again, it collects what the other left
        fake = fake_of(number, 600_000)
        store.put(fake.run, fake.pack())
        assert store.flush(10)
        assert disk_usage(folder) <= CAP
    store.check()
    assert int(store.stats()["quota_bytes"] or 0) > CAP // 2 + 8 * MIB
    assert all(holds(store, fake_of(number, 600_000)) for number in range(20_030, 20_040))


def two(opened: Callable[[], DiskStore]) -> tuple[DiskStore, DiskStore]:
    """Two stores, of which each has its share."""
    first, second = opened(), opened()
    wait_until(lambda: int(first.stats()["quota_bytes"] or 0) <= CAP // 2)
    return first, second


def test_a_run_waits_for_the_room_that_another_writer_does_not_use(opened: Callable[[], DiskStore]) -> None:
    first, second, fakes = opened(), opened(), [FakeRun(number) for number in range(3)]
    first.put(fakes[0].run, fakes[0].pack())
    assert first.flush(5) and second.stats()["quota_bytes"] == 0
    begun = time.monotonic()
    for fake in fakes[1:]:
        second.put(fake.run, fake.pack())
    assert time.monotonic() - begun < 0.2, "the engine waits"
    assert second.flush(10)
    assert all(holds(second, fake) for fake in fakes[1:]) and second.stats()["num_refused"] == 0
    first.check()
    second.check()


def test_runs_do_not_wait_for_room_again_and_again(
    opened: Callable[[], DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    room_seconds = 1.5
    monkeypatch.setattr(disk_writer, "ROOM_SECONDS", room_seconds)
    first, second = opened(), opened()
    with first._writer.work:  # it gives up nothing
        begun = time.monotonic()
        for number in range(4):
            second.put(FakeRun(number).run, FakeRun(number).pack())
        assert second.flush(20) and second.stats()["num_refused"] == 4
        assert room_seconds * 0.9 < time.monotonic() - begun < room_seconds + 3
        assert second.find(FakeRun(0).names[0]) is None
        second.put(FakeRun(9).run, FakeRun(9).pack())
        begun = time.monotonic()
        second.close()
        assert time.monotonic() - begun < 3


def test_pins_that_find_no_room_for_an_index_wait_for_it(tmp_path: Path, opened: Callable[[], DiskStore]) -> None:
    first, fake = opened(), FakeRun(1)
    first.put(fake.run, fake.pack())
    assert first.flush(5)
    subfolder = tmp_path / "store" / "v1" / "1"
    with first._writer.work:  # it gives up nothing
        second = opened()
        second._set_pins({})
        assert second.flush(5)
        second._set_pins({fake.names[0]: time.time() + 60})
        assert second.flush(5) and second.stats()["quota_bytes"] == 0 and not (subfolder / "index.db").exists()
    wait_until(lambda: (subfolder / "index.db").exists() and second.flush(5))
    assert fake.names[0] in RunIndex(subfolder, is_writer=False).pins()
    second.check()


def test_pins_of_a_sub_folder_without_a_writer_are_known_before_anything_is_collected(tmp_path: Path) -> None:
    folder, fakes = tmp_path / "store", [FakeRun(number, 2, 1_000_000) for number in range(28)]
    stores = [DiskStore(folder, 2 * CAP, NAMESPACE) for _ in range(2)]
    wait_until(lambda: int(stores[0].stats()["quota_bytes"] or 0) <= CAP)
    for number, fake in enumerate(fakes):
        store = stores[number % 2]
        store.put(fake.run, fake.pack())
        assert store.flush(10)
    assert stores[1].pin(fakes[1].names, time.time() + 1e6)
    for store in stores:
        assert store.flush(5)
        store.close()
    store = DiskStore(folder, CAP, NAMESPACE)
    assert store.find(fakes[1].names[0]) is not None and store.find(fakes[3].names[0]) is None
    store.close()


def test_a_sub_folder_that_cannot_be_collected_does_not_turn_writing_off(
    opened: Callable[[], DiskStore], monkeypatch: Any
) -> None:
    def broken(*args: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    first, second = two(opened)
    second.put(FakeRun(1).run, FakeRun(1).pack())
    assert second.flush(5)
    second.close()
    monkeypatch.setattr("quire.stores.writer_folder.collect_abandoned", broken)
    for number in range(10, 40):
        first.put(FakeRun(number, 2, 1_000_000).run, FakeRun(number, 2, 1_000_000).pack())
        assert first.flush(10) and first.is_on
    assert holds(first, FakeRun(1))


def test_a_file_whose_runs_are_dropped_before_it_is_finished_is_not_finished(
    tmp_path: Path, opened: Callable[[], DiskStore]
) -> None:
    store, fake = opened(), FakeRun(1)
    with store._writer.work:
        store.put(fake.run, fake.pack())
    wait_until(lambda: store._writer_folder.has_draft)
    with store._writer.work:
        assert store._writer_folder.has_draft
        store.drop(fake.names)
        store._writer_folder.forget()
    assert store.flush(5) and store.stats()["files"] == 0 and not list(tmp_path.rglob("*.runs"))
    store.check()


@pytest.mark.parametrize(
    "where", ["quire.stores.writer_folder.WriterFolder.bytes", "quire.stores.quotas.Quotas.shrink"]
)
def test_closing_ends_the_lock_whatever_fails(opened: Callable[[], DiskStore], monkeypatch: Any, where: str) -> None:
    def broken(*args: Any) -> int:
        raise OSError(5, "Input/output error") if "writer_folder" in where else ValueError("a defect")

    store = opened()
    monkeypatch.setattr(where, property(broken) if "writer_folder" in where else broken)
    with contextlib.suppress(ValueError):
        store.close()
    monkeypatch.undo()
    assert opened()._writer_folder.subfolder.name == "0"


def test_a_number_that_a_restarted_writer_uses_again_is_another_file(
    tmp_path: Path, opened: Callable[[], DiskStore]
) -> None:
    first, second, fake, other = *two(opened), FakeRun(1), FakeRun(2, 2, 50_000)
    first.put(fake.run, fake.pack())
    assert first.flush(5)
    wait_until(lambda: second.find(fake.names[0]) is not None)
    with second._writer.work:  # it does not look
        first.drop(fake.names)
        assert first.flush(5)
        first.close()
        again = opened()
        again.put(other.run, other.pack())
        assert again.flush(5) and [path.name for path in (tmp_path / "store" / "v1" / "0").glob("*.runs")] == ["1.runs"]
    wait_until(lambda: second.find(fake.names[0]) is None and second.find(other.names[0]) is not None)
    assert holds(second, other)


def damage(rng: random.Random, folder: Path, older: bytes) -> None:
    """Damages files of runs at random; those of less than a block are damaged enough."""
    for _ in range(rng.randrange(1, 4)):
        files = sorted(path for path in folder.rglob("*.runs") if path.stat().st_size >= 4096)
        if not files:
            return
        path = rng.choice(files)
        data = bytearray(path.read_bytes())
        how = rng.randrange(8)
        at = rng.randrange(len(data))
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[at:]
        elif how == 2:
            data[at : at + 4096] = rng.randbytes(min(4096, len(data) - at))
        elif how == 3:
            data = bytearray(rng.randbytes(len(data)))
        elif how == 4:  # blocks change places: extents of other layers and runs under the same secret
            here, there = (rng.randrange(len(data) // 4096) * 4096 for _ in range(2))
            size = min(rng.choice([4096, 8192, 8192 * 3]), len(data) - max(here, there))
            data[here : here + size], data[there : there + size] = data[there : there + size], data[here : here + size]
        elif how == 5:
            data = bytearray(older[: len(data)].ljust(len(data), b"\0"))
        elif how == 6:
            path.unlink()
            continue
        else:
            other = rng.choice(files)
            data = bytearray(other.read_bytes()[: len(data)].ljust(len(data), b"\0"))
        path.write_bytes(data)


@pytest.mark.parametrize("while_running", [False, True])
def test_damaged_files_give_right_bytes_or_a_failure(
    tmp_path: Path, opened: Callable[[], DiskStore], seed: int, while_running: bool
) -> None:
    rng, folder = random.Random(seed), tmp_path / "store"
    num_lost = num_kept = 0
    store = opened()
    fakes = [FakeRun(seed + n, 2, 3900, layers=4) for n in range(12)]
    older = b""
    for _ in range(tries(40)):
        for fake in fakes:
            if all(store.wants(fake.names)):
                store.put(fake.run, fake.pack())
                if rng.random() < 0.4:
                    assert store.flush(5)
        assert store.flush(5)
        older = older or next(folder.rglob("*.runs")).read_bytes()
        if not while_running:
            store.close()
        damage(rng, folder, older)
        if not while_running:
            store = opened()
        for fake in fakes:
            found = holds(store, fake)  # fails on wrong bytes
            num_lost, num_kept = num_lost + (not found), num_kept + found
        store._reading.succeed()  # eight failures would turn it off
        assert store.flush(5)
        if not while_running:
            store.check()
    assert num_lost > tries(30) and num_kept > tries(30), "nothing was damaged, or everything"


def test_layers_that_changed_places_are_refused(tmp_path: Path, opened: Callable[[], DiskStore]) -> None:
    store, fake = opened(), FakeRun(1, 2, 3900, jitter=1)
    store.put(fake.run, fake.pack())
    assert store.flush(5)
    (path,) = (tmp_path / "store").rglob("*.runs")
    data = path.read_bytes()
    assert len(data) == 4096 * 4
    path.write_bytes(data[:4096] + data[8192:12288] + data[4096:8192] + data[12288:])
    assert not holds(store, fake)


def test_a_right_checksum_under_another_secret_is_refused(tmp_path: Path, opened: Callable[[], DiskStore]) -> None:
    fake, other = FakeRun(1), bytes(32)
    subfolder = tmp_path / "store" / "v1" / "0"
    opened().close()

    def plant(head_secret: bytes, extent_secret: bytes) -> None:
        header = encode_run_header(RunHeader(fake.run, tuple(map(len, fake.extents))), ExtentSigner(head_secret))
        blocks = [header.ljust(4096, b"\0")]
        for layer in range(len(fake.extents)):
            extent = bytearray(fake.extents[layer])
            ExtentSigner(extent_secret).sign(b"".join(fake.names), memoryview(extent))
            blocks.append(bytes(extent).ljust(-(-len(extent) // 4096) * 4096, b"\0"))
        (subfolder / "5.runs").write_bytes(data := b"".join(blocks))
        index = RunIndex(subfolder, is_writer=True)
        index.remove_files([5])
        index.add(FileRow(5, len(data), 1e9), [(4096, common_digest(NAMESPACE), header)])
        index.close()

    secret = (tmp_path / "store" / "v1" / "secret").read_bytes()
    for head_secret, extent_secret in ((other, other), (secret, other), (other, secret), (secret, secret)):
        plant(head_secret, extent_secret)
        store = opened()
        assert (store.find(fake.names[0]) is not None) == (head_secret == secret)
        assert holds(store, fake) == (head_secret == extent_secret == secret)
        store.close()


def test_a_damaged_index_costs_its_own_runs_alone(tmp_path: Path, opened: Callable[[], DiskStore], caplog: Any) -> None:
    first, second = two(opened)
    one, other = FakeRun(1), FakeRun(2)
    first.put(one.run, one.pack())
    second.put(other.run, other.pack())
    assert first.flush(5) and second.flush(5)
    first.close()
    second.close()
    path = tmp_path / "store" / "v1" / "0" / "index.db"
    path.write_bytes(b"junk" * 5000)
    store = opened()
    assert len([record for record in caplog.records if "index" in record.getMessage()]) == 1
    assert not holds(store, one) and holds(store, other)
    assert [number for number, _ in run_files(path.parent)] == []
    store.put(one.run, one.pack())
    assert store.flush(5) and holds(store, one)
    store.check()
    (tmp_path / "store" / "v1" / "1" / "index.db").write_bytes(b"junk" * 5000)
    caplog.clear()
    again = opened()
    assert again.find(other.names[0]) is None and len(caplog.records) == 1


def test_any_damage_to_the_first_page_of_an_index_costs_its_runs_at_most(
    tmp_path: Path, opened: Callable[[], DiskStore], seed: int
) -> None:
    rng, fake, other = random.Random(seed), FakeRun(1), FakeRun(2)
    store = opened()
    store.put(fake.run, fake.pack())
    assert store.flush(5)
    store.close()
    path = tmp_path / "store" / "v1" / "0" / "index.db"
    good = path.read_bytes()
    schema = good.index(b"CREATE TABLE")
    chosen = [18, 19, 44, 47, schema - 20, schema - 3, schema + 2, schema + 14]
    for at in [*chosen, *(rng.randrange(20, 4096) for _ in range(tries(20)))]:
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        data = bytearray(good)
        data[at] ^= 255
        path.write_bytes(data)
        store = opened()
        holds(store, fake)
        for each in (fake, other):
            store.put(each.run, each.pack())
            assert store.flush(5) and holds(store, each), f"seed {seed}, byte {at}"
        store.drop(other.names)
        store.close()


@pytest.mark.parametrize(
    "name", ["index.db", "index.db-wal", "index.db-shm", "index.db-journal", "1.runs", "2.runs", "9.tmp", "lock"]
)
def test_a_directory_in_the_place_of_a_file_costs_runs_at_most(
    tmp_path: Path, opened: Callable[[], DiskStore], caplog: Any, name: str
) -> None:
    store, fake = opened(), FakeRun(1)
    store.put(fake.run, fake.pack())
    assert store.flush(5)
    store.close()
    subfolder = tmp_path / "store" / "v1" / "0"
    (subfolder / name).unlink(missing_ok=True)
    (subfolder / name).mkdir()
    (subfolder / name / "note").write_text("mine")
    store = opened()
    assert len([text for text in caplog.messages if f"{subfolder / name} is no file of Quire" in text]) == 1
    for number in (1, 2, 3):
        store.put(FakeRun(number).run, FakeRun(number).pack())
        assert store.flush(5) and holds(store, FakeRun(number))
    store.check()
    assert [path.read_text() for path in (tmp_path / "store").rglob("note")] == ["mine"]


@pytest.mark.parametrize("name", ["secret", "lock", ""])
def test_what_must_be_removed_by_hand_is_named(tmp_path: Path, opened: Callable[[], DiskStore], name: str) -> None:
    opened().close()
    path = tmp_path / "store" / "v1" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.mkdir() if name else path.write_text("a file")
    with pytest.raises(ConfigError, match=f"{path} is .*: remove it"):
        opened()


def test_an_index_without_its_tables_costs_its_runs(tmp_path: Path, opened: Callable[[], DiskStore]) -> None:
    store, fake = opened(), FakeRun(1)
    store.put(fake.run, fake.pack())
    assert store.flush(5)
    store.close()
    with sqlite3.connect(tmp_path / "store" / "v1" / "0" / "index.db") as db:
        db.executescript("DROP TABLE files; DROP TABLE pins;")
    db.close()
    store = opened()
    assert store.find(fake.names[0]) is None
    store.put(fake.run, fake.pack())
    assert store.flush(5) and holds(store, fake)
    store.check()


def test_runs_of_another_process_are_found_within_a_moment_and_a_collected_file_is_a_miss(
    opened: Callable[[], DiskStore], caplog: Any
) -> None:
    first, second = two(opened)
    fake, twin = FakeRun(1), FakeRun(1)
    first.put(fake.run, fake.pack())
    assert first.flush(5)
    wait_until(lambda: second.find(fake.names[0]) is not None)
    assert holds(second, fake) and second.wants(fake.names) == [False, False]
    with second._writer.work:  # it does not look
        first.drop([fake.names[0]])
        assert first.flush(5) and first.stats()["files"] == 0
        transfer = fetch(second, fake.names)
        assert transfer is not None and transfer.error is not None
    assert second.find(fake.names[0]) is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    second.put(twin.run, twin.pack())
    assert second.flush(5) and holds(second, fake)
    wait_until(lambda: holds(first, fake))
    first.check()
    second.check()


def test_a_copy_in_another_sub_folder_takes_the_place_of_a_lost_run(opened: Callable[[], DiskStore]) -> None:
    first, second = two(opened)
    fake, twin, third = FakeRun(1), FakeRun(1), FakeRun(3)
    with first._writer.work, second._writer.work:
        first.put(fake.run, fake.pack())
        second.put(twin.run, twin.pack())
    assert first.flush(5) and second.flush(5)
    wait_until(lambda: len(first._catalog.entries) == 2)
    path = first._catalog.entries[fake.run].file
    assert path is not None and path.is_own
    path.path.write_bytes(bytes(path.num_bytes))
    assert not holds(first, fake)
    assert holds(first, fake), "the other copy"
    assert first.flush(5)
    first.check()
    assert path.subfolder != second._writer_folder.subfolder and holds(second, twin)
    first.put(third.run, third.pack())
    first.drop([fake.names[1]])
    assert first.find(fake.names[0]) is None and first.find(third.names[0]) is third.run


def test_a_full_file_system_loses_runs_and_nothing_else(tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=8m none {folder} 2>/dev/null"):
        pytest.skip("no tmpfs can be mounted here")
    stores = []
    try:
        stores.append(store := DiskStore(folder / "store", CAP, NAMESPACE))
        fakes = [FakeRun(n, 2, 600_000) for n in range(8)]
        for fake in fakes:
            store.put(fake.run, fake.pack())
        store.flush(10)
        found = [holds(store, fake) for fake in fakes]
        assert not all(found)
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1 and "No space left" in warnings[0]
        assert store.stats()["is_on"] is False
        store.check()
        store.close()
        stores.append(again := DiskStore(folder / "store", CAP, NAMESPACE))
        assert [holds(again, fake) for fake in fakes] == found
    finally:
        for store in stores:
            store.close()
        os.system(f"umount {folder}")


def test_other_formats_count_and_are_not_touched(tmp_path: Path, opened: Callable[[], DiskStore]) -> None:
    folder = tmp_path / "store"
    opened().close()
    (folder / "v2" / "0").mkdir(parents=True)
    (folder / "v2" / "0" / "1.runs").write_bytes(os.urandom(30 * MIB))
    store = opened()
    for number in range(30):
        fake = FakeRun(number, 2, 1_000_000, namespace=replace(NAMESPACE, salt="s"))
        store.put(fake.run, fake.pack())
        assert store.flush(10)
        assert disk_usage(folder) <= CAP
    assert (folder / "v2" / "0" / "1.runs").stat().st_size == 30 * MIB
    store.check()
    store.close()
    shutil.rmtree(folder)
