"""Packs the tokens that retention has left of a path into fewer pages. Knows the chunk table and paths; neither
policies' rules nor requests.

Each row of a path that is not open holds, of every layer and head, a page or nothing, and of the page the slots that
its mask says. Tokens that a head drops leave holes. These are filled with the last tokens of the same head, so that

    pages of a head = ceil(tokens it keeps / 64)

and so few slots move that it costs nothing beside the 64 steps between two seals. The order of slots means nothing:
dense keys are stored rotated, and encoded pages carry positions.

Pages that others may read too stay as they are, and are read through their mask, where that takes fewer bytes than a
copy (`in_place`): tokens move only between pages that this path alone holds. Where attention from afar is wanted
(`holds_last`), a head that keeps all of the last sealed chunk keeps it in its row, until another is sealed: so the row
says how far from there it is, and nothing that is near stands elsewhere.

Source: FastGen, arXiv 2310.01801, algorithm 2, which keeps full-length buffers; its text frees no memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Floats, Int32s
from quire.cache.codecs import Moves
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.path import Path
from quire.cache.retention.retained import Retained
from quire.cache.table import ChunkTable, Places

_BITS = np.uint64(1) << np.arange(PAGE_TOKENS, dtype=np.uint64)


def sealed_rows(path: Path) -> tuple[Retained, Int32s]:
    """What retention has left of a path, and the rows of its sealed chunks."""
    assert path.retained is not None
    return path.retained, path.chunks[: path.retained.num_rows]


def pack(table: ChunkTable, path: Path, sums: Floats) -> Floats:
    """Moves tokens into holes, drops pages that hold none, and rows that hold no page. The pages that are written
    (`targets`) are the path's alone.

    sums     float32 [L, H, rows * 64] of the slots
    returns  them in their new slots
    """
    retained, rows = sealed_rows(path)
    assert table.masks is not None
    drop_empty(table, path)
    alive = retained.positions >= 0
    is_target = np.repeat(targets(table, path), PAGE_TOKENS, -1)
    writable = np.repeat(~retained.stays, PAGE_TOKENS, -1)
    # Of the slots of target pages the first ones are filled, as many as there are tokens.
    count = (alive & writable).sum(-1)
    filled = is_target & (np.cumsum(is_target, -1) <= count[..., None])
    holes, sources = np.nonzero(filled & ~alive), np.nonzero(alive & writable & ~filled)
    assert all(np.array_equal(*both) for both in zip(holes[:2], sources[:2], strict=True)), (
        "not as many holes as tokens"
    )
    if len(holes[0]):
        _move(table, rows, sources, holes)
        retained.positions[holes] = retained.positions[sources]
        retained.positions[sources] = -1
        sums[holes] = sums[sources]
    masks = (retained.by_row(retained.positions >= 0) * _BITS).sum(-1, dtype=np.uint64)  # [L, H, rows]
    table.drop(places_of(rows, (masks == 0) & has_page(table, rows)))
    table.masks[rows] = masks.transpose(2, 0, 1)
    table.takes[rows] += 1
    sums = _close_ranks(table, path, sums)
    if table.encodes:
        _say_where(table, path)
    return sums


def drop_empty(table: ChunkTable, path: Path) -> None:
    """Drops pages that hold no token of the path."""
    retained, rows = sealed_rows(path)
    is_empty = ~retained.by_row(retained.positions >= 0).any(-1)
    table.drop(places_of(rows, is_empty & has_page(table, rows)))


def targets(table: ChunkTable, path: Path) -> Bools:
    """Pages that will hold a head's tokens once they are packed, bool [L, H, rows], those that stay left out.

    The last ones, for where memory is short the tree gives a prompt's end up first, and pages that nobody else holds
    need no copy; but before them the first one, if exact first tokens stand beside it.
    """
    retained, rows = sealed_rows(path)
    stays = retained.stays
    writable: Bools = ~stays & has_page(table, rows)
    alive = retained.by_row(retained.positions >= 0).sum(-1)
    need = -(-(alive * ~stays).sum(-1) // PAGE_TOKENS)
    behind = np.cumsum(writable[..., ::-1], -1)[..., ::-1]
    if retained.num_rows and table.sinks is not None:
        behind = behind + writable[..., :1]
        behind[..., 0] = 1
    return np.asarray(writable & (behind <= need[..., None]))


def to_own(table: ChunkTable, path: Path) -> Places:
    """Pages that are to be the path's own and that others hold too: those that are written, now or later."""
    retained, rows = sealed_rows(path)
    own = targets(table, path) | (retained.stays & ~retained.in_place)
    places = places_of(rows, own)
    shared = table.is_shared(places)
    return places[0][shared], places[1][shared], places[2][shared]


