"""Slots: the places of an offloaded cache's chunks in its file, or in the host's memory.

The layers of a chunk are stored apart: layer l of all slots, then layer l + 1. Chunks with neighbouring slots are read
with one request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.cache.arrays import Bools, Int32s, Int64s
from quire.cache.ledger import UNIT
from quire.offload.chunk_frames import NOWHERE
from quire.offload.memory_plan import FrameLayout
from quire.offload.mover import IoRequest

if TYPE_CHECKING:
    from torch import Tensor


class SlotRange(NamedTuple):
    """Chunks that are moved together: places [first, first + length) of a buffer, slots [slot, slot + length)."""

    first: int
    slot: int
    length: int


class ChunkSlots:
    """The slots of chunks, by row of the table.

    layout     layout of a chunk's pages
    ids        int64 [capacity]; the row's slot, -1 without one
    is_stored  bool [capacity]; the slot has the chunk's bytes
    num_bytes  bytes of all slots
    pages      int32 [capacity, L, H]; page ids of rows with a slot, if the slots are an arena; None: they are a file
    """

    def __init__(self, capacity: int, layout: FrameLayout, *, has_pages: bool = False) -> None:
        self.layout = layout
        self.ids: Int64s = np.full(capacity, NOWHERE, np.int64)
        self.is_stored: Bools = np.zeros(capacity, bool)
        self.num_bytes = capacity * layout.num_bytes
        self._is_free = np.ones(capacity, bool)
        self._layer_starts = layout.starts * capacity
        self.pages: Int32s | None = np.zeros((capacity, *layout.heads.shape), np.int32) if has_pages else None

    @property
    def num_taken(self) -> int:
        """Number of slots in use."""
        return len(self._is_free) - int(self._is_free.sum())

    def take(self, rows: list[int]) -> None:
        """Gives slots to rows, neighbouring ones if possible."""
        free, count = np.flatnonzero(self._is_free), len(rows)
        assert len(free) >= count, "there are more chunks than slots"
        found = free[:count]
        if count > 1:
            together = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
            if len(together):
                found = free[together[0] : together[0] + count]
        self._is_free[found] = False
        self.ids[rows] = found
        if self.pages is not None:
            starts = self._layer_starts + found[:, None] * self.layout.layer_bytes
            self.pages[rows] = (starts[:, :, None] + self.layout.heads) // UNIT

    def free(self, rows: Int32s) -> None:
        """Takes back the slots of rows that have one."""
        ids = self.ids[rows]
        self._is_free[ids[ids >= 0]] = True
        self.ids[rows] = NOWHERE
        self.is_stored[rows] = False

    def in_order(self, rows: Int32s) -> Int32s:
        """The rows, sorted by their slots."""
        assert (self.ids[rows] >= 0).all(), "a chunk is neither in memory nor in the file"
        return rows[np.argsort(self.ids[rows])]

    def runs(self, rows: Int32s) -> list[SlotRange]:
        """Groups rows with rising slots into runs of consecutive slots."""
        slots = self.ids[rows]
        if not len(slots):
            return []
        begins: Bools = np.append(True, slots[1:] != slots[:-1] + 1)
        first = np.flatnonzero(begins)
        counts = np.diff(np.append(first, len(slots)))
        return [SlotRange(*each) for each in zip(first.tolist(), slots[first].tolist(), counts.tolist(), strict=True)]

    def chunk_parts(self, row: int, frame: Tensor) -> Iterator[IoRequest]:
        """The requests that move all layers of a row's slot from or to its frame, uint8 [n]."""
        for layer, size in enumerate(self.layout.layer_bytes.tolist()):
            at = int(self.layout.starts[layer])
            yield IoRequest(int(self._layer_starts[layer]) + int(self.ids[row]) * size, frame[at : at + size])

    def layer_parts(self, layer: int, buffer: Tensor, runs: list[SlotRange]) -> Iterator[IoRequest]:
        """The requests that move a layer of some runs from or to a buffer, uint8 [n]."""
        size, base = int(self.layout.layer_bytes[layer]), int(self._layer_starts[layer])
        for first, slot, count in runs:
            yield IoRequest(base + slot * size, buffer[first * size : (first + count) * size])

    def check(self, is_taken: Bools) -> None:
        """Proves that slots have one owner each. is_taken: of all rows."""
        ids = self.ids[self.ids >= 0]
        assert (self.ids[~is_taken] < 0).all(), "a free chunk has memory"
        assert len(np.unique(ids)) == len(ids), "two owners"
        assert len(ids) == self.num_taken, "a slot is lost"
