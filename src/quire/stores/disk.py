"""The disk store: runs in a folder of limited size, which survive the process and are shared by several processes."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from quire.cache.namespace import Namespace
from quire.cache.run import Run
from quire.cache.store import Transfer
from quire.errors import ConfigError, QuireError
from quire.stores.catalog import Catalog, CatalogEntry
from quire.stores.circuit_breaker import CircuitBreaker
from quire.stores.disk_reader import FAILURES, DiskReader
from quire.stores.disk_writer import DiskWriter
from quire.stores.headers import common_digest
from quire.stores.listing import StoredRun, list_stored
from quire.stores.staging import StagingBuffer, StagingPool
from quire.stores.throttle import Throttle
from quire.stores.tiers import Tier
from quire.stores.writer_folder import WriterFolder

STAGING_BYTES = 64 << 20
FLUSH_SECONDS = 3.0
"""Maximum seconds for which `close` writes."""


class DiskStore(Tier):
    """Keeps runs in a folder. It may lose any run, but never returns wrong bytes, and never waits for the disk in the
    engine's thread.

    All processes with this folder together use at most `cap` bytes of the disk. A run is on the disk soon after `put`,
    and certainly after `flush`.
    """

    name = "disk"
    keeps = True
    is_persistent = True

    def __init__(
        self,
        folder: Path,
        cap: int,
        namespace: Namespace,
        *,
        bandwidth: float | None = None,
        lifetime: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """namespace: runs of other namespaces are not found; the salt does not count. bandwidth: bytes per second of
        reads and writes together. lifetime: seconds without use after which a run is no longer found, unless it is
        pinned. Raises ConfigError for a folder that cannot be used.
        """
        self._cap, self._lifetime, self._clock = cap, lifetime, clock
        self._digest = common_digest(namespace)
        self._staging = StagingPool(STAGING_BYTES)
        self._catalog = Catalog(self._staging, clock)
        self._throttle = Throttle(bandwidth)
        try:
            self._writer_folder = WriterFolder(folder, cap, self._digest, self._catalog, self._throttle, clock)
        except OSError as error:
            reason = error.strerror or error
            where = error.filename or folder
            raise ConfigError(
                f"the disk tier cannot use {where} ({reason}): make room, or name another folder"
            ) from None
        self._writing = CircuitBreaker("writing to the disk tier", 1)
        self._reading = CircuitBreaker("the disk tier", FAILURES)
        self._writer = DiskWriter(self._writer_folder, self._catalog, self._writing, lifetime)
        self._reader = DiskReader(self._writer_folder, self._catalog, self._reading)
        self._is_closed = False
        self._chunk_bytes = 0
        """Bytes of a chunk of the last run, for estimating how many more chunks fit."""
        self._num_put = self._num_refused = 0

    @property
    def is_on(self) -> bool:
        """Whether the store finds and takes runs."""
        return not self._is_closed and self._reading.is_on and self._writing.is_on

    def wants(self, names: Sequence[bytes]) -> list[bool]:
        """For each chunk, whether the store lacks it and would take it now. Counts as a use of stored chunks."""
        if not self.is_on:
            return [False] * len(names)
        wanted, room = [], self._staging.free_bytes
        for name in names:
            entry = self._catalog.by_name.get(name)
            if entry is not None and not self._is_expired(entry):
                self._catalog.use(entry)
                wanted.append(False)
            else:
                wanted.append(room > 0)
                room -= self._chunk_bytes
        return wanted

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        """Stores a run, or ignores it if there is no room. A stored run is found at once."""
        catalog = self._catalog
        is_ours = not run.is_shared or (
            isinstance(run.namespace, Namespace) and common_digest(run.namespace) == self._digest
        )
        if not self.is_on or not is_ours:
            self._num_refused += 1
            return
        known = catalog.of(run.names)
        catalog.drop([entry for entry in known if self._is_expired(entry)])
        last = catalog.by_name.get(run.names[-1])
        is_enough = last is not None and (run.num_attached == 0 or last.run.ends_with_sums(run.names[-1]))
        if is_enough and all(name in catalog.by_name for name in run.names):
            for entry in known:
                catalog.use(entry)
            return
        buffers = self._stage(extents)
        if buffers is None:
            self._num_refused += 1
            return
        entry = CatalogEntry(run, [buffer.length for buffer in buffers], self._clock(), staged=buffers)
        self._chunk_bytes = entry.num_bytes // len(run.names)
        self._num_put += 1
        catalog.add(entry)
        self._writer.put(entry)

    def find(self, name: bytes) -> Run | None:
        """The run that contains the chunk, or the private run with this handle. Not a use."""
        entry = self._catalog.by_name.get(name)
        if entry is None or self._is_expired(entry) or not self._reading.is_on:
            return None
        return entry.run

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Starts to read all layers of some runs of a transfer."""
        entries = []
        for run in runs:
            transfer.sources[run] = self.name
            entry = self._catalog.entries.get(run)
            if entry is None or not self._reading.is_on:
                transfer.fail(QuireError("the disk tier has lost a run since it was found"), run)
                return
            self._catalog.use(entry)
            entries.append(entry)
        self._reader.submit(transfer, entries)

    def drop(self, names: Iterable[bytes]) -> None:
        """Forgets runs, each given by any of its names, with all copies. Runs of other processes stay in their
        sub-folders, but this process no longer finds them.
        """
        names = list(names)
        while found := self._catalog.of(names):
            self._catalog.drop(found)

    def flush(self, seconds: float) -> bool:
        """Waits until every stored run that is still found is on the disk and in the index. Returns False on a timeout
        or failure. A run without room is no longer found.
        """
        return not self._is_closed and self._writer.flush(seconds)

    def close(self) -> None:
        """Writes queued runs for at most a few seconds, and ends threads and locks. A second call does nothing."""
        if self._is_closed:
            return
        self.flush(FLUSH_SECONDS)
        self._is_closed = True
        self._throttle.close()
        self._reader.close()
        self._writer.close()
        self._catalog.drop(list(self._catalog.entries.values()))

    def pin(self, names: Sequence[bytes], until: float) -> bool:
        """Pins the files of these chunks until a time in seconds since the epoch: they are collected last. Extends
        earlier pins, but never shortens them. Returns False, and changes nothing, if a chunk is not stored, or if more
        than half of the quota would be pinned.
        """
        catalog, writer_folder = self._catalog, self._writer_folder
        entries = catalog.of(names)
        if not all(name in catalog.by_name for name in names):
            return False
        files = {entry.file for entry in entries if entry.file is not None and entry.file.is_own}
        files.update(file for file in list(writer_folder.files.values()) if catalog.is_pinned(file))
        staged = sum(entry.num_bytes for entry in entries if entry.file is None)
        if sum(file.total_bytes for file in files) + staged > writer_folder.quotas.bytes // 2:
            return False
        self._set_pins({name: max(until, catalog.pins.get(name, 0.0)) for name in names})
        return True

    def unpin(self, names: Iterable[bytes]) -> None:
        """Ends pins of this process, and of earlier ones in its sub-folder. Ancestors of a chunk that stays pinned stay
        pinned as long as it does.
        """
        ending, catalog, done = set(names), self._catalog, set[bytes]()
        needed = dict.fromkeys(ending, 0.0)
        for name, until in sorted(catalog.pins.items(), key=operator.itemgetter(1), reverse=True):
            at = None if name in ending else name
            while at is not None and at not in done and (entry := catalog.by_name.get(at)) is not None:
                run = entry.run
                along = run.names[: run.names.index(at) + 1]
                done.update(along)
                needed.update((each, until) for each in along if needed.get(each) == 0.0)
                at = run.parent if run.start else None
        self._set_pins(needed)

    def stored(self, visible: Callable[[str], bool] = lambda salt: True) -> list[StoredRun]:
        """All runs on the disk with a visible salt, of all processes and models; the last used first."""
        return list_stored(self._writer_folder.folder, self._writer_folder.signer, self._digest, visible)

    def measure(self) -> float | None:
        """Bytes per second of a short write and read, throttle included; None if there is no room."""
        return self._writer.measure()

    def check(self) -> None:
        """Asserts that memory, index and files agree, and that the quotas hold. Call it while the store is idle."""
        with self._writer.work:
            self._writer_folder.commit()
            self._writer_folder.forget()
            self._catalog.check()
            self._writer_folder.check()

    def stats(self) -> dict[str, int | float | bool | str | None]:
        """Counters since the start, and current sizes."""
        writer_folder, reads, writer, catalog = self._writer_folder, self._reader, self._writer, self._catalog
        others = list(catalog.files_of_others.values())
        return {
            "bytes": 0 if self._is_closed else writer_folder.bytes,
            "cap_bytes": self._cap,
            "quota_bytes": writer_folder.quotas.bytes,
            "chunks": len(catalog.by_name),
            "files": len(writer_folder.files) + sum(map(len, others)),
            "bytes_read": reads.bytes_read,
            "bytes_written": writer_folder.bytes_written,
            "seconds_reading": reads.seconds,
            "seconds_writing": writer_folder.seconds,
            "cpu_seconds": reads.cpu_seconds + writer.cpu_seconds,
            "num_put": self._num_put,
            "num_refused": self._num_refused + writer.num_refused,
            "num_read": reads.num_read,
            "num_failed": reads.num_failed,
            "num_collected": writer_folder.num_collected,
            "is_on": self.is_on,
            "reason": self._reading.reason or self._writing.reason,
        }

    def _is_expired(self, entry: CatalogEntry) -> bool:
        now, catalog = self._clock(), self._catalog
        if self._lifetime is None or entry.used + self._lifetime >= now:
            return False
        tables = catalog.pins, *catalog.pins_of_others.values()
        return not any(pins.get(name, 0.0) > now for pins in tables for name in entry.run.names)

    def _stage(self, extents: Iterable[memoryview]) -> list[StagingBuffer] | None:
        """Copies extents into staging memory; None if they do not fit."""
        buffers: list[StagingBuffer] = []
        try:
            for extent in extents:
                buffer = self._staging.take(len(extent))
                if buffer is None:
                    self._staging.free(buffers)
                    return None
                buffers.append(buffer)
                # numpy releases the interpreter lock, so that readers continue.
                np.copyto(np.frombuffer(buffer.extent, np.uint8), np.frombuffer(extent, np.uint8))
        except BaseException:
            self._staging.free(buffers)
            raise
        return buffers

    def _set_pins(self, changes: dict[bytes, float]) -> None:
        now, catalog = self._clock(), self._catalog
        with catalog.lock:
            pins = {name: until for name, until in {**catalog.pins, **changes}.items() if until > now}
            catalog.pins = pins
        self._writer.note_pins()
