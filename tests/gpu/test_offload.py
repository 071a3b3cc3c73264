"""Weights and cache beside a GPU: the tokens are those of a CPU, whatever is where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed")

from ..device_offload import PARAMS, engine_beside, prompts_of
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
@pytest.mark.parametrize(("near", "disk", "far_states"), [(0, 0, 0.0), (40, 0, 0.0), (100, 0, 0.5), (40, 30, 1.0)])
@pytest.mark.parametrize("codec", CODECS)
def test_tokens_are_those_of_a_cpu(
    codec: str, near: int, disk: int, far_states: float, overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels import load

    load()  # from the user's cache, before that is another one
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    more = CODECS[codec] | {"offload.cache": "256MiB"}
    prompts = prompts_of(4)
    expected = generate(make_engine(SHAPE, chunks=256, **CODECS[codec]), prompts, PARAMS)
    device = torch.device("cuda", 0)
    engine = engine_beside(device, near, disk=disk, far_states=far_states, shape=SHAPE, overlaps=overlaps, **more)
    assert generate(engine, prompts, PARAMS) == expected
    assert engine.offloaded is not None and engine.offloaded()["cache_bytes_crossed"] > 0
