"""Statistics of an arena's bytes."""

from __future__ import annotations

from collections.abc import Iterable

from quire.cache.counts import ChunkCounts
from quire.cache.path import Path
from quire.cache.tree import PrefixTree


class Statistics:
    """Bytes of one arena, from the counts of its table and its tree.

    chunk_bytes  bytes of one sealed chunk's pages
    """

    def __init__(self, table: ChunkCounts, tree: PrefixTree) -> None:
        self.table = table
        self.tree = tree
        self.page_sizes = table.page_sizes(table.sealed_codec)
        self.chunk_bytes = int(self.page_sizes.sum())
        self._sums_bytes = 0 if table.sums is None else table.chunk_bytes(table.sums)
        self._peak = 0

    def note_peak(self) -> None:
        """Updates the peak of the bytes that live sequences use."""
        self._peak = max(self._peak, self.table.ledger.allocated_bytes - self.cached())

    def restart(self) -> None:
        """Resets the peak and the number of evicted chunks."""
        self._peak, self.tree.num_evicted = 0, 0

    def cached(self) -> int:
        """Bytes that only the tree holds."""
        table, tree = self.table, self.tree
        unread = (tree.num_chunks - tree.num_read) * self.chunk_bytes
        if tree.num_parted:
            unread -= int((tree.part_read * self.page_sizes).sum())
        return unread + tree.num_unread_firsts * table.sidecar_bytes + tree.num_attached * self._sums_bytes

    def bytes(self, paths: Iterable[Path], freed: int) -> dict[str, int]:
        """Total = used by live sequences + cached + free. The peak is that of used. Pinned bytes are part of cached and
        used. Saved bytes are those that live sequences would need in addition if they shared nothing.

        paths  the paths of live sequences
        freed  bytes that retention has freed
        """
        table, tree, cached = self.table, self.tree, self.cached()
        read = sum(
            len(segment.chunks) * (1 if heads is None else heads)
            for path in paths
            for segment, heads in path.reads()
            if not segment.is_dropped
        )
        return {
            "bytes_total": table.ledger.num_bytes,
            "bytes_used": table.ledger.allocated_bytes - cached,
            "bytes_cached": cached,
            "bytes_free": table.ledger.num_bytes - table.ledger.allocated_bytes,
            "bytes_peak": self._peak,
            "bytes_pinned": tree.num_pinned * self.chunk_bytes,
            "bytes_saved": max(0, int(((read - tree.num_read - tree.part_read) * self.page_sizes).sum())),
            "bytes_evicted": tree.num_evicted * self.chunk_bytes,
            "bytes_retention_freed": freed,
        }
