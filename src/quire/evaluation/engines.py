"""Engines to compare: one model loaded once, an arena for each codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.cache.ledger import PAGE_TOKENS
from quire.config import CacheConfig, EngineConfig, format_bytes
from quire.engine.build import assemble, resolve
from quire.engine.calibration import Calibration
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.load import Loaded, calibration_for, load_engine
from quire.models.resolve import resolve_model
from quire.models.tokenizer import Tokenizer
from quire.models.weights import open_model

REFERENCE = "dense"
"""The codec that the others are compared with."""

SPARE_CHUNKS = 8
"""Dense chunks that an automatic arena has beyond its tokens: arenas are cut down to whole slabs."""


def load_engines(
    model: str,
    codecs: Sequence[str],
    context: int,
    options: Mapping[str, Any] | None = None,
    config_file: Path | None = None,
    *,
    sequences: int = 1,
    compares: bool = False,
) -> tuple[dict[str, Engine], Tokenizer]:
    """An engine for each codec by its name, in the order given, over the same weights in memory; and their tokenizer.

    model        a folder, a .gguf file, a hub id, or `smollm2`
    codecs       values of cache.codec; none: the one that the options have
    context      tokens that the longest request has, prompt and answer
    options      settings by key, which win over those of the TOML file; cache.pin and cache.check are passed
                 over
    sequences    how many of the longest requests an automatic cache.memory holds, were they stored densely
    compares     whether REFERENCE comes first, if it is not among the codecs
    Raises ModelError or ConfigError: before weights are loaded, if the model or a cache cannot hold `context` tokens
    or the arenas do not fit the machine.
    """
    configs = _configs(codecs, dict(options or {}), config_file)
    if compares and REFERENCE not in configs:
        configs = {REFERENCE: _dense(next(iter(configs.values()))), **configs}
    path = resolve_model(model)
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
        first = next(iter(configs.values()))
        _, fits = resolve(_dense(first), shape, checkpoint)
        if context > fits.model_context:
            raise ConfigError(
                f"{context} tokens are more than the model's context holds, {fits.model_context} (model.max_context)"
            )
        if first.cache.memory == "auto":
            # A quarter more: the last slab of each size of page may be half used.
            chunks = (sequences * -(-context // PAGE_TOKENS) + SPARE_CHUNKS) * 5 // 4
            memory = chunks * fits.chunk_bytes
            needed = dataclasses.replace(fits, cache_bytes=len(configs) * memory)
            if not needed.fit_the_machine:
                raise ConfigError(
                    f"caches for {context} tokens with {len(configs)} codecs need {format_bytes(needed.cache_bytes)}"
                    f" beside {format_bytes(fits.weight_bytes)} of weights, and"
                    f" {format_bytes(fits.available_bytes or 0)} are free; give fewer codecs at once, or fewer tokens"
                )
            configs = {
                name: dataclasses.replace(config, cache=dataclasses.replace(config.cache, memory=memory))
                for name, config in configs.items()
            }
        calibrations = {}
        for name, config in configs.items():
            resolve(config, shape, checkpoint)  # before a calibration takes its time
            calibrations[name] = calibration_for(path, config)
            _, fits = resolve(config, shape, checkpoint, calibrations[name])
            if context > fits.max_context:
                raise ConfigError(
                    f"cache.memory is {format_bytes(fits.cache_bytes)}; with codec {name} it holds {fits.max_context}"
                    f" tokens, fewer than {context}"
                )
    engines: dict[str, Engine] = {}
    for name, config in configs.items():
        if not engines:
            loaded = load_engine(model, config)
        engines[name] = _beside(loaded, config, calibrations[name]) if engines else loaded.engine
    return engines, loaded.tokenizer


def _configs(codecs: Sequence[str], options: dict[str, Any], config_file: Path | None) -> dict[str, EngineConfig]:
    """The configuration of each codec, by its name."""
    options["cache.pin"] = None
    options["cache.check"] = False  # it is what is measured here
    if not codecs:
        config = EngineConfig.from_options(options, config_file)
        return {config.cache.codec: config}
    found = {}
    for name in dict.fromkeys(codecs):
        uncalibrated = {} if name.startswith("nuq") else {"cache.calibration": None}
        if name != REFERENCE:
            found[name] = EngineConfig.from_options(options | {"cache.codec": name} | uncalibrated, config_file)
    plain = _dense(next(iter(found.values()))) if found else EngineConfig.from_options(options, config_file)
    return {name: plain if name == REFERENCE else found[name] for name in dict.fromkeys(codecs)}


def _dense(config: EngineConfig) -> EngineConfig:
    """The same with dense pages; settings that only other codecs know are dropped."""
    cache = config.cache
    plain = CacheConfig(codec="dense", memory=cache.memory, share=cache.share, lifetime=cache.lifetime)
    return dataclasses.replace(config, cache=plain)


def _beside(loaded: Loaded, config: EngineConfig, calibration: Calibration | None) -> Engine:
    """Another engine over the weights of one."""
    resolved, fits = resolve(config, loaded.shape, None, calibration)
    model_id = loaded.engine.namespace.model
    return assemble(loaded.engine.runner.model, loaded.tokenizer, resolved, fits, model_id, calibration)
