"""Layers of several kinds in one plan of a fast backend, and their comparison with the reference.

The reference runs every layer by itself, over a table of its own. So a lane, a window or a rotation of another layer
cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from quire.attention.plan import AttentionPlan
from quire.attention.reference import ReferenceAttention
from quire.attention.rows import RowSlice
from quire.attention.spec import Angles, AttentionLayer, AttentionSpec, Scoring
from quire.cache.arena import Arena
from quire.cache.codecs import Codec
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.group import GroupCodec
from quire.cache.codecs.nuq import NuqCodec, NuqTables
from quire.cache.codecs.sums import SumsCodec
from quire.cache.ledger import PAGE_TOKENS, PageLedger
from quire.cache.sinks import Sinks
from quire.cache.table import ChunkTable

from ..nuq_tables import random_tables
from .encoded import TOLERANCE
from .harness import relative_rms
from .profiling import Prompts
from .sharing import MakeBackend

POSITIONS = 512


@dataclass(frozen=True)
class Layer:
    """A layer of a test. theta: of its rotation; None: it does not rotate."""

    heads: int = 1
    group: int = 1
    dim: int = 16
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    theta: float | None = 10000.0

    @property
    def scoring(self) -> Scoring:
        """How it scores."""
        return Scoring(self.window, self.scale, self.soft_cap)


MakeCodec = Callable[[int, int, slice], Codec]
"""Head size of the pages, number of lanes of the model, and the lanes of the table -> codec of sealed chunks."""


def group_codec(dim: int, num_lanes: int, lanes: slice) -> Codec:
    """Group codes without key biases, which layers of several head sizes cannot have."""
    return GroupCodec(dim)


def biased_codec(dim: int, num_lanes: int, lanes: slice) -> Codec:
    """Group codes with a key bias for every lane."""
    bias = torch.randn(num_lanes, dim, generator=torch.Generator().manual_seed(1))
    return GroupCodec(dim, bias[lanes][None])


def nuq_codec(dim: int, num_lanes: int, lanes: slice) -> Codec:
    """Non-uniform codes with tables for every lane."""
    tables = random_tables(1, num_lanes, dim, 0, reach=1.0)
    return NuqCodec("nuq3", NuqTables(**{name: part[:, lanes] for name, part in vars(tables).items()}))


CODECS: dict[str, MakeCodec] = {"g4": group_codec, "g4 biased": biased_codec, "nuq3": nuq_codec}


def kinds_spec(
    layers: Sequence[Layer],
    dtype: torch.dtype = torch.float32,
    codec: str | None = None,
    *,
    only: int | None = None,
    chunks: int = 24,
    sinks: int = 0,
    sums: bool = False,
) -> AttentionSpec:
    """A spec over a poisoned arena.

    codec  of sealed chunks, one of CODECS; None: they stay dense
    only  the layer of a spec of one layer; None: all layers, on pages that fit the largest heads
    """
    bounds = np.cumsum([0, *(layer.heads for layer in layers)]).tolist()
    lanes = slice(0, bounds[-1]) if only is None else slice(bounds[only], bounds[only + 1])
    kept = layers if only is None else [layers[only]]
    dim, num_lanes = max(layer.dim for layer in kept), lanes.stop - lanes.start
    open_codec = DenseCodec(dim, dtype)
    codecs = [CODECS[codec](dim, bounds[-1], lanes)] if codec else []
    exact = Sinks(sinks, 1, num_lanes, dim, dtype) if sinks else None
    slab = max(open_codec.page_bytes, SumsCodec.page_bytes, exact.sidecar_bytes if exact else 0)
    ledger = PageLedger(2 * slab * num_lanes * chunks, slab)
    arena = Arena(ledger.num_bytes, "cpu")
    arena.data.fill_(0xFF)
    table = ChunkTable(
        ledger, 1, num_lanes, open_codec, *codecs, sinks=exact, sums=SumsCodec() if sums else None, arena=arena
    )
    angles = {(layer.theta, layer.dim): None for layer in kept if layer.theta is not None}
    order = list(angles)
    found, lane = [], 0
    for layer in kept:
        rotation = None if layer.theta is None else order.index((layer.theta, layer.dim))
        found.append(AttentionLayer(lane, layer.heads, layer.group, layer.dim, rotation, layer.scoring))
        lane += layer.heads
    return AttentionSpec(table, tuple(found), dtype, tuple(_angles(theta, dim) for theta, dim in order))


def _angles(theta: float | None, dim: int) -> Angles:
    assert theta is not None
    angle = torch.outer(torch.arange(POSITIONS), theta ** (-torch.arange(dim // 2) / (dim // 2)))
    return angle.cos().float(), angle.sin().float()


def run_layer(plan: AttentionPlan, index: int, layer: Layer, rows: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Runs one layer of a plan on random activations; its output [R, H * G * D]."""
    queries = layer.heads * layer.group
    generator = torch.Generator().manual_seed(seed)
    # One fused tensor, as the decoder makes it: q, k and v are strided views.
    fused = torch.randn(rows, queries + 2 * layer.heads, layer.dim, generator=generator).to(dtype)
    q, k, v = fused.split([queries, layer.heads, layer.heads], 1)
    # Scores that a soft cap changes.
    plan.write(index, k, v)
    return plan.attend(index, 3 * q if layer.soft_cap else q).clone()


