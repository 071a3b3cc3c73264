"""The layout of a step for a GPU: query rows and chunks cut into near-equal pieces, all in numpy. Knows neither torch
nor Triton.

    slices                      blocks                             pieces
    [rows | path of chunks] ->  [rows of one tile | its chunks] -> [the block's rows | a run of its chunks]

Differs from `plan.lay_out`, which is for a few threads: no step is too small to split, all pieces of a block merge as
whole tiles, and
blocks of few rows (decode) are kept apart from blocks of many, because the two run with different tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.page import PAGE_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.attention.plan import RowSlice

PIECE_INTS = 8
"""Columns of a piece: first row, rows, first index, chunks, position of the first slot, partial tile, first tile of its
block, parts."""

MIN_SHARE = 2
"""Chunks of an even share at least: two are under way at once, so a piece of one would take as long."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How many query rows (x G) the two kinds of blocks have, and how many pieces the machine works on at once, over
    all kv heads.
    """

    group_size: int
    num_heads: int
    short: int
    tall: int
    workers: int

    @property
    def short_rows(self) -> int:
        """Query rows of a short block at most."""
        return max(1, self.short // self.group_size)

    @property
    def tall_rows(self) -> int:
        """Query rows of a tall block at most: a power of two, so that blocks end on chunk boundaries."""
        return 1 << (max(1, self.tall // self.group_size).bit_length() - 1)

    @property
    def budget(self) -> int:
        """Pieces of one kv head that keep the machine busy; splitting stops there."""
        return max(1, -(-self.workers // self.num_heads))

    def max_pieces(self, num_blocks: int) -> int:
        """No layout of so many blocks has more pieces of one kind."""
        return num_blocks + self.budget

    @property
    def max_partial_tiles(self) -> int:
        """No layout has more partial tiles of one kind (`_split` shows why)."""
        return 2 * self.budget


@dataclass(frozen=True, slots=True)
class TileLayout:
    """A step as int32 arrays.

    positions     [R] of the query rows
    write_chunk   [R] chunk that takes each row's key and value
    indices       chunk ids: the paths of the slices one after the other
    short, tall   [n, PIECE_INTS] pieces, longest first
    is_decode     every slice has one row
    """

    positions: NDArray[np.int32]
    write_chunk: NDArray[np.int32]
    indices: NDArray[np.int32]
    short: NDArray[np.int32]
    tall: NDArray[np.int32]
    is_decode: bool


def lay_out(slices: Sequence[RowSlice], tiles: Tiles, window: int | None) -> TileLayout:
    """Cuts a step into pieces of at most 1.5 x an even share of the chunks to be read."""
    starts = np.array([piece.start for piece in slices], np.int64)
    counts = np.array([piece.num_rows for piece in slices], np.int64)
    is_decode = bool((counts == 1).all())
    ends = starts + counts
    lengths = -(-ends // PAGE_TOKENS)
    paths = np.cumsum(lengths) - lengths
    runs = [piece.chunks[:length] for piece, length in zip(slices, lengths.tolist(), strict=True)]
    indices = np.concatenate(runs, dtype=np.int32) if runs else np.empty(0, np.int32)
    if is_decode:
        # The general case below, less what does not differ: a decode step waits for its plan.
        low = np.zeros_like(starts) if window is None else np.maximum(0, ends - window) // PAGE_TOKENS
        chunks = lengths - low
        write_chunk = indices[paths + starts // PAGE_TOKENS]
        blocks = np.empty((len(starts), 5), np.int64)
        blocks[:, 0], blocks[:, 1], blocks[:, 2] = np.arange(len(starts)), 1, paths + low
        blocks[:, 3], blocks[:, 4] = chunks, low
        pieces = _split(blocks, _share(chunks, tiles))
        return TileLayout(starts.astype(np.int32), write_chunk, indices, pieces, _NO_PIECES, True)

    first_rows = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(slices)), counts)
    positions = starts[owner] + np.arange(len(owner)) - first_rows[owner]
    write_chunk = indices[paths[owner] + positions // PAGE_TOKENS]
    is_tall = counts > tiles.short_rows
    # A short slice is one block: the height of its blocks is taken so large that none ends inside it.
    height = np.where(is_tall, tiles.tall_rows, np.int64(1) << 40)
    num_blocks = np.where(counts > 0, (ends - 1) // height - starts // height + 1, 0)
    owner = np.repeat(np.arange(len(slices)), num_blocks)
    band = (
        starts[owner] // height[owner]
        + np.arange(len(owner))
        - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    )
    low_row = np.maximum(starts[owner], band * height[owner])
    high_row = np.minimum(ends[owner], (band + 1) * height[owner])
    low = np.zeros_like(low_row) if window is None else np.maximum(0, low_row + 1 - window) // PAGE_TOKENS
    chunks = -(-high_row // PAGE_TOKENS) - low
    blocks = np.stack(
        (first_rows[owner] + low_row - starts[owner], high_row - low_row, paths[owner] + low, chunks, low), 1
    )

    share = _share(chunks, tiles)
    tall = is_tall[owner]
    short_pieces, tall_pieces = _split(blocks[~tall], share), _split(blocks[tall], share)
    return TileLayout(positions.astype(np.int32), write_chunk, indices, short_pieces, tall_pieces, False)


_NO_PIECES = np.empty((0, PIECE_INTS), np.int32)


def _share(chunks: NDArray[np.int64], tiles: Tiles) -> int:
    """Chunks of an even share of a step whose blocks read so many."""
    return max(MIN_SHARE, -(-int(chunks.sum()) // tiles.budget))


def _split(blocks: NDArray[np.int64], share: int) -> NDArray[np.int32]:
    """Blocks [n, 5] (a piece's first columns, the position still in chunks) -> pieces.

    A block of c chunks becomes c / share pieces, rounded. A sum over blocks is thus at most n + budget pieces; a split
    block has c >= 1.5 share and at most 4/3 c / share parts, so there are fewer than 2 budget partial tiles.
    """
    chunks = blocks[:, 3]
    parts = np.maximum(1, (2 * chunks + share) // (2 * share))
    if len(blocks) == 0 or parts.max() == 1:
        pieces = np.zeros((len(blocks), PIECE_INTS), np.int32)
        pieces[:, :5] = blocks
        pieces[:, 4] *= PAGE_TOKENS
        pieces[:, 7] = 1
    else:
        owner = np.repeat(np.arange(len(blocks)), parts)
        ordinal = np.arange(len(owner)) - (np.cumsum(parts) - parts)[owner]
        blocks, num_parts = blocks[owner], parts[owner]
        bound = blocks[:, 3] * ordinal // num_parts
        num_tiles = np.where(parts > 1, parts, 0)
        first_tile = (np.cumsum(num_tiles) - num_tiles)[owner]
        is_split = num_parts > 1
        pieces = np.empty((len(owner), PIECE_INTS), np.int32)
        pieces[:, :2] = blocks[:, :2]
        pieces[:, 2] = blocks[:, 2] + bound
        pieces[:, 3] = blocks[:, 3] * (ordinal + 1) // num_parts - bound
        pieces[:, 4] = (blocks[:, 4] + bound) * PAGE_TOKENS
        pieces[:, 5] = (first_tile + ordinal) * is_split
        pieces[:, 6] = first_tile * is_split
        pieces[:, 7] = num_parts
    # Longest first: pieces are handed out in order, and a long one begun last would be waited for.
    return pieces[np.argsort(-pieces[:, 3], kind="stable")]
