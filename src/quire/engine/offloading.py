"""Offloading as a configuration wants it: how much memory the weights get, and the model that runs with it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import shutil
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from quire.cache.ledger import PAGE_TOKENS
from quire.config import Backend, EngineConfig, OffloadConfig, format_bytes
from quire.engine.machine import available_memory
from quire.errors import ConfigError
from quire.models.layers import torch_dtype
from quire.offload.policy import read_policy
from quire.offload.units import TIERS, Share, Split

if TYPE_CHECKING:
    from quire.models.layers import Ops
    from quire.models.plan import Model
    from quire.models.weights import Checkpoint
    from quire.offload.memory_plan import MemoryRequirements
    from quire.offload.model import OffloadedModel
    from quire.offload.mover import Mover
    from quire.offload.policy import OffloadPolicy
    from quire.offload.weight_placement import WeightPlacement

log = logging.getLogger("quire")

MICRO_BATCH = 8
"""Without a policy, buffers are sized for micro-batches of this many sequences, if memory suffices."""

NEAR = Share(0.1)
"""Without a policy and cache.memory, there are frames for this share of the longest sequences' chunks."""

OFFLOAD_CACHE_SHARE, OFFLOAD_SPARE = 0.25, 0.1
"""Shares of the free memory that offload.mode auto leaves for an automatic cache, and for everything else."""


def with_offload(config: EngineConfig, backend: Backend, weight_bytes: int, available: int) -> tuple[EngineConfig, int]:
    """The configuration with offload.memory, and the bytes of weights that stay in memory. Raises ConfigError."""
    config = dataclasses.replace(config, attention=dataclasses.replace(config.attention, backend=backend))
    offload = config.offload
    if backend == "reference":
        raise ConfigError(f"offload.mode {offload.mode} needs attention.backend cpu or triton, not reference")
    if backend == "cpu" and not config.model.images:
        raise ConfigError("offload.mode reads weights from a layer image; set model.images true")
    if offload.profile is not None:
        raise ConfigError("offload.profile plans the lines of quire generate --input, and nothing else; leave it out")
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


def policy_of(config: EngineConfig) -> OffloadPolicy | None:
    """The policy of offload.mode's file; None without one. attention.backend is resolved. Raises ConfigError."""
    mode = config.offload.mode
    if mode in ("off", "auto"):
        return None
    if config.attention.backend != "triton":
        policy = read_policy(Path(mode), TIERS[1:])
        if policy.attended > 0:
            raise ConfigError(f"offload.mode {mode}: attended is for a GPU; here all attention is on the CPU")
        return policy
    policy = read_policy(Path(mode), TIERS)
    if policy.cache.beyond(1) + policy.hidden.beyond(1) > 0:
        raise ConfigError(
            f"offload.mode {mode}: beside a GPU only weights are on the disk; give gpu and cpu all shares of cache and"
            " hidden"
        )
    return policy


def memory_of(config: EngineConfig, needs: MemoryRequirements, free: int) -> int:
    """Default bytes of memory for a cache on the disk: as the policy says. Without a policy, a tenth of the longest
    sequences' chunks, and at most `free` bytes if these are enough to start.
    """
    policy = policy_of(config)
    if policy is not None:
        return needs.with_near(policy.cache.shares[0])
    return max(needs.min_bytes, min(needs.with_near(NEAR), free))


