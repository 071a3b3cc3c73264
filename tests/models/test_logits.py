"""Logits are float32 from the head's sums to their readers, for all weights and backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.engine.engine import Engine
from quire.kernels.levels import supported_levels
from quire.models.decoder import build_model
from quire.models.layers import TorchOps
from quire.models.shape import ModelShape
from quire.models.weights import open_model

from ..dense_plan import DensePlan
from ..engines import drain, make_engine
from ..packed_blocks import KINDS
from ..real_model import embedded_gguf
from ..tiny_models import RandomWeights, save_tiny, tiny_shape, write_gguf

PROMPT = [index * 37 % 256 for index in range(40)]
SMALLER, LARGER = 7, 200
"""Two ids whose logits are the best ones; the larger logit is that of the larger id."""


def last_hidden(shape: ModelShape, weights: Any, dtype: torch.dtype) -> Tensor:
    """What the head sees behind PROMPT, [E]."""
    model, plan = build_model(shape, weights, TorchOps(), dtype), DensePlan(shape)
    with torch.inference_mode():
        return model.hidden(torch.tensor(PROMPT), plan.step([(0, len(PROMPT))]), plan)[-1].float()


class NearlyTied(RandomWeights):
    """A head that gives SMALLER a logit of 20 behind PROMPT and LARGER a thousandth more, and all others about 0."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        super().__init__(shape)
        hidden = last_hidden(shape, RandomWeights(shape), dtype)
        row = (20 * hidden / hidden.square().sum()).to(dtype)
        # The coordinate whose next number of the type adds at least a thousandth, but little more.
        after = torch.nextafter(row, row.sign() * torch.inf)
        added = (after.float() - row.float()) * hidden
        best = int(torch.where(added > 5e-4, added, torch.inf).argmin())
        self._head = 0.01 * super().tensor("head.weight")
        self._head[[SMALLER, LARGER]] = row.float()
        self._head[LARGER, best] = after[best].float()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self._head.to(dtype or torch.float32) if name == "head.weight" else super().tensor(name, dtype)


