"""Column sums of prefixes: the tree keeps them at boundaries, for prompts that continue from there.

The tree gets the sums of a prompt at two boundaries: where the prompt's last rows begin, which are always computed, and
where the cached part of the prompt ends. If two sequences are about to compute the same prefix, the later
one waits.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from quire.cache.eviction import Eviction
from quire.cache.holder import Holder
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.retention.packing import PathPacker
from quire.cache.segment import NO_ROWS


class SharedSums:
    """The sums that sequences of one tree share.

    stops  by sequence, in the order of admission: numbers of chunks after which the tree gets its sums
    """

    def __init__(self, eviction: Eviction, packer: PathPacker) -> None:
        self.eviction, self.tree, self.table = eviction, eviction.tree, eviction.table
        self.packer = packer
        self.stops: dict[Holder, set[int]] = {}

    def resume(self, holder: Holder, num_taken: int, limit: int) -> None:
        """Sets the stops of a sequence. If its path took cached chunks, copies the sums of the boundary at their end.

        limit  number of chunks before the prompt's last rows
        """
        path = holder.path
        known = sum(count for _, count in self.tree.walk(holder.keys, limit))
        self.stops[holder] = {stop for stop in (known, limit) if stop > path.num_shared}
        if num_taken:
            # The boundary is locked. Without room for a copy, the path takes the sums themselves.
            boundary = self.tree.boundary(path, path.num_shared)
            if self.eviction.make_room(lambda: self.table.demand(sums=len(boundary.attached))):
                path.retention.sums = self.packer.copy_sums(boundary.attached)
            else:
                path.retention.sums = self.tree.attach(boundary, NO_ROWS)

    def must_wait(self, holder: Holder, limit: int) -> bool:
        """Whether an earlier sequence is about to attach sums from which this one can continue."""
        if not (self.stops and holder.reads_cache):
            return False
        awaited = set(holder.keys.first(limit)[holder.path.num_shared :])
        return any(
            other.path.num_tokens < stop * PAGE_TOKENS and other.keys.first(stop)[-1] in awaited
            for other in takewhile(lambda each: each is not holder, self.stops)
            for stop in self.stops[other]
        )

    def attach(self, holder: Holder, make_room: Callable[[Demand], bool]) -> None:
        """At a stop, attaches a copy of the sums of all sealed chunks to their end, if there is room. Removes earlier
        attachments of the path, because a prompt with the same prefix is likely to continue from the end. Attachments
        stay where prompts diverge and at later stops.
        """
        tree, path = self.tree, holder.path
        is_stop = path.num_sealed in self.stops.get(holder, ())
        if not is_stop or not make_room(self.table.demand(sums=path.num_sealed)):
            return
        boundary = tree.boundary(path, path.num_sealed)
        if not len(boundary.attached):
            tree.attach(boundary, self.packer.copy_sums(path.retention.sums[: path.num_sealed]))
            for each in path.segments:
                is_passed = each is not boundary and each.end not in self.stops[holder]
                if is_passed and len(each.children) < 2:
                    self.table.free(tree.attach(each, NO_ROWS))
