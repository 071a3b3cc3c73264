"""The samples of calibration: exactly the keys, values and gradients of the whole model, none twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.calibrate import samples
from quire.calibrate.samples import GradientOps, SampleStore, gather
from quire.models.decoder import build_model
from quire.models.plan import Model
from quire.models.weights import open_model

from ..tiny_models import FAMILIES, RandomWeights, save_tiny, tiny_shape


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    with open_model(folder) as checkpoint:
        return build_model(checkpoint.shape, checkpoint, GradientOps(), dtype)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "HEAD_ROWS", 16)
    folder = save_tiny(tmp_path, family)
    model = load(folder)
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
    monkeypatch.setattr(samples, "_multiplies", lambda weight: multiplies)
    folder = save_tiny(tmp_path, "smollm")
    tokens = torch.randint(0, 256, (64,))
    exact = dict(gather(load(folder), tokens))
    for layer, parts in gather(load(folder, torch.bfloat16), tokens):
        for name, tensor in parts.items():
            wanted = exact[layer][name]
            assert tensor.dtype == torch.bfloat16
            assert float((tensor.float() - wanted).norm()) < 0.05 * float(wanted.norm()), name


def tiny() -> Model:
    shape = tiny_shape("qwen3")
    return build_model(shape, RandomWeights(shape), GradientOps(), torch.float32)


def test_a_store_gives_back_what_was_gathered(tmp_path: Path) -> None:
    model, store = tiny(), SampleStore(tmp_path / "work", skip=3)
    windows = torch.randint(0, 256, (2, 20))
    store.put_tokens(windows)
    progress: list[int] = []
    for window, tokens in enumerate(windows):
        assert not store.has(window)
        store.put(window, model, tokens, progress.append)
        assert store.has(window)
    assert progress == [1, 2, 1, 2]
    again = SampleStore(tmp_path / "work", skip=3)
    found = again.tokens()
    assert found is not None and torch.equal(found, windows)
    wanted = [dict(gather(model, tokens)) for tokens in windows]
    for layer in range(2):
        got = again.layer(layer, 2)
        for name, power in (("keys", 1), ("values", 1), ("key_grads", 2), ("value_grads", 2)):
            whole = torch.cat([each[layer][name][3:].bfloat16().float() ** power for each in wanted])
            assert torch.equal(getattr(got, name.replace("grads", "cost")), whole), name
    first, rest = again.layer(0, 2).split(20)
    assert len(first.keys) == 20 and len(rest.value_cost) == 14
    again.clear()
    assert not (tmp_path / "work").exists()


def test_half_a_window_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = tiny(), SampleStore(tmp_path / "work", skip=1)

    def interrupted(*given: Any) -> Iterator[Any]:
        yield next(iter(gather(*given)))
        raise KeyboardInterrupt

    monkeypatch.setattr(samples, "gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put(0, model, torch.arange(20), lambda done: None)
    assert not store.has(0)
