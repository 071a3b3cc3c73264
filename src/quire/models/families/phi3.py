"""Phi-3 and Phi-4-mini: fused matrices, longrope, and partial rotation."""

from __future__ import annotations

from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import TensorNames, gguf_names
from quire.models.shape import ModelShape

_NAMES = TensorNames(fused={"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")})


def _shape(read: ConfigReader) -> ModelShape:
    window = read.settings.count("sliding_window") if read.settings.values.get("sliding_window") is not None else None
    rope = read.rope(read.head_dim(), partial=True)
    attention = read.attention(rope, window=window, qkv_bias=False, o_bias=False)
    return read.model([attention] * read.num_layers)


def _gguf_shape(read: GgufReader) -> ModelShape:
    """With the window that the model was trained with, which llama.cpp leaves out."""
    attention = read.attention(read.rope(partial=True), window=read.window())
    return read.model([attention] * read.num_layers)


_GGUF_NAMES = gguf_names(fused={"attn_qkv": ("q", "k", "v"), "ffn_up": ("gate", "up")})
FAMILY = Family("phi3", _shape, _NAMES, gguf=GgufFamily("phi3", _gguf_shape, _GGUF_NAMES))
