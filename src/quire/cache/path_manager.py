"""The chunks of live sequences: their paths grow over cached chunks and over their own, and shrink."""

from __future__ import annotations

import numpy as np

from quire.cache.demotion import Demotion
from quire.cache.holder import Holder
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.path import Path
from quire.cache.reservations import Reservations
from quire.cache.statistics import Statistics


class PathManager:
    """Gives chunks to paths, within their reservations, and records the tokens that are computed."""

    def __init__(self, reservations: Reservations, demotion: Demotion, statistics: Statistics) -> None:
        """Demotion offers sealed chunks to a store. Statistics note the peak."""
        self.reservations, self.demotion, self.statistics = reservations, demotion, statistics
        self.retention, self.eviction = reservations.retention, reservations.eviction
        self.table, self.tree = self.eviction.table, self.eviction.tree

    def match(self, holder: Holder) -> int:
        """Extends a path over cached chunks, if it has none of its own. Returns the number of tokens. Only between
        slices, on a chunk boundary.
        """
        if not (holder.reads_cache and holder.path.is_all_shared):
            return 0
        path, limits = holder.path, self.retention.limits(holder)
        before, most = path.num_tokens, limits.num_reusable
        if limits.needs_sums:
            most = sum(count for _, count in limits.find(self.tree, holder.keys))
        num_found = self.tree.extend(path, holder.keys, most, not holder.num_preemptions)
        self.retention.resume(holder, num_found)
        if num_found:
            self.settle_shared(holder)
        if limits.copies_last:
            self._copy_last(holder)
        return path.num_tokens - before

    def _copy_last(self, holder: Holder) -> None:
        """Takes a copy of the last chunk of a fully cached sequence. Then one token is left to compute, not 64."""
        path, count = holder.path, len(holder.token_ids) // PAGE_TOKENS
        if path.num_shared != count - 1:
            return
        if self._cached_row(holder, count) is None or not self.extend(holder, count * PAGE_TOKENS):
            return
        found = self._cached_row(holder, count)  # growing may have evicted it
        if found is not None:
            self.table.copy(found, int(path.chunks[-1]))
            path.num_tokens = count * PAGE_TOKENS - 1
            self.settle(holder)

    def _cached_row(self, holder: Holder, count: int) -> int | None:
        """The row of the last of a sequence's first `count` chunks in the tree."""
        found = list(self.tree.walk(holder.keys, count))
        if sum(each for _, each in found) < count:
            return None
        segment, length = found[-1]
        return int(segment.chunks[length - 1])

    def settle_shared(self, holder: Holder) -> None:
        """Counts a path's shared chunks, its only ones, as sealed and computed."""
        path = holder.path
        path.num_sealed = path.num_stored = path.num_shared
        path.num_tokens = path.num_shared * PAGE_TOKENS
        self.settle(holder)

    def extend(self, holder: Holder, num_tokens: int) -> bool:
        """Takes chunks for a sequence's first `num_tokens` tokens. If they do not fit beside the reservations of
        others, returns False and changes nothing.
        """
        path, table = holder.path, self.table
        if num_tokens <= path.reservation.free_until:
            return True
        num_sealed = max(0, table.num_sealed_for(num_tokens) - path.num_stored)
        has_open = path.has_open
        # A full open chunk is encoded into a sealed one, and the next open chunk begins.
        wants_open = num_tokens > (path.num_stored + num_sealed) * PAGE_TOKENS and (num_sealed > 0 or not has_open)
        has_sidecar = num_sealed > 0 and path.num_stored == 0
        demand = table.demand(num_sealed, wants_open, has_sidecar)
        beside = self.retention.growth(path, num_tokens, num_sealed)
        if beside is not table.zero_demand:
            demand += beside
        if not any(demand):
            return True
        if not self.reservations.make_room(demand, holder):
            return False
        if num_sealed:
            sealed = table.take(num_sealed, table.sealed_codec, sidecar=has_sidecar)
            if has_open:
                begun, sealed = path.replace(len(path.chunks) - 1, sealed[:1]), sealed[1:]
                if path.num_tokens > path.num_stored * PAGE_TOKENS:
                    path.reservation.filled = int(begun[0])
                else:  # it has no token yet
                    table.free(begun)
            path.append(sealed)
            path.num_stored += num_sealed
        if wants_open:
            path.append(table.take(1, table.open_codec))
        self.retention.extend(path, num_sealed)
        self.settle(holder)
        return True

    def commit(self, holder: Holder, num_tokens: int) -> None:
        """Records that the first `num_tokens` tokens are stored. Seals the chunks they fill and adds them to the tree.
        The step has already encoded them.
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
        if path.reservation.filled >= 0:
            self.table.free(np.array([path.reservation.filled], np.int32))
            path.reservation.filled = -1
        if path.retention.retained is None:
            end = min(path.num_sealed, path.reservation.num_shareable)
            if end > path.num_shared:
                self.table.free(self.tree.publish(path, holder.keys, end))
        self.retention.seal(holder, lambda demand: self.reservations.make_room(demand, holder))
        self.demotion.note(path.tip)
        if self.table.encodes:  # else sealing changes no reservation
            self.reservations.update(holder)

    def settle(self, holder: Holder) -> None:
        """Updates reservation and statistics after a change of a sequence's chunks."""
        holder.path.reservation.free_until = self._free_until(holder.path)
        self.reservations.update(holder)
        self.statistics.note_peak()

    def check(self, path: Path) -> None:
        """Proves that `free_until` of a path is right."""
        assert path.reservation.free_until == self._free_until(path), "what happens next is not known"

    def _free_until(self, path: Path) -> int:
        """See `PathReservation.free_until`."""
        return max(0, path.num_begun * PAGE_TOKENS - (self.table.encodes or path.retention.retained is not None))
