"""A randomly filled cache with two backends: the comparison of every fast backend with the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.attention.plan import AttentionBackend, AttentionPlan
from quire.attention.reference import ReferenceAttention
from quire.attention.rows import RowSlice
from quire.attention.spec import Angles, AttentionSpec, Scoring, equal_layers
from quire.cache.arena import Arena
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.sums import SumsCodec
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.table import ChunkTable


@dataclass(frozen=True)
class Shape:
    heads: int = 2
    group: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float32
    layers: int = 2
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    rotate: bool = True
    sparse_values: float = 1.0


def make_spec(
    shape: Shape, num_chunks: int, device: str = "cpu", positions: int = 1024, *, sums: bool = False
) -> AttentionSpec:
    """An arena poisoned with 0xFF (NaN in every format), so that reading an unwritten slot cannot pass.

    sums  whether each chunk may have column sums beside it
    """
    codec = DenseCodec(shape.dim, shape.dtype)
    slab = max(codec.page_bytes, SumsCodec.page_bytes) if sums else codec.page_bytes
    pages = shape.layers * shape.heads * (num_chunks + 2)
    ledger = PageLedger((slab + SumsCodec.page_bytes * sums) * pages, slab)
    arena = Arena(ledger.num_bytes, device)
    arena.data.fill_(0xFF)
    table = ChunkTable(ledger, shape.layers, shape.heads, codec, sums=SumsCodec() if sums else None, arena=arena)
    rotations: tuple[Angles, ...] = ()
    if shape.rotate:
        angle = torch.outer(torch.arange(positions), 10000.0 ** (-torch.arange(shape.dim // 2) / (shape.dim // 2)))
        rotations = ((angle.cos().float().to(device), angle.sin().float().to(device)),)
    layers = equal_layers(
        shape.layers, shape.heads, shape.group, shape.dim,
        rotation=0 if rotations else None, scoring=Scoring(shape.window, shape.scale, shape.soft_cap),
    )  # fmt: skip
    return AttentionSpec(table, layers, shape.dtype, rotations, sparse_values=shape.sparse_values)


def run(backend: AttentionBackend, spec: AttentionSpec, steps: list[list[RowSlice]], seed: int) -> list[torch.Tensor]:
    """Runs the steps on random activations; one output [L, R, H * G * D] a step."""
    generator = torch.Generator().manual_seed(seed)
    return [
        run_plan(backend.plan(slices), spec, sum(piece.num_rows for piece in slices), generator) for slices in steps
    ]


def run_plan(plan: AttentionPlan, spec: AttentionSpec, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Runs one step's plan on random activations; its output [L, R, H * G * D]."""
    heads, layers = spec.layers[0].num_kv_heads, []
    queries = heads * spec.layers[0].group_size
    for layer in range(spec.num_layers):
        # One fused tensor, as the decoder makes it: q, k and v are strided views.
        fused = (
            torch.randn(rows, (queries + 2 * heads) * spec.layers[0].head_dim, generator=generator)
            .to(spec.dtype)
            .to(spec.table.arena.device)
        )
        q, k, v = (
            part.unflatten(1, (-1, spec.layers[0].head_dim))
            for part in fused.split([n * spec.layers[0].head_dim for n in (queries, heads, heads)], 1)
        )
        plan.write(layer, k, v)
        layers.append(plan.attend(layer, q).clone())
    return torch.stack(layers)


def slices_of(spec: AttentionSpec, lengths: list[tuple[int, int]]) -> list[RowSlice]:
    """One slice per (start, num_rows), on new chunks in shuffled order."""
    order = np.random.default_rng(0)
    out = []
    for start, rows in lengths:
        chunks = spec.table.take(-(-(start + rows) // PAGE_TOKENS), spec.table.open_codec)
        order.shuffle(chunks)
        out.append(RowSlice(start, rows, chunks))
    return out


def total_chunks(lengths: list[tuple[int, int]]) -> int:
    return sum(-(-(start + rows) // PAGE_TOKENS) for start, rows in lengths)


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert not actual.isnan().any(), "read an unwritten slot"
    return (
        (actual.float() - expected.float()).square().mean().sqrt()
        / expected.float().square().mean().sqrt().clamp_min(1e-9)
    ).item()


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}


def assert_equals_reference(
    backend_of, shape: Shape, lengths: list[tuple[int, int]], seed: int = 0, device: str = "cpu"
) -> None:
    """Prefills every sequence up to its start in one step, then runs the ragged step on the backend and on the
    reference."""
    outputs = []
    for make in (ReferenceAttention, backend_of):
        spec = make_spec(shape, total_chunks(lengths), device)
        final = slices_of(spec, lengths)
        past = [replace(piece, start=0, num_rows=piece.start) for piece in final if piece.start]
        outputs.append(run(make(spec), spec, [past, final] if past else [final], seed))
    for name, actual, expected in zip(("past", "final")[-len(outputs[0]) :], outputs[1], outputs[0], strict=True):
        error = relative_rms(actual, expected)
        assert error < TOLERANCE[shape.dtype], f"{name}: relative RMS error {error:.2e} for {shape} at {lengths}"
