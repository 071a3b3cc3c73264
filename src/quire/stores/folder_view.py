"""A process's view of one sub-folder: its index, and the catalog's entries for it."""

from __future__ import annotations

import logging
from pathlib import Path

from quire.errors import ExtentError
from quire.options import format_count
from quire.stores.catalog import Catalog, CatalogEntry, RunFile
from quire.stores.direct import BLOCK_BYTES
from quire.stores.folder import RUNS_SUFFIX
from quire.stores.index import FileRow, RunIndex, RunRow
from quire.stores.signer import ExtentSigner

log = logging.getLogger("quire")


class FolderView:
    """The files of a sub-folder. Invariant: `update` copies the index into files and catalog, and skips runs with
    damaged headers.

    digest  digest of the namespaces whose runs are found; other runs are only counted
    damaged     for each run whose header cannot be verified, by id: the reason
    """

    def __init__(self, subfolder: Path, catalog: Catalog, signer: ExtentSigner, digest: bytes, *, is_own: bool) -> None:
        self.subfolder = subfolder
        self.files: dict[int, RunFile] = {}
        self.damaged: dict[int, str] = {}
        self._catalog, self._signer, self._digest, self._is_own = catalog, signer, digest, is_own
        self._known: dict[int, CatalogEntry | None] = {}
        self._last_id = 0
        if not is_own:
            catalog.files_of_others[subfolder] = self.files

    def update(self, index: RunIndex) -> None:
        """Takes over the changes of the index. Raises the errors of RunIndex."""
        pins = index.pins()
        if not self._is_own:
            self._catalog.pins_of_others[self.subfolder] = pins
        files = {row.number: row for row in index.files()}
        for number, file in list(self.files.items()):
            if number not in files or files[number].num_bytes != file.num_bytes:  # a restarted writer may reuse it
                self._catalog.drop_file(self.files.pop(number))
        for file_row in files.values():
            self._take_file(file_row)
        before = len(self.damaged)
        for row in index.runs(self._last_id):
            if (at := self.files.get(row.file)) is not None:
                self._known[row.id] = self._take_run(index, row, at, pins)
                self._last_id = max(self._last_id, row.id)
        if lost := list(self.damaged.values())[before:]:
            log.warning(
                "lost %s in the index of %s, the first in %s", format_count(len(lost), "run"), self.subfolder, lost[0]
            )
        if index.num_runs != len(self._known):  # some runs were removed
            ids = index.ids()
            removed = [run_id for run_id in self._known if run_id not in ids]
            self._catalog.drop([entry for run_id in removed if (entry := self._known.pop(run_id)) is not None])

    def clear(self) -> None:
        """Forgets all files and their runs."""
        for file in self.files.values():
            self._catalog.drop_file(file)
        self.files.clear()
        self._known.clear()
        self._last_id = 0
        if not self._is_own:
            self._catalog.pins_of_others.pop(self.subfolder, None)

    def _take_file(self, row: FileRow) -> None:
        number = row.number
        file = self.files.get(number)
        if file is None:
            path = self.subfolder / f"{number}{RUNS_SUFFIX}"
            file = RunFile(self.subfolder, number, path, row.used, self._is_own, row.num_bytes, noted=row.used)
            self.files[number] = file
        file.used = max(file.used, row.used, used_by_others(file.path) if self._is_own else 0.0)

    def _take_run(self, index: RunIndex, row: RunRow, file: RunFile, pins: dict[bytes, float]) -> CatalogEntry | None:
        is_ours = row.digest == self._digest
        if not is_ours:
            file.others.add(row.id)
        if not (is_ours or pins):
            return None
        header = next((header for *_, header in index.headers([row], self._signer)), ExtentError("it is gone"))
        if not is_ours:
            names = set() if isinstance(header, ExtentError) else pins.keys() & set(header.run.names)
            file.pinned_until = max(file.pinned_until, *map(pins.__getitem__, names), 0)
            return None
        if not isinstance(header, ExtentError):
            entry = CatalogEntry(header.run, header.lengths, file.used, file=file, offset=row.offset, run_id=row.id)
            if row.offset % BLOCK_BYTES == 0 and row.offset + entry.num_bytes <= file.num_bytes:
                self._catalog.add(entry)
                return entry
            header = ExtentError("it lies outside of the file")
        self.damaged[row.id] = f"{file.path.name}: {header}"
        return None


def used_by_others(path: Path) -> float:
    """Time of the last use by another process, which cannot write the index and therefore sets the file's time."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
