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
import torch
from numpy.typing import NDArray

from quire.cache.page import PAGE_TOKENS, PagePool
from quire.errors import CacheFullError, ConfigError

if TYPE_CHECKING:
    from quire.cache.codecs import Codec, PageFormat
    from quire.cache.codecs.dense import DenseCodec
    from quire.cache.codecs.sums import SumsCodec
    from quire.cache.retained import Retained
    from quire.cache.sinks import Sinks


ALL_SLOTS = np.uint64(2**PAGE_TOKENS - 1)
"""The mask of a page whose slots are all seen."""

RETAINED_ROWS = 8
"""Rows of the table for each whole chunk that the arena could hold, where retention is on: 1 % of the arena's bytes
beside it, for SmolLM2's dense pages."""

POSITIONS_BYTES = 4 * PAGE_TOKENS
"""Of a page that says where the slots of another stand, int32 [64]."""

Places = tuple[NDArray[np.int32], NDArray[np.intp], NDArray[np.intp]]
"""Pages of rows: row, layer and head of each, of equal length."""


class ChunkTable:
    """The page ids of every chunk. Invariant: a chunk id is either free, or its row holds pages taken from the pool for
    its codec, and its sidecar, if it has one; nobody else takes pages from the pool for long, so that pages can be
    moved: `take` succeeds whenever `fits` says so.

    A row holds L * H pages, until retention drops some of them (`drop`). Two rows may hold the same page, which then
    nobody writes.

    pool             where pages come from
    num_layers       L
    num_heads        H, kv heads
    open_codec       the dense codec of open chunks
    sealed_codec     the codec of full chunks, the first of those given beside it; the same one if none was
    encodes          whether the two differ
    codecs           the formats that pages of a row may have, by kernel id: codecs, and column sums where there are any
    masks            uint64 [capacity, L, H]; bit t says whether slot t of a page is seen; 0 where the row holds no
                     page. None without retention: all are
    sinks            what is kept exact in sidecars; None: no chunk has one
    sums             the format of column sums, which stand in rows of their own; None: there are none
    sidecar_bytes    of one sidecar; 0 where there is none
    pages            int32 [capacity, L, H]; the row of a chunk, valid while the chunk is taken, until the next `take`,
                     which may move pages
    sidecars         int32 [capacity]; where the chunk's sidecar lies, as a page id; -1 without one
    kinds            uint8 [capacity]; kernel id of the chunk's codec
    positions        int32 [capacity, L, H]; page ids of 256 bytes, int32 [64]: where the slots of a page stand in their
                     sequence, where that is not one after the other; -1 for all other pages. Valid ones also for slots
                     that nobody sees
    bases            int32 [capacity]; position of the chunk's first slot where that does not follow from the chunk's
                     place in its path, else -1
    takes            int64 [capacity]; how often the chunk id was taken, or any of the above changed since: a mirror
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
        sums: SumsCodec | None = None,
    ) -> None:
        self.pool = pool
        self.sinks = sinks
        self.sums = sums
        self.sidecar_bytes = 0 if sinks is None else sinks.sidecar_bytes
        if self.sidecar_bytes > pool.slab_bytes:
            raise ConfigError(
                f"a sidecar of {self.sidecar_bytes} bytes must fit a slab of {pool.slab_bytes}; raise cache.memory"
            )
        codecs: tuple[Codec, ...] = (open_codec, *sealed_codecs)
        self.open_codec = open_codec
        self.sealed_codec: Codec = sealed_codecs[0] if sealed_codecs else open_codec
        self.encodes = bool(sealed_codecs)
        formats: tuple[PageFormat, ...] = codecs if sums is None else (*codecs, sums)
        self.codecs = {each.kernel_id: each for each in formats}
        self.sums = sums
        self.pages_per_chunk = num_layers * num_heads
        # Of each codec, by page size: which of the L * H pages of a chunk have it.
        self._places: dict[int, dict[int, NDArray[np.int64]]] = {}
        # Of each codec, bytes of a page, int32 [L * H].
        self._sizes: dict[int, NDArray[np.int32]] = {}
        for each in formats:
            sizes = np.broadcast_to(np.asarray(each.page_bytes, np.int32), (num_layers, num_heads)).reshape(-1)
            self._sizes[each.kernel_id] = sizes
            self._places[each.kernel_id] = {int(size): np.flatnonzero(sizes == size) for size in np.unique(sizes)}
        sizes_used = {size for places in self._places.values() for size in places}
        for size in sizes_used | {self.sidecar_bytes} - {0}:
            pool.available(size)  # refuses a size that cannot be
        # As many as the smallest chunks: bytes run out before ids do. With retention rows may hold few pages, and sums;
        # so many that bytes run out before, and `fits` counts them too.
        most = pool.num_bytes // min(self.chunk_bytes(codec) for codec in codecs)
        self.capacity = most if sums is None else RETAINED_ROWS * most
        self.masks = None if sums is None else np.zeros((self.capacity, num_layers, num_heads), np.uint64)
        self.pages = np.zeros((self.capacity, num_layers, num_heads), np.int32)
        self.sidecars = np.full(self.capacity, -1, np.int32)
        self.kinds = np.zeros(self.capacity, np.uint8)
        self.positions = np.full(self.pages.shape, -1, np.int32)
        self.bases = np.full(self.capacity, -1, np.int32)
        self.takes = np.zeros(self.capacity, np.int64)
        self.num_moved_pages = 0
        self._rows = self.pages.reshape(self.capacity, -1)
        self._free = list(range(self.capacity - 1, -1, -1))

    def take(self, count: int, codec: PageFormat, *, sidecar: bool = False) -> NDArray[np.int32]:
        """`count` new chunks with pages of the codec, int32 [count], the first of them with a sidecar if that is wanted
        and the table has any. Raises CacheFullError and takes nothing if they do not fit.

        Moves pages of other chunks where slabs are sparsely used: only between steps, when no kernel reads; copies on
        a GPU are enqueued on the current stream.
        """
        sidecar = sidecar and count > 0 and self.sinks is not None
        needs = self._needs((codec, count), sidecars=int(sidecar))
        # Of ids there are enough but where rows of sums are more than two for a chunk.
        if not self.pool.fits(needs) or count > len(self._free):
            raise CacheFullError(
                f"{count} chunks of {codec.name}{' and a sidecar' if sidecar else ''} do not fit:"
                f" there is room for {self.available(codec)} in {self.pool.num_bytes} bytes (cache.memory)"
            )
        self._make_room(needs)
        chunks = self._blank(count, codec.kernel_id)
        for page_bytes, places in self._places[codec.kernel_id].items():
            ids = self.pool.take(count * len(places), page_bytes)
            self._rows[chunks[:, None], places] = ids.reshape(count, len(places))
        if sidecar:
            self.sidecars[chunks[0]] = self.pool.take(1, self.sidecar_bytes)[0]
        if self.masks is not None:
            self.masks[chunks] = ALL_SLOTS
        return chunks

    def borrow(self, chunks: NDArray[np.int32]) -> NDArray[np.int32]:
        """New rows that hold the pages and sidecars of other chunks too, int32 [n]."""
        assert self.masks is not None
        for page_bytes, ids in self._ids(chunks).items():
            self.pool.share(ids, page_bytes)
        rows = self._blank(len(chunks), 0)
        assert (self.positions[chunks] < 0).all(), "slots with positions of their own are one path's alone"
        for of in (self.pages, self.masks, self.sidecars, self.kinds):
            of[rows] = of[chunks]
        return rows

    def blank(self, codec: PageFormat) -> int:
        """A new row that holds no pages yet."""
        return int(self._blank(1, codec.kernel_id)[0])

    def fill(self, places: Places) -> None:
        """Takes pages for rows that hold none at these places. Raises CacheFullError and takes nothing if they do not
        fit; may move pages, as `take`.
        """
        assert self.masks is not None and not self.masks[places].any(), "a page would be lost"
        sizes = self._sizes_of(places)
        self._make_room(self._room_for(sizes))
        for page_bytes in np.unique(sizes).tolist():
            at = tuple(part[sizes == page_bytes] for part in places)
            self.pages[at] = self.pool.take(len(at[0]), page_bytes)
        self.masks[places] = ALL_SLOTS
        self.takes[places[0]] += 1

    def drop(self, places: Places) -> None:
        """Gives back the pages at these places, which their rows hold."""
        assert self.masks is not None and self.masks[places].all(), "a page is dropped that is not there"
        ids, sizes = self.pages[places], self._sizes_of(places)
        for page_bytes in np.unique(sizes).tolist():
            self.pool.give(ids[sizes == page_bytes], page_bytes)
        positions = self.positions[places]
        self.pool.give(positions[positions >= 0], POSITIONS_BYTES)
        self.masks[places], self.positions[places] = 0, -1
        self.takes[places[0]] += 1

    def detach(self, places: Places) -> None:
        """Replaces pages that others hold too by copies. Raises CacheFullError, as `fill`."""
        sizes = self._sizes_of(places)
        self._make_room(self._room_for(sizes))
        for page_bytes in np.unique(sizes).tolist():
            at = tuple(part[sizes == page_bytes] for part in places)
            before = self.pages[at]
            after = self.pool.take(len(before), page_bytes)
            self.pool.store(after, page_bytes, self.pool.load(before, page_bytes))
            self.pool.give(before, page_bytes)
            self.pages[at] = after
        self.takes[places[0]] += 1

    def place(self, places: Places, positions: NDArray[np.int32]) -> None:
        """Says where the slots of pages stand, int32 [n, 64]; takes room for it beside pages that have none. Raises
        CacheFullError, as `fill`. Slots that no mask shows need a position too, any there is.
        """
        new = tuple(part[self.positions[places] < 0] for part in places)
        if len(new[0]):
            self._make_room(self._room_for(np.full(len(new[0]), POSITIONS_BYTES, np.int32)))
            self.positions[new] = self.pool.take(len(new[0]), POSITIONS_BYTES)
            self.takes[new[0]] += 1
        if len(positions):
            images = torch.from_numpy(np.ascontiguousarray(positions, np.int32)).view(torch.uint8)
            self.pool.store(self.positions[places], POSITIONS_BYTES, images)

    def is_shared(self, places: Places) -> NDArray[np.bool_]:
        """Whether another row holds the page too."""
        ids, sizes = self.pages[places], self._sizes_of(places)
        found = np.zeros(len(ids), bool)
        for page_bytes in np.unique(sizes).tolist():
            at = sizes == page_bytes
            found[at] = self.pool.holders(ids[at], page_bytes) > 1
        return found

    def give(self, chunks: NDArray[np.int32]) -> None:
        """Gives chunks, their pages and their sidecars back."""
        if not len(chunks):
            return
        for page_bytes, ids in self._ids(chunks).items():
            self.pool.give(ids, page_bytes)
        self.sidecars[chunks] = -1
        if self.masks is not None:
            self.masks[chunks], self.positions[chunks], self.bases[chunks] = 0, -1, -1
        self._free.extend(chunks.tolist())

    def fits(
        self,
        num_sealed: int,
        num_open: int = 0,
        num_sidecars: int = 0,
        num_sums: int = 0,
        pages: NDArray[np.int64] | None = None,
        rows: int = 0,
    ) -> bool:
        """Whether so many chunks more fit, sidecars, rows of sums, pages of sealed chunks, int64 [L, H], and rows
        without pages: then all of them can be taken. A negative number stands for what would be given back before.
        """
        needs = self._needs((self.sealed_codec, num_sealed), (self.open_codec, num_open), sidecars=num_sidecars)
        if num_sums:
            assert self.sums is not None
            needs[self.sums.page_bytes] = needs.get(self.sums.page_bytes, 0) + num_sums * self.pages_per_chunk
        if pages is not None:
            for page_bytes, places in self._places[self.sealed_codec.kernel_id].items():
                needs[page_bytes] = needs.get(page_bytes, 0) + int(pages.reshape(-1)[places].sum())
        # A sealed chunk may get another row, of a path that holds its pages beside the tree.
        rows += num_open + num_sums + num_sealed * (1 if self.sums is None else 2)
        return rows <= len(self._free) and self.pool.fits(needs)

    @property
    def num_free(self) -> int:
        """Rows that are not taken."""
        return len(self._free)

    def available(self, codec: PageFormat) -> int:
        """How many chunks of the codec `take` can give now."""
        most = min((self.pool.num_bytes - self.pool.bytes_out) // self.chunk_bytes(codec), len(self._free))
        if self.pool.fits(self._needs((codec, most))):
            return most
        # Partly filled slabs are in the way.
        return bisect_left(range(1, most + 1), True, key=lambda count: not self.pool.fits(self._needs((codec, count))))

    def page_bytes(self, codec: PageFormat, layer: int, head: int) -> int:
        """Bytes of a chunk's page of that layer and head."""
        return int(np.broadcast_to(codec.page_bytes, self.pages.shape[1:])[layer, head])

    def chunk_bytes(self, codec: PageFormat) -> int:
        """Bytes of a chunk's pages, its sidecar apart."""
        return sum(page_bytes * len(places) for page_bytes, places in self._places[codec.kernel_id].items())

    def bytes_of(self, chunks: NDArray[np.int32]) -> int:
        """Bytes of all pages that rows hold, and of positions beside them; sidecars apart."""
        total = 0
        for kind in np.unique(self.kinds[chunks]).tolist():
            rows = chunks[self.kinds[chunks] == kind]
            held = self._is_held(rows)
            sizes = np.broadcast_to(self._sizes[kind], (len(rows), self.pages_per_chunk))
            total += int(sizes.sum() if held is None else sizes[held].sum())
            total += POSITIONS_BYTES * int((self.positions[rows] >= 0).sum())
        return total

    def page_sizes(self, codec: PageFormat) -> NDArray[np.int32]:
        """Bytes of a chunk's pages, int32 [L, H]."""
        return self._sizes[codec.kernel_id].reshape(self.pages.shape[1:])

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
            ids, holders = np.unique(held.get(page_bytes, np.empty(0, np.int32)), return_counts=True)
            assert np.array_equal(ids, self.pool.ids_out(page_bytes)), (
                f"chunks hold {len(ids)} pages of {page_bytes} bytes that are not the {self.pool.out(page_bytes)} out"
            )
            if len(ids):
                assert np.array_equal(holders, self.pool.holders(ids, page_bytes)), "holders are counted wrongly"

    def _needs(self, *chunks: tuple[PageFormat, int], sidecars: int = 0) -> dict[int, int]:
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
            of_kind = chunks[kinds == kind]
            rows, held = self._rows[of_kind], self._is_held(of_kind)
            for page_bytes, places in self._places[kind].items():
                ids = rows[:, places]
                found.setdefault(page_bytes, []).append(ids.reshape(-1) if held is None else ids[held[:, places]])
        sidecars, positions = self.sidecars[chunks], self.positions[chunks]
        if (sidecars >= 0).any():
            found.setdefault(self.sidecar_bytes, []).append(sidecars[sidecars >= 0])
        if self.masks is not None and (positions >= 0).any():
            found.setdefault(POSITIONS_BYTES, []).append(positions[positions >= 0])
        return {page_bytes: np.concatenate(ids) for page_bytes, ids in found.items()}

    def _follow(self, before: NDArray[np.int32], after: NDArray[np.int32]) -> None:
        """Pages were moved: their chunks get the new ids."""
        order = np.argsort(before)
        before, after = before[order], after[order]
        emptied = np.zeros(self.pool.num_slabs, bool)
        emptied[self.pool.slabs_of(before)] = True
        is_taken = self._is_taken()
        # All pages of an emptied slab were moved, so whoever holds one there is found. Rows of free chunks are stale,
        # and so are places where a row holds no page.
        hits = np.flatnonzero(emptied[self.pool.slabs_of(self._rows)])
        hits = hits[is_taken[hits // self.pages_per_chunk]]
        if self.masks is not None:
            hits = hits[self.masks.reshape(-1)[hits] != 0]
        chunks, places = np.divmod(hits, self.pages_per_chunk)
        holders = np.flatnonzero(self.sidecars >= 0)
        holders = holders[emptied[self.pool.slabs_of(self.sidecars[holders])]]
        placed = np.flatnonzero(self.positions >= 0) if self.masks is not None else np.empty(0, np.intp)
        own = self.positions.reshape(-1)
        placed = placed[emptied[self.pool.slabs_of(own[placed])]]
        found = np.concatenate((self._rows[chunks, places], self.sidecars[holders], own[placed]))
        assert np.array_equal(np.unique(found), before), (
            "a page out of the pool belongs to no chunk: it cannot be moved"
        )
        ids = after[np.searchsorted(before, found)]
        self._rows[chunks, places] = ids[: len(chunks)]
        self.sidecars[holders] = ids[len(chunks) : len(chunks) + len(holders)]
        own[placed] = ids[len(chunks) + len(holders) :]
        self.takes[np.unique(np.concatenate((chunks, holders, placed // self.pages_per_chunk)))] += 1
        self.num_moved_pages += len(before)

    def _blank(self, count: int, kind: int) -> NDArray[np.int32]:
        """Free rows, of a format, that hold nothing."""
        if len(self._free) < count:
            raise CacheFullError(f"all {self.capacity} rows of the chunk table are taken")
        chunks = np.array([self._free.pop() for _ in range(count)], np.int32)
        self.kinds[chunks] = kind
        self.takes[chunks] += 1
        return chunks

    def _make_room(self, needs: dict[int, int]) -> None:
        before, after = self.pool.make_room(needs)
        if len(before):
            self._follow(before, after)

    def _room_for(self, sizes: NDArray[np.int32]) -> dict[int, int]:
        """How many pages there are of each size, which all fit. Raises CacheFullError."""
        values, counts = np.unique(sizes, return_counts=True)
        needs: dict[int, int] = dict(zip(values.tolist(), counts.tolist(), strict=True))
        if not self.pool.fits(needs):
            raise CacheFullError(f"{len(sizes)} pages do not fit in {self.pool.num_bytes} bytes (cache.memory)")
        return needs

    def _sizes_of(self, places: Places) -> NDArray[np.int32]:
        """Bytes of the pages at some places, of rows of one format."""
        rows, layers, heads = places
        if not len(rows):
            return np.empty(0, np.int32)
        kind = int(self.kinds[rows[0]])
        assert (self.kinds[rows] == kind).all(), "rows of several formats"
        return self._sizes[kind].reshape(self.pages.shape[1:])[layers, heads]

    def _is_held(self, chunks: NDArray[np.int32]) -> NDArray[np.bool_] | None:
        """Which pages rows hold, bool [n, L * H]; None: all."""
        return None if self.masks is None else np.not_equal(self.masks[chunks].reshape(len(chunks), -1), 0)

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
    users         live paths that found or computed it, whatever of it they still read
    sums          int32 [end / 64], rows with the attention that every chunk up to the segment's end has had from all
                  rows before that; None where nobody kept them
    is_dropped    whether the tree has let go of it, while paths still read some heads' pages
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
    users: int = 0
    sums: NDArray[np.int32] | None = None
    is_dropped: bool = False

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
    def num_sums(self) -> int:
        """Rows of sums it has."""
        return 0 if self.sums is None else len(self.sums)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def is_idle(self) -> bool:
        """Whether it is only cached: no path reads it, nobody asked to keep it."""
        return not self.pins and not self.locks.any()

    @property
    def may_go(self) -> bool:
        """Whether dropping it frees anything that may be freed: pages of heads that nobody reads."""
        return not self.pins and not self.locks.all()


@dataclass(eq=False)
class Path:
    """What one sequence attends to: the tree from its root to one segment, then chunks of its own, the last of which
    is open.

    tip         the last segment of the tree on the path, locked with all before it; None while it is in no tree
    heads       bool [L, H] by segment: of which heads retention has left it pages; empty before
    num_shared  leading chunks that belong to the tree
    num_tokens  tokens whose keys and values are stored
    num_sealed  leading chunks that are sealed; num_sealed * 64 <= num_tokens
    num_stored  leading chunks that have, or get in this step, the codec of sealed ones; where that is the codec of open
                ones too, all
    filled      open chunk that the step at hand fills and whose place `chunks` has given to the one it is encoded into;
                -1 if there is none
    shared      what `PrefixTree.shared` found, after how many divisions and for how many shared chunks
    stops       with retention, after how many chunks of a prompt its sums are to be kept for others
    is_decided  whether retention has decided what to keep of the prompt
    retained    what it has left of the sealed chunks; None if that is all
    num_gone    chunks that `chunks` has fewer than the sequence since: chunk i of those that are not retained is the
                sequence's chunk i + num_gone
    sums        int32 [num_chunks], rows with the attention that the slots of each chunk have had; empty without
                retention
    """

    tip: Segment | None = None
    heads: dict[Segment, NDArray[np.bool_]] = field(default_factory=dict)
    num_shared: int = 0
    num_tokens: int = 0
    num_sealed: int = 0
    num_stored: int = 0
    num_chunks: int = 0
    filled: int = -1
    shared: tuple[tuple[int, int], tuple[tuple[int, int], ...]] = ((-1, -1), ())
    stops: tuple[int, ...] = ()
    is_decided: bool = False
    retained: Retained | None = None
    num_gone: int = 0
    sums: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
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

    def reads(self) -> list[tuple[Segment, NDArray[np.bool_]]]:
        """The segments of the tree that it uses, from its beginning, and the heads whose pages it reads of each."""
        found = []
        heads = np.ones((), bool)
        for segment in reversed(self.segments):
            # A front that was divided off since is read as what is left of it.
            heads = self.heads.get(segment, heads)
            found.append((segment, heads))
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

    def forget(self, indices: NDArray[np.intp]) -> NDArray[np.int32]:
        """Takes chunks out of it, which hold nothing any more: their rows, and those of their sums."""
        rows = np.concatenate((self.chunks[indices], self.sums[indices]))
        self.sums = np.delete(self.sums, indices)
        self._chunks = np.delete(self.chunks, indices)
        self.num_chunks -= len(indices)
        self.num_gone += len(indices)
        return rows
