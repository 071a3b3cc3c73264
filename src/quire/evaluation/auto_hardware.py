"""`quire plan auto` for GPUs that need not be here: memory and steps follow from data sheets, quality from curves that
were kept for the checkpoint. Parallelism is part of the space, and modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from quire.cache.ledger import PAGE_TOKENS
from quire.config import ClusterConfig, EngineConfig, format_bytes
from quire.engine.build import LEAST_CHUNKS, TOKEN_BUDGET
from quire.errors import ConfigError
from quire.evaluation.auto import Fit, Goal, Planner, Tools
from quire.evaluation.curves import Quality
from quire.evaluation.speeds import num_instances
from quire.planning.analytic import AnalyticModel
from quire.planning.devices import Device
from quire.planning.latency import Latency, Origin
from quire.planning.points import Point, Room
from quire.planning.space import Machine, Settings, Space
from quire.simulation.hardware import Division, Target, check_modelled
from quire.simulation.setup import ROLES, Setup

GPUS = 8
"""Of a machine."""

HOW = "from the data sheet of the GPU"


@dataclass(frozen=True)
class Sheet:
    """Instances on GPUs, from which another process makes a setup."""

    target: Target
    divisions: tuple[Division, ...]
    cluster: ClusterConfig

    def setup(self) -> Setup:
        """See Maker."""
        return self.target.setup(self.divisions, self.cluster, alone=not self.cluster.is_on)


def machine_of(given: Mapping[str, Any]) -> Machine:
    """A machine with GPUs. given: settings that the user has decided, by key."""
    return Machine(0, GPUS, is_packed=False, memory=int(given.get("tiers.memory") or 0), given=dict(given))


class HardwarePlanner(Planner):
    """Plans for GPUs of a kind. quality: see Planner."""

    unit = "GPU"

    def __init__(
        self, name: str, config: EngineConfig, cluster: ClusterConfig, space: Space, goal: Goal, tools: Tools,
        device: Device, quality: Quality | None,
    ) -> None:  # fmt: skip
        super().__init__(name, config, cluster, space, goal, tools, quality)
        self.device = device
        self._targets: dict[str, Target] = {}
        self.latency_of = cache(self._latency_of)

    @property
    def context(self) -> int:
        """See Planner."""
        target = self._target(self.space.first)
        return target.config.model.max_context or target.shape.max_context

    @property
    def window(self) -> int | None:
        """See Planner."""
        return self._target(self.space.first).shape.sliding_window

    def fit(self, settings: Settings, share: float = 1.0) -> Fit:
        """See Planner. The total is that of one GPU."""
        model, target = self.latency_of(settings), self._target(settings)
        tp, pp = _division(settings)
        if target.shape.num_q_heads % tp:
            raise ConfigError(f"{target.shape.num_q_heads} heads cannot be divided among {tp} GPUs")
        tokens = model.cache_tokens * share
        if tokens < LEAST_CHUNKS * PAGE_TOKENS:
            raise ConfigError(
                f"the weights need {format_bytes(int(model.gpu_weight_bytes))} of each of {tp * pp} x"
                f" {self.device.name}, and leave no room for a cache"
            )
        config = self.config_of(settings)
        check_modelled(config)
        limits, cache_bytes = config.scheduler, int(tokens * model.token_bytes)
        least = limits.max_running + PAGE_TOKENS + (config.retain.profile_rows if config.retain.is_on else 0)
        budget = limits.token_budget or max(TOKEN_BUDGET["cuda"], least)
        resolved = replace(config, scheduler=replace(limits, token_budget=budget))
        total = int(model.gpu_weight_bytes + cache_bytes / (tp * pp))
        return Fit(Room(cache_bytes, total, int(num_instances(settings.options) * tokens)), resolved)

    def latency(self, settings: Settings) -> tuple[Latency, Origin, str] | None:
        """See Planner."""
        return self.latency_of(settings), Origin.MODELLED, HOW

    def measure_latencies(self, settings: Sequence[Settings], end: float) -> dict[Settings, str]:
        """See Planner: there is nothing to measure."""
        return {}

    def measure_latency(self, settings: Settings, end: float) -> None:
        """See Planner: there is nothing to measure."""

    def units(self, settings: Settings) -> int:
        """See Planner."""
        tp, pp = _division(settings)
        return tp * pp * num_instances(settings.options)

    def maker(self, point: Point) -> Sheet:
        """See Planner."""
        divisions = self._divisions(point.settings, point.room.cache)
        return Sheet(self._target(point.settings), divisions, self.cluster_of(point.settings))

    def memory_text(self, point: Point) -> str:
        """See Planner."""
        count, units = num_instances(point.settings.options), self.units(point.settings)
        return (
            f"{count} x {format_bytes(point.room.cache)} of cache beside the weights, on {units} x {self.device.name}"
            f" with {format_bytes(int(self.device.memory))} each"
        )

    def _target(self, settings: Settings) -> Target:
        """With the weights of settings, which are those of all engines of a target."""
        form = str(settings.options["model.weights"])
        if form not in self._targets:
            self._targets[form] = Target(self.name, self.device, self.config.with_options({"model.weights": form}))
        return self._targets[form]

    def _latency_of(self, settings: Settings) -> AnalyticModel:
        return self._target(settings).latency(*_division(settings), self.config_of(settings))

    def _divisions(self, settings: Settings, cache_bytes: int) -> tuple[Division, ...]:
        tp, pp = _division(settings)
        cluster = self.cluster_of(settings)
        config = self.config_of(settings).with_options({"cache.memory": cache_bytes})
        counts = [(role, getattr(cluster, role)) for role in ROLES if getattr(cluster, role)] or [("mixed", 1)]
        return tuple(Division(role, config, count, tp, pp) for role, count in counts)


def _division(settings: Settings) -> tuple[int, int]:
    options = settings.options
    return int(options.get("parallel.tp") or 1), int(options.get("parallel.pp") or 1)
