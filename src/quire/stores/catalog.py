"""The catalog: every run that a process knows, by the names of its chunks, and the places of their bytes. In memory.

Engine, readers and writer share it. Its lock is never held during a read or a write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.cache.run import Run
from quire.stores.direct import DirectFile, padded
from quire.stores.staging import StagingBuffer, StagingPool

FILE_BYTES = 8192
"""Bytes of a file beside its contents: the file system may need blocks to map the others."""


@dataclass(eq=False)
class RunFile:
    """A file of runs.

    num_bytes  bytes of its contents on the disk, in whole blocks
    used       time of the last use of any of its runs
    is_own     whether this process writes its sub-folder
    entries    known runs of this engine in it
    others     ids of its runs of other namespaces
    """

    subfolder: Path
    number: int
    path: Path
    used: float
    is_own: bool
    num_bytes: int = 0
    entries: set[CatalogEntry] = field(default_factory=set)
    others: set[int] = field(default_factory=set)
    noted: float = 0.0
    """Time of the last use as written in the index."""
    pinned_until: float = 0.0
    """Latest pin of its runs of other namespaces."""
    is_removed: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes that count against the quota."""
        return self.num_bytes + FILE_BYTES


@dataclass(eq=False)
class CatalogEntry:
    """A run and the place of its bytes: first staging memory, then a shared file of runs or a private file.

    lengths  bytes of each extent
    used     time of its last use
    users    number of reads in progress: memory and files stay until they end
    """

    run: Run
    lengths: Sequence[int]
    used: float
    staged: list[StagingBuffer] = field(default_factory=list)
    file: RunFile | None = None
    offset: int = 0
    """Offset of the first extent in the file."""
    run_id: int = 0
    """Id in the index of its sub-folder; 0: none."""
    private_file: DirectFile | None = None
    """The file of a private run."""
    users: int = 0
    is_dropped: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of its extents on a disk."""
        return sum(padded(length) for length in self.lengths)

    def offset_of(self, layer: int) -> int:
        """The offset of a layer's extent in the file."""
        return self.offset + sum(padded(length) for length in self.lengths[:layer])


