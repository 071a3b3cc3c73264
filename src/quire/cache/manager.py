"""The cache manager: what each sequence holds, what may be admitted, what must wait. Knows sequences and chunks, not
batches or text.

Admission reserves the whole prompt and one chunk of growth for every running sequence. A reservation is a count, not
pages: pages are taken when they are about to be written, so a sequence never holds what it does not use, and the counts
keep a growing one from taking what an admitted prompt was promised.

With retention a prompt is held whole until it is computed and decided on, and then in fewer pages, which are the
sequence's own; what it was computed into stays cached. Requests that wait for others to decide are promised room
beside what these are expected to keep.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from quire.cache.counts import ChunkCounts
from quire.cache.eviction import Eviction
from quire.cache.fetching import Fetching
from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import Path
from quire.cache.pins import Pins
from quire.cache.retention.decisions import Decided, Retention
from quire.cache.retention.none import NoRetention
from quire.cache.retention.prefix_sums import make_retainer
from quire.cache.retention.retainer import Retainer
from quire.cache.room import Room
from quire.cache.statistics import Statistics
from quire.cache.store import Nowhere, Store
from quire.cache.tree import PrefixTree

log = logging.getLogger("quire")

PINNED_SHARE = 0.5
"""Share of the arena that pins may keep: the rest goes on serving everybody."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What an admitted sequence starts with: tokens found in the cache."""

    cached_tokens: int


