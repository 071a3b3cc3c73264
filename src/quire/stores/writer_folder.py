"""The sub-folder of one writing process: its files, their index, and the quota for both. No threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.stores.catalog import FILE_BYTES, Catalog, CatalogEntry
from quire.stores.collect import collect_abandoned, victim
from quire.stores.direct import AlignedBuffer, allows_direct, padded
from quire.stores.folder import StoreFolder
from quire.stores.headers import RunHeader, encode_run_header
from quire.stores.index import MARGIN_BYTES, DamagedIndexError
from quire.stores.indexed_files import IndexedFiles
from quire.stores.private_files import PrivateFiles, bytes_of
from quire.stores.quotas import Quotas
from quire.stores.run_file_writer import RunFileWriter
from quire.stores.signer import ExtentSigner
from quire.stores.throttle import Throttle

RUNS_BYTES = 64 << 20
"""Bytes of a file of runs; an eighth of a small quota, so that collecting one file does not empty the tier."""

MIN_RUNS_BYTES = 1 << 20
NEW_INDEX_BYTES = MARGIN_BYTES + (64 << 10)

STALE_SECONDS = 7 * 24 * 3600.0
"""Files of other models are collected after those of this model. Files of theirs that nobody has used for so long come
before both.
"""

GROW_SECONDS = 0.5
"""Seconds in which a quota that could not grow is not requested again."""


class WriterFolder:
    """Invariant: bytes of all files (finished, unfinished and private) and of the index <= quota.

    Methods raise OSError; after one in `write` or `commit`, the unfinished file and its runs are gone.
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
        """digest: digest of the namespaces whose runs are found."""
        self.digest = digest
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
        """Joins the folder and loads its runs. Raises ConfigError and OSError."""
        self.folder = StoreFolder(self._path)
        self.signer = ExtentSigner(self.folder.secret)
        self.quotas = Quotas(self.folder, self._cap)
        self.subfolder = self.quotas.subfolder
        self.indexed = IndexedFiles(self.subfolder, self.catalog, self.signer, self.digest, self._clock)
        self.files = self.indexed.files
        try:
            self.is_direct = allows_direct(self.subfolder)
            self.indexed.load()
            self._next_number = max(self.files, default=0) + 1
        except BaseException:
            try:
                self._give_up()
            finally:
                self.quotas.leave()
            raise

    @property
    def is_intact(self) -> bool:
        """Whether the sub-folder still exists and belongs to this process."""
        return self.quotas.lock.is_intact

    @property
    def bytes(self) -> int:
        """Bytes that count against the quota."""
        draft, indexed = self._draft, self.indexed
        beside = (draft.num_bytes if draft is not None else 0) + self._private.num_bytes
        return indexed.file_bytes + indexed.index_bytes + beside

    @property
    def free_bytes(self) -> int:
        """Bytes that can be written without collecting files."""
        return max(0, self.quotas.bytes - self.bytes - FILE_BYTES)

    @property
    def has_draft(self) -> bool:
        """Whether there is an unfinished file."""
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
        limit = min(RUNS_BYTES, max(self.quotas.bytes // 8, MIN_RUNS_BYTES))
        if self._draft is not None and self._draft.file.num_bytes + size > limit:
            self.commit()
        beside = FILE_BYTES + 3 * len(header) + (0 if self.indexed.has_index else NEW_INDEX_BYTES)
        if not self.make_room(size + beside):
            return False
        block = self._head.view(head_bytes)
        block[: len(header)], block[len(header) :] = header, bytes(head_bytes - len(header))
        try:
            if self._draft is None:
                self._draft = RunFileWriter(self.subfolder, self._next_number, self._clock(), is_direct=self.is_direct)
                self._next_number += 1
            draft = self._draft
            with self._counted(size):
                offset = draft.write([block, *(buffer.block for buffer in entry.staged)], self.throttle.take)
        except OSError:
            self.discard()
            raise
        if self.catalog.move(entry, draft.file, offset + head_bytes, None):
            draft.headers[entry] = header
        return True

    def commit(self) -> None:
        """Finishes the file: it gets its name and enters the index once it is complete and on the disk."""
        draft = self._draft
        if draft is None:
            return
        if not draft.alive:
            self.discard()
            return
        try:
            draft.finish()
            self.indexed.add(draft.file, draft.alive)
        except (OSError, DamagedIndexError):
            self.discard()
            raise
        self._draft = None

    def discard(self) -> None:
        """Drops the unfinished file and its runs."""
        draft, self._draft = self._draft, None
        if draft is not None:
            self.catalog.drop_file(draft.file)
            draft.discard()

    def make_room(self, num_bytes: int) -> bool:
        """Makes room for `num_bytes`: first requests a larger quota, then collects files. Returns whether they fit."""
        self._private.close_dropped()
        wanted = self.bytes + num_bytes
        if wanted > self.quotas.bytes and time.monotonic() >= self._grow_after:
            found = self.quotas.grow(wanted, lambda subfolder, size: collect_abandoned(subfolder, size, self.catalog))
            if found < wanted:
                self._grow_after = time.monotonic() + GROW_SECONDS
        fixed = self.indexed.index_bytes + self._private.num_bytes
        if num_bytes > self.quotas.bytes - fixed:
            return False
        return self._shrink_to(self.quotas.bytes - num_bytes)

    def shrink_to_fair_share(self) -> None:
        """Shrinks to the fair share if another writer lacks room."""
        target = self.quotas.balance(self.bytes)
        if target < self.quotas.bytes:
            self._grow_after = time.monotonic() + GROW_SECONDS
            self._shrink_to(target)
            self.quotas.shrink(max(target, self.bytes))

    def _shrink_to(self, num_bytes: int) -> bool:
        while self.bytes > num_bytes:
            file = victim(self.files.values(), self.catalog, self._clock() - STALE_SECONDS)
            if file is not None:
                self.indexed.remove([file])
                self.num_collected += 1
            elif self._draft is not None:
                self.commit()
            else:
                return False
        return True

    def forget(self) -> None:
        """Removes dropped runs from the index, and files without runs."""
        self.indexed.forget()
        self._private.close_dropped()

    def set_pins(self) -> bool:
        """Writes the pins into the index. Returns False if there is no room for one."""
        pins = {name: float(until) for name, until in self.catalog.pins.items()}
        if not self.indexed.has_index and pins and not self.make_room(NEW_INDEX_BYTES):
            return False
        if self.indexed.has_index or pins:
            self.indexed.index.set_pins(pins)
        return True

    def reset(self) -> None:
        """Removes everything in the sub-folder, after damage to the index."""
        self.discard()
        self.indexed.reset()

    def close(self) -> None:
        """Leaves the sub-folder; private runs are lost. Frees everything even after an error."""
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
        self.indexed.check()
        assert not self.files or self.bytes <= self.quotas.bytes, f"{self.bytes} bytes, quota {self.quotas.bytes}"
        self.quotas.check()

    @contextlib.contextmanager
    def _counted(self, num_bytes: int) -> Iterator[None]:
        """Counts the bytes of a successful write."""
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
        self.indexed.close()
