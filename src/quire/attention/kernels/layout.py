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
    ends = starts + counts
    lengths = np.where(counts > 0, -(-ends // PAGE_TOKENS), 0)
    paths = np.cumsum(lengths) - lengths
    indices = _concatenate([piece.chunks[:length] for piece, length in zip(slices, lengths.tolist(), strict=True)])
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

    share = max(MIN_SHARE, -(-int(chunks.sum()) // tiles.budget))
    tall = is_tall[owner]
    return TileLayout(
        positions.astype(np.int32),
        write_chunk,
        indices,
        _split(blocks[~tall], share),
        _split(blocks[tall], share),
        bool((counts == 1).all()),
    )


def _split(blocks: NDArray[np.int64], share: int) -> NDArray[np.int32]:
    """Blocks [n, 5] (a piece's first columns, the position still in chunks) -> pieces.

    A block of c chunks becomes c / share pieces, rounded. A sum over blocks is thus at most n + budget pieces; a split
    block has c >= 1.5 share and at most 4/3 c / share parts, so there are fewer than 2 budget partial tiles.
    """
    chunks = blocks[:, 3]
    parts = np.maximum(1, (2 * chunks + share) // (2 * share))
    owner = np.repeat(np.arange(len(blocks)), parts)
    ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    bound = chunks[owner] * ordinal // parts[owner]
    tiles_of = np.where(parts > 1, parts, 0)
    first_tile = (np.cumsum(tiles_of) - tiles_of)[owner]
    pieces = np.empty((len(owner), PIECE_INTS), np.int32)
    pieces[:, :2] = blocks[owner, :2]
    pieces[:, 2] = blocks[owner, 2] + bound
    pieces[:, 3] = chunks[owner] * (ordinal + 1) // parts[owner] - bound
    pieces[:, 4] = (blocks[owner, 4] + bound) * PAGE_TOKENS
    pieces[:, 5] = np.where(parts[owner] > 1, first_tile + ordinal, 0)
    pieces[:, 6] = np.where(parts[owner] > 1, first_tile, 0)
    pieces[:, 7] = parts[owner]
    # Longest first: pieces are handed out in order, and a long one begun last would be waited for.
    return pieces[np.argsort(-pieces[:, 3], kind="stable")]


def _concatenate(runs: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(runs).astype(np.int32, copy=False) if runs else np.empty(0, np.int32)
