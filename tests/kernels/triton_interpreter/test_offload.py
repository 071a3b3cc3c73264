"""Weights and cache beside a device: the kernels of a GPU, interpreted, and memory that takes the place of a GPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...beside_device import PARAMS, SHAPE, engine_beside, prompts_of
from ...effort import combine
from ...engines import generate, make_engine

CPU = torch.device("cpu")
CODECS: dict[str, dict[str, Any]] = {
    "dense": {},
    "g4 sinks": {"cache.codec": "g4", "cache.sink_tokens": 1},
    "nuq3": {"cache.codec": "nuq3", "cache.check": False},
}


@combine(strength=1, codec=[*CODECS], near=[40, 0, 100], overlaps=[True, False])
def test_tokens_are_those_of_a_cpu(codec: str, near: int, overlaps: bool) -> None:
    prompts = prompts_of(3)
    expected = generate(make_engine(SHAPE, **CODECS[codec]), prompts, PARAMS)
    engine = engine_beside(CPU, near, overlaps=overlaps, **CODECS[codec])
    table: Any = engine.scheduler.manager.table
    assert generate(engine, prompts, PARAMS) == expected
    assert table.host.memory.bytes_crossed > 0 and table.num_layers_stored > 0
    found = engine.offloaded()
    assert found["weights_near"] == pytest.approx(near / 100, abs=0.2)
