"""What a process knows of one sub-folder: its index, and the catalog's entries for it."""

from __future__ import annotations

import logging
from pathlib import Path

from quire.errors import ExtentError
from quire.stores.catalog import Catalog, Entry, RunFile
from quire.stores.direct import BLOCK_BYTES
from quire.stores.folder import RUNS_SUFFIX
from quire.stores.index import FileRow, Index, RunRow
from quire.stores.seal import Seal

log = logging.getLogger("quire")


class View:
    """The files of a sub-folder. Invariant: after `update`, files and catalog have what the index had then, without
    runs whose heads are damaged.

    digest  of the namespaces whose runs are found; runs of others are counted alone
    bad     runs whose heads cannot be verified, by id, and why
    """

    def __init__(self, place: Path, catalog: Catalog, seal: Seal, digest: bytes, *, is_own: bool) -> None:
        self.place = place
        self.files: dict[int, RunFile] = {}
        self.bad: dict[int, str] = {}
        self._catalog, self._seal, self._digest, self._is_own = catalog, seal, digest, is_own
        self._known: dict[int, Entry | None] = {}
        self._last_id = 0
        if not is_own:
            catalog.files_of_others[place] = self.files

    def update(self, index: Index) -> None:
        """Takes over what has changed. Raises as Index."""
        pins = index.pins()
        if not self._is_own:
            self._catalog.pins_of_others[self.place] = pins
        files = {row.number: row for row in index.files()}
        for number, file in list(self.files.items()):
            if number not in files or files[number].num_bytes != file.num_bytes:  # a restarted writer may use it again
                self._catalog.drop_file(self.files.pop(number))
        for file_row in files.values():
            self._take_file(file_row)
        before = len(self.bad)
        for row in index.runs(self._last_id):
            if (at := self.files.get(row.file)) is not None:
                self._known[row.id] = self._take_run(index, row, at, pins)
                self._last_id = max(self._last_id, row.id)
        if lost := list(self.bad.values())[before:]:
            log.warning("lost %s in the index of %s, the first in %s", counted(len(lost), "run"), self.place, lost[0])
        if index.num_runs != len(self._known):  # some were removed
            ids = index.ids()
            gone = [run_id for run_id in self._known if run_id not in ids]
            self._catalog.drop([entry for run_id in gone if (entry := self._known.pop(run_id)) is not None])

    def clear(self) -> None:
        """Forgets everything."""
        for file in self.files.values():
            self._catalog.drop_file(file)
        self.files.clear()
        self._known.clear()
        self._last_id = 0
        if not self._is_own:
            self._catalog.pins_of_others.pop(self.place, None)

    def _take_file(self, row: FileRow) -> None:
        number = row.number
        file = self.files.get(number)
        if file is None:
            path = self.place / f"{number}{RUNS_SUFFIX}"
            file = RunFile(self.place, number, path, row.used, self._is_own, row.num_bytes, noted=row.used)
            self.files[number] = file
        file.used = max(file.used, row.used, used_by_others(file.path) if self._is_own else 0.0)

    def _take_run(self, index: Index, row: RunRow, file: RunFile, pins: dict[bytes, float]) -> Entry | None:
        is_ours = row.digest == self._digest
        if not is_ours:
            file.others.add(row.id)
        if not (is_ours or pins):
            return None
        head = next((head for *_, head in index.heads([row], self._seal)), ExtentError("it is gone"))
        if not is_ours:
            names = set() if isinstance(head, ExtentError) else pins.keys() & set(head.run.names)
            file.pinned_until = max(file.pinned_until, *map(pins.__getitem__, names), 0)
            return None
        if not isinstance(head, ExtentError):
            entry = Entry(head.run, head.lengths, file.used, file=file, offset=row.offset, run_id=row.id)
            if row.offset % BLOCK_BYTES == 0 and row.offset + entry.num_bytes <= file.num_bytes:
                self._catalog.add(entry)
                return entry
            head = ExtentError("it lies outside of the file")
        self.bad[row.id] = f"{file.path.name}: {head}"
        return None


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def used_by_others(path: Path) -> float:
    """When another process last used a file: it cannot write the index, so it sets the file's time."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
