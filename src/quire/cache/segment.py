"""Chunks and segments: which pages hold which tokens. Knows tokens and page ids, not requests.

chunk     64 consecutive tokens of a sequence in all layers and heads; its id is a row of the `ChunkTable`
segment   consecutive sealed chunks of one codec, immutable: what the prefix tree shares, tiers move and transports send
path      what a sequence attends to: sealed chunks from the root, then at most one open chunk, which alone is appended
          to
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.page import PAGE_TOKENS, PagePool
from quire.errors import CacheFullError, ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.cache.codecs import Codec
    from quire.cache.codecs.dense import DenseCodec
    from quire.cache.sinks import Sinks


class ChunkTable:
    """The page ids of every chunk. Invariant: a chunk id is either free, or its row holds L * H pages taken from the
    pool for its codec, and its sidecar, if it has one; nobody else takes pages from the pool for long, so that pages
    can be moved: `take` succeeds whenever `fits` says so.

    pool             where pages come from
    num_layers       L
    num_heads        H, kv heads
    open_codec       the dense codec of open chunks
    sealed_codec     the codec of full chunks, the first of those given beside it; the same one if none was
    encodes          whether the two differ
    codecs           the codecs chunks may have, by kernel id
    sinks            what is kept exact in sidecars; None: no chunk has one
    sidecar_bytes    of one sidecar; 0 where there is none
    pages            int32 [capacity, L, H]; the row of a chunk, valid while the chunk is taken, until the next `take`,
                     which may move pages
    sidecars         int32 [capacity]; where the chunk's sidecar lies, as a page id; -1 without one
    kinds            uint8 [capacity]; kernel id of the chunk's codec
    takes            int64 [capacity]; how often the chunk id was taken or its pages were moved: a mirror of `pages`
                     sees by it which rows are new
    num_moved_pages  pages moved so far, to make room in slabs
    Raises ConfigError if a page or a sidecar does not fit a slab of the pool.
    """

    def __init__(
        self,
        pool: PagePool,
        num_layers: int,
        num_heads: int,
        open_codec: DenseCodec,
        *sealed_codecs: Codec,
        sinks: Sinks | None = None,
    ) -> None:
        self.pool = pool
        self.sinks = sinks
        self.sidecar_bytes = 0 if sinks is None else sinks.sidecar_bytes
        if self.sidecar_bytes > pool.slab_bytes:
            raise ConfigError(
                f"a sidecar of {self.sidecar_bytes} bytes must fit a slab of {pool.slab_bytes}; raise cache.memory"
            )
        codecs: tuple[Codec, ...] = (open_codec, *sealed_codecs)
        self.open_codec = open_codec
        self.sealed_codec: Codec = sealed_codecs[0] if sealed_codecs else open_codec
        self.encodes = bool(sealed_codecs)
        self.codecs = {codec.kernel_id: codec for codec in codecs}
        self.pages_per_chunk = num_layers * num_heads
        # Of each codec, by page size: which of the L * H pages of a chunk have it.
        self._places: dict[int, dict[int, NDArray[np.int64]]] = {}
        for codec in codecs:
            sizes = np.broadcast_to(np.asarray(codec.page_bytes), (num_layers, num_heads)).reshape(-1)
            self._places[codec.kernel_id] = {int(size): np.flatnonzero(sizes == size) for size in np.unique(sizes)}
        sizes_used = {size for places in self._places.values() for size in places}
        for size in sizes_used | {self.sidecar_bytes} - {0}:
            pool.available(size)  # refuses a size that cannot be
        # As many as the smallest chunks: bytes run out before ids do.
        self.capacity = pool.num_bytes // min(self.chunk_bytes(codec) for codec in codecs)
        self.pages = np.zeros((self.capacity, num_layers, num_heads), np.int32)
        self.sidecars = np.full(self.capacity, -1, np.int32)
        self.kinds = np.zeros(self.capacity, np.uint8)
        self.takes = np.zeros(self.capacity, np.int64)
        self.num_moved_pages = 0
        self._rows = self.pages.reshape(self.capacity, -1)
        self._free = list(range(self.capacity - 1, -1, -1))

    def take(self, count: int, codec: Codec, *, sidecar: bool = False) -> NDArray[np.int32]:
        """`count` new chunks with pages of the codec, int32 [count], the first of them with a sidecar if that is wanted
        and the table has any. Raises CacheFullError and takes nothing if they do not fit.

        Moves pages of other chunks where slabs are sparsely used: only between steps, when no kernel reads; copies on
        a GPU are enqueued on the current stream.
        """
        sidecar = sidecar and count > 0 and self.sinks is not None
        needs = self._needs((codec, count), sidecars=int(sidecar))
        if not self.pool.fits(needs):
            raise CacheFullError(
                f"{count} chunks of {codec.name}{' and a sidecar' if sidecar else ''} do not fit:"
                f" there is room for {self.available(codec)} in {self.pool.num_bytes} bytes"
            )
        before, after = self.pool.make_room(needs)
        if len(before):
            self._follow(before, after)
        chunks = np.array([self._free.pop() for _ in range(count)], np.int32)
        for page_bytes, places in self._places[codec.kernel_id].items():
            ids = self.pool.take(count * len(places), page_bytes)
            self._rows[chunks[:, None], places] = ids.reshape(count, len(places))
        if sidecar:
            self.sidecars[chunks[0]] = self.pool.take(1, self.sidecar_bytes)[0]
        self.kinds[chunks] = codec.kernel_id
        self.takes[chunks] += 1
        return chunks

    def give(self, chunks: NDArray[np.int32]) -> None:
        """Gives chunks, their pages and their sidecars back."""
        if not len(chunks):
            return
        for page_bytes, ids in self._ids(chunks).items():
            self.pool.give(ids, page_bytes)
        self.sidecars[chunks] = -1
        self._free.extend(chunks.tolist())

    def fits(self, num_sealed: int, num_open: int = 0, num_sidecars: int = 0) -> bool:
        """Whether so many chunks more fit, and sidecars: then `take` can give all of them. A negative number stands for
        chunks, or sidecars, that would be given back before.
        """
        needs = self._needs((self.sealed_codec, num_sealed), (self.open_codec, num_open), sidecars=num_sidecars)
        return self.pool.fits(needs)

    def available(self, codec: Codec) -> int:
        """How many chunks of the codec `take` can give now."""
        most = (self.pool.num_bytes - self.pool.bytes_out) // self.chunk_bytes(codec)
        if self.pool.fits(self._needs((codec, most))):
            return most
        # Partly filled slabs are in the way.
        return bisect_left(range(1, most + 1), True, key=lambda count: not self.pool.fits(self._needs((codec, count))))

    def page_bytes(self, codec: Codec, layer: int, head: int) -> int:
        """Bytes of a chunk's page of that layer and head."""
        return int(np.broadcast_to(codec.page_bytes, self.pages.shape[1:])[layer, head])

    def chunk_bytes(self, codec: Codec) -> int:
        """Bytes of a chunk's pages, its sidecar apart."""
        return sum(page_bytes * len(places) for page_bytes, places in self._places[codec.kernel_id].items())

    @property
    def num_taken(self) -> int:
        """Chunks taken and not given back."""
        return self.capacity - len(self._free)

    def check(self) -> None:
        """Proves the invariant, and that the pool is whole."""
        assert len(set(self._free)) == len(self._free), "a free chunk is listed twice"
        assert (self.sidecars[self._free] == -1).all(), "a free chunk has a sidecar"
        self.pool.check()
        held = self._ids(np.flatnonzero(self._is_taken()).astype(np.int32))
        for page_bytes in self.pool.page_sizes:
            ids = np.sort(held.get(page_bytes, np.empty(0, np.int32)))
            assert np.array_equal(ids, self.pool.ids_out(page_bytes)), (
                f"chunks hold {len(ids)} pages of {page_bytes} bytes that are not the {self.pool.out(page_bytes)} out"
            )

    def _needs(self, *chunks: tuple[Codec, int], sidecars: int = 0) -> dict[int, int]:
        """Pages of so many chunks of each codec, by page size."""
        needs = {self.sidecar_bytes: sidecars} if self.sidecar_bytes else {}
        for codec, count in chunks:
            for page_bytes, places in self._places[codec.kernel_id].items():
                needs[page_bytes] = needs.get(page_bytes, 0) + count * len(places)
        return needs

    def _ids(self, chunks: NDArray[np.int32]) -> dict[int, NDArray[np.int32]]:
        """The page ids of chunks, sidecars among them, by page size."""
        found: dict[int, list[NDArray[np.int32]]] = {}
        kinds = self.kinds[chunks]
        for kind in np.unique(kinds).tolist():
            rows = self._rows[chunks[kinds == kind]]
            for page_bytes, places in self._places[kind].items():
                found.setdefault(page_bytes, []).append(rows[:, places].reshape(-1))
        sidecars = self.sidecars[chunks]
        if (sidecars >= 0).any():
            found.setdefault(self.sidecar_bytes, []).append(sidecars[sidecars >= 0])
        return {page_bytes: np.concatenate(ids) for page_bytes, ids in found.items()}

    def _follow(self, before: NDArray[np.int32], after: NDArray[np.int32]) -> None:
        """Pages were moved: their chunks get the new ids."""
        order = np.argsort(before)
        before, after = before[order], after[order]
        emptied = np.zeros(self.pool.num_slabs, bool)
        emptied[self.pool.slabs_of(before)] = True
        is_taken = self._is_taken()
        # All pages of an emptied slab were moved, so whoever holds one there is found. Rows of free chunks are stale.
        hits = np.flatnonzero(emptied[self.pool.slabs_of(self._rows)])
        chunks, places = np.divmod(hits[is_taken[hits // self.pages_per_chunk]], self.pages_per_chunk)
        holders = np.flatnonzero(self.sidecars >= 0)
        holders = holders[emptied[self.pool.slabs_of(self.sidecars[holders])]]
        found = np.concatenate((self._rows[chunks, places], self.sidecars[holders]))
        assert np.array_equal(np.sort(found), before), "a page out of the pool belongs to no chunk: it cannot be moved"
        ids = after[np.searchsorted(before, found)]
        self._rows[chunks, places] = ids[: len(chunks)]
        self.sidecars[holders] = ids[len(chunks) :]
        self.takes[np.unique(np.concatenate((chunks, holders)))] += 1
        self.num_moved_pages += len(before)

    def _is_taken(self) -> NDArray[np.bool_]:
        is_taken = np.ones(self.capacity, bool)
        is_taken[self._free] = False
        return is_taken


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
    num_stored  leading chunks that have, or get in this step, the codec of sealed ones; where that is the codec of open
                ones too, all
    filled      open chunk that the step at hand fills and whose place `chunks` has given to the one it is encoded into;
                -1 if there is none
    shared      what `PrefixTree.shared` found, after how many divisions and for how many shared chunks
    """

    tip: Segment | None = None
    num_shared: int = 0
    num_tokens: int = 0
    num_sealed: int = 0
    num_stored: int = 0
    num_chunks: int = 0
    filled: int = -1
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
