"""Packs the tokens that retention has left of a path into fewer pages. Knows the chunk table and paths; neither the
rules of policies nor requests.

A sealed row of a path holds a page or nothing of every layer and head. A page's mask says which of its slots count.
Dropped tokens leave holes, which other tokens of the same head fill:

    pages of a head = ceil(tokens it keeps / 64)

Packing moves few slots: it costs nothing beside the 64 steps between two seals. The order of slots means nothing,
because dense keys are stored rotated and encoded pages carry positions. The sums of a token move with it.

Tokens move only between pages that this path alone holds. A page that others may read stays in place (`in_place`),
where that takes fewer bytes than a copy, and is read through its mask.

Within a budget, only distant rows count towards a token's score. So a head that keeps the whole last sealed chunk
leaves it in its own row until the next chunk is sealed (`holds_last`): the row number then gives the distance.

Source: FastGen, arXiv 2310.01801, algorithm 2, which keeps full-length buffers; its text frees no memory.
"""

from __future__ import annotations

import numpy as np

from quire.cache.arrays import Bools, Int32s
from quire.cache.codecs import SlotMoves
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.path import Path
from quire.cache.retention.retained import RetainedTokens, SlotIndices, words_of
from quire.cache.table import ChunkTable, PageIndices


def pack(table: ChunkTable, path: Path, retained: RetainedTokens) -> None:
    """Moves tokens into holes, drops pages without tokens, and removes rows without pages. Writes only pages that the
    path alone holds.
    """
    chunks, sums = (rows[: retained.num_rows] for rows in (path.chunks, path.sums))
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
    chunks, sums = (rows[: retained.num_rows] for rows in (path.chunks, path.sums))
    words = words_of(retained.alive).transpose(2, 0, 1)
    assert np.array_equal(words, table.masks[chunks]), "masks are not the tokens that are kept"
    own = retained.held & ~retained.in_place
    num_tokens = (retained.alive & own[..., None]).sum((-2, -1))
    assert np.array_equal(own.sum(-1), -(-num_tokens // PAGE_TOKENS)), "tokens are not packed"
    assert not table.is_shared(page_indices_of(chunks, own)).any(), "a page that is written is shared"
    needed = (retained.held & retained.has_sums[..., None]).transpose(2, 0, 1)
    assert np.array_equal(needed, table.masks[sums] > 0), "sums are not those of the pages"


def page_indices_of(rows: Int32s, chosen: Bools) -> PageIndices:
    """Places of the chosen pages of rows, bool [L, H, rows]."""
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
