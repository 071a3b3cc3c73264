"""Launch parameters of the attention kernels: tile, warps and stages for each kind of block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch parameters for one kind of block. `rows` is the tile's height: query rows x G."""

    rows: int
    warps: int
    stages: int


class Launches(NamedTuple):
    """The launches of a backend's kernels.

    short    blocks of few query rows
    seeded   the same in a step with shared runs whose rows have few chunks of their own
    tall     blocks of many query rows
    tallest  the largest launch of shared runs in decode steps; see `common_launch`
    """

    short: Launch
    seeded: Launch
    tall: Launch
    tallest: Launch


WIDE = 128
"""The largest head size whose launches were measured. Tiles of larger heads fill the registers of eight warps. Their
launches have the most stages that fit the shared memory of a multiprocessor of sm_90 (tests/kernels has the sizes)."""


def launches(dtype: torch.dtype, group_size: int, head_dim: int) -> Launches:
    """The launches on dense pages: tiles of query rows x G.

    Chosen by measurement on an H200 (docs/lab/performance.md); `scripts/gpu.sh attention --sweep` measures them against
    others. Groups of more than eight were not measured. Their tiles of shared runs are higher, up to 128, so that a
    page is read for eight rows if possible.
    """
    least = triton.next_power_of_2(group_size)
    if dtype == torch.float32:
        # Float32 products run outside the tensor cores with operands in registers. A larger tile spills.
        only = Launch(max(16, least), 8, 2 if head_dim <= 2 * WIDE else 1)
        return Launches(only, only, only, only)
    if head_dim > WIDE:
        is_wider = head_dim > 2 * WIDE
        tall = Launch(max(32 if is_wider else 64, least), 8, 2)
        short = Launch(max(16, least), 8, 2 if is_wider else 3)
        return Launches(short, replace(short, stages=2), tall, tall)
    tall = Launch(max(64, least), 4, 3)
    tallest = Launch(max(128, least), 8, 3) if least > 8 and head_dim > 32 else tall
    # If few chunks are read, more programs on a multiprocessor help more than more stages of loads.
    return Launches(Launch(max(16, least), 4, 4), Launch(max(16, least), 4, 2), tall, tallest)


def encoded_launches(dtype: torch.dtype, group_size: int, head_dim: int, looks_up: bool) -> Launches:
    """As `launches`, for encoded pages. These are decoded in registers.

    A tile with rows of one sequence must not be taller than a page, because rows of two chunks see different sources.

    looks_up  whether the codec decodes by table lookups
    """
    least = max(16, triton.next_power_of_2(group_size))
    if dtype == torch.float32:
        assert head_dim <= 2 * WIDE, f"no kernels for encoded heads of {head_dim} in float32, only up to {2 * WIDE}"
        only = Launch(least, 8, 1)
        return Launches(only, only, only, only)
    if head_dim > WIDE:
        short = Launch(least, 8, 2)
        tall = Launch(max(least, 32 if head_dim > 2 * WIDE else 64), 8, 2)
        return Launches(short, short, tall, tall)
    tall = Launch(max(least, 64), 8, 2)
    # Two programs on a multiprocessor hide each other's waits; stages hide fewer, and take registers.
    short = Launch(least, 4, 1)
    if looks_up:
        # Eight warps hold tiles that four would spill.
        short = Launch(least, 4 if head_dim <= 64 else 8, 3)
    return Launches(short, short, tall, tall)


def common_launch(tallest: Launch, group_size: int, num_rows: int, warps: int = 4) -> Launch:
    """The launch of a decode step's shared runs. Its tile is no taller than the step has rows x G.

    warps  of tiles lower than the tallest
    """
    rows = max(16, triton.next_power_of_2(num_rows * group_size))
    return tallest if rows >= tallest.rows else Launch(rows, warps, tallest.stages)


def profile_launch(dtype: torch.dtype, group_size: int, head_dim: int) -> Launch:
    """The launch that profiles a slice of many rows against pages of keys: half the products of attention."""
    least = max(16, triton.next_power_of_2(group_size))
    if dtype == torch.float32:
        return Launch(least, 8, 2)
    if head_dim > WIDE:
        return Launch(max(64 if head_dim > 2 * WIDE else 128, least), 8, 2)
    return Launch(max(128 if head_dim > 32 else 64, least), 8 if head_dim > 32 else 4, 3)


def single_profile_launch(dtype: torch.dtype, group_size: int, head_dim: int) -> Launch:
    """The launch that profiles slices of one row. Most of its time goes into reading keys, and decoding them."""
    return Launch(max(16, triton.next_power_of_2(group_size)), 8 if dtype == torch.float32 or head_dim > WIDE else 4, 2)
