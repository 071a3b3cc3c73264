"""GGUF files as llama.cpp's converter writes them agree with `transformers`, for every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ModelError
from quire.models.families import GGUF_FAMILIES
from quire.models.weights import open_model
from tests.gguf_families import convert
from tests.models.test_decoder import load, prefill, random_tokens, theirs
from tests.tiny_models import save_tiny

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA = {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "sliding_window": 16}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 8.0}, "head_dim": 16}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {"rope_parameters": YARN}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma3_text", GEMMA | {"layer_types": None, "final_logit_softcapping": 5.0}),
    (
        "gemma3_text",
        GEMMA
        | {
            "layer_types": None,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    ("gemma3_text", {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 4}),
    ("ministral3", {}),
    ("phi3", {}),
    ("phi3", {"max_position_embeddings": 32, "original_max_position_embeddings": 32}),
    ("phi4-mini", {}),
    ("smollm3", {}),
    ("smollm3", {"attention_bias": True, "num_hidden_layers": 5}),
    ("olmo2", {}),
    ("olmo3", {}),
    ("olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("olmo3", {"layer_types": ["sliding_attention"] * 4}),
    ("granite", {}),
    ("granite", {"attention_bias": True, "tie_word_embeddings": True}),
    ("cohere2", {"head_dim": 12}),
    ("cohere2", {"head_dim": 12, "num_hidden_layers": 5}),
    ("glm4", {"attention_bias": True}),
    ("glm4", {"attention_bias": False}),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_converted_files_agree_with_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """More tokens than windows and original contexts have."""
    folder = save_tiny(tmp_path / "model", family, tokenizer=False, **changes)
    model = load(convert(folder, tmp_path / "model.gguf"))
    tokens = random_tokens(model.shape.vocab_size, min(64, model.shape.max_context), 0)
    expected = theirs(folder, tokens)
    assert expected.std() > 0.1, "logits too small for an absolute tolerance to mean anything"
    torch.testing.assert_close(prefill(model, tokens), expected, atol=1e-4, rtol=0)


def test_every_family_of_gguf_is_checked(tmp_path: Path) -> None:
    found = set()
    for index, family in enumerate(dict.fromkeys(family for family, _ in CASES)):
        changes = next(changes for name, changes in CASES if name == family)
        folder = save_tiny(tmp_path / str(index), family, tokenizer=False, **changes)
        with open_model(convert(folder, tmp_path / f"{index}.gguf")) as checkpoint:
            found.add(checkpoint.shape.architecture)
    assert found == set(GGUF_FAMILIES)


@pytest.mark.parametrize(
    ("family", "changes", "settings", "message"),
    [
        ("cohere2", {"head_dim": 12}, {"logit_scale": None}, "cohere2.logit_scale is missing"),
        (
            "cohere2",
            {"head_dim": 12},
            {"attention__sliding_window": None},
            "cohere2.attention.sliding_window is missing",
        ),
        ("cohere2", {"head_dim": 12}, {"attention__layer_norm_epsilon": None}, "layer_norm_epsilon is missing"),
        ("granite", {}, {"logit_scale": None}, "granite.logit_scale is missing"),
        ("granite", {}, {"logit_scale": 0.0}, "granite.logit_scale is 0"),
        ("granite", {}, {"rope__scaling__finetuned": False}, "rope.scaling.finetuned"),
        ("glm4", {}, {"nextn_predict_layers": 1}, "nextn_predict_layers is not supported"),
        ("glm4", {}, {"rope__dimension_sections": [4, 4, 0, 0]}, "rope.dimension_sections is not supported"),
        ("smollm3", {}, {"attention__sliding_window": 16}, "attention.sliding_window 16 is not supported"),
        ("olmo3", {}, {"attention__sliding_window_pattern": [True, False]}, "olmo2.attention.sliding_window_pattern"),
        ("olmo3", {}, {"rope__scaling__yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor 0.5 is not supported"),
        ("phi3", {}, {"rope__scaling__factor": 2.0}, "scaled both by rope_factors_long.weight and by a linear factor"),
        ("llama", {}, {"rope__scaling__type": "longrope"}, "needs both rope_factors_long.weight"),
        ("gemma2", {}, {"attn_logit_softcapping": 0.0}, "the soft cap of scores is 0"),
    ],
)
def test_files_that_cannot_run_are_refused_by_name(
    family: str, changes: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", family, tokenizer=False, **changes)
    with pytest.raises(ModelError, match=message):
        open_model(convert(folder, tmp_path / "model.gguf", **settings))


@pytest.mark.parametrize(
    ("family", "layers", "wide"), [("gemma2", 46, True), ("gemma3_text", 62, True), ("gemma2", 26, False)]
)
def test_the_scale_of_gemma_with_27_billion_parameters(family: str, layers: int, wide: bool, tmp_path: Path) -> None:
    """Its files lack the scale. llama.cpp takes the hidden size by heads for a model of as many layers."""
    changes: dict[str, Any] = {"num_hidden_layers": layers, "layer_types": None, "hidden_size": 40}
    folder = save_tiny(tmp_path / "model", family, tokenizer=False, **changes)
    with open_model(convert(folder, tmp_path / "model.gguf")) as checkpoint:
        assert checkpoint.shape.first.scale == (40 / 4 if wide else 16) ** -0.5
