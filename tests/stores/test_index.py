"""Parts of the disk store: throttle, staging memory, direct files, outages and the index."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.stores.circuit_breaker import CircuitBreaker
from quire.stores.direct import BLOCK_BYTES, AlignedBuffer, DirectFile, allows_direct, padded
from quire.stores.index import DamagedIndexError, FileRow, RunIndex, remove_index
from quire.stores.other_writers import WatchedFolder
from quire.stores.staging import StagingBuffer, StagingPool
from quire.stores.throttle import BURST_SECONDS, Throttle

from ..disk_runs import MIB
from ..effort import tries


def test_a_throttle_passes_its_bytes_over_time_and_no_burst(seed: int) -> None:
    rng, now = random.Random(seed), 0.0
    passed: list[tuple[float, int]] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    throttle = Throttle(1e6, lambda: now, sleep)
    for _ in range(1000):
        if rng.random() < 0.1:
            now += rng.random()
        size = rng.choice([100, 5000, 300_000])
        throttle.take(size)
        passed.append((now, size))
    for _ in range(200):
        first, last = sorted(rng.sample(range(1000), 2))
        seconds = passed[last][0] - (passed[first - 1][0] if first else 0.0)
        assert sum(size for _, size in passed[first : last + 1]) <= 1e6 * (seconds + BURST_SECONDS) * 1.0001
    begun = now
    for _ in range(100):
        throttle.take(100_000)
    assert now - begun == pytest.approx(10, rel=0.1)


def test_what_passes_first_waits_for_its_own_bytes_and_later_ones_make_up_for_it() -> None:
    waits: list[float] = []
    throttle = Throttle(1e6, lambda: 0.0, waits.append)
    for _ in range(2):
        throttle.take(1_000_000)
    throttle.take(100_000, first=True)
    throttle.take(1_000_000)
    assert waits == pytest.approx([1 - BURST_SECONDS, 2 - BURST_SECONDS, 0.1, 3.1 - BURST_SECONDS], abs=0.06)


def test_requests_that_pass_first_share_the_bandwidth() -> None:
    """Four threads of movers that never rest pass no more than the limit, though weights wait."""
    waits: list[float] = []
    throttle = Throttle(1e6, lambda: 0.0, waits.append)
    throttle.take(9_000_000)
    for _ in range(4):
        throttle.take(100_000, first=True)
    assert waits[1:] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_threads_share_a_throttle_and_closing_ends_their_wait() -> None:
    throttle, begun = Throttle(20e6), time.monotonic()
    threads = [threading.Thread(target=lambda: [throttle.take(MIB) for _ in range(4)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun == pytest.approx(8 * MIB / 20e6, rel=0.25)
    slow = Throttle(1.0)
    waiting = threading.Thread(target=lambda: slow.take(MIB))
    waiting.start()
    slow.close()
    waiting.join(5)
    assert not waiting.is_alive()


def test_staging_memory_gives_each_byte_once(seed: int) -> None:
    rng = random.Random(seed)
    staging, buffers = StagingPool(64 * BLOCK_BYTES), list[StagingBuffer]()
    marks: dict[StagingBuffer, int] = {}
    num_refused = 0
    for step in range(tries(500)):
        if rng.random() < 0.8:
            buffer = staging.take(rng.randrange(1, 12 * BLOCK_BYTES))
            if buffer is None:
                num_refused += 1
            else:
                assert bytes(buffer.block[buffer.length :]) == bytes(padded(buffer.length) - buffer.length)
                buffer.block[:] = bytes([step % 256]) * len(buffer.block)
                marks[buffer] = step % 256
                buffers.append(buffer)
        elif buffers:
            given = [buffers.pop(rng.randrange(len(buffers))) for _ in range(min(len(buffers), rng.randrange(1, 4)))]
            staging.free(given)
        staging.check(buffers)
        assert all(bytes(buffer.block) == bytes([marks[buffer]]) * len(buffer.block) for buffer in buffers)
    staging.free(buffers)
    assert num_refused and staging.take(64 * BLOCK_BYTES) is not None


@pytest.mark.parametrize("is_direct", [True, False])
def test_reads_and_writes_are_whole_or_fail(tmp_path: Path, is_direct: bool, monkeypatch: Any) -> None:
    is_direct = is_direct and allows_direct(tmp_path)
    sizes: list[int] = []
    data = [os.urandom(BLOCK_BYTES * n) for n in (1, 2000, 3, 1)]
    views = []
    for part in data:
        view = AlignedBuffer().view(len(part))
        view[:] = part
        views.append(view)
    file = DirectFile(tmp_path / "x", is_direct=is_direct, is_new=True)
    file.write(views, 0, sizes.append)
    file.sync()
    assert sum(sizes) == sum(map(len, data)) and max(sizes) <= 8 * MIB
    assert (tmp_path / "x").read_bytes() == b"".join(data)
    reader = DirectFile(tmp_path / "x", is_direct=is_direct)
    found = AlignedBuffer().view(sum(map(len, data)) - BLOCK_BYTES)
    reader.read(found, BLOCK_BYTES, sizes.append)
    assert found == b"".join(data)[BLOCK_BYTES:]
    with pytest.raises(OSError, match="a read of"):
        reader.read(found, 2 * BLOCK_BYTES, sizes.append)
    monkeypatch.setattr(os, "pwritev", lambda *_: BLOCK_BYTES)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="a write of"):
        file.write(views, 0, sizes.append)
    file.close()
    reader.close()
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "x", is_direct=is_direct, is_new=True)


def test_an_outage_waits_longer_each_time_and_says_it_once(caplog: Any) -> None:
    now = 1000.0
    circuit_breaker = CircuitBreaker("the thing", 3, lambda: now)
    circuit_breaker.fail("a")
    circuit_breaker.fail("b")
    circuit_breaker.succeed()
    circuit_breaker.fail("c")
    circuit_breaker.fail("d")
    assert circuit_breaker.is_on and not caplog.records
    circuit_breaker.fail("e")
    for seconds in (30, 60, 120, 240, 480, 600, 600):
        assert not circuit_breaker.is_on
        now += seconds - 1
        assert not circuit_breaker.is_on, seconds
        now += 2
        assert circuit_breaker.is_on
        circuit_breaker.fail("again")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "e; it is tried" in caplog.text
    circuit_breaker.succeed()
    circuit_breaker.succeed()
    assert circuit_breaker.is_on and len(caplog.records) == 2 and circuit_breaker.reason is None


class View:
    """Stands for the view of a sub-folder, and remembers what it is told."""

    def __init__(self, subfolder: Path) -> None:
        self.subfolder = subfolder
        self.told: list[str] = []

    def update(self, index: RunIndex) -> None:
        self.told.append("update")

    def clear(self) -> None:
        self.told.append("clear")

    def after(self, poll: Callable[[], None]) -> list[str]:
        """What a poll tells it."""
        self.told.clear()
        poll()
        return self.told


def watch(subfolder: Path) -> tuple[View, WatchedFolder]:
    view: Any = View(subfolder)
    return view, WatchedFolder(view)


def test_an_index_keeps_what_was_entered_and_mirrors_see_it(tmp_path: Path) -> None:
    index, (view, watched) = RunIndex(tmp_path, is_writer=True), watch(tmp_path)
    assert view.after(watched.poll) == ["clear", "update"] and view.after(watched.poll) == []
    ids = index.add(FileRow(7, 100, 5.0), [(0, b"d", b"head0"), (50, b"e", b"head1")])
    assert view.after(watched.poll) == ["update"] and view.after(watched.poll) == []
    assert watched.index is not None
    assert [(row.id, row.file, row.offset, row.digest) for row in watched.index.runs()] == [
        (ids[0], 7, 0, b"d"),
        (ids[1], 7, 50, b"e"),
    ]
    assert watched.index.header(ids[1]) == b"head1" and watched.index.header(99) == b""
    index.use([(7, 9.0)])
    index.set_pins({b"n": 3.0})
    assert watched.index.files() == [FileRow(7, 100, 9.0)] and watched.index.pins() == {b"n": 3.0}
    index.remove_runs(ids[:1])
    assert [row.id for row in watched.index.runs()] == ids[1:]
    index.remove_files([7])
    assert watched.index.runs() == [] and index.add(FileRow(8, 1, 1.0), [(0, b"d", b"h")])[0] > ids[1]
    with pytest.raises(OSError, match="readonly"):
        watched.index.set_pins({})
    index.close()
    remove_index(tmp_path)
    assert view.after(watched.poll) == ["clear"] and view.after(watched.poll) == []
    watched.close()


def test_what_an_index_has_committed_is_on_the_disk(tmp_path: Path) -> None:
    for _ in range(2):
        index = RunIndex(tmp_path, is_writer=True)
        assert index._db.execute("PRAGMA synchronous").fetchone() == (2,), "a power failure takes transactions back"
        index.close()


def test_a_mirror_waits_for_an_index_that_is_just_made(tmp_path: Path) -> None:
    view, watched = watch(tmp_path)
    (tmp_path / "index.db").touch()
    with pytest.raises(FileNotFoundError, match="just making it"):
        watched.poll()
    index = RunIndex(tmp_path, is_writer=True)
    assert view.after(watched.poll) == ["update"]
    index.close()
    watched.close()


def test_a_mirror_looks_at_an_index_that_takes_the_place_of_a_damaged_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, (view, watched) = tmp_path / "index.db", watch(tmp_path)
    path.write_bytes(b"junk" * 5000)
    os.utime(path, (1e9, 1e9))
    assert view.after(watched.poll) == ["clear", "clear"]
    assert view.after(watched.poll) == [], "it is left alone"
    assert len(caplog.records) == 1 and "is damaged, and its runs are not found" in caplog.text
    path.unlink()
    RunIndex(tmp_path, is_writer=True).close()  # file systems may give it the inode of the old one
    assert view.after(watched.poll) == ["clear", "update"]
    watched.close()


def test_a_mirror_reads_a_new_index_that_has_changed_as_often_as_the_old_one(tmp_path: Path) -> None:
    view, watched = watch(tmp_path)
    for number in (7, 8):
        index = RunIndex(tmp_path, is_writer=True)
        index.add(FileRow(number, 100, 5.0), [])
        index.close()
        assert view.after(watched.poll) == ["clear", "update"] and view.after(watched.poll) == []
        assert watched.index is not None and [file.number for file in watched.index.files()] == [number]
        (tmp_path / "index.db").unlink()
    watched.close()


def test_a_mirror_looks_at_a_damaged_index_again_when_it_was_written(tmp_path: Path) -> None:
    path, (view, watched) = tmp_path / "index.db", watch(tmp_path)
    RunIndex(tmp_path, is_writer=True).close()
    whole = path.read_bytes()
    path.write_bytes(b"junk" * 5000)
    os.utime(path, (1e9, 1e9))
    assert view.after(watched.poll) == ["clear", "clear"] and view.after(watched.poll) == []
    path.write_bytes(whole)
    assert view.after(watched.poll) == ["clear", "update"]
    watched.close()


@pytest.mark.parametrize("how", ["junk", "version", "flipped"])
def test_a_damaged_index_is_said_to_be(tmp_path: Path, how: str) -> None:
    index = RunIndex(tmp_path, is_writer=True)
    for number in range(200):
        index.add(FileRow(number, 1, 1.0), [(0, b"d" * 16, os.urandom(500))])
    index.close()
    path = tmp_path / "index.db"
    if how == "version":
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 9")
        db.close()
    else:
        data = bytearray(path.read_bytes())
        data[4096 * 3 if how == "flipped" else 0 :] = os.urandom(len(data) - (4096 * 3 if how == "flipped" else 0))
        path.write_bytes(data)
    with pytest.raises(DamagedIndexError):
        RunIndex(tmp_path, is_writer=True)
    if how != "flipped":
        with pytest.raises(DamagedIndexError):
            RunIndex(tmp_path, is_writer=False)
