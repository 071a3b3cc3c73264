"""From a model's name and a configuration to an engine that runs: resolves every automatic value and says what it
chose.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.attention.plan import AttentionBackend, AttentionSpec
from quire.attention.reference import ReferenceAttention
from quire.cache.codecs.dense import DenseCodec
from quire.cache.manager import CacheManager
from quire.cache.namespace import Namespace
from quire.cache.page import MAX_ARENA_BYTES, PAGE_TOKENS, PagePool
from quire.cache.segment import ChunkTable
from quire.cache.sizes import Sizes, sizes
from quire.cache.tree import PrefixTree
from quire.config import EngineConfig, format_bytes
from quire.engine.engine import Decode, Engine
from quire.engine.machine import available_memory, usable_cores
from quire.engine.pins import read_lines
from quire.engine.sampler import Sampler
from quire.engine.scheduler import Scheduler, check_budget
from quire.errors import ConfigError
from quire.kernels import runtime
from quire.models.decoder import build_model
from quire.models.fingerprint import fingerprint
from quire.models.layers import Ops, torch_dtype
from quire.models.loading import FourBit, native_bytes
from quire.models.plan import Model
from quire.models.resolve import resolve_model
from quire.models.shape import ModelShape
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.models.weights import Checkpoint, open_model
from quire.tiers.mover import Mover
from quire.tiers.tier import ArenaTier

log = logging.getLogger("quire")

AUTO_MEMORY_SHARE = 0.5
"""Share of the memory free beside the weights that an automatic cache takes on a CPU, where others want memory too; 0.9
on a GPU."""

TOKEN_BUDGET = {"cpu": 1024, "cuda": 8192}
"""Rows of a step: SmolLM2's prefill on two cores is as fast at 1,024 rows as at 4,096, and a decode step beside it
waits 0.25 s at most."""

_SLAB_BYTES = 4 << 20


@dataclass(frozen=True)
class Loaded:
    """An engine with what its callers need beside it. config has no automatic values left."""

    engine: Engine
    tokenizer: Tokenizer
    shape: ModelShape
    sizes: Sizes
    config: EngineConfig
    model_name: str


def resolve(
    config: EngineConfig, shape: ModelShape, checkpoint: Checkpoint | None = None
) -> tuple[EngineConfig, Sizes]:
    """The configuration without automatic values, and what fits under it. Raises ConfigError for what cannot be.

    checkpoint  where the weights come from: what model.weights native holds depends on how they are stored
    """
    device_type = config.runtime.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    elif device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("runtime.device is cuda, but torch sees no GPU here; use cpu")
    device = torch.device(device_type)
    backend = config.attention.backend
    if backend == "auto":
        backend = "triton" if device_type == "cuda" else "cpu"
    if (backend == "cpu") != (device_type == "cpu") and backend != "reference":
        raise ConfigError(
            f"attention.backend {backend} does not run on {device_type};"
            f" use {'cpu' if device_type == 'cpu' else 'triton'}"
        )
    dtype: Any = shape.dtype if config.model.dtype == "auto" else config.model.dtype
    if config.model.weights == "native" and (backend != "cpu" or dtype == "float16"):
        raise ConfigError(
            f"model.weights native runs on the cpu backend in bfloat16 or float32, not on {backend} in {dtype};"
            " use model.weights dequantized"
        )
    limit = shape.context_limit
    if config.model.max_context is not None and config.model.max_context > limit:
        raise ConfigError(f"model.max_context is {config.model.max_context}; this model serves at most {limit}")
    context = config.model.max_context or shape.max_context
    max_running = config.scheduler.max_running
    weight_bytes = shape.weight_bytes(dtype)
    if config.model.weights == "native" and checkpoint is not None:
        weight_bytes = native_bytes(checkpoint, torch_dtype(dtype))
    if backend == "cpu" and shape.tied_embeddings:
        from quire.models.cpu_ops import packs_apart

        if packs_apart(torch_dtype(dtype)):
            weight_bytes += math.prod(shape.tensor_shapes["embed.weight"]) * torch_dtype(dtype).itemsize
    available = available_memory(device)
    wanted = config.cache.memory
    codec = DenseCodec(shape.head_dim, torch_dtype(dtype))
    chunk_bytes = codec.page_bytes * shape.num_layers * shape.num_kv_heads
    if isinstance(wanted, int):
        memory = wanted
        if memory > MAX_ARENA_BYTES:
            raise ConfigError(
                f"cache.memory is {format_bytes(memory)}; an arena holds at most {format_bytes(MAX_ARENA_BYTES)}"
            )
    else:
        share = AUTO_MEMORY_SHARE if device_type == "cpu" else 0.9
        useful = max_running * -(-context // PAGE_TOKENS) * chunk_bytes
        memory = min(int(max(0, available - weight_bytes) * share), useful, MAX_ARENA_BYTES)
    # Whole slabs of whole pages: what the arena cannot use is not allocated.
    slab = slab_bytes(codec.page_bytes, memory)
    memory = memory // slab * slab
    fits = sizes(
        chunk_bytes=chunk_bytes,
        model_context=context,
        weight_bytes=weight_bytes,
        cache_bytes=memory,
        available_bytes=available,
    )
    if fits.num_chunks < 2:
        raise ConfigError(
            f"cache.memory of {format_bytes(wanted if isinstance(wanted, int) else memory)}"
            f" holds {fits.num_chunks} chunks of {PAGE_TOKENS} tokens"
            f" ({format_bytes(chunk_bytes)} each);"
            f" set it to at least {format_bytes(2 * chunk_bytes)}"
        )
    budget = config.scheduler.token_budget or max(TOKEN_BUDGET[device_type], max_running + PAGE_TOKENS)
    check_budget(budget, max_running)
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


def slab_bytes(page_bytes: int, memory: int) -> int:
    """Bytes of a slab: whole pages, about 4 MiB, and at most a 16th of the arena."""
    pages = max(1, min(_SLAB_BYTES, memory // 16) // page_bytes)
    return pages * page_bytes


def load_engine(model: str, config: EngineConfig, *, show_progress: bool | None = None) -> Loaded:
    """Loads the model and allocates the cache. Raises ModelError or ConfigError, one line that says what is wrong."""
    if config.cache.pin is not None:
        read_lines(Path(config.cache.pin))
    path = resolve_model(model, show_progress)
    with open_model(path) as checkpoint:
        resolved, fits = resolve(config, checkpoint.shape, checkpoint)
        if not fits.fit_the_machine:
            raise ConfigError(fits.fails_first)
        device = torch.device(resolved.runtime.device)
        if device.type == "cpu":
            assert resolved.runtime.threads is not None
            runtime.set_num_threads(resolved.runtime.threads)
        dtype = torch_dtype(resolved.model.dtype)
        engine_model = build_model(checkpoint.shape, checkpoint, _ops(resolved), dtype, device, _four_bit(resolved))
        shape = checkpoint.shape
    tokenizer = load_tokenizer(path, resolved.model.tokenizer, resolved.model.chat_template)
    name = resolved.model.name or model
    log.info(
        "%s: %s weights in %s, cache %s for %d tokens, context %d, %s attention on %s",
        name,
        format_bytes(fits.weight_bytes),
        resolved.model.dtype,
        format_bytes(fits.cache_bytes),
        fits.tokens,
        fits.max_context,
        resolved.attention.backend,
        device.type,
    )
    engine = assemble(engine_model, tokenizer, resolved, fits, fingerprint(path))
    return Loaded(engine, tokenizer, shape, fits, resolved, name)


def assemble(model: Model, tokenizer: Tokenizer, config: EngineConfig, fits: Sizes, model_id: str = "") -> Engine:
    """The engine around a model: pool, table, manager, attention, scheduler, sampler.

    model_id  the checkpoint's fingerprint
    """
    shape = model.shape
    device = torch.device(config.runtime.device)
    dtype = torch_dtype(config.model.dtype)
    codec = DenseCodec(shape.head_dim, dtype)
    pool = PagePool(fits.cache_bytes, device, slab_bytes(codec.page_bytes, fits.cache_bytes))
    table = ChunkTable(pool, shape.num_layers, shape.num_kv_heads, codec)
    cos = sin = None
    if shape.rope is not None:
        cos, sin = (torch.from_numpy(part).to(device) for part in shape.rope.tables(fits.max_context))
    spec = AttentionSpec(
        table,
        shape.num_layers,
        shape.num_kv_heads,
        shape.num_q_heads // shape.num_kv_heads,
        shape.head_dim,
        dtype,
        cos,
        sin,
        # A window that no request outgrows is none.
        shape.sliding_window if (shape.sliding_window or 0) < fits.max_context else None,
    )
    eos = tuple(dict.fromkeys((*shape.eos_token_ids, *tokenizer.eos_ids)))
    assert config.scheduler.token_budget is not None
    attention = _attention(config, spec)
    return Engine(
        model,
        tokenizer,
        attention,
        Scheduler(
            CacheManager(
                table,
                PrefixTree((shape.num_layers, shape.num_kv_heads)) if config.cache.share else None,
                config.cache.lifetime,
            ),
            config.scheduler.token_budget,
            config.scheduler.max_running,
            config.scheduler.max_queue,
        ),
        Sampler(shape.vocab_size, device, eos),
        Mover(ArenaTier(pool)),
        max_context=fits.max_context,
        eos_token_ids=eos,
        device=device,
        namespace=Namespace(
            model=model_id,
            dtype=config.model.dtype,
            weights=config.model.weights,
            codec=codec.name,
            strict=config.cache.strict,
            rope=repr(shape.rope),
        ),
        decode=_decode(model, attention, device),
        padded_rows=_padded_rows(config),
    )


def _ops(config: EngineConfig) -> Ops:
    if config.attention.backend == "cpu":
        from quire.models.cpu_ops import CpuOps

        return CpuOps()
    if config.attention.backend == "triton":
        from quire.models.triton_ops import TritonOps

        return TritonOps()
    from quire.models.layers import TorchOps

    return TorchOps()


def _decode(model: Model, attention: AttentionBackend, device: torch.device) -> Decode | None:
    if device.type != "cuda" or isinstance(attention, ReferenceAttention):
        return None
    from quire.attention.triton import TritonAttention
    from quire.engine.graphs import DecodeGraphs

    assert isinstance(attention, TritonAttention)
    return DecodeGraphs(model, attention, attention.batch_sizes).replay


def _padded_rows(config: EngineConfig) -> Callable[[int], int]:
    if config.attention.backend == "cpu":
        from quire.models.cpu_ops import has_panels, padded_rows

        if not has_panels(torch_dtype(config.model.dtype)):
            return padded_rows
    return lambda rows: rows


def _four_bit(config: EngineConfig) -> FourBit | None:
    if config.model.weights == "dequantized":
        return None
    from quire.models.cpu_ops import FourBitLinear

    return functools.partial(FourBitLinear, dtype=torch_dtype(config.model.dtype))


def _attention(config: EngineConfig, spec: AttentionSpec) -> AttentionBackend:
    if config.attention.backend == "cpu":
        from quire.attention.cpu import CpuAttention

        return CpuAttention(spec)
    if config.attention.backend == "triton":
        from quire.attention.triton import TritonAttention

        return TritonAttention(spec)
    return ReferenceAttention(spec)
