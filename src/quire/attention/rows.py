"""The rows of a step as attention sees them: plain values, no torch."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cache.ledger import PAGE_TOKENS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WAIT_SECONDS = 2e-4
"""Between two looks whether a layer is there, which takes milliseconds to arrive."""


def wait_for(ready: NDArray[np.int32] | None, layer: int) -> None:
    """Sleeps until a layer's pages may be read: see `AttentionBackend.plan`."""
    while ready is not None and not ready[layer]:
        time.sleep(WAIT_SECONDS)


@dataclass(frozen=True, slots=True)
class Profiled:
    """What a slice of a prompt leaves for retention.

    sums       int32 [>= chunks of the path up to the slice's end]: row i of the chunk table has the column sums of
               chunk i; the rows' attention is added there. No other slice of the step adds to the same
    last_rows  so many rows at the slice's end are kept for `recovered`; 0: none
    peaks      in place of sums over all rows, each column's `profile.column_peaks` over so many rows at the slice's end
               is noted, where it is larger than what stands there; 0: sums
    near       of the path's chunks up to the slice's end the last so many stand where their number says; those before
               them are far from all rows, which is all that peaks need to know
    """

    sums: NDArray[np.int32]
    last_rows: int = 0
    peaks: int = 0
    near: int = sys.maxsize


@dataclass(slots=True)
class RowSlice:
    """Consecutive query rows of one sequence in this step.

    start     position of the first row
    num_rows  rows, all at consecutive positions; their keys and values are written before they attend
    chunks    int32 [>= ceil((start + num_rows) / 64)], the sequence's chunk ids in order of position
    shared    (name, chunks) of the segments the path begins with, all before `start`; equal names at the same place
              mean the same chunks. They are read together by slices of one row that stand side by side at the
              beginning of a step
    filled    the open chunk that holds the slots before `start` of a chunk which this step fills, so that `chunks` has
              the one it will be encoded into; -1 if there is none
    profiled  what it leaves for retention; None: nothing
    num_gone  of a slice of one row whose path retention has made smaller: chunks that `chunks` has fewer than the
              sequence. All but the last of `chunks` then hold tokens from anywhere before the row, in the slots that
              the table's masks say, and the last one those next to it. 0 otherwise
    """

    start: int
    num_rows: int
    chunks: NDArray[np.int32]
    shared: tuple[tuple[int, int], ...] = ()
    filled: int = -1
    profiled: Profiled | None = None
    num_gone: int = 0

    def __post_init__(self) -> None:
        if self.profiled is not None:
            num_chunks = -(-(self.start + self.num_rows) // PAGE_TOKENS) - self.num_gone
            assert len(self.profiled.sums) >= num_chunks, f"{len(self.profiled.sums)} rows of sums, {num_chunks} chunks"
            assert 0 <= max(self.profiled.last_rows, self.profiled.peaks) <= self.num_rows, (
                f"{self.profiled.last_rows} or {self.profiled.peaks} last rows of {self.num_rows}"
            )
