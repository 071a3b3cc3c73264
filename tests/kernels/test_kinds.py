"""Layers of several kinds in one plan of the CPU backend, compared with the reference, which runs each by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attention.cpu import CpuAttention, CpuPlan

from .kinds import Layer, Twins, check_kinds, check_sharing, kinds_spec
from .pages import LEVELS, use_level

WINDOWS = [
    Layer(theta=1e6),
    Layer(window=1),
    Layer(window=20, theta=None),
    Layer(window=64, theta=100.0),
    Layer(window=100),
    Layer(window=200, theta=500.0),
    Layer(),
]
SHAPES = [
    Layer(heads=1, group=3, dim=32),
    Layer(heads=2, group=1, dim=16, window=20, theta=500.0),
    Layer(heads=3, group=2, dim=16),
    Layer(heads=1, group=9, dim=32, theta=1e6),
    Layer(heads=2, group=1, dim=64, window=100, theta=None),
]
STEPS = [[(0, 130), (1, 60)], [(0, 1), (1, 7)], [(0, 60), (1, 150)], [(1, 1), (0, 1)]]
"""Prefill, mixed steps that pass chunks' ends, and decoding."""
CODES = [None, "g4 biased", "nuq3"]


@pytest.fixture(params=LEVELS, autouse=True)
def _level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(request.param, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", CODES)
def test_every_layer_has_its_own_window_and_rotation(codec: str | None, dtype: torch.dtype) -> None:
    check_kinds(CpuAttention, WINDOWS, STEPS, dtype, codec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codec", [None, "g4"])
def test_every_layer_has_its_own_heads(codec: str | None, dtype: torch.dtype) -> None:
    check_kinds(CpuAttention, SHAPES, STEPS, dtype, codec)


@pytest.mark.parametrize("codec", ["g4 biased", "nuq3"])
def test_tables_of_a_codec_and_exact_tokens_are_those_of_a_lane(codec: str) -> None:
    layers = [Layer(heads=1, group=2, soft_cap=2.0), Layer(heads=2, window=70), Layer(heads=1, group=2, scale=0.5)]
    steps = [[(0, 66), (1, 63)], [(1, 1), (0, 1)], [(0, 1), (1, 70)]]
    for dtype in (torch.float32, torch.bfloat16):
        check_kinds(CpuAttention, layers, steps, dtype, codec, sinks=3 if codec == "nuq3" else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", CODES)
@pytest.mark.parametrize("soft_cap, scale", [(50.0, 0.3), (2.0, None)])
def test_scores_are_scaled_and_capped(
    codec: str | None, soft_cap: float, scale: float | None, dtype: torch.dtype
) -> None:
    layers = [
        Layer(group=2, scale=scale, soft_cap=soft_cap),
        Layer(group=2, window=40, scale=0.05, soft_cap=30.0),
        Layer(group=2, soft_cap=2.0, theta=None),
    ]
    check_kinds(CpuAttention, layers, STEPS, dtype, codec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim, codec", [(256, None), (256, "nuq3"), (256, "g4"), (512, None), (512, "g4")])
def test_large_heads_attend_like_the_reference(dim: int, codec: str | None, dtype: torch.dtype) -> None:
    layers = [Layer(dim=dim, group=2, soft_cap=50.0), Layer(dim=dim, group=5, window=70)]
    check_kinds(CpuAttention, layers, [[(0, 64), (1, 63)], [(1, 1), (0, 1)], [(0, 3), (1, 70)]], dtype, codec)


def test_large_and_small_heads_are_encoded_in_one_step() -> None:
    layers = [Layer(dim=256, window=64), Layer(dim=512), Layer(heads=3, group=2, dim=64)]
    check_kinds(CpuAttention, layers, [[(0, 65)], [(0, 1)], [(0, 130)]], torch.bfloat16, "g4")


PROFILED = [
    Layer(group=2, soft_cap=3.0),
    Layer(heads=2, window=70, scale=0.4),
    Layer(window=1, theta=None),
    Layer(heads=2, window=70, scale=0.4),
]
PROFILED_SHAPES = [
    Layer(group=3, dim=32),
    Layer(heads=2, dim=64, window=70, soft_cap=2.0),
    Layer(heads=3, group=2, dim=16, theta=500.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", [None, "g4"])
@pytest.mark.parametrize("peaks", [False, True], ids=["sums", "peaks"])
@pytest.mark.parametrize("layers", [PROFILED, PROFILED_SHAPES], ids=["windows", "shapes"])
def test_slices_are_profiled_in_layers_of_all_kinds(
    layers: list[Layer], codec: str | None, peaks: bool, dtype: torch.dtype
) -> None:
    twins = Twins(CpuAttention, layers, dtype, codec, sums=True, peaks=peaks)
    twins.step([(0, 70, 20), (1, 66, 3)])
    twins.step([(0, 60, 10), (1, 1, None)])
    twins.step([(0, 1, 0), (1, 1, 0)])


def test_columns_end_where_all_layers_have_windows() -> None:
    twins = Twins(CpuAttention, [Layer(window=20, soft_cap=2.0), Layer(window=70)], sums=True)
    twins.step([(0, 150, 5)])
    twins.step([(0, 60, 30)])
    twins.step([(0, 1, 0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", [None, "g4"])
def test_every_lane_has_its_own_mask(codec: str | None, dtype: torch.dtype) -> None:
    random = np.random.default_rng(0)
    layers = [Layer(heads=2, soft_cap=2.0), Layer(heads=1, group=3, window=100)]
    twins = Twins(CpuAttention, layers, dtype, codec, sums=True)
    twins.step([(0, 130, None), (1, 70, None)])
    for name in (0, 1):
        twins.hide(name, 0, random)
    twins.step([(0, 20, None), (1, 1, None)])
    twins.step([(1, 1, 0), (0, 1, 0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", ["g4 biased", "nuq3"])
def test_slots_with_positions_of_their_own_are_rotated_as_their_layer_says(codec: str, dtype: torch.dtype) -> None:
    random = np.random.default_rng(0)
    layers = [Layer(heads=2), Layer(heads=2, theta=30.0, soft_cap=2.0), Layer(theta=None), Layer(group=12, theta=30.0)]
    twins = Twins(CpuAttention, layers, dtype, codec, sums=True)
    twins.step([(0, 130, None), (1, 70, None)])
    for name, index in ((0, 0), (0, 1), (1, 0)):
        twins.place(name, index, random)
    twins.step([(0, 1, None), (1, 1, None)])
    twins.step([(0, 20, None), (1, 1, 0)])


@pytest.mark.parametrize("codec", [None, "g4"])
@pytest.mark.parametrize("layers", [WINDOWS, SHAPES, PROFILED], ids=["windows", "shapes", "capped"])
def test_values_are_chosen_in_layers_of_all_kinds(layers: list[Layer], codec: str | None) -> None:
    twins = Twins(CpuAttention, layers, codec=codec, sparse_values=0.3)
    twins.step([(0, 130, None), (1, 270, None)])
    for step in range(3):
        twins.step([(0, 1, None), (1, 1, None)], moves=step > 0)


def test_only_the_layouts_of_windows_that_end_are_laid_out_again() -> None:
    """Rows at 58 and 90. The window of 20 leaves the first chunk at position 83, and the second one at 147. All other
    steps are advanced, those that begin a chunk too.
    """
    layers = [Layer(window=20, heads=2), Layer(dim=32, theta=100.0), Layer(window=300)]
    twins = Twins(CpuAttention, layers)
    twins.step([(0, 58, None), (1, 90, None)])
    built, kept = [], []
    before: list[object] = []
    for step in range(60):
        count = twins.backend.plans_built
        twins.step([(0, 1, None), (1, 1, None)], moves=step > 0)
        last = twins.backend._last
        assert last is not None
        if twins.backend.plans_built > count:
            built.append(step)
            kept.append([any(layout is old for old in before) for layout in last.layouts])
        before = list(last.layouts)
    assert twins.backend.plans_built == 1 + len(built)
    # The first step; row 0 leaves its first chunk at 83 and row 1 its second one at 147.
    assert built == [0, 83 - 58, 147 - 90], built
    assert kept[1:] == [[False, True, True], [False, False, False]] or kept[1:] == [[False, True, True]] * 2, kept


def test_layers_without_a_window_share_beside_layers_with_one() -> None:
    def look(plan: CpuPlan, shares: bool) -> None:
        assert [int(layout.pieces[:, 1].max()) for layout in plan.layouts] == [1, 3 if shares else 1]

    check_sharing(CpuAttention, look)


def test_a_long_sequence_is_split_and_merged_in_layers_of_all_kinds() -> None:
    layers = [Layer(heads=1, group=2, dim=32), Layer(heads=3, window=200)]
    twins = Twins(CpuAttention, layers)
    twins.step([(0, 500, None)])
    twins.step([(0, 1, None)])
    last = twins.backend._last
    assert last is not None and last.layouts[0].num_partials > 0


def test_exact_tokens_need_equal_head_sizes() -> None:
    spec = kinds_spec([Layer(dim=16), Layer(dim=32)], codec="g4", sinks=2)
    with pytest.raises(AssertionError, match="equal head sizes"):
        CpuAttention(spec)
