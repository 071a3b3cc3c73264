"""A model whose weights are partly on the disk computes the same as in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.decoder import build_model
from quire.models.images import full_image_spec
from quire.models.layers import Ops
from quire.models.plan import Model
from quire.models.weights import open_model
from quire.offload.model import OffloadedModel, load_offloaded
from quire.offload.stream import WeightStream
from quire.offload.units import Split
from tests.dense_plan import DensePlan
from tests.engine.test_offloading_weights import _cache as _cache
from tests.engine.test_offloading_weights import model as model
from tests.opt_paper import percents
from tests.tiny_models import RandomWeights, save_tiny, tiny_shape, write_gguf


def decoder(path: Path, dtype: torch.dtype, form: Any, split: Split) -> tuple[Model, OffloadedModel]:
    with open_model(path) as checkpoint:
        wanted = full_image_spec(checkpoint, dtype, form)

        def build(ops: Ops) -> Model:
            return build_model(checkpoint.shape, checkpoint, ops, dtype, "cpu", form)

        whole = load_offloaded(wanted, build, split=percents(100, 0))
        return whole, load_offloaded(wanted, build, split=split)


def poisoned(stream: WeightStream) -> None:
    """Overwrites every buffer when it is given back, before it is filled again."""
    give, order = stream.give, stream._order

    def spoil(layer: int) -> None:
        if layer in order:
            stream._buffers[stream._given % stream._num_buffers].fill_(0xFF)
        give(layer)

    stream.give = spoil  # type: ignore[method-assign]


def same_hidden(one: Model, other: Model) -> None:
    shape = one.shape
    plans = DensePlan(shape), DensePlan(shape)
    for rows in (5, 1, 40, 1):
        tokens = torch.arange(rows) * 7 % shape.vocab_size
        found = [
            model.hidden(tokens, plan.step([(0, rows)]), plan) for model, plan in zip((one, other), plans, strict=True)
        ]
        assert torch.equal(*found), f"{rows} rows differ by {(found[0] - found[1]).abs().max()}"
        assert torch.equal(one.head(found[0]), other.head(found[1]))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "opt", "opt-350m"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_placement_computes_the_same(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    path = save_tiny(tmp_path / "model", family, tokenizer=False, num_hidden_layers=5, num_attention_heads=4)
    for percent in (0, 35, 80):
        whole, parted = decoder(path, dtype, "dequantized", percents(percent, 100 - percent))
        poisoned(parted.stream)
        assert parted.weights.streamed_bytes > 0
        same_hidden(whole, parted)


@pytest.mark.parametrize("form", ["native", "g4"])
def test_packed_weights_are_loaded_as_they_are(tmp_path: Path, form: str) -> None:
    shape = tiny_shape(hidden_size=256, head_dim=64, ffn_size=512, num_layers=4)
    kinds = {"": "Q4_K", "v": "Q6_K", "down": "Q6_K"}
    write_gguf(tmp_path / "model.gguf", shape, RandomWeights(shape, seed=5), kind=kinds)
    whole, parted = decoder(tmp_path / "model.gguf", torch.bfloat16, form, percents(30, 70))
    poisoned(parted.stream)
    same_hidden(whole, parted)
