"""Reservations of admitted sequences, and whether a demand fits beside them."""

from __future__ import annotations

import bisect

from quire.cache.eviction import Eviction
from quire.cache.holder import Holder
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import Path
from quire.cache.retention.protocol import KeepAll, Newcomer, PromptLimits
from quire.cache.retention.retainer import Retainer
from quire.cache.segment import PrefixMatch


class Reservations:
    """The demand that live sequences have reserved and not yet taken, as a running sum. Every change of a sequence
    calls `update`; `check` adds the sum up again.

    eviction, retention  as in `CacheManager`
    live                 the outstanding demand of each sequence, without what retention expects of undecided ones
    """

    def __init__(self, eviction: Eviction, retention: KeepAll | Retainer) -> None:
        self.eviction = eviction
        self.table = eviction.table
        self.retention = retention
        self.live: dict[Holder, Demand] = {}
        self._outstanding = self.table.zero_demand

    def capacity(self, num_chunks: int = 0, num_firsts: int = 0) -> int:
        """Most sealed chunks of one sequence that fit beside the present chunks and `num_chunks` further ones, of which
        `num_firsts` begin sequences.
        """
        table = self.table

        def is_too_much(count: int) -> bool:
            demand = table.demand(num_chunks + count, int(table.encodes), num_firsts + 1)
            return not table.fits(demand + self.retention.expected(newcomer=(count * PAGE_TOKENS, [])))

        return bisect.bisect_left(range(1, table.capacity + 1), True, key=is_too_much)

    def reserve(self, holder: Holder) -> None:
        """Reserves room for an admitted sequence: for its tokens so far, or for its prompt with retention."""
        limits, reservation = self.retention.limits(holder), holder.path.reservation
        reservation.num_reserved, reservation.num_shareable = limits.num_reserved, limits.num_shareable
        reservation.num_chunks = self.table.num_sealed_for(limits.num_reserved)
        self.live[holder] = self.table.zero_demand
        self.update(holder)

    def update(self, holder: Holder) -> None:
        """Updates the running sum after a change of a sequence's chunks."""
        now = self._outstanding_of(holder.path)
        if now != self.live[holder]:
            self._outstanding = self._outstanding - self.live[holder] + now
            self.live[holder] = now

    def release(self, holder: Holder) -> None:
        """Removes the reservation of a sequence that ends."""
        self._outstanding -= self.live.pop(holder)

    def outstanding(self, apart_from: Holder | None = None, newcomer: Newcomer | None = None) -> Demand:
        """The outstanding demand of all live sequences, or of all but one.

        newcomer  a sequence to be admitted, which may change the demand expected of the others; its own does not count
        """
        total, expected = self._outstanding, self.retention.expected(apart_from, newcomer)
        if expected is not self.table.zero_demand:
            total += expected
        return total if apart_from is None else total - self.live[apart_from]

    def growth(self) -> Demand:
        """Room to grow that an admission must leave: a chunk for every live sequence and one for the new one."""
        table = self.table
        return self.retention.per_chunk * len(self.live) + table.demand(1) if self.live else table.zero_demand

    def fits(self, demand: Demand) -> bool:
        """Whether a demand fits beside all reservations, after eviction."""
        return self.eviction.fits(demand + self.outstanding())

    def admits(self, limits: PromptLimits, found: PrefixMatch) -> bool:
        """Whether there is room for a sequence that finds these chunks in the tree. They will be locked, and cannot be
        evicted.
        """
        table, count = self.table, sum(each for _, each in found)
        num_chunks = max(0, table.num_sealed_for(limits.num_reserved) - count)
        demand = table.demand(num_chunks, table.encodes, not count) + self.growth() + self.eviction.evictable_of(found)
        return self.eviction.fits(demand + self.outstanding(newcomer=(limits.num_reserved, found)))

    def make_room(self, demand: Demand, holder: Holder) -> bool:
        """Makes room for a demand of a sequence, by eviction if needed. If it does not fit beside the reservations of
        others, returns False and evicts nothing.
        """
        beside = demand + self.outstanding(holder)
        if not self.table.fits(beside):
            if not self.eviction.fits(beside):
                return False
            self.eviction.evict_for(lambda: demand)
        return True

    def check(self) -> None:
        """Proves that the running sum is the outstanding demand of all sequences."""
        total = self.table.zero_demand
        for holder, share in self.live.items():
            now = self._outstanding_of(holder.path)
            assert share == now, f"{share} reserved, {now} lacking"
            total += share
        assert total == self._outstanding, f"{self._outstanding} pages reserved, {total} lacking"

    def _outstanding_of(self, path: Path) -> Demand:
        """The part of a reservation that a path has not taken: sealed chunks, an open one, the first one's sidecar."""
        table = self.table
        wants_open = table.encodes and not path.has_open and path.reservation.filled < 0
        return table.demand(path.num_unsealed, wants_open, not path.num_stored)
