"""Builds an offloaded cache from a configuration: its table, mover of chunks, and attention in micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from quire.cache.ledger import PageCounts, PageLedger
from quire.cache.table import ChunkTable
from quire.config import EngineConfig, format_bytes
from quire.engine.offloading import cache_bytes, check_disk_room, mover_of, policy_of
from quire.offload.units import ALL

if TYPE_CHECKING:
    from quire.attention.cpu import CpuAttention
    from quire.attention.plan import AttentionBackend
    from quire.attention.triton import TritonAttention
    from quire.engine.control_plane import ChunkFormats
    from quire.engine.sizes import EngineSizes
    from quire.models.plan import Model
    from quire.offload.model import OffloadedModel
    from quire.offload.mover import Mover
    from quire.offload.paged import Pager
    from quire.offload.table import OffloadedTable

log = logging.getLogger("quire")

HALF = 0.5
"""If a policy attends to at least this share of the far chunks on the host, rows attend to all of them there."""


def offload_target(model: OffloadedModel, config: EngineConfig) -> Mover | torch.device:
    """The target of offloaded chunks: the mover of a file, or the GPU itself, whose chunks go to the host's memory."""
    return torch.device(config.runtime.device) if model.folder is None else mover_of(model, "cache")


def build_offloaded_cache(
    model: Model, config: EngineConfig, fits: EngineSizes, formats: ChunkFormats
) -> tuple[ChunkTable | OffloadedTable, OffloadedTable | Pager]:
    """The table of an offloaded cache, and the object that moves its chunks. Raises ConfigError."""
    from quire.offload.memory_plan import MemoryPlan
    from quire.offload.model import OffloadedModel
    from quire.offload.paged import PagedArena, Pager
    from quire.offload.table import OffloadedTable

    assert isinstance(model, OffloadedModel) and isinstance(config.cache.memory, int)
    shape, (codecs, sinks, sums) = model.shape, formats
    sizes = [np.broadcast_to(codec.page_bytes, (shape.num_layers, shape.num_kv_heads)) for codec in codecs]
    found = cache_bytes(config, fits.max_context, sizes[-1], sizes[0] if len(sizes) > 1 else None)
    assert found is not None
    needs = found[1]
    if model.folder is not None:  # the layer image has been written since
        check_disk_room(fits.cache_bytes, fits.chunk_bytes, needs)
    memory_plan, backing = MemoryPlan.of(config.cache.memory, needs), offload_target(model, config)
    log.info(
        "cache: at most %s in %s; in memory %s: %d chunks, and two buffers for %d chunks of a layer",
        format_bytes(fits.cache_bytes),
        "the host's memory" if isinstance(backing, torch.device) else model.folder,
        format_bytes(config.cache.memory),
        memory_plan.num_open + memory_plan.num_near,
        memory_plan.own_bytes // needs.sealed.largest,
    )
    if sums is not None:
        assert not isinstance(backing, torch.device), "retention beside a GPU"
        ledger = PageLedger(fits.cache_bytes, fits.arena.slab_bytes)
        budget = config.cache.memory - needs.packed_bytes - 2 * (memory_plan.own_bytes + memory_plan.shared_bytes)
        arena = PagedArena(ledger.num_bytes, budget, backing)
        pages = ChunkTable(ledger, shape.num_layers, shape.num_kv_heads, *codecs, sinks=sinks, sums=sums, arena=arena)
        return pages, Pager(pages, arena, memory_plan.own_bytes // needs.sealed.largest)
    policy = policy_of(config)
    # With a sliding window, attention's plan has no gaps: all chunks that its rows see are loaded.
    has_window = shape.least_window(fits.max_context) < fits.max_context
    wanted = policy is None or (policy.attended > 0 and policy.attended >= HALF * policy.cache.beyond(0))
    attends = isinstance(backing, torch.device) and not has_window and wanted
    if attends:
        log.info("decoded tokens attend to chunks in the host's memory there")
    elif policy is not None and policy.attended > 0:
        log.warning("the policy's attended is not followed: this model's window has chunks loaded instead")
    table = OffloadedTable(
        PageCounts(fits.cache_bytes, fits.arena.slab_bytes),
        shape.num_layers,
        shape.num_kv_heads,
        *codecs,
        sinks=sinks,
        memory_plan=memory_plan,
        backing=backing,
        near=ALL if policy is None else policy.cache.shares[0],
        attends=attends,
    )
    return table, table


def in_micro_batches(
    attention: AttentionBackend,
    config: EngineConfig,
    table: OffloadedTable | Pager | None,
    padded_rows: Callable[[int], int],
) -> AttentionBackend:
    """Wraps attention in micro-batches if the configuration asks for them. table: that of an offloaded cache."""
    from quire.offload.blocks import BlockAttention

    policy = policy_of(config)
    size = config.offload.micro_batch or (policy.micro_batch if policy is not None else None)
    if table is None and (size is None or size >= config.scheduler.max_running):
        return attention
    backend = cast("CpuAttention | TritonAttention", attention)
    return BlockAttention(backend, size or config.scheduler.max_running, table, padded_rows)


def offload_counters(model: Model, table: OffloadedTable | Pager | None) -> Callable[[], dict[str, Any]]:
    """A function that returns the counters of offloading for `LLM.stats`."""
    from quire.offload.model import OffloadedModel

    assert isinstance(model, OffloadedModel)
    stream, states = model.stream, model.states

    def counters() -> dict[str, Any]:
        found = {
            "weights_near": model.weights.split.shares[0],
            "weights_loads": stream.num_loads,
            "weights_bytes_read": stream.bytes_read,
            "weights_bytes_from_disk": stream.bytes_from_disk,
            "weights_wait_seconds": stream.wait_seconds,
            **states.stats(),
        }
        return found if table is None else found | table.stats()

    return counters
