"""Retention on a GPU: masks, column sums and recovery compared with the reference; an engine whose decode steps are
graphs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed")

from quire import LLM, RequestOutput, SamplingParams
from quire.attention.triton import TritonAttention

from ..kernels.harness import Shape
from ..kernels.masking import check_hidden
from ..kernels.placing import ROW_TOLERANCE, check_batch, check_sharers
from ..kernels.profiling import HISTORY, check_history
from ..tiny_models import save_tiny

pytestmark = pytest.mark.gpu

SHAPES = [
    Shape(dim=128, group=4, dtype=torch.bfloat16),
    Shape(dim=64, group=3, dtype=torch.bfloat16),
    Shape(dim=96, group=8, dtype=torch.float16),
    Shape(dim=80, group=1, dtype=torch.bfloat16),
    Shape(dim=64, group=3, dtype=torch.float32),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"D{shape.dim}-G{shape.group}-{shape.dtype}")


@each_shape
@pytest.mark.parametrize("num_rows, prefills", [(1, []), (40, []), (5, [(130, 1), (65, 40), (0, 300)])])
def test_pages_with_masks_are_attended_to_and_profiled_like_the_reference(
    shape: Shape, num_rows: int, prefills: list[tuple[int, int]], seed: int
) -> None:
    check_hidden(TritonAttention, shape, seed % 10000, num_rows=num_rows, prefills=prefills, device="cuda")


@each_shape
def test_prompts_are_profiled_like_the_reference(shape: Shape, seed: int) -> None:
    check_history(TritonAttention, shape, None, seed=seed % 100, device="cuda")


@pytest.mark.parametrize("codec", ["mixed", "g4"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=["D128", "D64"])
def test_prompts_with_encoded_chunks_are_profiled_like_the_reference(shape: Shape, codec: str, seed: int) -> None:
    for strict in (True, False):
        check_history(TritonAttention, shape, codec, sinks=5, strict=strict, seed=seed % 100, device="cuda")


@pytest.mark.parametrize("codec", ["mixed", "g4"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=["D128", "D64"])
def test_encoded_pages_with_positions_of_their_own_attend_and_are_profiled_like_the_reference(
    shape: Shape, codec: str, seed: int
) -> None:
    for hides in (False, True):
        check_batch(
            TritonAttention, shape, codec, [200, 128, 255, 447], sinks=5, seed=seed % 1000, hides=hides,
            tolerance=ROW_TOLERANCE, device="cuda",
        )  # fmt: skip
    check_sharers(TritonAttention, shape, codec, 20, sinks=5, seed=seed % 1000, device="cuda")


@pytest.mark.parametrize("window", [5, 100])
def test_columns_outside_a_window_get_nothing(window: int) -> None:
    shape = Shape(dtype=torch.bfloat16, layers=1, window=window)
    check_history(TritonAttention, shape, None, HISTORY[:3], device="cuda")


@pytest.mark.parametrize("codec", ["dense", pytest.param("g4", id="encoded")])
def test_an_engine_keeps_and_answers_like_the_reference(codec: str, tmp_path: Path) -> None:
    """Over several seals. Rounding may choose another token once; whatever follows it is another answer."""
    pytest.importorskip("transformers", reason="the model is made with transformers, which is not installed")
    folder = save_tiny(tmp_path)
    random = np.random.default_rng(0)
    common = random.integers(97, 123, 130).tolist()
    prompts = [common + random.choice([*range(97, 123), *b" ,.:?"], length).tolist() for length in (40, 60, 100, 130)]
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    options = {"model.dtype": "float32", "cache.memory": "64MiB", "retain.threshold": 0.5, "retain.frequent": 0.2}
    options |= {
        "cache.codec": codec,
        "scheduler.max_running": 4,
        "retain.profile_rows": 64,
        "attention.backend": "reference",
    }
    outputs: list[list[RequestOutput]] = []
    for changes in ({"runtime.device": "cpu"}, {"runtime.device": "cuda", "attention.backend": "triton"}):
        with LLM(str(folder), options | changes) as llm:
            outputs.append(llm.generate(prompts, params))  # type: ignore[arg-type]
            assert llm.stats()["cache"]["bytes_used"] == 0
    expected, actual = outputs
    shares = [(found.kept_fraction, wanted.kept_fraction) for found, wanted in zip(actual, expected, strict=True)]
    assert all(wanted is not None and wanted < 1 for _, wanted in shares), shares
    assert shares == [(pytest.approx(wanted, abs=0.02), wanted) for _, wanted in shares]
    equal = [
        found.outputs[0].token_ids == wanted.outputs[0].token_ids
        for found, wanted in zip(actual, expected, strict=True)
    ]
    assert sum(equal) >= 3, equal
