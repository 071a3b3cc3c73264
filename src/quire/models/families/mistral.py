"""Mistral 7B and Mistral Small, also as the text part of Mistral Small 3.1 and 3.2."""

from __future__ import annotations

from quire.models.families import ministral3
from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family
from quire.models.shape import ModelShape


def _shape(read: ConfigReader) -> ModelShape:
    window = read.settings.count("sliding_window") if read.settings.values.get("sliding_window") is not None else None
    attention = read.attention(read.rope(read.head_dim()), window=window)
    return read.model([attention] * read.num_layers, ffn=read.gated(bias=read.settings.flag("mlp_bias")))


def _text_shape(read: ConfigReader) -> ModelShape:
    """The text part: Mistral Small 3, or Ministral 3."""
    return ministral3.FAMILY.shape(read) if read.family == "ministral3" else _shape(read)


FAMILY = Family("mistral", _shape)
MULTIMODAL = Family("mistral3", _text_shape, text_in="text_config")
