"""Mirrors of indexes that other processes write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.stores.index import FileRow, RunIndex
from tests.stores.test_index import watch


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
