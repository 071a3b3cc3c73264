"""Decode graphs without a GPU: a stand-in for a graph runs the captured calls again with the captured arguments.

This is what a graph does with addresses: every later step uses the plan object of the capture, its grid and its
views. Only the contents of the static buffers are new.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.attention.reference import ReferenceAttention
from quire.attention.triton import TritonAttention
from quire.engine.graphs import DecodeGraphs
from quire.models.layers import TorchOps
from quire.models.plan import Model
from quire.models.triton_ops import TritonOps

from ...tiny_models import tiny_shape
from ..decoding import Step, decode, decode_encoded, eager
from ..encoded import CODECS
from ..harness import relative_rms


class FakeGraph:
    def replay(self) -> None:
        hidden, (out,) = self.calls
        out.copy_(self.model.head(self.model.hidden(*hidden)))


class Recorder:
    """A model that remembers what it was last called with."""

    def __init__(self, model: Any) -> None:
        self.model, self.shape = model, model.shape
        self.calls: list[Any] = [None, None]

    def hidden(self, *arguments: Any) -> torch.Tensor:
        self.calls[0] = arguments
        return self.model.hidden(*arguments)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.model.head(hidden)
        self.calls[1] = (out,)
        return out


def install_fakes(monkeypatch: pytest.MonkeyPatch, model: Recorder, captured: list[FakeGraph]) -> None:
    @contextlib.contextmanager
    def capture(graph: FakeGraph, **_: Any) -> Iterator[None]:
        yield
        graph.model, graph.calls = model.model, tuple(model.calls)
        # A capture computes nothing.
        graph.calls[1][0].fill_(torch.nan)
        captured.append(graph)

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        def wait_stream(self, other: Any) -> None: ...

    fakes = {"CUDAGraph": FakeGraph, "graph": capture, "Stream": Stream}
    fakes |= {"stream": contextlib.nullcontext, "current_stream": Stream}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


@pytest.mark.parametrize("family, shared_chunks", [("qwen3", 0), ("opt", 0), ("qwen3", 2)])
def test_replayed_steps_equal_the_reference(
    family: str, shared_chunks: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    shape = tiny_shape(family, head_dim=16)
    settings = {"seed": seed, "shared_chunks": shared_chunks, "steps": 11 if shared_chunks else 10}
    captured: list[FakeGraph] = []

    def replaying(model: Model, backend: TritonAttention) -> Step:
        recorder = Recorder(model)
        graphs = DecodeGraphs(recorder, backend, (1, 2, 4))
        install_fakes(monkeypatch, recorder, captured)
        return graphs.replay

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    expected, rows = decode(shape, TorchOps(), ReferenceAttention, eager, **settings)
    actual, _ = decode(shape, TritonOps(vector=False), TritonAttention, replaying, **settings)
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert relative_rms(ours, theirs) < 2e-5, f"step {step} of {rows[step]} rows"
    # One for each padded size, and for two of them one more for steps that share.
    assert rows != sorted(rows) and len(captured) == (5 if shared_chunks else 3)


@pytest.mark.parametrize("codec", ["mixed", "g4"])
def test_replayed_steps_encode_what_they_fill(codec: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A graph never encodes; the step that replays it does, once, whether it captured or not."""
    shape = tiny_shape("qwen3", head_dim=16, num_layers=1, num_kv_heads=1, num_q_heads=2)
    captured: list[FakeGraph] = []

    def replaying(model: Model, backend: TritonAttention) -> Step:
        recorder = Recorder(model)
        graphs = DecodeGraphs(recorder, backend, (1, 2))
        install_fakes(monkeypatch, recorder, captured)
        return graphs.replay

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    kernels = (TritonOps(vector=False), TritonAttention)
    actual, ours = decode_encoded(shape, *kernels, replaying, CODECS[codec], seed=seed)
    assert len(captured) == 2
    unreplayed, same = decode_encoded(shape, *kernels, eager, CODECS[codec], seed=seed)
    assert all(map(torch.equal, actual, unreplayed)) and all(map(torch.equal, ours, same))
    # Both computed keys and values themselves: what they rounded differently may have fallen to other codes, and one
    # of four bits moves logits by more than rounding does. So the reference goes on with the kernels' codes.
    expected, stored = decode_encoded(
        shape, TorchOps(), ReferenceAttention, eager, CODECS[codec], seed=seed, codes=ours
    )
    for found, wanted in zip(ours, stored, strict=True):
        assert (found != wanted).float().mean() < 0.02
    for step, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert relative_rms(found, wanted) < 2e-5, f"step {step}"
