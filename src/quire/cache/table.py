"""The chunk table: which pages hold which chunk. Knows chunks and page ids, not sequences or requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.cache.counts import POSITIONS_BYTES, ChunkCounts
from quire.cache.ledger import PAGE_TOKENS, Demand, PageLedger
from quire.errors import CacheFullError

if TYPE_CHECKING:
    from quire.cache.arena import Arena
    from quire.cache.codecs import Codec, PageFormat
    from quire.cache.codecs.dense import DenseCodec
    from quire.cache.codecs.sums import SumsCodec
    from quire.cache.sinks import Sinks

ALL_SLOTS = np.uint64(2**PAGE_TOKENS - 1)
"""The mask of a page whose slots are all seen."""

Places = tuple[NDArray[np.int32], NDArray[np.intp], NDArray[np.intp]]
"""Pages of rows: row, layer and head of each, of equal length."""


class ChunkTable(ChunkCounts):
    """Which pages each chunk holds. Invariant: a row is either free, or it holds pages of the ledger, of its codec's
    sizes, and its sidecar, if it has one. Nobody else takes pages of the ledger for long, so that pages can be moved:
    `take` succeeds whenever `fits` says so.

    A row holds L * H pages, until retention drops some of them (`drop`). Two rows may hold the same page, which then
    nobody writes.

    ledger           where pages come from
    arena            their bytes; only those who compute need it, and a table may be without
    masks            uint64 [capacity, L, H]; bit t says whether slot t of a page is seen; 0 where the row holds no
                     page. None without retention: all are
    pages            int32 [capacity, L, H]; the row of a chunk, valid while the chunk is taken, until the next `take`,
                     which may move pages
    positions        int32 [capacity, L, H]; page ids of 256 bytes, int32 [64]: where the slots of a page stand in their
                     sequence, where that is not one after the other; -1 for all other pages. Valid ones also for slots
                     that nobody sees
    bases            int32 [capacity]; position of the chunk's first slot where that does not follow from the chunk's
                     place in its path, else -1
    num_moved_pages  pages moved so far, to make room in slabs
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
        arena: Arena | None = None,
    ) -> None:
        super().__init__(ledger, num_layers, num_heads, open_codec, *sealed_codecs, sinks=sinks, sums=sums)
        self.ledger = ledger
        self._arena = arena
        # Of each codec, by page size: which of the L * H pages of a chunk have it.
        self._places = {
            kind: {int(size): np.flatnonzero(sizes == size) for size in np.unique(sizes)}
            for kind, sizes in self._sizes.items()
        }
        self.masks = None if sums is None else np.zeros((self.capacity, num_layers, num_heads), np.uint64)
        self.pages = np.zeros((self.capacity, num_layers, num_heads), np.int32)
        self.positions = np.full(self.pages.shape, -1, np.int32)
        self.bases = np.full(self.capacity, -1, np.int32)
        self.num_moved_pages = 0
        self._rows = self.pages.reshape(self.capacity, -1)

    @property
    def arena(self) -> Arena:
        """The bytes of its pages."""
        assert self._arena is not None, "a table without bytes"
        return self._arena

    @property
    def has_bytes(self) -> bool:
        """Whether there is an arena."""
        return self._arena is not None

    def _take(self, count: int, codec: PageFormat, sidecar: bool, demand: Demand) -> NDArray[np.int32]:
        """Moves pages of other chunks where slabs are sparsely used: only between steps, when no kernel reads; copies
        on a GPU are enqueued on the current stream.
        """
        self._make_room(demand)
        chunks = self._blank(count, codec.kernel_id)
        for page_bytes, places in self._places[codec.kernel_id].items():
            ids = self.ledger.take(count * len(places), page_bytes)
            self._rows[chunks[:, None], places] = ids.reshape(count, len(places))
        if sidecar:
            self.sidecars[chunks[0]] = self.ledger.take(1, self.sidecar_bytes)[0]
        if self.masks is not None:
            self.masks[chunks] = ALL_SLOTS
        return chunks

    def borrow(self, chunks: NDArray[np.int32]) -> NDArray[np.int32]:
        """New rows that hold the pages and sidecars of other chunks too, int32 [n]."""
        assert self.masks is not None
        for page_bytes, ids in self._ids(chunks).items():
            self.ledger.share(ids, page_bytes)
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
            self.pages[at] = self.ledger.take(len(at[0]), page_bytes)
        self.masks[places] = ALL_SLOTS
        self.takes[places[0]] += 1

    def drop(self, places: Places) -> None:
        """Gives back the pages at these places, which their rows hold."""
        assert self.masks is not None and self.masks[places].all(), "a page is dropped that is not there"
        ids, sizes = self.pages[places], self._sizes_of(places)
        for page_bytes in np.unique(sizes).tolist():
            self.ledger.give(ids[sizes == page_bytes], page_bytes)
        positions = self.positions[places]
        self.ledger.give(positions[positions >= 0], POSITIONS_BYTES)
        self.masks[places], self.positions[places] = 0, -1
        self.takes[places[0]] += 1

    def detach(self, places: Places) -> None:
        """Replaces pages that others hold too by copies. Raises CacheFullError, as `fill`."""
        sizes = self._sizes_of(places)
        self._make_room(self._room_for(sizes))
        for page_bytes in np.unique(sizes).tolist():
            at = tuple(part[sizes == page_bytes] for part in places)
            before = self.pages[at]
            after = self.ledger.take(len(before), page_bytes)
            if self._arena is not None:
                self._arena.copy(before, after, page_bytes)
            self.ledger.give(before, page_bytes)
            self.pages[at] = after
        self.takes[places[0]] += 1

    def place(self, places: Places, positions: NDArray[np.int32]) -> None:
        """Says where the slots of pages stand, int32 [n, 64]; takes room for it beside pages that have none. Raises
        CacheFullError, as `fill`. Slots that no mask shows need a position too, any there is.
        """
        new = tuple(part[self.positions[places] < 0] for part in places)
        if len(new[0]):
            self._make_room(self._room_for(np.full(len(new[0]), POSITIONS_BYTES, np.int32)))
            self.positions[new] = self.ledger.take(len(new[0]), POSITIONS_BYTES)
            self.takes[new[0]] += 1
        if len(positions) and self._arena is not None:
            images = np.ascontiguousarray(positions, np.int32).view(np.uint8)
            self._arena.store(self.positions[places], POSITIONS_BYTES, images)

    def is_shared(self, places: Places) -> NDArray[np.bool_]:
        """Whether another row holds the page too."""
        ids, sizes = self.pages[places], self._sizes_of(places)
        found = np.zeros(len(ids), bool)
        for page_bytes in np.unique(sizes).tolist():
            at = sizes == page_bytes
            found[at] = self.ledger.holders(ids[at], page_bytes) > 1
        return found

    def give(self, chunks: NDArray[np.int32]) -> None:
        """Gives chunks, their pages and their sidecars back."""
        if not len(chunks):
            return
        for page_bytes, ids in self._ids(chunks).items():
            self.ledger.give(ids, page_bytes)
        self.sidecars[chunks] = -1
        if self.masks is not None:
            self.masks[chunks], self.positions[chunks], self.bases[chunks] = 0, -1, -1
        self._free.extend(chunks.tolist())

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

    def _check_pages(self) -> None:
        held = self._ids(np.flatnonzero(self._is_taken()).astype(np.int32))
        for page_bytes in self.ledger.page_sizes:
            ids, holders = np.unique(held.get(page_bytes, np.empty(0, np.int32)), return_counts=True)
            out = self.ledger.ids_out(page_bytes)
            # Who gave a page up while it is under a hold has none of it.
            out = out[self.ledger.holders(out, page_bytes) > self.ledger.holds(out, page_bytes)]
            assert np.array_equal(ids, out), (
                f"chunks hold {len(ids)} pages of {page_bytes} bytes that are not the {self.ledger.out(page_bytes)} out"
            )
            if len(ids):
                counted = self.ledger.holders(ids, page_bytes) - self.ledger.holds(ids, page_bytes)
                assert np.array_equal(holders, counted), "holders are counted wrongly"

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
        emptied = np.zeros(self.ledger.num_slabs, bool)
        emptied[self.ledger.slabs_of(before)] = True
        is_taken = self._is_taken()
        # All pages of an emptied slab were moved, so whoever holds one there is found. Rows of free chunks are stale,
        # and so are places where a row holds no page.
        hits = np.flatnonzero(emptied[self.ledger.slabs_of(self._rows)])
        hits = hits[is_taken[hits // self.pages_per_chunk]]
        if self.masks is not None:
            hits = hits[self.masks.reshape(-1)[hits] != 0]
        chunks, places = np.divmod(hits, self.pages_per_chunk)
        holders = np.flatnonzero(self.sidecars >= 0)
        holders = holders[emptied[self.ledger.slabs_of(self.sidecars[holders])]]
        placed = np.flatnonzero(self.positions >= 0) if self.masks is not None else np.empty(0, np.intp)
        own = self.positions.reshape(-1)
        placed = placed[emptied[self.ledger.slabs_of(own[placed])]]
        found = np.concatenate((self._rows[chunks, places], self.sidecars[holders], own[placed]))
        assert np.array_equal(np.unique(found), before), "a page belongs to no chunk: it cannot be moved"
        ids = after[np.searchsorted(before, found)]
        self._rows[chunks, places] = ids[: len(chunks)]
        self.sidecars[holders] = ids[len(chunks) : len(chunks) + len(holders)]
        own[placed] = ids[len(chunks) + len(holders) :]
        self.takes[np.unique(np.concatenate((chunks, holders, placed // self.pages_per_chunk)))] += 1
        self.num_moved_pages += len(before)

    def _make_room(self, needs: Sequence[int]) -> None:
        moves = self.ledger.make_room(needs)
        if moves:
            if self._arena is not None:
                for page_bytes, before, after in moves:
                    self._arena.copy(before, after, page_bytes)
            self._follow(*(np.concatenate(ids) for ids in list(zip(*moves, strict=True))[1:]))

    def _room_for(self, sizes: NDArray[np.int32]) -> Demand:
        """How many pages there are of each size, which all fit. Raises CacheFullError."""
        demand = self._of_sizes(sizes)
        if not self.fits(demand):
            raise CacheFullError(f"{len(sizes)} pages do not fit in {self.ledger.num_bytes} bytes (cache.memory)")
        return demand

    def _sizes_of(self, places: Places) -> NDArray[np.int32]:
        """Bytes of the pages at some places, of rows of one format."""
        rows, layers, heads = places
        if not len(rows):
            return np.empty(0, np.int32)
        kind = int(self.kinds[rows[0]])
        assert (self.kinds[rows] == kind).all(), "rows of several formats"
        return self._sizes[kind].reshape(self.shape)[layers, heads]

    def _is_held(self, chunks: NDArray[np.int32]) -> NDArray[np.bool_] | None:
        """Which pages rows hold, bool [n, L * H]; None: all."""
        return None if self.masks is None else np.not_equal(self.masks[chunks].reshape(len(chunks), -1), 0)
