"""Decode rows that add up few values: the reference compared with an oracle, and the CPU kernels with the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.cpu import CpuAttention
from quire.attention.reference import NEVER_SEEN, ReferenceAttention, attend_dense
from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec, Scoring
from quire.cache.ledger import UNIT
from quire.cache.path import Path
from quire.kernels import runtime
from quire.offload.blocks import BlockAttention
from tests.effort import combine, examples

from . import encoded, harness, masking, placing, sharing
from .encoded import CODECS, encoded_spec
from .harness import TOLERANCE, Shape, make_spec, relative_rms, run, slices_of, total_chunks
from .pages import LEVELS, use_level
from .sharing import attend_scores, sharers, taking

SHARES = [0.5, 0.1, 0.001]
HALVES = [torch.bfloat16, torch.float16]

NEAR_TIE = 4e-2
"""Relative RMS error in 16 bits. Of two scores that differ by less than their rounding either may be chosen; a choice
by another rule is off by ten times as much."""


def oracle(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, own: Sequence[int], share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Attention [R, H, G, D] by loops in float64, and the sums of the weights that were used [R, H, G].

    q [R, H, G, D]; k, v [H, T, D]; seen [R, H, T]; own: each row's own token
    """
    out, used = np.zeros(q.shape), np.zeros(q.shape[:3])
    for row, head, g in np.ndindex(*q.shape[:3]):
        tokens = np.flatnonzero(seen[row, head]).tolist()
        scores = {t: float(q[row, head, g] @ k[head, t]) / math.sqrt(q.shape[-1]) for t in tokens}
        total = sum(math.exp(score) for score in scores.values())
        others = sorted((t for t in tokens if t != own[row]), key=lambda t: (-scores[t], t))
        for t in [*others[: int(share * (len(tokens) - 1))], own[row]]:
            out[row, head, g] += math.exp(scores[t]) / total * v[head, t]
            used[row, head, g] += math.exp(scores[t]) / total
    return out, used


@examples(60)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    tokens=st.integers(1, 40),
    window=st.sampled_from([None, 1, 7]),
    share=st.sampled_from([0.9, 0.5, 0.1, 0.01]),
    hides=st.booleans(),
    seed=st.integers(0, 999),
)
def test_the_reference_is_the_unrenormalised_sum_over_the_largest_weights(
    heads: int, group: int, tokens: int, window: int | None, share: float, hides: bool, seed: int
) -> None:
    """Small whole numbers, so that many scores are equal."""
    random = np.random.default_rng(seed)
    own = sorted(random.choice(tokens, min(3, tokens), replace=False).tolist())
    q = random.integers(-1, 2, (len(own), heads, group, 4)).astype(np.float32)
    k = random.integers(-1, 2, (heads, tokens, 4)).astype(np.float32)
    v = random.standard_normal((heads, tokens, 4)).astype(np.float32)
    hidden = hides * random.integers(0, 2, (heads, tokens)).astype(bool)
    hidden[:, own] = False
    positions = np.where(hidden, NEVER_SEEN, np.arange(tokens))
    distance = np.array(own)[:, None, None] - positions
    seen = (distance >= 0) & (distance < (window or tokens))
    expected, used = oracle(q, k, v, seen, own, share)
    parts = (torch.from_numpy(part) for part in (q, k, v, np.array(own), positions))
    found = attend_dense(*parts, Scoring(window), share)
    np.testing.assert_allclose(found.o, expected, atol=2e-6)
    scores = np.einsum("rhgd,htd->rhgt", q, k) / 2
    np.testing.assert_allclose(found.lse, np.log((np.exp(scores) * seen[:, :, None]).sum(-1)), atol=1e-5)
    assert (used <= 1 + 1e-9).all()


def compare(
    spec: AttentionSpec, steps: Sequence[list[RowSlice]], seed: int = 0, tolerance: float | None = None
) -> CpuAttention:
    """The CPU kernels attend like the reference in the last step. Returns the backend."""
    before = spec.table.arena.data.clone()
    (*_, expected) = run(ReferenceAttention(spec), spec, list(steps), seed)
    spec.table.arena.data.copy_(before)
    backend = CpuAttention(spec)
    (*_, actual) = run(backend, spec, list(steps), seed)
    error = relative_rms(actual, expected)
    assert error < (tolerance or TOLERANCE[spec.dtype]), f"relative RMS error {error:.2e}"
    return backend


