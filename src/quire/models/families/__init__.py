"""The families of models: one module each, and one row here.

A family reads ModelShape from config.json and from GGUF metadata. A feature that the decoder does not support is
rejected there, by name; nothing is ignored silently.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from quire.errors import ModelError
from quire.models.families import (
    cohere2,
    gemma2,
    gemma3,
    glm4,
    granite,
    llama,
    ministral3,
    mistral,
    olmo2,
    olmo3,
    opt,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from quire.models.families.config_reader import ConfigReader
from quire.models.families.family import Family, GgufFamily
from quire.models.families.gguf_reader import GgufReader
from quire.models.settings import CheckedSettings
from quire.models.shape import ModelShape

_ROWS: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    opt.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gemma3.MULTIMODAL,
    mistral.MULTIMODAL,
    ministral3.FAMILY,
    phi3.FAMILY,
    smollm3.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    granite.FAMILY,
    cohere2.FAMILY,
    glm4.FAMILY,
)

FAMILIES: dict[str, Family] = {row.name: row for row in _ROWS}
"""By `model_type` of config.json."""

GGUF_FAMILIES: dict[str, GgufFamily] = {row.gguf.name: row.gguf for row in _ROWS if row.gguf is not None}
"""By `general.architecture`."""


def shape_from_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelShape:
    """The shape described by a config.json (of any transformers version) and its generation_config.json.

    Raises ModelError naming the first setting that is missing, malformed or not supported.
    """
    outer = CheckedSettings(config, "config.json")
    name = outer.text("model_type", "")
    family = FAMILIES.get(name)
    if family is None:
        found = name or next(iter(outer.texts("architectures")), "not named")
        raise ModelError(f"architecture {found!r} is not supported (only {', '.join(FAMILIES)})")
    quantization = outer.table("quantization_config")
    if quantization.values:
        method = quantization.text("quant_method", "an unknown method")
        raise ModelError(f"weights quantized with {method} are not supported; use plain safetensors or a GGUF")
    settings = outer.table(family.text_in) if family.text_in else outer
    return family.shape(ConfigReader(settings, generation, outer))


def shape_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Collection[str],
    vocab_size: int,
    factors: Mapping[str, tuple[float, ...]],
) -> ModelShape:
    """The shape described by GGUF metadata; arguments as of GgufReader.

    Mistral's converter writes architecture llama and no window. So a file of Mistral 7B v0.1, trained with a window of
    4096, looks like a llama. It attends to all tokens, here as in llama.cpp, unless the file has
    `llama.attention.sliding_window`.
    """
    name = metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ModelError(f"GGUF architecture {name!r} is not supported (only {', '.join(GGUF_FAMILIES)})")
    return family.shape(GgufReader(metadata, tensors, vocab_size, factors))
