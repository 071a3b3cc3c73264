"""Fetching: chunks from a store replace computing them. Private runs of preempted sequences return in the same way."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import numpy as np

from quire.cache.arrays import Int32s
from quire.cache.counts import ChunkCounts
from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import Demand
from quire.cache.path import Path, Swapped
from quire.cache.run import Run, demand_of, take_rows
from quire.cache.store import Store, Transfer, put_rows
from quire.cache.table import ChunkTable


class Fetching:
    """Finds runs in a store, and starts and ends transfers.

    store     finds runs by keys of chunks, and by handles
    arriving  keys of chunks in transfer
    """

    def __init__(self, table: ChunkCounts, store: Store) -> None:
        self.table = table
        self.store = store
        self.arriving: set[bytes] = set()
        self._changed = threading.Condition()

    def far(self, keys: ChunkKeys, near: int, limit: int) -> list[Run]:
        """The runs of the consecutive chunks [near, ...) that the store has, up to `limit`; one run per chunk. Ends at
        a chunk that is already in transfer: the sequence waits, and then finds it in the tree.
        """
        found: list[Run] = []
        for name in keys.first(limit)[near:]:
            run = None if name in self.arriving else self.store.find(name)
            if run is None:
                break
            found.append(run)
        return found

    def begin(self, holder: Holder, runs: list[Run]) -> None:
        """Fetches the private chunks of a path. `runs[i]` is the run of the i-th one. If the last run ends with its
        attachment, the column sums of all chunks come with it.
        """
        path = holder.path
        parts: dict[Run, Int32s] = {}
        names = holder.keys.first(len(path.chunks))[path.num_shared :]
        for name, chunk, run in zip(names, path.private, runs, strict=True):
            rows = parts.setdefault(run, np.full(len(run.kinds), -1, np.int32))
            rows[run.names.index(name)] = chunk
        last = runs[-1]
        if len(path.sums) and last.ends_with_sums(names[-1]):
            parts[last][len(last.names) :] = path.sums[: last.num_attached]
        self._start(path, list(parts.items()))
        path.arriving = names
        self.arriving.update(names)

    def end(self, path: Path) -> bool:
        """Ends a path's transfer, complete or not. Returns whether all has arrived. The store forgets runs of a failed
        transfer, and private runs.
        """
        transfer = path.transfer
        assert transfer is not None
        has_arrived = transfer.close()
        self.store.drop([run.names[0] for run in transfer.runs if transfer.error is not None or not run.is_shared])
        self.arriving.difference_update(path.arriving)
        path.transfer, path.arriving = None, []
        return has_arrived

    def swap_out(self, path: Path) -> Swapped | None:
        """Puts all chunks of a path into the store, if it wants them. The caller frees them."""
        handle = os.urandom(16)
        if path.transfer is not None or path.filled >= 0 or not self.store.wants([handle]):
            return None
        rows = np.concatenate((path.chunks, path.sums))
        run = put_rows(self.store, self._pages, (handle,), rows, attached=len(path.sums))
        return Swapped(replace(path, tip=None, heads={}, num_shared=0), run)

    def has(self, swapped: Swapped) -> bool:
        """Whether the store still has a swapped path."""
        return self.store.find(swapped.run.names[0]) is swapped.run

    def demand(self, swapped: Swapped) -> Demand:
        """The demand of a swapped path in the arena."""
        return demand_of(self._pages, swapped.run)

    def swap_in(self, swapped: Swapped) -> Path:
        """The path that was swapped out, with new rows, whose chunks are in transfer."""
        run = swapped.run
        path, rows = swapped.path, take_rows(self._pages, run)
        path.chunks, path.sums = np.split(rows, [len(rows) - run.num_attached])
        self._start(path, [(run, rows)])
        return path

    @property
    def _pages(self) -> ChunkTable:
        """The table, for a store that keeps something."""
        assert isinstance(self.table, ChunkTable), "a table without pages"
        return self.table

    def _start(self, path: Path, parts: list[tuple[Run, Int32s]]) -> None:
        path.transfer = transfer = Transfer(self._pages, parts, self._changed)
        for run, _ in parts:
            self.store.get(run, transfer)
