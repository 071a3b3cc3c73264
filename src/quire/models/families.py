"""Settings and tensor names of each model family: config.json and GGUF metadata -> ModelShape.

A feature that the decoders do not support is rejected here, by name; nothing is ignored silently.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from quire.errors import ModelError
from quire.models.settings import CheckedSettings
from quire.models.shape import ITEM_BYTES, ModelShape, Rope

log = logging.getLogger("quire")

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")

_HF_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_OPT_LAYER = _HF_LAYER | {
    "attn_norm": "self_attn_layer_norm",
    "o": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}
_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_HF_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_OPT_TOP = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "norm": "model.decoder.final_layer_norm",
    "project_in": "model.decoder.project_in",
    "project_out": "model.decoder.project_out",
    "head": "lm_head",
}
_GGUF_TOP = {"embed": "token_embd", "norm": "output_norm", "head": "output"}


def hf_name(name: str, architecture: str) -> str:
    """Canonical tensor name -> the name in checkpoints of `transformers`."""
    if architecture == "opt":
        return _rename(name, _OPT_TOP, "model.decoder.layers", _OPT_LAYER)
    return _rename(name, _HF_TOP, "model.layers", _HF_LAYER)


def gguf_name(name: str) -> str:
    """Canonical tensor name -> the name in files of llama.cpp's converter."""
    return _rename(name, _GGUF_TOP, "blk", _GGUF_LAYER)


def _rename(name: str, top: Mapping[str, str], layers: str, layer: Mapping[str, str]) -> str:
    if not name.startswith("layers."):
        part, kind = name.rsplit(".", 1)
        return f"{top[part]}.{kind}"
    _, index, part, kind = name.split(".")
    return f"{layers}.{index}.{layer[part]}.{kind}"