class CacheManager:
    """Hands out chunks and takes them back. Invariant: chunks of live paths + chunks of the tree + free chunks = all
    chunks; `check` proves it.

    table      the chunks of the arena
    tree       what is shared and what stays cached; None: every sequence has its own chunks, free when it ends
    lifetime   seconds after which the tree drops what nobody used; None: it stays until its memory is wanted
    pins       what the tree keeps for longer
    retention  answers what sequences keep: all of it, or what a `Retainer` leaves
    fetching   what a store has, and what comes from there
    room       what fits beside what was promised
    capacity   sealed chunks that one sequence may have if it is alone; pins may keep `max_pinned` of them in all
    """

    def __init__(
        self,
        table: ChunkCounts,
        tree: PrefixTree | None,
        lifetime: float | None = None,
        retention: Retention | None = None,
        store: Store | None = None,
    ) -> None:
        self.table = table
        self.tree = tree
        self.lifetime = lifetime
        self.pins = None if tree is None else Pins(tree)
        self.fetching = Fetching(table, store or Nowhere())
        self.eviction = Eviction(table, tree, self.fetching.store)
        self.retention = NoRetention(self.eviction) if retention is None else make_retainer(retention, self.eviction)
        self.room = Room(self.eviction, self.retention)
        self.capacity = self.room.capacity()
        self.max_pinned = int(self.capacity * PINNED_SHARE)
        self.chunk_bytes = table.chunk_bytes(table.sealed_codec)
        self.statistics = Statistics(table, tree)
        self._refused: object = None  # who was last refused, and what it depended on

    def admit(self, holder: Holder) -> Admission | None:
        """Gives the sequence a path and reserves room for its tokens, or returns None and changes nothing if it must
        wait.
        """
        if self.refuses(holder):
            return None
        while not self._has_room_for(holder):
            # Alone, it would wait for ever on what is pinned: nobody is there who could end and make room.
            if self.room.live or self.pins is None or (given_up := self.pins.end_oldest()) is None:
                self._refused = self._state(holder)
                return None
            log.warning(
                "the pin of a prefix of %d tokens is given up: a request of %d tokens needs more memory than the pins"
                " leave",
                given_up.end,
                len(holder.token_ids),
            )
        self._refused = None
        if holder.swapped is not None and self._swap_in(holder):
            return Admission(0)
        holder.path = Path()
        holder.path.free_until, _ = self._events(holder.path)
        self.retention.enter(holder)
        self.room.promise(holder)
        self._match(holder)
        self._fetch(holder)
        self.statistics.note_peak()
        return Admission(holder.path.num_tokens)

    def _swap_in(self, holder: Holder) -> bool:
        """Brings a path back that was swapped out. False, and it is forgotten, if there is no room for its holds."""
        assert holder.swapped is not None
        demand = self.fetching.demand(holder.swapped)
        self.eviction.evict_for(lambda: demand)
        holder.path, holder.swapped = self.fetching.swap_in(holder.swapped), None
        if not self._has_room_beside_holds():
            self.fetching.end(holder.path)
            self._give_back(holder.path)
            return False
        self.room.live[holder] = self.table.nothing
        self._settle(holder)
        self.statistics.note_peak()
        return True

    def _has_room_beside_holds(self) -> bool:
        """Whether what was promised still fits: pages under a hold cannot be packed more densely."""
        return self.room.fits(self.table.nothing)

    def _fetch(self, holder: Holder) -> None:
        """Starts to fetch what a store has beyond what the tree has of a prompt."""
        if self.tree is None or not holder.reads_cache:
            return
        path, keys, limit = holder.path, holder.keys, self.retention.limit(holder)
        near = sum(count for _, count in self.tree.walk(keys, limit))
        runs = self.retention.fetchable(keys, near, self.fetching.far(keys, near, limit))
        if not runs:
            return
        self.tree.extend(path, keys, near, not holder.num_preemptions)
        self._settle_shared(holder)
        if self.extend(holder, (near + len(runs)) * PAGE_TOKENS):
            self.fetching.begin(holder, near, runs)
            if self._has_room_beside_holds():
                return
            self.fetching.end(path)
        # What it took without sums is of no use.
        self._give_back(path)
        self._settle_shared(holder)
        self._match(holder)

    def assume_fetched(self, holder: Holder) -> None:
        """The sequence goes on behind chunks that are still under way: layers wait for theirs."""
        holder.path.num_tokens = max(holder.path.num_tokens, holder.path.num_arriving * PAGE_TOKENS)

    def end_fetch(self, holder: Holder) -> bool:
        """The transfer of a sequence is over. False if not all has arrived: then the path holds what nobody knows, and
        the sequence has to begin again.
        """
        path = holder.path
        has_arrived = self.fetching.end(path)
        if has_arrived and path.num_arriving:
            self.commit(holder, max(path.num_tokens, path.num_arriving * PAGE_TOKENS))
        return has_arrived

    def swap_out(self, holder: Holder) -> None:
        """Puts what retention has left of a sequence into the store, if it wants that: computed again, it would be
        replayed token by token.
        """
        if holder.path.retained is not None:
            holder.swapped = self.fetching.swap_out(holder.path)

    def refuses(self, holder: Holder) -> bool:
        """Whether a sequence was refused last, and nothing has changed since."""
        return self._refused is not None and self._refused == self._state(holder)

    def _state(self, holder: Holder) -> object:
        """Everything on which it depends whether a sequence is admitted."""
        tree = (self.tree.num_uses, self.tree.num_chunks) if self.tree is not None else None
        return holder, len(self.room.live), self.table.bytes_out, self.room.promised(), tree

    def _has_room_for(self, holder: Holder) -> bool:
        """Whether a sequence may be admitted. Looks without taking: who waits is no sharer, and has no hits."""
        tree, found = self.tree, []
        if holder.swapped is not None:
            if self.fetching.has(holder.swapped):
                return self.room.fits(self.fetching.demand(holder.swapped) + self.room.growth())
            holder.swapped = None
        if tree is not None and holder.reads_cache:
            found = list(tree.walk(holder.keys, self.retention.findable(holder)))
        # What it finds is not there to be evicted.
        demand = self.retention.wanted(holder, found) + self.room.growth() + self.eviction.evictable_of(found)
        return self.room.fits(demand)

    def match_again(self, holder: Holder) -> int:
        """Takes what others have put into the tree since: tokens the sequence need not compute. Only between slices
        that end on a chunk boundary.
        """
        return self._match(holder) * PAGE_TOKENS if holder.path.is_all_shared else 0

    def _match(self, holder: Holder) -> int:
        """Extends a path without chunks of its own over what is cached. Returns the number of chunks it took. All it
        then holds is sealed.
        """
        count = self.retention.match(holder) if holder.reads_cache and self.tree is not None else 0
        if count:
            self._settle_shared(holder)
        return count

    def _settle_shared(self, holder: Holder) -> None:
        """All that a path has is the tree's."""
        path = holder.path
        path.num_sealed = path.num_stored = path.num_shared
        path.num_tokens = path.num_shared * PAGE_TOKENS
        self._settle(holder)

    def pin(self, holder: Holder, num_tokens: int, seconds: float) -> bool:
        """Pins the whole chunks of the sequence's first `num_tokens` tokens, all computed, for some seconds. False, and
        nothing pinned, if pins would then hold more than `PINNED_SHARE` of the arena.
        """
        count = num_tokens // PAGE_TOKENS
        if self.pins is None or count == 0 or not self.may_pin(holder.keys, count):
            return False
        self.pins.add(holder.path, count, self.pins.tree.now + seconds)
        return True

    def unpin(self, keys: ChunkKeys) -> int:
        """Ends the pins of a prompt and of its prefixes; returns how many."""
        return 0 if self.pins is None else self.pins.end(keys)

    def may_pin(self, keys: ChunkKeys, count: int) -> bool:
        """Whether pins have room for the first `count` chunks of a prompt."""
        assert self.tree is not None
        pinned = sum(found for segment, found in self.tree.walk(keys, count) if segment.pins)
        return self.tree.num_pinned + count - pinned <= self.max_pinned

    def tick(self, now: float) -> None:
        """Sets the clock of lifetimes: pins end, and what is too old is dropped."""
        if self.tree is not None and self.pins is not None:
            self.tree.now = now
            self.pins.expire()
            if self.lifetime is not None:
                for vacated in self.tree.expire(self.lifetime):
                    self.table.give(vacated.rows)
                    self.fetching.store.drop(vacated.keys)

    def next_chunk(self, holder: Holder) -> bytes | None:
        """The key of the next whole chunk of a prompt, by which two sequences about to compute the same one are told;
        None where it is not to be shared.
        """
        path, keys = holder.path, holder.keys
        may_share = self.tree is not None and holder.reads_cache and path.is_all_shared
        if not may_share or path.num_sealed >= self.retention.limit(holder):
            return None
        return keys.first(path.num_sealed + 1)[-1]

    def extend(self, holder: Holder, num_tokens: int) -> bool:
        """Makes room for the sequence's first `num_tokens` tokens, in the chunks they will be stored in; False, with
        nothing changed, if that would take what others were promised.
        """
        path, table = holder.path, self.table
        if num_tokens <= path.free_until:
            return True
        num_sealed = max(0, table.num_sealed_for(num_tokens) - path.num_stored)
        has_open = path.has_open
        # What its open chunk holds is encoded once it is full, and the next one begins.
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
                begun = int(path.chunks[-1])
                if path.num_tokens > path.num_stored * PAGE_TOKENS:
                    path.filled = begun
                else:  # nothing was computed of it
                    table.give(np.array([begun], np.int32))
                path.replace(path.num_stored - path.num_dropped, sealed[:1])
                sealed = sealed[1:]
            path.append(sealed)
            path.num_stored += num_sealed
        if wants_open:
            path.append(table.take(1, table.open_codec))
        self.retention.extend(path, num_sealed)
        self._settle(holder)
        self.statistics.note_peak()
        return True

    def commit(self, holder: Holder, num_tokens: int) -> None:
        """The first `num_tokens` tokens are now stored; chunks they fill are sealed, and the tree gets them. Dense
        pages need no encoding: sealing is a promise not to write. Others were encoded by the step.
        """
        path = holder.path
        assert path.num_tokens <= num_tokens <= path.num_begun * PAGE_TOKENS, (
            f"{num_tokens} tokens in {path.num_chunks} chunks"
        )
        path.num_tokens = num_tokens
        if num_tokens // PAGE_TOKENS == path.num_sealed:
            return
        path.num_sealed = num_tokens // PAGE_TOKENS
        assert path.num_sealed <= path.num_stored, "a chunk is full and was not encoded"
        self._give_filled(path)
        attached = self.retention.seal(holder)
        if any(attached) and self.room.make(attached, holder):
            self.retention.attach(holder)
        path.free_until, path.next_seal = self._events(path)
        if self.table.encodes:  # else sealing takes and gives nothing that was promised
            self.room.update(holder)

    def retain(self, holder: Holder, decided: Decided) -> None:
        """The sequence's prompt is stored, and this is what its heads keep of it."""
        path, retainer = holder.path, self.retention
        assert isinstance(retainer, Retainer) and path.retained is None
        table = retainer.table
        before, rows = table.bytes_of(path.chunks), table.demand(rows=path.num_shared)
        self.eviction.evict_for(lambda: rows)

        def fits(demand: Demand) -> bool:
            self.room.update(holder)
            return self.room.fits(demand)

        retainer.retain(holder, decided, fits)
        self._settle(holder)
        self.statistics.note_peak()
        if retainer.watch is not None:
            retainer.watch(decided, before, table.bytes_of(np.concatenate((path.chunks, path.sums))))

    def shared(self, holder: Holder) -> tuple[tuple[int, int], ...]:
        """See PrefixTree.shared; nothing without a tree, or once a path has pages of its own."""
        return () if self.tree is None or holder.path.retained is not None else self.tree.shared(holder.path)

    def release(self, holder: Holder) -> None:
        """The sequence ends or is preempted: its locks are undone, its own chunks are free; what it gave to the tree
        stays there.
        """
        if holder.path.transfer is not None:
            self.fetching.end(holder.path)
        self._give_back(holder.path)
        self.retention.leave(holder)
        self.room.forget(holder)
        holder.path = Path()

    def _give_back(self, path: Path) -> None:
        self._give_filled(path)
        self.table.give(path.private)
        self.table.give(path.sums)
        path.sums = path.sums[:0]
        path.truncate(path.num_shared)
        if self.tree is not None:
            self.tree.release(path)
            path.truncate(0)

    def forget(self, holder: Holder) -> None:
        """A sequence that waits will not run again."""
        if holder.swapped is not None:
            self.fetching.store.drop(holder.swapped.run.names)
            holder.swapped = None

    def stats(self) -> dict[str, int]:
        """See Statistics.bytes."""
        # Others may ask while the engine works: of what changes meanwhile, what was there is good enough.
        return self.statistics.bytes([holder.path for holder in list(self.room.live)], self.retention.bytes_freed)

    def check(self) -> None:
        """Proves the invariant of the manager, the tree, the table and the ledger."""
        self.table.check()
        self.room.check()
        held: list[int] = []
        for holder in self.room.live:
            path = holder.path
            assert (path.free_until, path.next_seal) == self._events(path), "what happens next is not known"
            held += [*path.private, *path.sums, *([path.filled] if path.filled >= 0 else [])]
            if path.transfer is None:  # which holds its pages, as a second owner would
                self.retention.check(path)
            if path.retained is None:
                shared = [chunk for segment in path.segments for chunk in segment.chunks.tolist()]
                assert shared == path.chunks[: path.num_shared].tolist(), "a path does not read the tree's chunks"
        if self.tree is not None and self.pins is not None:
            self.tree.check()
            self.pins.check()
            for _, segment in self.tree.segments():
                held += [*segment.chunks, *segment.attached]
        assert len(set(held)) == len(held), "a chunk has two owners"
        assert self.table.num_taken == len(held), f"leak: {self.table.num_taken} chunks taken, {len(held)} held"

    @property
    def unprotected(self) -> int:
        """Sealed chunks that one sequence may have beside what protected pins keep, if it is alone. Only while nobody
        is there.
        """
        assert not self.room.live, "what sequences hold would count as kept"
        if self.tree is None or self.pins is None:
            return self.capacity
        num_chunks, num_firsts = self.pins.num_protected
        # All that is there now is the tree's, and what is not protected would go.
        return self.room.capacity(num_chunks - self.tree.num_chunks, num_firsts - self.tree.num_unread_firsts)

    def _settle(self, holder: Holder) -> None:
        """The chunks of a sequence have changed."""
        holder.path.free_until, holder.path.next_seal = self._events(holder.path)
        self.room.update(holder)

    def _events(self, path: Path) -> tuple[int, int]:
        """See Path.free_until and Path.next_seal."""
        has_event = self.table.encodes or path.retained is not None
        return path.num_begun * PAGE_TOKENS - has_event, (path.num_sealed + 1) * PAGE_TOKENS

    def _give_filled(self, path: Path) -> None:
        if path.filled >= 0:
            self.table.give(np.array([path.filled], np.int32))
            path.filled = -1
