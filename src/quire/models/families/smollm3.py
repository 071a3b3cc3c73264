"""SmolLM3: every fourth layer does not rotate."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.families.config_reader import SLIDING, ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import gguf_names
from quire.models.shape import ModelShape


def _shape(read: ConfigReader) -> ModelShape:
    settings = read.settings
    rope = read.rope(read.head_dim(), theta=2e6)
    period = settings.count("no_rope_layer_interval", 4)
    rotates = settings.numbers("no_rope_layers") or [(index + 1) % period != 0 for index in range(read.num_layers)]
    if len(rotates) != read.num_layers:
        raise ModelError(f"no_rope_layers has {len(rotates)} entries for {read.num_layers} layers")
    window = settings.count("sliding_window") if settings.values.get("sliding_window") is not None else None
    has_windows = window is not None and settings.flag("use_sliding_window")
    usual = [SLIDING if has_windows and not each else "full_attention" for each in rotates]
    mixers = [
        read.attention(rope if each else None, head_dim=rope.dim, window=window if kind == SLIDING else None)
        for each, kind in zip(rotates, read.layer_types(usual), strict=True)
    ]
    return read.model(mixers, ffn=read.gated(bias=settings.flag("mlp_bias")), tied=True)


def _gguf_shape(read: GgufReader) -> ModelShape:
    if window := read.window():
        raise ModelError(f"attention.sliding_window {window} is not supported for smollm3 in a GGUF")
    rope = read.rope()
    turning, still = read.attention(rope), read.attention(None)
    return read.model([turning if (index + 1) % 4 else still for index in range(read.num_layers)])


FAMILY = Family("smollm3", _shape, gguf=GgufFamily("smollm3", _gguf_shape, gguf_names(interleaved=True)))
