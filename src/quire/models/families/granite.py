"""Granite 3, dense: multipliers of embedding, scores, residual sums and logits."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.families.names import gguf_names
from quire.models.shape import ModelShape


def _shape(read: ConfigReader) -> ModelShape:
    settings = read.settings
    attention = read.attention(read.rope(read.head_dim()), scale=settings.number("attention_multiplier", 1.0))
    return read.model(
        [attention] * read.num_layers,
        ffn=read.gated(bias=settings.flag("mlp_bias")),
        residual_scale=settings.number("residual_multiplier", 1.0),
        embed_scale=settings.number("embedding_multiplier", 1.0),
        logit_scale=1 / settings.number("logits_scaling", 1.0),
    )


def _gguf_shape(read: GgufReader) -> ModelShape:
    """A scale of 0 is none, as in llama.cpp."""
    settings = read.settings
    if not settings.flag("rope.scaling.finetuned", True):
        raise ModelError("granite without rotation is not supported (rope.scaling.finetuned)")
    attention = read.attention(read.rope(), scale=settings.number("attention.scale", 0.0) or None)
    return read.model(
        [attention] * read.num_layers,
        residual_scale=settings.number("residual_scale", 0.0) or 1.0,
        embed_scale=settings.number("embedding_scale", 0.0) or 1.0,
        logit_scale=1 / settings.number("logit_scale", least=1e-6),
    )


FAMILY = Family("granite", _shape, gguf=GgufFamily("granite", _gguf_shape, gguf_names(interleaved=True)))
