"""Launch parameters of the attention kernels: tile, warps and stages for each kind of block."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    Chosen by measurement on an H200 (docs/performance.md); `scripts/gpu.sh attention --sweep` measures them against
    others.
    """
    least = triton.next_power_of_2(group_size)
    if dtype == torch.float32:
        # Float32 products run outside the tensor cores with operands in registers. A larger tile spills.
        only = Launch(max(16, least), 8, 2)
        return only, only
    return Launch(max(16, least), 4, 4), Launch(max(64, least), 4, 3)


def seeded_launch(short: Launch) -> Launch:
    """The launch of a step's short blocks that start from partials. Such a row has few chunks of its own, so that more
    programs on a multiprocessor are worth more than loads further ahead: 0.81 to 0.98 of the time on an H200.
    """
    return replace(short, stages=min(short.stages, 2))


def encoded_launches(dtype: torch.dtype, group_size: int, head_dim: int, looks_up: bool) -> tuple[Launch, Launch]:
    """As `launches`, for encoded pages. These are decoded in registers.

    A tile with rows of one sequence must not be taller than a page, because rows of two chunks see different sources.

    looks_up  whether the codec looks its numbers up in tables
    """
    least = max(16, triton.next_power_of_2(group_size))
    if dtype == torch.float32:
        only = Launch(least, 8, 1)
        return only, only
    tall = Launch(max(least, 64), 8, 2)
    if looks_up:
        # Eight warps hold tiles that four would spill.
        return Launch(least, 4 if head_dim <= 64 else 8, 3 if head_dim <= 128 else 2), tall
    # Two programs on a multiprocessor hide each other's waits; stages hide fewer, and take registers.
    return Launch(least, 4, 1), tall


def common_launch(tall: Launch, group_size: int, num_rows: int) -> Launch:
    """The launch of a decode step's shared runs. Its tile is no taller than the step has rows x G."""
    return replace(tall, rows=min(tall.rows, max(16, triton.next_power_of_2(num_rows * group_size))))


def profile_launch(dtype: torch.dtype, group_size: int, head_dim: int) -> Launch:
    """The launch that profiles a slice of many rows against pages of keys: half the products of attention."""
    least = max(16, triton.next_power_of_2(group_size))
    if dtype == torch.float32:
        return Launch(least, 8, 2)
    return Launch(max(128 if head_dim > 32 else 64, least), 8 if head_dim > 32 else 4, 3)


def single_profile_launch(dtype: torch.dtype, group_size: int) -> Launch:
    """The launch that profiles slices of one row. It does little but read keys, and decode them if encoded."""
    return Launch(max(16, triton.next_power_of_2(group_size)), 8 if dtype == torch.float32 else 4, 2)
