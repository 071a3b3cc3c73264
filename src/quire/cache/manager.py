"""The cache manager: what each sequence holds, what may be admitted, what must wait. Knows sequences and chunks, not
batches or text.

Admission reserves the whole prompt and one chunk of growth for every running sequence. A reservation is a count, not
pages: pages are taken when they are about to be written, so a sequence never holds what it does not use, and the counts
keep a growing one from taking what an admitted prompt was promised.

A sequence needs sealed chunks for what is full and one open chunk for the rest. Where sealed chunks are encoded the two
differ in size, so what is asked is not how many chunks are free but whether so many of each fit.

With retention a prompt is held whole until it is computed and decided on, and then in fewer pages, which are the
sequence's own; what it was computed into stays cached. Requests that wait for others to decide are promised room
beside what these are expected to keep.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.cache.counts import ChunkCounts, Need
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import Path
from quire.cache.prefixes import explain
from quire.cache.retainer import Looks, Retainer
from quire.cache.retention import Decided, Retention
from quire.cache.room import Ahead, Found, Room
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree

log = logging.getLogger("quire")

PINNED_SHARE = 0.5
"""Share of the arena that pins may keep: the rest goes on serving everybody."""


class Holder(Protocol):
    """What the manager needs to know of a sequence."""

    path: Path
    num_preemptions: int

    @property
    def keys(self) -> ChunkKeys:
        """The names of its chunks."""
        ...

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may be matched; not if every prompt row is wanted."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens so far."""
        ...

    @property
    def num_prompt(self) -> int:
        """How many of them are the prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Admission:
    """What an admitted sequence starts with: tokens found in the cache, and sealed chunks reserved for it."""

    cached_tokens: int
    reserved_chunks: int


class CacheManager:
    """Hands out chunks and takes them back. Invariant: chunks of live paths + chunks of the tree + free chunks = all
    chunks; `check` proves it.

    table     the chunks of the arena
    tree      what is shared and what stays cached; None: every sequence has its own chunks, free when it ends
    lifetime  seconds after which the tree drops what nobody used; None: it stays until its memory is wanted
    retainer  makes what sequences hold smaller; None without retention
    room      what fits beside what was promised
    capacity  sealed chunks that one sequence may have if it is alone
    """

    def __init__(
        self,
        table: ChunkCounts,
        tree: PrefixTree | None,
        lifetime: float | None = None,
        retention: Retention | None = None,
    ) -> None:
        self.table = table
        self.tree = tree
        self.lifetime = lifetime
        self.retainer: Retainer | None = None
        if retention is not None:
            assert isinstance(table, ChunkTable), "retention drops pages, not chunks"
            self.retainer = Retainer(retention, table, tree)
        self.room = Room(table, tree, self.retainer)
        self.capacity = self.room.capacity()
        self._live: dict[Holder, None] = {}
        self._bytes_peak = 0
        self._refused: object = None  # who was last refused, and what it depended on

    def admit(self, holder: Holder) -> Admission | None:
        """Gives the sequence a path and reserves room for its tokens, or returns None and changes nothing if it must
        wait.
        """
        tokens = holder.token_ids
        if self.refuses(holder):
            return None
        while (need := self._room_for(holder)) is None:
            # Alone, it would wait for ever on what is pinned: nobody is there who could end and make room.
            if self._live or self.tree is None or (given_up := self.tree.unpin_oldest()) is None:
                self._refused = self._state(holder)
                return None
            log.warning(
                "the pin of a prefix of %d tokens is given up: a request of %d tokens needs more memory than the pins"
                " leave",
                given_up.end,
                len(tokens),
            )
        self._refused = None
        holder.path = Path()
        self._live[holder] = None
        self.room.promise(holder, len(tokens) if self.retainer is None else holder.num_prompt)
        self._match(holder)
        self._settle(holder)
        self._note_peak()
        return Admission(holder.path.num_tokens, need.sealed)

    def refuses(self, holder: Holder) -> bool:
        """Whether a sequence was refused last, and nothing has changed since."""
        return self._refused is not None and self._refused == self._state(holder)

    def _state(self, holder: Holder) -> object:
        """What it depends on whether a sequence is admitted."""
        tree = (self.tree.num_uses, self.tree.num_chunks) if self.tree is not None else None
        return holder, len(self._live), self.table.bytes_out, self.room.promised(), tree

    def _room_for(self, holder: Holder) -> Need | None:
        """What to reserve for a sequence beyond what the tree has for it, or None if there is no room. Looks without
        taking: who waits is no sharer, and has no hits.
        """
        found = starts = alone = unused = num_parted = 0
        part: NDArray[np.int64] | None = None
        if self.tree is not None and holder.reads_cache:
            limit = self._limit(holder)
            if self.retainer is not None:
                limit = self.retainer.reusable(holder, limit)
            for segment, count in self.tree.walk(holder.keys, limit):
                found += count
                if segment.pins:
                    continue
                if not segment.users:
                    unused += count
                    alone += count
                    starts += segment.start == 0
                elif segment.unread is not None:
                    is_idle = segment.unread == segment.users
                    part = count * is_idle + (0 if part is None else part)
                    num_parted += count * bool(is_idle.any())
                    alone += count * bool(is_idle.all())
        num_tokens = len(holder.token_ids) if self.retainer is None else holder.num_prompt
        need = self.room.need(0, False, num_tokens)
        has_sidecar = self.table.sinks is not None and not found
        sums = 0 if self.retainer is None else self.retainer.num_sums(num_tokens)
        rows = 0 if self.retainer is None else found
        need = Need(need.sealed - found, int(self.table.encodes), int(has_sidecar), sums, rows)
        growth = Need(len(self._live) + 1 if self._live else 0, sums=len(self._live) * (self.retainer is not None))
        coming = None
        wanted = need
        if self.retainer is not None:
            coming = Ahead(need.sealed, need.sealed + found, alone)
            wanted = need._replace(sealed=0)
        demand = self.table.demand(wanted) + self.table.demand(growth) + self.room.promised(coming=coming)
        return need if self.room.fits(demand, Found(unused, starts, num_parted, part)) else None

    def match_again(self, holder: Holder) -> int:
        """Takes what others have put into the tree since: tokens the sequence need not compute. Only between slices
        that end on a chunk boundary.
        """
        path = holder.path
        if path.retained is not None or path.num_chunks != path.num_shared:
            return 0
        count = self._match(holder)
        if count:
            self._settle(holder)
        return count * PAGE_TOKENS

    def pin(self, holder: Holder, num_tokens: int, seconds: float) -> bool:
        """Keeps the whole chunks of the sequence's first `num_tokens` tokens, all computed, for so long from now.
        False, and nothing kept, if pins would then hold more than `PINNED_SHARE` of the arena.
        """
        count = num_tokens // PAGE_TOKENS
        if self.tree is None or count == 0:
            return False
        if not self.may_pin(holder.keys, count):
            return False
        self.tree.pin(holder.path, count, self.tree.now + seconds)
        return True

    def unpin(self, keys: ChunkKeys) -> int:
        """Ends the pins of a prompt and of what it begins with; returns how many."""
        return 0 if self.tree is None else self.tree.unpin(keys)

    def may_pin(self, keys: ChunkKeys, count: int) -> bool:
        """Whether pins have room for the first `count` chunks of a prompt."""
        assert self.tree is not None
        pinned = sum(found for segment, found in self.tree.walk(keys, count) if segment.pins)
        return self.tree.num_pinned + count - pinned <= self.max_pinned

    def tick(self, now: float) -> None:
        """Moves the clock of lifetimes on: pins end, and what is too old is dropped."""
        if self.tree is not None:
            self.tree.now = now
            self.table.give(self.tree.expire(self.lifetime))

    def explain(self, holder: Holder) -> str:
        """Why a sequence finds in the cache what it finds, in a sentence."""
        if self.tree is None:
            return "cache.share is off"
        if not holder.reads_cache:
            return "log-probabilities of the prompt are wanted, so all of it is computed"
        if self.retainer is not None and (known := self._known(holder)) > holder.path.num_shared:
            return (
                f"{known * PAGE_TOKENS} tokens of it are cached, and what rows before looked at is known up to token"
                f" {holder.path.num_shared * PAGE_TOKENS}: retention needs both"
            )
        return explain(self.tree, holder.keys, holder.token_ids)

    def _known(self, holder: Holder) -> int:
        """Chunks of a prompt that the tree has, as far as they may be found."""
        assert self.tree is not None
        return sum(count for _, count in self.tree.walk(holder.keys, self._limit(holder)))

    def next_chunk(self, holder: Holder) -> bytes | None:
        """The key of the next whole chunk of a prompt, so that two sequences about to compute the same one can be told;
        None where it is not to be shared.
        """
        path = holder.path
        if (
            self.tree is None
            or not holder.reads_cache
            or path.retained is not None
            or path.num_chunks != path.num_shared
            or path.num_sealed >= self._limit(holder)
        ):
            return None
        return holder.keys.first(path.num_sealed + 1)[-1]

    def extend(self, holder: Holder, num_tokens: int) -> bool:
        """Makes room for the sequence's first `num_tokens` tokens, in the chunks they will be stored in; False, with
        nothing changed, if that would take what others were promised.
        """
        path, table = holder.path, self.table
        has_open = path.num_chunks + path.num_gone > path.num_stored
        need = self.room.need(path.num_stored, has_open, num_tokens)
        if self.retainer is not None:
            need = need._replace(sums=self.retainer.lacks(path, num_tokens) + self.retainer.places(path, need.sealed))
        if not any(need):
            return True
        demand = table.demand(need)
        if not self.room.fits(demand + self.room.promised(apart_from=holder)):
            return False
        self._evict_for(demand)
        if need.sealed:
            sealed = table.take(need.sealed, table.sealed_codec, sidecar=path.num_stored == 0)
            if has_open:
                # What its open chunk holds is encoded once it is full; one of which nothing was computed is not needed.
                begun = int(path.chunks[-1])
                if path.num_tokens > path.num_stored * PAGE_TOKENS:
                    path.filled = begun
                else:
                    table.give(np.array([begun], np.int32))
                path.replace(path.num_stored - path.num_gone, sealed[:1])
                sealed = sealed[1:]
            path.append(sealed)
            path.num_stored += need.sealed
        if need.open:
            path.append(table.take(need.open, table.open_codec))
        if self.retainer is not None:
            self.retainer.extend(path, num_tokens, need.sealed)
        self._settle(holder)
        self._note_peak()
        return True

    def commit(self, holder: Holder, num_tokens: int) -> None:
        """The first `num_tokens` tokens are now stored; chunks they fill are sealed, and the tree gets them. Dense
        pages need no encoding: sealing is a promise not to write. Others were encoded by the step.
        """
        path = holder.path
        assert path.num_tokens <= num_tokens <= (path.num_chunks + path.num_gone) * PAGE_TOKENS, (
            f"{num_tokens} tokens in {path.num_chunks} chunks"
        )
        path.num_tokens = num_tokens
        if num_tokens // PAGE_TOKENS == path.num_sealed:
            return
        path.num_sealed = num_tokens // PAGE_TOKENS
        assert path.num_sealed <= path.num_stored, "a chunk is full and was not encoded"
        self._give_filled(path)
        if path.retained is not None:
            assert self.retainer is not None
            self.retainer.reseal(path, holder.token_ids[:num_tokens])
        elif self.tree is not None:
            self.table.give(self.tree.publish(path, holder.keys, path.num_sealed))
            if self.retainer is not None:
                self._store_sums(holder)
        self._settle(holder)

    def is_coming(self, holder: Holder) -> bool:
        """Whether a sequence had better wait for what another is about to leave in the cache."""
        return self.retainer is not None and holder.reads_cache and self.retainer.is_coming(holder)

    def slice_end(self, holder: Holder) -> int:
        """Where the next slice of a sequence must end at the latest, as a number of tokens: where sums are kept for
        others, at the prompt's end, and after it with every token that is replayed.
        """
        return len(holder.token_ids) if self.retainer is None else self.retainer.slice_end(holder)

    def undivided(self, holder: Holder) -> int:
        """Where the rows begin that must be computed in one slice, as a number of tokens: a sequence's end if none."""
        return len(holder.token_ids) if self.retainer is None else self.retainer.undivided(holder)

    def last_rows(self, holder: Holder, num_tokens: int) -> int:
        """Over how many of its last rows what a sequence keeps is decided, once so many tokens are computed; 0 if it is
        not to be decided then.
        """
        return 0 if self.retainer is None else self.retainer.last_rows(holder, num_tokens)

    def looks(self, holder: Holder, num_last: int) -> Looks | None:
        """See Retainer.looks; None without retention."""
        return None if self.retainer is None else self.retainer.looks(holder.path, num_last)

    def retain(self, holder: Holder, decided: Decided) -> None:
        """The sequence's prompt is stored, and this is what its heads keep of it."""
        assert self.retainer is not None and holder.path.retained is None
        path, retainer, table = holder.path, self.retainer, self.retainer.table
        before = table.bytes_of(path.chunks)
        self._evict_for(table.demand(Need(rows=path.num_shared)))
        places = table.demand(Need(sums=path.num_sealed * table.encodes))

        def has_room(pages: NDArray[np.int64]) -> bool:
            self.room.update(holder)
            return self.room.fits(places + self.room.promised() + table.demand_of_pages(pages))

        retainer.begin(holder, decided, has_room)
        places = table.demand(Need(sums=retainer.places(path, path.num_sealed)))
        self._evict_for(places, lambda: table.demand_of_pages(retainer.wanted(path)))
        retainer.finish(path)
        self._settle(holder)
        self._note_peak()
        if retainer.watch is not None:
            retainer.watch(decided, before, table.bytes_of(np.concatenate((path.chunks, path.sums))))

    def shared(self, holder: Holder) -> tuple[tuple[int, int], ...]:
        """See PrefixTree.shared; nothing without a tree, or once a path has pages of its own."""
        return () if self.tree is None or holder.path.retained is not None else self.tree.shared(holder.path)

    def release(self, holder: Holder) -> None:
        """The sequence ends or is preempted: its locks are undone, its own chunks are free; what it gave to the tree
        stays there.
        """
        path = holder.path
        self._give_filled(path)
        self.table.give(path.private)
        self.table.give(path.sums)
        if self.tree is not None:
            self.tree.release(path)
        if self.retainer is not None:
            self.retainer.forget(holder)
        self.room.forget(holder)
        del self._live[holder]
        holder.path = Path()

    def stats(self) -> dict[str, int]:
        """Bytes of the one arena: total = used by live sequences + cached + free; the peak is of used. Of the bytes
        cached or used some are pinned; saved are those that live sequences would take on top, did they share nothing.
        """
        total, cached = self.table.num_bytes, self._bytes_cached
        chunk_bytes, tree = self.chunk_bytes, self.tree
        # Others may ask while the engine works: of what changes meanwhile, what was there is good enough.
        saved = 0
        if tree is not None:
            read = sum(
                len(segment.chunks) * (1 if heads is None else heads.astype(np.int64))
                for holder in list(self._live)
                for segment, heads in holder.path.reads()
                if not segment.is_dropped
            )
            once = tree.num_read + tree.part_read
            saved = max(0, int(((read - once) * self.table.page_sizes(self.table.sealed_codec)).sum()))
        return {
            "bytes_total": total,
            "bytes_used": self.table.bytes_out - cached,
            "bytes_cached": cached,
            "bytes_free": total - self.table.bytes_out,
            "bytes_peak": self._bytes_peak,
            "bytes_pinned": 0 if tree is None else tree.num_pinned * chunk_bytes,
            "bytes_saved": saved,
            "bytes_evicted": 0 if tree is None else tree.num_evicted * chunk_bytes,
            "bytes_retention_freed": 0 if self.retainer is None else self.retainer.bytes_freed,
        }

    def check(self) -> None:
        """Proves the invariant of the manager, the tree, the table and the ledger."""
        self.table.check()
        self.room.check()
        for holder in self._live:
            found = holder.path.free_until, holder.path.next_seal
            assert found == self._events(holder.path), f"{found} tokens until something happens"
        held = [int(chunk) for holder in self._live for chunk in holder.path.private]
        held += [holder.path.filled for holder in self._live if holder.path.filled >= 0]
        held += [int(row) for holder in self._live for row in holder.path.sums]
        if self.retainer is not None:
            for holder in self._live:
                self.retainer.check(holder.path)
        if self.tree is not None:
            self.tree.check()
            for _, segment in self.tree.segments():
                held += [*segment.chunks.tolist(), *(() if segment.sums is None else segment.sums.tolist())]
            for holder in self._live:
                path = holder.path
                if path.retained is not None:
                    continue
                shared = [chunk for segment in path.segments for chunk in segment.chunks.tolist()]
                assert shared == path.chunks[: path.num_shared].tolist(), "a path does not read the tree's chunks"
        assert len(set(held)) == len(held), "a chunk has two owners"
        assert self.table.num_taken == len(held), f"leak: {self.table.num_taken} chunks taken, {len(held)} held"

    @property
    def max_pinned(self) -> int:
        """Chunks that pins may keep in all."""
        return int(self.capacity * PINNED_SHARE)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one sealed chunk's pages."""
        return self.table.chunk_bytes(self.table.sealed_codec)

    @property
    def _bytes_cached(self) -> int:
        """Bytes that the tree alone keeps."""
        tree = self.tree
        if tree is None:
            return 0
        unread = (tree.num_chunks - tree.num_read) * self.chunk_bytes
        if tree.num_parted:
            unread -= int((tree.part_read * self.table.page_sizes(self.table.sealed_codec)).sum())
        sums = tree.num_sums * self.table.chunk_bytes(self.table.sums) if self.table.sums is not None else 0
        return unread + tree.num_unread_starts * self.table.sidecar_bytes + sums

    @property
    def unprotected(self) -> int:
        """Sealed chunks that one sequence may have beside what protected pins keep, if it is alone. Only while nobody
        is there.
        """
        assert not self._live, "what sequences hold would count as kept"
        if self.tree is None:
            return self.capacity
        num_chunks, num_starts = self.tree.num_protected
        # All that is there now is the tree's, and what is not protected would go.
        return self.room.capacity(num_chunks - self.tree.num_chunks, num_starts - self.tree.num_unread_starts)

    def _settle(self, holder: Holder) -> None:
        """The chunks of a sequence have changed."""
        holder.path.free_until, holder.path.next_seal = self._events(holder.path)
        self.room.update(holder)

    def _events(self, path: Path) -> tuple[int, int]:
        """See Path.free_until and Path.next_seal."""
        holds = (path.num_chunks + path.num_gone) * PAGE_TOKENS
        return holds - (self.table.encodes or path.retained is not None), (path.num_sealed + 1) * PAGE_TOKENS

    def _note_peak(self) -> None:
        self._bytes_peak = max(self._bytes_peak, self.table.bytes_out - self._bytes_cached)

    def _limit(self, holder: Holder) -> int:
        """Chunks that a sequence may find in the cache: never its last token, which is computed, or there would be no
        logits.
        """
        if self.retainer is not None:
            return self.retainer.retention.num_reusable(holder.num_prompt)
        return (len(holder.token_ids) - 1) // PAGE_TOKENS

    def _match(self, holder: Holder) -> int:
        """Carries a path without chunks of its own on, as far as the tree has what it needs; chunks that it took. All
        of what it then holds is sealed.
        """
        path, tree = holder.path, self.tree
        count = 0
        if tree is not None and holder.reads_cache:
            limit, is_hit = self._limit(holder), not holder.num_preemptions
            if self.retainer is None:
                count = tree.extend(path, holder.keys, limit, is_hit)
            else:
                count, sums = self.retainer.match(holder, limit, is_hit)
                if count:
                    self.table.give(path.sums)
                    path.sums = path.sums[:0]
                    # The path has locked whose sums these are. Where there is no room for both, they become its own.
                    if self._make_room(self.table.demand(Need(sums=len(sums)))):
                        self.retainer.copy_sums(path, sums)
                    else:
                        path.sums = tree.take_sums(path, len(sums))
        path.num_sealed = path.num_stored = path.num_shared
        path.num_tokens = path.num_shared * PAGE_TOKENS
        return count

    def _give_filled(self, path: Path) -> None:
        if path.filled >= 0:
            self.table.give(np.array([path.filled], np.int32))
            path.filled = -1

    def _store_sums(self, holder: Holder) -> None:
        """Keeps the sums of a prompt's beginning for others, if it ends where they may want them and there is room."""
        path = holder.path
        assert self.retainer is not None
        demand = self.table.demand(Need(sums=self.retainer.to_store(path)))
        if any(demand) and self.room.fits(demand + self.room.promised(apart_from=holder)):
            self._evict_for(demand)
            self.retainer.store(path)
        self.retainer.stop_coming(holder)

    def _evict_for(self, demand: Demand, more: Callable[[], Demand] | None = None) -> None:
        """Drops as few idle chunks, and then sums of others, as leave room for what is needed, which fits.

        more  what is needed besides: what is dropped may leave less of it
        """
        if not self._make_room(demand, more):
            if self.tree is not None:
                self.table.give(self.tree.drop_sums())
            left = demand if more is None else demand + more()
            assert self.table.fits(left), "what is needed was to fit once all that is idle is gone"

    def _make_room(self, demand: Demand, more: Callable[[], Demand] | None = None) -> bool:
        """The same with idle chunks alone. False if they do not suffice: then none is left."""
        while not self.table.fits(needed := demand if more is None else demand + more()):
            tree = self.tree
            if tree is None or not tree.num_idle:
                return False
            # No fewer will do. More may have to go: what each of them has shows when they are gone.
            least = _first(tree.num_idle, lambda count: self.table.fits(needed - self.room.at_best(count)))
            self.table.give(tree.evict(least))
        return True


def _first(most: int, is_enough: Callable[[int], bool]) -> int:
    """The least number from 1 that is enough, `most` if none is: usually a small one."""
    high = 1
    while high < most and not is_enough(high):
        high *= 2
    low = high // 2 + 1
    return min(most, low + bisect.bisect_left(range(low, min(high, most)), True, key=is_enough))
