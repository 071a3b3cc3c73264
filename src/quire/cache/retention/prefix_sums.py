"""Column sums of prompts' beginnings: attached to boundaries of the tree, and found there by prompts that begin alike.

Sums of a prompt are kept where its last rows begin, which are computed whatever is cached. A prompt that begins with
the same tokens goes on from there. If two sequences are about to compute the same beginning, the later one waits.
"""

from __future__ import annotations

from quire.cache.arrays import Int32s
from quire.cache.codecs.sums import SumsCodec
from quire.cache.eviction import Eviction
from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.segment import NO_ROWS
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree


class PrefixSums:
    """Which sums the tree keeps for others, and who is about to leave some there."""

    def __init__(self, table: ChunkTable, tree: PrefixTree, eviction: Eviction, codec: SumsCodec) -> None:
        self.table = table
        self.tree = tree
        self.eviction = eviction
        self.codec = codec
        # After how many chunks sums of a sequence are to be kept, in the order in which the sequences came.
        self._stops: dict[Holder, tuple[int, ...]] = {}

    def find(self, keys: ChunkKeys, limit: int) -> tuple[int, Int32s]:
        """The longest beginning of a sequence that has sums, `limit` chunks at most: its chunks and the rows."""
        found = 0, NO_ROWS
        for segment, count in self.tree.walk(keys, limit):
            if count == len(segment.chunks) and len(segment.attached):
                found = segment.end // PAGE_TOKENS, segment.attached
        return found

    def match(self, holder: Holder, limit: int) -> int:
        """Extends a path over cached chunks to the last boundary with sums, with sums of its own. Returns the number
        of chunks it took.
        """
        path, tree, keys = holder.path, self.tree, holder.keys
        count, sums = self.find(keys, limit)
        taken = tree.extend(path, keys, count, not holder.num_preemptions)
        # Sums are kept where the last rows begin, and where what the tree has of this prompt ends: others may, too.
        known = sum(each for _, each in tree.walk(keys, limit))
        stops = tuple(sorted({stop for stop in (known, limit) if stop > path.num_shared}))
        if stops:
            self._stops[holder] = stops
        else:
            self.forget(holder)
        if taken:
            self.table.give(path.sums)
            path.sums = NO_ROWS
            # The path has locked whose sums these are. Where there is no room for both, they become its own.
            if self.eviction.make_room(lambda: self.table.demand(sums=len(sums))):
                path.sums = self._copy(sums)
            else:
                path.sums = tree.attach(tree.boundary(path, len(sums)), NO_ROWS)
        return taken

    def must_wait(self, holder: Holder, limit: int) -> bool:
        """Whether another sequence that came before is about to keep sums this one could begin with."""
        keys = holder.keys.first(limit)
        for other, stops in self._stops.items():
            if other is holder:
                return False
            for stop in stops:
                is_ahead = holder.path.num_shared < stop <= limit and stop * PAGE_TOKENS > other.path.num_tokens
                if is_ahead and other.keys.first(stop)[-1] == keys[stop - 1]:
                    return True
        return False

    def stops(self, holder: Holder) -> tuple[int, ...]:
        """After how many chunks of a sequence its sums are to be kept."""
        return self._stops.get(holder, ())

    def attach(self, holder: Holder) -> None:
        """Attaches a copy of the sums of all a path has to its end. Ends the attachments before it, which a prompt that
        goes on from here does not need: who begins alike is likely to go on as well. They stay where others part, and
        where this path has yet to stop.
        """
        tree, path = self.tree, holder.path
        boundary = tree.boundary(path, path.num_sealed)
        if not len(boundary.attached):
            tree.attach(boundary, self._copy(path.sums[: path.num_sealed]))
            for each in path.segments:
                if (
                    each is not boundary
                    and len(each.children) < 2
                    and each.end // PAGE_TOKENS not in self.stops(holder)
                ):
                    self.table.give(tree.attach(each, NO_ROWS))

    def forget(self, holder: Holder) -> None:
        """A sequence keeps no more sums: it has, or it ends, or is preempted."""
        self._stops.pop(holder, None)

    def _copy(self, rows: Int32s) -> Int32s:
        """New rows with the same sums."""
        copied, table = self.table.take(len(rows), self.codec), self.table
        if table.has_bytes:
            pages = table.pages
            table.arena.copy(pages[rows].reshape(-1), pages[copied].reshape(-1), self.codec.page_bytes)
        return copied
