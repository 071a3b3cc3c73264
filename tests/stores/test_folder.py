"""The folder of a disk store: who may use it, and whose files are whose."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.stores import folder as folders
from quire.stores.folder import FileLock, StoreFolder


def test_a_new_folder_is_private_and_keeps_its_secret(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        first = StoreFolder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert len(first.secret) == 32 and StoreFolder(tmp_path / "a" / "b").secret == first.secret
    assert StoreFolder(tmp_path / "c").secret != first.secret
    for path in (first.path, first.root):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((first.root / "secret").stat().st_mode) == 0o600


def test_an_empty_folder_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    StoreFolder(tmp_path / "open")
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700


def test_unsafe_folders_are_refused_with_a_way_out(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file: name a folder"):
        StoreFolder(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot use .*: name a folder"):
        StoreFolder(tmp_path / "file" / "below")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    (tmp_path / "link").symlink_to(shared)
    with pytest.raises(ConfigError, match="chmod go-w"):
        StoreFolder(tmp_path / "link")
    (shared / "something").write_text("")
    with pytest.raises(ConfigError, match="chmod go-w"):
        StoreFolder(shared)
    shared.chmod(0o700)
    assert StoreFolder(tmp_path / "link").path == shared
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        StoreFolder(tmp_path / "link")
    monkeypatch.undo()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="Permission denied.*that you can write to"):
        StoreFolder(tmp_path / "link")
    monkeypatch.undo()
    (shared / "v1" / "secret").write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes instead of 32"):
        StoreFolder(shared)


def test_a_writer_takes_the_lowest_free_sub_folder(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path)
    first, second, third = (folder.take() for _ in range(3))
    assert [lock.path.parent.name for lock in (first, second, third)] == ["0", "1", "2"]
    second.close()
    assert folder.take().path.parent.name == "1"
    with pytest.raises(BlockingIOError):
        FileLock(first.path, waits=False)
    assert first.is_intact
    first.path.unlink()
    assert not first.is_intact
    first.close()
    third.close()


def test_too_many_writers_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(folders, "MAX_WRITERS", 2)
    folder = StoreFolder(tmp_path)
    locks = [folder.take(), folder.take()]
    with pytest.raises(ConfigError, match="2 writers already"):
        folder.take()
    for lock in locks:
        lock.close()
