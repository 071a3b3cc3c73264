"""Large host memory consists of huge pages and is freed."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.memory import ALIGNMENT, BLOCK_BYTES, HugePageAllocator, huge_pages, populate_ahead

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kib(address: int) -> int:
    """KiB in huge pages of the mapping that holds the address; neighbouring mappings may have been merged with it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError("no mapping holds the address")


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.alone
@pytest.mark.skipif(not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="this system grants no huge pages")
def test_memory_that_is_used_lies_in_huge_pages() -> None:
    memory = huge_pages(64 << 20)
    before = huge_kib(memory.data_ptr() + (32 << 20))
    memory.fill_(1)
    # A fragmented machine may not have them all.
    assert huge_kib(memory.data_ptr() + (32 << 20)) - before >= 16 << 10


def test_carved_tensors_are_zero_aligned_apart_and_outlive_their_carver() -> None:
    allocator = HugePageAllocator()
    taken = [allocator.take(size) for size in (1, 200, BLOCK_BYTES // 2, BLOCK_BYTES // 2, BLOCK_BYTES + 5, 64)]
    assert all(tensor.data_ptr() % ALIGNMENT == 0 and not tensor.any() for tensor in taken)
    for number, tensor in enumerate(taken, 1):
        tensor.fill_(number)
    del allocator
    gc.collect()
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(taken, 1))


@pytest.mark.alone
def test_memory_goes_back_with_its_last_view() -> None:
    before = resident_mib()
    view = huge_pages(256 << 20).fill_(1)[:10]
    assert resident_mib() - before > 200
    del view
    gc.collect()
    assert resident_mib() - before < 50


def test_what_no_system_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not give 2305843009213693952 bytes"):
        huge_pages(1 << 61)


def test_embedding_and_head_share_one_matrix() -> None:
    from quire.models.cpu_ops import CpuOps
    from quire.models.cpu_panels import Panels

    weight = torch.randn(131, 70).bfloat16()
    embedding, head = CpuOps().tied(weight, torch.bfloat16)
    assert isinstance(head, Panels)
    tokens = torch.tensor([0, 130, 31, 32, 64] * 9)
    expected = weight[tokens].clone()
    weight.zero_()
    assert torch.equal(embedding(tokens), expected)


def test_memory_is_backed_ahead_of_its_use_and_keeps_its_contents() -> None:
    memory = huge_pages(64 << 20)
    memory[5] = 7
    populate_ahead(memory, 24 << 20).join()
    found = np.zeros(memory.numel() // mmap.PAGESIZE, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(memory.numel())
    assert libc.mincore(ctypes.c_void_p(memory.data_ptr()), size, ctypes.c_void_p(found.ctypes.data)) == 0
    resident = (found & 1).sum() * mmap.PAGESIZE
    assert 24 << 20 <= resident < 40 << 20, f"{resident / 2**20} MiB"
    assert memory[5] == 7 and memory.sum() == 7
