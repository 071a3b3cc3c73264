"""Builds an engine from a configuration and a model's shape. Resolves every automatic value first."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.attention.plan import AttentionBackend
from quire.attention.reference import ReferenceAttention
from quire.attention.spec import AttentionSpec
from quire.cache.arena import Arena
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.sums import SumsCodec
from quire.cache.ledger import MAX_ARENA_BYTES, PAGE_TOKENS, PageLedger
from quire.cache.retention.retainer import SUMS_ROWS
from quire.cache.table import ChunkTable
from quire.config import Backend, EngineConfig, format_bytes
from quire.engine.calibration import Calibration
from quire.engine.control_plane import formats_of, namespace_of, retention_of, scheduler_of, sealed_pages
from quire.engine.engine import Engine
from quire.engine.layers import attention_layers
from quire.engine.machine import available_memory, device_type_of, usable_cores
from quire.engine.offloaded_cache import build_offloaded_cache, in_micro_batches, offload_counters
from quire.engine.offloading import (
    cache_bytes,
    check_disk_room,
    load_beside_device,
    load_with_offload,
    memory_of,
    with_offload,
)
from quire.engine.policy import check_budget
from quire.engine.runner import DecodeFunction, LocalRunner
from quire.engine.sampler import Sampler
from quire.engine.sizes import ArenaPages, EngineSizes, sizes
from quire.errors import ConfigError
from quire.kernels import runtime
from quire.kernels.memory import populate_ahead
from quire.models.decoder import build_model
from quire.models.layers import TorchOps, torch_dtype
from quire.models.loading import group_tensors, loaded_kind
from quire.models.plan import Model
from quire.models.quants import GROUP_CODES
from quire.models.shape import ModelShape
from quire.models.structural_tokens import find_structural_tokens
from quire.models.tokenizer import Tokenizer
from quire.models.weights import Checkpoint
from quire.stores.tiers import Tiers
from quire.structured.grammar_compiler import GrammarCompiler

if TYPE_CHECKING:
    from quire.models.cpu_ops import CpuOps
    from quire.models.layers import Ops
    from quire.models.triton_ops import TritonOps
    from quire.offload.table import OffloadedTable

log = logging.getLogger("quire")

AUTO_MEMORY_SHARE = 0.5
"""An automatic cache takes this share of the memory that the weights leave on a CPU, where other processes need memory
too; 0.9 on a GPU."""

TOKEN_BUDGET = {"cpu": 1024, "cuda": 8192}
"""Rows of a step: SmolLM2's prefill on two cores is as fast at 1,024 rows as at 4,096, and a decode step beside it
waits 0.25 s at most."""

AHEAD_BYTES = 512 << 20
"""Bytes of a new arena that are backed by memory ahead of their use if there are tiers: fetched chunks arrive faster
than a virtual machine's host finds new memory (4 ms for 2 MiB here, 0.5 GB/s)."""

LEAST_CHUNKS = 2
"""Sealed chunks that an arena must hold beside an open one."""


