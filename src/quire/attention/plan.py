"""The plan of a step: which query rows read which chunks, cut into pieces that keep all workers busy. Knows chunk ids,
not pages or requests.

slices of the step          pieces                                    work items
[rows | path of chunks] ->  [block of rows | run of its chunks]  ->   piece x kv head

If the chunks of a row are split over several pieces, each of these leaves a partial, and a merge names them.

A run of chunks that neighbouring rows share is one piece with all these rows: ChunkAttention's chunk-first phase, one
matrix product over the rows. The private tails are its sequence-first phase, products with one row.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quire.attention.rows import RowSlice
from quire.cache.ledger import PAGE_TOKENS
from quire.models.plan import StepPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray


MIN_SHARED_CHUNKS = 2
"""Chunk reads that a shared run must save. If it saves fewer, merging costs more than reading."""

MIN_SPLIT_CHUNKS = 4
"""Least chunks of a piece when a run is split. A partial over fewer costs more to merge than to compute."""


class AttentionPlan(StepPlan, Protocol):
    """The plan of one step over pages. Once the model has run, the column sums of profiled slices are up to date."""

    def recovered(self, slice_index: int, kept: NDArray[np.uint64], local: NDArray[np.int64]) -> NDArray[np.float64]:
        """The attention of a slice's last rows to the tokens that a policy would keep, [L, H]; 1 if they see no others.

        Averaged over these rows and over the query heads of a kv head. Call it after the model has run and before the
        next plan.

        slice_index  a slice whose `profiled` has last rows
        kept         [L, H, n]: columns kept for every row; bit t of word c is position c * 64 + t. n >= chunks of the
                     path up to the slice's end
        local        [L, H]: number of last tokens that each row also keeps, its own included
        """


class AttentionBackend(Protocol):
    """Computes attention on pages."""

    def plan(
        self, slices: Sequence[RowSlice], moved: Sequence[int] | None = None, ready: NDArray[np.int32] | None = None
    ) -> AttentionPlan:
        """The plan of one step, valid until the next call. The rows of the slices follow each other.

        ready   int32 [L], set by another thread during the step: a layer's pages may be read once its entry is not 0.
                None: all may be read
        moved   if the last plan had the same rows, each one position earlier: indices of the slices that changed
                chunks. A backend may then advance the last plan. None: other rows
        """


@dataclass(frozen=True)
class StepLayout:
    """A step as int32 arrays, as layers with one window read it.

    positions    [R] of the query rows, common to all layouts of the step
    write_chunk  [R] chunk that takes each row's key and value
    indices      chunk ids: the runs of all pieces, concatenated. Each private run of the first `num_singles` rows
                 has room for one more chunk at its end
    pieces       [n, 6]: first row, rows, first index, chunks, position of the first slot, first partial or -1
    merges       [m, 3]: row, first part, parts
    merge_parts  partial rows, in the order of the merges
    num_partials rows of the partial buffers
    seals        [s, 2]: chunk that is full once the step's rows are written, chunk it is encoded into
    num_singles  slices of one row at the beginning of the step
    num_staged   dense chunks outside the cache that the step needs for one layer: one for each chunk that it fills from
                 the first slot on. The id of staged chunk i is ~i
    window       see Scoring
    """

    positions: NDArray[np.int32]
    write_chunk: NDArray[np.int32]
    indices: NDArray[np.int32]
    pieces: NDArray[np.int32]
    merges: NDArray[np.int32]
    merge_parts: NDArray[np.int32]
    num_partials: int
    seals: NDArray[np.int32]
    num_staged: int
    num_singles: int
    window: int | None

    def advance(self, before: Sequence[RowSlice], slices: Sequence[RowSlice], moved: Sequence[int]) -> bool:
        """Advances the layout to its positions, which the caller has advanced by one. The rows `moved` are in other
        chunks now. Returns False, and the layout must be discarded, if a run has no room, a moved row is or was
        profiled, a chunk was or will be encoded, or a row's first chunk leaves the window.
        """
        positions = self.positions
        if self.window is not None and np.any(
            (positions >= self.window) & ((positions + 1 - self.window) % PAGE_TOKENS == 0)
        ):
            return False
        if moved and (len(self.seals) or self.num_singles < len(slices)):
            return False
        for row in moved:
            old, new = before[row], slices[row]
            piece = self.pieces[self._last_pieces[row]]
            _, _, first, num_chunks, start, _ = piece.tolist()
            low = start // PAGE_TOKENS - new.num_dropped
            grown = new.start // PAGE_TOKENS + 1 - new.num_dropped - low - num_chunks
            is_same = np.array_equal(old.chunks[:low], new.chunks[:low]) and old.num_dropped == new.num_dropped
            is_profiled = old.profiled is not None or new.profiled is not None
            if not is_same or is_profiled or not 0 <= grown <= self._spare[row] or new.filled >= 0:
                return False
            self._spare[row] -= grown
            piece[3] += grown
            run = self.indices[first : first + num_chunks + grown]
            run[:] = new.chunks[low : low + len(run)]
            self.write_chunk[row] = run[-1]
        return True

    @functools.cached_property
    def _last_pieces(self) -> NDArray[np.intp]:
        """The last piece of each single row: the one with its own chunk."""
        own = np.flatnonzero((self.pieces[:, 1] == 1) & (self.pieces[:, 0] < self.num_singles))
        own = own[np.argsort(self.pieces[own, 4], kind="stable")]
        found = np.empty(self.num_singles, np.intp)
        found[self.pieces[own, 0]] = own
        return found

    @functools.cached_property
    def _spare(self) -> list[int]:
        """The number of further chunks for which each single row's run has room."""
        return [1] * self.num_singles


