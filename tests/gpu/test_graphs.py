"""Decode steps replayed as CUDA graphs: they equal the reference, and the host never waits for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the triton backend needs triton, which is not installed")

from quire.attention.reference import ReferenceAttention
from quire.attention.rows import RowSlice
from quire.attention.spec import AttentionSpec
from quire.attention.triton import TritonAttention
from quire.engine.graphs import DecodeGraphs
from quire.models.decoder import build_model
from quire.models.layers import TorchOps
from quire.models.plan import Model
from quire.models.triton_ops import TritonOps

from ..kernels.decoding import Step, decode, eager
from ..kernels.harness import Shape, make_spec, relative_rms
from ..tiny_models import RandomWeights, tiny_shape

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "opt"])
@pytest.mark.parametrize("replays", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("shared_chunks", [0, 3])
def test_decode_steps_equal_the_reference(family: str, replays: bool, shared_chunks: int, seed: int) -> None:
    shape = tiny_shape(family, head_dim=64, hidden_size=256)

    def backend_of(spec: AttentionSpec) -> TritonAttention:
        backend = TritonAttention(spec)
        # However little it saves here.
        backend.kinds[0] = replace(backend.kinds[0], tiles=replace(backend.kinds[0].tiles, min_saved=0))
        return backend

    def replaying(model: Model, backend: TritonAttention) -> Step:
        return DecodeGraphs(model, backend, (1, 2, 4, 8)).replay

    settings = {"seed": seed, "steps": 150, "starts": (0, 7, 60, 126), "device": "cuda"}
    settings |= {"shared_chunks": shared_chunks}
    with torch.no_grad():
        expected, rows = decode(shape, TorchOps(), ReferenceAttention, eager, **settings)
        actual, _ = decode(shape, TritonOps(), backend_of, replaying if replays else eager, **settings)
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert relative_rms(ours, theirs) < 1e-4, f"step {step} of {rows[step]} rows"
    assert len(set(rows)) > 3


def test_the_host_does_not_wait_for_a_replayed_step() -> None:
    spec = make_spec(Shape(heads=2, group=2, dim=64, dtype=torch.float32), 40, "cuda")
    model = build_model(tiny_shape("llama", head_dim=64), RandomWeights(tiny_shape("llama", head_dim=64)), TritonOps(),
                        torch.float32, "cuda")  # fmt: skip
    backend = TritonAttention(spec)
    graphs = DecodeGraphs(model, backend, (2,))
    chunks = [spec.table.take(5, spec.table.open_codec) for _ in range(2)]
    tokens = torch.zeros(2, dtype=torch.int64, pin_memory=True)
    for step in range(70):
        positions = torch.full((2,), step, dtype=torch.int64).pin_memory()
        torch.cuda.set_sync_debug_mode("error" if step > 0 else "default")
        try:
            graphs.replay(tokens, positions, backend.plan([RowSlice(step, 1, path) for path in chunks]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
