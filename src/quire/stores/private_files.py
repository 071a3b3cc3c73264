"""The files of private runs: they have no name, and end with the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from quire.stores.catalog import FILE_BYTES, Catalog, CatalogEntry
from quire.stores.direct import DirectFile
from quire.stores.folder import DRAFT_SUFFIX


def bytes_of(entry: CatalogEntry) -> int:
    """Bytes of the file of a private run."""
    return entry.num_bytes + FILE_BYTES


class PrivateFiles:
    """One file for each private run."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._sizes: dict[CatalogEntry, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that count against the quota."""
        return sum(list(self._sizes.values()))

    def write(self, entry: CatalogEntry, subfolder: Path, before: Callable[[int], None], *, is_direct: bool) -> None:
        """Writes a staged run. before: as in `DirectFile.read`. Raises OSError."""
        path = subfolder / f"private-{os.getpid()}{DRAFT_SUFFIX}"
        file = DirectFile(path, is_direct=is_direct, is_new=True)
        try:
            path.unlink()
            self._sizes[entry] = bytes_of(entry)
            file.write([buffer.block for buffer in entry.staged], 0, before)
        except OSError:
            file.close()
            self._sizes.pop(entry, None)
            raise
        if not self._catalog.move(entry, None, 0, file):
            file.close()

    def close_dropped(self) -> None:
        """Closes the files of dropped runs. Not done by `drop`, because freeing the blocks of a large file takes
        milliseconds.
        """
        with self._catalog.lock:
            closing, self._catalog.closing = self._catalog.closing, []
        for entry in closing:
            if entry.private_file is not None:
                entry.private_file.close()
                entry.private_file = None
        # Runs that are not dropped have a file, or will have one.
        self._sizes = {
            entry: size for entry, size in self._sizes.items() if entry.private_file is not None or not entry.is_dropped
        }

    def close(self) -> None:
        """Drops all private runs, and closes their files."""
        self._catalog.drop(list(self._sizes))
        self.close_dropped()
