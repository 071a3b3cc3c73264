"""Chunks and segments: which pages hold which tokens. Knows tokens and page ids, not requests.

chunk     64 consecutive tokens of a sequence in all layers and heads; its id is a row of the `ChunkTable`
segment   consecutive sealed chunks of one codec, immutable: what the prefix tree shares, tiers move and transports send
path      what a sequence attends to: sealed chunks from the root, then at most one open chunk, which alone is appended
          to
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.page import PAGE_TOKENS, PagePool
from quire.errors import CacheFullError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.cache.codecs import Codec
    from quire.cache.codecs.dense import DenseCodec


class ChunkTable:
    """The page ids of every chunk. Invariant: a chunk id is either free, or its row holds L * H pages taken from the
    pool for its codec.

    pool        where pages come from
    num_layers  L
    num_heads   H, kv heads
    open_codec  the dense codec of open chunks
    codecs      the codecs chunks may have, by kernel id
    pages       int32 [capacity, L, H]; the row of a chunk, valid while the chunk is taken
    kinds       uint8 [capacity]; kernel id of the chunk's codec
    takes       int64 [capacity]; how often the chunk id was taken: a mirror of `pages` sees by it which rows are new
    """

    def __init__(
        self, pool: PagePool, num_layers: int, num_heads: int, open_codec: DenseCodec, *sealed_codecs: Codec
    ) -> None:
        self.pool = pool
        self.open_codec = open_codec
        codecs: tuple[Codec, ...] = (open_codec, *sealed_codecs)
        self.codecs = {codec.kernel_id: codec for codec in codecs}
        self.pages_per_chunk = num_layers * num_heads
        self.capacity = pool.num_bytes // (self.pages_per_chunk * min(codec.page_bytes for codec in codecs))
        self.pages = np.zeros((self.capacity, num_layers, num_heads), np.int32)
        self.kinds = np.zeros(self.capacity, np.uint8)
        self.takes = np.zeros(self.capacity, np.int64)
        self._free = list(range(self.capacity - 1, -1, -1))

    def take(self, count: int, codec: Codec) -> NDArray[np.int32]:
        """`count` new chunks with pages of the codec, int32 [count]. Raises CacheFullError and takes nothing if they do
        not fit.
        """
        if count > len(self._free):
            raise CacheFullError(f"{count} chunks do not fit: {len(self._free)} of {self.capacity} are free")
        pages = self.pool.take(count * self.pages_per_chunk, codec)
        chunks = np.array([self._free.pop() for _ in range(count)], np.int32)
        self.pages[chunks] = pages.reshape(count, *self.pages.shape[1:])
        self.kinds[chunks] = codec.kernel_id
        self.takes[chunks] += 1
        return chunks

    def give(self, chunks: NDArray[np.int32]) -> None:
        """Gives chunks and their pages back."""
        if not len(chunks):
            return
        kinds = self.kinds[chunks]
        for kind in np.unique(kinds):
            self.pool.give(self.pages[chunks[kinds == kind]].reshape(-1), self.codecs[int(kind)])
        self._free.extend(chunks.tolist())

    def available(self, codec: Codec) -> int:
        """How many chunks of the codec `take` can give now."""
        return min(len(self._free), self.pool.available(codec) // self.pages_per_chunk)

    @property
    def num_taken(self) -> int:
        """Chunks taken and not given back."""
        return self.capacity - len(self._free)

    def check(self) -> None:
        """Proves that free chunk ids are distinct and that the pool is whole."""
        assert len(set(self._free)) == len(self._free), "a free chunk is listed twice"
        self.pool.check()


@dataclass(eq=False)
class Segment:
    """Consecutive sealed chunks, a node of the prefix tree. What it holds is never written again; the tree may divide
    it or, for its only reader, lengthen it.

    tokens        int32 [n * 64], the tokens the chunks hold
    chunks        int32 [n], chunk ids
    start         position of the first token, a multiple of 64
    locks         int32 [L, H]: how many live paths read the segment's pages, per layer and head
    name          the tree's number for it
    parent        the segment before it; a root has neither tokens nor a parent
    namespace     of a root: whose segments follow
    children      the segments after it, by the bytes of their first chunk's tokens
    last_use      the tree's count of uses when a path last took or left it
    used_at       seconds, the tree's `now` at that moment
    hits          sequences that found it
    computed      sequences that computed it: the first, and others that were at it at the same time
    pinned_until  seconds; 0 where nobody asked to keep the prefix that ends here
    pins          pinned segments among this one and all that follow it
    """

    tokens: NDArray[np.int32]
    chunks: NDArray[np.int32]
    start: int
    locks: NDArray[np.int32]
    name: int = 0
    parent: Segment | None = None
    namespace: Hashable = None
    children: dict[bytes, Segment] = field(default_factory=dict)
    last_use: int = 0
    used_at: float = 0.0
    hits: int = 0
    computed: int = 1
    pinned_until: float = 0.0
    pins: int = 0

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.chunks) * PAGE_TOKENS, (
            f"{len(self.tokens)} tokens in {len(self.chunks)} chunks"
        )
        assert self.start % PAGE_TOKENS == 0, f"a segment starts on a chunk boundary, not at {self.start}"

    @property
    def key(self) -> bytes:
        """What it is found by among its parent's children: equal tokens, not an equal hash of them."""
        return self.tokens[:PAGE_TOKENS].tobytes()

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def is_idle(self) -> bool:
        """Whether it is only cached: no path reads it, nobody asked to keep it."""
        return not self.pins and not self.locks.any()


