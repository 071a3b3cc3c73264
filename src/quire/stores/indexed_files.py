"""The finished files of a sub-folder, and their index."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from quire.options import format_count
from quire.stores.catalog import Catalog, CatalogEntry, RunFile
from quire.stores.collect import clear_subfolder
from quire.stores.folder import INDEX_NAME, remove_file, run_files
from quire.stores.folder_view import FolderView, used_by_others
from quire.stores.index import DamagedIndexError, FileRow, RunIndex
from quire.stores.signer import ExtentSigner

log = logging.getLogger("quire")


class IndexedFiles:
    """Invariant: a file enters the index once it is complete and on the disk, and leaves it before it is removed.

    digest  digest of the namespaces whose runs are found
    """

    def __init__(
        self, subfolder: Path, catalog: Catalog, signer: ExtentSigner, digest: bytes, clock: Callable[[], float]
    ) -> None:
        self.subfolder, self.catalog, self.digest, self._clock = subfolder, catalog, digest, clock
        self._index: RunIndex | None = None
        self._view = FolderView(subfolder, catalog, signer, digest, is_own=True)
        self.files = self._view.files

    def load(self) -> None:
        """Finds the runs of an earlier process, and removes files without an index entry."""
        try:
            if os.path.lexists(self.subfolder / INDEX_NAME):
                self._index = index = RunIndex(self.subfolder, is_writer=True)
                self._view.update(index)
                index.remove_runs(self._view.damaged)
                self._remove_damaged()
                now = self._clock()
                self.catalog.pins = {name: until for name, until in index.pins().items() if until > now}
        except DamagedIndexError as error:
            log.warning("the index of %s is damaged, and its runs are lost: %s", self.subfolder, error)
            self.reset()
        for number, path in run_files(self.subfolder):
            if number not in self.files:
                remove_file(path)

    def _remove_damaged(self) -> None:
        """Removes files that differ from their index entry, and files without a run."""
        on_disk = {number: path.stat().st_size for number, path in run_files(self.subfolder)}
        lost = [file for number, file in self.files.items() if on_disk.get(number) != file.num_bytes]
        if lost:
            file, size = lost[0], on_disk.get(lost[0].number)
            reason = "is gone" if size is None else f"has {size} bytes and not {file.num_bytes}"
            log.warning("lost %s of runs, the first %s: it %s", format_count(len(lost), "file"), file.path, reason)
        empty = [file for file in self.files.values() if not (file.entries or file.others)]
        self.remove({*lost, *empty})

    @property
    def file_bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.total_bytes for file in list(self.files.values()))

    @property
    def has_index(self) -> bool:
        """Whether there is an index."""
        return self._index is not None

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        return self._index.num_bytes if self._index is not None else 0

    @property
    def index(self) -> RunIndex:
        """The index, created on first use: a writer without a quota has none."""
        if self._index is None:
            self._index = RunIndex(self.subfolder, is_writer=True)
        return self._index

    def add(self, file: RunFile, alive: list[tuple[CatalogEntry, bytes]]) -> None:
        """Adds a file, and the runs in it with their headers."""
        rows = [(entry.offset, self.digest, header) for entry, header in alive]
        ids = self.index.add(FileRow(file.number, file.num_bytes, file.used), rows)
        file.noted = file.used
        with self.catalog.lock:
            for (entry, _), run_id in zip(alive, ids, strict=True):
                entry.run_id = run_id
        self.files[file.number] = file

    def remove(self, files: Iterable[RunFile]) -> None:
        """Removes complete files, first from the index."""
        if files := list(files):
            self.index.remove_files(file.number for file in files)
        for file in files:
            self.catalog.drop_file(file)
            self.files.pop(file.number, None)
            remove_file(file.path)

    def forget(self) -> None:
        """Removes dropped runs from the index, and files without runs."""
        with self.catalog.lock:
            dropped, self.catalog.removed = self.catalog.removed, []
        if ids := [entry.run_id for entry in dropped if entry.run_id]:
            self.index.remove_runs(ids)
        touched = {entry.file for entry in dropped}
        self.remove(
            file
            for file in self.files.values()
            if file.is_removed or (file in touched and not file.entries and not file.others)
        )

    def note_uses(self) -> None:
        """Writes times of last use into the index, uses by other processes included."""
        for file in self.files.values():
            file.used = max(file.used, used_by_others(file.path))
        changed = [file for file in self.files.values() if file.used > file.noted]
        if changed:
            self.index.use([(file.number, file.used) for file in changed])
            for file in changed:
                file.noted = file.used

    def remove_expired(self, lifetime: float) -> None:
        """Removes files that were unused for longer than the lifetime, except pinned ones."""
        last = self._clock() - lifetime
        old = [file for file in self.files.values() if file.used < last and used_by_others(file.path) < last]
        self.remove(file for file in old if not self.catalog.is_pinned(file))

    def reset(self) -> None:
        """Removes everything in the sub-folder, after damage to the index."""
        self.close()
        clear_subfolder(self.subfolder)

    def close(self) -> None:
        """Forgets all runs, and closes the index."""
        self._view.clear()
        with self.catalog.lock:
            self.catalog.removed.clear()
        if self._index is not None:
            self._index.close()
            self._index = None

    def check(self) -> None:
        """Asserts that index, memory and files agree."""
        rows, files = ([], []) if self._index is None else (self._index.runs(), self._index.files())
        others = {run_id for file in self.files.values() for run_id in file.others}
        known = {(entry.run_id, file.number, entry.offset) for file in self.files.values() for entry in file.entries}
        named = {(row.id, row.file, row.offset) for row in rows if row.id not in others}
        assert named == known, "index and memory name other runs"
        sizes = {number: file.num_bytes for number, file in self.files.items()}
        assert sizes == {row.number: row.num_bytes for row in files}, "index and memory name other files"
        assert sizes == {number: path.stat().st_size for number, path in run_files(self.subfolder)}, "files are missing"
