"""Frames: the memory of those chunks of an offloaded cache that are in memory with all layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Int64s
from quire.cache.ledger import UNIT
from quire.offload.memory_plan import FrameLayout

NOWHERE = -1


class FramePool:
    """Equal frames in a stretch of an arena."""

    def __init__(self, start: int, num_bytes: int, count: int) -> None:
        self.start, self.num_bytes, self.count = start, num_bytes, count
        self._free = list(range(count - 1, -1, -1))

    @property
    def end(self) -> int:
        """The offset after the last frame."""
        return self.start + self.count * self.num_bytes

    @property
    def num_free(self) -> int:
        """Number of free frames."""
        return len(self._free)

    def take(self) -> int:
        """Takes a free frame. Returns its offset in the arena."""
        return self.start + self._free.pop() * self.num_bytes

    def free(self, offset: int) -> None:
        """Takes a frame back."""
        self._free.append((offset - self.start) // self.num_bytes)


class ChunkFrames:
    """The frames of chunks, by row of the table.

    open, near  pools for open and for sealed chunks; the same pool if both have the same codec
    starts      int64 [capacity]; offset of the row's frame in the arena, -1 without one
    is_sealed   bool [capacity]; all tokens of the chunk are computed
    used        int64 [capacity]; the step that used the chunk last
    """

    def __init__(
        self, start: int, layouts: tuple[FrameLayout, FrameLayout], counts: tuple[int, int], kinds: NDArray[np.uint8],
        sealed_kind: int,
    ) -> None:  # fmt: skip
        """start: offset of the first frame in the arena. layouts: those of open and of sealed chunks. counts: number of
        frames of open chunks, and of further ones. kinds: the table's kernel ids by row.
        """
        self._kinds, self._sealed_kind = kinds, sealed_kind
        self._open_layout, self._sealed_layout = layouts
        if layouts[0] is layouts[1]:
            self.open = self.near = FramePool(start, layouts[0].num_bytes, sum(counts))
        else:
            self.open = FramePool(start, layouts[0].num_bytes, counts[0])
            self.near = FramePool(self.open.end, layouts[1].num_bytes, counts[1])
        self.starts: Int64s = np.full(len(kinds), NOWHERE, np.int64)
        self.is_sealed: Bools = np.zeros(len(kinds), bool)
        self.used: Int64s = np.zeros(len(kinds), np.int64)
        self._near_so_far = self._sealed_so_far = 0  # chunks, of all steps

    def pool(self, row: int) -> FramePool:
        """The pool of a row's frame."""
        return self.near if self._kinds[row] == self._sealed_kind else self.open

    def take(self, row: int) -> Int64s:
        """Gives a row a free frame. Returns its pages, [L, H]."""
        pool = self.pool(row)
        at = self.starts[row] = pool.take()
        layout = self._sealed_layout if pool is self.near else self._open_layout
        return (at + layout.starts[:, None] + layout.heads) // UNIT

    def free(self, row: int) -> None:
        """Takes a row's frame back."""
        self.pool(row).free(int(self.starts[row]))
        self.starts[row] = NOWHERE

    @property
    def num_sealed(self) -> int:
        """Sealed chunks."""
        return int(self.is_sealed.sum())

    @property
    def num_near(self) -> int:
        """Sealed chunks with a frame."""
        return int((self.is_sealed & (self.starts >= 0)).sum())

    @property
    def num_open(self) -> int:
        """Other chunks with a frame."""
        return int(((self.starts >= 0) & ~self.is_sealed).sum())

    def count_step(self) -> None:
        """Counts the chunks of a step for `near_share`."""
        self._near_so_far += self.num_near
        self._sealed_so_far += self.num_sealed

    @property
    def near_share(self) -> float:
        """The share of the sealed chunks that had a frame, over all steps."""
        return self._near_so_far / self._sealed_so_far if self._sealed_so_far else 1.0

    def near_by_use(self) -> list[int]:
        """Rows of the sealed chunks with a frame, the least recently used first."""
        rows = np.flatnonzero(self.is_sealed & (self.starts >= 0))
        found: list[int] = rows[np.argsort(self.used[rows], kind="stable")].tolist()
        return found

    def least_recently_used(self, step: int) -> int | None:
        """The least recently used chunk among those that may leave their frame in a step; None if there is none."""
        may_leave = (self.starts >= 0) & (self.is_sealed | (self.used < step)) & (self._kinds == self._sealed_kind)
        return int(np.flatnonzero(may_leave)[np.argmin(self.used[may_leave])]) if may_leave.any() else None

    def check(self, is_taken: Bools) -> None:
        """Proves that frames have one owner each. is_taken: of all rows."""
        starts = self.starts[self.starts >= 0]
        assert (self.starts[~is_taken] < 0).all(), "a free chunk has memory"
        assert len(np.unique(starts)) == len(starts), "two owners"
        assert len(starts) == sum(pool.count - pool.num_free for pool in {self.open, self.near}), "a frame is lost"