def resolve(
    config: EngineConfig,
    shape: ModelShape,
    checkpoint: Checkpoint | None = None,
    calibration: Calibration | None = None,
) -> tuple[EngineConfig, EngineSizes]:
    """Returns the configuration with its automatic values resolved, and what fits under it. Raises ConfigError if the
    settings contradict each other, the model or the machine.

    checkpoint   the source of the weights: the size of model.weights native depends on how they are stored
    calibration  the calibration of a codec that needs one; None: sizes are the codec's nominal ones
    """
    device_type = device_type_of(config.runtime.device)
    backend = _backend_of(config, device_type)
    _check_tiers(config, device_type)
    dtype: Any = shape.dtype if config.model.dtype == "auto" else config.model.dtype
    limit = shape.context_limit
    if config.model.max_context is not None and config.model.max_context > limit:
        raise ConfigError(f"model.max_context is {config.model.max_context}; this model serves at most {limit}")
    context = config.model.max_context or shape.max_context
    weight_bytes = _weight_bytes(config, shape, checkpoint, backend, torch_dtype(dtype))
    available = available_memory(torch.device(device_type))
    wanted = config.cache.memory
    if config.offload.is_on:
        config, weight_bytes = with_offload(config, backend, weight_bytes, available)
    max_running, free = config.scheduler.max_running, max(0, available - weight_bytes)
    pages = arena_pages(config, shape, torch_dtype(dtype), calibration, backend)
    offloaded = cache_bytes(config, context, *pages.sizes) if config.offload.is_on else None
    if config.cache.sparse_values < 1:
        _check_sparse_values(config.cache.sparse_values, backend, offloaded is not None)
    if offloaded is not None:
        memory = offloaded[0]
    elif isinstance(wanted, int):
        memory = wanted
        if memory > MAX_ARENA_BYTES:
            raise ConfigError(
                f"cache.memory is {format_bytes(memory)}; a cache holds at most {format_bytes(MAX_ARENA_BYTES)}"
            )
    else:
        share = AUTO_MEMORY_SHARE if device_type == "cpu" else 0.9
        useful = max_running * (-(-context // PAGE_TOKENS) * pages.chunk_bytes + pages.open_bytes)
        memory = min(int(free * share), useful, MAX_ARENA_BYTES)
    arena = pages.arena(memory)
    fits = sizes(arena, model_context=context, weight_bytes=weight_bytes, available_bytes=available)
    if fits.num_chunks < LEAST_CHUNKS:
        name = "cache.memory" if offloaded is None else "offload.cache"
        given = wanted if isinstance(wanted, int) and offloaded is None else memory
        raise ConfigError(
            f"{name} of {format_bytes(given)}"
            f" holds {fits.num_chunks} chunk{'s' * (fits.num_chunks != 1)} of {PAGE_TOKENS} tokens"
            f" ({format_bytes(pages.chunk_bytes)} each); set it to at least {pages.enough_for(LEAST_CHUNKS, memory)}"
        )
    memory = arena.num_bytes
    if offloaded is not None:
        if backend == "cpu":
            check_disk_room(memory, pages.chunk_bytes, offloaded[1])
        memory = wanted if isinstance(wanted, int) else memory_of(config, offloaded[1], int(free * AUTO_MEMORY_SHARE))
        if memory >= arena.num_bytes:
            log.info("cache.memory holds all of offload.cache: the cache is in memory")
        memory = min(memory, arena.num_bytes)
        fits = dataclasses.replace(fits, disk_bytes=arena.num_bytes - memory)
    budget = token_budget(config, device_type)
    check_budget(budget, max_running)
    _check_retention(config, shape, backend, budget, fits.max_context)
    cores = usable_cores()
    if (config.runtime.threads or 0) > cores:
        log.warning("runtime.threads is %d and this process may use %d cores", config.runtime.threads, cores)
    resolved = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype=dtype, max_context=fits.max_context),
        cache=dataclasses.replace(config.cache, memory=memory),
        attention=dataclasses.replace(config.attention, backend=backend),
        scheduler=dataclasses.replace(config.scheduler, token_budget=budget),
        runtime=dataclasses.replace(config.runtime, device=device_type, threads=config.runtime.threads or cores),
    )
    return resolved, fits


def _backend_of(config: EngineConfig, device_type: str) -> Backend:
    """The attention backend. Raises ConfigError for one that does not run on the device."""
    backend = config.attention.backend
    if backend == "auto":
        backend = "triton" if device_type == "cuda" else "cpu"
    if (backend == "cpu") != (device_type == "cpu") and backend != "reference":
        raise ConfigError(
            f"attention.backend {backend} does not run on {device_type};"
            f" use {'cpu' if device_type == 'cpu' else 'triton'}"
        )
    return backend


def _check_tiers(config: EngineConfig, device_type: str) -> None:
    if config.tiers.memory is not None and device_type == "cpu":
        raise ConfigError(
            "tiers.memory is memory beside a GPU's, but the cache is in memory already; raise cache.memory instead"
        )
    if config.tiers.is_on and not config.cache.share:
        raise ConfigError("tiers keep cached prefixes, but cache.share is false; set it true, or leave tiers.disk out")


def _weight_bytes(
    config: EngineConfig, shape: ModelShape, checkpoint: Checkpoint | None, backend: str, dtype: torch.dtype
) -> int:
    """Bytes of the weights in memory. Raises ConfigError for a type of weights that the backend does not have."""
    kinds = ops_type(backend).kinds
    if config.model.weights == "g4" and GROUP_CODES not in kinds:
        raise ConfigError(f"model.weights g4 does not run on {backend}; use dequantized")
    if checkpoint is None:
        num_bytes = shape.weight_bytes(str(dtype).removeprefix("torch."))
    else:
        num_bytes = sum(part.num_bytes for part in group_tensors(checkpoint, dtype, config.model.weights, kinds))
    if backend == "cpu" and shape.tied_embeddings:
        from quire.models.cpu_ops import has_onednn

        embedded = None
        if checkpoint is not None:
            size, stored = shape.tensor_shapes["embed.weight"], checkpoint.kind("embed.weight")
            embedded = loaded_kind("embed.weight", size, stored, config.model.weights, kinds)
        if embedded is None and has_onednn(dtype):
            num_bytes += math.prod(shape.tensor_shapes["embed.weight"]) * dtype.itemsize
    return num_bytes


