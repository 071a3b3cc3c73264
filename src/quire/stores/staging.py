"""Staging memory: where extents wait for the disk."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass

from quire.stores.direct import padded


@dataclass(frozen=True, eq=False)
class StagingBuffer:
    """A slot of the staging memory, a multiple of a block long. length: bytes of its extent; the rest is zero."""

    offset: int
    length: int
    block: memoryview

    @property
    def extent(self) -> memoryview:
        """The extent's bytes."""
        return self.block[: self.length]


class StagingPool:
    """Page-aligned memory, allocated by first fit. Invariant: `free_bytes` and the taken slots are the whole memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.free_bytes = num_bytes
        self._memory = memoryview(mmap.mmap(-1, num_bytes))
        self._gaps = [(0, num_bytes)]  # offsets and ends, ascending
        self._lock = threading.Lock()

    def take(self, length: int) -> StagingBuffer | None:
        """A slot for an extent; None if there is no room."""
        size = padded(length)
        with self._lock:
            for index, (start, end) in enumerate(self._gaps):
                if end - start >= size:
                    self._gaps[index : index + 1] = [(start + size, end)] if end - start > size else []
                    self.free_bytes -= size
                    break
            else:
                return None
        block = self._memory[start : start + size]
        block[length:] = bytes(size - length)
        return StagingBuffer(start, length, block)

    def free(self, buffers: list[StagingBuffer]) -> None:
        """Frees slots."""
        with self._lock:
            gaps = sorted(self._gaps + [(buffer.offset, buffer.offset + len(buffer.block)) for buffer in buffers])
            self._gaps = []
            for start, end in gaps:
                if self._gaps and self._gaps[-1][1] >= start:
                    assert self._gaps[-1][1] == start, "a slot was given back twice"
                    self._gaps[-1] = (self._gaps[-1][0], end)
                else:
                    self._gaps.append((start, end))
            self.free_bytes += sum(len(buffer.block) for buffer in buffers)

    def check(self, buffers: list[StagingBuffer]) -> None:
        """Asserts that exactly these slots are taken."""
        with self._lock:
            taken = sum(len(buffer.block) for buffer in buffers)
            free = sum(end - start for start, end in self._gaps)
            assert free == self.free_bytes and free + taken == self.num_bytes, f"{free} + {taken} of {self.num_bytes}"
