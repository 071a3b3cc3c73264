"""The layout of a step for a GPU: query rows and chunks cut into near-equal pieces, in numpy. Knows neither torch nor
Triton.

    slices                      blocks                                  pieces
    [rows | path of chunks]  -> [rows of one tile | its chunks]      -> [the block's rows | a run of its chunks]
    [rows that share chunks] -> [rows of one tile | shared chunks]   -> the same

`plan.lay_out` is for a few threads; this layout splits even small steps, and has two launches, each with its own tiles.
The tall pieces come first: blocks of many rows of one sequence (prefill), and shared runs with all their rows
(chunk-first). The short pieces then read the rest of each row's path (sequence-first) and merge the shared partials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.attention.plan import StagedWrites, common_runs, leading_singles
from quire.cache.ledger import PAGE_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.attention.rows import RowSlice

PIECE_INTS = 12
"""Columns of a piece: first row, rows, first index, chunks, position of the first slot, first partial slot or -1, first
entry and number of the partials it adds, first entry and number of its block's parts, first index and number of
the chunks that its rows write; see `kernels.attend`. The last two are used only if sealed chunks are encoded."""

MAX_PARTIALS = 2048
"""Most partial rows of a step: 33 MB for 32 query heads of size 128. At this limit the step splits and shares less."""

MIN_SHARE = 2
"""Least chunks of an even share. Two chunks are in flight at once, so a piece of one chunk would take as long."""

MIN_COMMON_SHARE = 4
"""Least chunks of an even share in shared runs. Each part stores a partial for every row: for 16 rows of 4 query heads,
the bytes of 2 chunks."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile sizes of the two kinds of blocks, and the limits of their splitting.

    short, tall   most query rows x G of a block
    workers       pieces that the GPU computes at once, over all kv heads
    tall_workers  the same for shared runs, which are split into fewer pieces
    min_saved     chunk reads that sharing must save in a step to be worth its launch
    """

    group_size: int
    num_heads: int
    short: int
    tall: int
    workers: int
    tall_workers: int
    min_saved: int = 0

    @property
    def short_rows(self) -> int:
        """Most query rows of a short block."""
        return max(1, self.short // self.group_size)

    @property
    def tall_rows(self) -> int:
        """Most query rows of a tall block: a power of two, so that blocks end on chunk boundaries."""
        return 1 << (max(1, self.tall // self.group_size).bit_length() - 1)

    @property
    def budget(self) -> int:
        """Pieces per kv head that keep the GPU busy. Splitting stops there."""
        return max(1, -(-self.workers // self.num_heads))

    @property
    def common_budget(self) -> int:
        """The budget for pieces of shared runs."""
        return max(1, -(-self.tall_workers // self.num_heads))

    def max_short(self, num_blocks: int) -> int:
        """An upper bound on the pieces of a layout of `num_blocks` blocks (`_num_parts` shows why)."""
        return num_blocks + self.budget

    def max_runs(self, num_rows: int) -> int:
        """Most shared runs of a decode step: one segment of all rows fits if a tile has four of them. Limited, because
        in a padded plan idle programs cost time too.
        """
        return max(self.common_budget, -(-num_rows // 4)) if num_rows > 1 else 0

    def max_common(self, num_rows: int) -> int:
        """An upper bound on the pieces of shared runs in a decode step of `num_rows` rows."""
        return self.max_runs(num_rows) + self.common_budget if num_rows > 1 else 0


@dataclass(frozen=True, slots=True)
class TileLayout:
    """A step as int32 arrays.

    positions     [R] of the query rows
    write_chunk   [R] chunk that takes each row's key and value
    indices       chunk ids: the paths of all slices, concatenated; if sealed chunks are encoded, then the chunks that
                  the rows of each slice write
    short, tall   [n, PIECE_INTS] pieces, longest first
    entries       partial slots to merge, at most MAX_PARTIALS: of shared runs, row by row; of parts, block by block
    num_partials  number of used slots
    num_common    number of tall pieces that are shared runs
    is_decode     every slice has one row
    seals         as in `plan.StepLayout`
    num_staged    as in `plan.StepLayout`
    own           if sealed chunks are encoded, for each slice the chunks that its rows write: see `plan.StagedWrites`;
                  else empty
    """

    positions: NDArray[np.int32]
    write_chunk: NDArray[np.int32]
    indices: NDArray[np.int32]
    short: NDArray[np.int32]
    tall: NDArray[np.int32]
    entries: NDArray[np.int32]
    num_partials: int
    num_common: int
    is_decode: bool
    seals: NDArray[np.int32]
    num_staged: int
    own: Sequence[NDArray[np.int32]]


def lay_out(
    slices: Sequence[RowSlice],
    tiles: Tiles,
    window: int | None,
    common_rows: int | None = None,
    *,
    encodes: bool = False,
    strict: bool = True,
    rows: StepRows | None = None,
) -> TileLayout:
    """Cuts a step into pieces of at most 1.5 x an even share of the chunks to be read.

    common_rows  query rows of a shared run's tile; None: `tiles.tall_rows`
    encodes      see `plan.StagedWrites`. If true, no block has rows of two chunks, because these see different sources
    strict       as in `plan.lay_out`
    rows         the slices as arrays, if another layout of the step has them: both name chunks alike
    """
    rows = rows or StepRows(slices, encodes)
    is_decode = bool((rows.counts == 1).all())
    if is_decode:
        positions, write_chunk, blocks = rows.decoded(window)
        is_tall = np.zeros(len(blocks), bool)
    else:
        positions, write_chunk, blocks, is_tall = rows.cut(tiles, window, strict)
    common = _common_blocks(slices, tiles, common_rows or tiles.tall_rows, rows.paths) if window is None else _NO_BLOCKS
    # Rows that may share are the first blocks. Their shared chunks are removed from them.
    for first_row, num_rows, _, chunks, *_ in common.tolist():
        sharing = blocks[first_row : first_row + num_rows]
        sharing[:, [2, 4]] += chunks
        sharing[:, 3] -= chunks

    parts = _num_parts(common, MIN_COMMON_SHARE, tiles.common_budget, MAX_PARTIALS // 2, leaves_all=True)
    common_pieces, _ = _cut(common, parts)
    common_pieces[:, 5] = _slots(common_pieces, 0)
    num_common = int(common_pieces[:, 1].sum())
    parts = _num_parts(blocks, MIN_SHARE, tiles.budget, MAX_PARTIALS - num_common)
    pieces, owner = _cut(blocks, parts)
    entries, num_partials = _name_partials(pieces, owner, parts, common_pieces, num_common)
    tall = np.concatenate((common_pieces, pieces[is_tall[owner]]))
    return TileLayout(
        positions.astype(np.int32),
        write_chunk,
        rows.indices,
        _longest_first(pieces[~is_tall[owner]]),
        _longest_first(tall),
        entries,
        num_partials,
        len(common_pieces),
        is_decode,
        rows.sources.seals,
        rows.sources.num_staged,
        rows.apart,
    )


class StepRows:
    """The slices of a step as arrays, which the layouts of all kinds of layers share.

    starts, counts, num_dropped  int64 [slices], as in `RowSlice`
    lengths   int64 [slices], chunks of each path up to its last row
    paths     int64 [slices], index of the first chunk of each path
    own       int64 [slices], index of the first chunk that each slice writes: inside its path, or in the lists that
              follow the paths
    indices   see TileLayout
    apart     see `TileLayout.own`
    """

    def __init__(self, slices: Sequence[RowSlice], encodes: bool) -> None:
        self.encodes = encodes
        self.starts = np.array([piece.start for piece in slices], np.int64)
        self.counts = np.array([piece.num_rows for piece in slices], np.int64)
        self.ends = self.starts + self.counts
        # Retention removes chunks of a path only before its last one.
        self.num_dropped = np.array([piece.num_dropped for piece in slices], np.int64)
        self.lengths = -(-self.ends // PAGE_TOKENS) - self.num_dropped
        self.paths = np.cumsum(self.lengths) - self.lengths
        ids = [piece.chunks[:length] for piece, length in zip(slices, self.lengths.tolist(), strict=True)]
        self.own = self.paths + self.starts // PAGE_TOKENS - self.num_dropped
        self.sources = StagedWrites(encodes)
        self.apart: list[NDArray[np.int32]] = []
        if encodes:
            self.apart = [self.sources.of(piece) for piece in slices]
            num_own = np.array([len(chunks) for chunks in self.apart], np.int64)
            self.own = int(self.lengths.sum()) + np.cumsum(num_own) - num_own
            ids += self.apart
        self.indices = np.concatenate(ids, dtype=np.int32) if ids else np.empty(0, np.int32)

    def decoded(self, window: int | None) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
        """Positions, written chunks and blocks of slices of one row: a shorter `cut`, because a decode step waits for
        its plan.
        """
        starts = self.starts
        low = np.zeros_like(starts) if window is None else np.maximum(0, self.ends - window) // PAGE_TOKENS
        num_own = np.full_like(starts, int(self.encodes))
        ones = np.ones_like(starts)
        columns = (
            np.arange(len(starts)), ones, self.paths + low, self.lengths - low, low + self.num_dropped, self.own,
            num_own,
        )  # fmt: skip
        return starts, self.indices[self.own], np.stack(columns, 1)

    def cut(
        self, tiles: Tiles, window: int | None, strict: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
        """Positions, written chunks and blocks of slices of any number of rows, and which blocks are tall."""
        starts, counts = self.starts, self.counts
        owner = np.repeat(np.arange(len(starts)), counts)
        first_rows = np.cumsum(counts) - counts
        positions = starts[owner] + np.arange(len(owner)) - first_rows[owner]
        write_chunk = self.indices[self.own[owner] + positions // PAGE_TOKENS - starts[owner] // PAGE_TOKENS]
        blocks, is_tall, owner = _blocks(starts, counts, self.paths, first_rows, tiles, window, self.encodes)
        blocks[:, 3] -= self.num_dropped[owner]
        blocks[:, 4] += self.num_dropped[owner]
        if self.encodes:
            # A block reads its own chunk as written; if not strict, also its slice's chunks before that.
            last = blocks[:, 4] + blocks[:, 3] - 1 - starts[owner] // PAGE_TOKENS
            num_own = np.ones_like(last) if strict else np.minimum(last + 1, blocks[:, 3])
            blocks[:, 5], blocks[:, 6] = self.own[owner] + last + 1 - num_own, num_own
        return positions, write_chunk, blocks, is_tall


def num_advances(ends: NDArray[np.int64], window: int) -> int:
    """By how many positions the rows of a decode step can advance until one of them no longer sees its first chunk.

    ends  the positions after the rows
    """
    low = np.maximum(0, ends - window) // PAGE_TOKENS
    return int(((low + 1) * PAGE_TOKENS + window - ends).min()) - 1


def _name_partials(
    pieces: NDArray[np.int32],
    owner: NDArray[np.int64],
    parts: NDArray[np.int64],
    common: NDArray[np.int32],
    num_common: int,
) -> tuple[NDArray[np.int32], int]:
    """Sets the partial slots that pieces store and add. Returns the entries, and the number of used slots.

    owner       the block of each piece
    parts       number of pieces of each block
    common      pieces of shared runs, which use the first num_common slots
    """
    is_split = parts[owner] > 1
    slots = _slots(pieces[is_split], num_common)
    pieces[is_split, 5] = slots
    # The first piece of a row merges the row's shared partials.
    shared_rows, shared_slots = _rows_and_slots(common)
    order = np.argsort(shared_rows, kind="stable")
    num_shared = np.bincount(shared_rows, minlength=len(parts))
    is_first = np.diff(owner, prepend=-1) > 0
    pieces[is_first, 6], pieces[is_first, 7] = np.cumsum(num_shared) - num_shared, num_shared
    first_part = np.cumsum(parts * (parts > 1)) - parts
    pieces[is_split, 8], pieces[is_split, 9] = len(order) + first_part[owner[is_split]], parts[owner[is_split]]
    entries = np.concatenate((shared_slots[order], slots), dtype=np.int32)
    return entries, num_common + int(pieces[is_split, 1].sum())


_BLOCK_INTS = 7
"""Columns of a block: a piece's first five, but its position is in chunks, and it counts all chunks; if sealed chunks
are encoded, first index and number of the chunks that its rows write."""

_NO_BLOCKS = np.empty((0, _BLOCK_INTS), np.int64)


def _blocks(
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    paths: NDArray[np.int64],
    first_rows: NDArray[np.int64],
    tiles: Tiles,
    window: int | None,
    encodes: bool,
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Cuts the rows of each slice into blocks, in order of rows. Their own chunks are added later. Returns the blocks,
    which blocks are tall, and the slice of each block.
    """
    ends = starts + counts
    is_tall = counts > tiles.short_rows
    # A short slice is one block, so its blocks get a height that no slice reaches. If sealed chunks are encoded, a
    # block must end where a chunk does.
    height = np.where(is_tall, tiles.tall_rows, np.int64(PAGE_TOKENS if encodes else 1 << 40))
    num_blocks = np.where(counts > 0, (ends - 1) // height - starts // height + 1, 0)
    owner = np.repeat(np.arange(len(starts)), num_blocks)
    band = (
        starts[owner] // height[owner]
        + np.arange(len(owner))
        - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    )
    low_row = np.maximum(starts[owner], band * height[owner])
    high_row = np.minimum(ends[owner], (band + 1) * height[owner])
    low = np.zeros_like(low_row) if window is None else np.maximum(0, low_row + 1 - window) // PAGE_TOKENS
    chunks = -(-high_row // PAGE_TOKENS) - low
    blocks = np.zeros((len(owner), _BLOCK_INTS), np.int64)
    blocks[:, 0], blocks[:, 1] = first_rows[owner] + low_row - starts[owner], high_row - low_row
    blocks[:, 2], blocks[:, 3], blocks[:, 4] = paths[owner] + low, chunks, low
    return blocks, is_tall[owner], owner


def _common_blocks(slices: Sequence[RowSlice], tiles: Tiles, rows: int, paths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The shared runs of leading rows, in blocks of at most `rows` rows; none if they save too little."""
    singles = leading_singles(slices)
    runs = common_runs(singles, rows, max_runs=tiles.max_runs(len(singles)), max_rows=MAX_PARTIALS // 2)
    if sum((num_rows - 1) * (high - low) for _, num_rows, low, high in runs) < max(1, tiles.min_saved):
        return _NO_BLOCKS
    blocks = [(first, num_rows, paths[first] + low, high - low, low, 0, 0) for first, num_rows, low, high in runs]
    return np.array(blocks, np.int64)


def _num_parts(
    blocks: NDArray[np.int64], min_share: int, budget: int, max_partials: int, leaves_all: bool = False
) -> NDArray[np.int64]:
    """The number of pieces of each block: chunks / share, rounded, where share is an even share of all chunks.

    So n blocks have at most n + budget pieces. A piece of a split block (every piece if `leaves_all`) leaves a partial
    for each row of the block. The share grows until these fit, which they do at one piece per block; a larger share
    means fewer pieces, so the bound n + budget still holds.
    """
    num_rows, chunks = blocks[:, 1], blocks[:, 3]
    share = max(min_share, -(-int(chunks.sum()) // budget))
    while True:
        parts = np.maximum(1, (2 * chunks + share) // (2 * share))
        if int((num_rows * parts)[leaves_all | (parts > 1)].sum()) <= max_partials:
            return parts
        share += -(-share // 4)


def _cut(blocks: NDArray[np.int64], parts: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Cuts blocks into pieces without partial slots. Returns the pieces, and the block of each."""
    owner = np.repeat(np.arange(len(blocks)), parts)
    pieces = np.zeros((len(owner), PIECE_INTS), np.int32)
    pieces[:, :5] = blocks[owner, :5]
    if len(owner) > len(blocks):
        ordinal = np.arange(len(owner)) - (np.cumsum(parts) - parts)[owner]
        bound = blocks[owner, 3] * ordinal // parts[owner]
        pieces[:, 2] += bound
        pieces[:, 3] = blocks[owner, 3] * (ordinal + 1) // parts[owner] - bound
        pieces[:, 4] += bound
    if blocks[:, 6].any():
        # The chunks that a block's rows write are its last ones.
        low = pieces[:, 4] - blocks[owner, 4]
        first_own = blocks[owner, 3] - blocks[owner, 6]
        pieces[:, 11] = np.clip(low + pieces[:, 3] - first_own, 0, pieces[:, 3])
        pieces[:, 10] = blocks[owner, 5] + np.maximum(0, low - first_own)
        pieces[:, 3] -= pieces[:, 11]
    pieces[:, 4] *= PAGE_TOKENS
    pieces[:, 5] = -1
    return pieces, owner


def _slots(pieces: NDArray[np.int32], first: int) -> NDArray[np.int32]:
    """The first partial slot of each piece. A piece has one slot per row; numbering starts at `first`."""
    slots: NDArray[np.int32] = first + np.cumsum(pieces[:, 1], dtype=np.int32) - pieces[:, 1]
    return slots


def _rows_and_slots(common: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The query row and the slot of each partial row of shared runs."""
    counts = common[:, 1].astype(np.int64)
    offset = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(common[:, 0], counts) + offset, np.repeat(common[:, 5], counts) + offset


def _longest_first(pieces: NDArray[np.int32]) -> NDArray[np.int32]:
    """Sorts pieces by length: programs start in order, and a long piece that starts last would delay the end."""
    return pieces[np.argsort(-(pieces[:, 3] + pieces[:, 11]), kind="stable")]
