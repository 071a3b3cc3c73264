"""`quire plan auto` for this machine: memory of its processes, and steps of its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from quire.cache.ledger import MAX_ARENA_BYTES
from quire.config import ClusterConfig, EngineConfig, format_bytes
from quire.engine.footprint import RUNTIME_BYTES, footprint
from quire.engine.machine import available_memory, device_type_of, usable_cores
from quire.errors import ConfigError
from quire.models.image_folder import image_path
from quire.models.images import ImageSpec, engine_image_spec, temporary_images
from quire.models.quants import BLOCK_KINDS
from quire.models.resolve import resolve_model
from quire.models.weights import open_model
from quire.planning.auto import Fit, Goal, Planner, Tools
from quire.planning.points import PlanResult, Room, SettingsPoint
from quire.planning.quality import Quality
from quire.planning.space import SearchLimits, Settings, Space
from quire.planning.speeds import LEAST_SECONDS, SECONDS, Speeds, disk_link
from quire.simulation.candidate import Candidate
from quire.simulation.setup import LocalModel
from quire.timing.latency import LatencyModel, Origin, StepTime

DEVICE_BYTES = 1 << 30
"""The same on a GPU: its context, and what a step computes with. Not measured."""

MOST_MEASURED = 2 << 30
"""Cache of an engine that is measured, at most."""

BASE_PART = 0.5
"""Share of the time of simulations by which the steps that all settings have in common are measured again, for longer,
if the time for steps was too short: without them nothing can be simulated.
"""

GRAIN = 1 << 20
"""Caches are multiples of this."""


def machine_of(name: str, config: EngineConfig, given: Mapping[str, Any]) -> SearchLimits:
    """What there is here. given: settings that the user has decided, by key."""
    with open_model(resolve_model(name)) as checkpoint:
        is_packed = any(checkpoint.kind(each) in BLOCK_KINDS for each in checkpoint.shape.tensor_shapes)
    cores = usable_cores() if device_type_of(config.runtime.device) == "cpu" else 1
    return SearchLimits(cores, 0, is_packed, config.tiers.disk or "", config.tiers.memory or 0, dict(given))


def free_bytes(config: EngineConfig) -> int:
    """Memory that is free here, of the device that computes."""
    return available_memory(torch.device(device_type_of(config.runtime.device)))


class LocalPlanner(Planner):
    """Plans for this machine.

    speeds         what is known of the seconds of steps, and measured
    has_gpu        whether engines compute on a GPU, whose memory is then planned
    process_bytes  of a process beside weights, cache and steps; with a GPU steps are part of it
    """

    def __init__(
        self, name: str, config: EngineConfig, cluster: ClusterConfig, space: Space, goal: Goal, tools: Tools
    ) -> None:
        quality = Quality(name, config, space, tools.text, context=tools.context, num_windows=tools.num_windows)
        super().__init__(name, config, cluster, space, goal, tools, quality)
        self._model = LocalModel(name, _no_latency)
        base = config.with_options({"cache.memory": MAX_ARENA_BYTES})  # weights take the same with any cache
        resolved, self._sizes, _ = self._model.resolved(base)
        self.has_gpu = resolved.runtime.device == "cuda"
        self.process_bytes = DEVICE_BYTES if self.has_gpu else RUNTIME_BYTES
        self._with_form = cache(lambda form: self._model.resolved(base.with_options({"model.weights": form})))
        self._shared = cache(self._shared_bytes)
        self._fits: dict[tuple[Settings, float], Fit] = {}
        self._disk = cache(disk_link)
        self.speeds = Speeds(name, config, space, tools.folder, self._measured_bytes())

    def run(self) -> PlanResult:
        """See Planner. Removes layer images that were written for trials, except for that of the chosen settings."""
        with temporary_images() as kept:
            found = super().run()
            if (image := self._image(found.chosen.point.settings.engine(self.config).model.weights)) is not None:
                kept.add(image_path(image.origin))
        return found

    @property
    def context(self) -> int:
        """See Planner."""
        return self._sizes.model_context

    @property
    def window(self) -> int | None:
        """See Planner."""
        return self._model.shape.sliding_window

    def _measured_bytes(self) -> int:
        """Of the cache of an engine that is measured: that of the first settings that fit. Raises ConfigError if none
        do.
        """
        error = ConfigError("there are no settings")
        for number, settings in enumerate((self.space.only(self.space.first, ()), *self.space.settings())):
            try:
                return min(self.fit(settings).room.cache, MOST_MEASURED)
            except ConfigError as failed:
                error = failed if not number else error
        raise error

    def _shared_bytes(self, form: str) -> int:
        """Bytes of weights that several instances have once: those of a layer image."""
        wanted = self._image(form)
        return 0 if wanted is None else wanted.num_bytes

    def _image(self, form: str) -> ImageSpec | None:
        """The layer image that engines with this form of weights map."""
        config, _, _ = self._with_form(form)
        with open_model(resolve_model(self.name)) as checkpoint:
            return engine_image_spec(checkpoint, config)

    def fit(self, settings: Settings, share: float = 1.0) -> Fit:
        """See Planner. The cache is divided among the instances."""
        if (settings, share) not in self._fits:
            self._fits[settings, share] = self._fit(settings, share)
        return self._fits[settings, share]

    def _fit(self, settings: Settings, share: float) -> Fit:
        base = settings.engine(self.config)
        count, processes = self._counts(settings)
        weights, shared = self._with_form(base.model.weights)[1].weight_bytes, self._shared(base.model.weights)
        others = count * weights - (count - 1) * shared + processes * self.process_bytes
        if (room := (self.goal.memory - others) // count) >= GRAIN:
            others += count * self._step_bytes(base, room)
        cache_bytes = int((self.goal.memory - others) * share / count) // GRAIN * GRAIN
        if cache_bytes <= 0:
            raise ConfigError(
                f"weights and {processes} process{'es' * (processes > 1)} need {format_bytes(others)}, and plan.memory"
                f" is {format_bytes(self.goal.memory)}; raise plan.memory"
            )
        config, sizes, _ = self._model.resolved(base.with_options({"cache.memory": cache_bytes}))
        return Fit(Room(cache_bytes, others + count * sizes.cache_bytes, count * sizes.tokens), config)

    def _step_bytes(self, config: EngineConfig, cache_bytes: int) -> int:
        """Bytes that the largest step of an engine with such a cache takes; 0 with a GPU: see process_bytes."""
        if self.has_gpu:
            return 0
        resolved, sizes, _ = self._model.resolved(config.with_options({"cache.memory": cache_bytes}))
        return footprint(self._model.shape, resolved, sizes).step

    def _counts(self, settings: Settings) -> tuple[int, int]:
        """Engines, and processes: a router has one of its own."""
        count = settings.num_instances
        return count, count + self.cluster_of(settings).is_on

    def latency(self, settings: Settings) -> tuple[StepTime, Origin, str] | None:
        """See Planner."""
        found = self.speeds.of(settings)
        return None if found is None else (found.model, found.origin, found.how)

    def measure_latencies(self, settings: Sequence[Settings], end: float) -> dict[Settings, str]:
        """See Planner."""
        last = end + BASE_PART * max(0.0, self.end - end)
        return self.speeds.measure_all(settings, end, self.tools.progress, last=last)

    def measure_latency(self, settings: Settings, end: float) -> None:
        """See Planner."""
        seconds = min(SECONDS, end - self.tools.clock())
        if seconds >= LEAST_SECONDS:
            self.speeds.measure(settings, seconds, self.tools.progress)

    def doubts(self, point: SettingsPoint) -> list[str]:
        """See Planner."""
        told, found = [], self.speeds.of(point.settings)
        if found is not None and found.is_poor:
            told.append(f"the seconds of its steps are little known ({found.how}); raise --plan.seconds")
        if found is not None and self.cluster_of(point.settings).is_on and "shm" not in found.model.links:
            told.append("how fast caches move between instances was not measured: a default stands for it")
        longest = self.fit(point.settings, point.share).config.model.max_context
        if longest is not None and longest < self.context:
            told.append(
                f"its cache has room for requests of {longest:,} tokens, and the model's context is {self.context:,}:"
                " longer ones are refused"
            )
        return told

    def candidate(self, point: SettingsPoint) -> tuple[LocalModel, Candidate]:
        """See Planner."""
        found = self.speeds.of(point.settings)
        assert found is not None, f"{point.settings} without a latency"
        config = point.settings.engine(self.config).with_options({"cache.memory": point.room.cache})
        latency, disk = found.model, self._disk(config.tiers)
        if disk is not None:
            latency = replace(latency, links={**latency.links, "disk": disk})
        model = self._model.with_latencies(partial(_only, latency))
        return model, model.candidate(config, self.cluster_of(point.settings))

    def memory_text(self, point: SettingsPoint) -> str:
        """See Planner."""
        count, processes = self._counts(point.settings)
        caches = format_bytes(point.room.cache) if count == 1 else f"{count} x {format_bytes(point.room.cache)}"
        each = format_bytes(self.process_bytes)
        beside = f"one process with {each}" if processes == 1 else f"{processes} processes with {each} each"
        if self.has_gpu:
            return f"caches {caches}, and {beside} beside weights and cache (not measured)"
        steps = format_bytes(count * self._step_bytes(point.settings.engine(self.config), point.room.cache))
        return f"caches {caches}, steps {steps}, and {beside} beside weights and cache (measured)"


def _only(latency: LatencyModel, role: str, config: EngineConfig, fingerprint: str) -> LatencyModel:
    """The latency of every instance."""
    return latency


def _no_latency(role: str, config: EngineConfig, fingerprint: str) -> LatencyModel:
    raise AssertionError("sizes alone need no latency")
