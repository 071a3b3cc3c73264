"""Quotas: the bytes that each writer of a folder may take.

    sum of all quotas <= cap - slack - bytes of others          bytes of a sub-folder <= its quota

A quota is written in the lock file of its sub-folder. It changes only under the folder's lock, and grows before the
bytes do. A writer takes free bytes, up to the cap divided by the number of live writers. Writers with more than this
share give up unused bytes as soon as another one has less. A writer without room requests it (`requested_at`), and
writers above their share then collect files. A writer that ended keeps a quota for the bytes it left, which any other
writer may collect.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from quire.errors import ConfigError
from quire.stores.folder import (
    LOCK_NAME,
    MIN_CAP,
    SLACK_BYTES,
    VERSION,
    FileLock,
    StoreFolder,
    remove_drafts,
    writer_bytes,
    writer_subfolders,
)

REQUEST_SECONDS = 5.0
"""Seconds after which a writer that still lacks room repeats its request."""

OTHERS_SECONDS = 10.0
"""Seconds after which bytes of other formats are counted again."""

Collect = Callable[[Path, int], None]
"""Frees a number of bytes, or all, by removing files of runs from a sub-folder without a writer."""

_RECORD = re.compile(rb"(\d+) (\d+) (\d+\.\d+) *\n")


@dataclass(frozen=True)
class QuotaRecord:
    """The content of a lock file.

    quota   maximum bytes of its sub-folder
    cap     maximum bytes of the whole folder, as set by the writer
    requested_at  time of its last request for more, in seconds since the epoch; 0: none
    """

    quota: int
    cap: int = 0
    requested_at: float = 0.0


class Quotas:
    """The quota of one writer, which holds the lock of its sub-folder from construction until `leave`."""

    def __init__(self, folder: StoreFolder, cap: int) -> None:
        """Joins the folder. Raises ConfigError and OSError."""
        if cap < MIN_CAP:
            raise ConfigError(f"a disk tier of {cap} bytes is too small: give it at least {MIN_CAP >> 20}MiB")
        self._folder, self._cap = folder, cap
        self._others_bytes, self._others_time = 0, -math.inf
        with folder.lock():
            self.lock = folder.take()
            self.subfolder = self.lock.path.parent
            remove_drafts(self.subfolder)
            used = writer_bytes(self.subfolder)
            self._record = replace(_read(self.lock.descriptor, used), cap=cap, requested_at=0.0)
            others = self._others()
            free, fair = self._shares(others)
            self._set(replace(self._record, quota=max(used, min(free, fair))))

    @property
    def bytes(self) -> int:
        """The quota."""
        return self._record.quota

    @property
    def is_short_of_room(self) -> bool:
        """Whether other writers have the room that was missing at the last request."""
        return self._record.requested_at > 0

    def grow(self, wanted: int, collect: Collect) -> int:
        """Requests a quota of `wanted` bytes. Returns the new quota, which may be smaller than that, but not than
        before. Takes free bytes first, then bytes that ended writers left.
        """
        with self._folder.lock():
            others = self._others()
            free, fair = self._shares(others)
            goal = min(wanted, fair)
            if self.bytes < goal:
                for subfolder, record, is_live in others if free < fair else ():
                    if not is_live:
                        free += record.quota - _reclaim(subfolder, goal - (free + record.quota), collect)
                found = max(self.bytes, min(free, fair))
                self._set(replace(self._record, quota=found, requested_at=time.time() if found < goal else 0.0))
            else:
                self._set(replace(self._record, requested_at=0.0))
        return self.bytes

    def balance(self, used: int) -> int:
        """Gives up unused bytes above the fair share if another live writer has less than its own share. Returns the
        bytes that may stay in use: the fair share, if another writer lacks room or the cap has become smaller.
        """
        with self._folder.lock():
            others = self._others()
            free, fair = self._shares(others)
            if any(is_live and record.quota < fair for _, record, is_live in others):
                self._set(replace(self._record, quota=min(self.bytes, max(fair, used))))
            since = time.time() - REQUEST_SECONDS
            is_needed = any(is_live and record.requested_at > since for _, record, is_live in others)
        return min(fair, self.bytes) if is_needed or self.bytes > free else self.bytes

    def shrink(self, quota: int) -> None:
        """Lowers the quota. The bytes in use are already below it."""
        with self._folder.lock():
            self._set(replace(self._record, quota=min(quota, self.bytes)))

    def leave(self, kept: int = 0) -> None:
        """Keeps a quota of `kept` bytes, or of the remaining bytes if these are more, and releases the lock."""
        try:
            with contextlib.suppress(OSError):
                if self.lock.is_intact:
                    self.shrink(max(kept, writer_bytes(self.subfolder)))
        finally:
            self.lock.close()

    def check(self) -> None:
        """Asserts the invariants of the whole folder."""
        with self._folder.lock():
            others = self._others()
            free, _ = self._shares(others)
            used = writer_bytes(self.subfolder)
        assert self.bytes <= free, f"a quota of {self.bytes} bytes, and others leave {free}"
        assert used <= self.bytes, f"{used} bytes with a quota of {self.bytes}"

    def _shares(self, others: list[tuple[Path, QuotaRecord, bool]]) -> tuple[int, int]:
        """The bytes that the other quotas leave, and a live writer's fair share, both under the smallest cap."""
        now = time.monotonic()
        if now - self._others_time > OTHERS_SECONDS:
            self._others_bytes, self._others_time = self._folder.bytes_of_others(), now
        caps = [self._cap, *(record.cap for _, record, is_live in others if is_live and record.cap)]
        limit = max(min(caps) - SLACK_BYTES - self._others_bytes, 0)
        return limit - sum(record.quota for _, record, _ in others), limit // len(caps)

    def _others(self) -> list[tuple[Path, QuotaRecord, bool]]:
        """The other sub-folders, with their records and whether they have a live writer. Under the folder's lock."""
        found = []
        for subfolder in self._folder.subfolders():
            if subfolder != self.subfolder:
                try:
                    lock = FileLock(subfolder / LOCK_NAME, waits=False)
                except BlockingIOError:
                    is_live, record = True, _record_of(subfolder, writer_bytes(subfolder))
                except FileNotFoundError:  # removed meanwhile
                    continue
                else:
                    is_live = False
                    with lock:
                        record = _read(lock.descriptor, writer_bytes(subfolder))
                found.append((subfolder, record, is_live))
        return found

    def _set(self, record: QuotaRecord) -> None:
        if record != self._record or record.quota == 0:
            _write(self.lock.descriptor, record)
            self._record = record


