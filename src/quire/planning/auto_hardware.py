"""`quire plan auto` for GPUs that need not be here: memory and steps follow from data sheets, quality from curves that
were kept for the checkpoint. Parallelism is part of the space, and modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from quire.cache.ledger import PAGE_TOKENS
from quire.config import ClusterConfig, EngineConfig, format_bytes
from quire.engine.build import LEAST_CHUNKS, token_budget
from quire.errors import ConfigError
from quire.planning.auto import Fit, Goal, Planner, Tools
from quire.planning.points import Room, SettingsPoint
from quire.planning.quality import Quality
from quire.planning.space import SearchLimits, Settings, Space
from quire.simulation.candidate import Candidate
from quire.simulation.hardware import Target, check_modelled
from quire.timing.analytic import AnalyticModel
from quire.timing.devices import Device
from quire.timing.latency import Origin, StepTime

GPUS = 8
"""Of a machine."""

HOW = "from the data sheet of the GPU"


def machine_of(given: Mapping[str, Any]) -> SearchLimits:
    """A machine with GPUs. given: settings that the user has decided, by key."""
    return SearchLimits(0, GPUS, is_packed=False, memory=int(given.get("tiers.memory") or 0), given=dict(given))


class HardwarePlanner(Planner):
    """Plans for GPUs of a kind. quality: see Planner."""

    unit = "GPU"

    def __init__(
        self, name: str, config: EngineConfig, cluster: ClusterConfig, space: Space, goal: Goal, tools: Tools,
        device: Device, quality: Quality | None,
    ) -> None:  # fmt: skip
        super().__init__(name, config, cluster, space, goal, tools, quality)
        check_modelled(config)
        self.device, self._target = device, Target(name, device)
        self.latency_of = cache(self._latency_of)

    @property
    def context(self) -> int:
        """See Planner."""
        return self._target.context(self.config)

    @property
    def window(self) -> int | None:
        """See Planner."""
        return self._target.shape.sliding_window

    def fit(self, settings: Settings, share: float = 1.0) -> Fit:
        """See Planner. The total is that of one GPU."""
        model, shape = self.latency_of(settings), self._target.shape
        tp, pp = settings.division
        if shape.num_q_heads % tp:
            raise ConfigError(f"{shape.num_q_heads} heads cannot be divided among {tp} GPUs")
        tokens = model.cache_tokens * share
        if tokens < LEAST_CHUNKS * PAGE_TOKENS:
            raise ConfigError(
                f"the weights need {format_bytes(int(model.gpu_weight_bytes))} of each of {tp * pp} x"
                f" {self.device.name}, and leave no room for a cache"
            )
        config = settings.engine(self.config)
        check_modelled(config)
        cache_bytes = int(tokens * model.token_bytes)
        resolved = replace(config, scheduler=replace(config.scheduler, token_budget=token_budget(config, "cuda")))
        total = int(model.gpu_weight_bytes + cache_bytes / (tp * pp))
        return Fit(Room(cache_bytes, total, int(settings.num_instances * tokens)), resolved)

    def latency(self, settings: Settings) -> tuple[StepTime, Origin, str] | None:
        """See Planner."""
        return self.latency_of(settings), Origin.MODELLED, HOW

    def measure_latency(self, settings: Settings, end: float) -> None:
        """See Planner: there is nothing to measure."""

    def units(self, settings: Settings) -> int:
        """See Planner."""
        tp, pp = settings.division
        return tp * pp * settings.num_instances

    def candidate(self, point: SettingsPoint) -> tuple[Target, Candidate]:
        """See Planner."""
        config = point.settings.engine(self.config).with_options({"cache.memory": point.room.cache})
        return self._target, self._target.candidate(config, self.cluster_of(point.settings), *point.settings.division)

    def memory_text(self, point: SettingsPoint) -> str:
        """See Planner."""
        count, units = point.settings.num_instances, self.units(point.settings)
        return (
            f"{count} x {format_bytes(point.room.cache)} of cache beside the weights, on {units} x {self.device.name}"
            f" with {format_bytes(int(self.device.memory))} each"
        )

    def _latency_of(self, settings: Settings) -> AnalyticModel:
        return self._target.latency(settings.engine(self.config), *settings.division)
