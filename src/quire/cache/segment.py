"""Segments: consecutive sealed chunks of one codec, immutable. What the prefix tree shares."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.cache.ledger import PAGE_TOKENS


@dataclass(eq=False)
class Segment:
    """Consecutive sealed chunks, a node of the prefix tree. What it holds is never written again; the tree may divide
    it or, for its only reader, lengthen it.

    tokens        int32 [n * 64], the tokens the chunks hold
    keys          of the chunks, [n]
    chunks        int32 [n], chunk ids
    start         position of the first token, a multiple of 64
    users         live paths that found or computed it, whatever of it they still read
    unread        int32 [L, H]: of how many of them retention has left nothing of the segment's pages, per layer and
                  head; None while all of them read all
    sums          int32 [end / 64], rows with the attention that every chunk up to the segment's end has had from all
                  rows before that; None where nobody kept them
    is_dropped    whether the tree has let go of it, while paths still read some heads' pages
    number        the tree's for it: segments are ordered by it
    parent        the segment before it; a root has neither tokens nor a parent
    namespace     of a root: whose segments follow
    children      the segments after it, by the keys of their first chunks
    last_use      the tree's count of uses when a path last took or left it
    used_at       seconds, the tree's `now` at that moment
    hits          sequences that found it
    computed      sequences that computed it: the first, and others that were at it at the same time
    pinned_until  seconds; 0 where nobody asked to keep the prefix that ends here
    pins          pinned segments among this one and all that follow it
    """

    tokens: NDArray[np.int32]
    keys: list[bytes]
    chunks: NDArray[np.int32]
    start: int
    number: int = 0
    parent: Segment | None = None
    namespace: Hashable = None
    children: dict[bytes, Segment] = field(default_factory=dict)
    last_use: int = 0
    used_at: float = 0.0
    hits: int = 0
    computed: int = 1
    pinned_until: float = 0.0
    pins: int = 0
    users: int = 0
    unread: NDArray[np.int32] | None = None
    sums: NDArray[np.int32] | None = None
    is_dropped: bool = False

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.chunks) * PAGE_TOKENS and len(self.keys) == len(self.chunks), (
            f"{len(self.tokens)} tokens and {len(self.keys)} keys in {len(self.chunks)} chunks"
        )
        assert self.start % PAGE_TOKENS == 0, f"a segment starts on a chunk boundary, not at {self.start}"

    @property
    def num_sums(self) -> int:
        """Rows of sums it has."""
        return 0 if self.sums is None else len(self.sums)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def locks(self) -> NDArray[np.int32]:
        """How many live paths read its pages: [L, H], or one number for all of them."""
        return np.asarray(self.users, np.int32) if self.unread is None else self.users - self.unread

    @property
    def may_go(self) -> bool:
        """Whether dropping it frees anything that may be freed: pages of heads that nobody reads."""
        if self.pins:
            return False
        return not self.users if self.unread is None else bool((self.unread == self.users).any())
