"""Layers of several kinds in one plan, compared with the reference, which runs each by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attention.triton import TritonAttention
from quire.attention.triton_plan import TritonPlan

from ..kinds import (
    Layer,
    Twins,
    check_kinds,
    check_sharing,
    kinds_spec,
)

WINDOWS = [
    Layer(theta=1e6),
    Layer(window=1),
    Layer(window=20, theta=None),
    Layer(window=64, theta=100.0),
    Layer(window=100),
]
SHAPES = [
    Layer(heads=1, group=3, dim=32),
    Layer(heads=2, group=1, dim=16, window=20, theta=500.0),
    Layer(heads=3, group=2, dim=16),
    Layer(heads=1, group=3, dim=32, theta=1e6),
]
STEPS = [[(0, 130), (1, 60)], [(0, 1), (1, 7)], [(1, 1), (0, 1)]]
"""Prefill, a mixed step that passes a chunk's end, and decoding."""


@pytest.mark.parametrize("codec", [None, "g4 biased"])
def test_every_layer_has_its_own_window_and_rotation(codec: str | None) -> None:
    check_kinds(TritonAttention, WINDOWS, STEPS, codec=codec)


@pytest.mark.parametrize(
    "codec, dtype", [(None, torch.float32), (None, torch.bfloat16), ("g4", torch.float16)], ids=str
)
def test_every_layer_has_its_own_heads(codec: str | None, dtype: torch.dtype) -> None:
    check_kinds(TritonAttention, SHAPES, STEPS, dtype, codec)


@pytest.mark.parametrize("codec", ["g4 biased", "nuq3"])
def test_tables_of_a_codec_and_exact_tokens_are_those_of_a_lane(codec: str) -> None:
    layers = [Layer(heads=1, group=2, soft_cap=2.0), Layer(heads=2, window=70), Layer(heads=1, group=2, scale=0.5)]
    check_kinds(
        TritonAttention, layers, [[(0, 66), (1, 63)], [(1, 1), (0, 1)]], codec=codec, sinks=3 if codec == "nuq3" else 0
    )


@pytest.mark.parametrize("codec", [None, "g4"])
@pytest.mark.parametrize("soft_cap, scale", [(50.0, 0.3), (2.0, None)])
def test_scores_are_scaled_and_capped(codec: str | None, soft_cap: float, scale: float | None) -> None:
    layers = [Layer(group=2, scale=scale, soft_cap=soft_cap), Layer(group=2, window=40, scale=0.05, soft_cap=30.0)]
    check_kinds(TritonAttention, layers, STEPS, codec=codec)


@pytest.mark.parametrize(
    "dim, codec, dtype",
    [
        (256, None, torch.float32),
        (512, None, torch.bfloat16),
        (512, None, torch.float32),
        (256, "nuq3", torch.bfloat16),
        (512, "g4", torch.float16),
        (256, "g4", torch.float32),
    ],
    ids=str,
)
def test_large_heads_attend_like_the_reference(dim: int, codec: str | None, dtype: torch.dtype) -> None:
    check_kinds(
        TritonAttention, [Layer(dim=dim, group=2, soft_cap=50.0)], [[(0, 64), (1, 63)], [(1, 1), (0, 1)]], dtype, codec
    )


def test_large_and_small_heads_are_encoded_in_one_step() -> None:
    layers = [Layer(dim=256, window=64), Layer(dim=512)]
    check_kinds(TritonAttention, layers, [[(0, 65)], [(0, 1)]], torch.bfloat16, "g4")


PROFILED = [
    Layer(group=2, soft_cap=3.0),
    Layer(heads=2, window=70, scale=0.4),
    Layer(window=1, theta=None),
    Layer(heads=2, window=70, scale=0.4),
]


@pytest.mark.parametrize("codec", [None, "g4 biased"])
@pytest.mark.parametrize("peaks", [False, True], ids=["sums", "peaks"])
def test_slices_are_profiled_in_layers_of_all_kinds(codec: str | None, peaks: bool) -> None:
    twins = Twins(TritonAttention, PROFILED, codec=codec, sums=True, peaks=peaks)
    twins.step([(0, 70, 20), (1, 66, 3)])
    twins.step([(0, 60, 10), (1, 1, None)])
    twins.step([(0, 1, 0), (1, 1, 0)])


def test_columns_end_where_all_layers_have_windows() -> None:
    twins = Twins(TritonAttention, [Layer(window=20, soft_cap=2.0), Layer(window=70)], sums=True)
    twins.step([(0, 150, 5)])
    twins.step([(0, 60, 30)])
    twins.step([(0, 1, 0)])


@pytest.mark.parametrize("codec", [None, "g4"])
def test_every_lane_has_its_own_mask(codec: str | None) -> None:
    random = np.random.default_rng(0)
    layers = [Layer(heads=2, soft_cap=2.0), Layer(heads=1, group=3, window=100)]
    twins = Twins(TritonAttention, layers, codec=codec, sums=True)
    twins.step([(0, 130, None), (1, 70, None)])
    for name in (0, 1):
        twins.hide(name, 0, random)
    twins.step([(0, 20, 5), (1, 1, None)])
    twins.step([(1, 1, 0), (0, 1, None)])


def test_a_plan_is_reused_until_a_chunk_or_a_window_ends() -> None:
    """Rows at 58 and 90. The window of 20 passes the first chunk's end at position 83, one step after row 64 is a new
    chunk's first; no other layer has a window that ends.
    """
    layers = [Layer(window=20), Layer(), Layer(window=300)]
    twins = Twins(TritonAttention, layers)
    twins.step([(0, 58, None), (1, 90, None)])
    built = []
    for step in range(30):
        counts = twins.backend.plans_built, twins.backend.copies
        twins.step([(0, 1, None), (1, 1, None)], moves=step > 0)
        now = twins.backend.plans_built, twins.backend.copies
        if now[0] > counts[0]:
            built.append(58 + step)
        assert (now[1] > counts[1]) == (now[0] > counts[0]) and now[1] - counts[1] <= 2
    # Joined; a chunk begins at 64; 83 - 19 is the first position of the second chunk.
    assert built == [58, 64, 83]


def test_a_window_that_no_row_fills_ends_no_plan() -> None:
    twins = Twins(TritonAttention, [Layer(window=100), Layer()])
    twins.step([(0, 3, None)])
    for step in range(6):
        twins.step([(0, 1, None)], moves=step > 0)
    assert twins.backend.plans_built == 2


def test_layers_without_a_window_share_beside_layers_with_one() -> None:
    def look(plan: TritonPlan, shares: bool) -> None:
        assert [kind.shares for kind in plan.kinds] == [False, shares] and plan.shares is shares
        assert (len(plan.kinds[1].tall) > 0) is shares and not len(plan.kinds[0].tall)

    check_sharing(TritonAttention, look)


def test_a_long_sequence_is_split_and_merged_in_layers_of_all_kinds() -> None:
    layers = [Layer(heads=1, group=2), Layer(heads=3, window=200)]
    twins = Twins(TritonAttention, layers, torch.float16)
    twins.step([(0, 400, None)])
    twins.step([(0, 1, None)])
    last = twins.backend._last
    assert last is not None and (last.kinds[0].short[:, 9] > 1).any() and not twins.backend.partials.arrivals.any()


def test_exact_tokens_need_equal_head_sizes() -> None:
    spec = kinds_spec([Layer(dim=16), Layer(dim=32)], codec="g4", sinks=2)
    with pytest.raises(AssertionError, match="equal head sizes"):
        TritonAttention(spec)
