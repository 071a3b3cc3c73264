"""The sub-folder that a process writes: its files, their index, and the quota that bounds both. No threads."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.stores.catalog import FILE_BYTES, Catalog, CatalogEntry, RunFile
from quire.stores.collect import clear_subfolder, collect_abandoned, victim
from quire.stores.direct import AlignedBuffer, allows_direct, padded
from quire.stores.folder import INDEX_NAME, StoreFolder, remove_file, run_files
from quire.stores.folder_view import FolderView, counted, used_by_others
from quire.stores.headers import RunHeader, encode_run_header
from quire.stores.index import MARGIN_BYTES, DamagedIndexError, FileRow, RunIndex
from quire.stores.private_files import PrivateFiles, bytes_of
from quire.stores.quotas import Quotas
from quire.stores.run_file_writer import RunFileWriter
from quire.stores.signer import ExtentSigner
from quire.stores.throttle import Throttle

log = logging.getLogger("quire")

RUNS_BYTES = 64 << 20
"""Of a file of runs; of a small quota an eighth, so that collecting one file does not empty the tier."""

MIN_RUNS_BYTES = 1 << 20
NEW_INDEX_BYTES = MARGIN_BYTES + (64 << 10)

STALE_SECONDS = 7 * 24 * 3600.0
"""Files of other models are collected last, and after this time without use first."""

GROW_SECONDS = 0.5
"""A quota that could not grow is not asked for again within this time."""


class WriterFolder:
    """Invariant: bytes of all files, finished or not, of private files and of the index <= quota.

    Methods raise OSError; after one in `write` or `commit` the unfinished file is gone, with its runs.
    """

    def __init__(
        self,
        path: Path,
        cap: int,
        digest: bytes,
        catalog: Catalog,
        throttle: Throttle,
        clock: Callable[[], float],
    ) -> None:
        """digest: of the namespaces whose runs are found."""
        self.digest = digest
        self.files: dict[int, RunFile] = {}
        self.num_collected = self.bytes_written = 0
        self.seconds = 0.0
        self.catalog = catalog
        self._path, self._cap = path, cap
        self.throttle, self._clock = throttle, clock
        self._draft: RunFileWriter | None = None
        self._private = PrivateFiles(catalog)
        self._head = AlignedBuffer()
        self._grow_after = 0.0
        self.open()

    def open(self) -> None:
        """Joins the folder and finds what it has. Raises ConfigError and OSError."""
        self.folder = StoreFolder(self._path)
        self.signer = ExtentSigner(self.folder.secret)
        self.quotas = Quotas(self.folder, self._cap)
        self.subfolder = self.quotas.subfolder
        self._index: RunIndex | None = None
        self._view = FolderView(self.subfolder, self.catalog, self.signer, self.digest, is_own=True)
        self.files = self._view.files
        try:
            self.is_direct = allows_direct(self.subfolder)
            self._load()
        except BaseException:
            try:
                self._give_up()
            finally:
                self.quotas.leave()
            raise

    def _load(self) -> None:
        """Finds the runs of an earlier process, and removes what no index names."""
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
        self._next_number = max(self.files, default=0) + 1

    def _remove_damaged(self) -> None:
        """Removes files that are not as the index has them, and those without a run."""
        on_disk = {number: path.stat().st_size for number, path in run_files(self.subfolder)}
        lost = [file for number, file in self.files.items() if on_disk.get(number) != file.num_bytes]
        if lost:
            file, size = lost[0], on_disk.get(lost[0].number)
            reason = "is gone" if size is None else f"has {size} bytes and not {file.num_bytes}"
            log.warning("lost %s of runs, the first %s: it %s", counted(len(lost), "file"), file.path, reason)
        empty = [file for file in self.files.values() if not (file.entries or file.others)]
        self.remove(list({*lost, *empty}))

    @property
    def is_intact(self) -> bool:
        """Whether the sub-folder is still there, and ours."""
        return self.quotas.lock.is_intact

    @property
    def bytes(self) -> int:
        """What counts against the quota."""
        files = sum(file.total_bytes for file in list(self.files.values()))
        draft = self._draft
        return files + (draft.num_bytes if draft is not None else 0) + self._private.num_bytes + self._index_bytes

    @property
    def free_bytes(self) -> int:
        """What can be written without collecting anything."""
        return max(0, self.quotas.bytes - self.bytes - FILE_BYTES)

    @property
    def _index_bytes(self) -> int:
        return self._index.num_bytes if self._index is not None else 0

    @property
    def has_draft(self) -> bool:
        """Whether a file is unfinished."""
        return self._draft is not None

    def write(self, entry: CatalogEntry) -> bool:
        """Signs a staged run and appends it to the unfinished file. False if there is no room for it."""
        names = b"".join(entry.run.names)
        for buffer in entry.staged:
            self.signer.sign(names, buffer.extent)
        if not entry.run.is_shared:
            return self._write_private(entry)
        header = encode_run_header(RunHeader(entry.run, tuple(entry.lengths)), self.signer)
        head_bytes = padded(len(header))
        size = head_bytes + entry.num_bytes
        if self._draft is not None and self._draft.file.num_bytes + size > self._file_limit:
            self.commit()
        beside = FILE_BYTES + 3 * len(header) + (0 if self._index is not None else NEW_INDEX_BYTES)
        if not self.make_room(size + beside):
            return False
        block = self._head.view(head_bytes)
        block[: len(header)], block[len(header) :] = header, bytes(head_bytes - len(header))
        try:
            draft = self._open_draft()
            with self._counted(size):
                offset = draft.write([block, *(buffer.block for buffer in entry.staged)], self.throttle.take)
        except OSError:
            self.discard()
            raise
        if self.catalog.move(entry, draft.file, offset + head_bytes, None):
            draft.headers[entry] = header
        return True

    def commit(self) -> None:
        """Finishes the file: only what is whole and on the disk gets its name and enters the index."""
        draft = self._draft
        if draft is None:
            return
        if not draft.alive:
            self.discard()
            return
        file = draft.file
        try:
            draft.finish()
            alive = draft.alive
            rows = [(entry.offset, self.digest, header) for entry, header in alive]
            ids = self.index.add(FileRow(file.number, file.num_bytes, file.used), rows)
        except (OSError, DamagedIndexError):
            self.discard()
            raise
        file.noted = file.used
        with self.catalog.lock:
            for (entry, _), run_id in zip(alive, ids, strict=True):
                entry.run_id = run_id
        self.files[file.number] = file
        self._draft = None

    def discard(self) -> None:
        """Gives up the unfinished file and its runs."""
        draft, self._draft = self._draft, None
        if draft is not None:
            self.catalog.drop_file(draft.file)
            draft.discard()

    def make_room(self, num_bytes: int) -> bool:
        """Asks for a larger quota, then collects files, until so many bytes fit."""
        self._private.close_dropped()
        wanted = self.bytes + num_bytes
        if wanted > self.quotas.bytes and time.monotonic() >= self._grow_after:
            found = self.quotas.grow(wanted, lambda subfolder, size: collect_abandoned(subfolder, size, self.catalog))
            if found < wanted:
                self._grow_after = time.monotonic() + GROW_SECONDS
        fixed = self._index_bytes + self._private.num_bytes
        if num_bytes > self.quotas.bytes - fixed:
            return False
        return self._shrink_to(self.quotas.bytes - num_bytes)

    def shrink_to_fair_share(self) -> None:
        """Goes down to the fair share if another writer lacks room."""
        target = self.quotas.balance(self.bytes)
        if target < self.quotas.bytes:
            self._grow_after = time.monotonic() + GROW_SECONDS
            self._shrink_to(target)
            self.quotas.shrink(max(target, self.bytes))

    def _shrink_to(self, num_bytes: int) -> bool:
        while self.bytes > num_bytes:
            file = victim(self.files.values(), self.catalog, self._clock() - STALE_SECONDS)
            if file is not None:
                self.remove([file])
                self.num_collected += 1
            elif self._draft is not None:
                self.commit()
            else:
                return False
        return True

    def remove(self, files: list[RunFile]) -> None:
        """Removes whole files, first from the index."""
        if files:
            self.index.remove_files(file.number for file in files)
        for file in files:
            self.catalog.drop_file(file)
            self.files.pop(file.number, None)
            remove_file(file.path)

    def forget(self) -> None:
        """Removes dropped runs from the index, and files without any run."""
        with self.catalog.lock:
            dropped, self.catalog.removed = self.catalog.removed, []
        if ids := [entry.run_id for entry in dropped if entry.run_id]:
            self.index.remove_runs(ids)
        touched = {entry.file for entry in dropped}
        self.remove(
            [
                file
                for file in self.files.values()
                if file.is_gone or (file in touched and not file.entries and not file.others)
            ]
        )
        self._private.close_dropped()

    def note_uses(self) -> None:
        """Writes times of use into the index, those by other processes included."""
        for file in self.files.values():
            file.used = max(file.used, used_by_others(file.path))
        changed = [file for file in self.files.values() if file.used > file.noted]
        if changed:
            self.index.use([(file.number, file.used) for file in changed])
            for file in changed:
                file.noted = file.used

    def remove_expired(self, lifetime: float) -> None:
        """Removes files unused for longer than the lifetime, but for pinned ones."""
        last = self._clock() - lifetime
        old = [file for file in self.files.values() if file.used < last and used_by_others(file.path) < last]
        expired = [file for file in old if not self.catalog.is_pinned(file)]
        if expired:
            self.remove(expired)

    def set_pins(self) -> bool:
        """Writes the pins into the index. False if there is no room for one."""
        pins = {name: float(until) for name, until in self.catalog.pins.items()}
        if self._index is None and pins and not self.make_room(NEW_INDEX_BYTES):
            return False
        if self._index is not None or pins:
            self.index.set_pins(pins)
        return True

    def reset(self) -> None:
        """After damage to the index: gives up everything in the sub-folder."""
        self._give_up()
        clear_subfolder(self.subfolder)

    def close(self) -> None:
        """Ends it; private runs are lost. After an error, too, nothing is left open."""
        kept = 0
        try:
            self._private.close()
            kept = self.bytes
        finally:
            try:
                self._give_up()
            finally:
                self.quotas.leave(kept)

    def check(self) -> None:
        """Asserts that index, memory and files agree, and that quotas hold."""
        rows, files = ([], []) if self._index is None else (self._index.runs(), self._index.files())
        others = {run_id for file in self.files.values() for run_id in file.others}
        known = {(entry.run_id, file.number, entry.offset) for file in self.files.values() for entry in file.entries}
        named = {(row.id, row.file, row.offset) for row in rows if row.id not in others}
        assert named == known, "index and memory name other runs"
        sizes = {number: file.num_bytes for number, file in self.files.items()}
        assert sizes == {row.number: row.num_bytes for row in files}, "index and memory name other files"
        assert sizes == {number: path.stat().st_size for number, path in run_files(self.subfolder)}, "files are missing"
        assert not self.files or self.bytes <= self.quotas.bytes, f"{self.bytes} bytes, quota {self.quotas.bytes}"
        self.quotas.check()

    @property
    def index(self) -> RunIndex:
        """The index, which is made when it is needed: a writer without a quota has none."""
        if self._index is None:
            self._index = RunIndex(self.subfolder, is_writer=True)
        return self._index

    @property
    def _file_limit(self) -> int:
        return min(RUNS_BYTES, max(self.quotas.bytes // 8, MIN_RUNS_BYTES))

    def _open_draft(self) -> RunFileWriter:
        if self._draft is None:
            self._draft = RunFileWriter(self.subfolder, self._next_number, self._clock(), is_direct=self.is_direct)
            self._next_number += 1
        return self._draft

    @contextlib.contextmanager
    def _counted(self, num_bytes: int) -> Iterator[None]:
        """Counts a write that succeeds."""
        begun = time.monotonic()
        yield
        self.seconds += time.monotonic() - begun
        self.bytes_written += num_bytes

    def _write_private(self, entry: CatalogEntry) -> bool:
        if not self.make_room(bytes_of(entry)):
            return False
        with self._counted(entry.num_bytes):
            self._private.write(entry, self.subfolder, self.throttle.take, is_direct=self.is_direct)
        return True

    def _give_up(self) -> None:
        """Forgets all runs, and closes the index."""
        self.discard()
        self._view.clear()
        with self.catalog.lock:
            self.catalog.removed.clear()
        if self._index is not None:
            self._index.close()
            self._index = None