@dataclass(eq=False)
class Path:
    """What one sequence attends to: the tree from its root to one segment, then chunks of its own, the last of which
    is open.

    tip         the last segment of the tree on the path, locked with all before it; None while it is in no tree
    num_shared  leading chunks that belong to the tree
    num_tokens  tokens whose keys and values are stored
    num_sealed  leading chunks that are sealed; num_sealed * 64 <= num_tokens
    shared      what `PrefixTree.shared` found, after how many divisions and for how many shared chunks
    """

    tip: Segment | None = None
    num_shared: int = 0
    num_tokens: int = 0
    num_sealed: int = 0
    num_chunks: int = 0
    shared: tuple[tuple[int, int], tuple[tuple[int, int], ...]] = ((-1, -1), ())
    _chunks: NDArray[np.int32] = field(default_factory=lambda: np.empty(8, np.int32))

    @property
    def chunks(self) -> NDArray[np.int32]:
        """Chunk ids in order of position, int32 [num_chunks]: a view that later appends leave valid or replace."""
        return self._chunks[: self.num_chunks]

    @property
    def segments(self) -> list[Segment]:
        """The segments of the tree on the path, from its beginning."""
        found = []
        segment = self.tip
        while segment is not None and segment.parent is not None:
            found.append(segment)
            segment = segment.parent
        return found[::-1]

    @property
    def private(self) -> NDArray[np.int32]:
        """The chunks of this sequence alone."""
        return self.chunks[self.num_shared :]

    def append(self, chunks: NDArray[np.int32]) -> None:
        """Adds chunks at the end."""
        need = self.num_chunks + len(chunks)
        if need > len(self._chunks):
            grown = np.empty(max(need, 2 * len(self._chunks)), np.int32)
            grown[: self.num_chunks] = self.chunks
            self._chunks = grown
        self._chunks[self.num_chunks : need] = chunks
        self.num_chunks = need

    def replace(self, first: int, chunks: NDArray[np.int32]) -> None:
        """Puts other chunks, with the same contents, in the place of those from index `first` on: in a new array, so
        that whoever kept the old one sees that it is old.
        """
        self._chunks = self._chunks.copy()
        self._chunks[first : first + len(chunks)] = chunks