def sparse_singles(slices: Sequence[RowSlice], sparse_values: float) -> int:
    """The number of leading slices of one row if any of them has sparse values, else 0."""
    if sparse_values == 1:
        return 0
    singles = leading_singles(slices)
    late = [piece for piece in slices[len(singles) :] if piece.num_rows == 1 and not piece.reads_all]
    assert not late, "a row that takes few values follows a slice of several rows"
    return len(singles) if any(not piece.reads_all for piece in singles) else 0


def leading_singles(slices: Sequence[RowSlice]) -> Sequence[RowSlice]:
    """The slices of one row at the start of a step. Only these may share reads."""
    count = next((i for i, piece in enumerate(slices) if piece.num_rows != 1), len(slices))
    return slices[:count]


def common_runs(
    slices: Sequence[RowSlice], block_rows: int, *, max_runs: int = sys.maxsize, max_rows: int = sys.maxsize
) -> list[tuple[int, int, int, int]]:
    """Runs of chunks that neighbouring slices of one row share, each to be read once for all of them.

    Returns (first row, rows, first chunk, chunk after the last) of each, parents first.

    block_rows          most rows of a run; more rows get several runs over the same chunks
    max_runs, max_rows  limits on all runs together; a run that does not fit is not shared

    If a segment is not shared, its descendants are not shared either. So the runs of a row cover the beginning of its
    path without a gap, and the rest of its path is one run too.
    """
    names = [piece.shared for piece in slices]
    if not any(names):
        return []

    def together(row: int, end: int, depth: int) -> int:
        """The end of the rows that have the same segment at `depth` as `row`."""
        if depth >= len(names[row]):
            return row + 1
        name, stop = names[row][depth], row + 1
        while stop < end and depth < len(names[stop]) and names[stop][depth] == name:
            stop += 1
        return stop

    found: list[tuple[int, int, int, int]] = []
    # Rows [low, high) share their first `depth` segments. The runs found so far cover these up to chunk `start`.
    # The order is breadth first: if few runs fit, they are those that most rows share.
    todo = deque([(0, len(slices), 0, 0)] if len(slices) > 1 else [])
    while todo:
        low, high, depth, start = todo.popleft()
        stop = start
        while together(low, high, depth) == high:
            stop += names[low][depth][1]
            depth += 1
        if stop > start:
            rows = high - low
            count = -(-rows // block_rows)
            saved = (rows - count) * (stop - start)
            if saved < MIN_SHARED_CHUNKS or len(found) + count > max_runs or rows > max_rows:
                continue
            max_rows -= rows
            bounds = [low + rows * i // count for i in range(count + 1)]
            found.extend((first, after - first, start, stop) for first, after in itertools.pairwise(bounds))
        row = low
        while row < high:
            end = together(row, high, depth)
            if end - row > 1:
                todo.append((row, end, depth, stop))
            row = end
    return found


class StagedWrites:
    """The chunks to which the rows of a step write: the chunk itself if it stays open, else the dense source from which
    it will be encoded.

    encodes  whether sealed chunks have another codec than open ones
    """

    def __init__(self, encodes: bool) -> None:
        self.encodes = encodes
        self.num_staged = 0
        self._seals: list[tuple[int, int]] = []

    def of(self, piece: RowSlice) -> NDArray[np.int32]:
        """The chunks that take the rows of a slice, in order of position. A chunk that is filled from its first slot on
        is staged.
        """
        end = piece.start + piece.num_rows
        first = piece.start // PAGE_TOKENS
        own = piece.chunks[first - piece.num_dropped : -(-end // PAGE_TOKENS) - piece.num_dropped]
        if not self.encodes or end // PAGE_TOKENS == first:
            return own
        own = own.copy()
        for index in range(end // PAGE_TOKENS - first):
            if index == 0 and piece.start % PAGE_TOKENS:
                source = piece.filled
                assert source >= 0, "a chunk is filled, and nothing is known of its first slots"
            else:
                source = ~self.num_staged
                self.num_staged += 1
            self._seals.append((source, int(own[index])))
            own[index] = source
        return own

    @property
    def seals(self) -> NDArray[np.int32]:
        """See StepLayout."""
        return np.array(self._seals, np.int32).reshape(-1, 2)


def _run(chunks: NDArray[np.int32], low: int, high: int, own: NDArray[np.int32]) -> NDArray[np.int32]:
    """Chunks [low, high), the last ones replaced by `own`: the chunks as the rows write them."""
    run = chunks[low:high]
    own = own[max(0, len(own) - len(run)) :]
    if len(own) > 1 or run[-1] != own[-1]:
        run = run.copy()
        run[len(run) - len(own) :] = own
    return run


def lay_out(
    slices: Sequence[RowSlice],
    *,
    block_rows: int,
    num_heads: int,
    workers: int,
    window: int | None,
    encodes: bool = False,
    strict: bool = True,
) -> StepLayout:
    """Cuts a step into pieces of near-equal cost.

    block_rows  most query rows of a piece: a divisor or multiple of 64, so that causal runs end on chunk boundaries; if
                sealed chunks are encoded at most 64, because rows of two chunks see different sources
    num_heads   H: every piece is computed once per kv head
    workers     threads or streaming multiprocessors that compute pieces at the same time
    encodes     see StagedWrites
    strict      whether rows see earlier chunks of their own slice as stored, not as computed

    A run is split only if one piece alone would take more than half of a worker's fair share.
    """
    sources = StagedWrites(encodes)
    singles = leading_singles(slices)
    num_dropped = np.array([piece.num_dropped for piece in singles], np.int32)
    found = _blocks_of_singles(singles, num_dropped, block_rows, window, sources)
    if len(singles) < len(slices):
        found = found.joined(
            _blocks_of_several(slices[len(singles) :], len(singles), block_rows, window, strict, sources)
        )
    blocks, runs, cost = _largest_first(found.blocks, found.runs)
    indices = _place_runs(blocks, runs, len(singles))
    limit = max(1, int(cost.sum()) * num_heads // (2 * workers))
    pieces = blocks
    if len(cost) and cost[0] > limit and blocks[:, 3].max() >= 2 * MIN_SPLIT_CHUNKS:
        pieces = _split(blocks, limit)
    if num_dropped.any():
        single = pieces[:, 0] < len(singles)
        pieces[single, 4] += num_dropped[pieces[single, 0]]
    pieces[:, 4] *= PAGE_TOKENS
    merges, parts, num_partials = _merges(pieces)
    return StepLayout(
        found.positions,
        found.write_chunk,
        np.ascontiguousarray(indices, np.int32),
        np.ascontiguousarray(pieces),
        merges,
        parts,
        num_partials,
        sources.seals,
        sources.num_staged,
        len(singles),
        window,
    )


@dataclass(frozen=True)
class _Blocks:
    """Rows of a step cut into blocks, which are pieces before they are split.

    positions, write_chunk  see StepLayout
    blocks  [n, 6]: as `StepLayout.pieces`, with positions in chunks, and without first indices
    runs    the chunks of each block
    """

    positions: NDArray[np.int32]
    write_chunk: NDArray[np.int32]
    blocks: NDArray[np.int32]
    runs: list[NDArray[np.int32]]

    def joined(self, other: _Blocks) -> _Blocks:
        """These blocks, followed by those of further rows."""
        return _Blocks(
            np.concatenate((self.positions, other.positions)),
            np.concatenate((self.write_chunk, other.write_chunk)),
            np.concatenate((self.blocks, other.blocks)),
            self.runs + other.runs,
        )


def _blocks_of_singles(
    singles: Sequence[RowSlice],
    num_dropped: NDArray[np.int32],
    block_rows: int,
    window: int | None,
    sources: StagedWrites,
) -> _Blocks:
    """Slices of one row, and the runs that they share."""
    positions = np.array([piece.start for piece in singles], np.int32)
    # One piece per row. Column 4 counts chunks, not positions, until the layout is done.
    blocks = np.zeros((len(singles), 6), np.int32)
    blocks[:, 0], blocks[:, 1], blocks[:, 5] = np.arange(len(singles)), 1, -1
    if window is not None:
        blocks[:, 4] = np.maximum(0, positions + 1 - window) // PAGE_TOKENS
    blocks[:, 3] = positions // PAGE_TOKENS + 1 - num_dropped - blocks[:, 4]
    common = common_runs(singles, block_rows) if window is None else []
    for first, count, low, high in common:
        blocks[first : first + count, 4] = high
        blocks[first : first + count, 3] -= high - low
        blocks[first : first + count, 5] = _LEAVES_PARTIALS
    runs = [
        piece.chunks[low : low + count]
        for piece, low, count in zip(singles, *blocks[:, [4, 3]].T.tolist(), strict=True)
    ]
    # A row that fills a chunk to be encoded writes and reads the chunk's dense source.
    for row in np.flatnonzero((positions + 1) % PAGE_TOKENS == 0).tolist() if sources.encodes else ():
        runs[row] = np.append(runs[row][:-1], sources.of(singles[row]))
    # A row's own chunk is the last of its run. Only rows that write nothing may have an empty one.
    write_chunk = np.concatenate((np.zeros(1, np.int32), *runs))[np.cumsum(blocks[:, 3])]
    if common:
        runs = [run for run in runs if len(run)]
        blocks = blocks[blocks[:, 3] > 0]
        shared = [(first, count, 0, high - low, low, _LEAVES_PARTIALS) for first, count, low, high in common]
        blocks = np.concatenate((blocks, np.array(shared, np.int32)))
        runs += [singles[first].chunks[low:high] for first, _, low, high in common]
    return _Blocks(positions, write_chunk, blocks, runs)


def _blocks_of_several(
    slices: Sequence[RowSlice], first_row: int, block_rows: int, window: int | None, strict: bool, sources: StagedWrites
) -> _Blocks:
    """Slices of any number of rows, each cut where chunks end. first_row: the first row of the first slice."""
    rows: list[tuple[int, ...]] = []
    runs: list[NDArray[np.int32]] = []
    written, ranges = [], []
    for piece in slices:
        own = sources.of(piece)
        at = piece.start
        end = piece.start + piece.num_rows
        range_ = np.arange(at, end, dtype=np.int32)
        ranges.append(range_)
        written.append(own[range_ // PAGE_TOKENS - at // PAGE_TOKENS])
        while at < end:
            stop = min(end, (at // block_rows + 1) * block_rows)
            low = 0 if window is None else max(0, at + 1 - window) // PAGE_TOKENS
            high = -(-stop // PAGE_TOKENS)
            rows.append((first_row + at - piece.start, stop - at, 0, high - low, low, -1))
            end_of_own = high - piece.start // PAGE_TOKENS
            runs.append(_run(piece.chunks, low, high, own[end_of_own - 1 if strict else 0 : end_of_own]))
            at = stop
        first_row += piece.num_rows
    return _Blocks(np.concatenate(ranges), np.concatenate(written), np.array(rows, np.int32).reshape(-1, 6), runs)


def _largest_first(
    blocks: NDArray[np.int32], runs: list[NDArray[np.int32]]
) -> tuple[NDArray[np.int32], list[NDArray[np.int32]], NDArray[np.int32]]:
    """Blocks and their runs, largest first, and the cost of each block: work items are handed out in order, and a large
    one that starts last would delay the step's end.
    """
    cost = blocks[:, 1] * blocks[:, 3]
    if len(blocks) < 2 or cost.max() == cost.min():
        return blocks, runs, cost
    order = np.argsort(-cost, kind="stable")
    return blocks[order], [runs[i] for i in order], cost[order]


def _place_runs(blocks: NDArray[np.int32], runs: list[NDArray[np.int32]], num_singles: int) -> NDArray[np.int32]:
    """Sets the first index of blocks. Returns the indices: their runs, one after the other, those of single rows with
    room for one more chunk.
    """
    counts = blocks[:, 3]
    room = counts + ((blocks[:, 1] == 1) & (blocks[:, 0] < num_singles))
    blocks[:, 2] = np.cumsum(room) - room
    indices = np.zeros(room.sum(), np.int32)
    if runs:
        indices[np.repeat(blocks[:, 2] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())] = (
            np.concatenate(runs)
        )
    return indices


_NO_MERGES = np.empty((0, 3), np.int32)
_NO_PARTS = np.empty(0, np.int32)


_LEAVES_PARTIALS = -2
"""Value of a block's last column until partial rows are numbered: the block's rows have other pieces too."""


def _split(blocks: NDArray[np.int32], limit: int) -> NDArray[np.int32]:
    """Splits blocks into pieces that cost about `limit` at most."""
    pieces: list[tuple[int, ...]] = []
    for first_row, num_rows, first_index, num_chunks, start, partial in blocks.tolist():
        count = min(-(-num_rows * num_chunks // limit), num_chunks // MIN_SPLIT_CHUNKS)
        if count < 2:
            pieces.append((first_row, num_rows, first_index, num_chunks, start, partial))
            continue
        bounds = [num_chunks * i // count for i in range(count + 1)]
        pieces.extend(
            (first_row, num_rows, first_index + low, high - low, start + low, _LEAVES_PARTIALS)
            for low, high in itertools.pairwise(bounds)
        )
    return np.array(pieces, np.int32)


def _merges(pieces: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Numbers the partial rows of pieces in place. Returns the merges, their parts and the number of partial rows."""
    leaving = np.flatnonzero(pieces[:, 5] == _LEAVES_PARTIALS)
    if not len(leaving):
        return _NO_MERGES, _NO_PARTS, 0
    counts = pieces[leaving, 1]
    first = np.cumsum(counts) - counts
    pieces[leaving, 5] = first
    total = int(counts.sum())
    rows = np.repeat(pieces[leaving, 0] - first, counts) + np.arange(total)  # the query row of each partial row
    parts = np.argsort(rows, kind="stable").astype(np.int32)
    merged, index, lengths = np.unique(rows[parts], return_index=True, return_counts=True)
    return np.ascontiguousarray(np.stack([merged, index, lengths], 1), np.int32), parts, total
