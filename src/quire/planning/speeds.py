"""The latency models of `quire plan auto`: kept ones, measured ones, and those that follow from models of parts."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.cache.costs import LATENCY
from quire.config import EngineConfig, TiersConfig
from quire.engine.build import resolve
from quire.engine.machine import usable_cores
from quire.errors import ConfigError, QuireError
from quire.folders import user_path
from quire.load import find_calibration, load_engine
from quire.measure.engines import LEAVES_NOTHING
from quire.measure.latency_bench import about_of, settings_of
from quire.measure.latency_steps import measure
from quire.measure.memory_use import free_memory
from quire.models.fingerprint import fingerprint
from quire.models.resolve import resolve_model
from quire.models.weights import open_model
from quire.planning.space import Effect, Settings, Space
from quire.stores.direct import allows_direct, measure_speed
from quire.timing.composed import composed
from quire.timing.kept_latencies import is_poor, keep, kept_models, num_steps, rank, unmeasured, unsuitable
from quire.timing.latency import About, LatencyModel, Link, Origin
from quire.timing.latency_fit import Record, fit

log = logging.getLogger("quire")

SECONDS, LEAST_SECONDS = 60.0, 5.0
"""Most seconds in which the steps of one setting are measured, and the fewest that tell something."""

LONGER = 4
"""Times as long that steps are measured again from which nothing came."""

DISK_BYTES = 16 << 20
"""Written and read to measure a disk."""

Progress = Callable[[str, int, int], None]
"""Is told what is measured, seconds that have passed, and all of them."""


@dataclass(frozen=True)
class Speed:
    """The latency of settings.

    how      where it comes from, for people
    is_poor  whether what was measured for it says little
    """

    model: LatencyModel
    origin: Origin
    how: str
    is_poor: bool = False


class Speeds:
    """What is known of the seconds of a model's steps, and what can be measured of them.

    name    as for `LLM`
    base    configuration of the engines, as far as no axis decides it
    folder  of kept models; measured ones are kept there
    memory  bytes of the cache of an engine that is measured
    """

    def __init__(self, name: str, base: EngineConfig, space: Space, folder: Path, memory: int) -> None:
        self.name, self.space = name, space
        self._base, self._folder, self._memory = base, folder, memory
        self._path = resolve_model(name)
        self._model_id = fingerprint(self._path)
        self.models = [model for _, model in kept_models(folder)]
        self.wanted = functools.cache(self._wanted)
        self._composed: dict[Settings, Speed] = {}

    def exact(self, settings: Settings) -> LatencyModel | None:
        """The model that was measured with what of these settings decides the seconds of steps."""
        wanted = self.wanted(self.space.timed(settings))
        return min((each for each in self.models if not unsuitable(each, wanted)), key=rank, default=None)

    def of(self, settings: Settings) -> Speed | None:
        """The measured model, or one that follows from those of its parts; None if one of them is not known."""
        found = self.exact(settings)
        if found is not None:
            off = found.residuals.get("within", 0.0)
            told = f"{num_steps(found):,} measured steps, nine in ten of which are within {off:.0%}"
            return Speed(found, Origin.FITTED, told, is_poor(found))
        timed = self.space.timed(settings)
        if timed not in self._composed:
            made = self._compose(timed)
            if made is None:
                return None
            self._composed[timed] = made
        return self._composed[timed]

    def needed(self, settings: Sequence[Settings]) -> list[Settings]:
        """What is to be measured for some settings: what they have in common, then their parts. Of parts that take
        about as long as others, one comes first.
        """
        first = self.space.timed(self.space.first)
        parts = dict.fromkeys(
            part
            for each in settings
            for effect in (Effect.SCALES, Effect.ADDS)
            for part in self.space.effects(each)[effect]
        )
        one_each: list[Settings] = []
        for part in parts:
            if not any(other in self.space.alike(part) for other in one_each):
                one_each.append(part)
        others = [part for part in parts if part not in one_each]
        found = [(each, self.exact(each)) for each in (first, *one_each, *others)]
        unknown = [each for each, model in found if model is None]
        return unknown + [each for each, model in found if model is not None and is_poor(model)]

    def measure_all(
        self,
        settings: Sequence[Settings],
        deadline: float,
        progress: Progress = lambda *_: None,
        *,
        last: float | None = None,
    ) -> dict[Settings, str]:
        """Measures what some settings need, until a time of `time.monotonic`: all about as long, and if that is too
        short the first ones longer. Returns why parts are not known.

        last  time until which the first part is measured again, LONGER, if nothing came of it: the others need it. They
              then get as long as it took
        """
        failed = {}
        needed = self.needed(settings)
        least = LEAST_SECONDS
        for number, part in enumerate(needed):
            left = (deadline - time.monotonic()) / (len(needed) - number)
            seconds = min(max(SECONDS, least), max(least, left))
            is_known = self.exact(part) is not None
            if (number or is_known) and time.monotonic() + seconds > deadline:
                failed[part] = "the time was over before its steps were measured"
                continue
            reason = self.measure(part, seconds, progress)
            while reason and not number and not is_known and last is not None:
                more = min(LONGER * seconds, last - time.monotonic())
                if more <= seconds:
                    break
                seconds = least = more
                reason = self.measure(part, seconds, progress)
            if reason:
                failed[part] = reason
        return {part: reason for part, reason in failed.items() if self.exact(part) is None}

    def measure(self, settings: Settings, seconds: float, progress: Progress = lambda *_: None) -> str:
        """Measures the steps of what of these settings decides them. Returns why it cannot be; empty: it is done."""
        timed = self.space.timed(settings)
        what = f"steps of {self.space.name(timed)}"
        try:
            records, about = self._steps(timed, seconds, functools.partial(progress, what))
            if not records:
                return f"no steps were measured within {seconds:.0f} s; raise --plan.seconds"
            model = fit(records, about)
        except QuireError as error:
            return str(error)
        finally:
            free_memory()
        if lacking := unmeasured(model):
            return f"no {lacking} were measured within {seconds:.0f} s; raise --plan.seconds"
        self.models.insert(0, model)
        self._composed.clear()
        try:
            keep(model, self._folder, "auto-")
        except ConfigError as error:
            log.warning("%s; the next plan measures again", error)
        return ""

    def _steps(
        self, timed: Settings, seconds: float, progress: Callable[[int, int], None]
    ) -> tuple[list[Record], About]:
        loaded = load_engine(self.name, self._config(timed), show_progress=False)
        records = measure(loaded.engine, seconds, progress=progress).records
        about = about_of(self.name, self._model_id, loaded.config, loaded.engine)
        return records, {**about, **self.wanted(timed)}

    def _compose(self, timed: Settings) -> Speed | None:
        origin = self.exact(self.space.first)
        if origin is None:
            return None
        told, models = [], dict[Effect, list[LatencyModel]]()
        for effect, parts in self.space.effects(timed).items():
            models[effect] = []
            for part in parts:
                near = next((each for each in (part, *self.space.alike(part)) if self.exact(each) is not None), None)
                if near is None:
                    return None
                found = self.exact(near)
                assert found is not None
                models[effect].append(found)
                name = self.space.name(part)
                told.append(name if near == part else f"{name} as {self.space.name(near)}")
        about: About = {**origin.about, **self.wanted(timed)}
        made = composed(origin, models[Effect.ADDS], [(each, origin) for each in models[Effect.SCALES]], about)
        measured = (origin, *models[Effect.ADDS], *models[Effect.SCALES])
        how = "from the steps of " + " and of ".join(told)
        return Speed(made, Origin.MODELLED, how, any(map(is_poor, measured)))

    def config_of(self, settings: Settings) -> EngineConfig:
        """What of the settings an engine has. Raises ConfigError."""
        # Instances that have more threads than others take what the others do.
        threads = self._base.runtime.threads or max(1, usable_cores() // settings.num_instances)
        return settings.engine(self._base).with_options({**LEAVES_NOTHING, "runtime.threads": threads})

    def _config(self, settings: Settings) -> EngineConfig:
        return self.config_of(settings).with_options({"cache.memory": self._memory})

    def _wanted(self, timed: Settings) -> About:
        config = self._config(timed)
        with open_model(self._path) as checkpoint:
            resolved, _ = resolve(config, checkpoint.shape, checkpoint, find_calibration(self._path, config))
        return settings_of(self._model_id, resolved)


def disk_link(config: TiersConfig) -> Link | None:
    """How fast the disk of a tier is; None without one. Raises ConfigError if it cannot be measured."""
    if config.disk is None:
        return None
    folder = user_path(config.disk_folder)
    while not folder.exists():
        folder = folder.parent
    try:
        speed = measure_speed(folder, DISK_BYTES, lambda num_bytes: None, is_direct=allows_direct(folder))
    except OSError as error:
        raise ConfigError(f"tiers.disk is {config.disk!r}: {folder} cannot be measured ({error.strerror})") from None
    return Link(LATENCY, min(speed, float(config.disk_bandwidth or speed)))