def shape_from_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelShape:
    """The shape described by a config.json (of any transformers version) and its generation_config.json.

    Raises ModelError naming the first setting that is missing, malformed or not supported.
    """
    settings = CheckedSettings(config, "config.json")
    family = settings.text("model_type", "")
    if family not in FAMILIES:
        found = family or next(iter(settings.texts("architectures")), "not named")
        raise ModelError(f"architecture {found!r} is not supported (only {', '.join(FAMILIES)})")
    quantization = settings.table("quantization_config")
    if quantization.values:
        method = quantization.text("quant_method", "an unknown method")
        raise ModelError(f"weights quantized with {method} are not supported; use plain safetensors or a GGUF")
    eos = CheckedSettings(generation, "generation_config.json").ids("eos_token_id")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    common: dict[str, Any] = {
        "vocab_size": settings.count("vocab_size"),
        "hidden_size": settings.count("hidden_size"),
        "num_layers": settings.count("num_hidden_layers"),
        "num_q_heads": settings.count("num_attention_heads"),
        "dtype": dtype if dtype in ITEM_BYTES else "float32",  # that of the saved weights, if it is supported
        "bos_token_id": next(iter(settings.ids("bos_token_id")), None),
        "eos_token_ids": tuple(dict.fromkeys((*eos, *settings.ids("eos_token_id")))),
    }
    if family == "opt":
        return _opt_shape(settings, common)
    heads = common["num_q_heads"]
    head_dim = settings.count("head_dim", 128 if family == "qwen3" else common["hidden_size"] // heads)
    activation = settings.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"activation {activation!r} is not supported for {family} (only silu)")
    rope, max_context = _config_rope(settings, head_dim)
    attention_bias = settings.flag("attention_bias")
    return ModelShape(
        **common,
        architecture=family,
        num_kv_heads=settings.count("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn_size=settings.count("intermediate_size"),
        max_context=max_context,
        norm_eps=settings.number("rms_norm_eps", 1e-6, least=0),
        rope=rope,
        sliding_window=_config_window(settings, family, common["num_layers"]),
        tied_embeddings=settings.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=settings.flag("mlp_bias"),
        qk_norm=family == "qwen3",
    )


def shape_from_gguf(
    metadata: Mapping[str, Any], tensors: Collection[str], vocab_size: int, factors: tuple[float, ...]
) -> ModelShape:
    """The shape described by GGUF metadata. Biases and tying, which the metadata lacks, follow from the tensor names.

    tensors     names of the tensors in the file
    vocab_size  rows of the embedding
    factors     contents of `rope_freqs.weight` (llama3 scaling), empty when the file has none

    Mistral's converter writes architecture llama and no window. So a file of Mistral 7B v0.1, trained with a window of
    4096, looks like a llama. It attends to all tokens, here as in llama.cpp, unless the file has
    `llama.attention.sliding_window`.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ("llama", "qwen2", "qwen3"):
        raise ModelError(f"GGUF architecture {architecture!r} is not supported (only llama, qwen2, qwen3)")
    prefixes = (f"{architecture}.", "tokenizer.ggml.")
    settings, vocabulary = (CheckedSettings(_alike(metadata, prefixes[0])).under(prefix) for prefix in prefixes)
    if experts := settings.count("expert_count", 0, least=0):
        raise ModelError(f"mixtures of experts are not supported ({experts} experts)")
    hidden_size, heads = settings.count("embedding_length"), settings.count("attention.head_count")
    head_dim = settings.count("attention.key_length", hidden_size // heads)
    if settings.count("attention.value_length", head_dim) != head_dim:
        raise ModelError("keys and values of different head size are not supported")
    rotated = settings.count("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(f"rope rotates {rotated} of {head_dim} channels; only whole heads are supported")
    eos = [each for key in ("eos_token_id", "eot_token_id") for each in _gguf_ids(vocabulary, key, vocab_size)]
    return ModelShape(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=settings.count("block_count"),
        num_q_heads=heads,
        num_kv_heads=settings.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_size=settings.count("feed_forward_length"),
        max_context=settings.count("context_length"),
        norm_eps=settings.number("attention.layer_norm_rms_epsilon", 1e-6, least=0),
        rope=_gguf_rope(settings, head_dim, factors),
        sliding_window=settings.count("attention.sliding_window", 0, least=0) or None,
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        bos_token_id=next(iter(_gguf_ids(vocabulary, "bos_token_id", vocab_size)), None),
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def _alike(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The metadata with one number in place of a list that has the same number for every layer, as some converters
    write `attention.head_count_kv`.
    """
    num_layers = metadata.get(f"{prefix}block_count")
    return {
        key: value[0]
        if key.startswith(prefix) and isinstance(value, tuple) and len(value) == num_layers and len(set(value)) == 1
        else value
        for key, value in metadata.items()
    }


def _gguf_ids(vocabulary: CheckedSettings, key: str, vocab_size: int) -> list[int]:
    """Token ids in the vocabulary. Warns about others and leaves them out, as llama.cpp does."""
    ids = vocabulary.ids(key)
    for token_id in ids:
        if token_id >= vocab_size:
            effect = "; it ends no answer" if key != "bos_token_id" else ""
            log.warning(
                "tokenizer.ggml.%s is %d, outside the vocabulary of %d tokens%s", key, token_id, vocab_size, effect
            )
    return [token_id for token_id in ids if token_id < vocab_size]


def _opt_shape(settings: CheckedSettings, common: dict[str, Any]) -> ModelShape:
    activation = settings.text("activation_function", "relu")
    if activation not in ("relu", "gelu"):
        raise ModelError(f"activation {activation!r} is not supported for opt (only relu, gelu)")
    if not settings.flag("layer_norm_elementwise_affine", True):
        raise ModelError("OPT with layer_norm_elementwise_affine = false is not supported")
    bias = settings.flag("enable_bias", True)
    norm_first = settings.flag("do_layer_norm_before", True)
    embed_size = settings.count("word_embed_proj_dim", common["hidden_size"])
    return ModelShape(
        **common,
        architecture="opt",
        num_kv_heads=common["num_q_heads"],
        head_dim=common["hidden_size"] // common["num_q_heads"],
        ffn_size=settings.count("ffn_dim"),
        max_context=settings.count("max_position_embeddings"),
        norm_eps=1e-5,
        rope=None,
        tied_embeddings=settings.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        activation=activation,
        embed_size=None if embed_size == common["hidden_size"] else embed_size,
        norm_first=norm_first,
        final_norm=norm_first and not settings.flag("_remove_final_layer_norm"),
    )


def _config_rope(settings: CheckedSettings, head_dim: int) -> tuple[Rope, int]:
    """(rotation, maximum context with it). `rope_parameters` is the newer form of `rope_scaling`."""
    newer, older = settings.table("rope_parameters"), settings.table("rope_scaling")
    scaling = newer if newer.values else older
    merged = CheckedSettings({**settings.values, **scaling.values}, "config.json")
    kind = scaling.text("rope_type", "") or scaling.text("type", "") or "default"
    if kind not in ("default", "linear", "dynamic", "llama3"):
        raise ModelError(f"rope scaling {kind!r} is not supported (only default, linear, dynamic, llama3)")
    share = merged.number("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise ModelError(f"partial_rotary_factor {share:g} is not supported; only whole heads are rotated")
    theta, trained = merged.number("rope_theta", 10000.0), settings.count("max_position_embeddings")
    fields: dict[str, Any] = {} if kind == "default" else {"factor": merged.number("factor")}
    if kind == "dynamic":
        fields["original_context"] = trained
    if kind == "llama3":
        fields |= {name: merged.number(name) for name in ("low_freq_factor", "high_freq_factor")}
        fields["original_context"] = merged.count("original_max_position_embeddings", trained)
    rope = Rope(theta=theta, dim=head_dim, kind=kind, **fields)
    return rope, int(trained * rope.factor) if kind == "linear" else trained


def _gguf_rope(settings: CheckedSettings, head_dim: int, factors: tuple[float, ...]) -> Rope:
    """The rotation, read as in llama.cpp: type none scales nothing, and scaling without a type is linear."""
    kind, theta = settings.text("rope.scaling.type", "linear"), settings.number("rope.freq_base", 10000.0)
    if kind not in ("none", "linear"):
        raise ModelError(f"rope scaling {kind!r} is not supported in a GGUF (only none, linear)")
    if (strength := settings.number("rope.scaling.attn_factor", 1.0)) != 1.0:
        raise ModelError(f"rope.scaling.attn_factor {strength:g} is not supported")
    # Files of 2023 name the factor scale_linear, and a factor of 0 means none.
    factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 0.0)) or 1.0
    if kind == "none" or factor == 1.0:
        return Rope(theta=theta, dim=head_dim, kind="factors" if factors else "default", factors=factors)
    if factors:
        raise ModelError(
            f"rope is scaled both by rope_freqs.weight and by a linear factor of {factor:g}; only one is supported"
        )
    return Rope(theta=theta, dim=head_dim, kind="linear", factor=factor)


def _config_window(settings: CheckedSettings, family: str, num_layers: int) -> int | None:
    """The window of all layers. Rejects models with different windows."""
    if family == "llama" or settings.values.get("sliding_window") is None:
        return None
    if family != "mistral" and not settings.flag("use_sliding_window"):
        return None
    window = settings.count("sliding_window")
    if family == "mistral":
        return window
    if kinds := settings.texts("layer_types"):
        windowed = sum(kind == "sliding_attention" for kind in kinds)
    else:
        windowed = num_layers - min(settings.count("max_window_layers", num_layers, least=0), num_layers)
    if windowed not in (0, num_layers):
        raise ModelError(f"{windowed} of {num_layers} layers have a sliding window; only all or none is supported")
    return window if windowed else None
