"""Qwen3, dense: norms of q and k."""

from __future__ import annotations

from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import gguf_names
from quire.models.families.qwen2 import windows
from quire.models.shape import ModelShape


def _shape(read: ConfigReader) -> ModelShape:
    rope = read.rope(read.head_dim(128))
    mixers = [read.attention(rope, window=window, qk_norm="heads") for window in windows(read)]
    return read.model(mixers, ffn=read.gated(bias=read.settings.flag("mlp_bias")))


def _gguf_shape(read: GgufReader) -> ModelShape:
    attention = read.attention(read.rope(), window=read.window(), qk_norm="heads")
    return read.model([attention] * read.num_layers)


FAMILY = Family("qwen3", _shape, gguf=GgufFamily("qwen3", _gguf_shape, gguf_names()))
