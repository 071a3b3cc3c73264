"""The chunks of an offloaded cache that the micro-batches of a step read and fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.attention.rows import RowSlice
from quire.cache.arrays import Int32s, Int64s
from quire.cache.ledger import PAGE_TOKENS
from quire.offload.chunk_slots import SlotRange


@dataclass(frozen=True)
class FarChunks:
    """The far chunks of one micro-batch, or those that several share.

    rows      int32 [n], in the order of their places in a buffer: first the chunks to read, then those to fill
    loads     runs to read
    stores    runs that the step fills and then writes
    repeated  places of chunks that other micro-batches load too, into other places
    """

    rows: Int32s
    loads: list[SlotRange]
    stores: list[SlotRange]
    repeated: Int64s


@dataclass(frozen=True)
class StepChunks:
    """The chunks of a step.

    reads  for each micro-batch, the chunks that its rows read and do not change
    fills  for each micro-batch, the chunks that its rows begin
    whole  chunks that must have a frame: open ones, before or after this step
    full   the chunks among `whole` that are full after this step
    """

    reads: list[Int32s]
    fills: list[Int32s]
    whole: list[int]
    full: list[int]

    @classmethod
    def of(cls, batches: Sequence[Sequence[RowSlice]], attends: bool) -> StepChunks:
        """attends: whether decode rows attend to far chunks in place instead of loading them."""
        found = cls([], [], [], [])
        for slices in batches:
            read, filled = [], []
            for piece in slices:
                chunks, begun = path_of(piece), piece.start // PAGE_TOKENS
                end = piece.start + piece.num_rows
                if piece.filled >= 0:
                    found.whole.append(piece.filled)
                elif piece.start % PAGE_TOKENS:
                    found.whole.append(int(chunks[begun]))
                    begun += 1
                    if end >= begun * PAGE_TOKENS:
                        found.full.append(found.whole[-1])
                if end % PAGE_TOKENS:
                    found.whole.append(int(chunks[-1]))
                if not attends or piece.num_rows > 1:
                    read.append(chunks[:begun])
                filled.append(chunks[begun:])
            found.reads.append(distinct(read))
            found.fills.append(distinct(filled))
        return found


def path_of(piece: RowSlice) -> Int32s:
    """The chunks of a slice up to its last row."""
    return piece.chunks[: -(-(piece.start + piece.num_rows) // PAGE_TOKENS)]


def distinct(parts: Sequence[Int32s]) -> Int32s:
    """The distinct rows of some arrays."""
    return np.unique(np.concatenate([np.empty(0, np.int32), *parts]))