def ragged(shape: Shape, lengths: list[tuple[int, int]]) -> tuple[AttentionSpec, list[list[RowSlice]]]:
    """A step of slices (start, rows), rows of one first, and the prompts before it."""
    spec = make_spec(shape, total_chunks(lengths))
    final = slices_of(spec, lengths)
    past = [replace(piece, start=0, num_rows=piece.start, reads_all=True) for piece in final if piece.start]
    return spec, [sorted(past, key=lambda piece: piece.num_rows > 1), final]


@combine(strength=1, share=SHARES, dim=[64, 80, 24], group=[1, 3, 4, 12], window=[None, None, 70])
def test_rows_attend_like_the_reference(share: float, dim: int, group: int, window: int | None) -> None:
    shape = Shape(dim=dim, group=group, window=window, sparse_values=share)
    starts = [450, 0, 1, 63, 64, 69, 70, 200]
    compare(*ragged(shape, [*((start, 1) for start in starts), (100, 30), (0, 64)]))


@combine(strength=1, level=LEVELS, dtype=[torch.float32, *HALVES])
def test_every_cpu_level_attends_like_the_reference(
    level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    shape = Shape(dim=80, group=3, dtype=dtype, sparse_values=0.3)
    tolerance = TOLERANCE[dtype] if dtype == torch.float32 else NEAR_TIE
    compare(*ragged(shape, [(450, 1), (63, 1), (200, 1), (10, 40)]), tolerance=tolerance)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_any_tree_attend_like_rows_by_themselves(seed: int) -> None:
    shape = Shape(dim=16, group=1 + seed, sparse_values=0.2)
    sharing.check_forest(CpuAttention, shape, seed, num_rows=12, prefills=[(0, 70)])


@pytest.mark.parametrize("seed", range(4))
def test_heads_choose_among_the_slots_that_their_masks_show(seed: int) -> None:
    """With what later rows sum, which is the attention to all slots."""
    shape = Shape(dim=16, group=1 + seed, sparse_values=0.3)
    masking.check_hidden(CpuAttention, shape, seed, num_rows=9, prefills=[(0, 70)])


@combine(strength=1, codec=CODECS, group=[1, 3, 8], share=SHARES)
def test_every_codec_attends_like_the_reference(codec: str, group: int, share: float) -> None:
    shape = Shape(dim=16, group=group, layers=1, sparse_values=share)
    encoded.check_forest(CpuAttention, shape, CODECS[codec], num_rows=8, prefills=[70], sinks=1)


@combine(strength=1, codec=CODECS, dtype=HALVES, group=[1, 12])
def test_every_codec_attends_like_the_reference_in_16_bits(
    codec: str, dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tolerance in (encoded.TOLERANCE, harness.TOLERANCE):
        monkeypatch.setitem(tolerance, dtype, NEAR_TIE)
    shape = Shape(dim=16, group=group, dtype=dtype, layers=1, sparse_values=0.5)
    encoded.check_forest(CpuAttention, shape, CODECS[codec], num_rows=8, sinks=1)


@combine(strength=1, codec=["nuq3", "g4"], hides=[True, False])
def test_packed_pages_attend_like_the_reference(codec: str, hides: bool) -> None:
    shape = Shape(dim=16, group=2, layers=2, sparse_values=0.3)
    placing.check_batch(CpuAttention, shape, codec, [300, 447, 200], sinks=1, hides=hides)
    placing.check_sharers(CpuAttention, shape, codec, 5, sinks=1)


def test_of_equal_scores_the_first_on_the_path_is_taken() -> None:
    """Equal keys: of 300 equal weights the first 60 and the own one, over a shared run and a tail."""
    spec = make_spec(Shape(heads=1, group=1, dim=16, layers=1, rotate=False, sparse_values=0.2), 20)
    values = torch.eye(16).repeat(20, 1)[:301]
    expected = (values[:60].sum(0) + values[300]) / 301
    for make in (ReferenceAttention, CpuAttention):
        out = attend_scores(make(spec), spec, torch.zeros(301), values, num_rows=3)
        torch.testing.assert_close(out, expected.expand(3, -1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [ReferenceAttention, CpuAttention])
@pytest.mark.parametrize("share", SHARES)
def test_the_weights_are_not_renormalised(make: Any, share: float) -> None:
    """All values are 1: the output is the sum of the weights that were used."""
    spec = make_spec(Shape(heads=1, group=1, dim=16, layers=1, rotate=False, sparse_values=share), 20)
    scores = torch.randn(301, generator=torch.Generator().manual_seed(0))
    out = attend_scores(make(spec), spec, scores, torch.ones(301, 16), num_rows=3)
    weights = torch.softmax(scores, 0)
    used = weights[:300].sort(descending=True).values[: int(share * 300)].sum() + weights[300]
    assert used < 0.95
    torch.testing.assert_close(out, used.expand_as(out), atol=2e-6, rtol=0)


def test_with_all_values_nothing_is_chosen_and_every_bit_stays() -> None:
    plain, steps = ragged(Shape(group=3), [(300, 1), (64, 1), (0, 20)])
    whole = replace(plain, sparse_values=1.0)
    before = plain.table.arena.data.clone()
    backend = CpuAttention(whole)
    outputs = [run(CpuAttention(plain), plain, steps, 0)[-1]]
    plain.table.arena.data.copy_(before)
    outputs.append(run(backend, whole, steps, 0)[-1])
    assert torch.equal(*outputs)
    assert backend._last is not None and not backend._last._records[0].sparse_rows
    # One row of a prompt beside a row that chooses reads everything.
    spec = replace(plain, sparse_values=0.1)
    prompt = [replace(piece, reads_all=index == 0) for index, piece in enumerate(steps[1])]
    plain.table.arena.data.copy_(before)
    mixed = run(CpuAttention(spec), spec, [steps[0], prompt], 0)[-1]
    assert relative_rms(mixed[:, 0], outputs[0][:, 0]) < TOLERANCE[torch.float32]
    assert relative_rms(mixed[:, 1], outputs[0][:, 1]) > 0.1


@pytest.mark.parametrize("codec", [None, "g4", "nuq3"])
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_the_slots_of_values_that_are_read_are_one_more_than_the_share(codec: str | None, share: float) -> None:
    """Counted by the kernels, for each row and query head; keys are read once in any case."""
    shape = Shape(dim=16, group=3, sparse_values=share)
    spec = make_spec(shape, 40) if codec is None else encoded_spec(shape, CODECS[codec](shape))
    starts = [401, 130, 60]
    if codec is None:
        slices = slices_of(spec, [(start, 1) for start in starts])
        sharing.fill(spec, slices, 0)
    else:
        sequences = encoded.Sequences(spec)
        run(CpuAttention(spec), spec, [sequences.step(list(enumerate(starts)))], 0)
        slices = sequences.step([(name, 1) for name in range(3)])
    backend = CpuAttention(spec)
    backend.reads = torch.zeros(spec.table.capacity, shape.heads, dtype=torch.int32)
    backend.value_reads = torch.zeros(spec.table.capacity, shape.heads, 2, dtype=torch.int32)
    run(backend, spec, [slices], 0)
    for piece, start in zip(slices, starts, strict=True):
        pages, slots = backend.value_reads.numpy()[piece.chunks].sum(0).T
        assert (slots == shape.layers * shape.group * (int(share * start) + 1)).all()
        assert (pages <= shape.layers * len(piece.chunks)).all()
        assert (backend.reads.numpy()[piece.chunks] == shape.layers).all()


@pytest.mark.parametrize("codec", [None, "g4"])
def test_values_of_pages_without_a_chosen_slot_are_not_read(codec: str | None) -> None:
    """Keys of the second of five chunks score highest. The values of the others hold NaN, or other codes."""
    shape = Shape(heads=1, group=2, dim=64, layers=1, rotate=False, sparse_values=0.1)
    spec = make_spec(shape, 8) if codec is None else encoded_spec(shape, CODECS[codec](shape))
    sequences = encoded.Sequences(spec)
    (piece,) = sequences.step([(0, 310)])
    q, k, v = torch.randn(3, 311, 2, 64, generator=torch.Generator().manual_seed(0))
    q, k, v = q.abs(), k[:, :1] - 1.0, v[:, :1]
    k[64:128] += 3.0
    plan = CpuAttention(spec).plan([piece])
    plan.write(0, k[:310], v[:310])
    plan.attend(0, q[:310])
    (row,) = sequences.step([(0, 1)])
    backend, found = CpuAttention(spec), []
    backend.value_reads = torch.zeros(spec.table.capacity, 1, 2, dtype=torch.int32)
    for is_spoilt in (False, True):
        for chunk in row.chunks[[0, 2, 3]].tolist() if is_spoilt else ():
            at = int(spec.table.pages[chunk, 0, 0]) * UNIT
            if codec is None:
                spec.table.arena.data[at + 64 * 256 : at + 2 * 64 * 256] = 0xFF
            else:
                spec.table.arena.data[at + 64 * 32 : at + 2 * 64 * 32] ^= 0x5A
        plan = backend.plan([row])
        plan.write(0, k[310:], v[310:])
        found.append(plan.attend(0, q[310:]).clone())
    assert torch.equal(*found) and found[0].isfinite().all()
    assert backend.value_reads[row.chunks, 0].tolist() == [[0, 0], [2, 2 * 2 * 31], [0, 0], [0, 0], [2, 2 * 2]]


@pytest.mark.parametrize("shares", [False, True])
def test_a_plan_that_goes_on_over_the_ends_of_chunks_attends_like_the_reference(shares: bool) -> None:
    spec = make_spec(Shape(dim=16, heads=1, layers=1, sparse_values=0.2), 30)
    prefix, paths = spec.table.take(3, spec.table.open_codec), [Path() for _ in range(2)]
    for path in paths:
        path.append(prefix)
        path.append(spec.table.take(1, spec.table.open_codec))
    names = ((7, 3),) if shares else ()
    slices = [RowSlice(192 + 55, 1, path.chunks, names) for path in paths]
    steps: list[list[RowSlice]] = [[RowSlice(0, 192, prefix)]]
    steps += [[RowSlice(192, 55, path.chunks)] for path in paths]
    steps.append([replace(piece, reads_all=True) for piece in slices])
    moves: list[list[int] | None] = [None] * len(steps)
    for count in range(75):
        moved = [0, 1] if count == 0 else []
        slices = [replace(piece, start=piece.start + 1) for piece in slices]
        for row, path in enumerate(paths):
            if slices[row].start % 64 == 0:
                path.append(spec.table.take(1, spec.table.open_codec))
                slices[row] = replace(slices[row], chunks=path.chunks)
                moved.append(row)
        steps.append(slices)
        moves.append(moved)

    class Moving(CpuAttention):
        def plan(self, slices: Sequence[RowSlice], *_: Any) -> Any:
            return super().plan(slices, next(due))

    backend, due = Moving(spec), iter(moves)
    found = run(backend, spec, steps, 1)
    expected = run(ReferenceAttention(spec), spec, steps, 1)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert relative_rms(one, other) < TOLERANCE[torch.float32], f"step {number}"
    # Beside the prompts' plans: the rows of a prompt have one of their own, and one more chunk fits into the next plan.
    assert backend.plans_built - 3 == 3


def test_micro_batches_choose_with_scratch_of_their_own() -> None:
    """Both plans are alive: each layer of one is computed between two layers of the other."""
    spec, (past, final) = ragged(Shape(dim=16, sparse_values=0.2), [(300, 1), (64, 1), (200, 1), (130, 1)])
    run(CpuAttention(spec), spec, [past], 0)
    (expected,) = run(ReferenceAttention(spec), spec, [final], 1)
    plan, generator = BlockAttention(CpuAttention(spec), 2, None).plan(final), torch.Generator().manual_seed(1)
    for layer in range(2):
        fused = torch.randn(4, 8 * 16, generator=generator)
        q, k, v = (part.unflatten(1, (-1, 16)) for part in fused.split([64, 32, 32], 1))
        for batch in plan.batches:
            batch.plan.write(layer, k[batch.rows], v[batch.rows])
            found = batch.plan.attend(layer, q[batch.rows])
            assert relative_rms(found, expected[layer, batch.rows]) < TOLERANCE[torch.float32]


@pytest.mark.alone
def test_threads_change_no_bit() -> None:
    spec = make_spec(Shape(dim=16, group=2, sparse_values=0.2), 40)
    slices = sharers(taking(spec), 6, 4, 150)
    sharing.fill(spec, slices, 0)
    before, found = runtime.num_threads(), []
    try:
        for threads in (1, 2, 2):
            runtime.set_num_threads(threads)
            found.append(run(CpuAttention(spec), spec, [slices], 0)[0])
    finally:
        runtime.set_num_threads(before)
    assert relative_rms(found[1], found[0]) < TOLERANCE[torch.float32] and torch.equal(found[1], found[2])
