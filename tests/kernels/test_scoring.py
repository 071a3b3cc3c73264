"""The CPU kernels scale and cap scores as the reference does."""

from __future__ import annotations

import pytest
import torch

from quire.attention.cpu import CpuAttention

from .harness import Shape, assert_equals_reference
from .pages import LEVELS, use_level


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sparse_values", [1.0, 0.3])
@pytest.mark.parametrize(("scale", "soft_cap"), [(0.3, None), (None, 30.0), (1.0, 50.0), (1.0, 2.0)])
def test_scores_are_scaled_and_capped(
    scale: float | None, soft_cap: float | None, sparse_values: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    for dtype in (torch.float32, torch.bfloat16) if sparse_values == 1 else (torch.float32,):
        shape = Shape(scale=scale, soft_cap=soft_cap, sparse_values=sparse_values, dtype=dtype, window=100)
        assert_equals_reference(CpuAttention, shape, [(0, 1), (150, 1), (63, 1), (200, 130), (0, 65)])