def cache_bytes(
    config: EngineConfig, context: int, sealed: NDArray[np.int32], open_: NDArray[np.int32] | None
) -> tuple[int, MemoryRequirements] | None:
    """Bytes of a cache on the disk, and its requirements of memory; None if the cache is in memory.

    context  tokens of the longest request
    sealed   bytes of the pages of a sealed chunk, [L, H]
    open_    the same for an open chunk, if it has another codec
    Raises ConfigError.
    """
    from quire.offload.memory_plan import FrameLayout, MemoryRequirements

    room, policy = config.offload.cache, policy_of(config)
    max_chunks, running = -(-context // PAGE_TOKENS), config.scheduler.max_running
    if room is None and policy is not None and policy.cache.beyond(0) > 0:
        # Admission reserves a chunk of growth for every sequence; one more, because slabs are whole. Besides its sealed
        # chunks a sequence has an open one, and two in a step that fills one.
        room = running * ((max_chunks + 2) * int(sealed.sum()) + (0 if open_ is None else 2 * int(open_.sum())))
    if room is None:
        return None
    source = "offload.cache" if config.offload.cache is not None else f"the policy {config.offload.mode}"
    if config.retain.is_on and config.attention.backend != "cpu":
        raise ConfigError(
            f"with retention a cache that leaves memory ({source}) is for a CPU; beside a GPU leave one of the two out"
        )
    if config.tiers.is_on:
        raise ConfigError(f"a cache that leaves memory ({source}) has no other tiers; leave tiers.disk out")
    micro_batch = config.offload.micro_batch or (min(MICRO_BATCH, running) if policy is None else policy.micro_batch)
    extents = FrameLayout(sealed), None if open_ is None else FrameLayout(open_)
    return room, MemoryRequirements(*extents, running, max_chunks, min(micro_batch, running), packs=config.retain.is_on)


def check_disk_room(num_bytes: int, chunk_bytes: int, needs: MemoryRequirements) -> None:
    """Raises ConfigError if a cache of `num_bytes` does not fit on the disk. chunk_bytes: bytes of a sealed chunk."""
    from quire.models.image_folder import image_folder

    folder = image_folder()
    while not folder.exists():
        folder = folder.parent
    free, wanted = shutil.disk_usage(folder).free, num_bytes // chunk_bytes * needs.sealed.num_bytes
    if wanted > free:
        raise ConfigError(
            f"the cache on the disk may take {format_bytes(wanted)}, and {folder} has {format_bytes(free)}; lower"
            " offload.cache, or scheduler.max_running and model.max_context where a policy decides"
        )


def load_with_offload(checkpoint: Checkpoint, config: EngineConfig, build: Callable[[Ops], Model]) -> Model:
    """Loads the model and places its weights as configured. Raises ConfigError."""
    from quire.models import images
    from quire.models.cpu_panels import KINDS
    from quire.offload.hidden import HiddenStates
    from quire.offload.model import load_offloaded

    offload, dtype = config.offload, torch_dtype(config.model.dtype)
    wanted, policy = images.full_image_spec(checkpoint, dtype, config.model.weights), policy_of(config)
    if policy is None:
        _within_memory(checkpoint, config, KINDS)  # refuses too little before the image is written
    with _image_errors():
        model = load_offloaded(
            wanted,
            build,
            memory=offload.memory,
            split=None if policy is None else policy.weights,
            outside=_outside(checkpoint, dtype),
            bandwidth=offload.disk_bandwidth,
            overlaps=offload.overlap,
        )
    if policy is not None and policy.hidden.beyond(0) > 0:
        model.states = HiddenStates(mover_of(model, "activations"), policy.hidden.beyond(0))
    return model


@contextlib.contextmanager
def _image_errors() -> Iterator[None]:
    """Converts an ImageError to a ConfigError."""
    from quire.models.image_folder import ImageError, image_folder

    try:
        yield
    except ImageError as error:
        raise ConfigError(
            f"offloading needs the model's layer image, in {image_folder()} (XDG_CACHE_HOME sets where): {error}"
        ) from error


def load_beside_device(
    checkpoint: Checkpoint, config: EngineConfig, kinds: Collection[str], build: Callable[[Ops], Model]
) -> OffloadedModel:
    """Loads the model with its weights on a GPU, in the host's memory and on the disk. kinds: the kinds of blocks that
    the GPU multiplies.

    Without a policy, only weights that do not fit into the host's memory stay on the disk. Raises ConfigError.
    """
    from quire.models.images import device_image_spec
    from quire.offload.device import DISK, load_on_device
    from quire.offload.hidden import HiddenStates, states_bytes
    from quire.offload.host import HostMemory

    policy, dtype, device = policy_of(config), torch_dtype(config.model.dtype), torch.device(config.runtime.device)
    split = _beside_device(checkpoint, config, kinds) if policy is None else policy.weights
    has_disk = split.shares[DISK] > 0
    if config.offload.disk_bandwidth is not None and policy is None and not has_disk:
        raise ConfigError("offload.disk_bandwidth has no effect: no weights are on the disk; leave it out")
    with _image_errors():
        model = load_on_device(
            build,
            split,
            device,
            wanted=device_image_spec(checkpoint, dtype, config.model.weights, kinds) if has_disk else None,
            bandwidth=config.offload.disk_bandwidth,
            overlaps=config.offload.overlap,
        )
    if policy is not None and policy.hidden.beyond(0) > 0:
        assert config.scheduler.token_budget is not None
        num_bytes = states_bytes(checkpoint.shape, dtype, config.scheduler.token_budget, policy.block)
        model.states = HiddenStates(HostMemory(num_bytes, device), policy.hidden.beyond(0), device)
    return model


def _beside_device(checkpoint: Checkpoint, config: EngineConfig, kinds: Collection[str]) -> Split:
    """The shares of GPU, host and disk that fill offload.memory on the GPU and the free memory of the host."""
    weights = _within_memory(checkpoint, config, kinds)
    near = weights.requested.shares[0]
    layer_bytes = sum(place.num_bytes for layer in weights.layers for place in layer)
    free = int(available_memory(torch.device("cpu")) * (1 - OFFLOAD_SPARE)) - (config.offload.cache or 0)
    far = min(1 - near, max(0, free) / layer_bytes)
    return Split((near, Share(far), Share(max(0.0, 1 - near - far))))


def _outside(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the matrices outside of layers, by name, as plain numbers."""
    shape = checkpoint.shape
    found = {
        name: math.prod(size) * dtype.itemsize
        for name, size in shape.tensor_shapes.items()
        if not name.startswith("layers.") and len(size) == 2
    }
    if shape.tied_embeddings:
        found["embed.weight"] *= 2  # the head is a copy in another layout
    return found


def mover_of(model: OffloadedModel, what: str) -> Mover:
    """A mover with its own file, for offloaded data other than weights. The model closes it. Raises ConfigError.

    what  name of the contents, for errors
    """
    from quire.offload.mover import Mover
    from quire.offload.stream import WeightStream

    assert model.folder is not None and isinstance(model.stream, WeightStream)
    try:
        mover = Mover(model.folder, model.stream.throttle, what)
    except OSError as error:
        raise ConfigError(f"no file for the {what} in {model.folder}: {error}") from error
    weakref.finalize(model, mover.close)
    return mover


def _within_memory(checkpoint: Checkpoint, config: EngineConfig, kinds: Collection[str]) -> WeightPlacement:
    """Places the weights to fill offload.memory, by the checkpoint's headers. kinds: kinds of blocks that stay packed.

    Raises ConfigError if the memory is too small.
    """
    from quire.models.image_folder import ImageEntry
    from quire.models.images import section_of
    from quire.models.loading import loaded_sizes
    from quire.offload.weight_placement import place_within_memory

    assert config.offload.memory is not None
    layers: list[list[ImageEntry]] = [[] for _ in range(checkpoint.shape.num_layers)]
    fixed: list[ImageEntry] = []
    sizes = loaded_sizes(checkpoint, torch_dtype(config.model.dtype), config.model.weights, kinds)
    for name, num_bytes in sizes.items():
        if len(checkpoint.shape.tensor_shapes[name]) == 2:
            section, place = section_of(name), ImageEntry(name, 0, num_bytes)
            (layers[int(section[7:])] if section.startswith("layers.") else fixed).append(place)
    return place_within_memory(layers, fixed, config.offload.memory)
