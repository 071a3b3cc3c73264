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
"""Polling interval while a layer's pages arrive, which takes milliseconds."""


def wait_for(ready: NDArray[np.int32] | None, layer: int) -> None:
    """Sleeps until a layer's pages may be read: see `AttentionBackend.plan`."""
    while ready is not None and not ready[layer]:
        time.sleep(WAIT_SECONDS)


@dataclass(frozen=True, slots=True)
class Profiled:
    """The attention statistics that a slice of a prompt records for retention.

    sums       int32 [>= chunks of the path up to the slice's end]: for each chunk, the row of the chunk table with its
               column sums. The slice adds its attention there. No other slice of the step adds to the same row
    last_rows  number of rows at the slice's end that are kept for `recovered`
    peaks      number of rows at the slice's end whose `profile.column_peaks` are recorded in place of sums, where they
               are larger than what is stored; 0: sums
    near       number of last chunks, up to the slice's end, whose index in the path gives their position. Earlier
               chunks are far from all rows, and peaks need no more than that
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
    shared    (name, number of chunks) of the segments that the path begins with, all before `start`. Equal names at the
              same depth mean the same chunks. Neighbouring slices of one row at the start of a step read them together
    filled    the open chunk with the slots before `start`, if this step fills it; `chunks` then has the chunk that it
              is encoded into. -1: none
    profiled  what the slice records for retention; None: nothing
    reads_all    whether a slice of one row always reads all values: see `AttentionSpec.sparse_values`
    num_dropped  number of chunks that retention has removed from the path; only for slices of one row. If it is not 0,
              all of `chunks` but the last hold tokens from anywhere before the row, in the slots that the table's masks
              show. The last one holds the tokens next to the row
    """

    start: int
    num_rows: int
    chunks: NDArray[np.int32]
    shared: tuple[tuple[int, int], ...] = ()
    filled: int = -1
    profiled: Profiled | None = None
    num_dropped: int = 0
    reads_all: bool = False

    def __post_init__(self) -> None:
        if self.profiled is not None:
            num_chunks = -(-(self.start + self.num_rows) // PAGE_TOKENS) - self.num_dropped
            assert len(self.profiled.sums) >= num_chunks, f"{len(self.profiled.sums)} rows of sums, {num_chunks} chunks"
            assert 0 <= max(self.profiled.last_rows, self.profiled.peaks) <= self.num_rows, (
                f"{self.profiled.last_rows} or {self.profiled.peaks} last rows of {self.num_rows}"
            )
