"""The numbers of a model and its cache for the planner of offloading, from a checkpoint's headers or a config.json."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.cache.codecs import CODECS
from quire.cache.ledger import PAGE_TOKENS
from quire.config import EngineConfig
from quire.engine.build import arena_pages, token_budget
from quire.engine.machine import device_type_of, processor_name, usable_cores
from quire.kernels import runtime
from quire.models.layers import torch_dtype
from quire.models.loading import loaded_bytes, loaded_kind
from quire.models.quants import BLOCK_KINDS
from quire.models.shape import ITEM_BYTES
from quire.models.weights import stored_shape
from quire.offload.planning.profile import Conditions, numbers_of
from quire.offload.planning.sizes import matrices_of, sizes_of

if TYPE_CHECKING:
    from quire.models.shape import ModelShape
    from quire.offload.planning.costs import Sizes


@dataclass(frozen=True)
class Subject:
    """A model as it will be served, and its numbers.

    name    a folder, a .gguf file, a hub id, `smollm2`, or a config.json without weights
    config  its settings, whose weights and codec the sizes are for
    """

    name: str
    config: EngineConfig
    shape: ModelShape
    sizes: Sizes

    @classmethod
    def of(cls, name: str, config: EngineConfig, *, on_gpu: bool | None = None) -> Subject:
        """Reads the model's headers. on_gpu: whether a GPU computes; None: as on this machine.

        Raises ModelError or ConfigError.
        """
        shape, stored = stored_shape(name)
        dtype, has_gpu = _dtype(shape, config), _has_gpu(config)

        def kind_of(tensor: str) -> str | None:
            size = shape.tensor_shapes[tensor]
            return loaded_kind(tensor, size, stored[tensor], config.model.weights, BLOCK_KINDS)

        def tensor_bytes(tensor: str, size: tuple[int, ...]) -> float:
            return float(loaded_bytes(size, kind_of(tensor), ITEM_BYTES[dtype]))

        pages = arena_pages(config, shape, torch_dtype(dtype), None, "triton" if has_gpu else "cpu")
        per_token, of_open = (chunk / shape.num_layers / PAGE_TOKENS for chunk in (pages.chunk_bytes, pages.open_bytes))
        gates_inside = not (has_gpu if on_gpu is None else on_gpu)
        sizes = sizes_of(shape, dtype, tensor_bytes, per_token, gates_inside=gates_inside)
        matrices = matrices_of(shape, tensor_bytes, kind_of)
        window = float(shape.sliding_window or math.inf)
        sizes = dataclasses.replace(sizes, open_cache_bytes=of_open, matrices=matrices, window=window)
        return cls(name, config, shape, sizes)

    @property
    def dtype(self) -> str:
        """Of activations."""
        return _dtype(self.shape, self.config)

    @property
    def has_device(self) -> bool:
        """Whether a GPU computes."""
        return _has_gpu(self.config)

    @property
    def max_context(self) -> int:
        """Most tokens of a sequence."""
        return self.config.model.max_context or self.shape.max_context

    @property
    def layers_bytes(self) -> float:
        """Bytes of the weights of all layers."""
        return self.sizes.layer_bytes * self.sizes.num_layers

    @property
    def token_budget(self) -> int:
        """Most rows of a step."""
        return token_budget(self.config, device_type_of(self.config.runtime.device))

    @property
    def keeps_cache(self) -> bool:
        """Whether a plan keeps the cache where it is computed. With retention the engine can move it, but no profile
        has its speed.
        """
        config = self.config
        return config.retain.is_on or config.tiers.is_on or config.cache.sparse_values < 1

    @property
    def remedies(self) -> str:
        """Settings that need less memory than these, as the end of an error; empty if there are none."""
        words = ["--model.weights g4"] * (self.config.model.weights != "g4")
        words += ["--cache.codec g4"] * (not CODECS[self.config.cache.codec].place)
        return f"; {' and '.join(words)} need{'s' * (len(words) == 1)} less" if words else ""

    def conditions(self) -> Conditions:
        """What a profile of this machine is made for. Sets the configuration's level of kernels."""
        config = self.config
        runtime.set_level(config.runtime.level)
        return Conditions(
            model=Path(self.name).name,
            shape=numbers_of(self.shape),
            dtype=self.dtype,
            weights=config.model.weights,
            layer_bytes=self.sizes.layer_bytes,
            codec=config.cache.codec,
            processor=processor_name(),
            threads=config.runtime.threads or usable_cores(),
            kernels=runtime.level(),
            disk_bandwidth=None if config.offload.disk_bandwidth is None else float(config.offload.disk_bandwidth),
            device=torch.cuda.get_device_name() if self.has_device else "",
        )


def _has_gpu(config: EngineConfig) -> bool:
    return device_type_of(config.runtime.device) == "cuda"


def _dtype(shape: ModelShape, config: EngineConfig) -> str:
    return shape.dtype if config.model.dtype == "auto" else config.model.dtype
