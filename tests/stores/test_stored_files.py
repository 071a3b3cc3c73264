"""Files of the disk store that an earlier build has written are files of today.

`stored_files.txt` has them: of each its path and length, then the bytes of every 48 that are not all zero after their
offset, in hexadecimal. A `DiskStore` at commit d40a162 wrote them: it put and flushed the two runs of `FAKES` one after
the other, at 1e9 and 1e9 + 1 seconds, and pinned the first one until 4e9.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quire.cli import main
from quire.stores.disk import DiskStore
from quire.stores.folder import VERSION

from ..disk_runs import MIB, NAMESPACE, FakeRun, holds

FILES = Path(__file__).with_name("stored_files.txt")
FAKES = [FakeRun(1, 1, 40, attached=1, jitter=1), FakeRun(2, 1, 40, jitter=1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the stored files."""
    made = tmp_path / "store"
    for section in FILES.read_text().split("# ")[1:]:
        title, *rows = section.splitlines()
        name, length = title.split()
        path = made / VERSION / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = bytearray(int(length))
        for at, row in (each.split() for each in rows):
            data[int(at) : int(at) + len(row) // 2] = bytes.fromhex(row)
        path.write_bytes(data)
        path.chmod(0o600)
        os.utime(path, (1e9, 1e9))
    for each in (made, made / VERSION):
        each.chmod(0o700)
    return made


def test_runs_of_an_earlier_build_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = DiskStore(folder, 64 * MIB, NAMESPACE)
    last, first = store.stored()
    assert (first.names, last.names) == (FAKES[0].names, FAKES[1].names)
    assert (first.parent, last.parent) == (FAKES[0].run.parent, FAKES[1].run.parent)
    assert (first.used, last.used) == (1e9, 1e9 + 1) and (first.pinned_until, last.pinned_until) == (4e9, 0.0)
    assert first.is_own_namespace and last.is_own_namespace
    store.close()
    assert main(["cache", "ls", "--disk", str(folder), "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert (model["num_runs"], model["num_chunks"], model["num_salts"]) == (2, 2, 1)


def test_runs_of_an_earlier_build_are_read(folder: Path) -> None:
    store = DiskStore(folder, 64 * MIB, NAMESPACE)
    for fake in FAKES:
        found = store.find(fake.names[0])
        assert found is not None
        assert found.tokens.tolist() == fake.run.tokens.tolist() and found.masks.tolist() == fake.run.masks.tolist()
        assert found.num_attached == fake.run.num_attached and found.namespace == NAMESPACE
        assert holds(store, fake)
    store.check()
    store.close()


def test_runs_of_an_earlier_build_are_evicted_the_pinned_one_last(folder: Path) -> None:
    store = DiskStore(folder, 64 * MIB, NAMESPACE)
    for number in range(10, 16):
        new = FakeRun(number, 2, 6 * MIB)
        store.put(new.run, new.pack())
        assert store.flush(10)
    assert holds(store, FAKES[0]) and holds(store, new)
    assert store.find(FAKES[1].names[0]) is None and not (folder / VERSION / "0" / "2.runs").exists()
    store.unpin(FAKES[0].names)
    for number in range(16, 20):
        new = FakeRun(number, 2, 6 * MIB)
        store.put(new.run, new.pack())
        assert store.flush(10)
    assert store.find(FAKES[0].names[0]) is None and not (folder / VERSION / "0" / "1.runs").exists()
    store.check()
    store.close()
