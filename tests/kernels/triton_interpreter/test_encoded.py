"""Encoded pages in the interpreter: attention equals the reference's, and encoded bytes equal its bytes."""

from __future__ import annotations

import pytest
import torch

from quire.attention.triton import TritonAttention
from quire.cache.codecs.group import GroupCodec
from tests.effort import whole

from .. import encoded
from ..encoded import CODECS
from ..harness import Shape

GROWTH = [
    [(0, 64), (1, 3), (2, 130)],  # a whole chunk, a prompt shorter than the sink, two chunks and a rest
    [(0, 1), (1, 60), (2, 1)],  # decoding beside a slice that ends a token before its chunk does
    [(1, 1), (2, 1), (0, 1)],  # a decode step that fills a chunk
    [(1, 1), (2, 62), (0, 70)],  # slices that begin in the middle of a chunk, one of them filling it
    [(2, 1), (1, 1), (0, 1), (3, 1)],
]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", whole(DTYPES, 1), ids=str)
def test_sequences_that_grow_attend_like_the_reference(dtype: torch.dtype) -> None:
    shape = Shape(heads=1, dim=32, group=3, dtype=dtype, layers=1)
    encoded.check_steps(TritonAttention, shape, CODECS["mixed"], GROWTH)


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_attends_like_the_reference(codec: str) -> None:
    shape = Shape(heads=1, dim=64, group=4, dtype=torch.bfloat16, layers=1)
    encoded.check_steps(TritonAttention, shape, CODECS[codec], [[(0, 66), (1, 63)], [(1, 1), (0, 1)]])


@pytest.mark.parametrize("dim", [16, 48, 80, 128])
@pytest.mark.parametrize("codec", ["mixed", "g4"])
def test_every_head_size_attends_like_the_reference(dim: int, codec: str) -> None:
    shape = Shape(heads=1, dim=dim, group=1, layers=1)
    encoded.check_steps(TritonAttention, shape, CODECS[codec], [[(0, 66)], [(0, 2)], [(0, 1)]])


def test_group_codes_of_keys_without_a_bias_attend_like_the_reference() -> None:
    shape = Shape(heads=1, dim=16, layers=1)
    encoded.check_steps(TritonAttention, shape, lambda of: GroupCodec(of.dim), [[(0, 66)], [(0, 1)]])


def test_every_layer_and_head_of_group_codes_has_its_own_key_bias() -> None:
    encoded.check_steps(TritonAttention, Shape(dim=16, group=1), CODECS["g4"], [[(0, 66)], [(0, 1)]])


@pytest.mark.parametrize("dim", [2, 24, 66])
def test_group_codes_of_odd_head_sizes_attend_like_the_reference(dim: int) -> None:
    encoded.check_steps(TritonAttention, Shape(heads=1, dim=dim, layers=1), CODECS["g4"], [[(0, 66)], [(0, 1)]])


@pytest.mark.parametrize("sinks", [0, 5, 64])
def test_sinks_attend_like_the_reference(sinks: int) -> None:
    """Among the steps a prompt shorter than the sink, which then grows past its chunk."""
    shape = Shape(heads=2, dim=16, layers=2) if sinks == 5 else Shape(heads=1, dim=16, layers=1)
    steps = [[(0, 66), (1, 3)], [(1, 61), (0, 1)], [(1, 1)]]
    encoded.check_steps(TritonAttention, shape, CODECS["mixed"], steps, sinks=sinks)


@pytest.mark.parametrize("count", [1, 2])
def test_of_channels_with_equal_costs_the_first_get_the_slots(count: int, seed: int) -> None:
    encoded.check_ties(TritonAttention, count, seed)


def test_slices_that_see_themselves_as_computed_attend_like_the_reference() -> None:
    for codec in ("mixed", "g4"):
        shape = Shape(heads=1, dim=16, layers=1)
        encoded.check_steps(TritonAttention, shape, CODECS[codec], [[(0, 140)], [(0, 70)]], sinks=5, strict=False)


@pytest.mark.parametrize("window", [1, 64, 100])
def test_a_sliding_window_hides_older_tokens(window: int) -> None:
    shape = Shape(heads=1, dim=16, window=window, layers=1)
    encoded.check_steps(TritonAttention, shape, CODECS["mixed"], [[(0, 200)], [(0, 1), (1, 70)], [(0, 3)]], sinks=5)


def test_models_without_rotation_attend_like_the_reference() -> None:
    shape = Shape(heads=1, dim=16, rotate=False, layers=1)
    encoded.check_steps(TritonAttention, shape, CODECS["mixed"], [[(0, 130)], [(0, 1)]])


@pytest.mark.parametrize(
    "codec, group, num_rows, prefills, sinks",
    [("mixed", 1, 2, [], 0), ("nuq3", 3, 8, [70, 64], 5), ("g4", 8, 5, [], 1)],
)
def test_a_tree_attends_like_the_reference(
    codec: str, group: int, num_rows: int, prefills: list[int], sinks: int
) -> None:
    shape = Shape(heads=1, dim=32, group=group, layers=1)
    backend = encoded.check_forest(
        TritonAttention, shape, CODECS[codec], num_rows=num_rows, prefills=prefills, sinks=sinks, seed=num_rows
    )
    assert not backend.partials.arrivals.any()
