"""Runs in pinned memory, beside an arena on a GPU. They end with the process."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.cache.run import Run
from quire.cache.store import Transfer
from quire.errors import QuireError
from quire.stores.tiers import Volatile


@dataclass(eq=False)
class _Kept:
    """The extents of a run, one after the other.

    ends  where each extent ends in `data`
    used  time of its last use
    """

    data: torch.Tensor
    ends: list[int]
    used: float


class MemoryStore(Volatile):
    """Keeps the most recently used runs that fit `cap` bytes. One thread copies them into the arena.

    lifetime  seconds without use after which a run is dropped; None: when its memory is wanted
    """

    name = "memory"
    keeps = True

    def __init__(
        self,
        cap: int,
        *,
        pinned: bool,
        lifetime: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cap = cap
        self._lifetime, self._clock = math.inf if lifetime is None else lifetime, clock
        self._pinned = pinned
        self._kept: OrderedDict[Run, _Kept] = OrderedDict()
        self._runs: dict[bytes, Run] = {}
        self._bytes = 0
        self._counts = dict.fromkeys(("num_put", "num_read", "bytes_read", "bytes_written", "num_collected"), 0)
        self._copying = ThreadPoolExecutor(1, "quire-memory")

    def wants(self, names: Sequence[bytes]) -> list[bool]:
        """Whatever it lacks: older runs make room."""
        self._expire()
        return [self._use(name) is None for name in names]

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        """Keeps the run unless it has it already, or it is larger than everything. One with an attachment replaces one
        without.
        """
        self._expire()
        known = {self._runs.get(name) for name in run.names}
        if None not in known and all(each and each.num_attached >= run.num_attached for each in known):
            return
        parts, ends, total = [], [], 0
        for extent in extents:
            parts.append(np.array(extent, np.uint8))
            total += len(extent)
            ends.append(total)
        if total > self.cap:
            return
        while self._bytes + total > self.cap:
            self._forget(next(iter(self._kept)))
            self._counts["num_collected"] += 1
        data = torch.empty(total, dtype=torch.uint8, pin_memory=self._pinned)
        np.concatenate(parts, out=data.numpy())
        self._kept[run] = _Kept(data, ends, self._clock())
        self._bytes += total
        self._counts["num_put"] += 1
        self._counts["bytes_written"] += total
        older = {each for name in run.names if (each := self._runs.get(name)) is not None}
        self._runs.update(dict.fromkeys(run.names, run))
        for each in older:
            if not any(self._runs.get(name) is each for name in each.names):
                self._forget(each)

    def find(self, name: bytes) -> Run | None:
        """See Store."""
        self._expire()
        return self._runs.get(name)

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Copies on its thread."""
        for run in runs:
            transfer.sources[run] = self.name
            kept = self._kept.get(run)
            if kept is None:
                transfer.fail(QuireError("a run is no longer in memory"), run)
                return
            self._touch(run)
            self._counts["num_read"] += 1
            self._counts["bytes_read"] += kept.ends[-1]
            self._copying.submit(_bring, transfer, run, kept)

    def drop(self, names: Iterable[bytes]) -> None:
        """See Store."""
        for name in list(names):
            if (run := self._runs.get(name)) is not None:
                self._forget(run)

    def close(self) -> None:
        """Ends its thread and forgets everything."""
        self._copying.shutdown(cancel_futures=True)
        self._kept.clear()
        self._runs.clear()

    def stats(self) -> dict[str, Any]:
        """Bytes and counts since start."""
        chunks = sum(len(run.names) for run in list(self._kept))
        return {"bytes": self._bytes, "cap_bytes": self.cap, "chunks": chunks, "is_on": True, **self._counts}

    def _forget(self, run: Run) -> None:
        """Forgets a run, whether or not others have taken its names."""
        self._bytes -= self._kept.pop(run).ends[-1]
        for name in run.names:
            if self._runs.get(name) is run:
                del self._runs[name]

    def _use(self, name: bytes) -> Run | None:
        run = self._runs.get(name)
        if run is not None:
            self._touch(run)
        return run

    def _touch(self, run: Run) -> None:
        self._kept[run].used = self._clock()
        self._kept.move_to_end(run)

    def _expire(self) -> None:
        last = self._clock() - self._lifetime
        while self._kept and self._kept[oldest := next(iter(self._kept))].used < last:
            self._forget(oldest)


def _bring(transfer: Transfer, run: Run, kept: _Kept) -> None:
    view, start = kept.data.numpy().data, 0
    for end in kept.ends:
        if transfer.is_over:
            return
        transfer.arrive(run, view[start:end])
        start = end
