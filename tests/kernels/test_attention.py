"""The CPU kernels compared with the reference over ragged batches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.cpu import CpuAttention
from quire.attention.plan import lay_out
from quire.attention.reference import ReferenceAttention
from quire.attention.rows import RowSlice
from quire.attention.spec import Scoring
from quire.cache.path import Path
from quire.kernels import runtime
from tests.effort import combine, examples

from .harness import TOLERANCE, Shape, assert_equals_reference, make_spec, relative_rms, run, slices_of
from .pages import LEVELS, use_level

check = functools.partial(assert_equals_reference, CpuAttention)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EDGES = [(0, 1), (62, 1), (63, 1), (64, 1), (65, 3), (0, 63), (0, 64), (0, 65), (64, 64), (128, 17)]


@combine(dtype=DTYPES, dim=[64, 80, 96, 128], group=[1, 3, 4, 8])
def test_mixed_prefill_and_decode_attend_like_the_reference(dtype: torch.dtype, dim: int, group: int) -> None:
    check(Shape(dim=dim, group=group, dtype=dtype), EDGES)


@combine(strength=1, dim=[8, 16, 24, 48, 112], dtype=DTYPES)
def test_odd_head_sizes_attend_like_the_reference(dim: int, dtype: torch.dtype) -> None:
    check(Shape(dim=dim, dtype=dtype), [(0, 70), (100, 1)])


@combine(strength=1, rows=[1, 2, 7, 17, 33, 64], dtype=DTYPES[:2])
def test_a_decode_batch_attends_like_the_reference(rows: int, dtype: torch.dtype) -> None:
    check(Shape(group=3, heads=3, dtype=dtype), [(7 * i % 200, 1) for i in range(rows)])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_long_sequence_is_split_and_merged(dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype, heads=1)
    lengths = [(900, 1), (3, 1)]
    spec = make_spec(shape, 20)
    assert lay_out(slices_of(spec, lengths), block_rows=64, num_heads=1, workers=2, window=None).num_partials > 0
    check(shape, lengths)
    check(shape, [(700, 5), (0, 9)])


@combine(strength=1, window=[1, 5, 64, 100], lengths=[[(0, 150)], [(200, 1), (63, 2)], [(130, 70)]])
def test_a_sliding_window_hides_older_tokens(window: int, lengths: list[tuple[int, int]]) -> None:
    check(Shape(window=window), lengths)


@pytest.mark.parametrize("window", [3, 64, 65, 66])
def test_a_decoding_row_sees_all_of_its_window_wherever_that_begins(window: int) -> None:
    """The window begins with the last slot of a page, the first one of the next, or beside them."""
    lengths = [(start, 1) for start in range(63 + window - 3, 63 + window + 3)]
    check(Shape(dim=16, heads=1, layers=1, window=window), lengths)


def test_models_without_rotation_attend_like_the_reference() -> None:
    check(Shape(rotate=False), EDGES)


@examples(40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 140)), min_size=1, max_size=6),
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    dim=st.sampled_from([16, 64, 80]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, None, 70]),
    seed=st.integers(0, 99),
)
def test_any_ragged_step_attends_like_the_reference(lengths, heads, group, dim, dtype, window, seed) -> None:  # type: ignore[no-untyped-def]
    check(Shape(heads=heads, group=group, dim=dim, dtype=dtype, window=window), lengths, seed)


@combine(level=LEVELS, dtype=DTYPES, dim=[64, 80])
def test_every_cpu_level_attends_like_the_reference(
    level: str, dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    check(Shape(dim=dim, group=3, dtype=dtype, window=90), EDGES)


@pytest.mark.parametrize("offset", [80.0, -80.0])
def test_large_scores_neither_overflow_nor_vanish(offset: float) -> None:
    outputs = []
    for make in (ReferenceAttention, CpuAttention):
        spec = make_spec(Shape(layers=1, heads=1, group=1, rotate=False), 4)
        (piece,) = slices_of(spec, [(0, 130)])
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(130, 1, 64, generator=generator) for _ in range(3))
        q[..., 0], k[..., 0] = 8.0, offset * torch.linspace(0.5, 1, 130)[:, None]
        plan = make(spec).plan([piece])
        plan.write(0, k, v)
        outputs.append(plan.attend(0, q))
    # Scores near 115 in base 2 carry 1.4e-5 of rounding each, whoever computes them.
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-4, rtol=1e-3)


@combine(strength=1, dtype=DTYPES, poison=[float("nan"), float("inf")])
def test_a_poisoned_key_that_is_visible_poisons_the_row_and_no_other(dtype: torch.dtype, poison: float) -> None:
    spec = make_spec(Shape(layers=1, heads=1, group=1, dtype=dtype, rotate=False), 4)
    (piece,) = slices_of(spec, [(0, 130)])
    q, k, v = torch.randn(3, 130, 1, 64, generator=torch.Generator().manual_seed(0)).abs().to(dtype)
    k[70] = poison
    plan = CpuAttention(spec).plan([piece])
    plan.write(0, k, v)
    out = plan.attend(0, q)
    assert out[:70].isfinite().all()
    assert out[70:].isnan().all(1).all()


def test_a_decode_plan_is_kept_while_nothing_but_positions_moves() -> None:
    spec = make_spec(Shape(layers=1), 8)
    backend = CpuAttention(spec)
    path = Path()
    path.append(spec.table.take(2, spec.table.open_codec))
    other = Path()
    other.append(spec.table.take(2, spec.table.open_codec))
    first = backend.plan([RowSlice(10, 1, path.chunks), RowSlice(70, 1, other.chunks)])
    assert backend.plan([RowSlice(11, 1, path.chunks), RowSlice(71, 1, other.chunks)], []) is first
    assert backend.plans_built == 1
    assert backend.plan([RowSlice(12, 1, path.chunks)]) is not first and backend.plans_built == 2
    # With a window chunks leave a row's sight as it moves on.
    (layer,) = spec.layers
    windowed = CpuAttention(replace(spec, layers=(replace(layer, scoring=Scoring(8)),)))
    first = windowed.plan([RowSlice(70, 1, path.chunks)])
    assert windowed.plan([RowSlice(71, 1, path.chunks)], []) is not first


@pytest.mark.alone
@combine(group=[1, 3], dtype=[torch.float32, torch.bfloat16], threads=[1, 2])
def test_shared_segments_are_read_once_and_change_nothing(group: int, dtype: torch.dtype, threads: int) -> None:
    """Three levels of sharing, rows that share nothing, and a lone reader: the same numbers as every row by itself."""
    shape = Shape(group=group, dtype=dtype)
    spec = make_spec(shape, 40)
    codec = spec.table.open_codec
    root, left, right, own = (spec.table.take(count, codec) for count in (5, 3, 2, 8))
    prefixes = {
        "left": (np.concatenate((root, left)), ((1, 5), (2, 3))),
        "right": (np.concatenate((root, right)), ((1, 5), (3, 2))),
        "root": (root, ((1, 5),)),
        "none": (np.empty(0, np.int32), ()),
    }
    order = ["left", "left", "left", "right", "right", "root", "none", "none"]

    def rows(shared: bool) -> list[RowSlice]:
        found = []
        for number, name in enumerate(order):
            chunks, names = prefixes[name]
            start = len(chunks) * 64 + 7 * number
            found.append(RowSlice(start, 1, np.append(chunks, own[number]), names if shared else ()))
        return found

    # The prefixes and the first tokens of each tail are written by prefill slices.
    fill = [RowSlice(0, len(prefixes[name][0]) * 64, prefixes[name][0]) for name in ("left", "right")]
    fill += [
        RowSlice(piece.start // 64 * 64, piece.start % 64, piece.chunks) for piece in rows(False) if piece.start % 64
    ]
    before = runtime.num_threads()
    runtime.set_num_threads(threads)
    try:
        steps = [[piece] for piece in fill]
        outputs = [run(CpuAttention(spec), spec, [*steps, rows(shared)], 1)[-1] for shared in (True, False)]
        expected = run(ReferenceAttention(spec), spec, [*steps, rows(False)], 1)[-1]
        plan = CpuAttention(spec).plan(rows(True))
    finally:
        runtime.set_num_threads(before)
    read = plan.layouts[0].pieces[:, 3].sum()
    assert read == 5 + 3 + 2 + len(order), "chunks read: every shared one once, and a tail for each row"
    assert relative_rms(outputs[0], expected) < TOLERANCE[dtype]
    assert relative_rms(outputs[0], outputs[1]) < TOLERANCE[dtype]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("tokens", [70, 700])
def test_a_plan_that_goes_on_over_the_ends_of_chunks_attends_like_the_reference(shares: bool, tokens: int) -> None:
    spec = make_spec(Shape(dim=16, heads=1, layers=1), 60)
    prefix = spec.table.take(tokens // 64, spec.table.open_codec)
    paths = [Path() for _ in range(4)]
    for path in paths:
        path.append(prefix)
        path.append(spec.table.take(1, spec.table.open_codec))
    names = ((7, len(prefix)),) if shares else ()
    starts = [len(prefix) * 64 + at for at in (1, 20, 40, 60)]
    steps: list[list[RowSlice]] = [[RowSlice(0, len(prefix) * 64, prefix)]]
    steps += [[RowSlice(start // 64 * 64, start % 64, path.chunks)] for start, path in zip(starts, paths, strict=True)]
    slices = [RowSlice(start, 1, path.chunks, names) for start, path in zip(starts, paths, strict=True)]
    moves: list[list[int] | None] = [None] * len(steps) + [None]
    steps.append(slices)
    for _ in range(130):
        moved = []
        slices = [replace(piece, start=piece.start + 1) for piece in slices]
        for row, (piece, path) in enumerate(zip(slices, paths, strict=True)):
            if piece.start % 64 == 0:
                path.append(spec.table.take(1, spec.table.open_codec))
                slices[row] = replace(piece, chunks=path.chunks)
                moved.append(row)
        steps.append(slices)
        moves.append(moved)

    class Moving(CpuAttention):
        def plan(self, slices: Sequence[RowSlice], *_: Any) -> Any:
            return super().plan(slices, next(due))

    backend, due = Moving(spec), iter(moves)
    found = run(backend, spec, steps, 1)
    expected = run(ReferenceAttention(spec), spec, steps, 1)
    for one, other in zip(found, expected, strict=True):
        assert relative_rms(one, other) < TOLERANCE[torch.float32]
    # Each row has room for one chunk; the second one takes another plan, in which all have room again.
    assert 1 < backend.plans_built - 5 < 5


@pytest.mark.alone
def test_rows_of_one_sequence_see_each_other_however_many_threads_compute_them() -> None:
    spec = make_spec(Shape(dim=16), 2)
    chunks = spec.table.take(1, spec.table.open_codec)
    steps = [[RowSlice(start, 1, chunks) for start in range(60)]]
    expected = run(ReferenceAttention(spec), spec, steps, 1)[-1]
    before = runtime.num_threads()
    runtime.set_num_threads(2)
    try:
        for _ in range(20):
            spec.table.arena.data.fill_(0xFF)
            assert relative_rms(run(CpuAttention(spec), spec, steps, 1)[-1], expected) < TOLERANCE[torch.float32]
    finally:
        runtime.set_num_threads(before)


def test_a_row_that_another_one_reads_is_written_before_both() -> None:
    spec = make_spec(Shape(dim=16, layers=1), 4)
    chunks = spec.table.take(2, spec.table.open_codec)
    alone, beside = RowSlice(5, 1, chunks[:1]), RowSlice(9, 1, chunks[1:])
    assert CpuAttention(spec).plan([alone, beside])._records[0].decode
    assert not CpuAttention(spec).plan([alone, beside, replace(alone, start=6)])._records[0].decode