def first_logits(engine: Engine) -> tuple[Tensor, int]:
    """What the sampler is given behind PROMPT, [V], and the token that it takes."""
    seen: list[Tensor] = []
    sample = engine.runner.sampler.sample

    def tapped(logits: Tensor, rows: Any) -> Any:
        seen.append(logits.clone())
        return sample(logits, rows)

    engine.runner.sampler.sample = tapped  # type: ignore[method-assign]
    engine.add("it", PROMPT, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    (answer,) = drain(engine)["it"].outputs
    return seen[0][0], answer.token_ids[0]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_of_two_logits_closer_than_16_bits_tell_apart_the_larger_is_taken(backend: str, dtype: str) -> None:
    shape, of = tiny_shape(dtype=dtype), {"bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    options = {"model.dtype": dtype, "attention.backend": backend}
    logits, token = first_logits(make_engine(shape, weights=NearlyTied(shape, of), **options))
    assert logits.dtype == torch.float32 and logits[LARGER] > logits[SMALLER]
    assert logits[LARGER].to(of) == logits[SMALLER].to(of), "16 bits tell them apart, so they prove nothing"
    assert token == LARGER


@pytest.mark.parametrize("family", ["llama", "smollm", "qwen2", "opt", "opt-350m"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_decoder_writes_float32(family: str, dtype: str, backend: str) -> None:
    """Tied heads and untied ones, and that of a model whose width is projected before the head."""
    shape = tiny_shape("opt" if family == "opt-350m" else family)
    if family == "opt-350m":
        shape = tiny_shape("opt", sums=True, embed_size=24, final_norm=False)
    logits, _ = first_logits(make_engine(shape, **{"model.dtype": dtype, "attention.backend": backend}))
    assert logits.dtype == torch.float32
    assert (logits != logits.to(torch.bfloat16).float()).any(), "every logit is a number of 16 bits"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "G4"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_packed_weights_give_the_logits_of_the_dequantized_ones(kind: str, architecture: str, tmp_path: Path) -> None:
    """Of every type, in float32: what differs is a rounding of the sums, 3e-6 of the largest logit at most. In bfloat16
    the dequantized weights are rounded, too, and the packed ones are nearer to float32's logits."""
    width = 256 if kind.endswith("_K") else 64
    shape = tiny_shape(architecture, hidden_size=width, head_dim=width // 4, ffn_size=2 * width, vocab_size=272)
    write_gguf(tmp_path / "model.gguf", shape, kind=kind)

    def logits(dtype: str, weights: str, backend: str = "cpu") -> Tensor:
        with open_model(tmp_path / "model.gguf") as checkpoint:
            options = {"model.dtype": dtype, "model.weights": weights, "attention.backend": backend}
            found, _ = first_logits(make_engine(checkpoint.shape, weights=checkpoint, **options))
        assert found.dtype == torch.float32
        return found

    exact = logits("float32", "dequantized", "reference")
    for weights, backend in [("native", "cpu"), ("native", "reference"), ("dequantized", "cpu")]:
        assert (logits("float32", weights, backend) - exact).abs().max() < 3e-6 * exact.abs().max()
    packed, rounded = (logits("bfloat16", weights) for weights in ("native", "dequantized"))
    assert (packed != packed.to(torch.bfloat16).float()).any(), "every logit is a number of 16 bits"
    assert (packed - exact).square().mean() < 1.5 * (rounded - exact).square().mean()


def test_logprobs_are_those_of_a_float32_head(tmp_path: Path) -> None:
    """transformers' own bfloat16 layers with a float32 head. All logits are near 24, where bfloat16 has steps of 0.125;
    what layers round differently moves them all alike, and no probability."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder = save_tiny(tmp_path / "model", dtype="bfloat16")
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
        hidden = model.model(torch.tensor([PROMPT])).last_hidden_state[0].float()
        tensors = load_file(folder / "model.safetensors")
        towards = torch.linalg.pinv(hidden[-8:]) @ torch.full((8,), 24.0)  # a common part of all rows
        tensors["lm_head.weight"] = 0.25 * tensors["lm_head.weight"] + towards
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        logits = hidden[-8:] @ tensors["lm_head.weight"].float().T
        exact, rounded = torch.log_softmax(logits, -1), torch.log_softmax(logits.to(torch.bfloat16).float(), -1)
    with LLM(str(folder), {"model.dtype": "bfloat16", "cache.memory": "16MiB", "runtime.threads": 1}) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (output,) = llm.generate([PROMPT], params)
    found = [next(iter(each.values())).logprob for each in (output.prompt_logprobs or [])[-7:] if each is not None]
    at = torch.arange(7), torch.tensor(PROMPT[-7:])
    assert (torch.tensor(found) - exact[:-1][at]).abs().max() < 0.02
    assert (rounded[:-1][at] - exact[:-1][at]).abs().max() > 0.03, "rounding to 16 bits passes the bound"


@pytest.mark.parametrize("weights", ["dequantized", "native"])
def test_the_embedded_model_knows_the_capital_of_france(weights: str) -> None:
    """`The` -1.883 and `L` -1.965: rounded to bfloat16 both are -1.923, and the smaller id begins a wrong answer."""
    options = {"cache.memory": "32MiB", "runtime.threads": 1, "model.dtype": "bfloat16"}
    options["model.weights"] = weights
    with LLM(str(embedded_gguf()), options) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
        (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    answer = output.outputs[0]
    assert answer.text.startswith("The capital of France is Paris")
    found, other = (each.logprob for each in answer.logprobs[0].values())  # type: ignore[index]
    assert found > other
    # Layers in bfloat16 beside those in float32. Without dot products of bfloat16, and with packed weights, sums are
    # rounded elsewhere.
    bound = 0.05 if supported_levels()[0] == "v4bf16" and weights == "dequantized" else 0.15
    assert [found, other] == pytest.approx([-1.883, -1.965], abs=bound)
