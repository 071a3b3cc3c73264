"""How many sequences caches hold: the most that an engine, or all instances, have at once while more of them wait.

Scheduler, prefix tree, retention, ledger and router are those of the engine and of the cluster, with every page that
they would take, and only the model is not computed: `quire.simulation` has them, and
tests/simulation/test_cluster.py holds it to the real ones. So a cache of any size is full in seconds. A step
computes all prompts that have room, and caches travel in no time, because otherwise answers would end before the caches
are full.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from asking import Asked

from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.engine.capacity import MeasuredCapacity
from quire.engine.engine import Engine
from quire.engine.offloading import cache_bytes
from quire.engine.params import SamplingParams
from quire.engine.sizes import EngineSizes
from quire.errors import ConfigError
from quire.load import calibration_for
from quire.models.resolve import resolve_model
from quire.models.weights import open_model
from quire.offload.memory_plan import MemoryPlan
from quire.simulation.arrivals import ChunkArrivals
from quire.simulation.cluster import Answered, Place, SimulatedCluster
from quire.simulation.engine import Plan, check_simulated, make_engine
from quire.simulation.events import Events, StepClock
from quire.timing.latency import Link, Origin, StepWork

MOST_RUNNING = 4096
"""Sequences at once that are tried, where the cache is not what limits them."""

MOST_ROWS = 1 << 20
"""Of a step."""

AHEAD = 64
"""Sequences that wait at least."""

STEP_SECONDS = 1e-3
"""Of every step. No result depends on it."""


@dataclass(frozen=True)
class Held:
    """Sequences in caches, when there were most.

    sequences  that had their first token and not yet their last one
    num_bytes  of their chunks, shared ones once in each cache
    """

    sequences: int
    num_bytes: int


class Instant:
    """A `StepTime` without meaning: what waits does not depend on it."""

    origin = Origin.MODELLED

    def seconds(self, work: StepWork) -> float:
        """See StepTime."""
        return STEP_SECONDS

    def occupancy(self, work: StepWork) -> float:
        """See StepTime."""
        return STEP_SECONDS

    def quiet(self, work: StepWork, count: int) -> float:
        """See StepTime."""
        return STEP_SECONDS * count

    @property
    def knots(self) -> tuple[int, ...]:
        """See StepTime."""
        return ()

    def covers(self, work: StepWork) -> bool:
        """Whatever it is."""
        return True


def resolved(model: str, options: Mapping[str, Any]) -> tuple[EngineConfig, EngineSizes]:
    """The configuration of an engine without automatic values, and what fits under it. Raises ConfigError."""
    plan = _plan(model, options)
    return plan.config, plan.sizes


def _plan(model: str, options: Mapping[str, Any]) -> Plan:
    config, path = EngineConfig.from_options(options), resolve_model(model)
    calibration = calibration_for(path, config)
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
        return Plan(shape, *resolve(config, shape, checkpoint, calibration), Instant(), calibration)


def held(
    model: str, options: Mapping[str, Any], asked: Iterator[Asked],
    roles: Mapping[str, int] | None = None,
) -> Held:  # fmt: skip
    """The most sequences that caches hold at once.

    options  of each engine; its limits on running sequences and rows do not count, as long as there is room for more
    asked    see `fill`
    roles    numbers of instances by role; empty: one engine
    Raises ConfigError if no engine can be.
    """
    plan = _most_running(model, dict(options))
    check_simulated(plan.config)
    if roles:
        return fill_instances(plan, roles, asked)
    events = Events()
    return fill(make_engine(plan, StepClock(events), ChunkArrivals(events)), asked)


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
            engine.add(f"request-{next(names)}", one.prompt, params)
            longest = max(longest, one.num_out)
        for output in engine.step():
            (begun.discard if output.finished else begun.add)(output.request_id)
        num_steps += 1
        count = min(len(begun), len(engine.scheduler.running))
        if count > found.sequences:
            found, last = Held(count, engine.stats()["cache"]["bytes_used"]), num_steps
    return found


def fill_instances(plan: Plan, roles: Mapping[str, int], asked: Iterator[Asked]) -> Held:
    """The most sequences that instances with equal engines hold at once while more of them wait: those that decode, and
    those that wait, computed, for an instance that decodes.

    roles  numbers of instances by role
    asked  see `fill`
    Raises ConfigError for a sequence that the instances refuse.
    """
    events, config = Events(), plan.config
    capacity = MeasuredCapacity(MOST_ROWS, MOST_RUNNING, STEP_SECONDS / MOST_ROWS, STEP_SECONDS)
    places = [
        Place(f"{role}-{number}", role, partial(make_engine, plan), capacity)
        for role, count in roles.items()
        for number in range(count)
    ]
    shares = config.cache.share
    cluster = SimulatedCluster(
        events, places, hop=0.0, bulk=Link(0.0, 1e18), shares=shares, fetches=shares and not config.retain.is_on
    )
    engines = [each.engine for each in cluster.instances]
    waiting, begun = list[Answered](), list[Answered]()
    found, last, longest = Held(0, 0), 0.0, 1

    def look() -> None:
        nonlocal waiting, begun, found, last, longest
        begun = [each for each in (*begun, *waiting) if each.first < math.inf and each.last == math.inf]
        waiting = [each for each in waiting if each.first == math.inf]
        while len(waiting) < AHEAD:
            one = next(asked)
            longest = max(longest, one.num_out)
            waiting.append(cluster.begin(one.prompt, one.num_out, refused))
        inside = sum(len(each.scheduler.running) + len(each.exports) for each in engines)
        count = min(len(begun), inside)  # preempted ones are outside, and those that travel are in two caches
        if count > found.sequences:
            found, last = Held(count, sum(each.stats()["cache"]["bytes_used"] for each in engines)), events.now
        events.after(STEP_SECONDS, look)

    def refused(answered: Answered) -> None:
        if answered.error:
            raise ConfigError(answered.error)

    look()
    events.run(lambda: events.now - last > longest * STEP_SECONDS)
    return found


def _most_running(model: str, options: dict[str, Any]) -> Plan:
    """The engine with the most sequences at once that it can be made for. A cache on the disk has frames for each of
    them in memory.
    """

    def plan(count: int) -> Plan:
        found = _plan(model, options | {"scheduler.max_running": count, "scheduler.token_budget": MOST_ROWS})
        _check_frames(found)
        return found

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


def _check_frames(plan: Plan) -> None:
    """Raises ConfigError if cache.memory has no room for what a cache on the disk needs in memory."""
    config, layers_heads = plan.config, (plan.shape.num_layers, plan.shape.num_kv_heads)
    open_, sealed = (np.broadcast_to(plan.formats.codecs[index].page_bytes, layers_heads) for index in (0, -1))
    is_same = len(plan.formats.codecs) == 1
    found = cache_bytes(config, plan.sizes.max_context, sealed, None if is_same else open_)
    assert isinstance(config.cache.memory, int), "a configuration with automatic values"
    if found is not None:
        MemoryPlan.of(config.cache.memory, found[1])
