"""Llama 1 to 3, and models of its architecture: SmolLM2, Mistral in GGUF."""

from __future__ import annotations

from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import gguf_names
from quire.models.shape import ModelShape


def _shape(read: ConfigReader) -> ModelShape:
    attention = read.attention(read.rope(read.head_dim()))
    return read.model([attention] * read.num_layers, ffn=read.gated(bias=read.settings.flag("mlp_bias")))


def _gguf_shape(read: GgufReader) -> ModelShape:
    attention = read.attention(read.rope(), window=read.window())
    return read.model([attention] * read.num_layers)


FAMILY = Family("llama", _shape, gguf=GgufFamily("llama", _gguf_shape, gguf_names(interleaved=True)))
