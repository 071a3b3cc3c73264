"""Segments: consecutive, immutable sealed chunks of one codec, which the prefix tree shares."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from quire.cache.arrays import Int32s
from quire.cache.keys import namespace_key
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.run import RunIdentity

NO_ROWS = np.empty(0, np.int32)


@dataclass(eq=False, slots=True)
class Segment:
    """Consecutive sealed chunks, a node of the prefix tree. Its pages are never written again. The tree may divide it
    or, for its only reader, lengthen it.

    tokens        int32 [n * 64], the tokens the chunks hold
    keys          keys of the chunks, [n]
    chunks        int32 [n], chunk ids
    start         index of the first chunk in its sequence
    users         number of live paths that found or computed it, even if they no longer read all its pages
    unread        int32 [L, H]: number of users that no longer read any of its pages, per layer and head; None while
                  all users read all pages
    attached      int32 [m]: the attachment of its end, rows of the chunk table that are evicted with it; may be empty
    is_dropped    whether the tree has dropped it while paths still read some heads' pages
    number        its number in the tree's order
    parent        the segment before it; the root has neither tokens nor a parent
    namespace     the namespace of its tokens
    children      the segments after it, by the keys of their first chunks
    last_use      the tree's use counter when a path last took or left it
    used_at       the tree's `now` at that moment, in seconds
    priority      the highest one of the requests that used it; segments of a lower one are evicted first
    lifetime      the longest one of the requests that used it, in seconds; None: the tree's
    hits          number of sequences that found it
    computed      number of sequences that computed it: the first, and others at the same time
    pinned_until  seconds; 0 unless the prefix that ends here is pinned
    pins          number of pinned segments among this one and its descendants
    """

    tokens: Int32s
    keys: list[bytes]
    chunks: Int32s
    start: int
    number: int = 0
    parent: Segment | None = None
    namespace: Hashable = None
    children: dict[bytes, Segment] = field(default_factory=dict)
    last_use: int = 0
    used_at: float = 0.0
    priority: int = 0
    lifetime: float | None = None
    hits: int = 0
    computed: int = 1
    pinned_until: float = 0.0
    pins: int = 0
    users: int = 0
    unread: Int32s | None = None
    attached: Int32s = field(default_factory=lambda: NO_ROWS)
    is_dropped: bool = False

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.chunks) * PAGE_TOKENS and len(self.keys) == len(self.chunks), (
            f"{len(self.tokens)} tokens and {len(self.keys)} keys in {len(self.chunks)} chunks"
        )

    @property
    def end(self) -> int:
        """Index after the last chunk."""
        return self.start + len(self.chunks)

    @property
    def branch(self) -> list[Segment]:
        """The segments from the first of its sequence to this one."""
        found, segment = [], self
        while segment.parent is not None:
            found.append(segment)
            segment = segment.parent
        return found[::-1]

    def has_attachment(self, count: int) -> bool:
        """Whether it has exactly `count` chunks and their end has an attachment."""
        return count == len(self.chunks) and len(self.attached) > 0

    @property
    def rows(self) -> Int32s:
        """The rows of its chunks, then of its attachment."""
        return np.concatenate((self.chunks, self.attached)) if len(self.attached) else self.chunks

    @property
    def identity(self) -> RunIdentity:
        """Its chunks, as a run names them."""
        above = self.parent.keys if self.parent is not None else []
        parent = above[-1] if above else namespace_key(self.namespace)
        return RunIdentity(tuple(self.keys), self.tokens, self.namespace, self.start, parent)

    @property
    def locks(self) -> Int32s:
        """Number of live paths that read its pages: [L, H], or one number for all pages."""
        return np.asarray(self.users, np.int32) if self.unread is None else self.users - self.unread

    @property
    def most_locks(self) -> int:
        """Number of live paths that read the page with the most readers."""
        return self.users if self.unread is None else int(self.locks.max())

    @property
    def is_idle(self) -> bool:
        """Whether it is not pinned and has unread pages, which dropping it would free."""
        if self.pins:
            return False
        return not self.users if self.unread is None else bool((self.unread == self.users).any())

    @property
    def is_evictable(self) -> bool:
        """Whether it is the next segment of its branch to drop."""
        return not self.children and self.parent is not None and not self.is_dropped and self.is_idle


PrefixMatch = list[tuple[Segment, int]]
"""Segments that hold leading chunks of a sequence, and the number of these chunks in each."""
