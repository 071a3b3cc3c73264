"""How many sequences a cache holds: the most that an engine has at once while more of them wait.

Scheduler, prefix tree, retention and ledger are those of the engine, with every page that it would take, and only the
model is not computed: `quire.simulation` has the engine, and tests/unit/test_simulated_decisions.py holds it to the
real one. So a cache of any size is full in seconds. A step computes all prompts that have room, because otherwise
answers would end before the cache is full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.engine.sizes import Sizes
from quire.errors import ConfigError
from quire.evaluation.compose_load import Asked
from quire.load import calibration_for
from quire.models.resolve import resolve_model
from quire.models.weights import open_model
from quire.planning.latency import Origin, StepWork
from quire.simulation.arrivals import Arrivals
from quire.simulation.engine import Plan, check_simulated, make_engine
from quire.simulation.events import Events, StepClock

MOST_RUNNING = 4096
"""Sequences at once that are tried, where the cache is not what limits them."""

MOST_ROWS = 1 << 20
"""Of a step."""

AHEAD = 64
"""Sequences that wait at least."""


@dataclass(frozen=True)
class Held:
    """What was in a cache at the most.

    sequences  that had their first token and not yet their last one
    num_bytes  of their chunks, shared ones once
    """

    sequences: int
    num_bytes: int


class Instant:
    """A `Latency` without meaning: what waits does not depend on it."""

    origin = Origin.MODELLED

    def seconds(self, work: StepWork) -> float:
        """See Latency."""
        return 1e-3

    def occupancy(self, work: StepWork) -> float:
        """See Latency."""
        return 1e-3

    def quiet(self, work: StepWork, count: int) -> float:
        """See Latency."""
        return 1e-3 * count

    def covers(self, work: StepWork) -> bool:
        """Whatever it is."""
        return True


def resolved(model: str, options: Mapping[str, Any], file: Path | None = None) -> tuple[EngineConfig, Sizes]:
    """The configuration of an engine without automatic values, and what fits under it. Raises ConfigError."""
    plan = _plan(model, options, file)
    return plan.config, plan.sizes


def _plan(model: str, options: Mapping[str, Any], file: Path | None) -> Plan:
    config, path = EngineConfig.from_options(options, file), resolve_model(model)
    calibration = calibration_for(path, config)
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
        return Plan(shape, *resolve(config, shape, checkpoint, calibration), Instant(), calibration)


def held(model: str, options: Mapping[str, Any], asked: Iterator[Asked], file: Path | None = None) -> Held:
    """The most sequences that the cache of an engine holds at once.

    options  of the engine; its limits on running sequences and rows do not count, as long as there is room for more
    asked    see `fill`
    Raises ConfigError if no engine can be.
    """
    plan = _most_running(model, dict(options), file)
    check_simulated(plan.config)
    events = Events()
    return fill(make_engine(plan, StepClock(events), Arrivals(events)), asked)


def fill(engine: Engine, asked: Iterator[Asked]) -> Held:
    """The most sequences that an idle engine has at once while more of them wait.

    asked  the sequences, without end. The search ends when there have not been more for the steps of an answer
    """
    begun, found, names = set[str](), Held(0, 0), itertools.count()
    num_steps = last = 0
    longest = 1
    while num_steps - last <= longest:
        while len(engine.scheduler.waiting) < AHEAD:
            one = next(asked)
            params = SamplingParams(max_tokens=one.num_out, temperature=0.0, ignore_eos=True, detokenize=False)
            engine.add(f"request-{next(names)}", None, one.prompt, params)
            longest = max(longest, one.num_out)
        for output in engine.step():
            (begun.discard if output.finished else begun.add)(output.request_id)
        num_steps += 1
        count = min(len(begun), len(engine.scheduler.running))
        if count > found.sequences:
            found, last = Held(count, engine.stats()["cache"]["bytes_used"]), num_steps
    return found


def _most_running(model: str, options: dict[str, Any], file: Path | None) -> Plan:
    """The engine with the most sequences at once that it can be made for. A cache on the disk has frames for each of
    them in memory.
    """

    def plan(count: int) -> Plan:
        return _plan(model, options | {"scheduler.max_running": count, "scheduler.token_budget": MOST_ROWS}, file)

    if "offload.cache" not in options:
        return plan(MOST_RUNNING)
    low, high = 1, MOST_RUNNING + 1
    found = plan(low)
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        try:
            found, low = plan(middle), middle
        except ConfigError:
            high = middle
    return found
