"""The columns of a step's profiled slices, as arrays for the CPU kernels: the chunks of their keys and of their sums.

Knows chunk ids, not pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.attention.plan import StagedWrites
from quire.attention.profile import FAR_TOKENS
from quire.attention.rows import RowSlice
from quire.cache.ledger import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that the profiled slices of a step see, as int32 arrays. A column is one chunk of a path.

    scored       int64 [R, 3], for each row of the step: index of the scores that attention stores for it, or -1;
                 position of the first slot of its first column; number of columns
    num_scores   number of scores that attention stores for one query head
    rows         [r, 2], the profiled rows without stored scores: query row; index among the kept rows, or -1
    profiles     [n, 8], one per profiled slice: first row, rows, first column, columns, position of the first slot of
                 the first column, index of the first kept row, kept rows, rows whose peaks are recorded
    columns      [c, 6]: profile; the chunk as later rows see it; the chunk as its own rows see it; row of the chunk
                 table with its sums; index among the chunks with kept keys, or -1; tokens by which a row must follow a
                 slot to count towards its peak
    kept_chunks  chunks that exist only during this step, one layer at a time, and whose keys `recovered` needs later
    num_kept     rows whose queries are kept
    index        slice -> profile
    """

    scored: NDArray[np.int64]
    num_scores: int
    rows: NDArray[np.int32]
    profiles: NDArray[np.int32]
    columns: NDArray[np.int32]
    kept_chunks: NDArray[np.int32]
    num_kept: int
    index: dict[int, int]


def profiled_columns(slices: Sequence[RowSlice], *, window: int | None, encodes: bool, strict: bool) -> Columns:
    """The columns of a step's profiled slices. Arguments and names of staged chunks are those of `plan.lay_out`."""
    sources = StagedWrites(encodes)
    scored = np.full((sum(piece.num_rows for piece in slices), 3), -1, np.int64)
    num_scores = 0
    rows: list[NDArray[np.int32]] = [np.empty((0, 2), np.int32)]
    profiles: list[tuple[int, ...]] = []
    columns: list[NDArray[np.int32]] = []
    kept_chunks: list[int] = []
    index: dict[int, int] = {}
    first_row = num_columns = num_kept = 0
    for number, piece in enumerate(slices):
        own = sources.of(piece)
        profiled = piece.profiled
        if profiled is not None:
            end, first_own = piece.start + piece.num_rows, piece.start // PAGE_TOKENS - piece.num_dropped
            low = 0 if window is None else max(0, piece.start + 1 - window) // PAGE_TOKENS
            high = -(-end // PAGE_TOKENS) - piece.num_dropped
            found = np.empty((high - low, 6), np.int32)
            found[:, 0] = len(profiles)
            found[:, 1] = found[:, 2] = piece.chunks[low:high]
            found[first_own - low :, 2] = own
            if not strict:
                found[:, 1] = found[:, 2]
            found[:, 3] = profiled.sums[low:high]
            found[:, 4] = -1
            found[:, 5] = FAR_TOKENS
            found[: max(0, len(found) - profiled.near), 5] = 0
            # A chunk that this step encodes exists in full precision for one layer at a time. If strict, only the rows
            # inside it see it in full precision; otherwise all rows of the slice do.
            first_seen = first_own if not strict else max(first_own, (end - profiled.last_rows) // PAGE_TOKENS)
            for at in range(first_seen, high) if profiled.last_rows else ():
                if own[at - first_own] != piece.chunks[at]:
                    found[at - low, 4] = len(kept_chunks)
                    kept_chunks.append(int(own[at - first_own]))
            kept_index = np.arange(piece.num_rows, dtype=np.int32) + np.int32(
                num_kept + profiled.last_rows - piece.num_rows
            )
            kept_index[: piece.num_rows - profiled.last_rows] = -1
            index[number] = len(profiles)
            start = (low + piece.num_dropped) * PAGE_TOKENS
            if piece.num_rows == 1 and not profiled.last_rows:
                scored[first_row] = num_scores, start, high - low
                num_scores += (high - low) * PAGE_TOKENS
            else:
                rows.append(np.stack((np.arange(first_row, first_row + piece.num_rows, dtype=np.int32), kept_index), 1))
            of_rows = first_row, piece.num_rows, num_columns, high - low, start
            profiles.append((*of_rows, num_kept, profiled.last_rows, profiled.peaks))
            columns.append(found)
            num_columns += high - low
            num_kept += profiled.last_rows
        first_row += piece.num_rows
    return Columns(
        scored,
        num_scores,
        np.concatenate(rows),
        np.array(profiles, np.int32),
        np.concatenate(columns),
        np.array(kept_chunks, np.int32),
        num_kept,
        index,
    )
