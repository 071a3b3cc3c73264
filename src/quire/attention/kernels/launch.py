"""Launch parameters of the attention kernels: tile, warps and stages for each kind of block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch parameters for one kind of block. `rows` is the tile's height: query rows x G."""

    rows: int
    warps: int
    stages: int


def launches(dtype: torch.dtype, group_size: int, head_dim: int) -> tuple[Launch, Launch]:
    """The launches of (short, tall) blocks: tiles of query rows x G.

    Chosen by registers and shared memory (tests/kernels/test_triton_compile.py prints them); `scripts/gpu.sh attention`
    measures them against others.
    """
    least = triton.next_power_of_2(group_size)
    if dtype == torch.float32:
        # Float32 products run outside the tensor cores with operands in registers. A larger tile spills.
        return Launch(max(16, least), 8, 2), Launch(max(16, least), 8, 2)
    return Launch(max(16, least), 4, 3), Launch(max(128 if head_dim > 32 else 64, least), 8 if head_dim > 32 else 4, 3)


def encoded_launches(dtype: torch.dtype, group_size: int, head_dim: int) -> tuple[Launch, Launch]:
    """The launches for encoded pages. These are decoded in registers: eight warps hold tiles that four would spill.

    A tile with rows of one sequence must not be taller than a page, because rows of two chunks see different sources.
    """
    least = max(16, triton.next_power_of_2(group_size))
    if dtype == torch.float32:
        return Launch(least, 8, 1), Launch(least, 8, 1)
    return Launch(least, 4 if head_dim <= 64 else 8, 2), Launch(max(least, 64), 8, 2)


def common_launch(tall: Launch, group_size: int, num_rows: int, warps: int = 4) -> Launch:
    """The launch of a decode step's shared runs. Its tile is no taller than the step has rows x G."""
    rows = max(16, triton.next_power_of_2(num_rows * group_size))
    return tall if rows >= tall.rows else Launch(rows, warps, tall.stages)


def profile_launch(dtype: torch.dtype, group_size: int, head_dim: int) -> Launch:
    """The launch that profiles a slice of many rows against pages of keys: half the products of attention."""
    least = max(16, triton.next_power_of_2(group_size))
    if dtype == torch.float32:
        return Launch(least, 8, 2)
    return Launch(max(128 if head_dim > 32 else 64, least), 8 if head_dim > 32 else 4, 3)


def single_profile_launch(dtype: torch.dtype, group_size: int) -> Launch:
    """The launch that profiles slices of one row. It does little but read keys, and decode them if encoded."""
    return Launch(max(16, triton.next_power_of_2(group_size)), 8 if dtype == torch.float32 else 4, 2)
