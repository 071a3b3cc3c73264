"""Engines to compare: one model, loaded once, with an arena per codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from quire.cache.codecs import CODECS, DENSE
from quire.cache.ledger import PAGE_TOKENS
from quire.config import EngineConfig, RetainConfig, format_bytes
from quire.engine.build import assemble, resolve
from quire.engine.calibration import Calibration
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.load import LoadedEngine, calibration_for, load_engine
from quire.models.resolve import resolve_model
from quire.models.tokenizer import Tokenizer
from quire.models.weights import open_model

Progress = Callable[[int, int], None]
"""Called with (done, total)."""

REFERENCE = DENSE
"""The engine with which the others are compared: dense pages, without retention, all values."""

LEAVES_NOTHING = dict.fromkeys(("cache.pin", "tiers.disk", "tiers.disk_bandwidth", "tiers.memory"))
"""Options of engines that leave nothing behind: the configuration may be that of a server."""

SPARE_CHUNKS = 8
"""Additional dense chunks of an automatic arena, because arenas are rounded down to whole slabs."""


def load_engines(
    model: str,
    config: EngineConfig,
    context: int,
    codecs: Sequence[str] = (),
    *,
    sequences: int = 1,
    compares: bool = False,
) -> tuple[dict[str, Engine], Tokenizer]:
    """Returns the engines of `configs_of` by name and in order, with the same weights in memory; and their tokenizer.

    model      a folder, a .gguf file, a hub id, or `smollm2`
    context    tokens of the longest request, prompt and answer
    sequences  number of longest requests, stored densely, that an automatic cache.memory holds
    Raises ModelError or ConfigError before weights are loaded, if the model or a cache cannot hold `context` tokens or
    the arenas do not fit the machine.
    """
    configs = configs_of(config, codecs, compares=compares)
    path = resolve_model(model)
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
        _, fits = resolve(_with_codec(next(iter(configs.values())), DENSE), shape, checkpoint)
        if context > fits.model_context:
            raise ConfigError(
                f"{context} tokens exceed the model's context of {fits.model_context} (model.max_context)"
            )
        if config.cache.memory == "auto":
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
            configs = {name: own.with_options({"cache.memory": memory}) for name, own in configs.items()}
        calibrations = {}
        for name, own in configs.items():
            resolve(own, shape, checkpoint)  # finds errors before a calibration
            calibrations[name] = calibration_for(path, own)
            _, fits = resolve(own, shape, checkpoint, calibrations[name])
            if context > fits.max_context:
                raise ConfigError(
                    f"cache.memory is {format_bytes(fits.cache_bytes)}; with codec {name} it holds {fits.max_context}"
                    f" tokens, fewer than {context}"
                )
    engines: dict[str, Engine] = {}
    for name, own in configs.items():
        if not engines:
            loaded = load_engine(model, own)
        engines[name] = _beside(loaded, own, calibrations[name]) if engines else loaded.engine
    return engines, loaded.tokenizer


def configs_of(config: EngineConfig, codecs: Sequence[str] = (), *, compares: bool = False) -> dict[str, EngineConfig]:
    """A configuration for each codec, by the name of its engine and in the given order. With retention or sparse values
    the name includes the setting: `nuq3, retain.budget 0.5`.

    config    settings of all engines, with a codec for which they are valid; cache.pin, cache.check and tiers are
              ignored
    codecs    values of cache.codec; empty: the codec of the configuration
    compares  whether to add REFERENCE in front, if it is not among the codecs
    Raises ConfigError.
    """
    each = [_with_codec(config, codec) for codec in dict.fromkeys(codecs or [config.cache.codec])]
    configs = {_name(own): own for own in each}
    if compares and REFERENCE not in configs:
        plain = dataclasses.replace(each[0], retain=RetainConfig())
        configs = {REFERENCE: _with_codec(plain, DENSE).with_options({"cache.sparse_values": 1.0}), **configs}
    return configs


def _name(config: EngineConfig) -> str:
    """The name of an engine in tables."""
    retain, share = config.retain, config.cache.sparse_values
    name = config.cache.codec
    if retain.is_on:
        setting = "budget" if retain.budget != "off" else "threshold"
        name += f", retain.{setting} {getattr(retain, setting):g}"
    return name if share == 1 else f"{name}, cache.sparse_values {share:g}"


def _with_codec(config: EngineConfig, codec: str) -> EngineConfig:
    """The configuration of an engine that is measured. Drops settings that the codec does not have, and what would
    stay after the measurement, or change it.
    """
    options: dict[str, Any] = {**LEAVES_NOTHING, "cache.check": False, "cache.codec": codec}
    if codec in CODECS and not CODECS[codec].is_calibrated:
        options["cache.calibration"] = None
    if codec == DENSE:
        options["cache.strict"] = True
    return config.with_options(options)


def _beside(loaded: LoadedEngine, config: EngineConfig, calibration: Calibration | None) -> Engine:
    """Another engine with the weights of an existing one."""
    resolved, fits = resolve(config, loaded.shape, None, calibration)
    model_id = loaded.engine.namespace.model
    return assemble(loaded.engine.runner.model, loaded.tokenizer, resolved, fits, model_id, calibration)
