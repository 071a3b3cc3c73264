"""Eviction: whether a demand fits once idle chunks are evicted, and their eviction."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.cache.counts import ChunkCounts
from quire.cache.demotion import Demotion
from quire.cache.ledger import Demand
from quire.cache.segment import Segment
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree


class Eviction:
    """Evicts chunks of a tree, to make room in a table.

    demotion  offers the evicted chunks to a store
    """

    def __init__(self, table: ChunkCounts, tree: PrefixTree, demotion: Demotion) -> None:
        self.table = table
        self.tree = tree
        self.demotion = demotion
        self._of_chunk = table.cost(table.sealed_codec)
        self._at_most = self._of_chunk + table.demand(sidecars=1)

    @property
    def pages(self) -> ChunkTable:
        """The table, where pages are moved."""
        assert isinstance(self.table, ChunkTable), "a table without pages"
        return self.table

    def evictable(self) -> Demand:
        """The demand that evicting everything idle would free. All attachments count, also those of locked segments:
        they can be computed again.
        """
        tree, table = self.tree, self.table
        beside = table.demand(sidecars=tree.num_idle_firsts, sums=tree.num_attached, rows=tree.num_part_idle)
        found = self._of_chunk * tree.num_unused + beside
        if tree.num_part_idle:
            found += table.demand_of_pages(tree.part_idle)
        return found

    def evictable_of(self, found: Iterable[tuple[Segment, int]]) -> Demand:
        """The part of `evictable` in the first chunks of some segments, without attachments."""
        total = self.table.zero_demand
        for segment, count in found:
            if not segment.is_idle:
                continue
            if segment.unread is None:
                total += self._of_chunk * count + self.table.demand(sidecars=segment.start == 0)
            else:
                num_pages = count * (segment.unread == segment.users)
                total += self.table.demand_of_pages(num_pages, count)
        return total

    def fits(self, demand: Demand) -> bool:
        """Whether a demand fits after eviction."""
        return self.table.fits(demand - self.evictable())

    def make_room(self, demand: Callable[[], Demand]) -> bool:
        """Evicts as few idle chunks as needed until a demand fits. Eviction may change the demand. False if it does not
        fit after all evictions.
        """
        tree, table = self.tree, self.table
        while not table.fits(needed := demand()):
            if not tree.num_idle:
                return False
            # In the best case: all pages of each chunk, a sidecar each, and all attachments.
            needed -= table.demand(sums=tree.num_attached)
            self.evict(max(1, table.shortage(needed, self._at_most)))
        return True

    def evict(self, count: int) -> None:
        """Evicts `count` idle chunks, or all of them. Those that the store lacks are offered to it."""
        for dropped_chunks in self.tree.evict(count):
            if self.demotion.is_on:
                self.demotion.offer_evicted(dropped_chunks)
            self.table.free(dropped_chunks.rows)

    def evict_for(self, demand: Callable[[], Demand]) -> None:
        """Makes room for a demand that is known to fit: evicts idle chunks, then all attachments."""
        if not self.make_room(demand):
            self.table.free(self.tree.detach_all())
            assert self.table.fits(demand()), "the demand does not fit after all evictions"
