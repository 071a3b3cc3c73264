"""Swapping: the private chunks of preempted sequences go to a store and come back."""

from __future__ import annotations

import os

import numpy as np

from quire.cache.eviction import Eviction
from quire.cache.fetching import Fetching
from quire.cache.holder import Holder
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import SwappedPath
from quire.cache.reservations import Reservations
from quire.cache.run import Run, RunIdentity, demand_of, take_rows
from quire.cache.store import put_rows


class Swapping:
    """Moves the private chunks of preempted sequences: open, packed, with column sums. Their shared chunks are found
    again by their keys, near or far.
    """

    def __init__(self, fetching: Fetching, eviction: Eviction, reservations: Reservations) -> None:
        self.fetching, self.eviction, self.reservations = fetching, eviction, reservations
        self.table = fetching.table
        self.tree = fetching.tree
        self.store = fetching.store

    def swap_out(self, holder: Holder) -> None:
        """Puts the private chunks of a preempted sequence into the store, if fetching them is faster than computing
        them again. The caller frees them.
        """
        path, handle = holder.path, os.urandom(16)
        rows = np.concatenate((path.private, path.retention.sums))
        # Before retention decides, a prompt's computed chunks are cached in any case.
        is_undecided = len(path.retention.sums) > 0 and not path.retention.is_decided
        if path.transfer is not None or path.reservation.filled >= 0 or is_undecided or not len(path.private):
            return
        if path.lifetime is not None:  # such chunks stay in the arena alone
            return
        if not self.store.wants([handle])[0]:
            return
        if not self._pays(holder, self.eviction.pages.bytes_of(rows)):
            return
        run = put_rows(self.store, self.eviction.pages, RunIdentity((handle,)), rows, attached=len(path.retention.sums))
        if self.store.find(handle) is run:
            self.fetching.counts.swapped_out += len(path.private)
            holder.swapped = SwappedPath.of(path, run)

    def must_wait(self, holder: Holder) -> bool:
        """Whether shared chunks of a swapped path are in transfer for another sequence. They will be in the arena or,
        if that fails, in the store; now they are in neither.
        """
        swapped = holder.swapped
        if swapped is None or not self.fetching.arriving:
            return False
        near = sum(count for _, count in self.tree.walk(holder.keys, swapped.num_shared))
        return not self.fetching.arriving.isdisjoint(holder.keys.first(swapped.num_shared)[near:])

    def demand(self, holder: Holder) -> Demand | None:
        """The demand of a swapped path in the arena. If a part of it is lost, forgets the path and returns None."""
        swapped = holder.swapped
        if swapped is None:
            return None
        found = list(self.tree.walk(holder.keys, swapped.num_shared))
        near = sum(count for _, count in found)
        num_far = swapped.num_shared - near
        is_there = swapped.run is None or self.store.find(swapped.run.names[0]) is swapped.run
        if not is_there or len(self.fetching.far(holder.keys, near, swapped.num_shared)) < num_far:
            self.forget(holder)
            return None
        demand = self._own(swapped.run) + self.eviction.evictable_of(found)
        return demand + self.table.demand(num_far, sidecars=num_far > 0 and near == 0)

    def swap_in(self, holder: Holder) -> bool:
        """Starts to fetch the swapped path of a sequence, for which there is room. If it does not fit with its holds,
        or the store has meanwhile lost a part of it, forgets the path and returns False.
        """
        swapped, table = holder.swapped, self.eviction.pages
        assert swapped is not None
        path, run, keys, end = swapped.path, swapped.run, holder.keys, swapped.num_shared
        path.priority, path.lifetime = holder.priority, holder.lifetime  # a path of another engine has none
        if end:
            self.tree.extend(path, keys, end, False)
        near = path.num_shared
        far = self.fetching.far(keys, near, end)
        if near + len(far) < end:
            self.tree.release(path)
            self.forget(holder)
            return False
        has_sidecar = len(far) > 0 and near == 0
        demand = self._own(run) + table.demand(len(far), sidecars=has_sidecar)
        self.eviction.evict_for(lambda: demand)
        if far:
            path.append(table.take(len(far), table.sealed_codec, sidecar=has_sidecar))
        holder.path, holder.swapped, own, num_own = path, None, [], 0
        if path.retention.retained is None:
            path.num_sealed = near  # chunks that arrive are published
        if run is not None:
            rows = take_rows(table, run)
            num_own = len(rows) - run.num_attached
            own, path.retention.sums = [(run, rows)], rows[num_own:]
        if far or own:
            self.fetching.start_transfer(keys, path, far, *own)
        for _, rows in own:
            path.append(rows[:num_own])
        while not self.reservations.fits(table.zero_demand):  # slabs with holds cannot be emptied
            if self.fetching.cancel_latest_prefetch():
                continue
            self.fetching.cancel(path)
            table.free(self.tree.release(path))
            return False
        self.fetching.counts.swapped_in += num_own
        return True

    def forget(self, holder: Holder) -> None:
        """Drops the swapped path and ends the prefetch of a waiting sequence."""
        self.fetching.cancel_prefetch(holder)
        if holder.swapped is not None and holder.swapped.run is not None:
            self.store.drop(holder.swapped.run.names)
        holder.swapped = None

    def _own(self, run: Run | None) -> Demand:
        """The demand of a path's own chunks."""
        return self.table.zero_demand if run is None else demand_of(self.eviction.pages, run)

    def _pays(self, holder: Holder, num_bytes: int) -> bool:
        """Whether writing and reading a path takes less time than computing it again. Generated tokens are computed one
        by one once retention has decided.
        """
        path, costs = holder.path, self.fetching.costs
        moving = costs.fetch(2 * num_bytes + self.fetching.backlog())
        if path.retention.is_decided:
            parts = costs.prefill(0, holder.num_prompt), costs.decode(path.num_tokens - holder.num_prompt)
        else:
            start = path.num_shared * PAGE_TOKENS
            parts = costs.prefill(start, path.num_tokens - start), 0.0
        return moving is None or None in parts or moving <= sum(part or 0.0 for part in parts)