class Catalog:
    """Invariant: every entry that is not dropped is in `entries` and findable by each of its names, or hidden by
    another entry of that name. The entries with a file are the entries of all files.
    """

    def __init__(self, staging: StagingPool, clock: Callable[[], float]) -> None:
        self.staging = staging
        self.lock = threading.Lock()
        self.staged: set[CatalogEntry] = set()
        """Entries with staging memory, dropped ones included."""
        self.entries: dict[Run, CatalogEntry] = {}
        self.by_name: dict[bytes, CatalogEntry] = {}
        self.pins: dict[bytes, float] = {}
        """Pins of this process."""
        self.pins_of_others: dict[Path, dict[bytes, float]] = {}
        self.files_of_others: dict[Path, dict[int, RunFile]] = {}
        """Files by sub-folder and number."""
        self.removed: list[CatalogEntry] = []
        """Dropped entries that are still in the index of this process."""
        self.closing: list[CatalogEntry] = []
        """Dropped private runs with files to close."""
        self._hidden: dict[bytes, list[CatalogEntry]] = {}
        self._clock = clock

    def add(self, entry: CatalogEntry) -> None:
        """Makes a run findable. If several runs have a chunk, `by_name` has one that ends there with an attachment, or
        else the first one.
        """
        with self.lock:
            self.entries[entry.run] = entry
            if entry.staged:
                self.staged.add(entry)
            for name in entry.run.names:
                found = self.by_name.setdefault(name, entry)
                if found is not entry:
                    is_better = entry.run.ends_with_sums(name) and not found.run.ends_with_sums(name)
                    self.by_name[name], other = (entry, found) if is_better else (found, entry)
                    self._hidden.setdefault(name, []).append(other)
            if entry.file is not None:
                entry.file.entries.add(entry)

    def use(self, entry: CatalogEntry) -> None:
        """Sets the time of the last use to now."""
        entry.used = self._clock()
        if (file := entry.file) is not None:
            file.used = max(file.used, entry.used)

    def of(self, names: Iterable[bytes]) -> list[CatalogEntry]:
        """The entries with any of these names, each once."""
        return list({entry: None for name in names if (entry := self.by_name.get(name)) is not None})

    def drop(self, entries: Iterable[CatalogEntry]) -> None:
        """Forgets runs. Their memory and files are freed when no read uses them."""
        with self.lock:
            for entry in entries:
                if not entry.is_dropped:
                    self._drop(entry)

    def drop_file(self, file: RunFile) -> None:
        """Forgets a removed file, and its runs."""
        with self.lock:
            file.is_removed = True
            for entry in list(file.entries):
                if not entry.is_dropped:
                    self._drop(entry)

    def acquire(self, entry: CatalogEntry) -> bool:
        """Keeps an entry's memory or file until `release`; False if the run is lost."""
        with self.lock:
            if entry.is_dropped:
                return False
            entry.users += 1
            return True

    def release(self, entry: CatalogEntry) -> None:
        """Ends an `acquire`."""
        with self.lock:
            entry.users -= 1
            self._release(entry)

    def move(self, entry: CatalogEntry, file: RunFile | None, offset: int, private_file: DirectFile | None) -> bool:
        """Notes that a staged run is on the disk, and frees its memory. Returns False if it was dropped meanwhile."""
        with self.lock:
            if entry.is_dropped:
                return False
            entry.file, entry.offset, entry.private_file = file, offset, private_file
            if file is not None:
                file.entries.add(entry)
                file.used = max(file.used, entry.used)
            self._release(entry)
            return True

    def is_pinned(self, file: RunFile) -> bool:
        """Whether a file has a pinned run."""
        return self.pinned_until(file) > self._clock()

    def pinned_until(self, file: RunFile) -> float:
        """The end of a file's pin; 0: not pinned."""
        tables = [pins for pins in (self.pins, *self.pins_of_others.values()) if pins]
        found = file.pinned_until
        if tables:
            names = {name for entry in list(file.entries) for name in entry.run.names}
            for pins in tables:
                found = max(found, *(pins[name] for name in names & pins.keys()), 0.0)
        return found

    def _drop(self, entry: CatalogEntry) -> None:
        entry.is_dropped = True
        del self.entries[entry.run]
        for name in entry.run.names:
            hidden = self._hidden.get(name, [])
            if entry in hidden:
                hidden.remove(entry)
            elif self.by_name.get(name) is entry:
                del self.by_name[name]
                if hidden:
                    self.by_name[name] = hidden.pop(0)
            if not hidden:
                self._hidden.pop(name, None)
        if (file := entry.file) is not None:
            file.entries.discard(entry)
            if file.is_own and not file.is_removed:
                self.removed.append(entry)
        self._release(entry)

    def _release(self, entry: CatalogEntry) -> None:
        """Frees the memory and files of a dropped entry without users. Under the lock."""
        if entry.users:
            return
        if entry.staged and (entry.is_dropped or entry.file is not None or entry.private_file is not None):
            self.staging.free(entry.staged)
            entry.staged = []
            self.staged.discard(entry)
        if entry.is_dropped and entry.private_file is not None:
            self.closing.append(entry)

    def check(self) -> None:
        """Asserts the invariants."""
        with self.lock:
            self.staging.check([buffer for entry in self.staged for buffer in entry.staged])
            entries = set(self.entries.values())
            found = set(self.by_name.values()).union(*self._hidden.values())
            assert entries == found and not any(entry.is_dropped for entry in entries), "entries and names differ"
            for entry in entries:
                assert entry.staged or entry.file is not None or entry.private_file is not None, "a run without bytes"
                assert entry.file is None or (entry in entry.file.entries and not entry.file.is_removed)
