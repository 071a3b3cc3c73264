"""The cache manager: admission, growth and release of sequences. Knows sequences and chunks, not batches or text.

Admission reserves the whole prompt and one chunk of growth for every running sequence. A reservation is a demand, not
pages. Pages are taken at most one step before they are written, so a sequence holds few that it does not use.
Reservations keep a growing sequence from taking the room of an admitted prompt.

With retention, a prompt is held whole until it is computed and decided on. Then the sequence has fewer pages of its
own, and the whole prompt stays cached. Reservations of undecided sequences expect that each of them will shrink.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quire.cache.counts import ChunkCounts
from quire.cache.demotion import Demotion
from quire.cache.eviction import Eviction
from quire.cache.exports import ExportedSequence, Exports
from quire.cache.fetching import Fetching
from quire.cache.holder import Holder
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.path import Path
from quire.cache.path_manager import PathManager
from quire.cache.pins import Pins
from quire.cache.reservations import Reservations
from quire.cache.retention.decisions import Retention, RetentionDecision
from quire.cache.retention.packing import check_packed
from quire.cache.retention.protocol import KeepAll
from quire.cache.retention.retainer import Retainer
from quire.cache.statistics import Statistics
from quire.cache.store import NullStore, Store
from quire.cache.swapping import Swapping
from quire.cache.tree import PrefixTree

log = logging.getLogger("quire")

PINNED_SHARE = 0.5
"""Largest share of the arena that pins may keep."""


class CacheManager:
    """Takes chunks for sequences and frees them. Invariant: chunks of live paths + chunks of the tree + free chunks =
    all chunks; `check` proves it.

    table       the chunks of the arena
    tree        shared and cached chunks
    demotion    offers chunks to a store
    retainer    decides which tokens sequences keep; None: all of them
    retention   the demand and limits that follow from this
    reservations  demands reserved for admitted sequences
    paths       takes chunks for their paths
    pins        prefixes that stay cached for a time
    fetching    transfers from a store
    swapping    paths of preempted sequences in a store
    exports     chunks of sequences that another engine continues
    capacity    most sealed chunks of one sequence if it is alone
    clock       seconds, monotonic; times transfers
    """

    def __init__(
        self,
        table: ChunkCounts,
        tree: PrefixTree,
        lifetime: float | None = None,
        retention: Retention | None = None,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
        replays: bool = False,
    ) -> None:
        """replays: see `KeepAll`."""
        self.table, self.tree = table, tree
        tree.lifetime = lifetime
        self.demotion = Demotion(table, store or NullStore())
        self.eviction = Eviction(table, tree, self.demotion)
        self.retainer = None if retention is None else Retainer(retention, self.eviction, replays)
        self.retention: KeepAll | Retainer = self.retainer or KeepAll(table, replays)
        self.reservations = Reservations(self.eviction, self.retention)
        self.statistics = Statistics(table, tree)
        self.paths = PathManager(self.reservations, self.demotion, self.statistics)
        self.fetching = Fetching(self.eviction, self.reservations, clock)
        self.swapping = Swapping(self.fetching, self.eviction, self.reservations)
        self.exports = Exports(self.eviction)
        self.capacity = self.reservations.capacity()
        self.pins = Pins(tree, int(self.capacity * PINNED_SHARE))
        self._refused: object = None  # the last refused sequence, and the state that the refusal depends on

    def admit(self, holder: Holder) -> bool:
        """Gives a sequence a path over its cached chunks, and reserves room for its tokens. If it must wait, returns
        False and changes nothing.
        """
        if self.was_refused(holder) or self.swapping.must_wait(holder):
            return False
        while not self._has_room_for(holder):
            if self.fetching.cancel_latest_prefetch():
                continue
            # A sequence that is alone would wait for pinned chunks for ever, because no other one will end.
            if self.reservations.live or (given_up := self.pins.end_oldest()) is None:
                self._refused = self._state(holder)
                return False
            log.warning(
                "the pin of a prefix of %d tokens is given up: a request of %d tokens needs more memory than the pins"
                " leave",
                given_up.end * PAGE_TOKENS,
                len(holder.token_ids),
            )
        self._refused = None
        if holder.swapped is not None:
            if not self.swapping.swap_in(holder):
                return False
            self.reservations.reserve(holder)
            self.statistics.note_peak()
            return True
        holder.path = Path(priority=holder.priority, lifetime=holder.lifetime)
        self.retention.enter(holder)
        self.reservations.reserve(holder)
        self.paths.match(holder)
        self._start_fetch(holder)
        if self.demotion.is_on and holder.path.num_shared:
            self.demotion.use(holder.keys.first(holder.path.num_shared), holder.path.tip)
        return True

    def was_refused(self, holder: Holder) -> bool:
        """Whether this sequence was refused last and nothing has changed since."""
        return self._refused is not None and self._refused == self._state(holder)

    def _state(self, holder: Holder) -> object:
        """The state on which the admission of a sequence depends."""
        reservations, tree = self.reservations, self.tree
        counts = len(reservations.live), len(self.fetching.prefetches), self.table.ledger.allocated_bytes
        return holder, *counts, reservations.outstanding(), tree.num_uses, tree.num_chunks

    def _has_room_for(self, holder: Holder) -> bool:
        """Whether a sequence may be admitted. Takes no locks and counts no hits."""
        if (swapped := self.swapping.demand(holder)) is not None:
            return self.reservations.fits(swapped + self.reservations.growth())
        limits = self.retention.limits(holder)
        return self.reservations.admits(limits, limits.find(self.tree, holder.keys) if holder.reads_cache else [])

    def tick(self, now: float) -> None:
        """Sets the clock. Ends pins, drops chunks whose time is over, and moves chunks from and to the store."""
        self.tree.now = now
        self.fetching.tick()
        self.demotion.tick(now)
        self.pins.expire()
        for dropped_chunks in self.tree.expire():
            self.table.free(dropped_chunks.rows)  # stores expire their own copies

    def next_chunk(self, holder: Holder) -> bytes | None:
        """The key of a prompt's next whole chunk, by which the scheduler finds two sequences that are about to compute
        the same one. None if the chunk will not be shared.
        """
        path = holder.path
        if not self._may_share(holder) or path.num_sealed >= self.retention.limits(holder).num_fetchable:
            return None
        return holder.keys.first(path.num_sealed + 1)[-1]

    def retain(self, holder: Holder, decided: RetentionDecision) -> None:
        """Shrinks a sequence, whose prompt is computed, to the prompt's tokens that its heads keep."""
        path = holder.path
        assert self.retainer is not None and path.retention.retained is None
        self.eviction.evict_for(lambda: self.table.demand(rows=path.num_shared))
        self.retainer.retain(holder, decided, self.reservations.fits)
        self.paths.settle(holder)

    # ---- chunks from a store ---------------------------------------------------------------------------------------

    def prefetch(self, holder: Holder) -> None:
        """Starts to fetch chunks of a sequence that waits for admission, into unreserved room."""
        if isinstance(self.fetching.store, NullStore) or not (self.tree.shares and holder.reads_cache):
            return
        limits = self.retention.limits(holder)
        if limits.may_prefetch:
            self.fetching.prefetch(holder, limits)

    def _start_fetch(self, holder: Holder) -> None:
        """Starts to fetch the chunks of an admitted prompt that are in the store but not in the tree, if fetching is
        faster than computing them.
        """
        if not self._may_share(holder):
            return
        path, keys, paths = holder.path, holder.keys, self.paths
        near, runs = self.fetching.runs_to_fetch(holder, self.retention.limits(holder))
        if not runs:
            return
        self.tree.extend(path, keys, near, not holder.num_preemptions)
        paths.settle_shared(holder)
        if paths.extend(holder, (near + len(runs)) * PAGE_TOKENS):
            self.fetching.start_transfer(keys, path, runs)
            if self.reservations.fits(self.table.zero_demand):
                return
            self.fetching.cancel(path)
        # Chunks without their sums cannot be used.
        self.table.free(self.tree.release(path))
        paths.settle_shared(holder)
        paths.match(holder)

    def end_fetch(self, holder: Holder) -> bool:
        """Ends the transfer of a sequence. False if some chunks did not arrive: the content of their pages is unknown,
        and the sequence must start again.
        """
        has_arrived = self.fetching.end(holder)
        if has_arrived:
            self.paths.commit(holder, holder.path.num_tokens)
        return has_arrived

    def _may_share(self, holder: Holder) -> bool:
        """Whether a path may be extended over chunks that other sequences have computed."""
        return self.tree.shares and holder.reads_cache and holder.path.is_all_shared

    # ---- the end of sequences --------------------------------------------------------------------------------------

    def release(self, holder: Holder) -> None:
        """Ends or preempts a sequence: unlocks its shared chunks, which stay cached, and frees its own."""
        self.fetching.cancel_prefetch(holder)
        self.fetching.cancel(holder.path)
        self.table.free(self.tree.release(holder.path))
        self._leave(holder)

    def export(self, holder: Holder) -> ExportedSequence:
        """Ends a sequence whose tokens are all computed, and keeps its chunks for another engine."""
        export = self.exports.add(holder)
        self._leave(holder)
        return export

    def _leave(self, holder: Holder) -> None:
        self.retention.leave(holder)
        self.reservations.release(holder)
        holder.path = Path()

    def stats(self) -> dict[str, int]:
        """See Statistics.bytes."""
        # Another thread may call this during a step. Slightly old numbers are good enough.
        paths = [holder.path for holder in list(self.reservations.live)] + [
            each.path for each in list(self.exports.held)
        ]
        return self.statistics.bytes(paths, self.retention.bytes_freed)

    def check(self) -> None:
        """Proves the invariant of the manager, the tree, the table and the ledger."""
        self.table.check()
        self.reservations.check()
        held: list[int] = []
        for holder in self.reservations.live:
            path = holder.path
            self.paths.check(path)
            held += path.own_rows.tolist()
            if path.retention.retained is not None:
                if path.transfer is None:  # a transfer's hold looks like a second owner
                    check_packed(self.eviction.pages, path, path.retention.retained)
            else:
                shared = [chunk for segment in path.segments for chunk in segment.chunks.tolist()]
                assert shared == path.chunks[: path.num_shared].tolist(), "a path does not read the tree's chunks"
        for export in self.exports.held:
            held += export.path.own_rows.tolist()
        for path in self.fetching.prefetches.values():
            held += path.private.tolist()
        self.tree.check()
        self.pins.check()
        for segment in self.tree.segments():
            held += [*segment.chunks, *segment.attached]
        assert len(set(held)) == len(held), "a chunk has two owners"
        assert self.table.num_taken == len(held), f"leak: {self.table.num_taken} chunks taken, {len(held)} held"
