"""Random paths as retention leaves them: heads lack some pages and see parts of others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.reference import ReferenceAttention
from quire.attention.rows import Profiled, RowSlice
from quire.attention.spec import AttentionSpec
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.table import ALL_SLOTS

from . import sharing
from .harness import TOLERANCE, Shape, make_spec, relative_rms, run_plan, slices_of, total_chunks
from .profiling import recoveries
from .sharing import MakeBackend, fill, forest, taking


def hide(spec: AttentionSpec, chunks: NDArray[np.int32], random: np.random.Generator) -> None:
    """Of each page of the chunks hides nothing, some slots, all but one, or takes it away; its id then says nothing.

    Slots that are hidden, and what ids of missing pages name, hold NaN.
    """
    table = spec.table
    assert table.masks is not None
    arena = table.arena.data.view(spec.dtype)
    for chunk in chunks.tolist():
        for layer, head in np.ndindex(spec.num_layers, spec.layers[0].num_kv_heads):
            mask = random.integers(0, 2**64, dtype=np.uint64)
            kind = random.integers(4)
            one = np.uint64(1) << np.uint64(random.integers(PAGE_TOKENS))
            mask = (ALL_SLOTS, mask | one, one, np.uint64(0))[kind]
            seen = (mask >> np.arange(PAGE_TOKENS, dtype=np.uint64) & np.uint64(1)).astype(bool)
            at = int(table.pages[chunk, layer, head]) * 128 // spec.dtype.itemsize
            page = arena[at : at + 2 * PAGE_TOKENS * spec.layers[0].head_dim].view(
                2, PAGE_TOKENS, spec.layers[0].head_dim
            )
            page[:, torch.from_numpy(~seen)] = torch.nan
            table.masks[chunk, layer, head] = mask
        table.takes[chunk] += 1


def shrink(pieces: list[RowSlice], random: np.random.Generator) -> list[RowSlice]:
    """Slices of one row with fewer chunks than the sequence has: what is left stands somewhere before the row."""
    found = []
    for piece in pieces:
        gone = int(random.integers(0, 5)) if piece.num_rows == 1 and not piece.shared else 0
        found.append(replace(piece, start=piece.start + gone * PAGE_TOKENS, num_dropped=gone))
    return found


def with_sums(spec: AttentionSpec, slices: list[RowSlice], random: np.random.Generator) -> list[RowSlice]:
    """The slices, most of them profiled, on sums that are there already; of some pages there are none. Of slices of
    many rows some are kept.
    """
    table, found = spec.table, []
    assert table.sums is not None and table.masks is not None
    for piece in slices:
        if random.random() < 0.2:
            found.append(piece)
            continue
        end = piece.start + piece.num_rows
        sums = table.take(-(-end // PAGE_TOKENS) - piece.num_dropped, table.sums)
        table.store_sums(sums, random.random((*table.pages.shape[1:], len(sums) * PAGE_TOKENS), np.float32))
        rows, layers, heads = np.nonzero(random.random((len(sums), *table.pages.shape[1:])) < 0.3)
        table.drop((sums[rows], layers, heads))
        last_rows = int(random.integers(0, piece.num_rows + 1)) if piece.num_rows > 1 else 0
        found.append(replace(piece, profiled=Profiled(sums, last_rows)))
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
    """A step of sharers, of rows by themselves and of slices of many rows over pages of which heads see a part attends,
    sums and recovers like the reference.
    """
    random = np.random.default_rng(seed)
    rows = forest(sharing.counting(), random, num_rows) if num_rows else []
    count = 1 + max((int(row.chunks.max()) for row in rows), default=-1)
    num_sums = sum(len(row.chunks) for row in rows)
    spec = make_spec(shape, count + num_sums + total_chunks(prefills), device, sums=True)
    table = spec.table
    assert table.sums is not None
    ids = random.permutation(taking(spec)(count))
    slices = [replace(row, chunks=ids[row.chunks]) for row in rows] + slices_of(spec, prefills)
    fill(spec, slices, seed)
    open_chunks = {int(chunk) for piece in slices for chunk in piece.chunks[piece.start // PAGE_TOKENS :]}
    sealed = np.array([chunk for piece in slices for chunk in piece.chunks if int(chunk) not in open_chunks], np.int32)
    hide(spec, np.unique(sealed), random)
    slices = with_sums(spec, shrink(slices, random), random)
    profiled = [piece.profiled for piece in slices if piece.profiled is not None]
    outputs, sums, recovered = [], [], []
    before = table.arena.data.clone()
    for backend_of in (ReferenceAttention, make):
        table.arena.data.copy_(before)
        plan = backend_of(spec).plan(slices)
        generator = torch.Generator().manual_seed(seed)
        outputs.append(run_plan(plan, spec, sum(piece.num_rows for piece in slices), generator))
        sums.append([torch.from_numpy(table.load_sums(each.sums)) for each in profiled])
        recovered.append(
            [
                found
                for index, piece in enumerate(slices)
                if piece.profiled is not None and piece.profiled.last_rows
                for found in recoveries(plan, spec, index, piece, np.random.default_rng(seed))
            ]
        )
    tolerance, case = TOLERANCE[shape.dtype], f"for {shape}, {num_rows} rows, seed {seed}"
    error = relative_rms(outputs[1], outputs[0])
    assert error < tolerance, f"relative RMS error {error:.2e} {case}"
    for number, (expected, actual) in enumerate(zip(*sums, strict=True)):
        error = relative_rms(actual, expected)
        assert error < tolerance, f"sums of profiled slice {number}: relative RMS error {error:.2e} {case}"
    for expected, actual in zip(*recovered, strict=True):
        assert np.abs(actual - expected).max() < tolerance, f"recovery {case}"
