"""Packs the tokens that a path keeps under retention into fewer pages. Knows the chunk table, the tree, paths and
eviction; neither the rules of policies nor requests.

A sealed row of a path holds a page or nothing of every layer and head. A page's mask says which of its slots count.
Dropped tokens leave holes, which other tokens of the same head fill:

    pages of a head = ceil(tokens it keeps / 64)

Packing moves few slots; its cost is negligible beside the 64 steps between two seals. The order of slots is free,
because dense keys are stored rotated and encoded pages carry positions. The sums of a token move with it.

Tokens move only between pages that this path alone holds. A page that others may read stays in place (`in_place`) if
this takes fewer bytes than a copy. It is then read through its mask.

Within a budget, only distant rows count towards a token's score. So a head that keeps the whole last sealed chunk
leaves it in its own row until the next chunk is sealed (`holds_last`): the row number then gives the distance.

Source: FastGen, arXiv 2310.01801, algorithm 2, which keeps full-length buffers; its text frees no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Int32s, Int64s
from quire.cache.codecs import SlotMoves
from quire.cache.eviction import Eviction
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import Path
from quire.cache.retention.retained import RetainedTokens, SlotIndices, words_of
from quire.cache.segment import NO_ROWS
from quire.cache.table import ChunkTable, PageIndices


class PathPacker:
    """Adjusts the pages of paths, and their rows of sums, to the tokens that retention keeps."""

    def __init__(self, eviction: Eviction) -> None:
        table = eviction.pages
        assert table.sums is not None, "the table has no room for sums"
        self.table, self.sums = table, table.sums
        self.eviction, self.tree = eviction, eviction.tree

    def extend(self, path: Path, num_sealed: int) -> None:
        """Gives new chunks of a path rows of zero sums. If retention has decided, prepares the chunks, of which
        `num_sealed` will be sealed: takes pages for positions now, because there might be no room when a chunk is
        packed.
        """
        table, kept, retained = self.table, path.retention, path.retention.retained
        missing, rows = len(path.chunks) - len(kept.sums), NO_ROWS
        if missing and kept.needs_sums:
            rows = table.take(missing, self.sums)
            table.store_sums(rows, np.zeros((*table.shape, missing * PAGE_TOKENS), np.float32))
            kept.sums = np.append(kept.sums, rows)
        if retained is None:
            return
        if num_sealed and table.encodes:
            chunk = path.num_stored - 1
            page_indices = page_indices_of(path.chunks[chunk - kept.num_dropped :], retained.is_packed[..., None])
            positions = np.arange(PAGE_TOKENS, dtype=np.int32) + chunk * PAGE_TOKENS
            table.store_positions(page_indices, np.tile(positions, (len(page_indices[0]), 1)))
        drop(table, rows, ~retained.has_sums[..., None])

    def copy_sums(self, rows: Int32s) -> Int32s:
        """New rows with the sums of other rows."""
        copied = self.table.take(len(rows), self.sums)
        self.table.store_sums(copied, self.table.load_sums(rows))
        return copied

    def free_sums(self, path: Path) -> None:
        """Frees the sums of a path."""
        self.table.free(path.retention.sums)
        path.retention.sums = NO_ROWS

    def pack(self, path: Path, retained: RetainedTokens, num_pages: Int64s) -> int:
        """Packs the kept tokens of `num_pages` pages, [L, H]. Returns the bytes that this frees."""
        self._drop_unread_pages(path, retained)
        return self._pack(path, retained, num_pages)

    def shrink(self, path: Path, retained: RetainedTokens, num_pages: Int64s, fits: Callable[[Demand], bool]) -> int:
        """Like `pack`, for a path that so far reads shared chunks. Its tokens move into pages of its own, except where
        copies of shared pages would take more bytes than they save, or do not fit.
        """
        stuck = retained.leave_in_place(path.segments)
        if not fits(self._copies(stuck)):
            retained.in_place |= stuck
        path.replace(0, self.table.borrow(path.chunks[: path.num_shared]))
        path.num_shared = 0
        self._drop_unread_pages(path, retained)  # now, so that eviction frees these pages
        # Eviction may make copies unnecessary: a page that the tree drops is the path's own.
        self.eviction.evict_for(lambda: self._copies(self._to_own(path, retained)))
        self.table.unshare(page_indices_of(path.chunks, self._to_own(path, retained)))
        drop(self.table, path.retention.sums, ~retained.has_sums[..., None])
        return self._pack(path, retained, num_pages)

    def _pack(self, path: Path, retained: RetainedTokens, num_pages: Int64s) -> int:
        pack(self.table, path, retained)
        sizes = self.table.page_sizes(self.table.sealed_codec)
        return int(((num_pages - retained.num_pages) * sizes).sum())

    def _copies(self, pages: NDArray[Any]) -> Demand:
        """The demand of copies of sealed pages, bool [L, H, rows], with room for the positions of all rows."""
        table = self.table
        return table.demand_of_pages(pages.sum(-1)) + table.demand(sums=pages.shape[-1] * table.encodes)

    def _to_own(self, path: Path, retained: RetainedTokens) -> NDArray[Any]:
        """Pages that the path will write, now or later, and that others hold too, bool [L, H, rows]."""
        own = retained.targets | (retained.stays & ~retained.in_place)
        own[own] = self.table.is_shared(page_indices_of(path.chunks, own))
        return np.asarray(own)

    def _drop_unread_pages(self, path: Path, retained: RetainedTokens) -> None:
        """Drops pages without tokens. Unlocks heads of the tree whose pages the path no longer reads in place."""
        held = retained.held
        drop(self.table, path.chunks[: retained.num_rows], ~held)
        heads, below = {}, np.zeros_like(retained.is_packed)
        for segment in reversed(path.segments):
            read = retained.in_place & held & retained.rows_of(segment)
            heads[segment] = below = below | read.any(-1)
        self.tree.unlock_heads(path, heads)


def pack(table: ChunkTable, path: Path, retained: RetainedTokens) -> None:
    """Moves tokens into holes, drops pages without tokens, and removes rows without pages. Writes only pages that the
    path alone holds.
    """
    chunks, sums = (rows[: retained.num_rows] for rows in (path.chunks, path.retention.sums))
    sources, holes, order = retained.pack()
    _move(table, chunks, sums, sources, holes)
    held = retained.held
    for rows in (chunks, sums):
        for array in (table.pages, table.masks, table.positions):
            array[rows] = np.take_along_axis(array[rows], order.transpose(2, 0, 1), 0)
        table.takes[rows] += 1
        drop(table, rows, ~held)
    table.masks[chunks] = words_of(retained.alive).transpose(2, 0, 1)
    empty = np.flatnonzero(~held.any((0, 1)))
    if len(empty):
        table.free(path.forget(empty))
        retained.forget(empty)
    if table.encodes:
        _store_positions(table, path.chunks[: retained.num_rows], retained)


def drop(table: ChunkTable, rows: Int32s, chosen: Bools) -> None:
    """Drops the chosen pages of rows, bool [L, H, rows], where there are any."""
    table.drop(page_indices_of(rows, chosen & (table.masks[rows].transpose(1, 2, 0) > 0)))


def check_packed(table: ChunkTable, path: Path, retained: RetainedTokens) -> None:
    """Proves that a path holds, of each head, the pages its tokens need, the sums of heads that need them, and no
    others.
    """
    chunks, sums = (rows[: retained.num_rows] for rows in (path.chunks, path.retention.sums))
    words = words_of(retained.alive).transpose(2, 0, 1)
    assert np.array_equal(words, table.masks[chunks]), "masks are not the tokens that are kept"
    own = retained.held & ~retained.in_place
    num_tokens = (retained.alive & own[..., None]).sum((-2, -1))
    assert np.array_equal(own.sum(-1), -(-num_tokens // PAGE_TOKENS)), "tokens are not packed"
    assert not table.is_shared(page_indices_of(chunks, own)).any(), "a page that is written is shared"
    needed = (retained.held & retained.has_sums[..., None]).transpose(2, 0, 1)
    assert np.array_equal(needed, table.masks[sums] > 0), "sums are not those of the pages"


def page_indices_of(rows: Int32s, chosen: Bools) -> PageIndices:
    """Indices in the chunk table of the chosen pages of rows. chosen: bool [L, H, rows]."""
    layers, heads, at = np.nonzero(chosen)
    return rows[at], layers, heads


def _move(table: ChunkTable, chunks: Int32s, sums: Int32s, sources: SlotIndices, holes: SlotIndices) -> None:
    """Copies tokens, and the sums of heads that need them, from slots into others."""
    assert table.sums is not None
    (layers, _), (heads, _), rows, slots = np.stack((sources, holes), 1, dtype=np.int32)  # [2, m] each
    for held, codec in ((chunks, table.sealed_codec), (sums, table.sums)):
        has_page = table.masks[held][rows[0], layers, heads] > 0
        pages = table.pages[held[rows], layers, heads]
        chosen = (each[..., has_page] for each in (layers, heads, pages, slots))
        table.move(codec, SlotMoves(*chosen))


def _store_positions(table: ChunkTable, rows: Int32s, retained: RetainedTokens) -> None:
    """Stores the positions of the slots of encoded pages, whose keys are rotated on read. A page in place has the
    positions of its row's chunk. Other pages may hold tokens from anywhere.
    """
    table.bases[rows] = retained.origins * PAGE_TOKENS
    moved = retained.held & ~retained.in_place & retained.is_packed[..., None]
    table.store_positions(page_indices_of(rows, moved), np.maximum(retained.positions[moved], 0))
