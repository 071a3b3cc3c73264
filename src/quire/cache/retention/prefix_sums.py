"""Column sums of the beginnings of prompts: the tree keeps them at boundaries for prompts that begin alike.

Sums of a prompt are kept where its last rows begin, which are computed whatever is cached, and where what the tree has
of the prompt ends. A prompt that begins with the same tokens goes on from there. If two sequences are about to compute
the same beginning, the later one waits.
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
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree


class SharingRetainer(Retainer):
    """Retention by column sums of sequences that share beginnings.

    stops  after how many chunks the tree is yet to get sums of a sequence, by sequence in the order of admission
    """

    def __init__(self, retention: Retention, table: ChunkTable, eviction: Eviction, tree: PrefixTree) -> None:
        super().__init__(retention, table, eviction)
        self.tree: PrefixTree = tree
        self.stops: dict[Holder, set[int]] = {}

    def findable(self, holder: Holder) -> int:
        """Chunks up to the last boundary with sums."""
        return self._find(holder)[1]

    def beside(self, num_tokens: int) -> Demand:
        """With sums of two beginnings that the tree keeps."""
        kept = self.table.demand(sums=(SUMS_ROWS - 1) * self.retention.num_reusable(num_tokens))
        return super().beside(num_tokens) + kept

    def leave(self, holder: Holder) -> None:
        """The tree gets no more sums of the sequence."""
        super().leave(holder)
        self.stops.pop(holder, None)

    def match(self, holder: Holder) -> int:
        """Extends a path over cached chunks to the last boundary with sums, with sums of its own."""
        path, tree = holder.path, self.tree
        known, count, sums = self._find(holder)
        taken = tree.extend(path, holder.keys, count, not holder.num_preemptions)
        self.stops[holder] = {stop for stop in (known, self.limit(holder)) if stop > path.num_shared}
        if taken:
            self._give_sums(path)
            # The path has locked the segment of these sums. Where there is no room for both, it takes them from there.
            if self.eviction.make_room(lambda: self.table.demand(sums=len(sums))):
                path.sums = self._copy(sums)
            else:
                path.sums = tree.attach(tree.boundary(path, len(sums)), NO_ROWS)
        return taken

    def fetchable(self, keys: ChunkKeys, near: int, far: list[Run]) -> list[Run]:
        """Up to the last run with sums attached, from which a prompt goes on."""
        names = keys.first(near + len(far))[near:]
        while far and not far[-1].ends_with_sums(names[len(far) - 1]):
            far = far[:-1]
        return far

    def must_wait(self, holder: Holder) -> bool:
        """Whether a sequence that came before is about to leave sums that this one could begin with."""
        awaited = set(holder.keys.first(self.limit(holder))[holder.path.num_shared :])
        return holder.reads_cache and any(
            other.path.num_tokens < stop * PAGE_TOKENS and other.keys.first(stop)[-1] in awaited
            for other in takewhile(lambda each: each is not holder, self.stops)
            for stop in self.stops[other]
        )

    def slice_end(self, holder: Holder) -> int:
        """Of a prompt, at the next stop."""
        end = super().slice_end(holder)
        stops = (stop * PAGE_TOKENS for stop in self.stops.get(holder, ()))
        return min((stop for stop in stops if stop > holder.path.num_tokens), default=end)

    def seal(self, holder: Holder) -> Demand:
        """Asks for the room of sums where the sequence stops."""
        super().seal(holder)
        num_sealed = holder.path.num_sealed
        return self.table.demand(sums=num_sealed * (num_sealed in self.stops.get(holder, ())))

    def attach(self, holder: Holder) -> None:
        """Attaches a copy of the sums of all sealed chunks to their end, and ends the attachments before it. A prompt
        that goes on from here does not need these, and one that begins alike is likely to go on as well. They stay
        where others part, and where this path has yet to stop.
        """
        tree, path = self.tree, holder.path
        boundary = tree.boundary(path, path.num_sealed)
        if not len(boundary.attached):
            tree.attach(boundary, self._copy(path.sums[: path.num_sealed]))
            for each in path.segments:
                is_passed = each is not boundary and each.end // PAGE_TOKENS not in self.stops[holder]
                if is_passed and len(each.children) < 2:
                    self.table.give(tree.attach(each, NO_ROWS))

    def _find(self, holder: Holder) -> tuple[int, int, Int32s]:
        """The chunks of a prompt that are cached, those of them up to the last boundary with sums, and these sums."""
        known, count, sums = 0, 0, NO_ROWS
        for segment, found in self.tree.walk(holder.keys, self.limit(holder)):
            known += found
            if found == len(segment.chunks) and len(segment.attached):
                count, sums = known, segment.attached
        return known, count, sums

    def _copy(self, rows: Int32s) -> Int32s:
        """New rows with the same sums."""
        copied = self.table.take(len(rows), self.sums)
        self.sums.store(self.table, copied, self.sums.load(self.table, rows))
        return copied


def make_retainer(retention: Retention, table: ChunkTable, eviction: Eviction) -> Retainer:
    """The retainer of an engine. Within a budget nothing is attached to the tree: tokens rank by what the last rows
    look at.
    """
    if eviction.tree is None or retention.budget is not None:
        return Retainer(retention, table, eviction)
    return SharingRetainer(retention, table, eviction, eviction.tree)
