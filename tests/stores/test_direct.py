"""Files that are read and written without the page cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quire.stores.direct import BLOCK_BYTES, AlignedBuffer, DirectFile, allows_direct

from ..disk_runs import MIB


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
