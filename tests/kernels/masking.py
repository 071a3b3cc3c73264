"""Pages of which heads lack some, and of others see a part: what retention leaves of paths, made at random."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.plan import AttentionSpec, RowSlice
from quire.attention.reference import ReferenceAttention
from quire.cache.page import PAGE_TOKENS
from quire.cache.segment import ALL_SLOTS

from . import sharing
from .harness import TOLERANCE, Shape, make_spec, relative_rms, run, slices_of, total_chunks
from .sharing import MakeBackend, fill, forest, taking


def hide(spec: AttentionSpec, chunks: NDArray[np.int32], random: np.random.Generator) -> None:
    """Of each page of the chunks hides nothing, some slots, all but one, or takes it away; its id then says nothing.

    Slots that are hidden, and what ids of missing pages name, hold NaN.
    """
    table = spec.table
    assert table.masks is not None
    arena = table.pool.arena.view(spec.dtype)
    for chunk in chunks.tolist():
        for layer, head in np.ndindex(spec.num_layers, spec.num_kv_heads):
            mask = random.integers(0, 2**64, dtype=np.uint64)
            kind = random.integers(4)
            one = np.uint64(1) << np.uint64(random.integers(PAGE_TOKENS))
            mask = (ALL_SLOTS, mask | one, one, np.uint64(0))[kind]
            seen = (mask >> np.arange(PAGE_TOKENS, dtype=np.uint64) & np.uint64(1)).astype(bool)
            at = int(table.pages[chunk, layer, head]) * 128 // spec.dtype.itemsize
            page = arena[at : at + 2 * PAGE_TOKENS * spec.head_dim].view(2, PAGE_TOKENS, spec.head_dim)
            page[:, torch.from_numpy(~seen)] = torch.nan
            table.masks[chunk, layer, head] = mask
        table.takes[chunk] += 1


def shrink(pieces: list[RowSlice], random: np.random.Generator) -> list[RowSlice]:
    """Slices of one row with fewer chunks than the sequence has: what is left stands somewhere before the row."""
    found = []
    for piece in pieces:
        gone = int(random.integers(0, 5)) if piece.num_rows == 1 and not piece.shared else 0
        found.append(replace(piece, start=piece.start + gone * PAGE_TOKENS, num_gone=gone))
    return found


def check_hidden(
    make: MakeBackend,
    shape: Shape,
    seed: int,
    *,
    num_rows: int,
    prefills: list[tuple[int, int]],
    device: str = "cpu",
) -> None:
    """A step of sharers, of rows by themselves and of slices of many rows over pages of which heads see a part attends
    like the reference; then their rows decode, one position on.
    """
    random = np.random.default_rng(seed)
    rows = forest(sharing.counting(), random, num_rows) if num_rows else []
    count = 1 + max((int(row.chunks.max()) for row in rows), default=-1)
    spec = make_spec(shape, count + total_chunks(prefills), device, sums=True)
    ids = random.permutation(taking(spec)(count))
    slices = [replace(row, chunks=ids[row.chunks]) for row in rows] + slices_of(spec, prefills)
    fill(spec, slices, seed)
    open_chunks = {int(chunk) for piece in slices for chunk in piece.chunks[piece.start // PAGE_TOKENS :]}
    sealed = np.array([chunk for piece in slices for chunk in piece.chunks if int(chunk) not in open_chunks], np.int32)
    hide(spec, np.unique(sealed), random)
    slices = shrink(slices, random)
    outputs = []
    before = spec.table.pool.arena.clone()
    for backend_of in (ReferenceAttention, make):
        spec.table.pool.arena.copy_(before)
        outputs.append(run(backend_of(spec), spec, [slices], seed)[0])
    error = relative_rms(outputs[1], outputs[0])
    assert error < TOLERANCE[shape.dtype], f"relative RMS error {error:.2e} for {shape}, {num_rows} rows, seed {seed}"
