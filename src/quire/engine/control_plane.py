"""The control plane of an engine: the formats of its chunks, retention, cache manager and scheduler. A simulator builds
it with the same functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.cache.codecs import CODECS, DENSE, Codec, CodecInputs, load
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.sums import SumsCodec
from quire.cache.counts import ChunkCounts
from quire.cache.manager import CacheManager
from quire.cache.namespace import Namespace
from quire.cache.retention.decisions import RANKED, Retention
from quire.cache.retention.policies import PolicyChain
from quire.cache.sinks import Sinks
from quire.cache.tree import PrefixTree
from quire.config import EngineConfig
from quire.engine.calibration import Calibration, check_tables
from quire.engine.scheduler import Scheduler
from quire.errors import ConfigError
from quire.models.layers import torch_dtype
from quire.models.shape import ModelShape
from quire.models.structural_tokens import StructuralTokens
from quire.stores.tiers import Tiers


class ChunkFormats(NamedTuple):
    """The storage formats of chunks.

    codecs  the codec of open chunks, then that of sealed chunks if it differs
    sinks   the tokens that stay exact beside sealed chunks; None: no tokens
    sums    the codec of column sums; None without retention
    """

    codecs: tuple[DenseCodec, *tuple[Codec, ...]]
    sinks: Sinks | None
    sums: SumsCodec | None


def formats_of(
    config: EngineConfig, shape: ModelShape, calibration: Calibration | None, key_bias: torch.Tensor | None = None
) -> ChunkFormats:
    """The formats of a resolved configuration. key_bias: the model's; None where only sizes matter."""
    dtype = torch_dtype(config.model.dtype)
    sealed = () if config.cache.codec == DENSE else (_codec(config, shape, calibration, key_bias),)
    sums = SumsCodec() if config.retain.is_on else None
    return ChunkFormats((DenseCodec(shape.head_dim, dtype), *sealed), _sinks(config, shape, dtype), sums)


def retention_of(config: EngineConfig, marks: Callable[[], StructuralTokens]) -> Retention | None:
    """The retention of requests; None: they keep all tokens. marks: finds a tokenizer's structural tokens."""
    retain = config.retain
    if not retain.is_on:
        return None
    found = marks()
    budget = None if retain.budget == "off" else retain.budget
    chain = RANKED
    if retain.threshold != "off":
        chain = PolicyChain(retain.threshold, retain.frequent, retain.local, retain.members)
    first = max(1, config.cache.num_sinks)
    return Retention(chain, found.special, found.punctuation, retain.profile_rows, first, budget)


def scheduler_of(
    config: EngineConfig,
    table: ChunkCounts,
    retention: Retention | None,
    tiers: Tiers | None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """The scheduler of a resolved configuration, with its cache manager and prefix tree.

    tiers  stores of the cache; None: there are none
    clock  seconds, monotonic; times transfers
    """
    tree = PrefixTree(table.shape, shares=config.cache.share)
    replays = config.cache.sparse_values < 1
    manager = CacheManager(table, tree, config.cache.lifetime, retention, tiers, clock, replays)
    limits = config.scheduler
    assert limits.token_budget is not None
    return Scheduler(manager, limits.token_budget, limits.max_running, limits.max_queue)


def sealed_pages(
    config: EngineConfig, shape: ModelShape, dtype: torch.dtype, calibration: Calibration | None, backend: str
) -> tuple[int | NDArray[np.int32] | None, Sinks | None]:
    """Bytes of the pages of sealed chunks, None if these stay dense, and the tokens that stay exact beside them.

    Raises ConfigError for a codec that does not store heads of this size, or that the backend does not implement.
    """
    row = CODECS[config.cache.codec]
    if not row.place:
        return None, None
    row.check(shape.head_dim, backend)
    if row.is_calibrated and calibration is None:
        slots = config.cache.outlier_slots
        sizes_of: int | NDArray[np.int32] = load(row.place).nominal_page_bytes(shape.head_dim, row.bits, slots)
    else:
        sizes_of = _codec(config, shape, calibration, None).page_bytes
    return sizes_of, _sinks(config, shape, dtype)


def _codec(
    config: EngineConfig, shape: ModelShape, calibration: Calibration | None, key_bias: torch.Tensor | None
) -> Codec:
    """The codec of sealed pages; key_bias: the model's, None where only sizes matter."""
    row = CODECS[config.cache.codec]
    tables = _checked(config, shape, calibration).tables[row.name] if row.is_calibrated else None
    codec: Codec = load(row.place).of(CodecInputs(row.name, shape.head_dim, tables, key_bias))
    return codec


def _checked(config: EngineConfig, shape: ModelShape, calibration: Calibration | None) -> Calibration:
    """Returns the calibration. Raises ConfigError if it is missing or lacks valid tables of the codec for the model."""
    cache = config.cache
    if calibration is None:
        raise ConfigError(f"cache.codec {cache.codec} needs a calibration; make one with quire calibrate MODEL")
    if cache.codec not in calibration.tables:
        raise ConfigError(
            f"the calibration is for {', '.join(calibration.tables)}, not for {cache.codec}; make one with"
            f" quire calibrate MODEL --bits {CODECS[cache.codec].bits}"
        )
    slots = calibration.settings.get("outlier_slots")
    if slots != cache.outlier_slots:
        raise ConfigError(
            f"the calibration was made with cache.outlier_slots {slots}, not {cache.outlier_slots}; make one with"
            f" quire calibrate MODEL --outlier-slots {cache.outlier_slots}"
        )
    check_tables(calibration.tables[cache.codec], shape.num_layers, shape.num_kv_heads, shape.head_dim)
    return calibration


def _sinks(config: EngineConfig, shape: ModelShape, dtype: torch.dtype) -> Sinks | None:
    if not config.cache.num_sinks:
        return None
    return Sinks(config.cache.num_sinks, shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)


def namespace_of(config: EngineConfig, shape: ModelShape, model_id: str, calibration: Calibration | None) -> Namespace:
    """The namespace of an engine's chunks, without a salt. config is resolved; for other arguments see `assemble`."""
    cache = config.cache
    return Namespace(
        model=model_id,
        dtype=config.model.dtype,
        weights=config.model.weights,
        codec=f"{cache.codec} sinks {cache.num_sinks}" if cache.num_sinks else cache.codec,
        calibration=calibration.hash if calibration is not None else "",
        strict=cache.strict,
        rope=" ".join(map(repr, shape.ropes)) or "None",
    )
