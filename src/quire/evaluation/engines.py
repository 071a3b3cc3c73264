"""Engines to compare: one model, loaded once, with an arena per codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.cache.codecs import CODECS, DENSE
from quire.cache.ledger import PAGE_TOKENS
from quire.config import CacheConfig, EngineConfig, RetainConfig, format_bytes
from quire.engine.build import assemble, resolve
from quire.engine.calibration import Calibration
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.load import LoadedEngine, calibration_for, load_engine
from quire.models.resolve import resolve_model
from quire.models.tokenizer import Tokenizer
from quire.models.weights import open_model

REFERENCE = DENSE
"""The engine with which the others are compared: dense pages, without retention, all values."""

SPARE_CHUNKS = 8
"""Additional dense chunks of an automatic arena, because arenas are rounded down to whole slabs."""


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
    """Returns an engine per codec by its name, in the given order, with the same weights in memory; and their
    tokenizer. With retention or sparse values the name includes the setting: `nuq3, retain.budget 0.5`.

    model        a folder, a .gguf file, a hub id, or `smollm2`
    codecs       values of cache.codec; empty: the codec of the options
    context      tokens of the longest request, prompt and answer
    options      settings by key, which override the TOML file; cache.pin, cache.check and tiers are ignored
    sequences    number of longest requests, stored densely, that an automatic cache.memory holds
    compares     whether to add REFERENCE in front, if it is not among the codecs
    Raises ModelError or ConfigError before weights are loaded, if the model or a cache cannot hold `context` tokens or
    the arenas do not fit the machine.
    """
    configs = configs_of(codecs, options, config_file, compares=compares)
    path = resolve_model(model)
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
        first = next(iter(configs.values()))
        _, fits = resolve(_dense(first), shape, checkpoint)
        if context > fits.model_context:
            raise ConfigError(
                f"{context} tokens exceed the model's context of {fits.model_context} (model.max_context)"
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
                    f" {format_bytes(fits.available_bytes or 0)} are free; give fewer codecs or fewer tokens"
                )
            configs = {
                name: dataclasses.replace(config, cache=dataclasses.replace(config.cache, memory=memory))
                for name, config in configs.items()
            }
        calibrations = {}
        for name, config in configs.items():
            resolve(config, shape, checkpoint)  # finds errors before a calibration
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


def configs_of(
    codecs: Sequence[str],
    options: Mapping[str, Any] | None = None,
    config_file: Path | None = None,
    *,
    compares: bool = False,
) -> dict[str, EngineConfig]:
    """The configurations of the engines of `load_engines`, by name and in order, with automatic values. Raises
    ConfigError.
    """
    configs = _configs(codecs, dict(options or {}), config_file)
    if compares and REFERENCE not in configs:
        plain = dataclasses.replace(_dense(next(iter(configs.values()))), retain=RetainConfig())
        plain = dataclasses.replace(plain, cache=dataclasses.replace(plain.cache, sparse_values=1.0))
        configs = {REFERENCE: plain, **configs}
    return configs


def decodes_apart(codecs: Sequence[str], options: Mapping[str, Any] | None, config_file: Path | None) -> bool:
    """Whether the tokens of an answer see something else than those of a prompt, in the engines of `load_engines`.
    Raises ConfigError.
    """
    config = next(iter(configs_of(codecs, options, config_file).values()))
    return config.retain.is_on or config.cache.sparse_values < 1


def _name(codec: str, config: EngineConfig) -> str:
    """The name of an engine in tables."""
    retain, share = config.retain, config.cache.sparse_values
    name = codec
    if retain.is_on:
        setting = "budget" if retain.budget != "off" else "threshold"
        name += f", retain.{setting} {getattr(retain, setting):g}"
    return name if share == 1 else f"{name}, cache.sparse_values {share:g}"


def _configs(codecs: Sequence[str], options: dict[str, Any], config_file: Path | None) -> dict[str, EngineConfig]:
    """The configuration of each codec, by the name of its engine."""
    # A file of settings may be a server's. An evaluation leaves nothing behind.
    options |= dict.fromkeys(("cache.pin", "tiers.disk", "tiers.disk_bandwidth", "tiers.memory"))
    options["cache.check"] = False  # the evaluation measures the same thing
    if not codecs:
        config = EngineConfig.from_options(options, config_file)
        return {_name(config.cache.codec, config): config}
    found = {}
    for name in dict.fromkeys(codecs):
        uncalibrated = {} if name not in CODECS or CODECS[name].is_calibrated else {"cache.calibration": None}
        if name != REFERENCE:
            found[name] = EngineConfig.from_options(options | {"cache.codec": name} | uncalibrated, config_file)
    plain = _dense(next(iter(found.values()))) if found else EngineConfig.from_options(options, config_file)
    return {_name(codec, plain): plain if codec == REFERENCE else found[codec] for codec in dict.fromkeys(codecs)}


def _dense(config: EngineConfig) -> EngineConfig:
    """The same options with dense pages; drops settings that only other codecs have."""
    cache = config.cache
    plain = CacheConfig(
        codec=DENSE,
        memory=cache.memory,
        share=cache.share,
        lifetime=cache.lifetime,
        sparse_values=cache.sparse_values,
    )
    return dataclasses.replace(config, cache=plain)


def _beside(loaded: LoadedEngine, config: EngineConfig, calibration: Calibration | None) -> Engine:
    """Another engine with the weights of an existing one."""
    resolved, fits = resolve(config, loaded.shape, None, calibration)
    model_id = loaded.engine.namespace.model
    return assemble(loaded.engine.runner.model, loaded.tokenizer, resolved, fits, model_id, calibration)
