"""Offloading as a configuration wants it: how much memory the weights get, and the model that runs with it."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.ledger import PAGE_TOKENS, PageCounts
from quire.config import EngineConfig, OffloadConfig, format_bytes
from quire.errors import ConfigError
from quire.models.layers import torch_dtype
from quire.offload.files import read_policy
from quire.offload.units import ALL, TIERS, Share

if TYPE_CHECKING:
    from quire.attention.plan import AttentionBackend
    from quire.cache.codecs import Codec
    from quire.cache.codecs.dense import DenseCodec
    from quire.cache.sinks import Sinks
    from quire.engine.sizes import Sizes
    from quire.models.layers import Ops
    from quire.models.plan import Model
    from quire.models.weights import Checkpoint
    from quire.offload.costs import Policy
    from quire.offload.model import OffloadedModel
    from quire.offload.mover import Mover
    from quire.offload.table import Needs, OffloadedTable

log = logging.getLogger("quire")

MICRO_BATCH = 8
"""Without a policy, sequences of a micro-batch that buffers are made for, if the memory suffices."""

NEAR = Share(0.1)
"""Without a policy and without cache.memory, share of the longest sequences' chunks that there are frames for."""

OFFLOAD_CACHE_SHARE, OFFLOAD_SPARE = 0.25, 0.1
"""With offload.mode auto: shares of the free memory that are left for an automatic cache, and for everything else."""


def with_offload(config: EngineConfig, backend: str, weight_bytes: int, available: int) -> tuple[EngineConfig, int]:
    """The configuration with offload.memory, and the bytes of weights that stay in memory. Raises ConfigError."""
    offload = config.offload
    if backend != "cpu":
        raise ConfigError(f"offload.mode {offload.mode} needs attention.backend cpu, not {backend}")
    if not config.model.images:
        raise ConfigError("offload.mode reads weights from a layer image; set model.images true")
    policy = policy_of(config)
    if policy is not None:
        running = min(config.scheduler.max_running, policy.block)
        config = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, max_running=running))
        return config, int(weight_bytes * policy.weights.shares[0])
    memory = offload.memory
    if memory is None:
        wanted = config.cache.memory
        cache = wanted if isinstance(wanted, int) else int(available * OFFLOAD_CACHE_SHARE)
        memory = max(0, int((available - cache) * (1 - OFFLOAD_SPARE)))
    if weight_bytes <= memory:
        if offload.cache is None and offload.micro_batch is None:
            log.info("offload.mode auto: all weights, %s, fit into memory", format_bytes(weight_bytes))
            return dataclasses.replace(config, offload=OffloadConfig()), weight_bytes
        memory = max(memory, 2 * weight_bytes)
    return dataclasses.replace(config, offload=dataclasses.replace(offload, memory=memory)), min(weight_bytes, memory)


def policy_of(config: EngineConfig) -> Policy | None:
    """The policy of offload.mode's file; None without one. Raises ConfigError."""
    if config.offload.mode in ("off", "auto"):
        return None
    return read_policy(Path(config.offload.mode), TIERS[1:])


def near_share(config: EngineConfig) -> Share:
    """The share of a cache on the disk that stays in memory: as the policy says, else a tenth."""
    policy = policy_of(config)
    return NEAR if policy is None else policy.cache.shares[0]


