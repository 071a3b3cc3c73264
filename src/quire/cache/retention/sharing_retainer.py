"""Column sums of prefixes: the tree keeps them at boundaries, for prompts that go on from there.

The tree gets the sums of a prompt at two boundaries: where the prompt's last rows begin, which are computed whatever is
cached, and where the cached part of the prompt ends. If two sequences are about to compute the same prefix, the later
one waits.
"""

from __future__ import annotations

from itertools import takewhile

from quire.cache.arrays import Int32s
from quire.cache.eviction import Eviction
from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.retention.decisions import Retention
from quire.cache.retention.retainer import SUMS_ROWS, Retainer
from quire.cache.run import Run
from quire.cache.segment import NO_ROWS


class SharingRetainer(Retainer):
    """Retention by column sums, for sequences that share prefixes."""

    num_beginnings = SUMS_ROWS - 1

    def findable(self, holder: Holder) -> int:
        """Number of chunks up to the last boundary with sums."""
        known = found = 0
        for segment, count in self.tree.walk(holder.keys, self.limit(holder)):
            known += count
            if count == len(segment.chunks) and len(segment.attached):
                found = known
        return found

    def match(self, holder: Holder) -> int:
        """Extends a path over cached chunks up to the last boundary with sums, and copies these sums."""
        taken, path, limit = super().match(holder), holder.path, self.limit(holder)
        known = sum(count for _, count in self.tree.walk(holder.keys, limit))
        self.stops[holder] = {stop for stop in (known, limit) if stop > path.num_shared}
        if taken:
            # The boundary is locked. Without room for a copy, the path takes the sums themselves.
            boundary = self.tree.boundary(path, path.num_shared)
            if self.eviction.make_room(lambda: self.table.demand(sums=len(boundary.attached))):
                path.sums = self._copy(boundary.attached)
            else:
                path.sums = self.tree.attach(boundary, NO_ROWS)
        return taken

    def fetchable(self, keys: ChunkKeys, near: int, far: list[Run]) -> list[Run]:
        """The runs up to the last one with sums attached, from which a prompt goes on."""
        while far and not far[-1].ends_with_sums(keys.first(near + len(far))[-1]):
            far = far[:-1]
        return far

    def must_wait(self, holder: Holder) -> bool:
        """Whether a sequence that came before is about to attach sums from which this one can go on."""
        awaited = set(holder.keys.first(self.limit(holder))[holder.path.num_shared :])
        return holder.reads_cache and any(
            other.path.num_tokens < stop * PAGE_TOKENS and other.keys.first(stop)[-1] in awaited
            for other in takewhile(lambda each: each is not holder, self.stops)
            for stop in self.stops[other]
        )

    def seal(self, holder: Holder) -> Demand:
        """At a stop, sums are attached."""
        super().seal(holder)
        num_sealed = holder.path.num_sealed
        return self.table.demand(sums=num_sealed * (num_sealed in self.stops.get(holder, ())))

    def attach(self, holder: Holder) -> None:
        """Attaches a copy of the sums of all sealed chunks to their end, and removes attachments on the way: a prompt
        with the same prefix is likely to go on from the end. Attachments stay where prompts part and at stops to come.
        """
        tree, path = self.tree, holder.path
        boundary = tree.boundary(path, path.num_sealed)
        if not len(boundary.attached):
            tree.attach(boundary, self._copy(path.sums[: path.num_sealed]))
            for each in path.segments:
                is_passed = each is not boundary and each.end not in self.stops[holder]
                if is_passed and len(each.children) < 2:
                    self.table.free(tree.attach(each, NO_ROWS))

    def _copy(self, rows: Int32s) -> Int32s:
        """New rows with the sums of other rows."""
        copied = self.table.take(len(rows), self.sums)
        self.table.store_sums(copied, self.table.load_sums(rows))
        return copied


def make_retainer(retention: Retention, eviction: Eviction) -> Retainer:
    """The retainer of an engine. A budget shares no sums: the last rows rank its tokens, and every prompt computes its
    own.
    """
    if not eviction.tree.shares or retention.budget is not None:
        return Retainer(retention, eviction)
    return SharingRetainer(retention, eviction)
