"""Weights and cache beside a GPU: the tokens are those of a CPU, whatever is where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed")

from ..beside_device import PARAMS, engine_beside, prompts_of
from ..engines import generate, make_engine
from ..tiny_models import tiny_shape

pytestmark = pytest.mark.gpu

SHAPE = tiny_shape(num_layers=5, head_dim=64, hidden_size=256)
CODECS: dict[str, dict[str, Any]] = {
    "dense": {},
    "g4 sinks": {"cache.codec": "g4", "cache.sink_tokens": 1},
    "nuq3": {"cache.codec": "nuq3", "cache.check": False},
}


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("near", [0, 40, 100])
@pytest.mark.parametrize("codec", CODECS)
def test_tokens_are_those_of_a_cpu(codec: str, near: int, overlaps: bool) -> None:
    more = CODECS[codec] | {"offload.cache": "256MiB", "cache.memory": "64MiB"}
    prompts = prompts_of(4)
    expected = generate(make_engine(SHAPE, chunks=256, **CODECS[codec]), prompts, PARAMS)
    engine = engine_beside(torch.device("cuda", 0), near, shape=SHAPE, overlaps=overlaps, **more)
    assert generate(engine, prompts, PARAMS) == expected
    assert engine.offloaded is not None and engine.offloaded()["cache_bytes_crossed"] > 0
