"""Masks of pages, column sums and recovery in the interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from quire.attention.triton import TritonAttention

from ..harness import Shape
from ..masking import check_hidden
from ..profiling import check_history

SHAPES = [
    Shape(dim=16, group=3, heads=2, layers=2),
    Shape(dim=64, group=4, heads=1, layers=1, dtype=torch.bfloat16),
    Shape(dim=80, group=1, heads=2, layers=1, dtype=torch.float16),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"D{shape.dim}-G{shape.group}-{shape.dtype}")


@each_shape
@pytest.mark.parametrize("num_rows, prefills", [(1, []), (7, []), (20, []), (3, [(130, 1), (65, 40), (0, 70)])])
def test_pages_with_masks_attend_like_the_reference(
    shape: Shape, num_rows: int, prefills: list[tuple[int, int]], seed: int
) -> None:
    check_hidden(TritonAttention, shape, seed % 10000, num_rows=num_rows, prefills=prefills)


@each_shape
def test_prompts_are_profiled_like_the_reference(shape: Shape, seed: int) -> None:
    check_history(TritonAttention, shape, None, seed=seed % 100)


@pytest.mark.parametrize("window", [5, 100])
def test_columns_outside_a_window_get_nothing(window: int) -> None:
    check_history(TritonAttention, Shape(dim=16, layers=1, heads=1, window=window), None)
