"""The attention kernels compared with the reference over few, odd shapes, because the interpreter is slow."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.attention.reference import ReferenceAttention
from quire.attention.triton import TritonAttention

from ...effort import tries
from ..harness import TOLERANCE, Shape, assert_equals_reference, make_spec, relative_rms, run, slices_of

check = functools.partial(assert_equals_reference, TritonAttention)

EDGES = [(0, 1), (63, 1), (65, 3), (0, 65), (128, 17)]
SHAPES = [
    Shape(dim=16, group=1, heads=1, layers=2),
    Shape(dim=64, group=3, heads=2, layers=1, dtype=torch.bfloat16),
    Shape(dim=80, group=4, heads=1, layers=1),
    Shape(dim=96, group=8, heads=1, layers=1, dtype=torch.float16),
    Shape(dim=128, group=4, heads=1, layers=1, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"D{shape.dim}-G{shape.group}-{shape.dtype}")
def test_mixed_prefill_and_decode_attend_like_the_reference(shape: Shape) -> None:
    check(shape, EDGES)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"D{shape.dim}-G{shape.group}-{shape.dtype}")
def test_a_decode_step_attends_like_the_reference(shape: Shape) -> None:
    check(shape, [(0, 1), (62, 1), (63, 1), (64, 1), (130, 1)])


def test_decode_steps_store_what_later_steps_read() -> None:
    """Across a chunk boundary: every step reads the keys and values that the steps before it stored."""
    shape = Shape(dim=16, group=3, layers=2)
    outputs = []
    for make in (ReferenceAttention, TritonAttention):
        spec = make_spec(shape, 8)
        first, second = slices_of(spec, [(58, 10), (0, 10)])
        prefill = [replace(first, start=0, num_rows=58)]
        steps = [[replace(first, start=58 + i, num_rows=1), replace(second, start=i, num_rows=1)] for i in range(10)]
        outputs.append(run(make(spec), spec, [prefill, *steps], seed=1))
    for step, (actual, expected) in enumerate(zip(outputs[1], outputs[0], strict=True)):
        assert relative_rms(actual, expected) < TOLERANCE[shape.dtype], f"step {step}"


def test_the_pages_hold_what_the_reference_stores() -> None:
    for lengths in ([(0, 70)], [(0, 1)]):
        arenas = []
        for make in (ReferenceAttention, TritonAttention):
            spec = make_spec(Shape(dim=16, layers=2, dtype=torch.float16), 3)
            run(make(spec), spec, [slices_of(spec, lengths)], seed=3)
            arenas.append(spec.table.arena.data.view(torch.float16))
        assert (arenas[0].isnan() == arenas[1].isnan()).all(), "different slots were written"
        torch.testing.assert_close(arenas[1].nan_to_num(), arenas[0].nan_to_num(), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("lengths", [[(900, 1), (3, 1)], [(700, 5), (0, 9)], [(450, 40)]], ids=str)
def test_a_long_sequence_is_split_and_merged(lengths: list[tuple[int, int]]) -> None:
    shape = Shape(dim=16, heads=2, group=2, layers=1, dtype=torch.float16)
    spec = make_spec(shape, 20)
    backend = TritonAttention(spec)
    plan = backend.plan(slices_of(spec, lengths))
    assert any((pieces[:, 9] > 1).any() for pieces in (plan.kinds[0].short, plan.kinds[0].tall))
    check(shape, lengths)


def test_every_counter_is_zero_after_a_merge() -> None:
    spec = make_spec(Shape(dim=16, heads=1, layers=1, dtype=torch.float16), 20)
    backend = TritonAttention(spec)
    (piece,) = slices_of(spec, [(0, 900)])
    run(backend, spec, [[piece], [replace(piece, start=899, num_rows=1)]], seed=0)
    assert not backend.partials.arrivals.any()


@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_a_sliding_window_hides_older_tokens(window: int) -> None:
    shape = Shape(dim=16, heads=1, layers=1, dtype=torch.float16, window=window)
    check(shape, [(0, 150)])
    check(shape, [(200, 1), (63, 1)])
    check(shape, [(130, 70), (200, 2)])


def test_models_without_rotation_attend_like_the_reference() -> None:
    check(Shape(dim=16, layers=1, rotate=False), [(0, 1), (64, 3), (0, 65)])
    check(Shape(dim=16, layers=1, rotate=False), [(0, 1), (64, 1)])


def test_padded_rows_give_zeros_and_write_nothing() -> None:
    shape = Shape(dim=16, group=2, layers=1, dtype=torch.float16)
    generator = torch.Generator().manual_seed(0)
    outputs, arenas = [], []
    fused = torch.randn(8, 8 * 16, generator=generator).half()
    for rows in (5, 8):
        spec = make_spec(shape, 10)
        backend = TritonAttention(spec)
        final = slices_of(spec, [(70, 1), (70, 1), (70, 1), (0, 1), (0, 1)])
        run(backend, spec, [[replace(piece, start=0, num_rows=70) for piece in final[:3]]], seed=0)
        plan = backend.plan(final)
        assert (plan.num_rows, plan.batch_size) == (5, 8)
        q, k, v = (part.unflatten(1, (-1, 16)) for part in fused[:rows].split([64, 32, 32], 1))
        plan.write(0, k, v)
        outputs.append(plan.attend(0, q))
        arenas.append(spec.table.arena.data.clone())
    assert torch.equal(outputs[0], outputs[1][:5]) and not outputs[1][5:].any()
    assert torch.equal(*arenas)


@pytest.mark.parametrize("rows", [1, 130])
def test_large_scores_neither_overflow_nor_vanish(rows: int) -> None:
    outputs = []
    for make in (ReferenceAttention, TritonAttention):
        spec = make_spec(Shape(layers=1, heads=1, group=1, dim=64, rotate=False), 4)
        (piece,) = slices_of(spec, [(0, 130)])
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(130, 1, 64, generator=generator) for _ in range(3))
        q[..., 0], k[..., 0] = 8.0, 80.0 * torch.linspace(0.5, 1, 130)[:, None]
        backend = make(spec)
        for start, count in ((0, 130 - rows), (130 - rows, rows)):
            if count:
                plan = backend.plan([replace(piece, start=start, num_rows=count)])
                plan.write(0, k[start : start + count], v[start : start + count])
                out = plan.attend(0, q[start : start + count])
        outputs.append(out)
    # Scores near 115 in base 2 carry 1.4e-5 of rounding each, whoever computes them.
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-4, rtol=1e-3)


def test_a_random_ragged_step_attends_like_the_reference(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(tries(4)):
        lengths = [
            (int(random.integers(0, 200)), int(random.choice([1, 2, 5, 20, 90]))) for _ in range(random.integers(1, 4))
        ]
        dtype = [torch.float32, torch.bfloat16, torch.float16][random.integers(3)]
        shape = Shape(
            heads=int(random.integers(1, 3)),
            group=int(random.choice([1, 3, 8])),
            dim=16,
            layers=1,
            dtype=dtype,
            window=random.choice([None, 70]),
        )
        check(shape, lengths, seed=seed % 1000)
