"""`quire plan auto`: from what is known of settings to points of the search, and their goodput by simulation.

`quire.planning.auto_local` plans for this machine, `quire.planning.auto_hardware` for GPUs that need not be here.
The seconds of a plan are divided: a part for quality, a part for the steps of engines, and the rest for simulations.
What is known from earlier plans is not measured again.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from quire.config import ClusterConfig, EngineConfig
from quire.errors import ConfigError
from quire.placement.rejected import Reason, Rejected
from quire.planning.attains import GoodputSearch, asked_of
from quire.planning.bounds import Bound, joint_bound
from quire.planning.curves import BEYOND, NOTHING, Loss
from quire.planning.goodput import Goodput, Verdict
from quire.planning.halving import RUNGS, HalvingSearch, NoPlanError, Rung, Trial, is_open
from quire.planning.points import PlanResult, Room, SettingsPoint, Variant
from quire.planning.quality import WINDOWS, Quality, Text
from quire.planning.space import Settings, Space
from quire.simulation.candidate import Candidate, Maker, counts_of
from quire.simulation.load import Load, Slices, fresh_seeds
from quire.simulation.pool import InProcess, Pool, pool_of
from quire.timing.composed import profile_of
from quire.timing.latency import Origin, StepTime
from quire.workload.slo import ANYTHING, Slo

log = logging.getLogger("quire")

QUALITY_PART, SPEED_PART, REFINE_PART = 0.3, 0.6, 0.5
"""Shares of the seconds by which quality and steps are measured, and of those left before the last rung by which its
points are measured more closely.
"""

ACCEPTED_GAPS = 0.15
"""Kolmogorov-Smirnov distance of the gaps up to which requests are drawn with gaps of a gamma distribution."""

CONFIRMATIONS = 2
"""Fresh seeds that confirm the goodput of a finalist."""

SLOW = 5
"""Times as long that a simulation takes which cannot skip steps."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Goal:
    """What is planned for.

    load     requests; their number is each rung's own
    memory   bytes for everything
    quality  loss that may be
    seconds  for all of the plan
    """

    load: Load
    slo: Slo
    memory: int
    quality: float
    seconds: float
    seed: int = 0


@dataclass(frozen=True)
class Tools:
    """What a plan is made with.

    folder       of kept latency models
    text         to measure quality with; None: only kept curves are used
    context      tokens of a window; None: as many as usual
    num_windows  most windows
    processes    simulations at once
    progress     is told what is done, how much of it, and all
    clock        seconds; that of the system if simulations are to end in time
    """

    folder: Path
    text: Text | None = None
    context: int | None = None
    num_windows: int = WINDOWS
    processes: int = 1
    progress: Progress = lambda what, done, total: None
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Fit:
    """Settings that have room.

    config  of an engine, without automatic values
    """

    room: Room
    config: EngineConfig


