"""Quotas: the bytes that each writer of a folder may take.

    sum of all quotas <= cap - slack - bytes of others          bytes of a sub-folder <= its quota

A quota stands in the lock file of its sub-folder. It changes only under the folder's lock, and grows before the bytes
do. A writer takes what is free, at most the cap divided by the number of live writers. Those with more give up what
they do not use as soon as another has less. A writer that lacks room says so (`requested_at`), and those with more than
their share then collect files. A writer that ended keeps a quota for the bytes it left, which any other writer may
collect.
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
"""A writer that still lacks room says it again within this time."""

OTHERS_SECONDS = 10.0
"""Bytes of other formats are counted anew after this time."""

Collect = Callable[[Path, int], None]
"""Removes files of runs from a sub-folder without a writer until so many bytes are gone, or all."""

_RECORD = re.compile(rb"(\d+) (\d+) (\d+\.\d+) *\n")


@dataclass(frozen=True)
class QuotaRecord:
    """What a lock file says.

    quota   bytes its sub-folder may have
    cap     bytes the writer lets the whole folder have
    requested_at  time of its last request for more, in seconds since the epoch; 0: none
    """

    quota: int
    cap: int = 0
    requested_at: float = 0.0


class Quotas:
    """The quota of one writer, which holds the lock of its sub-folder from the beginning until `leave`."""

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
        """Whether other writers have what this one lacked when it last asked for more."""
        return self._record.requested_at > 0

    def grow(self, wanted: int, collect: Collect) -> int:
        """Asks for a quota of `wanted` bytes; returns the new one, which may be smaller, and is never smaller than
        before. Takes what is free, then what writers left that have ended.
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
        """Gives up unused bytes above the fair share if another live writer has less than its own. Returns what the
        used bytes must go down to: the fair share, if another lacks room, or if the cap has become smaller.
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
        """Gives up what is above `quota`: the bytes are below it already."""
        with self._folder.lock():
            self._set(replace(self._record, quota=min(quota, self.bytes)))

    def leave(self, kept: int = 0) -> None:
        """Keeps a quota for `kept` bytes, at least for what is there, and ends the lock."""
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
        """The bytes that the quotas of others leave, and a live writer's fair share. The smallest cap counts."""
        now = time.monotonic()
        if now - self._others_time > OTHERS_SECONDS:
            self._others_bytes, self._others_time = self._folder.bytes_of_others(), now
        caps = [self._cap, *(record.cap for _, record, is_live in others if is_live and record.cap)]
        limit = max(min(caps) - SLACK_BYTES - self._others_bytes, 0)
        return limit - sum(record.quota for _, record, _ in others), limit // len(caps)

    def _others(self) -> list[tuple[Path, QuotaRecord, bool]]:
        """The other sub-folders, their records, and whether they have a live writer. Under the folder's lock."""
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
    """Lowers the quota of a sub-folder without a writer to the bytes that are left, and returns it. Under its lock, and
    the folder's. Other processes that read its index may have made SQLite's files meanwhile: that is in the slack.

    descriptor  of its lock file
    """
    used = writer_bytes(subfolder)
    quota = min(used, _read(descriptor, used).quota)
    _write(descriptor, QuotaRecord(quota))
    return quota


def cap_of(subfolder: Path) -> int:
    """The cap that the last writer of a sub-folder gave the whole folder; 0: not known. Raises OSError."""
    return _record_of(subfolder, 0).cap


def free_bytes(path: Path) -> int | None:
    """Bytes of a folder that no writer has; None if no writer says how many there are in all. Raises OSError."""
    records = []
    for subfolder in writer_subfolders(path / VERSION):
        with contextlib.suppress(FileNotFoundError):
            records.append(_record_of(subfolder, writer_bytes(subfolder)))
    caps = [record.cap for record in records if record.cap]
    return max(0, min(caps) - SLACK_BYTES - sum(record.quota for record in records)) if caps else None


def _reclaim(subfolder: Path, wanted: int, collect: Collect) -> int:
    """Lowers the quota of a sub-folder without a writer to its bytes, after collecting what is still wanted then.
    Returns the new quota.
    """
    try:
        lock = FileLock(subfolder / LOCK_NAME, waits=False)
    except (BlockingIOError, FileNotFoundError):
        return 0
    with lock:
        with contextlib.suppress(OSError):  # what cannot be removed there stays, and we look elsewhere
            remove_drafts(subfolder)
            used = writer_bytes(subfolder)
            if wanted + used > 0:
                collect(subfolder, wanted + used)
        return lower_quota(lock.descriptor, subfolder)


def _record_of(subfolder: Path, used: int) -> QuotaRecord:
    with open(subfolder / LOCK_NAME, "rb") as file:
        return _read(file.fileno(), used)


def _read(descriptor: int, used: int) -> QuotaRecord:
    """The record in a lock file; one for the used bytes if there is none."""
    found = _RECORD.match(os.pread(descriptor, 128, 0))
    if found is None:
        return QuotaRecord(used)
    quota, cap, requested_at = found.groups()
    return QuotaRecord(int(quota), int(cap), float(requested_at))


def _write(descriptor: int, record: QuotaRecord) -> None:
    # One small write: a kill leaves the old record or the new one.
    line = f"{record.quota} {record.cap} {record.requested_at:.3f}"
    os.pwrite(descriptor, line.ljust(95).encode() + b"\n", 0)
