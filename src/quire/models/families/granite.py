"""Granite 3, dense: multipliers of embedding, scores, residual sums and logits."""

from __future__ import annotations

from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family
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


FAMILY = Family("granite", _shape)
