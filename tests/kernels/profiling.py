"""Prompts that are profiled while they are computed, and the comparison of a fast backend with the reference."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.plan import AttentionPlan
from quire.attention.reference import ReferenceAttention
from quire.attention.rows import Profiled, RowSlice
from quire.attention.spec import AttentionSpec
from quire.cache.ledger import PAGE_TOKENS

from ..effort import whole
from .encoded import CODECS, TOLERANCE, Sequences, encoded_spec
from .harness import Shape, make_spec, relative_rms, run_plan
from .sharing import MakeBackend

Steps = Sequence[Sequence[tuple[int, int, int | None]]]
"""Of each step, the sequences that run, how many rows each has, and how many of them are kept; None: not profiled."""

HISTORY: Steps = [
    [
        (0, 64, 20),
        (1, 3, 3),
        (2, 130, None),
    ],  # a whole chunk, a prompt of three tokens, one that somebody else computed
    [(0, 1, None), (1, 70, 66), (2, 40, 40)],  # decoding beside slices; a hit: the first 130 rows were not profiled
    [(1, 1, 1), (2, 61, 0), (0, 200, 129)],  # a slice of one row, which fills its chunk or begins one
    [(0, 1, None), (3, 150, 1), (2, 5, 5)],
    [(2, 190, 130), (3, 1, None)],
]
MOST_STEPS: Steps = whole(HISTORY, 4)


@dataclass
class Prompts:
    """Sequences with column sums beside all their chunks, zero until somebody adds to them.

    peaks  whether the last rows, or all where none are kept, note their peaks instead, where two chunks are near
    """

    spec: AttentionSpec
    peaks: bool = False
    sums: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sequences = Sequences(self.spec)

    def step(self, rows: Sequence[tuple[int, int, int | None]], profiles: bool = True) -> list[RowSlice]:
        """The slices of a step."""
        table = self.spec.table
        assert table.sums is not None
        slices = self.sequences.step([(name, count) for name, count, _ in rows])
        for at, (name, count, last_rows) in enumerate(rows):
            held = self.sums.get(name, np.empty(0, np.int32))
            new = table.take(-(-self.sequences.lengths[name] // PAGE_TOKENS) - len(held), table.sums)
            shape = (*table.pages.shape[1:], len(new) * PAGE_TOKENS)
            table.store_sums(new, np.zeros(shape, np.float32))
            if len(new):
                # The same array while nothing is added to it: a decode step may take its plan one further.
                self.sums[name] = np.append(held, new)
            if last_rows is not None and profiles:
                peaks = (last_rows or count) if self.peaks else 0
                # Rows of one chunk may have something behind them that is far from them all.
                near = 2 if count == 1 else sys.maxsize
                slices[at] = replace(slices[at], profiled=Profiled(self.sums[name], last_rows, peaks, near))
        return slices

    def of(self, name: int) -> NDArray[np.float32]:
        """The sums of a sequence, [L, H, T]."""
        assert self.spec.table.sums is not None
        return self.spec.table.load_sums(self.sums[name])


def profiled_spec(
    shape: Shape, codec: str | None, *, tokens: int = 2048, sinks: int = 0, strict: bool = True, device: str = "cpu"
) -> AttentionSpec:
    """A poisoned arena with room for so many tokens, dense or in one of the CODECS, and for their column sums."""
    if codec is None:
        return make_spec(shape, tokens // PAGE_TOKENS, device, sums=True)
    spec = encoded_spec(shape, CODECS[codec](shape), tokens=tokens, sinks=sinks, sums=True, device=device)
    return replace(spec, strict=strict)


@dataclass
class Found:
    """What each step of a history gave.

    outputs    [L, R, H * G * D]
    sums       of each sequence [L, H, T]
    recovered  of each slice with kept rows, for each of several policies, [L, H]
    """

    outputs: list[torch.Tensor] = field(default_factory=list)
    sums: list[dict[int, NDArray[np.float32]]] = field(default_factory=list)
    recovered: list[NDArray[np.float64]] = field(default_factory=list)


def run_history(
    make: MakeBackend,
    spec: AttentionSpec,
    steps: Steps,
    seed: int = 0,
    *,
    profiles: bool = True,
    peaks: bool = False,
    before_run: Callable[[], None] = lambda: None,
) -> Found:
    """Runs the steps on random activations. before_run is called between a plan and its step."""
    backend, prompts, found = make(spec), Prompts(spec, peaks), Found()
    generator = torch.Generator().manual_seed(seed)
    random = np.random.default_rng(seed)
    for rows in steps:
        slices = prompts.step(rows, profiles)
        plan = backend.plan(slices)
        before_run()
        found.outputs.append(run_plan(plan, spec, sum(piece.num_rows for piece in slices), generator))
        found.sums.append({name: prompts.of(name) for name in prompts.sums})
        for index, piece in enumerate(slices):
            if piece.profiled is not None and piece.profiled.last_rows:
                found.recovered += recoveries(plan, spec, index, piece, random)
    return found


def recoveries(
    plan: AttentionPlan, spec: AttentionSpec, index: int, piece: RowSlice, random: np.random.Generator
) -> list[NDArray[np.float64]]:
    """Recovery of a slice under policies of which some keep nothing, and some everything; the last keeps all."""
    shape, words = (spec.num_layers, spec.layers[0].num_kv_heads), -(-(piece.start + piece.num_rows) // PAGE_TOKENS)
    found = []
    for _ in range(3):
        kept = random.integers(0, 2**64, (*shape, words), np.uint64) * random.integers(0, 2, (*shape, words), np.uint64)
        local = random.choice([0, 1, 7, 63, 64, 65, 200, 10**6], shape)
        found.append(plan.recovered(index, kept, local))
    everything = np.full((*shape, words + 1), 2**64 - 1, np.uint64)
    found.append(plan.recovered(index, everything, np.zeros(shape, np.int64)))
    return found


def check_history(
    make: MakeBackend,
    shape: Shape,
    codec: str | None,
    steps: Steps = MOST_STEPS,
    *,
    sinks: int = 1,
    strict: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """The backend sums, notes peaks and recovers like the reference; a row's attention adds up to one, and is the same
    as without a profile, on a GPU up to rounding; what is not profiled leaves nothing."""
    specs = [profiled_spec(shape, codec, sinks=sinks, strict=strict, device=device) for _ in range(5)]
    check_peaks(make, specs[3:], shape, codec, steps, seed)
    plain = run_history(ReferenceAttention, specs[0], steps, seed)
    fast = run_history(make, specs[1], steps, seed)
    without = run_history(make, specs[2], steps, seed, profiles=False)
    tolerance = TOLERANCE[shape.dtype]
    for outputs in zip(fast.outputs, without.outputs, strict=True):
        assert torch.equal(*outputs) or (device != "cpu" and relative_rms(*outputs) < tolerance)
    rows: dict[int, int] = {}
    for number, step in enumerate(steps):
        case = f"in step {number} {step} for {shape} {codec}"
        for name, count, last_rows in step:
            rows[name] = rows.get(name, 0) + (count if last_rows is not None else 0)
        for name, expected in plain.sums[number].items():
            actual = fast.sums[number][name]
            error = relative_rms(torch.from_numpy(actual), torch.from_numpy(expected))
            assert error < tolerance or not rows[name], f"sums of {name}: relative RMS error {error:.2e} {case}"
            assert np.abs(actual.sum(-1) - rows[name]).max() <= tolerance * max(1, rows[name]), case
            if not rows[name]:
                assert not actual.any(), f"sums of {name}, which is not profiled, {case}"
    for actual, expected in zip(fast.recovered, plain.recovered, strict=True):
        assert np.abs(actual - expected).max() < tolerance, f"recovery for {shape} {codec}"
    for actual in fast.recovered[3::4]:
        assert np.abs(actual - 1).max() < tolerance, f"recovery of all columns for {shape} {codec}"


def check_peaks(
    make: MakeBackend, specs: list[AttentionSpec], shape: Shape, codec: str | None, steps: Steps, seed: int
) -> None:
    """The backend notes peaks like the reference."""
    plain = run_history(ReferenceAttention, specs[0], steps, seed, peaks=True)
    fast = run_history(make, specs[1], steps, seed, peaks=True)
    for number, (actual, expected) in enumerate(zip(fast.sums, plain.sums, strict=True)):
        for name, peaks in expected.items():
            error = np.abs(actual[name] - peaks).max()
            # Single probabilities, of scores that are rounded: no sum of many makes up for it.
            assert error < 4 * TOLERANCE[shape.dtype], (
                f"peaks of {name}: {error:.2e} in step {number} for {shape} {codec}"
            )
    for actual, expected in zip(fast.recovered, plain.recovered, strict=True):
        assert np.abs(actual - expected).max() < TOLERANCE[shape.dtype], f"recovery for {shape} {codec}"
