"""Gradients are those of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.calibrate import gradients, samples
from quire.calibrate.gradients import GradientOps, PanelGradientOps
from quire.calibrate.samples import gather
from quire.models.decoder import build_model
from quire.models.layers import Linear, Ops, TorchLinear
from quire.models.loading import Form
from quire.models.plan import Model
from quire.models.quants import Blocks, Weight, plain, read
from quire.models.weights import open_model
from tests.calibrate.test_samples import tiny

from ..tiny_models import FAMILIES, RandomWeights, save_tiny, tiny_shape


def load(folder: Path, dtype: torch.dtype = torch.float32, ops: Ops | None = None) -> Model:
    with open_model(folder) as checkpoint:
        return build_model(checkpoint.shape, checkpoint, ops or GradientOps(), dtype)


class DecodedOps(GradientOps):
    """Over packed weights that are decoded once, as plain tensors."""

    def linear(self, parts: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> Linear:
        weights = [plain(each, dtype) if isinstance(each, Blocks) else each for each in map(read, parts)]
        return TorchLinear(torch.cat(weights), bias)


def by_autograd(folder: Path, family: str, tokens: Tensor) -> dict[str, Tensor]:
    """Keys and values [T, H * D] of every layer and their gradients, from another implementation run at once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            output.retain_grad()
            kept[name] = output

        return hook

    layers = model.model.decoder.layers if family.startswith("opt") else model.model.layers
    for index, layer in enumerate(layers):
        key = layer.self_attn.k_norm if family == "qwen3" else layer.self_attn.k_proj
        key.register_forward_hook(keep(f"{index}.key"))
        layer.self_attn.v_proj.register_forward_hook(keep(f"{index}.value"))
    logits = model(tokens[None]).logits[0]
    functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum").backward()
    found = {f"{name}s": tensor.detach() for name, tensor in kept.items()}
    found |= {f"{name}_grads": tensor.grad for name, tensor in kept.items() if tensor.grad is not None}
    return {name: tensor.reshape(len(tokens), -1) for name, tensor in found.items()}


@pytest.mark.parametrize("ops", [GradientOps, PanelGradientOps])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_model(
    family: str, ops: Callable[[], Ops], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "HEAD_ROWS", 16)
    folder = save_tiny(tmp_path, family)
    model = load(folder, ops=ops())
    tokens = torch.randint(0, 256, (40,))
    expected = by_autograd(folder, family, tokens)
    layers = []
    for layer, parts in gather(model, tokens):
        layers.append(layer)
        for name, tensor in parts.items():
            wanted = expected[f"{layer}.{name}"]
            assert float(wanted.std()) > 1e-4, name
            torch.testing.assert_close(tensor.flatten(1), wanted, atol=1e-5 + 1e-4 * float(wanted.abs().max()), rtol=0)
    assert layers == [1, 0]


@pytest.mark.parametrize("multiplies", [True, False])
def test_gradients_in_bfloat16_are_close(multiplies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients, samples):
        monkeypatch.setattr(module, "has_matmul", lambda dtype, device: multiplies)
    folder = save_tiny(tmp_path, "smollm")
    tokens = torch.randint(0, 256, (64,))
    exact = dict(gather(load(folder), tokens))
    for ops in (GradientOps(), PanelGradientOps()):
        for layer, parts in gather(load(folder, torch.bfloat16, ops), tokens):
            for name, tensor in parts.items():
                wanted = exact[layer][name]
                assert tensor.dtype == torch.bfloat16
                assert float((tensor.float() - wanted).norm()) < 0.05 * float(wanted.norm()), name


@pytest.mark.parametrize("form", ["native", "g4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_gradients_over_packed_weights_are_those_over_decoded_ones(form: Form, family: str, tmp_path: Path) -> None:
    """With sizes that fill no panel of gates, and a bias on every product that has one."""
    shape = tiny_shape(family, hidden_size=64, ffn_size=72, head_dim=32)
    weights = RandomWeights(shape)
    tokens = torch.randint(0, 256, (40,))
    panels = build_model(shape, weights, PanelGradientOps(), torch.float32, form=form)
    plain = build_model(shape, weights, DecodedOps(), torch.float32, form=form)
    exact = dict(gather(plain, tokens))
    for layer, parts in gather(panels, tokens):
        for name, tensor in parts.items():
            # Products of packed panels round their rows to 8 bits.
            assert float((tensor - exact[layer][name]).norm()) < 0.05 * float(exact[layer][name].norm()), name


@pytest.mark.parametrize("family", ["llama", "opt_post"])
def test_segments_of_layers_give_the_gradients_of_one_graph(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family if family in FAMILIES else "opt"
    shape = tiny_shape(family, num_layers=5)
    model = build_model(shape, RandomWeights(shape), GradientOps(), torch.float32)
    tokens = torch.randint(0, 256, (40,))
    whole = dict(gather(model, tokens))
    one = samples.GRAPH_BYTES
    for layers in (1, 2):
        per_layer = one
        while len(samples._segments(shape, 40, 4)) * layers < shape.num_layers:
            per_layer //= 2
            monkeypatch.setattr(samples, "GRAPH_BYTES", per_layer)
        found = dict(gather(model, tokens))
        assert list(found) == [4, 3, 2, 1, 0]
        for layer, parts in found.items():
            for name, tensor in parts.items():
                torch.testing.assert_close(tensor, whole[layer][name], msg=name)


def test_one_segment_runs_no_layer_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    runs: list[int] = []
    layer = model.layer
    monkeypatch.setattr(model, "layer", lambda index, *given: (runs.append(index), layer(index, *given))[1])
    dict(gather(model, torch.arange(20)))
    assert runs == [0, 1]
