"""Cohere 2 (Command R7B, Command A): both parts read one layer norm; full layers do not rotate."""

from __future__ import annotations

from dataclasses import replace

from quire.errors import ModelError
from quire.models.families.config_reader import SLIDING, ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import TensorNames, gguf_names
from quire.models.norms import NormShape
from quire.models.shape import ModelShape, NormPlaces


def _shape(read: ConfigReader) -> ModelShape:
    settings = read.settings
    if settings.flag("use_qk_norm"):
        raise ModelError("norms of q and k are not supported for cohere2 (use_qk_norm)")
    window = settings.count("sliding_window", 4096)
    rope = read.rope(read.head_dim())
    mixers = [
        read.attention(rope, window=window) if kind == SLIDING else read.attention(None, head_dim=rope.dim)
        for kind in read.layer_types(read.every(settings.count("sliding_window_pattern", 4)))
    ]
    return read.model(
        mixers,
        norms=NormPlaces(parallel=True),
        norm=NormShape(settings.number("layer_norm_eps", 1e-5, least=0), "layer"),
        tied=True,
        logit_scale=settings.number("logit_scale", 0.0625),
    )


def _gguf_shape(read: GgufReader) -> ModelShape:
    rope = read.rope()
    turning, still = read.attention(rope), read.attention(None)
    windows = read.windows(4)
    return read.model(
        [replace(turning, window=window) if window else still for window in windows],
        norms=NormPlaces(parallel=True),
        norm=NormShape(read.settings.number("attention.layer_norm_epsilon", least=0), "layer"),
        logit_scale=read.settings.number("logit_scale"),
    )


_GGUF = GgufFamily("cohere2", _gguf_shape, gguf_names(interleaved=True))
FAMILY = Family("cohere2", _shape, TensorNames(interleaved=True), gguf=_GGUF)
