"""The cache manager: admission, growth and release of sequences. Knows sequences and chunks, not batches or text.

Admission reserves the whole prompt and one chunk of growth for every running sequence. A reservation is a demand, not
pages. Pages are taken at most one step before they are written, so a sequence holds few that it does not use.
Reservations keep a growing sequence from taking the room of an admitted prompt.

With retention, a prompt is held whole until it is computed and decided on. Then the sequence has fewer pages of its
own, and the whole prompt stays cached. Reservations of undecided sequences expect that each of them will shrink.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from quire.cache.counts import ChunkCounts
from quire.cache.eviction import Eviction
from quire.cache.fetching import Fetching
from quire.cache.holder import Holder
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.path import Path
from quire.cache.pins import Pins
from quire.cache.retention.decisions import Decided, Retention
from quire.cache.retention.none import NoRetention
from quire.cache.retention.prefix_sums import make_retainer
from quire.cache.retention.retainer import Retainer
from quire.cache.room import Room
from quire.cache.segment import NO_ROWS
from quire.cache.statistics import Statistics
from quire.cache.store import Nowhere, Store
from quire.cache.tree import PrefixTree

log = logging.getLogger("quire")

PINNED_SHARE = 0.5
"""Largest share of the arena that pins may keep."""


class CacheManager:
    """Hands out chunks and takes them back. Invariant: chunks of live paths + chunks of the tree + free chunks = all
    chunks; `check` proves it.

    table       the chunks of the arena
    tree        shared and cached chunks
    lifetime    seconds after which the tree drops unused chunks; None: they stay until their memory is wanted
    pins        prefixes that stay cached for a time
    retention   the tokens that sequences keep: all of them, or those that a `Retainer` leaves
    fetching    transfers from a store
    room        reservations
    capacity    most sealed chunks of one sequence if it is alone
    """

    def __init__(
        self,
        table: ChunkCounts,
        tree: PrefixTree,
        lifetime: float | None = None,
        retention: Retention | None = None,
        store: Store | None = None,
        retainer: Callable[[Retention, Eviction], Retainer] = make_retainer,
    ) -> None:
        self.table = table
        self.tree = tree
        self.lifetime = lifetime
        self.fetching = Fetching(table, store or Nowhere())
        self.eviction = Eviction(table, tree, self.fetching.store)
        self.retention = NoRetention(self.eviction) if retention is None else retainer(retention, self.eviction)
        self.room = Room(self.eviction, self.retention)
        self.capacity = self.room.capacity()
        self.pins = Pins(tree, int(self.capacity * PINNED_SHARE))
        self.statistics = Statistics(table, tree)
        self._refused: object = None  # the last refused sequence, and the state that the refusal depends on

    def admit(self, holder: Holder) -> bool:
        """Gives a sequence a path, over the chunks found in the cache, and reserves room for its tokens. False, and
        nothing changes, if it must wait.
        """
        if self.refuses(holder):
            return False
        while not self._has_room_for(holder):
            # A sequence that is alone would wait for ever for pinned chunks: no other one will end and make room.
            if self.room.live or (given_up := self.pins.end_oldest()) is None:
                self._refused = self._state(holder)
                return False
            log.warning(
                "the pin of a prefix of %d tokens is given up: a request of %d tokens needs more memory than the pins"
                " leave",
                given_up.end * PAGE_TOKENS,
                len(holder.token_ids),
            )
        self._refused = None
        if holder.swapped is None or not self._swap_in(holder):
            holder.path = Path()
            self.retention.enter(holder)
            self.room.promise(holder)
            self.match(holder)
            self._fetch(holder)
        return True

    def _swap_in(self, holder: Holder) -> bool:
        """Starts to bring back a path that was swapped out. False, and the path is lost, if its holds do not fit."""
        swapped = holder.swapped
        assert swapped is not None
        self.eviction.evict_for(lambda: self.fetching.demand(swapped))
        holder.path, holder.swapped = self.fetching.swap_in(swapped), None
        if not self.room.fits(self.table.nothing):  # slabs with holds cannot be emptied
            self._give_back(holder.path)
            return False
        self.room.promise(holder)
        self.statistics.note_peak()
        return True

    def _fetch(self, holder: Holder) -> None:
        """Starts to fetch the chunks of a prompt that a store has and the tree has not."""
        if not (self.tree.shares and holder.reads_cache):
            return
        path, keys, limit = holder.path, holder.keys, self.retention.limit(holder)
        near = sum(count for _, count in self.tree.walk(keys, limit))
        runs = self.retention.fetchable(keys, near, self.fetching.far(keys, near, limit))
        if not runs:
            return
        self.tree.extend(path, keys, near, not holder.num_preemptions)
        self._settle_shared(holder)
        if self.extend(holder, (near + len(runs)) * PAGE_TOKENS):
            self.fetching.begin(holder, runs)
            if self.room.fits(self.table.nothing):
                return
        # Chunks without their sums are of no use.
        self._give_back(path)
        self._settle_shared(holder)
        self.match(holder)

    def assume_fetched(self, holder: Holder) -> None:
        """Counts chunks in transfer as computed: the step's layers wait for their pages."""
        path = holder.path
        path.num_tokens = max(path.num_tokens, (path.num_shared + len(path.arriving)) * PAGE_TOKENS)

    def end_fetch(self, holder: Holder) -> bool:
        """Ends the transfer of a sequence. False if some chunks did not arrive: the content of their pages is unknown,
        and the sequence must start again.
        """
        self.assume_fetched(holder)
        has_arrived = self.fetching.end(holder.path)
        if has_arrived:
            self.commit(holder, holder.path.num_tokens)
        return has_arrived

    def swap_out(self, holder: Holder) -> None:
        """Offers a sequence that retention has made smaller to the store. Computed again, its generated tokens would be
        replayed one by one.
        """
        if holder.path.retained is not None:
            holder.swapped = self.fetching.swap_out(holder.path)

    def refuses(self, holder: Holder) -> bool:
        """Whether this sequence was refused last and nothing has changed since."""
        return self._refused is not None and self._refused == self._state(holder)

    def _state(self, holder: Holder) -> object:
        """The state on which the admission of a sequence depends."""
        tree, bytes_out = self.tree, self.table.ledger.bytes_out
        return holder, len(self.room.live), bytes_out, self.room.promised(), tree.num_uses, tree.num_chunks

    def _has_room_for(self, holder: Holder) -> bool:
        """Whether a sequence may be admitted. Takes no locks and counts no hits."""
        if holder.swapped is not None:
            if self.fetching.has(holder.swapped):
                return self.room.fits(self.fetching.demand(holder.swapped) + self.room.growth())
            holder.swapped = None
        found = list(self.tree.walk(holder.keys, self.retention.findable(holder))) if holder.reads_cache else []
        # Found chunks will be locked, and cannot be evicted.
        demand = self.retention.wanted(holder, found) + self.room.growth() + self.eviction.evictable_of(found)
        return self.room.fits(demand)

    def match(self, holder: Holder) -> int:
        """Extends a path over cached chunks, if it has none of its own. Returns the number of tokens. Only between
        slices, on a chunk boundary.
        """
        count = self.retention.match(holder) if holder.reads_cache and holder.path.is_all_shared else 0
        if count:
            self._settle_shared(holder)
        return count * PAGE_TOKENS

    def _settle_shared(self, holder: Holder) -> None:
        """Notes that all chunks of a path are shared."""
        path = holder.path
        path.num_sealed = path.num_stored = path.num_shared
        path.num_tokens = path.num_shared * PAGE_TOKENS
        self._settle(holder)

    def tick(self, now: float) -> None:
        """Sets the clock. Ends pins and drops chunks whose time is over."""
        self.tree.now = now
        self.pins.expire()
        if self.lifetime is not None:
            for vacated in self.tree.expire(self.lifetime):
                self.table.give(vacated.rows)
                self.fetching.store.drop(vacated.keys)

    def next_chunk(self, holder: Holder) -> bytes | None:
        """The key of a prompt's next whole chunk, by which the scheduler finds two sequences that are about to compute
        the same one. None if the chunk will not be shared.
        """
        path = holder.path
        may_share = self.tree.shares and holder.reads_cache and path.is_all_shared
        if not may_share or path.num_sealed >= self.retention.limit(holder):
            return None
        return holder.keys.first(path.num_sealed + 1)[-1]

    def extend(self, holder: Holder, num_tokens: int) -> bool:
        """Takes chunks for a sequence's first `num_tokens` tokens. False, and nothing changes, if they do not fit
        beside the reservations of others.
        """
        path, table = holder.path, self.table
        if num_tokens <= path.free_until:
            return True
        num_sealed = max(0, table.num_sealed_for(num_tokens) - path.num_stored)
        has_open = path.has_open
        # A full open chunk is encoded into a sealed one, and the next open chunk begins.
        wants_open = num_tokens > (path.num_stored + num_sealed) * PAGE_TOKENS and (num_sealed > 0 or not has_open)
        has_sidecar = num_sealed > 0 and path.num_stored == 0
        demand = self.retention.growth(path, num_tokens, num_sealed)
        demand += table.demand(num_sealed, wants_open, has_sidecar)
        if not any(demand):
            return True
        if not self.room.make(demand, holder):
            return False
        if num_sealed:
            sealed = table.take(num_sealed, table.sealed_codec, sidecar=has_sidecar)
            if has_open:
                begun, sealed = path.replace(len(path.chunks) - 1, sealed[:1]), sealed[1:]
                if path.num_tokens > path.num_stored * PAGE_TOKENS:
                    path.filled = int(begun[0])
                else:  # it has no token yet
                    table.give(begun)
            path.append(sealed)
            path.num_stored += num_sealed
        if wants_open:
            path.append(table.take(1, table.open_codec))
        self.retention.extend(path, num_sealed)
        self._settle(holder)
        return True

    def commit(self, holder: Holder, num_tokens: int) -> None:
        """Notes that the first `num_tokens` tokens are stored. Seals the chunks they fill and gives them to the tree.
        The step has encoded them already; dense pages need no encoding.
        """
        path = holder.path
        assert path.num_tokens <= num_tokens <= path.num_begun * PAGE_TOKENS, (
            f"{num_tokens} tokens in {len(path.chunks)} chunks"
        )
        path.num_tokens = num_tokens
        if num_tokens < path.next_seal:
            return
        path.num_sealed = num_tokens // PAGE_TOKENS
        assert path.num_sealed <= path.num_stored, "a chunk is full and was not encoded"
        self._give_filled(path)
        attached = self.retention.seal(holder)
        if any(attached) and self.room.make(attached, holder):
            self.retention.attach(holder)
        if self.table.encodes:  # else sealing changes no reservation
            self.room.update(holder)

    def retain(self, holder: Holder, decided: Decided) -> None:
        """Shrinks a sequence to the tokens that its heads keep of the prompt, which is stored."""
        path, retainer = holder.path, self.retention
        assert isinstance(retainer, Retainer) and path.retained is None
        self.eviction.evict_for(lambda: self.table.demand(rows=path.num_shared))
        retainer.retain(holder, decided, self.room)
        self._settle(holder)

    def release(self, holder: Holder) -> None:
        """Ends or preempts a sequence: unlocks its shared chunks, which stay cached, and frees its own."""
        self._give_back(holder.path)
        self.retention.leave(holder)
        self.room.forget(holder)
        holder.path = Path()

    def _give_back(self, path: Path) -> None:
        if path.transfer is not None:
            self.fetching.end(path)
        self._give_filled(path)
        self.table.give(path.private)
        self.table.give(path.sums)
        self.tree.release(path)
        path.chunks = path.sums = NO_ROWS

    def forget(self, holder: Holder) -> None:
        """Drops the swapped path of a sequence that will not run again."""
        if holder.swapped is not None:
            self.fetching.store.drop(holder.swapped.run.names)
            holder.swapped = None

    def stats(self) -> dict[str, int]:
        """See Statistics.bytes."""
        # Another thread may call this during a step. Slightly old numbers are good enough.
        return self.statistics.bytes([holder.path for holder in list(self.room.live)], self.retention.bytes_freed)

    def check(self) -> None:
        """Proves the invariant of the manager, the tree, the table and the ledger."""
        self.table.check()
        self.room.check()
        held: list[int] = []
        for holder in self.room.live:
            path = holder.path
            assert path.free_until == self._free_until(path), "what happens next is not known"
            held += [*path.private, *path.sums, *([path.filled] if path.filled >= 0 else [])]
            if path.transfer is None:  # a transfer's hold looks like a second owner
                self.retention.check(path)
            if path.retained is None:
                shared = [chunk for segment in path.segments for chunk in segment.chunks.tolist()]
                assert shared == path.chunks[: path.num_shared].tolist(), "a path does not read the tree's chunks"
        self.tree.check()
        self.pins.check()
        for segment in self.tree.segments():
            held += [*segment.chunks, *segment.attached]
        assert len(set(held)) == len(held), "a chunk has two owners"
        assert self.table.num_taken == len(held), f"leak: {self.table.num_taken} chunks taken, {len(held)} held"

    def _settle(self, holder: Holder) -> None:
        """Follows a change of a sequence's chunks."""
        holder.path.free_until = self._free_until(holder.path)
        self.room.update(holder)
        self.statistics.note_peak()

    def _free_until(self, path: Path) -> int:
        """See `Path.free_until`."""
        return max(0, path.num_begun * PAGE_TOKENS - (self.table.encodes or path.retained is not None))

    def _give_filled(self, path: Path) -> None:
        if path.filled >= 0:
            self.table.give(np.array([path.filled], np.int32))
            path.filled = -1
