"""Where a step's profiled slices find their keys, and where what they add goes: arrays for kernels. Knows chunk ids,
not pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.attention.plan import Sources
from quire.attention.profile import FAR_TOKENS
from quire.attention.rows import RowSlice
from quire.cache.ledger import PAGE_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Columns:
    """What the profiled slices of a step look at, as int32 arrays.

    scored       int64 [R, 3], of all rows of the step: where the scores stand that attention leaves of a row, or -1;
                 position of the first slot of its first column, and how many columns it has
    num_scores   that attention leaves, of one query head
    rows         [r, 2]: query row, its place among those whose queries are kept or -1; of those that leave no scores
    profiles     [n, 8], a slice each: first row, rows, first of its columns, columns, position of the first slot of the
                 first one, place of the first row that is kept, rows that are kept, rows whose peaks are noted
    columns      [c, 6], a chunk of a path each: profile, chunk as rows behind it see it, as its own rows do, row of the
                 chunk table with its sums, place among the chunks whose keys are kept or -1, tokens that a row must be
                 behind a slot to count for its peak
    kept_chunks  chunks that exist in this step, one layer at a time, whose keys `recovered` needs later
    num_kept     rows whose queries are kept
    index        of each slice, its profile
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
    """The columns of a step's profiled slices. Arguments as of `plan.lay_out`, which names staged chunks alike."""
    sources = Sources(encodes)
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
            end, first_own = piece.start + piece.num_rows, piece.start // PAGE_TOKENS - piece.num_gone
            low = 0 if window is None else max(0, piece.start + 1 - window) // PAGE_TOKENS
            high = -(-end // PAGE_TOKENS) - piece.num_gone
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
            # What is encoded in this step is there as it was computed for one layer only; the last rows see it so if
            # they are in it, or all of the slice's if they see all of it as computed.
            first_seen = first_own if not strict else max(first_own, (end - profiled.last_rows) // PAGE_TOKENS)
            for at in range(first_seen, high) if profiled.last_rows else ():
                if own[at - first_own] != piece.chunks[at]:
                    found[at - low, 4] = len(kept_chunks)
                    kept_chunks.append(int(own[at - first_own]))
            places = np.arange(piece.num_rows, dtype=np.int32) + np.int32(
                num_kept + profiled.last_rows - piece.num_rows
            )
            places[: piece.num_rows - profiled.last_rows] = -1
            index[number] = len(profiles)
            start = (low + piece.num_gone) * PAGE_TOKENS
            if piece.num_rows == 1 and not profiled.last_rows:
                scored[first_row] = num_scores, start, high - low
                num_scores += (high - low) * PAGE_TOKENS
            else:
                rows.append(np.stack((np.arange(first_row, first_row + piece.num_rows, dtype=np.int32), places), 1))
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
