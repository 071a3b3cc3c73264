"""Qwen2 and Qwen2.5: biases of q, k and v."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.families.config_reader import SLIDING, ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import gguf_names
from quire.models.shape import ModelShape


def windows(read: ConfigReader) -> list[int | None]:
    """The window of each layer of a Qwen."""
    settings = read.settings
    if settings.values.get("sliding_window") is None or not settings.flag("use_sliding_window"):
        return [None] * read.num_layers
    window = settings.count("sliding_window")
    if settings.texts("layer_types"):
        is_sliding = [kind == SLIDING for kind in read.layer_types(())]
    else:
        first = settings.count("max_window_layers", read.num_layers, least=0)
        is_sliding = [index >= first for index in range(read.num_layers)]
    return [window if each else None for each in is_sliding]


def _shape(read: ConfigReader) -> ModelShape:
    rope = read.rope(read.head_dim())
    mixers = [read.attention(rope, window=window, qkv_bias=True, o_bias=False) for window in windows(read)]
    return read.model(mixers, ffn=read.gated(bias=read.settings.flag("mlp_bias")))


def _gguf_shape(read: GgufReader) -> ModelShape:
    if window := read.window():
        raise ModelError(f"a GGUF of {read.architecture} with a window of {window} tokens is not supported")
    return read.model([read.attention(read.rope())] * read.num_layers)


FAMILY = Family("qwen2", _shape, gguf=GgufFamily("qwen2", _gguf_shape, gguf_names()))
