"""How the attention kernels are launched: tiles, warps and stages for each kind of block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True)
class Launch:
    """How the attention kernel is launched for one kind of block."""

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
        # Float32 products run outside the tensor cores, their operands in registers: a larger tile spills.
        return Launch(max(16, least), 8, 2), Launch(max(16, least), 8, 2)
    return Launch(max(16, least), 4, 3), Launch(max(128 if head_dim > 32 else 64, least), 8 if head_dim > 32 else 4, 3)


def encoded_launches(dtype: torch.dtype, group_size: int, head_dim: int) -> tuple[Launch, Launch]:
    """The same for encoded pages, whose tiles of keys and values are made in registers: eight warps share what four of
    them would spill.

    No tile is taller than a page where its rows may be of one sequence: rows of two chunks do not see the same.
    """
    least = max(16, triton.next_power_of_2(group_size))
    if dtype == torch.float32:
        return Launch(least, 8, 1), Launch(least, 8, 1)
    return Launch(least, 4 if head_dim <= 64 else 8, 2), Launch(max(least, 64), 8, 2)


def common_launch(tall: Launch, group_size: int, num_rows: int, warps: int = 4) -> Launch:
    """How the shared runs of a decode step of so many rows are launched: in tiles no taller than the step is."""
    rows = max(16, triton.next_power_of_2(num_rows * group_size))
    return tall if rows >= tall.rows else Launch(rows, warps, tall.stages)


def profile_launch(dtype: torch.dtype, group_size: int, head_dim: int) -> Launch:
    """How the rows of a slice pass before a page of keys: in tiles of rows x G, whose products are half of what
    attention makes of them.
    """
    least = max(16, triton.next_power_of_2(group_size))
    if dtype == torch.float32:
        return Launch(least, 8, 2)
    return Launch(max(128 if head_dim > 32 else 64, least), 8 if head_dim > 32 else 4, 3)


def single_profile_launch(dtype: torch.dtype, group_size: int) -> Launch:
    """The same for slices of one row: nothing but reading keys, and making them where they are encoded."""
    return Launch(max(16, triton.next_power_of_2(group_size)), 8 if dtype == torch.float32 else 4, 2)
