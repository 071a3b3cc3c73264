"""Gemma 2: windows in every second layer, norms on both sides of each part, soft caps of scores and logits."""

from __future__ import annotations

import math
from typing import Any

from quire.errors import ModelError
from quire.models.families.config_reader import SLIDING, ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import TensorNames, gguf_names
from quire.models.shape import ModelShape, NormPlaces

NAMES = TensorNames(
    layer={
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    norm_offset=1.0,
)


def soft_cap(read: ConfigReader, key: str, default: float | None) -> float | None:
    """A soft cap; null in the file means none, an absent one the default."""
    if key not in read.settings.values:
        return default
    return None if read.settings.values[key] is None else read.settings.number(key)


def gemma_model(read: ConfigReader, mixers: list[Any], logit_cap: float | None) -> ModelShape:
    """What Gemma 2 and 3 have in common."""
    if read.settings.flag("use_bidirectional_attention"):
        raise ModelError("attention in both directions is not supported (use_bidirectional_attention)")
    ffn = read.gated("hidden_activation" if "hidden_activation" in read.settings.values else "hidden_act")
    return read.model(
        mixers,
        ffn=ffn,
        norms=NormPlaces(outputs=True),
        tied=True,
        embed_scale=math.sqrt(read.hidden_size),
        logit_cap=logit_cap,
    )


def _shape(read: ConfigReader) -> ModelShape:
    rope = read.rope(read.head_dim(256))
    window = read.settings.count("sliding_window", 4096)
    mixers = [
        read.attention(
            rope,
            window=window if kind == SLIDING else None,
            scale=read.settings.number("query_pre_attn_scalar", 256) ** -0.5,
            soft_cap=soft_cap(read, "attn_logit_softcapping", 50.0),
        )
        for kind in read.layer_types(read.every(2))
    ]
    return gemma_model(read, mixers, soft_cap(read, "final_logit_softcapping", 30.0))


def gguf_scale(read: GgufReader, layers_of_27b: int) -> float:
    """The factor of scores, which files lack: llama.cpp knows the model with 27 billion parameters by its layers."""
    if read.num_layers == layers_of_27b:
        return float((read.hidden_size // read.num_q_heads) ** -0.5)
    return float(read.head_dim**-0.5)


def gguf_model(read: GgufReader, mixers: list[Any], logit_cap: float | None) -> ModelShape:
    """What Gemma 2 and 3 have in common."""
    return read.model(
        mixers,
        ffn=read.gated("gelu-tanh"),
        norms=NormPlaces(outputs=True),
        embed_scale=math.sqrt(read.hidden_size),
        logit_cap=logit_cap,
    )


def _gguf_shape(read: GgufReader) -> ModelShape:
    scale, cap = gguf_scale(read, 46), read.settings.number("attn_logit_softcapping", 50.0)
    full = read.rope()
    windowed = read.rope(theta_key="rope.freq_base_swa") if read.settings.values.get("rope.freq_base_swa") else full
    mixers = [
        read.attention(windowed if window else full, window=window, scale=scale, soft_cap=cap)
        for window in read.windows(2, default=4096)
    ]
    return gguf_model(read, mixers, read.settings.number("final_logit_softcapping", 30.0))


FAMILY = Family("gemma2", _shape, NAMES, gguf=GgufFamily("gemma2", _gguf_shape, gguf_names()))