class Twins:
    """Layers in one fast backend, and every layer by itself in the reference, over the same sequences.

    spec     of all layers
    backend  the fast one
    """

    def __init__(
        self,
        make: MakeBackend,
        layers: Sequence[Layer],
        dtype: torch.dtype = torch.float32,
        codec: str | None = None,
        *,
        sinks: int = 0,
        sums: bool = False,
        peaks: bool = False,
        chunks: int = 24,
        sparse_values: float = 1.0,
    ) -> None:
        self.layers = layers
        self.dtype = dtype
        options = {"chunks": chunks, "sinks": sinks, "sums": sums}
        self.spec = replace(kinds_spec(layers, dtype, codec, **options), sparse_values=sparse_values)
        alone = [
            replace(kinds_spec(layers, dtype, codec, only=index, **options), sparse_values=sparse_values)
            for index in range(len(layers))
        ]
        self.backend = make(self.spec)
        self.references = [ReferenceAttention(spec) for spec in alone]
        self.prompts = [Prompts(spec, peaks) for spec in (self.spec, *alone)]
        self._starts = np.cumsum([0, *(layer.heads for layer in layers)]).tolist()
        self._step = 0

    def lanes(self, index: int) -> slice:
        """The lanes of a layer."""
        return slice(self._starts[index], self._starts[index + 1])

    def hide(self, name: int, index: int, random: np.random.Generator) -> None:
        """Hides random slots of a chunk of a sequence, and all slots in about a third of the lanes."""
        mine, *others = (prompts.spec.table for prompts in self.prompts)
        chunk = self.prompts[0].sequences.chunks[name][index]
        masks = random.integers(0, 2**64, self._starts[-1], np.uint64) * (random.random(self._starts[-1]) < 0.7)
        for table, lanes in ((mine, slice(None)), *((table, self.lanes(i)) for i, table in enumerate(others))):
            table.masks[chunk] = masks[lanes].reshape(table.masks.shape[1:])
            table.takes[chunk] += 1

    def place(self, name: int, index: int, random: np.random.Generator) -> None:
        """Gives the slots of a chunk of a sequence positions of their own before its end, others in each lane."""
        mine, *others = (prompts.spec.table for prompts in self.prompts)
        chunk = self.prompts[0].sequences.chunks[name][index]
        end = (index + 1) * PAGE_TOKENS
        positions = np.sort(random.integers(0, end, (self._starts[-1], PAGE_TOKENS)), axis=1).astype(np.int32)
        for table, lanes in ((mine, slice(None)), *((table, self.lanes(i)) for i, table in enumerate(others))):
            rows = np.full(len(positions[lanes]), chunk)
            table.store_positions((rows, *np.divmod(np.arange(len(rows)), len(rows))), positions[lanes])

    def step(self, rows: Sequence[tuple[int, int, int | None]], *, moves: bool = False) -> None:
        """Runs a step on both and compares outputs, sums and recovery.

        rows   sequence, number of rows, and kept rows; None: the slice is not profiled
        moves  whether all rows are those of the step before
        """
        slices, *of_layers = (self._slices(prompts, rows) for prompts in self.prompts)
        moved = [at for at, piece in enumerate(slices) if piece.start % PAGE_TOKENS == 0] if moves else None
        plan = self.backend.plan(slices, moved)
        plans = [backend.plan(of_layer) for backend, of_layer in zip(self.references, of_layers, strict=True)]
        self._step += 1
        count = sum(piece.num_rows for piece in slices)
        tolerance = TOLERANCE[self.dtype]
        for index, layer in enumerate(self.layers):
            seed = 100 * self._step + index
            actual = run_layer(plan, index, layer, count, self.dtype, seed)
            expected = run_layer(plans[index], 0, layer, count, self.dtype, seed)
            error = relative_rms(actual, expected)
            case = f"in layer {index} {layer} in step {self._step} {list(rows)}"
            assert error < tolerance, f"relative RMS error {error:.2e} {case}"
            if self.spec.table.sums is not None:
                self._check_sums(index, case, tolerance)
        for number, piece in enumerate(slices):
            if piece.profiled is not None and piece.profiled.last_rows:
                self._check_recovered(plan, plans, number, piece, tolerance)

    def _slices(self, prompts: Prompts, rows: Sequence[tuple[int, int, int | None]]) -> list[RowSlice]:
        if prompts.spec.table.sums is not None:
            return prompts.step(rows)
        return prompts.sequences.step([(name, count) for name, count, _ in rows])

    def _check_sums(self, index: int, case: str, tolerance: float) -> None:
        mine, other = self.prompts[0], self.prompts[1 + index]
        for name in mine.sums:
            num_tokens = len(mine.sums[name]) * PAGE_TOKENS
            found = mine.of(name).reshape(-1, num_tokens)[self.lanes(index)]
            wanted = other.of(name).reshape(-1, num_tokens)
            # A slot that a mask hides is read by nobody, so its sum is anything.
            masks = mine.spec.table.masks[self.prompts[0].sequences.chunks[name]].reshape(-1, self._starts[-1])
            bits = masks.T[self.lanes(index), :, None] >> np.arange(PAGE_TOKENS, dtype=np.uint64) & np.uint64(1)
            found, wanted = (sums * bits.reshape(sums.shape).astype(bool) for sums in (found, wanted))
            assert np.abs(found - wanted).max() <= 4 * tolerance * max(1, wanted.max()), f"sums of {name} {case}"

    def _check_recovered(
        self,
        plan: AttentionPlan,
        plans: Sequence[AttentionPlan],
        number: int,
        piece: RowSlice,
        tolerance: float,
    ) -> None:
        random = np.random.default_rng(self._step)
        num_lanes, words = self._starts[-1], -(-(piece.start + piece.num_rows) // PAGE_TOKENS)
        kept = random.integers(0, 2**64, (1, num_lanes, words), np.uint64)
        local = random.choice([0, 1, 30, 65], (1, num_lanes))
        found = plan.recovered(number, kept, local)
        for index, each in enumerate(plans):
            lanes = self.lanes(index)
            wanted = each.recovered(number, kept[:, lanes], local[:, lanes])
            assert np.abs(found[:, lanes] - wanted).max() < 4 * tolerance, f"recovery of slice {number}, layer {index}"


def check_kinds(
    make: MakeBackend,
    layers: Sequence[Layer],
    steps: Sequence[Sequence[tuple[int, int]]],
    dtype: torch.dtype = torch.float32,
    codec: str | None = None,
    *,
    sinks: int = 0,
) -> Twins:
    """Layers of several kinds attend like the reference in every step: sequence and number of rows."""
    twins = Twins(make, layers, dtype, codec, sinks=sinks)
    for rows in steps:
        twins.step([(name, count, None) for name, count in rows])
    return twins


def check_sharing(backend: Any, look: Callable[[Any, bool], None]) -> None:
    """Rows with a common beginning, in a layer with a window and one without, attend alike whether they share it.

    look  checks a plan, and gets whether its rows share
    """
    spec = kinds_spec([Layer(window=150), Layer(group=2)], chunks=40)
    take = lambda count: spec.table.take(count, spec.table.open_codec)  # noqa: E731
    common = take(4)
    rows = [RowSlice(4 * PAGE_TOKENS + 5, 1, np.append(common, take(1)), ((1, 4),)) for _ in range(3)]
    arena = spec.table.arena.data.view(torch.float32)
    arena.copy_(torch.randn(len(arena), generator=torch.Generator().manual_seed(0)))
    q, k, v = (torch.randn(3, heads, 16, generator=torch.Generator().manual_seed(1)) for heads in (2, 1, 1))
    outputs = []
    for slices in (rows, [replace(row, shared=()) for row in rows]):
        plan = backend(spec).plan(slices)
        look(plan, slices is rows)
        found = []
        for layer, queries in enumerate((q[:, :1], q)):
            plan.write(layer, k, v)
            found.append(plan.attend(layer, queries).clone())
        outputs.append(torch.cat(found, 1))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
