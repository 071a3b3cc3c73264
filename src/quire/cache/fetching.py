"""Fetching: chunks from a store replace computing them.

A sequence with chunks in transfer holds its place and its reservation. A sequence that waits for admission holds
neither: its chunks are fetched for the tree, as idle cached chunks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.cache.arrays import Int32s
from quire.cache.costs import Costs
from quire.cache.eviction import Eviction
from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.path import Path
from quire.cache.reservations import Reservations
from quire.cache.retention.protocol import PromptLimits
from quire.cache.run import Run, run_bytes
from quire.cache.store import Transfer

log = logging.getLogger("quire")

OVERLAP_SECONDS = 0.1
"""A step may run behind arriving layers only if the last one is expected within this time: it delays all sequences."""


@dataclass
class FetchCounts:
    """Counts since start, in chunks. Wasted chunks were fetched for a sequence but entered no path."""

    fetched: int = 0
    wasted: int = 0
    computed_instead: int = 0
    prefetched: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    failed_transfers: int = 0


class Fetching:
    """Finds runs in a store, decides whether to fetch them, and starts and ends transfers.

    store     finds runs by keys of chunks, and by handles
    costs     decide between fetching and computing
    arriving  keys of chunks in transfer
    changed   notified when a layer of any transfer arrives, or a transfer fails
    clock     seconds, monotonic; times transfers
    prefetches  chunks on their way into the tree for sequences that wait for admission, by sequence
    """

    def __init__(
        self, eviction: Eviction, reservations: Reservations, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.eviction = eviction
        self.table, self.tree, self.store = eviction.table, eviction.tree, eviction.demotion.store
        self.reservations = reservations
        self.costs = Costs()
        self.arriving: set[bytes] = set()
        self.prefetches: dict[Holder, Path] = {}
        self.counts = FetchCounts()
        self.changed = threading.Condition()
        self.clock = clock
        self._underway: dict[Transfer, int] = {}  # bytes, those of earlier transfers included

    # ---- shared chunks ---------------------------------------------------------------------------------------------

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

    def runs_to_fetch(self, holder: Holder, limits: PromptLimits) -> tuple[int, list[Run]]:
        """The chunks of an admitted prompt that are in the store but not in the tree, if fetching them is faster than
        computing them. Returns the number of chunks before them, and a run for each.
        """
        keys = holder.keys
        near = sum(count for _, count in self.tree.walk(keys, limits.num_reusable))
        runs = self.far(keys, near, limits.num_fetchable)
        while limits.needs_sums and runs and not runs[-1].ends_with_sums(keys.first(near + len(runs))[-1]):
            runs.pop()
        if runs and not self._pays(holder, near, runs):
            self.counts.computed_instead += len(runs)
            runs = []
        return near, runs

    def prefetch(self, holder: Holder, limits: PromptLimits) -> None:
        """Starts to fetch chunks of a sequence that waits for admission, into unreserved room."""
        if holder in self.prefetches:
            return
        keys, table = holder.keys, self.table
        near = sum(count for _, count in self.tree.walk(keys, limits.num_fetchable))
        runs = self.far(keys, near, limits.num_fetchable)
        if not runs or not self._pays(holder, near, runs):
            return
        path = Path(priority=holder.priority, lifetime=holder.lifetime)
        demand = table.demand(len(runs), sidecars=near == 0)
        self.tree.extend(path, keys, near, False)
        if not self.reservations.fits(demand + self.reservations.growth()):
            self.tree.release(path)
            return
        self.eviction.evict_for(lambda: demand)
        path.append(table.take(len(runs), table.sealed_codec, sidecar=near == 0))
        self.prefetches[holder] = path
        self.start_transfer(keys, path, runs)
        if not self.reservations.fits(table.zero_demand):
            self.cancel_prefetch(holder)

    def cancel_prefetch(self, holder: Holder) -> None:
        """Ends the prefetch for a waiting sequence, if any, because the sequence ends or its room is needed."""
        path = self.prefetches.pop(holder, None)
        if path is not None:
            self.cancel(path)
            self.table.free(self.tree.release(path))

    def cancel_latest_prefetch(self) -> bool:
        """Ends the latest prefetch for a waiting sequence, because its room is needed. False if there is none."""
        if not self.prefetches:
            return False
        self.cancel_prefetch(next(reversed(self.prefetches)))
        return True

    def tick(self) -> None:
        """Puts chunks into the tree that have arrived for waiting sequences."""
        for holder, path in list(self.prefetches.items()):
            transfer = path.transfer
            if transfer is None or not transfer.is_over:
                continue
            if self._close(path):
                self.counts.prefetched += len(path.private)
                _note_sources(holder, transfer)
                self.table.free(self.tree.publish(path, holder.keys, len(path.chunks)))
            del self.prefetches[holder]
            self.table.free(self.tree.release(path))

    def assume_arrived(self, holder: Holder) -> None:
        """Counts chunks in transfer as computed: the step's layers wait for their pages."""
        holder.path.num_tokens = self._num_known(holder)

    def _num_known(self, holder: Holder) -> int:
        """Number of tokens that are computed or in transfer. The last token of a sequence is always computed."""
        path = holder.path
        num_arriving = 0 if path.transfer is None else len(path.transfer.names)
        arriving = (path.num_shared + num_arriving) * PAGE_TOKENS
        return max(path.num_tokens, min(arriving, len(holder.token_ids) - 1))

    def can_overlap(self, path: Path) -> bool:
        """Whether rows may be computed while the path's chunks arrive, layer by layer behind them."""
        transfer = path.transfer
        if transfer is None or not transfer.names or not transfer.done(0) or not transfer.is_shared:
            return False
        seconds = self.costs.fetch(int(self._underway[transfer] * (1 - transfer.share)))
        return seconds is not None and seconds < OVERLAP_SECONDS

    def end(self, holder: Holder) -> bool:
        """Ends the transfer of a sequence, whose chunks count as computed. False if some did not arrive."""
        self.assume_arrived(holder)
        transfer = holder.path.transfer
        assert transfer is not None
        has_arrived = self._close(holder.path)
        if has_arrived:
            _note_sources(holder, transfer)
        return has_arrived

    def cancel(self, path: Path) -> None:
        """Ends the transfer of a path, if it has one, even if it is incomplete."""
        if path.transfer is not None:
            self._close(path)

    @property
    def transfer(self) -> Transfer | None:
        """The oldest transfer; None if nothing is on its way."""
        return next(iter(self._underway), None)

    # ---- transfers -------------------------------------------------------------------------------------------------

    def start_transfer(self, keys: ChunkKeys, path: Path, far: list[Run], *private: tuple[Run, Int32s]) -> None:
        """Fetches the chunks of a path that follow its shared ones: `far[i]` is the run of the i-th one. If the last
        run ends with its attachment, the column sums of all chunks come with it.
        """
        parts: dict[Run, Int32s] = {}
        names = keys.first(path.num_shared + len(far))[path.num_shared :]
        for name, chunk, run in zip(names, path.private[: len(far)], far, strict=True):
            rows = parts.setdefault(run, np.full(len(run.kinds), -1, np.int32))
            rows[run.names.index(name)] = chunk
        if far and not private and len(path.retention.sums) and far[-1].ends_with_sums(names[-1]):
            parts[far[-1]][len(far[-1].names) :] = path.retention.sums[: far[-1].num_attached]
        parts.update(private)
        for run, rows in list(parts.items()):
            if run.is_divisible and (rows < 0).any():
                parts[run.part(rows >= 0)] = rows[rows >= 0]
                del parts[run]
        self.counts.wasted += sum(
            int((rows[: len(run.names)] < 0).sum()) for run, rows in parts.items() if run.is_shared
        )
        path.transfer = transfer = Transfer(self.eviction.pages, list(parts.items()), self.changed, self.clock, names)
        self.arriving.update(names)
        num_bytes = sum(run_bytes(self.eviction.pages, run) for run in parts)
        self._underway[transfer] = num_bytes + self.backlog()
        self.store.get(transfer, transfer.runs)

    def backlog(self) -> int:
        """Bytes of earlier transfers that must arrive before those of a new one."""
        return max((int(ahead * (1 - each.share)) for each, ahead in self._underway.items()), default=0)

    def _close(self, path: Path) -> bool:
        """Ends a path's transfer, even if it is incomplete. Returns whether all chunks have arrived. Drops private runs
        from the store, and a run that the transfer reports as lost.
        """
        transfer = path.transfer
        assert transfer is not None
        has_arrived, ahead = transfer.close(), self._underway.pop(transfer)
        names = transfer.names
        if has_arrived:
            self.costs.note_fetch(ahead, transfer.seconds)
            self.counts.fetched += len(names)
        else:
            self.counts.wasted += len(names)
            self.counts.failed_transfers += transfer.error is not None
        self.store.drop([run.names[0] for run in transfer.runs if not run.is_shared])
        if transfer.error is not None:
            blamed = transfer.runs if transfer.lost is None else [transfer.lost]
            self.store.drop([run.names[0] for run in blamed if self._is_still(run)])
        self.arriving.difference_update(names)
        path.transfer = None
        return has_arrived

    def _is_still(self, run: Run) -> bool:
        """Whether the store still has this run, or for a divisible one a run that contains it."""
        found = self.store.find(run.names[0])
        return found is run or (found is not None and run.is_divisible and found.is_divisible)

    # ---- decisions -------------------------------------------------------------------------------------------------

    def _pays(self, holder: Holder, near: int, runs: list[Run]) -> bool:
        """Whether fetching the chunks after the first `near` ones ends before computing them would. Computing starts
        only after the prompts that are being computed.
        """
        num_bytes, num_tokens = sum(run_bytes(self.eviction.pages, run) for run in {*runs}), len(runs) * PAGE_TOKENS
        fetching = self.costs.fetch(num_bytes + self.backlog())
        others = (each for each in self.reservations.live if each is not holder)
        before = sum(max(0, each.num_prompt - self._num_known(each)) for each in others)
        computing = self.costs.prefill(near * PAGE_TOKENS, num_tokens)
        waiting = self.costs.prefill(0, before)
        pays = fetching is None or computing is None or waiting is None or fetching <= computing + waiting
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%d tokens from position %d on are %s: fetching %.1f MB takes %s, computing %s behind %s of others",
                num_tokens,
                near * PAGE_TOKENS,
                "fetched" if pays else "computed",
                num_bytes / 1e6,
                *map(_shown, (fetching, computing, waiting)),
            )
        return pays


def _note_sources(holder: Holder, transfer: Transfer) -> None:
    """Adds the tokens of a transfer's shared chunks to the counts of its sequence, by store."""
    if not holder.num_preemptions:
        names = {*transfer.names}
        for run, source in transfer.sources.items():
            found = sum(name in names for name in run.names) * PAGE_TOKENS
            holder.fetched[source] = holder.fetched.get(source, 0) + found


def _shown(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds * 1e3:.0f} ms"
