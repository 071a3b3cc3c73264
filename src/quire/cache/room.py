"""What fits: chunks that sequences lack and were promised, against what is free or idle. Counts, changes nothing but
what it has counted.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.cache.counts import ChunkCounts, Need
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import Path
from quire.cache.retention.retainer import Retainer
from quire.cache.tree import PrefixTree


class Promised(Protocol):
    """Who is promised room."""

    path: Path


def chunks_of(num_tokens: int) -> int:
    """Chunks that hold so many tokens, the last perhaps open."""
    return -(-num_tokens // PAGE_TOKENS)


class Ahead(NamedTuple):
    """Chunks of a sequence that retention will make smaller: those of its own it will hold until then, all it will have
    then, those of them in the tree that only it reads, and those of its own it holds now.
    """

    to_hold: int
    to_have: int
    alone: int
    held: int = 0


class Found(NamedTuple):
    """Idle chunks that a sequence finds in the tree: whole ones, those of them that begin a sequence, those that are
    idle in some heads alone, and the pages of these, int64 [L, H].
    """

    chunks: int = 0
    starts: int = 0
    num_parted: int = 0
    pages: NDArray[np.int64] | None = None


class Room:
    """The room of one cache, and what live sequences were promised of it: a running sum, told of every change by
    `update`. `check` adds it up again.

    table, tree, retainer  as of `CacheManager`
    """

    def __init__(self, table: ChunkCounts, tree: PrefixTree | None, retainer: Retainer | None) -> None:
        self.table = table
        self.tree = tree
        self.retainer = retainer
        self._promised = table.nothing
        # Of each sequence the tokens it was promised room for, what it lacks of that, and what this takes.
        self._shares: dict[Promised, tuple[int, Need, Demand]] = {}
        self._undecided: dict[Promised, None] = {}  # whose prompts retention has yet to decide on
        self._of_chunk = table.cost(table.sealed_codec)

    def need(self, num_stored: int, has_open: bool, num_tokens: int) -> Need:
        """What a sequence with so many sealed chunks, and perhaps an open one, lacks for so many tokens."""
        if not self.table.encodes:
            return Need(max(0, chunks_of(num_tokens) - num_stored))
        sealed = max(0, num_tokens // PAGE_TOKENS - num_stored)
        in_open = num_tokens > (num_stored + sealed) * PAGE_TOKENS
        has_sidecar = self.table.sinks is not None and sealed > 0 and num_stored == 0
        return Need(sealed, int(in_open and not (has_open and not sealed)), int(has_sidecar))

    def evictable(self, apart_from: Found | None = None) -> Demand:
        """What eviction would give back, but for what a sequence has found."""
        tree = self.tree
        if tree is None:
            return self.table.nothing
        chunks, starts, num_parted, pages = apart_from or Found()
        has_sidecars = self.table.sinks is not None
        # Sums may go wherever they are: what was found with them can be computed.
        found = self._of_chunk * (tree.num_unused - chunks) + self.table.demand(
            Need(0, 0, (tree.num_idle_starts - starts) * has_sidecars, tree.num_sums)
        )
        if tree.num_parted:
            part = tree.part_idle if pages is None else tree.part_idle - pages
            found += self.table.demand_of_pages(part)
            found += self.table.demand(Need(rows=tree.num_idle - tree.num_unused - num_parted))
        return found

    def at_best(self, count: int) -> Demand:
        """What eviction of so many idle chunks gives back at most: any of them may have sums and a sidecar, and pages
        that nobody reads in all heads.
        """
        tree, table = self.tree, self.table
        assert tree is not None
        starts = min(count, tree.num_idle_starts) * (table.sinks is not None)
        return self._of_chunk * count + table.demand(Need(sidecars=starts, sums=tree.num_idle_sums))

    def fits(self, demand: Demand, apart_from: Found | None = None) -> bool:
        """Whether so much is free, or would be after eviction of what is idle but for what a sequence has found."""
        # The first alone would do where it holds, and is quicker.
        return self.table.fits(demand) or self.table.fits(demand - self.evictable(apart_from))

    def capacity(self, num_chunks: int = 0, num_starts: int = 0) -> int:
        """Sealed chunks that one sequence may have beside so many more than there are now, some of which begin
        sequences.
        """
        most, has_open, has_sidecar = self.table.capacity, int(self.table.encodes), int(self.table.sinks is not None)

        def too_many(count: int) -> bool:
            sums = 0 if self.retainer is None else self.retainer.num_sums(count * PAGE_TOKENS)
            need = Need(num_chunks + count, has_open, (num_starts + 1) * has_sidecar, sums)
            return not self.table.fits(self.table.demand(need))

        return bisect.bisect_left(range(1, most + 1), True, key=too_many)

    def promise(self, holder: Promised, tokens: int) -> None:
        """A sequence is admitted, with room for so many tokens."""
        self._shares[holder] = tokens, Need(), self.table.nothing
        if self.retainer is not None:
            self._undecided[holder] = None
        self.update(holder)

    def update(self, holder: Promised) -> None:
        """The chunks of a sequence have changed."""
        tokens, before, demand = self._shares[holder]
        if holder in self._undecided and holder.path.is_decided:
            del self._undecided[holder]
        need = self._share(holder, tokens)
        if need != before:
            now = self.table.demand(need)
            self._promised = self._promised - demand + now
            self._shares[holder] = tokens, need, now

    def forget(self, holder: Promised) -> None:
        """A sequence is there no longer."""
        self._promised -= self._shares.pop(holder)[2]
        self._undecided.pop(holder, None)

    def promised(self, apart_from: Promised | None = None, coming: Ahead | None = None) -> Demand:
        """Chunks that admitted sequences were promised and have not taken.

        coming  one more that is to be admitted
        """
        total = self._promised
        if apart_from is not None:
            total -= self._shares[apart_from][2]
        if self.retainer is not None:
            ahead = [self._ahead(each) for each in self._undecided if each is not apart_from]
            total += self.table.demand(Need(self._at_most(ahead if coming is None else [*ahead, coming])))
        return total

    def check(self) -> None:
        """Proves that the running sum is what sequences were promised now."""
        total = self.table.nothing
        for holder, (tokens, need, _) in self._shares.items():
            assert need == self._share(holder, tokens), f"{need} promised, {self._share(holder, tokens)} lacking"
            total += self.table.demand(need)
        assert total == self._promised, f"{self._promised} pages promised, {total} lacking"
        undecided = {holder for holder in self._shares if not holder.path.is_decided} if self.retainer else set()
        assert self._undecided.keys() == undecided, "who is yet to be decided on is not known"

    def _share(self, holder: Promised, tokens: int) -> Need:
        """What a sequence was promised and has not taken, but for chunks of which retention may leave fewer."""
        path = holder.path
        has_open = path.num_chunks + path.num_gone > path.num_stored
        lacks = self.need(path.num_stored, has_open, tokens)
        wants_open = self.table.encodes and not has_open and path.filled < 0
        # Where the prompt does not fill a chunk, the first one it fills will want its sidecar.
        has_none = self.table.sinks is not None and not path.num_stored
        sealed, sums, rows = lacks.sealed, 0, 0
        if self.retainer is not None and not path.is_decided:
            sums, rows = self.retainer.num_sums(tokens) - len(path.sums), path.num_stored
            sealed = 0
        return Need(sealed, int(wants_open), int(has_none), max(0, sums), rows)

    def _ahead(self, holder: Promised) -> Ahead:
        """What a sequence whose prompt retention has yet to decide on will hold."""
        path = holder.path
        num_chunks, held = path.num_chunks + path.num_gone, path.num_stored - path.num_shared
        sealed = self.need(path.num_stored, num_chunks > path.num_stored, self._shares[holder][0]).sealed
        alone = sum(len(each.chunks) for each in path.segments if not each.pins and each.locks.max() <= 1)
        return Ahead(held + sealed, num_chunks + sealed, alone, held)

    def _at_most(self, ahead: Iterable[Ahead]) -> int:
        """Chunks that sequences will hold at most, beyond those they hold, if one after the other is computed and then
        made as small as most requests are. With an expected ratio of 1, all that they lack together.
        """
        ratio = 1.0 if self.retainer is None else self.retainer.ratio.expected
        most = before = 0.0
        for to_hold, to_have, alone, held in ahead:
            # What was found is copied in part when it is packed; then it is idle, if nobody else reads it.
            after = ratio * to_have - alone
            most = max(most, before + max(to_hold, after) - held)
            before += after - held
        return math.ceil(most)