def arena_pages(
    config: EngineConfig, shape: ModelShape, dtype: torch.dtype, calibration: Calibration | None, backend: str
) -> ArenaPages:
    """The page sizes of the cache. Raises ConfigError as `sealed_pages` does.

    calibration  the calibration of a codec that needs one; None: sizes are the codec's nominal ones
    """
    layers_heads = shape.num_layers, shape.num_kv_heads
    sealed, sinks = sealed_pages(config, shape, dtype, calibration, backend)
    open_ = np.full(layers_heads, DenseCodec(shape.head_dim, dtype).page_bytes, np.int32)
    # Column sums have rows of their own.
    num_sums = (SUMS_ROWS + (sealed is not None)) * math.prod(layers_heads) if config.retain.is_on else 0
    return ArenaPages(
        open_,
        None if sealed is None else np.broadcast_to(np.asarray(sealed, np.int32), layers_heads),
        0 if sinks is None else sinks.sidecar_bytes,
        {SumsCodec.page_bytes: num_sums} if num_sums else {},
    )


def token_budget(config: EngineConfig, device_type: str) -> int:
    """Most rows of a step. If it is automatic, a full batch leaves prefill room for a chunk, and for the rows that
    retention profiles together.
    """
    limits = config.scheduler
    least = limits.max_running + PAGE_TOKENS + (config.retain.profile_rows if config.retain.is_on else 0)
    return limits.token_budget or max(TOKEN_BUDGET[device_type], least)


def load_model(checkpoint: Checkpoint, config: EngineConfig) -> Model:
    """Loads the model with its weights packed for the backend. Also sets the kernels' threads. config is resolved."""
    device = torch.device(config.runtime.device)
    if device.type == "cpu":
        assert config.runtime.threads is not None
        runtime.set_level(config.runtime.level)
        runtime.set_num_threads(config.runtime.threads)
    dtype, form = torch_dtype(config.model.dtype), config.model.weights

    def build(ops: Ops) -> Model:
        return build_model(checkpoint.shape, checkpoint, ops, dtype, device, form)

    if config.offload.is_on and device.type == "cuda":
        return load_beside_device(checkpoint, config, ops_type("triton").kinds, build)
    if config.attention.backend != "cpu":
        return build(ops_type(config.attention.backend)())
    from quire.models import images
    from quire.models.cpu_ops import CpuOps

    if config.offload.is_on:
        return load_with_offload(checkpoint, config, build)
    return images.load(images.engine_image_spec(checkpoint, config), lambda memory: build(CpuOps(memory)))


def assemble(
    model: Model,
    tokenizer: Tokenizer,
    config: EngineConfig,
    fits: EngineSizes,
    model_id: str = "",
    calibration: Calibration | None = None,
    tiers: Tiers | None = None,
) -> Engine:
    """The engine around a model: arena, table, manager, attention, scheduler, sampler.

    model_id     the checkpoint's fingerprint
    calibration  the calibration of the codec, if it needs one
    tiers        stores of the cache; None: there are none
    """
    shape = model.shape
    device = torch.device(config.runtime.device)
    dtype, far = torch_dtype(config.model.dtype), None
    formats = formats_of(config, shape, calibration, model.key_bias)
    table: ChunkTable | OffloadedTable
    if fits.disk_bytes:
        table, far = build_offloaded_cache(model, config, fits, formats)
    else:
        ledger, heads = PageLedger(fits.cache_bytes, fits.arena.slab_bytes), (shape.num_layers, shape.num_kv_heads)
        arena, (codecs, sinks, sums) = Arena(ledger.num_bytes, device), formats
        table = ChunkTable(ledger, *heads, *codecs, sinks=sinks, sums=sums, arena=arena)
    if tiers is not None and device.type == "cpu":
        populate_ahead(table.arena.data, AHEAD_BYTES)
    layers, rotations = attention_layers(shape, fits.max_context, device)
    spec = AttentionSpec(table, layers, dtype, rotations, config.cache.strict, config.cache.sparse_values)
    eos = end_tokens(shape, tokenizer)
    attention, padded_rows = _attention(config, spec), _padded_rows(config)
    if config.offload.is_on:
        attention = in_micro_batches(attention, config, far, padded_rows)
    scheduler = scheduler_of(config, table, retention_of(config, lambda: find_structural_tokens(tokenizer)), tiers)
    runner = LocalRunner(
        model,
        attention,
        Sampler(shape.vocab_size, device, eos),
        device,
        # A layer that is loaded while others are computed cannot be in a graph.
        decode=None if config.offload.is_on else _decode(model, attention, device),
        decide=None if scheduler.manager.retainer is None else scheduler.manager.retainer.choose,
        padded_rows=padded_rows,
    )
    return Engine(
        runner,
        tokenizer,
        scheduler,
        max_context=fits.max_context,
        eos_token_ids=eos,
        namespace=namespace_of(config, shape, model_id, calibration),
        tiers=tiers,
        offloaded=offload_counters(model, far) if config.offload.is_on else None,
        context_limit=_context_limit(fits, shape),
        grammars=_grammars(tokenizer, shape, eos, device),
    )


