"""Large host memory: anonymous pages of 2 MiB if the system grants them.

Weights and cache are read from end to end every step; with 4 KiB mappings the reads miss the TLB. Needs private
mappings: shared ones are shmem, for which huge pages are off by default.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from quire.errors import ConfigError

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; mmap has no name for it."""

_POPULATED_BYTES = 8 << 20

BLOCK_BYTES = 32 << 20
"""Bytes that `HugePageAllocator` maps at a time. Pages that are never written cost nothing."""

ALIGNMENT = 128

Fill = Callable[[torch.Tensor], None]
"""Writes the contents into zeroed memory, uint8 [num_bytes]."""


class WeightMemory(Protocol):
    """Memory for packed weights."""

    def place(self, name: str, num_bytes: int, fill: Fill) -> torch.Tensor:
        """Returns uint8 [num_bytes], aligned to 128 bytes, filled by `fill`. Memory that already has the contents does
        not call `fill`.

        name  unique name of the contents
        """


def huge_pages(num_bytes: int) -> torch.Tensor:
    """Returns uint8 [num_bytes], zeroed and page-aligned. The memory is freed with its last view.

    Raises ConfigError if the system does not grant that much address space.
    """
    flags = {} if not hasattr(mmap, "MAP_PRIVATE") else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    try:
        memory = mmap.mmap(-1, num_bytes, **flags)
    except OSError as error:
        raise ConfigError(f"the system does not give {num_bytes} bytes of memory: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def memory_on(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Returns uint8 [num_bytes] on a device; on a CPU `huge_pages`."""
    return huge_pages(num_bytes) if device.type == "cpu" else torch.empty(num_bytes, dtype=torch.uint8, device=device)


def populate_ahead(memory: torch.Tensor, num_bytes: int) -> threading.Thread:
    """Starts a thread that makes the system back the first bytes of `huge_pages` with memory now instead of at their
    first use. It changes no contents, and does nothing on systems without MADV_POPULATE_WRITE.
    """
    address, end = memory.data_ptr(), min(num_bytes, memory.numel())

    def populate() -> None:
        libc = ctypes.CDLL(None)
        for start in range(0, end, _POPULATED_BYTES):
            size = min(_POPULATED_BYTES, end - start)
            # The call releases the interpreter lock. `memory` must stay alive, so the thread holds it.
            if libc.madvise(ctypes.c_void_p(memory.data_ptr() + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                return

    assert address % mmap.PAGESIZE == 0, "memory that begins inside a page"
    thread = threading.Thread(target=populate, name="quire-populate", daemon=True)
    thread.start()
    return thread


class HugePageAllocator:
    """Allocates tensors one after the other from blocks of huge pages. A block lives as long as any of its tensors."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Returns uint8 [num_bytes], zeroed, aligned to 128 bytes."""
        whole = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if len(self._block) < whole:
            self._block = huge_pages(max(whole, BLOCK_BYTES))
        block, self._block = self._block[:num_bytes], self._block[whole:]
        return block

    def place(self, name: str, num_bytes: int, fill: Fill) -> torch.Tensor:
        """See WeightMemory.place."""
        block = self.take(num_bytes)
        fill(block)
        return block


def trim_heap() -> None:
    """Returns freed memory that the allocator has kept (as glibc does) to the system."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
