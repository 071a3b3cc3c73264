"""The prefix tree: which sealed chunks may be read by a request that starts with the same tokens. This is the plainest
one: it keeps nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from quire.cache.segment import Path, Segment


class PrefixTree:
    """Matches nothing and keeps nothing: every sequence owns its chunks, and they are free when it ends. Invariant: it
    holds no segment.
    """

    def match(self, namespace: Hashable, tokens: Sequence[int]) -> Path:
        """The longest path that holds the first tokens; never more than floor((len(tokens) - 1) / 64) chunks."""
        return Path()

    def publish(self, namespace: Hashable, path: Path, segment: Segment) -> bool:
        """Offers a sealed segment that continues a path; says whether the tree took it. If not, its chunks stay the
        sequence's own.
        """
        return False

    def lock(self, path: Path) -> None:
        """Keeps the path's segments from being evicted, in every layer and head."""
        for segment in path.segments:
            segment.locks += 1

    def unlock(self, path: Path) -> None:
        """Undoes one `lock`."""
        for segment in path.segments:
            segment.locks -= 1
            assert segment.locks.min() >= 0, "unlocked more often than locked"

    def evictable(self) -> Iterator[Segment]:
        """Segments that may be evicted, in the order in which they should be."""
        return iter(())