def lower_quota(descriptor: int, subfolder: Path) -> int:
    """Lowers the quota of a sub-folder without a writer to its remaining bytes, and returns it. Under its lock and
    the folder's. Readers of its index may have created SQLite's files meanwhile; the slack covers them.

    descriptor  descriptor of its lock file
    """
    used = writer_bytes(subfolder)
    quota = min(used, _read(descriptor, used).quota)
    _write(descriptor, QuotaRecord(quota))
    return quota


def cap_of(subfolder: Path) -> int:
    """The cap that the last writer of a sub-folder set for the whole folder; 0: unknown. Raises OSError."""
    return _record_of(subfolder, 0).cap


def free_bytes(path: Path) -> int | None:
    """Unreserved bytes of a folder; None if no writer has recorded a cap. Raises OSError."""
    records = []
    for subfolder in writer_subfolders(path / VERSION):
        with contextlib.suppress(FileNotFoundError):
            records.append(_record_of(subfolder, writer_bytes(subfolder)))
    caps = [record.cap for record in records if record.cap]
    return max(0, min(caps) - SLACK_BYTES - sum(record.quota for record in records)) if caps else None


def _reclaim(subfolder: Path, wanted: int, collect: Collect) -> int:
    """Lowers the quota of a sub-folder without a writer to its remaining bytes, after collecting the bytes that are
    still missing then. Returns the new quota.
    """
    try:
        lock = FileLock(subfolder / LOCK_NAME, waits=False)
    except (BlockingIOError, FileNotFoundError):
        return 0
    with lock:
        with contextlib.suppress(OSError):  # files that cannot be removed stay, and the caller tries elsewhere
            remove_drafts(subfolder)
            used = writer_bytes(subfolder)
            if wanted + used > 0:
                collect(subfolder, wanted + used)
        return lower_quota(lock.descriptor, subfolder)


def _record_of(subfolder: Path, used: int) -> QuotaRecord:
    with open(subfolder / LOCK_NAME, "rb") as file:
        return _read(file.fileno(), used)


def _read(descriptor: int, used: int) -> QuotaRecord:
    """The record in a lock file; without one, a record of the used bytes."""
    found = _RECORD.match(os.pread(descriptor, 128, 0))
    if found is None:
        return QuotaRecord(used)
    quota, cap, requested_at = found.groups()
    return QuotaRecord(int(quota), int(cap), float(requested_at))


def _write(descriptor: int, record: QuotaRecord) -> None:
    # One small write, so that a kill leaves either the old record or the new one.
    line = f"{record.quota} {record.cap} {record.requested_at:.3f}"
    os.pwrite(descriptor, line.ljust(95).encode() + b"\n", 0)
