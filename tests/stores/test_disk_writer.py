"""The writer of a disk store: what turns it off, and files that are finished."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

from quire.stores import disk, disk_writer
from quire.stores.direct import DirectFile
from tests.stores.test_disk import Clock, Make, put, wait_until, warnings_of
from tests.stores.test_disk import make as make

from ..disk_runs import FakeRun, holds


def test_a_disk_that_is_full_turns_writing_off_with_one_warning(make: Make, monkeypatch: Any, caplog: Any) -> None:
    clock = Clock()
    store = make(clock=clock)
    put(store, FakeRun(1))
    assert store.flush(5)
    real = DirectFile.write

    def full(self: DirectFile, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DirectFile, "write", full)
    put(store, FakeRun(2), FakeRun(3))
    assert not store.flush(5)
    assert store.wants([b"a" * 16]) == [False] and not store.stats()["is_on"]
    assert "No space left on device" in str(store.stats()["reason"])
    put(store, FakeRun(4))
    assert (
        holds(store, FakeRun(1)) and store.find(FakeRun(2).names[0]) is None and store.find(FakeRun(4).names[0]) is None
    )
    for seconds in (31, 61, 121):
        clock.now += seconds
        put(store, FakeRun(5))
        assert not store.flush(5)
        assert store.wants([b"a" * 16]) == [False]
    assert len(warnings_of(caplog)) == 1 and "No space left" in caplog.text
    monkeypatch.setattr(DirectFile, "write", real)
    clock.now += 241
    put(store, FakeRun(6))
    assert store.flush(5) and holds(store, FakeRun(6))
    assert len(warnings_of(caplog)) == 2 and "works again" in warnings_of(caplog)[-1]
    store.check()


def test_a_removed_folder_turns_writing_off_until_it_can_be_made_again(make: Make, tmp_path: Path, caplog: Any) -> None:
    clock = Clock()
    store = make(clock=clock)
    put(store, FakeRun(1))
    assert store.flush(5)
    (tmp_path / "store").rename(tmp_path / "moved")
    put(store, FakeRun(2))
    assert not store.flush(5) and not store.stats()["is_on"]
    assert not holds(store, FakeRun(2)) and not holds(store, FakeRun(1))
    clock.now += 31
    put(store, FakeRun(3))
    assert store.flush(5) and holds(store, FakeRun(3))
    assert (tmp_path / "store" / "v1" / "0").is_dir() and "works again" in caplog.text
    store.check()


def test_a_writer_with_an_unfinished_file_that_is_off_waits(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(disk_writer, "IDLE_SECONDS", 0.5)
    store, turns = make(), list[float]()
    put(store, FakeRun(1))
    wait_until(lambda: store._writer_folder.has_draft)
    shutil.rmtree(tmp_path / "store")
    wait_until(lambda: not store.is_on)
    assert store._writer_folder.has_draft
    wait = store._writer._seconds_to_wait
    monkeypatch.setattr(store._writer, "_seconds_to_wait", lambda: turns.append(wait()) or turns[-1])
    time.sleep(0.6)
    assert len(turns) < 10, "it spins"


def test_what_is_put_while_the_writer_is_asked_for_something_else_is_flushed(make: Make, monkeypatch: Any) -> None:
    store, fake = make(), FakeRun(1)
    entered, goes_on, tick = threading.Event(), threading.Event(), store._writer._tick

    def slow() -> None:
        entered.set()
        assert goes_on.wait(10)
        tick()

    monkeypatch.setattr(store._writer, "_tick", slow)
    store.unpin([b"x" * 16])
    assert entered.wait(10)
    put(store, fake)
    threading.Timer(0.2, goes_on.set).start()
    assert store.flush(10)
    assert not store._writer_folder.has_draft and [stored.names for stored in store.stored()] == [fake.names]


def test_closing_a_store_on_a_slow_disk_gives_up_what_is_queued(make: Make, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(disk, "FLUSH_SECONDS", 0.0)
    real = DirectFile.write

    def slow(*args: Any) -> None:
        time.sleep(0.3)
        real(*args)

    monkeypatch.setattr(DirectFile, "write", slow)
    store = make()
    put(store, *(FakeRun(n) for n in range(20)))
    store.close()
    assert not store._writer._thread.is_alive() and not warnings_of(caplog)
    assert store._staging.free_bytes == store._staging.num_bytes


def test_idle_files_are_finished_without_a_flush(make: Make, tmp_path: Path) -> None:
    store = make()
    put(store, FakeRun(1))
    wait_until(lambda: bool(list(tmp_path.rglob("*.runs"))), 3 * disk_writer.IDLE_SECONDS + 1)