def check_packed(table: ChunkTable, path: Path, has_sums: Bools) -> None:
    """Proves that a path holds, of each head, the pages its tokens need, sums of heads that need them, and no others.

    has_sums  bool [L, H]
    """
    retained, rows = sealed_rows(path)
    assert table.masks is not None
    alive = retained.by_row(retained.positions >= 0)
    masks = np.packbits(alive, axis=-1, bitorder="little").view("<u8")[..., 0]
    assert np.array_equal(masks, table.masks[rows].transpose(1, 2, 0)), "masks are not the tokens that are kept"
    held, own = masks != 0, ~retained.in_place
    tokens = (alive * own[..., None]).sum((-2, -1))
    assert np.array_equal((held & own).sum(-1), -(-tokens // PAGE_TOKENS)), "tokens are not packed"
    assert not table.is_shared(places_of(rows, held & own)).any(), "a page that is written is shared"
    sums = has_page(table, path.sums[: len(rows)])
    assert np.array_equal(held & has_sums[..., None], sums), "sums are not those of the pages"


def _move(
    table: ChunkTable,
    rows: Int32s,
    sources: tuple[NDArray[np.intp], ...],
    holes: tuple[NDArray[np.intp], ...],
) -> None:
    """Copies tokens between slots, named by layer, head and slot among those of the rows."""
    layers, heads, _ = sources
    at, slots = np.divmod((sources[2], holes[2]), PAGE_TOKENS)
    if table.has_bytes:
        table.sealed_codec.move(table.arena.data, Moves(layers, heads, table.pages[rows[at], layers, heads], slots))


def has_page(table: ChunkTable, rows: Int32s) -> Bools:
    """Of which heads rows hold pages, bool [L, H, rows]."""
    assert table.masks is not None
    return np.asarray(np.not_equal(table.masks[rows], 0).transpose(1, 2, 0))


def places_of(rows: Int32s, chosen: Bools) -> Places:
    """Places of the rows, where bool [L, H, rows] says so."""
    layers, heads, at = np.nonzero(chosen)
    return rows[at], layers, heads


def _close_ranks(table: ChunkTable, path: Path, sums: Floats) -> Floats:
    """Puts each head's pages into the first rows, but for those that stay, and gives back rows without a page. Moves
    names of pages, not their bytes.
    """
    retained, rows = sealed_rows(path)
    assert table.masks is not None
    is_fixed, held = retained.stays, has_page(table, rows)
    # Into the rows that are free, in order, go their pages and then their empty places; the others stay.
    to, source = (np.argsort(keys, -1, kind="stable") for keys in (is_fixed, np.where(is_fixed, 2, ~held)))
    order = np.empty_like(to)
    np.put_along_axis(order, to, source, -1)
    if (order != np.arange(len(rows))).any():
        for array in (table.pages, table.masks, table.positions):
            array[rows] = np.take_along_axis(array[rows].transpose(1, 2, 0), order, -1).transpose(2, 0, 1)
        slots, shape = order[..., None], sums.shape
        retained.positions, sums = (
            np.take_along_axis(retained.by_row(each), slots, 2).reshape(shape) for each in (retained.positions, sums)
        )
    any_held = has_page(table, rows).any((0, 1))
    if not any_held.all():
        table.give(path.forget(np.flatnonzero(~any_held)))
        slots_held = np.repeat(any_held, PAGE_TOKENS)
        retained.positions = np.ascontiguousarray(retained.positions[..., slots_held])
        retained.in_place = np.ascontiguousarray(retained.in_place[..., any_held])
        retained.origins = retained.origins[any_held]
        sums = np.ascontiguousarray(sums[..., slots_held])
    return sums


def _say_where(table: ChunkTable, path: Path) -> None:
    """Writes down where the slots of encoded pages stand, whose keys are rotated on read: pages in place stand where
    their row's chunk does, others may hold tokens from anywhere.
    """
    retained, rows = sealed_rows(path)
    table.bases[rows] = retained.origins * PAGE_TOKENS
    packed = (retained.policies < retained.chain.full)[..., None]
    moved = has_page(table, rows) & ~retained.in_place & packed
    positions = retained.by_row(retained.positions)
    table.place(places_of(rows, moved), np.maximum(positions[moved], 0))
