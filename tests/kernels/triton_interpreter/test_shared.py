"""The two phases over shared chunks in the interpreter: for any tree and step, every shared page is read once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attention.triton import TritonAttention

from ...effort import tries
from .. import sharing
from ..harness import Shape, make_spec
from ..sharing import apart, sharers, taking

SHAPES = [
    Shape(dim=16, group=1, heads=2, layers=1),
    Shape(dim=64, group=3, heads=1, layers=1, dtype=torch.bfloat16),
    Shape(dim=80, group=4, heads=1, layers=1),
    Shape(dim=128, group=8, heads=1, layers=1, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"D{shape.dim}-G{shape.group}-{shape.dtype}")
@pytest.mark.parametrize("num_rows", [2, 7, 20])
@pytest.mark.parametrize("prefills", [[], [(0, 30), (65, 1)]], ids=["decode", "mixed"])
def test_a_tree_attends_like_the_reference(
    shape: Shape, num_rows: int, prefills: list[tuple[int, int]], seed: int
) -> None:
    backend = sharing.check_forest(TritonAttention, shape, seed % 10000, num_rows=num_rows, prefills=prefills)
    assert not backend.partials.arrivals.any()


def test_random_trees_attend_like_the_reference(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(tries(6)):
        shape = Shape(
            heads=int(random.integers(1, 3)),
            group=int(random.choice([1, 3, 4, 8])),
            dim=16,
            layers=1,
            dtype=[torch.float32, torch.bfloat16][random.integers(2)],
            window=random.choice([None, None, None, 70]),
        )
        prefills = [(int(random.integers(0, 100)), int(random.choice([1, 3, 40])))] * int(random.integers(0, 2))
        rows = int(random.integers(1, 21))
        sharing.check_forest(TritonAttention, shape, int(random.integers(10000)), num_rows=rows, prefills=prefills)


def test_a_long_tail_is_split_and_merges_what_is_shared() -> None:
    shape = Shape(dim=16, heads=2, group=2, layers=1)
    spec = make_spec(shape, 80, positions=2048)
    slices = [*sharers(taking(spec), 3, 6, 40), *sharers(taking(spec), 2, 4, 900)]
    slices[3:] = [type(piece)(piece.start, 1, piece.chunks, ((2, 4),)) for piece in slices[3:]]
    sharing.fill(spec, slices, 0)
    backend = TritonAttention(spec)
    plan = backend.plan(slices)
    short = plan.kinds[0].short
    seeded = short[short[:, 7] > 0]
    assert plan.shares and (seeded[:, 9] > 1).any(), "a row has both"
    outputs = [sharing.run(TritonAttention(spec), spec, [rows], 0)[0] for rows in (slices, apart(slices))]
    assert sharing.relative_rms(*outputs) < 2e-6


@pytest.mark.parametrize("num_rows, layers", [(2, 2), (16, 1), (33, 1)])
def test_a_shared_page_is_read_once_for_a_tile_of_rows(num_rows: int, layers: int) -> None:
    shape = Shape(dim=64, group=4, heads=2 if num_rows == 2 else 1, layers=layers, dtype=torch.bfloat16)
    sharing.check_reads(TritonAttention, shape, num_rows, tile=16)


def test_a_tile_of_float32_has_fewer_rows() -> None:
    sharing.check_reads(TritonAttention, Shape(dim=64, group=4, layers=1), 6, tile=4)


def test_a_window_shares_nothing() -> None:
    spec = make_spec(Shape(heads=1, layers=1, dim=16, window=1000), 24)
    slices = sharers(taking(spec), 4, 10, 150)
    assert sharing.read_counts(TritonAttention(spec), spec, slices).sum() == 4 * 13


def test_a_step_of_32_reads_the_slots_of_its_distinct_chunks() -> None:
    sharing.check_slots_of_a_step(TritonAttention, torch.float16, group=2, dim=16)


def test_the_worked_example() -> None:
    sharing.check_worked_merge(TritonAttention)


@pytest.mark.parametrize("offset", [80.0, -80.0])
def test_scores_beyond_float32_s_exponentials_merge(offset: float, seed: int) -> None:
    sharing.check_offset_scores(TritonAttention, offset, seed % 1000)
