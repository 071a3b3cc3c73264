"""What is read of the configuration of a model, and models that are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quire.errors import ModelError
from quire.models.families import shape_from_config, shape_from_gguf
from quire.models.rope import Rope
from quire.models.shape import ModelShape

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}

QWEN_WINDOW: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}


def shape_of(generation: dict[str, Any] | None = None, **changes: Any) -> ModelShape:
    return shape_from_config(LLAMA | changes, generation or {})


@pytest.mark.parametrize(
    ("scaling", "kind", "max_context", "limit"),
    [
        (None, "default", 128, 128),
        ({"type": "linear", "factor": 4.0}, "linear", 512, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic", 128, 256),
        (
            {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 32,
            },
            "llama3",
            128,
            128,
        ),
    ],
)
def test_rope_scaling_and_the_context_it_gives(scaling: Any, kind: str, max_context: int, limit: int) -> None:
    shape = shape_of(rope_scaling=scaling, rope_theta=5000.0)
    assert shape.first.rope is not None and shape.first.rope.kind == kind and shape.first.rope.theta == 5000.0
    assert shape.max_context == max_context and shape.context_limit == limit


def test_rope_parameters_are_the_newer_form_of_rope_scaling() -> None:
    shape = shape_of(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0})
    assert shape.first.rope == Rope(theta=77.0, dim=16, kind="linear", factor=2.0)


def test_end_of_text_ids_come_from_both_files_without_repetition() -> None:
    assert shape_of(generation={"eos_token_id": [9, 7]}).eos_token_ids == (9, 7)
    assert shape_of().eos_token_ids == (7,) and shape_of(eos_token_id=None).eos_token_ids == ()
    assert shape_of(eos_token_id=-1).eos_token_ids == (), "as some files write none"


def test_windows() -> None:
    assert shape_of(sliding_window=32).sliding_window is None  # llama has none, whatever its file says
    assert shape_of(model_type="mistral", sliding_window=32).sliding_window == 32
    assert shape_of(model_type="mistral", sliding_window=None).sliding_window is None
    assert shape_of(model_type="qwen2", sliding_window=32, use_sliding_window=False).sliding_window is None
    assert (
        shape_of(model_type="qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=0).sliding_window
        == 32
    )
    assert (
        shape_of(model_type="qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=2).sliding_window
        is None
    )
    assert (
        shape_of(
            model_type="qwen2", sliding_window=32, use_sliding_window=True, layer_types=["full_attention"] * 2
        ).sliding_window
        is None
    )
    some = shape_of(model_type="qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=1)
    assert [layer.mixer.window for layer in some.layers] == [None, 32] and some.sliding_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, "architecture 'gpt_neox' is not supported"),
        (
            {"model_type": None, "architectures": ["MambaForCausalLM"]},
            "architecture 'MambaForCausalLM' is not supported",
        ),
        ({"hidden_size": None}, "setting hidden_size is missing"),
        ({"num_hidden_layers": "many"}, "setting num_hidden_layers is 'many'"),
        ({"num_hidden_layers": 0}, "setting num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "4 query heads cannot be shared among 3"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope scaling 'ntk' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "setting factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized with gptq"),
        ({"head_dim": 15}, "rope needs an even dim"),
        *(
            ({key: value}, f"config.json: setting {key} is .*; it must be a token id or a list of them")
            for key in ("eos_token_id", "bos_token_id")
            for value in ("x", {}, {"a": 1}, True, 1.5, -2, [None], ["x"], [[1]])
        ),
        *(
            ({key: value}, f"config.json: setting {key} is {value}; it must be finite")
            for key in ("hidden_size", "num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "rope_theta")
            for value in (math.nan, math.inf, -math.inf)
        ),
        ({"hidden_size": 10**400}, "setting hidden_size is 1000.*; it must be finite"),
        ({"vocab_size": 2**31}, "setting vocab_size is 2147483648; it must be a whole number from 1 to 2147483647"),
        ({"hidden_size": 1.5}, "setting hidden_size is 1.5; it must be a whole number"),
        ({"quantization_config": True}, "setting quantization_config is True; it must be an object"),
        ({"quantization_config": {"quant_method": 5}}, "setting quantization_config.quant_method is 5"),
        ({"rope_parameters": True}, "setting rope_parameters is True; it must be an object"),
        ({"rope_scaling": ["linear"]}, "setting rope_scaling is .*; it must be an object"),
        ({"rope_scaling": {"type": 5}}, "setting rope_scaling.type is 5; it must be text"),
        ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "setting factor is inf; it must be finite"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "rope needs .* a factor"),
        ({"rope_scaling": {"type": "linear", "factor": 1e9}}, "max_context is 128000000000; it must lie between"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e300}}, "rope needs .* a factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "more than 2 channels"),
        ({"model_type": None, "architectures": {"a": 1}}, "setting architectures is .*; it must be a list of texts"),
        ({"model_type": 5}, "setting model_type is 5; it must be text"),
        ({"hidden_act": ["silu"]}, "setting hidden_act is .*; it must be text"),
        ({"hidden_act": "si\ud800lu"}, "setting hidden_act is .*; it must be text"),
        ({"mlp_bias": "no"}, "setting mlp_bias is 'no'; it must be true or false"),
        ({**QWEN_WINDOW, "max_window_layers": "x"}, "setting max_window_layers is 'x'; it must be one number"),
        ({**QWEN_WINDOW, "layer_types": 5}, "setting layer_types is 5; it must be a list of texts"),
    ],
)
def test_what_cannot_run_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        shape_of(**changes)
    assert "\n" not in str(caught.value)


def test_end_of_text_ids_of_the_wrong_type_are_named_with_their_file() -> None:
    with pytest.raises(ModelError, match=r"^generation_config.json: setting eos_token_id is \[None\]; it must be"):
        shape_of(generation={"eos_token_id": [None]})


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.feed_forward_length": 96,
    "llama.context_length": 128,
}


@pytest.mark.parametrize(
    ("scaling", "kind", "factor"),
    [
        ({}, "default", 1.0),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, "linear", 4.0),
        ({"scaling.factor": 4.0}, "linear", 4.0),  # llama.cpp takes linear for the type that is not named
        ({"scale_linear": 4.0}, "linear", 4.0),
        ({"scaling.type": "linear", "scale_linear": 4.0}, "linear", 4.0),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, "linear", 2.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, "default", 1.0),
        ({"scaling.factor": 0.0}, "default", 1.0),
        ({"scaling.type": "linear"}, "default", 1.0),
    ],
)
def test_scaling_in_a_gguf_is_read_as_llama_cpp_reads_it(scaling: dict[str, Any], kind: str, factor: float) -> None:
    metadata = GGUF | {f"llama.rope.{key}": value for key, value in scaling.items()}
    assert shape_from_gguf(metadata, (), 100, {}).first.rope == Rope(theta=10000.0, dim=16, kind=kind, factor=factor)


@pytest.mark.parametrize(
    ("settings", "magnitude"),
    [
        ({}, 1 + 0.1 * math.log(4)),
        ({"attn_factor": 1.5}, 1.5 * (1 + 0.1 * math.log(4))),
        ({"yarn_attn_factor": 1.25}, 1.25),
        ({"yarn_log_multiplier": 1.0}, 1.0),
        ({"yarn_log_multiplier": 0.5}, (1 + 0.1 * math.log(4)) / (1 + 0.05 * math.log(4))),
    ],
)
def test_yarn_in_a_gguf(settings: dict[str, Any], magnitude: float) -> None:
    usual = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0}
    metadata = GGUF | {f"llama.rope.scaling.{key}": value for key, value in (usual | settings).items()}
    rope = shape_from_gguf(metadata, (), 100, {}).first.rope
    assert rope is not None and rope.magnitude == pytest.approx(magnitude)
    assert (rope.kind, rope.factor, rope.original_context, rope.beta_fast) == ("yarn", 4.0, 32, 16.0)


def test_frequency_factors_and_another_scaling_exclude_each_other() -> None:
    factors = (1.0,) * 8
    for harmless in ({}, {"llama.rope.scaling.type": "none"}, {"llama.rope.scaling.factor": 1.0}):
        rope = shape_from_gguf(GGUF | harmless, (), 100, {"rope_freqs": factors}).first.rope
        assert rope is not None and rope.kind == "factors" and rope.factors == factors
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        with pytest.raises(ModelError, match="scaled both by rope_freqs.weight and by a linear factor of 4"):
            shape_from_gguf(GGUF | {key: 4.0}, (), 100, {"rope_freqs": factors})


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_a_frequency_factor_that_cannot_divide_is_refused(factor: float) -> None:
    with pytest.raises(ModelError, match="a frequency factor that is not a positive number"):
        shape_from_gguf(GGUF, (), 100, {"rope_freqs": (1.0,) * 7 + (factor,)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma"}, "GGUF architecture 'gemma' is not supported"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.rope.scaling.type": "ntk"}, "rope scaling 'ntk' is not supported in a GGUF"),
        ({"llama.rope.dimension_count": 8}, "rope rotates 8 of 16 channels"),
        ({"llama.attention.value_length": 8}, "different head size"),
        (
            {"llama.attention.head_count_kv": (2, 1)},
            "attention.head_count_kv is (2, 1)".replace("(", r"\(").replace(")", r"\)"),
        ),
        ({"llama.block_count": None}, "block_count is missing"),
        ({"llama.rope.freq_base": math.nan}, "setting llama.rope.freq_base is nan; it must be finite"),
        ({"llama.rope.scaling.type": 5}, "setting llama.rope.scaling.type is 5; it must be text"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor 2 is not supported"),
        ({"llama.attention.sliding_window": "x"}, "setting llama.attention.sliding_window is 'x'"),
        ({"llama.expert_count": "x"}, "setting llama.expert_count is 'x'"),
        *(
            ({f"tokenizer.ggml.{name}_token_id": value}, f"setting tokenizer.ggml.{name}_token_id is")
            for name in ("bos", "eos", "eot")
            for value in ("x", 1.5, True, -2, ["x"])
        ),
    ],
)
def test_gguf_metadata_that_cannot_run_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shape_from_gguf(GGUF | changes, (), 100, {})
