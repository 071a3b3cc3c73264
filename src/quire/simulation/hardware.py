"""What to simulate on GPUs that are not here, or with more of them for an instance than engines can have.

Latencies are those of `AnalyticModel`. The cache is the memory that weights leave free, in a flat table: a shape of one
layer and one key head, whose page holds a whole chunk of all layers and heads. All pages of a chunk are taken and given
back together, so that admission, eviction and preemption are those of an engine; tables by layer and head would be slow
for 64 layers of 72 heads. Different is:

- A fetch has one layer. No step follows it layer by layer: a step that needs a fetched chunk begins when all of it is
  there.
- With an encoded cache a chunk is encoded from its first token on, while an engine keeps the chunk that a sequence
  writes to dense.
- With retention all layers and heads of a sequence keep the same tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from quire.cache.ledger import MAX_ARENA_BYTES, PAGE_TOKENS
from quire.config import (
    AttentionConfig,
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    RuntimeConfig,
)
from quire.engine.build import arena_pages, resolve, token_budget
from quire.errors import ConfigError
from quire.models.ffn.gated import GatedShape
from quire.models.layers import torch_dtype
from quire.models.loading import loaded_bytes, loaded_kind
from quire.models.mixers.attention import AttentionShape
from quire.models.norms import NormShape
from quire.models.quants import BLOCK_KINDS
from quire.models.shape import ITEM_BYTES, LayerShape, ModelShape
from quire.models.weights import stored_shape
from quire.options import format_bytes
from quire.placement.placement_file import Gpus
from quire.simulation.candidate import Candidate, InstanceGroup, counts_of
from quire.simulation.engine import Plan, check_simulated
from quire.simulation.setup import HOP_SECONDS, Bandwidths, Replicas, Setup, tiers_of
from quire.timing.analytic import MODELS, AnalyticModel
from quire.timing.devices import Device, device_named
from quire.timing.latency import Link

FLAT_HIDDEN = 64
"""Width of the flat shape: no number follows from it."""


@dataclass(frozen=True)
class Target:
    """A model on a kind of GPU.

    name       in MODELS, a config.json, or any model
    usable     share of a GPU's memory for weights and cache
    slow_link  between machines, for stages that do not fit on one; None: as within them
    gpus       of a machine
    """

    name: str
    device: Device
    usable: float = 0.9
    slow_link: Link | None = None
    gpus: int = 8

    @classmethod
    def on(cls, gpus: Gpus, name: str) -> Target:
        """A model on the GPUs of a plan. Raises ConfigError if their device is unknown."""
        device = dataclasses.replace(device_named(gpus.device), memory=float(gpus.memory))
        if gpus.inside is not None:
            device = dataclasses.replace(device, nvlink=float(gpus.inside))
        slow = None if gpus.between is None else Link(HOP_SECONDS, float(gpus.between))
        return cls(name, device, 1.0, slow, gpus.count)

    @cached_property
    def _checkpoint(self) -> tuple[ModelShape, dict[str, str]]:
        """The shape, and the types of the stored tensors."""
        shape = MODELS.get(self.name.lower())
        if shape is None or Path(self.name).exists():
            return stored_shape(self.name)
        return shape, dict.fromkeys(shape.tensor_shapes, "BF16")

    @property
    def shape(self) -> ModelShape:
        """Of the model."""
        return self._checkpoint[0]

    def dtype(self, config: EngineConfig) -> str:
        """Of weights, activations and dense pages."""
        return self.shape.dtype if config.model.dtype == "auto" else config.model.dtype

    @cached_property
    def _weight_bytes(self) -> dict[tuple[str, str], float]:
        return {}

    def weight_bytes(self, config: EngineConfig) -> float:
        """Of all weights, as they are held."""
        dtype, form = self.dtype(config), config.model.weights
        if (dtype, form) not in self._weight_bytes:
            shape, stored = self._checkpoint
            self._weight_bytes[dtype, form] = float(
                sum(
                    loaded_bytes(size, loaded_kind(name, size, stored[name], form, BLOCK_KINDS), ITEM_BYTES[dtype])
                    for name, size in shape.tensor_shapes.items()
                )
            )
        return self._weight_bytes[dtype, form]

    def token_bytes(self, config: EngineConfig) -> float:
        """Of a cached token over all layers, as the codec stores it."""
        pages = arena_pages(config, self.shape, torch_dtype(self.dtype(config)), None, "triton")
        return pages.chunk_bytes / PAGE_TOKENS

    def context(self, config: EngineConfig) -> int:
        """Tokens of the longest request."""
        return config.model.max_context or self.shape.max_context

    def latency(self, config: EngineConfig, tp: int, pp: int, stage_gpus: int = 0) -> AnalyticModel:
        """Of an instance with tp * pp GPUs.

        stage_gpus  that must share a machine with a stage, its own included; 0: tp
        """
        is_large = pp > self.gpus // (stage_gpus or tp)
        return AnalyticModel(
            self.shape, self.device, self.weight_bytes(config), self.token_bytes(config), tp, pp,
            float(ITEM_BYTES[self.dtype(config)]), self.usable, self.slow_link if is_large else None,
        )  # fmt: skip

    def candidate(
        self, config: EngineConfig, settings: ClusterConfig, tp: int = 1, pp: int = 1, between: int | None = None
    ) -> Candidate:
        """Instances of tp * pp GPUs each, as many of each role as the settings say.

        between  bytes/s between instances; None: those of the links
        """
        counts, in_pairs = list(counts_of(settings)), settings.placement == "pairs"
        groups = tuple(InstanceGroup(role, config, count, tp, pp) for role, count in counts or [("mixed", 1)])
        return Candidate(groups, settings if counts else None, between=between, in_pairs=in_pairs)

    def setup(self, candidate: Candidate) -> Setup:
        """See Maker."""
        groups, in_pairs = candidate.groups, candidate.in_pairs
        for each in groups:
            check_modelled(each.config)
        of_pair = sum(each.tp for each in groups) if in_pairs else 0
        latencies = [self.latency(each.config, each.tp, each.pp, of_pair) for each in groups]
        memories = [_memory(each, group.config) for each, group in zip(latencies, groups, strict=True)]
        grain = max(1, *(-(-memory // MAX_ARENA_BYTES) for memory in memories))
        link = Link(HOP_SECONDS, self.device.between)
        if candidate.between is not None:
            link = Link(HOP_SECONDS, float(candidate.between))
        elif self.slow_link is not None and not in_pairs:
            link = self.slow_link
        ways = _coarser(Bandwidths(bulk=link, pinned=Link(HOP_SECONDS, self.device.pcie)), grain)
        replicas = []
        for each, latency, memory in zip(groups, latencies, memories, strict=True):
            plan = self._plan(latency, each.config, memory, grain)
            tiers = [dataclasses.replace(tier, cap=tier.cap // grain) for tier in tiers_of(each.config, ways)]
            unit = f"{self.device.name}, tp {each.tp} pp {each.pp}"
            replicas.append(Replicas(each.role, plan, each.count, tuple(tiers), unit))
        return Setup(tuple(replicas), ways, candidate.cluster, in_pairs)

    def _plan(self, latency: AnalyticModel, config: EngineConfig, memory: int, grain: int) -> Plan:
        """An engine with a flat table. grain: bytes that one byte of its cache stands for."""
        context = self.context(config)
        if context > self.shape.context_limit:
            raise ConfigError(f"model.max_context is {context}; this model serves at most {self.shape.context_limit}")
        limits, cache = config.scheduler, config.cache
        flat = EngineConfig(
            model=ModelConfig(dtype="float16"),
            cache=CacheConfig(memory=memory // grain, share=cache.share, lifetime=cache.lifetime),
            retain=config.retain,
            attention=AttentionConfig(backend="reference"),
            scheduler=dataclasses.replace(limits, token_budget=token_budget(config, "cuda")),
            runtime=RuntimeConfig(device="cpu", threads=1),
        )
        attention = AttentionShape(
            num_q_heads=1, num_kv_heads=1, head_dim=max(1, round(latency.token_bytes / 4 / grain)), rope=None,
            window=self.shape.sliding_window,
        )  # fmt: skip
        shape = ModelShape(
            architecture="llama", vocab_size=self.shape.vocab_size, hidden_size=FLAT_HIDDEN,
            layers=(LayerShape(mixer=attention, ffn=GatedShape(ffn_size=1)),), max_context=context,
            norm=NormShape(1e-5), dtype="float16",
        )  # fmt: skip
        resolved, sizes = resolve(flat, shape)
        return Plan(shape, resolved, dataclasses.replace(sizes, weight_bytes=int(latency.weight_bytes)), latency)


def check_modelled(config: EngineConfig) -> None:
    """Raises ConfigError for what cannot be simulated on hardware that is not here."""
    check_simulated(config)
    for key, is_on in (
        ("offload.mode", config.offload.is_on),
        ("cache.sparse_values", config.cache.sparse_values < 1),
    ):
        if is_on:
            raise ConfigError(f"{key} is set, and no formula for other hardware knows it; leave it out")


def _memory(latency: AnalyticModel, config: EngineConfig) -> int:
    """Bytes of an instance's cache. Raises ConfigError if there is no room for one."""
    device, room = latency.device, int(latency.cache_tokens * latency.token_bytes)
    where = f"a {device.name} with tp {latency.tp} pp {latency.pp}"
    if latency.cache_tokens < 2 * PAGE_TOKENS:
        raise ConfigError(
            f"the weights need {format_bytes(int(latency.gpu_weight_bytes))} of {where}, which has"
            f" {format_bytes(int(latency.usable * device.memory))} for weights and cache; raise --parallel.tp or"
            " --parallel.pp"
        )
    if isinstance(config.cache.memory, int):
        if config.cache.memory > room:
            raise ConfigError(
                f"cache.memory is {format_bytes(config.cache.memory)}, and {where} has room for {format_bytes(room)}"
            )
        return config.cache.memory
    return room


def _coarser(ways: Bandwidths, grain: int) -> Bandwidths:
    """The same ways for bytes that stand for more."""

    def coarser(link: Link) -> Link:
        return Link(link.latency, link.bytes_per_second / grain)

    bulk, disk, pinned = map(coarser, (ways.bulk, ways.disk, ways.pinned))
    return dataclasses.replace(ways, bulk=bulk, disk=disk, pinned=pinned)
