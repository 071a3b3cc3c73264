"""Offloading as a configuration wants it: how much memory the weights get, and the model that runs with it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineConfig, OffloadConfig, format_bytes
from quire.errors import ConfigError
from quire.models.layers import torch_dtype
from quire.offload.files import read_policy
from quire.offload.units import TIERS, Split

if TYPE_CHECKING:
    from quire.models.layers import Ops
    from quire.models.plan import Model
    from quire.models.weights import Checkpoint

log = logging.getLogger("quire")

OFFLOAD_CACHE_SHARE, OFFLOAD_SPARE = 0.25, 0.1
"""With offload.mode auto: shares of the free memory that are left for an automatic cache, and for everything else."""


def with_offload(config: EngineConfig, backend: str, weight_bytes: int, available: int) -> tuple[EngineConfig, int]:
    """The configuration with offload.memory, and the bytes of weights that stay in memory. Raises ConfigError."""
    offload = config.offload
    if backend != "cpu":
        raise ConfigError(f"offload.mode {offload.mode} needs attention.backend cpu, not {backend}")
    if not config.model.images:
        raise ConfigError("offload.mode reads weights from a layer image; set model.images true")
    if offload.mode != "auto":
        return config, int(weight_bytes * _split_of(config).shares[0])
    memory = offload.memory
    if memory is None:
        wanted = config.cache.memory
        cache = wanted if isinstance(wanted, int) else int(available * OFFLOAD_CACHE_SHARE)
        memory = max(0, int((available - cache) * (1 - OFFLOAD_SPARE)))
    if weight_bytes <= memory:
        log.info("offload.mode auto: all weights, %s, fit into memory", format_bytes(weight_bytes))
        return dataclasses.replace(config, offload=OffloadConfig()), weight_bytes
    return dataclasses.replace(config, offload=dataclasses.replace(offload, memory=memory)), memory


def load_with_offload(checkpoint: Checkpoint, config: EngineConfig, build: Callable[[Ops], Model]) -> Model:
    """The model, with its weights where the configuration wants them. Raises ConfigError."""
    from quire.models import images
    from quire.models.image_folder import ImageError
    from quire.offload.model import load_offloaded

    offload, dtype = config.offload, torch_dtype(config.model.dtype)
    wanted = images.whole_image_of(checkpoint, dtype, config.model.weights)
    split = None if offload.mode == "auto" else _split_of(config)
    try:
        return load_offloaded(wanted, build, memory=offload.memory, split=split, bandwidth=offload.disk_bandwidth)
    except ImageError as error:
        raise ConfigError(f"offload.mode {offload.mode} needs the model's layer image: {error}") from error


def _split_of(config: EngineConfig) -> Split:
    """The shares of weights in memory and on the disk by the policy of offload.mode's file. Raises ConfigError."""
    policy = read_policy(Path(config.offload.mode), TIERS[1:])
    if max(policy.cache.shares[1], policy.hidden.shares[1]) > 0:
        raise ConfigError(f"offload.mode {config.offload.mode}: only weights can be on the disk so far")
    return policy.weights
