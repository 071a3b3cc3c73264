"""Runs in pinned host memory, beside an arena on a GPU. They end with the process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from quire.cache.run import Run
from quire.cache.store import Transfer
from quire.stores.lru_store import LruStore


@dataclass(eq=False)
class _Extents:
    """The extents of a run in one buffer. ends: end of each extent in `data`."""

    data: torch.Tensor
    ends: list[int]


class MemoryStore(LruStore[_Extents]):
    """Keeps the bytes of runs in memory. One thread copies them into the arena."""

    def __init__(
        self,
        cap: int,
        *,
        pinned: bool,
        lifetime: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """cap, lifetime: see LruStore."""
        super().__init__(cap, lifetime, clock)
        self._pinned = pinned
        self._copying = ThreadPoolExecutor(1, "quire-memory")

    def put(self, run: Run, extents: Iterable[memoryview]) -> None:
        """Stores a run, unless it is already stored or larger than `cap`."""
        if self._has(run):
            return
        parts, ends, total = [], [], 0
        for extent in extents:
            parts.append(np.array(extent, np.uint8))
            total += len(extent)
            ends.append(total)
        if self._make_room(total):
            data = torch.empty(total, dtype=torch.uint8, pin_memory=self._pinned)
            np.concatenate(parts, out=data.numpy())
            self._keep(run, _Extents(data, ends), total)

    def get(self, transfer: Transfer, runs: Sequence[Run]) -> None:
        """Starts to copy the runs, on the store's thread."""
        for run in runs:
            kept = self._read(transfer, run)
            if kept is None:
                return
            self._copying.submit(_bring, transfer, run, kept.content)

    def close(self) -> None:
        """Ends the thread and forgets all runs."""
        self._copying.shutdown(cancel_futures=True)
        self._kept.clear()
        self._runs.clear()


def _bring(transfer: Transfer, run: Run, extents: _Extents) -> None:
    view, start = extents.data.numpy().data, 0
    for end in extents.ends:
        if transfer.is_over:
            return
        transfer.arrive(run, view[start:end])
        start = end
