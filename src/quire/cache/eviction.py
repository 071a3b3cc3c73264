"""Room by eviction: whether a demand fits once idle chunks of the tree are dropped, and their dropping."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

import numpy as np

from quire.cache.counts import ChunkCounts
from quire.cache.ledger import Demand
from quire.cache.run import Pages
from quire.cache.segment import Segment
from quire.cache.store import Store
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree, Vacated


class Eviction:
    """What eviction from a tree frees in a table. Without a tree there is nothing to evict.

    store  is offered what is evicted
    """

    def __init__(self, table: ChunkCounts, tree: PrefixTree | None, store: Store) -> None:
        self.table = table
        self.tree = tree
        self.store = store
        self._of_chunk = table.cost(table.sealed_codec)
        self._at_most = self._of_chunk + table.demand(sidecars=1)

    def evictable(self) -> Demand:
        """What eviction can free. Attachments may go wherever they are: what was found with them can be computed."""
        tree, table = self.tree, self.table
        if tree is None:
            return table.nothing
        beside = table.demand(sidecars=tree.num_idle_firsts, sums=tree.num_attached)
        found = self._of_chunk * tree.num_unused + beside
        num_parted = tree.num_idle - tree.num_unused
        if num_parted:
            found += table.demand_of_pages(tree.part_idle) + table.demand(rows=num_parted)
        return found

    def evictable_of(self, found: Iterable[tuple[Segment, int]]) -> Demand:
        """What eviction could free of leading chunks of some segments, attachments apart."""
        total = self.table.nothing
        for segment, count in found:
            if not segment.is_idle:
                continue
            if segment.unread is None:
                total = total + self._of_chunk * count + self.table.demand(sidecars=segment.start == 0)
            else:
                pages = count * (segment.unread == segment.users).astype(np.int64)
                total = total + self.table.demand_of_pages(pages) + self.table.demand(rows=count)
        return total

    def fits(self, demand: Demand) -> bool:
        """Whether a demand fits, now or after eviction."""
        # The first alone would do where it holds, and is quicker.
        return self.table.fits(demand) or self.table.fits(demand - self.evictable())

    def make_room(self, demand: Callable[[], Demand]) -> bool:
        """Evicts as few idle chunks as it takes for a demand to fit, which eviction may change. False if all are gone
        and it does not fit.
        """
        tree, table = self.tree, self.table
        while not table.fits(needed := demand()):
            if tree is None or not tree.num_idle:
                return False
            needed -= table.demand(sums=tree.num_attached)

            def is_enough(count: int, needed: Demand = needed) -> bool:
                """At best: each chunk has all its pages, and a sidecar, and with it go all attachments."""
                return table.fits(needed - self._at_most * count)

            # No fewer will do. Usually it is a small number.
            most = 1
            while most < tree.num_idle and not is_enough(most):
                most *= 2
            least = bisect.bisect_left(range(most // 2 + 1, min(most, tree.num_idle)), True, key=is_enough)
            self.evict(most // 2 + 1 + least)
        return True

    def evict(self, count: int) -> None:
        """Evicts `count` idle chunks, or all of them. The store is offered what they hold."""
        assert self.tree is not None
        for vacated in self.tree.vacate(count):
            self._put(vacated)
            self.table.give(vacated.rows)

    def _put(self, vacated: Vacated) -> None:
        """Offers the store what is about to be overwritten."""
        keys, tokens, _, attached = vacated
        if self.store.wants(keys):
            assert isinstance(self.table, ChunkTable), "a table without pages"
            pages = Pages.of(self.table, tuple(keys), vacated.rows, attached=len(attached), tokens=tokens)
            self.store.put(pages.run, pages.pack(range(self.table.shape[0])))
            pages.release()

    def evict_for(self, demand: Callable[[], Demand]) -> None:
        """Makes room for a demand that fits: by eviction of idle chunks, then of all attachments."""
        if not self.make_room(demand):
            if self.tree is not None:
                self.table.give(self.tree.detach_all())
            assert self.table.fits(demand()), "what is needed was to fit once all that is idle is gone"