def _grammars(tokenizer: Tokenizer, shape: ModelShape, eos: tuple[int, ...], device: torch.device) -> GrammarCompiler:
    is_cpu = device.type == "cpu"
    threads = runtime.num_threads() if is_cpu else usable_cores()
    return GrammarCompiler(tokenizer, shape.vocab_size, eos, num_threads=threads, begins_early=not is_cpu)


def end_tokens(shape: ModelShape, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer."""
    return tuple(dict.fromkeys((*shape.eos_token_ids, *tokenizer.eos_ids)))


def _context_limit(fits: EngineSizes, shape: ModelShape) -> str:
    """The setting or limit that determines max_context, for error messages."""
    if fits.max_context < fits.model_context:
        return "what fits offload.cache" if fits.disk_bytes else "what fits cache.memory"
    return "what the model was made for" if fits.model_context == shape.max_context else "model.max_context"


def _check_sparse_values(share: float, backend: str, is_on_disk: bool) -> None:
    """Raises ConfigError if sparse values do not work with the backend or an offloaded cache (`is_on_disk`)."""
    if backend == "triton":
        raise ConfigError(
            f"cache.sparse_values is {share:g}, but attention.backend triton reads all values; use attention.backend"
            " reference, or set it to 1"
        )
    if is_on_disk:
        raise ConfigError(
            f"cache.sparse_values is {share:g}, but a cache on the disk (offload.cache) is read in whole pages, which"
            " saves nothing; set it to 1"
        )


def _check_retention(config: EngineConfig, shape: ModelShape, backend: str, token_budget: int, context: int) -> None:
    """Raises ConfigError if retention does not work with the model or the other settings."""
    retain = config.retain
    if not retain.is_on:
        return
    chained = retain.threshold != "off"
    if chained and config.cache.num_sinks and retain.members[0] != "special":
        raise ConfigError(
            f"retain.chain begins with {retain.members[0]}; with cache.sink_tokens it must begin with special, which"
            " holds them"
        )
    if (window := shape.least_window(context)) < context:
        raise ConfigError(
            f"layers of this model see {window} tokens back, which drops more than retention could;"
            f" retain nothing, or set model.max_context to {window}"
        )
    least = config.scheduler.max_running + retain.profile_rows + PAGE_TOKENS
    if token_budget < least:
        raise ConfigError(
            f"scheduler.token_budget is {token_budget}; with scheduler.max_running {config.scheduler.max_running} and"
            f" retain.profile_rows {retain.profile_rows} it must be at least {least}, or the rows that are profiled"
            " together find no room beside a full batch"
        )


def ops_type(backend: str) -> type[CpuOps] | type[TritonOps] | type[TorchOps]:
    """The class of a backend's operations."""
    if backend == "cpu":
        from quire.models.cpu_ops import CpuOps

        return CpuOps
    if backend == "triton":
        from quire.models.triton_ops import TritonOps

        return TritonOps
    return TorchOps


def _decode(model: Model, attention: AttentionBackend, device: torch.device) -> DecodeFunction | None:
    if device.type != "cuda" or isinstance(attention, ReferenceAttention):
        return None
    from quire.attention.triton import TritonAttention
    from quire.engine.graphs import DecodeGraphs

    assert isinstance(attention, TritonAttention)
    return DecodeGraphs(model, attention, attention.batch_sizes).replay


def _padded_rows(config: EngineConfig) -> Callable[[int], int]:
    if config.attention.backend == "cpu":
        from quire.models.cpu_ops import has_onednn, padded_rows

        if has_onednn(torch_dtype(config.model.dtype)):
            return padded_rows
    return lambda rows: rows


def _attention(config: EngineConfig, spec: AttentionSpec) -> AttentionBackend:
    if config.attention.backend == "cpu":
        from quire.attention.cpu import CpuAttention

        return CpuAttention(spec)
    if config.attention.backend == "triton":
        from quire.attention.triton import TritonAttention

        return TritonAttention(spec)
    return ReferenceAttention(spec)
