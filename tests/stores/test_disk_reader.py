"""Traps of offloading to a disk (FlexGen): the disk tier must not be a second copy in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from quire.stores.disk import STAGING_BYTES, DiskStore
from quire.stores.disk_reader import MAX_BYTES, NUM_READERS

from ..disk_runs import MIB, NAMESPACE, FakeRun, fetch

CHILD = """
import sys
from pathlib import Path
from quire.stores.disk import DiskStore
from tests.disk_runs import MIB, NAMESPACE, FakeRun, fetch

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

FakeRun(0, 1, MIB)
store = DiskStore(Path(sys.argv[1]), 1024 * MIB, NAMESPACE)
before = resident()
for number in range(1, 121):
    fake = FakeRun(number, 1, MIB)
    store.put(fake.run, fake.pack())
    if number % 12 == 0:
        assert store.flush(30)
for number in range(1, 121, 3):
    transfer = fetch(store, FakeRun(number, 1, MIB).names)
    assert transfer is not None and transfer.error is None
    del transfer
print(resident() - before, store.stats()["bytes"])
store.close()
"""


def cached_bytes(path: Path) -> int:
    """Bytes of a file in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapped, np.uint8)
    found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    error = libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data))
    assert error == 0, os.strerror(ctypes.get_errno())
    return int((found & 1).sum()) * mmap.PAGESIZE


def test_what_is_on_the_disk_takes_no_memory_beside_the_buffers(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "store")], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.returncode == 0, child.stderr
    grown, stored = map(int, child.stdout.split())
    assert stored > 350 * MIB
    buffers = STAGING_BYTES + NUM_READERS * MAX_BYTES
    assert grown < buffers + 48 * MIB, f"{grown / MIB:.0f} MiB of memory for {stored / MIB:.0f} MiB on the disk"


def test_neither_writing_nor_reading_leaves_anything_in_the_page_cache(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store", 256 * MIB, NAMESPACE)
    fakes = [FakeRun(number, 1, MIB) for number in range(6)]
    for fake in fakes:
        store.put(fake.run, fake.pack())
    assert store.flush(10)
    paths = list((tmp_path / "store").rglob("*.runs"))
    assert sum(path.stat().st_size for path in paths) > 17 * MIB
    for _ in range(2):
        assert sum(map(cached_bytes, paths)) < MIB
        for fake in fakes:
            transfer = fetch(store, fake.names)
            assert transfer is not None and transfer.error is None
    store.close()
    path = paths[0]
    path.read_bytes()
    assert cached_bytes(path) > MIB, "nothing is measured"
