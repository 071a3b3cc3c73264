"""The index of a sub-folder: what it keeps, and what it says of damage."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.stores.index import DamagedIndexError, FileRow, RunIndex, remove_index
from quire.stores.other_writers import WatchedFolder


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