def cache_bytes(
    config: EngineConfig, context: int, sealed: NDArray[np.int32], open_: NDArray[np.int32] | None
) -> tuple[int, Needs] | None:
    """Bytes of the cache if it is on the disk, and what is needed in memory; None if it is in memory.

    context  tokens of the longest request
    sealed   bytes of the pages of a sealed chunk, [L, H]
    open_    of an open chunk, if it has another codec
    Raises ConfigError.
    """
    from quire.offload.table import Extents, Needs

    room, policy = config.offload.cache, policy_of(config)
    max_chunks, running = -(-context // PAGE_TOKENS), config.scheduler.max_running
    if room is None and policy is not None and policy.cache.beyond(0) > 0:
        # An admission leaves every sequence room for a chunk to grow; and one more, because slabs are whole.
        room = running * (max_chunks + 2) * int(sealed.sum())
    if room is None:
        return None
    if config.retain.is_on:
        raise ConfigError("retention keeps the cache small, in memory; a cache on the disk (offload.cache) has none")
    if config.tiers.is_on:
        raise ConfigError("a cache on the disk (offload.cache) has no other tiers; leave tiers.disk out")
    micro_batch = config.offload.micro_batch or (min(MICRO_BATCH, running) if policy is None else policy.micro_batch)
    extents = Extents(sealed), None if open_ is None else Extents(open_)
    return room, Needs(*extents, running, max_chunks, min(micro_batch, running))


def load_with_offload(checkpoint: Checkpoint, config: EngineConfig, build: Callable[[Ops], Model]) -> Model:
    """The model, with its weights where the configuration wants them. Raises ConfigError."""
    from quire.models import images
    from quire.models.image_folder import ImageError
    from quire.offload.hidden import HiddenStates
    from quire.offload.model import load_offloaded

    offload, dtype = config.offload, torch_dtype(config.model.dtype)
    wanted, policy = images.whole_image_of(checkpoint, dtype, config.model.weights), policy_of(config)
    try:
        model = load_offloaded(
            wanted,
            build,
            memory=offload.memory,
            split=None if policy is None else policy.weights,
            bandwidth=offload.disk_bandwidth,
            overlaps=offload.overlap,
        )
    except ImageError as error:
        raise ConfigError(f"offload.mode {offload.mode} needs the model's layer image: {error}") from error
    if policy is not None and policy.hidden.beyond(0) > 0:
        model.states = HiddenStates(mover_of(model, "activations"), policy.hidden.beyond(0))
    return model


def mover_of(model: OffloadedModel, what: str) -> Mover:
    """Threads and a file for what leaves memory beside a model's weights. They end with the model. Raises ConfigError.

    what  the contents, for errors
    """
    from quire.offload.mover import Mover

    try:
        mover = Mover(model.folder, model.stream.throttle, what)
    except OSError as error:
        raise ConfigError(f"no file for the {what} in {model.folder}: {error}") from error
    weakref.finalize(model, mover.close)
    return mover


def offloaded_table(
    model: Model, config: EngineConfig, fits: Sizes, codecs: tuple[DenseCodec, *tuple[Codec, ...]], sinks: Sinks | None
) -> OffloadedTable:
    """A cache on the disk. Raises ConfigError."""
    from quire.offload.model import OffloadedModel
    from quire.offload.table import OffloadedTable, Room

    assert isinstance(model, OffloadedModel) and isinstance(config.cache.memory, int)
    shape, policy = model.shape, policy_of(config)
    layers_heads = shape.num_layers, shape.num_kv_heads
    pages = [np.broadcast_to(codec.page_bytes, layers_heads) for codec in codecs]
    found = cache_bytes(config, fits.max_context, pages[-1], pages[0] if len(pages) > 1 else None)
    assert found is not None
    room = Room.of(config.cache.memory, found[1])
    log.info(
        "cache on the disk: at most %s in %s; in memory %s: %d chunks, and two buffers for %d chunks of a layer",
        format_bytes(fits.cache_bytes),
        model.folder,
        format_bytes(config.cache.memory),
        room.num_open + room.num_near,
        room.own_bytes // found[1].sealed.largest,
    )
    table = OffloadedTable(
        PageCounts(fits.cache_bytes, fits.arena.slab_bytes),
        *layers_heads,
        *codecs,
        sinks=sinks,
        room=room,
        mover=mover_of(model, "cache"),
        near=ALL if policy is None else policy.cache.shares[0],
    )
    free = shutil.disk_usage(model.folder).free
    if table.file_bytes > free:
        raise ConfigError(
            f"the cache on the disk may take {format_bytes(table.file_bytes)}, and {model.folder} has"
            f" {format_bytes(free)}; lower offload.cache"
        )
    return table


def in_micro_batches(
    attention: AttentionBackend,
    config: EngineConfig,
    table: OffloadedTable | None,
    padded_rows: Callable[[int], int],
) -> AttentionBackend:
    """Attention in micro-batches, where the configuration wants them. table: the cache, if it is on the disk."""
    from quire.attention.cpu import CpuAttention
    from quire.offload.blocks import BlockAttention

    policy = policy_of(config)
    size = config.offload.micro_batch or (policy.micro_batch if policy is not None else None)
    if table is None and (size is None or size >= config.scheduler.max_running):
        return attention
    assert isinstance(attention, CpuAttention)
    return BlockAttention(attention, size or config.scheduler.max_running, table, padded_rows)


def offload_counters(model: Model, table: OffloadedTable | None) -> Callable[[], dict[str, Any]]:
    """What `LLM.stats` says of offloading."""
    from quire.offload.model import OffloadedModel

    assert isinstance(model, OffloadedModel)
    stream, states = model.stream, model.states

    def counters() -> dict[str, Any]:
        found = {
            "weights_near": model.weights.split.shares[0],
            "weights_loads": stream.num_loads,
            "weights_bytes_read": stream.bytes_read,
            "weights_wait_seconds": stream.wait_seconds,
            "hidden_near": 1 - states.far_share,
        }
        return found if table is None else found | table.stats()

    return counters
