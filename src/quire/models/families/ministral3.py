"""Ministral 3: YaRN, and queries whose scale grows with their position."""

from __future__ import annotations

from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import gguf_names
from quire.models.shape import ModelShape

_DEFAULTS = {"beta": 0.1, "original": 16384}


def _shape(read: ConfigReader) -> ModelShape:
    rope = read.rope(read.head_dim(128), theta=1e6)
    scaling = read.settings.table("rope_parameters")
    beta = scaling.number("llama_4_scaling_beta", 0.0)
    step = scaling.count("original_max_position_embeddings", read.settings.count("max_position_embeddings"))
    window = read.settings.count("sliding_window") if read.settings.values.get("sliding_window") is not None else None
    attention = read.attention(
        rope, window=window, qkv_bias=False, o_bias=False, position_scale=(beta, step) if beta else None
    )
    return read.model([attention] * read.num_layers)


def _gguf_shape(read: GgufReader) -> ModelShape:
    """Also of Mistral Small 3.1 and 3.2, whose files have neither YaRN nor a growing scale."""
    beta = read.settings.number("attention.temperature_scale", 0.0)
    attention = read.attention(
        read.rope(), window=read.window(), position_scale=(beta, read.original_context()) if beta else None
    )
    return read.model([attention] * read.num_layers)


FAMILY = Family("ministral3", _shape, gguf=GgufFamily("mistral3", _gguf_shape, gguf_names(interleaved=True)))
