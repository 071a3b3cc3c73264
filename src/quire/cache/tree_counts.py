"""Counts over a prefix tree, for admission and statistics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.cache.segment import Segment


@dataclass
class TreeCounts:
    """Counts over the segments of a tree. Every change of a segment first takes it out of the counts and then puts it
    back.

    shape         (L, H) of the pages of a chunk
    num_chunks    chunks the tree holds
    num_read      chunks that live paths read in all heads
    num_reads     the same, counted once for each of these paths
    num_pinned    chunks that are pinned, read or not
    num_unused    chunks that are not pinned and that no live path reads: all their pages can be evicted
    num_parted    chunks of which some path no longer reads some heads
    num_part_idle those of them with pages that can be evicted
    part_read, part_idle  int64 [L, H]: pages of parted chunks that are read, and that can be evicted
    num_unread_firsts  segments at the start of sequences that no live path uses; their first chunks may have sidecars
    num_idle_firsts    those of them that are not pinned
    num_attached  attached rows
    """

    shape: tuple[int, int]
    num_chunks: int = 0
    num_read: int = 0
    num_reads: int = 0
    num_pinned: int = 0
    num_unused: int = 0
    num_parted: int = 0
    num_part_idle: int = 0
    num_unread_firsts: int = 0
    num_idle_firsts: int = 0
    num_attached: int = 0

    def __post_init__(self) -> None:
        self.part_read, self.part_idle = np.zeros((2, *self.shape), np.int64)

    @property
    def num_idle(self) -> int:
        """Chunks with pages that can be evicted."""
        return self.num_unused + self.num_part_idle

    def _count(self, segment: Segment, by: int) -> None:
        """Takes a segment out of the counts (by = -1), or puts it in (1)."""
        if segment.is_dropped:
            return
        num_chunks, users = by * len(segment.chunks), segment.users
        is_free = not segment.pins
        self.num_chunks += num_chunks
        self.num_attached += by * len(segment.attached)
        if segment.unread is not None:
            is_read = segment.unread < users
            self.num_parted += num_chunks
            self.part_read += num_chunks * is_read
            self.part_idle += num_chunks * is_free * ~is_read
            self.num_part_idle += num_chunks * segment.is_idle
        elif users:
            self.num_read += num_chunks
            self.num_reads += num_chunks * users
        elif is_free:
            self.num_unused += num_chunks
        if not users and segment.start == 0:
            self.num_unread_firsts += by
            self.num_idle_firsts += by * is_free
        if not is_free:
            self.num_pinned += num_chunks
