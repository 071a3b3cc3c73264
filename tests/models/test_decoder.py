"""Logits of every family agree with `transformers` on random tiny models, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.models.decoder import build_model
from quire.models.layers import TorchOps
from quire.models.plan import Model
from quire.models.weights import open_model
from tests.dense_plan import DensePlan
from tests.tiny_models import FAMILIES, OF_KINDS, save_tiny, save_tiny_multimodal

SEEDS = (0, 1, 2)

ROPE_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    with open_model(folder) as checkpoint:
        return build_model(checkpoint.shape, checkpoint, TorchOps(), dtype)


def prefill(model: Model, tokens: Tensor, max_context: int | None = None) -> Tensor:
    plan = DensePlan(model.shape, max_context)
    positions = plan.step([(0, len(tokens))])
    return model.head(model.hidden(tokens, positions, plan))


def theirs(folder: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_mistral3 = json.loads((folder / "config.json").read_text())["model_type"] == "mistral3"
    kind = AutoModelForImageTextToText if is_mistral3 else AutoModelForCausalLM
    model, notes = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    return model(tokens[None]).logits[0]


def random_tokens(vocab_size: int, count: int, seed: int) -> Tensor:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def assert_same_logits(folder: Path, seed: int, count: int = 40) -> None:
    model = load(folder)
    tokens = random_tokens(model.shape.vocab_size, count, seed)
    expected = theirs(folder, tokens)
    assert expected.std() > 0.1, "logits too small for an absolute tolerance to mean anything"
    torch.testing.assert_close(prefill(model, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(family: str, seed: int, tmp_path: Path) -> None:
    assert_same_logits(save_tiny(tmp_path, family, seed), seed)


@pytest.mark.parametrize("family", OF_KINDS)
def test_logits_of_layers_of_kinds_agree_with_transformers(family: str, tmp_path: Path) -> None:
    """More tokens than windows and original contexts have."""
    assert_same_logits(save_tiny(tmp_path, family), seed=0, count=100)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 64}),
        ("gemma3_text", {"final_logit_softcapping": 5.0, "sliding_window": 1}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 300.0}),
        ("gemma3_text", {"sliding_window_pattern": 2, "layer_types": None}),
        ("ministral3", {"sliding_window": 20}),
        ("phi3", {"sliding_window": 20, "rope_parameters": None}),
        ("phi3", {"max_position_embeddings": 32, "original_max_position_embeddings": 32}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 20, "no_rope_layers": [1, 1, 0, 1]}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True, "no_rope_layer_interval": 2}),
        ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
        ("olmo3", {"rope_parameters": None, "rope_theta": 700.0}),
        ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("cohere2", {"attention_bias": True, "layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("glm4", {"attention_bias": False, "num_key_value_heads": 4}),
        ("glm4", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}),
        ("qwen3", {"rope_parameters": ROPE_YARN}),
        ("llama", {"rope_parameters": {**ROPE_YARN, "truncate": False, "attention_factor": 1.3}, "head_dim": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
        ("mistral", {"rope_parameters": {**ROPE_YARN, "mscale": 0.8, "mscale_all_dim": 0.3}, "head_dim": 16}),
    ],
)
def test_options_of_kinds_agree_with_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    count = min(100, changes.get("max_position_embeddings", 100))
    assert_same_logits(save_tiny(tmp_path, family, **changes), seed=1, count=count)


@pytest.mark.parametrize("family", ["gemma3", "mistral3", "mistral3-ministral3"])
def test_the_text_part_of_a_model_of_several_parts_is_run(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_multimodal(tmp_path, family)
    assert_same_logits(folder, seed=0, count=100)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "quire"]
    assert "only the text model is run" in message and "vision_tower" in message


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 131}),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 97, "tie_word_embeddings": True}),
        (
            "llama",
            {
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 10,
                "attention_bias": True,
                "mlp_bias": True,
            },
        ),
        ("mistral", {"head_dim": 20, "num_key_value_heads": 1, "vocab_size": 1009, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 1}),
        ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 333}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
        ("qwen3", {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}),
        ("opt", {"vocab_size": 301, "num_attention_heads": 2, "activation_function": "gelu"}),
        ("opt", {"tie_word_embeddings": False, "enable_bias": False}),
        ("opt", {"_remove_final_layer_norm": True}),
    ],
)
def test_logits_agree_in_unusual_shapes(family: str, changes: dict[str, Any], seed: int, tmp_path: Path) -> None:
    assert_same_logits(save_tiny(tmp_path, family, seed, **changes), seed)


ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        ROPE_LLAMA3,
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scalings_agree_with_transformers(rope: dict[str, Any], seed: int, tmp_path: Path) -> None:
    assert_same_logits(save_tiny(tmp_path, "llama", seed, head_dim=16, rope_parameters=rope), seed, count=100)


@pytest.mark.parametrize("seed", SEEDS)
def test_dynamic_rope_beyond_the_trained_context_is_that_of_a_full_sequence(seed: int, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    folder = save_tiny(tmp_path, "llama", seed, head_dim=16, max_position_embeddings=32, rope_parameters=rope)
    model = load(folder)
    assert model.shape.max_context == 32 and model.shape.context_limit == 128
    tokens = random_tokens(model.shape.vocab_size, 100, seed)
    torch.testing.assert_close(prefill(model, tokens, max_context=100), theirs(folder, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_step_by_step_equals_one_prefill(family: str, tmp_path: Path) -> None:
    model = load(save_tiny(tmp_path, family))
    tokens = random_tokens(model.shape.vocab_size, 30, 0)
    plan = DensePlan(model.shape)
    rows = []
    for part in (tokens[:7], tokens[7:20], *tokens[20:].split(1)):
        positions = plan.step([(0, len(part))])
        rows.append(model.head(model.hidden(part, positions, plan)))
    torch.testing.assert_close(torch.cat(rows), prefill(model, tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_in_one_step_do_not_see_each_other(family: str, tmp_path: Path) -> None:
    model = load(save_tiny(tmp_path, family))
    first, second = random_tokens(model.shape.vocab_size, 21, 1), random_tokens(model.shape.vocab_size, 33, 2)
    plan = DensePlan(model.shape)
    positions = plan.step([(0, 21), (1, 33)])
    ends = model.head(model.hidden(torch.cat((first, second)), positions, plan)[[20, 53]])
    alone = torch.stack((prefill(model, first)[-1], prefill(model, second)[-1]))
    torch.testing.assert_close(ends, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_near_float32(family: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, family)
    tokens = random_tokens(258, 30, 0)
    exact, rounded = prefill(load(folder), tokens), prefill(load(folder, torch.bfloat16), tokens)
    assert rounded.dtype == torch.float32
    error = (rounded.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.03, f"relative RMS error of logits {error:.4f}"