class Planner(ABC):
    """Plans for a kind of machine.

    name     as for `LLM`
    config   of the engines, as far as no axis decides it
    cluster  numbers and placement of the instances, as far as no axis decides them
    quality  what is known, and measured; None for a model without a checkpoint
    rejected  settings that are not searched, and why
    unit     what goodput is counted for
    """

    unit = "machine"

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        cluster: ClusterConfig,
        space: Space,
        goal: Goal,
        tools: Tools,
        quality: Quality | None,
    ) -> None:
        self.name, self.config = name, config
        self.space, self.goal, self.tools, self.quality = space, goal, tools, quality
        self.rejected: list[Rejected[Variant]] = []
        self.end = math.inf
        self.cluster_of = cache(lambda settings: settings.cluster(cluster))
        self._asked = cache(lambda retain: asked_of(self.goal.load.workload, retain, self.window))
        self._ceilings: dict[Variant, float] = {}
        self._pool: Pool = InProcess()

    @abstractmethod
    def fit(self, settings: Settings, share: float = 1.0) -> Fit:
        """The memory of settings, with a share of what is left for caches. Raises ConfigError if it is not enough."""

    @abstractmethod
    def latency(self, settings: Settings) -> tuple[StepTime, Origin, str] | None:
        """Of every instance, where it comes from, and how; None if it is not known."""

    def measure_latencies(self, settings: Sequence[Settings], end: float) -> dict[Settings, str]:
        """Measures what can be, until a time of the clock. Returns why what they need is not known."""
        return {}

    @abstractmethod
    def measure_latency(self, settings: Settings, end: float) -> None:
        """Measures what was modelled so far, if there is time."""

    @abstractmethod
    def candidate(self, point: SettingsPoint) -> tuple[Maker, Candidate]:
        """A point's instances, and what makes their setup."""

    @abstractmethod
    def memory_text(self, point: SettingsPoint) -> str:
        """Where the memory of a point goes, for people."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Tokens of the longest request that the model takes."""

    @property
    @abstractmethod
    def window(self) -> int | None:
        """Tokens that a token attends to at most; None: all before it."""

    def doubts(self, point: SettingsPoint) -> list[str]:
        """One sentence for each reason to doubt what is known of a point."""
        return []

    def units(self, settings: Settings) -> int:
        """Machines, or GPUs."""
        return 1

    # ---- the plan ------------------------------------------------------------------------------------------------

    def run(self) -> PlanResult:
        """Measures, searches, and returns the result. Raises NoPlanError."""
        goal, tools = self.goal, self.tools
        warnings = self._prepare()
        begun = tools.clock()
        self.end = begun + goal.seconds
        settings = self._possible()
        warnings += self._tell_uncalibrated()
        lacking: dict[Settings, str] = {}
        if self.quality is not None:
            end = begun + QUALITY_PART * goal.seconds
            lacking = self.quality.measure_all(settings, goal.quality, end, tools.progress)
        wanted = self._accepted(self._known(settings, lacking), self.fit)
        slow = self.measure_latencies(wanted, begun + SPEED_PART * goal.seconds)
        points = [point for each in wanted if (point := self._point(each, slow)) is not None]
        if not points:
            raise NoPlanError(f"no settings can be tried; {_deciding(self.rejected, self.space)}")
        with pool_of(self.tools.processes) as self._pool:
            search = HalvingSearch(
                self.space, points, self.evaluate, goal.quality, self.made, self.refine,
                lambda rung, done, total: tools.progress(f"points with {RUNGS[rung].requests} requests", done, total),
                RUNGS, clock=tools.clock, deadline=self.end, rejected=self.rejected, warnings=warnings,
            )  # fmt: skip
            found = search.run()
        doubts = self.doubts(found.chosen.point)
        if found.chosen.point.loss.is_fitted:
            doubts.append("the loss was read on the text that the codec was calibrated on; other texts lose more")
        return replace(found, warnings=(*found.warnings, *doubts))

    def _tell_uncalibrated(self) -> list[str]:
        """Says before all else which codecs are left out for want of a calibration. Returns the same for the result."""
        lacking = [each for each in self.rejected if "calibration" in each.reason and each.why is Reason.UNFIT]
        if not lacking:
            return []
        codecs = dict.fromkeys(str(each.option.settings.options["cache.codec"]) for each in lacking)
        nearest = min(lacking, key=lambda each: len(each.option.settings.differs(self.space.first)))
        told = (
            f"{len(lacking)} settings with {', '.join(codecs)} are left out: {nearest.reason}, then plan again (see"
            " docs/guide/calibration.md for how long it takes)"
        )
        log.warning("%s", told)
        return [told]

    def _prepare(self) -> list[str]:
        """Leaves out requests that the model's context has no room for. Where no distribution has the gaps of the
        trace, its own requests are simulated. Returns what is to be said of that.
        """
        load, told = self.goal.load.within(self.context)
        if load.fitted is not None and load.fitted.ks_gaps > ACCEPTED_GAPS:
            told.append(
                f"gaps between requests are no gamma distribution (KS distance {load.fitted.ks_gaps:.2f}): parts of the"
                " trace itself are simulated, with its own gaps at other rates"
            )
            load = Slices(load.workload, load.count)
            if not fresh_seeds(load, self.goal.seed, CONFIRMATIONS):
                told.append(
                    f"the goodput is not confirmed with other requests: the trace has no second {load.count} without"
                    " conversations"
                )
        self.goal = replace(self.goal, load=load)
        return told

    def loss_of(self, settings: Settings) -> Loss | None:
        """The loss of settings; None if it is not known."""
        if self.quality is not None:
            return self.quality.losses.of(settings)
        return None if self.space.parts(settings) else NOTHING

    # ---- points --------------------------------------------------------------------------------------------------

    def _possible(self) -> list[Settings]:
        """Settings that an engine could have."""

        def check(settings: Settings) -> None:
            config = settings.engine(self.config)
            if self.quality is not None:
                self.quality.calibration_of(config)
            self.cluster_of(settings)

        return self._accepted(self.space.settings(), check)

    def _accepted(self, settings: Iterable[Settings], check: Callable[[Settings], object]) -> list[Settings]:
        """Settings for which a check raises no ConfigError. The others are left out with its message."""
        found = []
        for each in settings:
            try:
                check(each)
            except ConfigError as error:
                self._reject(each, Reason.UNFIT, str(error))
            else:
                found.append(each)
        return found

    def _reject(self, settings: Settings, why: Reason, reason: str) -> None:
        self.rejected.append(Rejected(Variant(settings), why, reason))

    def _known(self, possible: Sequence[Settings], lacking: Mapping[Settings, str]) -> list[Settings]:
        """Settings whose loss is known, and not far beyond the budget."""
        found = []
        for settings in possible:
            loss = self.loss_of(settings)
            if loss is None:
                reasons = [lacking[part] for part in self.space.parts(settings).values() if part in lacking]
                self._reject(settings, Reason.UNKNOWN, reasons[0] if reasons else "its loss is not known")
            elif loss.value > BEYOND * self.goal.quality and settings != self.space.first:
                reason = f"it loses {loss.value:.2%} ({loss.origin}), and the budget is {self.goal.quality:.2%}"
                self._reject(settings, Reason.LOSSY, reason)
            else:
                found.append(settings)
        return found

    def _point(self, settings: Settings, slow: Mapping[Settings, str]) -> SettingsPoint | None:
        if self.latency(settings) is None:
            parts = [part for parts in self.space.effects(settings).values() for part in parts]
            reasons = [slow[part] for part in (self.space.timed(self.space.first), *parts) if part in slow]
            self._reject(settings, Reason.UNKNOWN, reasons[0] if reasons else "its latency is not known")
            return None
        return self._made(settings, 1.0)

    def _made(self, settings: Settings, share: float) -> SettingsPoint:
        loss, told, fit = self.loss_of(settings), self.latency(settings), self.fit(settings, share)
        assert loss is not None and told is not None
        latency, origin, how = told
        ceiling = self._bound(settings, fit.config, latency, ANYTHING)
        self._ceilings[Variant(settings, share)] = ceiling
        bound = min(ceiling, self._bound(settings, fit.config, latency, self.goal.slo))
        # Steps in which nothing happens are skipped where that is possible.
        is_slow = fit.config.retain.is_on or fit.config.tiers.is_on or self.cluster_of(settings).is_on
        return SettingsPoint(
            settings, fit.room, loss, bound, profile_of(latency), (origin, how), share, self.units(settings),
            SLOW if is_slow else 1,
        )  # fmt: skip

    def _bound(self, settings: Settings, config: EngineConfig, latency: StepTime, slo: Slo) -> float:
        """Requests/s that the settings never exceed."""
        limits, asked = config.scheduler, self._asked(config.retain)
        assert limits.token_budget is not None, "a configuration with automatic values"
        bound, counts = Bound(latency, limits.token_budget, limits.max_running), counts_of(self.cluster_of(settings))
        return joint_bound([(role, count, bound) for role, count in counts] or [("mixed", 1, bound)], asked, slo)

    # ---- what the search asks for --------------------------------------------------------------------------------

    def evaluate(self, trials: Sequence[Trial], rung: Rung, end: float) -> list[Goodput | None]:
        """See HalvingSearch."""
        goal, load = self.goal, replace(self.goal.load, count=rung.requests)
        confirmations = len(fresh_seeds(load, goal.seed, CONFIRMATIONS)) if rung.confirms else 0
        infeasible = Goodput(0.0, 0.0, Verdict.INFEASIBLE, confirmed=False, target=goal.slo.attainment)
        jobs = {
            index: GoodputSearch(
                *self.candidate(point), load, goal.slo, (floor, self._ceilings[point.key]), guess, rung.tolerance,
                goal.seed, confirmations, end,
            )
            for index, (point, guess, floor) in enumerate(trials)
            if point.bound > 0
        }  # fmt: skip
        results = dict(zip(jobs, self._pool.run(list(jobs.values())), strict=True))
        return [results.get(index, infeasible) for index in range(len(trials))]

    def made(self, settings: Settings, share: float) -> SettingsPoint | None:
        """See HalvingSearch."""
        try:
            return self._made(settings, share)
        except ConfigError:
            return None

    def refine(self, points: Sequence[SettingsPoint]) -> list[SettingsPoint | None]:
        """See HalvingSearch: measures quality and steps of points for which they are modelled or little known, while
        there is time.
        """
        now = self.tools.clock()
        end = now + REFINE_PART * max(0.0, self.end - now)
        found: list[SettingsPoint | None] = []
        for point in points:
            if self.quality is not None and is_open(point.loss, self.goal.quality):
                self.quality.measure(point.settings, self.tools.num_windows, end, self.tools.progress)
            if point.speed[0] is not Origin.FITTED:
                self.measure_latency(point.settings, end)
            found.append(self.made(point.settings, point.share))
        return found


def _deciding(rejected: Sequence[Rejected[Variant]], space: Space) -> str:
    """Why nothing can be tried: the reason of the settings that came furthest and are nearest to the default."""
    assert rejected, "no settings at all"
    furthest = [each for each in rejected if each.why is rejected[-1].why]
    nearest = min(furthest, key=lambda each: len(each.option.settings.differs(space.first)))
    return f"{space.name(nearest.option.settings)}: {nearest.reason}"
