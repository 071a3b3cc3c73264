"""A folder of a disk store as commands read it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.stores.disk import DiskStore
from quire.stores.folder import run_files
from quire.stores.folder_reader import FolderReader
from tests.stores.test_disk_crashes import opened as opened
from tests.stores.test_disk_crashes import two

from ..disk_runs import FakeRun, holds


def test_damaged_files_and_runs_are_one_warning_each_at_a_start(
    tmp_path: Path, opened: Callable[[], DiskStore], caplog: Any
) -> None:
    store, fakes = opened(), [FakeRun(number) for number in range(6)]
    for fake in fakes:
        store.put(fake.run, fake.pack())
        assert store.flush(5)
    store.close()
    subfolder = tmp_path / "store" / "v1" / "0"
    (subfolder / "1.runs").unlink()
    for number in (2, 3):
        os.truncate(subfolder / f"{number}.runs", 4096)
    reader = FolderReader(tmp_path / "store")
    assert len(list(reader.runs())) == 3 and [line.split(": ")[0] for line in reader.problems] == [
        str(subfolder / f"{number}.runs") for number in (2, 3)
    ]
    store = opened()
    (line,) = caplog.messages
    assert "lost 3 files" in line and f"{subfolder / '1.runs'}: it is gone" in line
    assert [holds(store, fake) for fake in fakes] == [False] * 3 + [True] * 3
    store.close()
    (tmp_path / "store" / "v1" / "secret").write_bytes(os.urandom(32))
    caplog.clear()
    store = opened()
    (line,) = caplog.messages
    assert "lost 3 runs" in line and "the first in 4.runs: written under another secret" in line
    assert not list(subfolder.glob("*.runs"))
    store.check()


def test_a_model_is_cleared_beside_a_damaged_index(tmp_path: Path, opened: Callable[[], DiskStore]) -> None:
    first, second = two(opened)
    for store, number in ((first, 1), (second, 2)):
        store.put(FakeRun(number).run, FakeRun(number).pack())
        assert store.flush(5)
        store.close()
    path = tmp_path / "store" / "v1" / "0" / "index.db"
    data = bytearray(path.read_bytes())
    at = len(data) - 4096
    path.write_bytes(data[:at] + bytes(len(data) - at))
    reader = FolderReader(tmp_path / "store")
    freed, live = reader.clear(lambda namespace: True)
    assert freed > 0 and not live and any(str(path) in problem for problem in reader.problems)
    assert [number for number, _ in run_files(path.parent)] == [1]
    assert not list(run_files(path.parent.parent / "1"))


def test_files_of_others_that_are_named_as_sub_folders_are_left_alone(
    tmp_path: Path, opened: Callable[[], DiskStore]
) -> None:
    root = tmp_path / "store" / "v1"
    opened().close()
    shutil.rmtree(root / "0")
    for name in ("0", "3"):
        (root / name).write_text("notes")
    store, fake = opened(), FakeRun(1)
    store.put(fake.run, fake.pack())
    assert store.flush(5) and holds(store, fake) and (root / "1").is_dir()
    store.check()
    assert [subfolder.path.name for subfolder in FolderReader(tmp_path / "store").subfolders()] == ["1"]
    assert (root / "0").read_text() == (root / "3").read_text() == "notes"
