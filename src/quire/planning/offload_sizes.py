"""The numbers of a model and its cache for the planner of offloading, from a checkpoint's headers or a config.json."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.cache.codecs import CODECS
from quire.cache.ledger import PAGE_TOKENS
from quire.config import EngineConfig
from quire.engine.build import TOKEN_BUDGET
from quire.engine.control_plane import sealed_pages
from quire.engine.machine import device_type_of, processor_name, usable_cores
from quire.engine.sizes import page_counts
from quire.kernels import runtime
from quire.models.families import shape_from_config
from quire.models.files import read_json
from quire.models.layers import torch_dtype
from quire.models.loading import loaded_kind
from quire.models.quants import BLOCK_KINDS, loaded_row_bytes
from quire.models.resolve import resolve_model
from quire.models.shape import ITEM_BYTES
from quire.models.weights import open_model
from quire.offload.profile import Conditions, numbers_of
from quire.offload.sizes import matrices_of, sizes_of

if TYPE_CHECKING:
    from quire.models.shape import ModelShape
    from quire.offload.costs import Sizes, Workload


def sizes_from(
    model: str, config: EngineConfig, workload: Workload, *, on_gpu: bool = False
) -> tuple[ModelShape, Sizes]:
    """The shape of a model, and its numbers with the configuration's weights and codec.

    model  a folder, a .gguf file, a hub id, `smollm2`, or a config.json without weights
    """
    path = Path(model)
    if path.suffix == ".json":
        shape = shape_from_config(read_json(path, required=True), {})
        kinds = dict.fromkeys(shape.tensor_shapes, "BF16")
    else:
        with open_model(resolve_model(model)) as checkpoint:
            shape = checkpoint.shape
            kinds = {name: checkpoint.kind(name) for name in shape.tensor_shapes}
    dtype = _dtype(shape, config)

    def tensor_bytes(name: str, size: tuple[int, ...]) -> float:
        kind = loaded_kind(name, size, kinds[name], config.model.weights, BLOCK_KINDS)
        return float(math.prod(size) * ITEM_BYTES[dtype] if kind is None else size[0] * loaded_row_bytes(kind, size[1]))

    pages, _ = sealed_pages(config, shape, torch_dtype(dtype), None, "triton" if has_device(config) else "cpu")
    per_token, of_open = 2.0 * shape.kv_size * ITEM_BYTES[dtype], 0.0
    if pages is not None:
        of_open = per_token
        chunk = page_counts(pages, shape.num_layers, shape.num_kv_heads)
        per_token = sum(size * count for size, count in chunk.items()) / shape.num_layers / PAGE_TOKENS
    sizes = sizes_of(shape, dtype, tensor_bytes, per_token, workload, gates_inside=not on_gpu)

    def kind_of(name: str) -> str | None:
        return loaded_kind(name, shape.tensor_shapes[name], kinds[name], config.model.weights, BLOCK_KINDS)

    matrices = matrices_of(shape, tensor_bytes, kind_of)
    window = float(shape.sliding_window or math.inf)
    return shape, dataclasses.replace(sizes, open_cache_bytes=of_open, matrices=matrices, window=window)


def conditions_of(model: str, shape: ModelShape, config: EngineConfig, sizes: Sizes) -> Conditions:
    """What a profile of this machine is made for. Sets the configuration's level of kernels."""
    runtime.set_level(config.runtime.level)
    return Conditions(
        model=model,
        shape=numbers_of(shape),
        dtype=_dtype(shape, config),
        weights=config.model.weights,
        layer_bytes=sizes.layer_bytes,
        codec=config.cache.codec,
        processor=processor_name(),
        threads=config.runtime.threads or usable_cores(),
        kernels=runtime.level(),
        disk_bandwidth=None if config.offload.disk_bandwidth is None else float(config.offload.disk_bandwidth),
        device=torch.cuda.get_device_name() if has_device(config) else "",
    )


def has_device(config: EngineConfig) -> bool:
    """Whether a GPU computes."""
    return device_type_of(config.runtime.device) == "cuda"


def token_budget_of(config: EngineConfig) -> int:
    """Most rows of a step."""
    least = config.scheduler.max_running + PAGE_TOKENS
    return config.scheduler.token_budget or max(TOKEN_BUDGET[device_type_of(config.runtime.device)], least)


def remedies(config: EngineConfig) -> str:
    """Settings that need less memory than these, as the end of an error; empty if there are none."""
    words = ["--model.weights g4"] * (config.model.weights != "g4")
    words += ["--cache.codec g4"] * (not CODECS[config.cache.codec].place)
    return f"; {' and '.join(words)} need{'s' * (len(words) == 1)} less" if words else ""


def keeps_cache(config: EngineConfig) -> bool:
    """Whether a plan keeps the cache where it is computed. With retention the engine can move it, but no profile has
    its speed.
    """
    return config.retain.is_on or config.tiers.is_on or config.cache.sparse_values < 1


def _dtype(shape: ModelShape, config: EngineConfig) -> str:
    return shape.dtype if config.model.dtype == "auto" else config.model.dtype
