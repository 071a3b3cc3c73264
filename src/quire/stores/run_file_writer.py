"""The file of runs that a process is writing, before it gets its final name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from quire.stores.catalog import CatalogEntry, RunFile
from quire.stores.direct import DirectFile
from quire.stores.folder import DRAFT_SUFFIX, RUNS_SUFFIX, sync_folder


class RunFileWriter:
    """An unfinished file of runs. Methods raise OSError.

    file   its entry in the catalog
    headers  headers of its runs, which enter the index when the file is finished
    """

    def __init__(self, subfolder: Path, number: int, used: float, *, is_direct: bool) -> None:
        path = subfolder / f"{number}{DRAFT_SUFFIX}"
        self._open: DirectFile | None = DirectFile(path, is_direct=is_direct, is_new=True)
        self.file = RunFile(subfolder, number, path, used, True)
        self.headers: dict[CatalogEntry, bytes] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that count against the quota, including the headers' future bytes in the index."""
        return self.file.total_bytes + 3 * sum(map(len, list(self.headers.values())))

    @property
    def alive(self) -> list[tuple[CatalogEntry, bytes]]:
        """The runs that are not dropped, with their headers."""
        return [(entry, header) for entry, header in self.headers.items() if not entry.is_dropped]

    def write(self, views: list[memoryview], before: Callable[[int], None]) -> int:
        """Appends bytes, and returns their offset. before: as in `DirectFile.read`."""
        assert self._open is not None, "a file that is finished"
        offset = self.file.num_bytes
        self.file.num_bytes += sum(map(len, views))
        self._open.write(views, offset, before)
        return offset

    def finish(self) -> None:
        """Syncs the file, and gives it its final name."""
        assert self._open is not None, "a file that is finished"
        file = self.file
        self._open.sync()
        self._close()
        os.utime(file.path, (file.used, file.used))
        final = file.path.with_suffix(RUNS_SUFFIX)
        os.rename(file.path, final)
        file.path = final
        sync_folder(file.subfolder)

    def discard(self) -> None:
        """Removes the file. Raises nothing."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self.file.path.unlink(missing_ok=True)

    def _close(self) -> None:
        file, self._open = self._open, None
        if file is not None:
            file.close()
