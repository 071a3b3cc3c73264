"""The memory of an offloaded cache: how much it needs, and how it is divided. See `offload.table`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.cache.arrays import Int32s, Int64s
from quire.cache.ledger import PAGE_TOKENS
from quire.errors import ConfigError
from quire.offload.units import Share
from quire.options import format_bytes
from quire.stores.direct import padded


class FrameLayout:
    """The layout of a page format in a frame and in the file: the pages of a layer together, padded to 4 KiB."""

    def __init__(self, sizes: Int32s) -> None:
        """sizes: bytes of the pages of a chunk, [L, H]."""
        ends = np.cumsum(sizes, 1, dtype=np.int64)
        self.layer_bytes: Int64s = np.array([padded(int(end)) for end in ends[:, -1]])
        self.heads = ends - sizes
        """Offset of each page in its layer, int64 [L, H]."""
        self.starts = np.cumsum(self.layer_bytes) - self.layer_bytes
        """Offset of each layer in a frame, int64 [L]."""
        self.num_bytes = int(self.layer_bytes.sum())
        self.largest = int(self.layer_bytes.max())


@dataclass(frozen=True)
class MemoryPlan:
    """The division of an `OffloadedTable`'s memory.

    num_open      frames of open chunks; if these have the codec of sealed ones, `num_near` frames serve both
    num_near      further frames of sealed chunks
    own_bytes     bytes of one buffer of a micro-batch; at least a layer of the longest sequence
    shared_bytes  bytes of one buffer of shared chunks
    """

    num_open: int
    num_near: int
    own_bytes: int
    shared_bytes: int

    @staticmethod
    def of(memory: int, needs: MemoryRequirements) -> MemoryPlan:
        """Divides `memory` bytes. Raises ConfigError if they are too few."""
        min_bytes = needs.min_bytes
        if memory < min_bytes:
            raise ConfigError(
                f"an offloaded cache needs at least {min_bytes} bytes ({format_bytes(min_bytes)}) of cache.memory for"
                f" {needs.max_running} sequences of {needs.max_chunks * PAGE_TOKENS} tokens, and has"
                f" {format_bytes(memory)}; raise it, or lower scheduler.max_running or model.max_context"
            )
        # First buffers for whole micro-batches, then frames, which save reads.
        own = needs.buffer_bytes + min(
            (memory - min_bytes) // 2 // needs.sealed.largest * needs.sealed.largest, needs.spare_buffer_bytes
        )
        near = (
            max(0, memory - needs.frame_bytes - needs.packed_bytes - 2 * needs.buffer_bytes - 2 * own)
            // needs.sealed.num_bytes
        )
        return MemoryPlan(needs.num_open, near, own, needs.buffer_bytes)


@dataclass(frozen=True)
class MemoryRequirements:
    """The requirements for a `MemoryPlan`.

    sealed       pages of sealed chunks
    open         pages of open chunks; None if these have the codec of sealed ones
    max_running  sequences at once
    max_chunks   chunks of the longest sequence
    micro_batch  sequences that are computed together
    packs        whether retention packs sequences; a sequence must then be in memory completely for a moment
    """

    sealed: FrameLayout
    open: FrameLayout | None
    max_running: int
    max_chunks: int
    micro_batch: int
    packs: bool = False

    @property
    def num_open(self) -> int:
        """Number of frames of open chunks. A sequence has one open chunk, and two in a step that fills one and begins
        the next. Such steps are few if open chunks are sealed in place.
        """
        return self.max_running + self.max_running // 4 + 1 if self.open is None else 2 * self.max_running

    @property
    def frame_bytes(self) -> int:
        """Bytes of these frames."""
        return self.num_open * (self.open or self.sealed).num_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the smallest buffer: a layer of the longest sequence."""
        return self.max_chunks * self.sealed.largest

    @property
    def packed_bytes(self) -> int:
        """Bytes of a sequence that is packed."""
        return self.packs * self.max_chunks * self.sealed.num_bytes

    @property
    def min_bytes(self) -> int:
        """The least sufficient bytes of memory."""
        return self.frame_bytes + self.packed_bytes + 4 * self.buffer_bytes

    @property
    def spare_buffer_bytes(self) -> int:
        """Bytes that a buffer can use in addition to `buffer_bytes`."""
        return (self.micro_batch - 1) * self.buffer_bytes

    def with_near(self, near: Share) -> int:
        """Memory for whole micro-batches, and for a share of the longest sequences' chunks."""
        num_near = math.ceil(near * self.max_running * self.max_chunks)
        return self.min_bytes + 2 * self.spare_buffer_bytes + num_near * self.sealed.num_bytes
