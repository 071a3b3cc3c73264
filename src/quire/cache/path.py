"""The path of a sequence: sealed chunks from the root of the tree, then at most one open chunk, the only one that
grows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Int32s
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.retention.retained import RetainedTokens
from quire.cache.run import Run
from quire.cache.segment import NO_ROWS, Segment
from quire.cache.store import Transfer


@dataclass(slots=True)
class PathRetention:
    """The effect of retention on a path.

    is_decided   whether retention has decided which tokens of the prompt to keep
    retained     the kept tokens of the sealed chunks; None: all tokens
    num_dropped  number of chunks without kept tokens; an unsealed chunk i is chunks[i - num_dropped]
    heads        segment -> bool [L, H]: heads whose pages the path still reads; empty before the decision
    sums         int32 [num_chunks], rows with the column sums of each chunk; empty without retention
    """

    is_decided: bool = False
    retained: RetainedTokens | None = None
    num_dropped: int = 0
    heads: dict[Segment, Bools] = field(default_factory=dict)
    sums: Int32s = field(default_factory=lambda: NO_ROWS)

    @property
    def needs_sums(self) -> bool:
        """Whether new chunks get rows of sums: with retention, unless it has decided to keep all tokens."""
        return self.retained is not None or not self.is_decided


@dataclass(slots=True)
class PathReservation:
    """The reservation of a path, and the chunks that it is about to take.

    num_reserved  number of tokens that admission reserved room for
    num_chunks    number of sealed chunks for them
    num_shareable number of chunks that the tree may get: see `PromptLimits`
    free_until    number of tokens up to which nothing is allocated, encoded or freed
    filled        open chunk that this step fills and encodes into another chunk, which replaces it in `chunks`; -1:
                  none
    """

    num_reserved: int = 0
    num_chunks: int = 0
    num_shareable: int = sys.maxsize
    free_until: int = 0
    filled: int = -1


@dataclass(eq=False, slots=True)
class Path:
    """The chunks that one sequence attends to: the tree from its root to one segment, then private chunks, of which the
    last one is open.

    tip          the last segment of the tree on the path, locked with all before it; None if the path is in no tree
    num_shared   number of leading chunks that belong to the tree
    num_tokens   tokens whose keys and values are stored; for a sequence in the calendar, the number when the scheduler
                 last looked at it
    num_sealed   number of leading chunks that are sealed; num_sealed * 64 <= num_tokens
    num_stored   number of leading chunks that have, or get in this step, the codec of sealed chunks; all chunks if open
                 chunks have the same codec
    shared       the result of `PrefixTree.shared`, with the numbers of divisions and of shared chunks it is valid for
    priority     that of its request; see `Segment`
    lifetime     that of its request; see `Segment`
    chunks       int32 [num_chunks], chunk ids in order of position. Never written: a change makes a new array
    transfer     brings chunks that follow the shared ones from a store; None: none are on their way
    """

    tip: Segment | None = None
    num_shared: int = 0
    num_tokens: int = 0
    num_sealed: int = 0
    num_stored: int = 0
    shared: tuple[tuple[int, int], tuple[tuple[int, int], ...]] = ((-1, -1), ())
    priority: int = 0
    lifetime: float | None = None
    chunks: Int32s = field(default_factory=lambda: NO_ROWS)
    transfer: Transfer | None = None
    reservation: PathReservation = field(default_factory=PathReservation)
    retention: PathRetention = field(default_factory=PathRetention)

    @property
    def next_seal(self) -> int:
        """Number of tokens with which the next chunk is full."""
        return (self.num_sealed + 1) * PAGE_TOKENS

    @property
    def num_begun(self) -> int:
        """Number of chunks with tokens or room for them, dropped chunks included."""
        return len(self.chunks) + self.retention.num_dropped

    @property
    def num_unsealed(self) -> int:
        """Number of reserved sealed chunks that it has not taken."""
        return max(0, self.reservation.num_chunks - self.num_stored)

    @property
    def has_open(self) -> bool:
        """Whether its last chunk is open and has another codec than sealed chunks."""
        return self.num_begun > self.num_stored

    @property
    def is_all_shared(self) -> bool:
        """Whether it has no private chunks, so that it may extend over cached ones."""
        return self.retention.retained is None and len(self.chunks) == self.num_shared

    @property
    def segments(self) -> list[Segment]:
        """The segments of the tree on the path, from its beginning."""
        return [] if self.tip is None else self.tip.branch

    def reads(self) -> Iterator[tuple[Segment, Bools | None]]:
        """The segments of the tree on the path, the last one first, and the heads whose pages it reads; None: all."""
        heads: Bools | None = None
        for segment in reversed(self.segments):
            # A front that was divided off later has the heads of the rest of its segment.
            heads = self.retention.heads.get(segment, heads)
            yield segment, heads

    @property
    def private(self) -> Int32s:
        """The chunks that only this sequence holds."""
        return self.chunks[self.num_shared :]

    @property
    def own_rows(self) -> Int32s:
        """All rows that only this sequence holds: the chunk that is being filled, its private chunks, and its sums."""
        filled = self.reservation.filled
        if filled < 0 and not len(self.retention.sums):
            return self.private
        return np.concatenate(([filled] if filled >= 0 else NO_ROWS, self.private, self.retention.sums), dtype=np.int32)

    def append(self, chunks: Int32s) -> None:
        """Adds chunks at the end."""
        self.chunks = np.concatenate((self.chunks, chunks))

    def replace(self, first: int, chunks: Int32s) -> Int32s:
        """Replaces chunks from index `first` on by others with the same contents. Returns the replaced ones."""
        end = first + len(chunks)
        replaced = self.chunks[first:end]
        self.chunks = np.concatenate((self.chunks[:first], chunks, self.chunks[end:]))
        return replaced

    def forget(self, indices: NDArray[np.intp]) -> Int32s:
        """Removes chunks without pages. Returns their rows and those of their sums; the caller frees them."""
        retention = self.retention
        rows = np.concatenate((self.chunks[indices], retention.sums[indices]))
        retention.sums = np.delete(retention.sums, indices)
        self.chunks = np.delete(self.chunks, indices)
        retention.num_dropped += len(indices)
        return rows


@dataclass(frozen=True)
class SwappedPath:
    """A path whose own chunks are in a store.

    path        the path without its chunks
    num_shared  number of leading chunks that were shared: their keys find them again
    run         the other chunks; None: there are none
    """

    path: Path
    num_shared: int
    run: Run | None

    @classmethod
    def of(cls, path: Path, run: Run | None) -> SwappedPath:
        """A copy of a path without its chunks. run: its own chunks in a store."""
        kept = replace(path, tip=None, num_shared=0, shared=Path().shared, chunks=NO_ROWS)
        kept.reservation, kept.retention = replace(path.reservation), replace(path.retention, heads={}, sums=NO_ROWS)
        return cls(kept, path.num_shared, run)
