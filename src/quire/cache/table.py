"""The chunk table: the pages of each chunk. Knows chunks and page ids, not sequences or requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Floats, Int32s
from quire.cache.codecs.sums import SumsCodec
from quire.cache.counts import POSITIONS_BYTES, ChunkCounts
from quire.cache.ledger import PAGE_TOKENS, Demand, PageLedger
from quire.errors import CacheFullError

if TYPE_CHECKING:
    from quire.cache.arena import Arena
    from quire.cache.codecs import Codec, PageFormat, SlotMoves
    from quire.cache.codecs.dense import DenseCodec
    from quire.cache.sinks import Sinks

ALL_SLOTS = np.uint64(2**PAGE_TOKENS - 1)
"""The mask of a page with all slots visible."""

PageIndices = tuple[Int32s, NDArray[np.intp], NDArray[np.intp]]
"""Pages by row, layer and head: three arrays of equal length."""


class ChunkTable(ChunkCounts):
    """The pages of each chunk. Invariant: a row is either free, or it holds pages of its codec's sizes and its sidecar,
    if it has one. All pages of the ledger belong to rows or holds, so compaction can move them and `take` succeeds
    whenever `fits` says so.

    A row holds L * H pages, until retention drops some of them (`drop`). Two rows may hold the same page, which is then
    read-only.

    ledger           takes and frees pages
    arena            the bytes of pages
    masks            uint64 [capacity, L, H]; bit t: slot t of the page is visible; 0: the row holds no page
    pages            int32 [capacity, L, H]; page ids of a taken chunk, valid until the next `take`, which may move
                     pages
    positions        int32 [capacity, L, H]; id of a page of 256 bytes, int32 [64], with the positions of a page's slots
                     in their sequence; -1 if they are consecutive. Hidden slots have valid positions too
    bases            int32 [capacity]; position of the chunk's first slot, -1 if it follows from the chunk's place in
                     its path
    takes            int64 [capacity]; how often the row changed. A mirror on a device finds new rows by it
    num_moved_pages  pages moved so far, to make room in slabs
    layouts          `StepLayout` of the extents of complete chunks, by their formats, sidecars and bases
    """

    def __init__(
        self,
        ledger: PageLedger,
        num_layers: int,
        num_heads: int,
        open_codec: DenseCodec,
        *sealed_codecs: Codec,
        sinks: Sinks | None = None,
        sums: SumsCodec | None = None,
        arena: Arena,
    ) -> None:
        super().__init__(ledger, num_layers, num_heads, open_codec, *sealed_codecs, sinks=sinks, sums=sums)
        self.ledger: PageLedger = ledger
        self.arena = arena
        self.pages = np.zeros((self.capacity, *self.shape), np.int32)
        self.masks = np.zeros(self.pages.shape, np.uint64)
        self.positions = np.full(self.pages.shape, -1, np.int32)
        self.bases = np.full(self.capacity, -1, np.int32)
        self.takes = np.zeros(self.capacity, np.int64)
        self.num_moved_pages = 0
        self.layouts: dict[tuple[bytes, ...], Any] = {}

    @property
    def has_gaps(self) -> bool:
        """Whether paths may lack chunks or slots, so that masks and bases are read."""
        return self.sums is not None

    def _take(self, count: int, codec: PageFormat, sidecar: bool, demand: Demand) -> Int32s:
        """May move pages of other chunks. Call it between steps only, when no kernel reads. Copies on a GPU are
        enqueued on the current stream.
        """
        sizes = np.broadcast_to(self.page_sizes(codec), (count, *self.shape))
        ids = self._new_pages(np.append(sizes, [self.sidecar_bytes] * sidecar).astype(np.int32, copy=False))
        chunks = self._blank(count, codec.kernel_id)
        self.pages[chunks] = ids[: sizes.size].reshape(sizes.shape)
        if sidecar:
            self.sidecars[chunks[0]] = ids[-1]
        self.masks[chunks] = ALL_SLOTS
        return chunks

    def _blank(self, count: int, kind: int) -> Int32s:
        chunks = super()._blank(count, kind)
        self.takes[chunks] += 1
        return chunks

    def borrow(self, chunks: Int32s) -> Int32s:
        """Takes rows that share the pages and sidecars of other chunks, int32 [n]."""
        rows = self._blank(len(chunks), 0)
        self.ledger.share(self._pages_of(chunks))
        assert (self.positions[chunks] < 0).all(), "pages with positions of their own belong to one path"
        for of in (self.pages, self.masks, self.sidecars, self.kinds):
            of[rows] = of[chunks]
        return rows

    def copy(self, source: int, target: int) -> None:
        """Copies the pages of a whole chunk to those of another one of the same codec."""
        sizes = self.sizes[self.kinds[source]]
        for page_bytes in np.unique(sizes).tolist():
            at = sizes == page_bytes
            self.arena.copy(self.pages[source][at], self.pages[target][at], page_bytes)

    def move(self, codec: Codec | SumsCodec, moves: SlotMoves) -> None:
        """Overwrites slots of pages of a codec with others."""
        sizes = self.page_sizes(codec)[moves.layers, moves.heads].astype(np.int64)
        with self.arena.held(moves.pages.reshape(-1), np.tile(sizes, 2), changes=True):
            codec.move(self.arena.data, moves)

    def drop(self, page_indices: PageIndices) -> None:
        """Frees some pages."""
        assert self.masks[page_indices].all(), "a page is dropped that is not there"
        positions = self.positions[page_indices]
        self.ledger.free(np.append(self.pages[page_indices], positions[positions >= 0]))
        self.masks[page_indices], self.positions[page_indices] = 0, -1
        self.takes[page_indices[0]] += 1

    def unshare(self, page_indices: PageIndices) -> None:
        """Replaces shared pages by copies. Raises CacheFullError if they do not fit. May move pages, as `take`."""
        rows, layers, heads = page_indices
        sizes = self.sizes[self.kinds[rows], layers, heads]
        after = self._new_pages(sizes)
        before = self.pages[page_indices]
        for page_bytes in {*sizes.tolist()}:
            self.arena.copy(before[sizes == page_bytes], after[sizes == page_bytes], page_bytes)
        self.ledger.free(before)
        self.pages[page_indices] = after
        self.takes[rows] += 1

    def store_positions(self, page_indices: PageIndices, positions: Int32s) -> None:
        """Stores positions of the slots of pages, int32 [n, 64]. Takes pages for them where there are none yet. Raises
        CacheFullError if they do not fit. May move pages, as `take`. Hidden slots need some valid position too.
        """
        new = tuple(part[self.positions[page_indices] < 0] for part in page_indices)
        if len(new[0]):
            self.positions[new] = self._new_pages(np.full(len(new[0]), POSITIONS_BYTES))
            self.takes[new[0]] += 1
        if len(positions):
            images = np.ascontiguousarray(positions, np.int32).view(np.uint8)
            self.arena.store(self.positions[page_indices], POSITIONS_BYTES, images)

    def is_shared(self, page_indices: PageIndices) -> Bools:
        """Whether another row holds the page too, bool [n]."""
        return np.greater(self.ledger.holders(self.pages[page_indices]), 1)

    def take_part(self, kind: int, masks: NDArray[np.uint64], placed: Bools, has_sidecar: bool) -> int:
        """Takes a row with pages of a format where masks, uint64 [L, H], are not 0, and pages for positions where
        `placed`, bool [L, H], says so. Raises CacheFullError and takes nothing if they do not fit. May move pages, as
        `take`.
        """
        held = masks > 0
        beside = [POSITIONS_BYTES] * int(placed.sum()) + [self.sidecar_bytes] * has_sidecar
        sizes = np.append(self.sizes[kind][held], beside).astype(np.int32)
        if not self.fits(self.demand_of_sizes(sizes, num_rows=1)):
            raise CacheFullError(f"{len(sizes)} pages and a row do not fit (cache.memory)")
        ids, row = self._new_pages(sizes), int(self._blank(1, kind)[0])
        self.masks[row] = masks
        self.pages[row][held] = ids[: held.sum()]
        self.positions[row][placed] = ids[held.sum() :][: placed.sum()]
        if has_sidecar:
            self.sidecars[row] = ids[-1]
        return row

    def load_sums(self, rows: Int32s) -> Floats:
        """The column sums in some rows, one after the other, float32 [L, H, n * 64]; 0 where a row has no page."""
        held, ids = self._held_sums(rows)
        found = np.zeros((*held.shape, PAGE_TOKENS), np.float32)
        if len(ids):
            found[held] = self.arena.load(ids, SumsCodec.page_bytes).cpu().numpy().view(np.float32)
        return found.reshape(*self.shape, -1)

    def store_sums(self, rows: Int32s, sums: Floats) -> None:
        """Overwrites the column sums in some rows with [L, H, n * 64], where the rows have pages."""
        held, ids = self._held_sums(rows)
        if len(ids):
            images = sums.reshape(*held.shape, PAGE_TOKENS)[held]
            self.arena.store(ids, SumsCodec.page_bytes, images.view(np.uint8))

    def _held_sums(self, rows: Int32s) -> tuple[Bools, Int32s]:
        """The heads of which rows have pages, bool [L, H, n], and the ids of these pages."""
        held = (self.masks[rows] > 0).transpose(1, 2, 0)
        return held, self.pages[rows].transpose(1, 2, 0)[held]

    def hold(self, chunks: Int32s) -> Int32s:
        """Puts a hold on the pages, sidecars and positions of chunks. Until the ledger's `release` they do not move,
        and outlive the chunks. Returns their ids.
        """
        ids = self._pages_of(chunks)
        self.ledger.hold(ids)
        return ids

    def free(self, chunks: Int32s) -> None:
        """Frees chunks, with their pages and sidecars."""
        if not len(chunks):
            return
        self.ledger.free(self._pages_of(chunks))
        self.masks[chunks] = 0
        self.positions[chunks] = self.bases[chunks] = self.sidecars[chunks] = -1
        self._free.extend(chunks.tolist())

    def bytes_of(self, chunks: Int32s) -> int:
        """Bytes of the pages of rows and of their positions, without sidecars."""
        pages = self.sizes[self.kinds[chunks]][self.masks[chunks] > 0].sum()
        return int(pages) + POSITIONS_BYTES * int((self.positions[chunks] >= 0).sum())

    def _check_pages(self) -> None:
        chunks = np.flatnonzero(self._is_taken()).astype(np.int32)
        held = self.masks[chunks] > 0
        sizes = self.sizes[self.kinds[chunks]][held]
        assert np.array_equal(self.ledger.page_bytes(self.pages[chunks][held]), sizes), "a page has another size"
        ids, holders = np.unique(self._pages_of(chunks), return_counts=True)
        out = self.ledger.allocated_ids()
        # Pages that only holds keep belong to no row.
        of_rows = self.ledger.holders(out) - self.ledger.holds(out)
        assert np.array_equal(ids, out[of_rows > 0]), f"chunks hold {len(ids)} pages that are not the {len(out)} out"
        assert np.array_equal(holders, of_rows[of_rows > 0]), "holders are counted wrongly"

    def _pages_of(self, chunks: Int32s) -> Int32s:
        """The page ids of chunks, with those of sidecars and positions."""
        sidecars, positions = self.sidecars[chunks], self.positions[chunks]
        pages = self.pages[chunks][self.masks[chunks] > 0]
        return np.concatenate((pages, sidecars[sidecars >= 0], positions[positions >= 0]))

    def _follow(self, before: Int32s, after: Int32s) -> None:
        """Puts the new ids of moved pages into the rows that hold them."""
        order = np.argsort(before)
        before, after = before[order], after[order]
        emptied = np.zeros(self.ledger.num_slabs, bool)
        emptied[self.ledger.slabs_of(before)] = True
        is_taken, found = self._is_taken(), []
        for array in (self.pages, self.sidecars, self.positions):
            # All pages of an emptied slab have moved, so every entry with an id there is updated. Entries of free
            # chunks, and entries without a page, are stale.
            ids = array.reshape(-1)
            hits = np.flatnonzero(emptied[self.ledger.slabs_of(ids)])
            rows = hits // (ids.size // self.capacity)
            is_page = is_taken[rows] & (ids[hits] >= 0)
            if array is self.pages:
                is_page &= self.masks.reshape(-1)[hits] != 0
            hits = hits[is_page]
            found.append(ids[hits])
            ids[hits] = after[np.searchsorted(before, ids[hits])]
            self.takes[rows[is_page]] += 1
        assert np.array_equal(np.unique(np.concatenate(found)), before), (
            "a page belongs to no chunk: it cannot be moved"
        )
        self.num_moved_pages += len(before)

    def _new_pages(self, sizes: NDArray[Any]) -> Int32s:
        """Takes one page of each size. Raises CacheFullError if they do not all fit. May move pages."""
        try:
            return self.ledger.take(sizes)
        except CacheFullError:
            demand = self.demand_of_sizes(sizes)
            if not self.ledger.has_room(demand):
                raise
        for page_bytes, before, after in (moves := self.ledger.compact(demand)):
            self.arena.copy(before, after, page_bytes)
        self._follow(*(np.concatenate(ids) for ids in list(zip(*moves, strict=True))[1:]))
        return self.ledger.take(sizes)
