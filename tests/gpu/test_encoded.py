"""Encoded pages on a GPU: attention equals the reference's, and encoded bytes equal its bytes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed")

from quire.attention.triton import TritonAttention

from ..kernels import encoded
from ..kernels.encoded import CODECS
from ..kernels.harness import Shape

pytestmark = pytest.mark.gpu

GROWTH = [
    [(0, 64), (1, 3), (2, 130)],  # a whole chunk, a prompt shorter than the sink, two chunks and a rest
    [(0, 1), (1, 60), (2, 1)],  # decoding beside a slice that ends a token before its chunk does
    [(1, 1), (2, 1), (0, 1)],  # a decode step that fills a chunk
    [(1, 190), (2, 200)],  # several chunks filled, from the middle of one and from a beginning
    [(2, 1), (1, 1), (0, 1), (3, 1)],
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_attends_like_the_reference(codec: str, dtype: torch.dtype) -> None:
    shape = Shape(dim=128, group=4, dtype=dtype)
    encoded.check_steps(TritonAttention, shape, CODECS[codec], GROWTH, device="cuda")


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_every_shape_attends_like_the_reference(dim: int, group: int) -> None:
    shape = Shape(dim=dim, group=group, dtype=torch.bfloat16, layers=1)
    encoded.check_steps(TritonAttention, shape, CODECS["mixed"], GROWTH, sinks=5, device="cuda")


@pytest.mark.parametrize("window", [1, 64, 100])
@pytest.mark.parametrize("strict", [True, False])
def test_windows_and_loose_slices_attend_like_the_reference(window: int, strict: bool) -> None:
    shape = Shape(dtype=torch.bfloat16, window=window, layers=1)
    encoded.check_steps(TritonAttention, shape, CODECS["mixed"], GROWTH, strict=strict, device="cuda")


@pytest.mark.parametrize("count", [1, 2])
def test_of_channels_with_equal_costs_the_first_get_the_slots(count: int, seed: int) -> None:
    encoded.check_ties(TritonAttention, count, seed, device="cuda")


@pytest.mark.parametrize("codec", ["mixed", "nuq4", "g4"])
@pytest.mark.parametrize("num_rows, prefills", [(2, []), (12, [70, 128]), (40, [])])
def test_a_tree_attends_like_the_reference(codec: str, num_rows: int, prefills: list[int]) -> None:
    shape = Shape(dim=128, group=4, dtype=torch.bfloat16, layers=1)
    backend = encoded.check_forest(
        TritonAttention, shape, CODECS[codec], num_rows=num_rows, prefills=prefills, seed=num_rows, device="cuda"
    )
    assert not backend.partials.arrivals.any()
