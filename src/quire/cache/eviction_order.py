"""The order in which a prefix tree drops its leaves."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from quire.cache.segment import Segment


class EvictionOrder:
    """The evictable leaves of a tree, by priority and use, and by the end of their lifetimes. Every change after which
    a segment can be evicted is followed by `offer`. Stale entries of the two heaps are skipped.

    lifetime_of  seconds for which a segment stays without use
    """

    def __init__(self, lifetime_of: Callable[[Segment], float]) -> None:
        self.lifetime_of = lifetime_of
        self._leaves: list[tuple[int, int, int, Segment]] = []
        self._ends: list[tuple[float, int, Segment]] = []

    def offer(self, segment: Segment, num_chunks: int) -> None:
        """Adds a segment if it can be evicted.

        num_chunks  chunks of the tree. Stale entries leave only by eviction: a server with spare memory would collect
                    them for ever
        """
        if not segment.is_evictable:
            return
        most = 2 * num_chunks + 64
        if len(self._leaves) > most:
            leaves = {leaf for *_, leaf in self._leaves if leaf.is_evictable}
            self._leaves = [(leaf.priority, leaf.last_use, leaf.number, leaf) for leaf in leaves]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (segment.priority, segment.last_use, segment.number, segment))
        if (end := self._end_of(segment)) < math.inf:
            if len(self._ends) > most:
                ending = {leaf for *_, leaf in self._ends if leaf.is_evictable}
                self._ends = [(self._end_of(leaf), leaf.number, leaf) for leaf in ending]
                heapq.heapify(self._ends)
            heapq.heappush(self._ends, (end, segment.number, segment))

    def oldest(self) -> Segment | None:
        """The leaf to evict next: of the lowest priority, the least recently used. It stays."""
        while self._leaves:
            priority, last_use, _, leaf = self._leaves[0]
            if (leaf.priority, leaf.last_use) == (priority, last_use) and leaf.is_evictable:
                return leaf
            heapq.heappop(self._leaves)
        return None

    def take_ended(self, now: float) -> Segment | None:
        """A leaf whose lifetime is over; None if there is none."""
        while self._ends and self._ends[0][0] <= now:
            _, _, leaf = heapq.heappop(self._ends)
            if leaf.is_evictable and self._end_of(leaf) <= now:
                return leaf
        return None

    @property
    def has_ending(self) -> bool:
        """Whether the lifetime of a leaf ends."""
        return bool(self._ends)

    def _end_of(self, leaf: Segment) -> float:
        return leaf.used_at + self.lifetime_of(leaf)
