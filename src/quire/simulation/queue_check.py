"""A check of a simulated instance for prompts against queues: the mean time to first token in three ways.

An instance that computed one prompt after the other would be a queue with one server. The simulated one may compute
several prompts in a step, and may have lost what a cache without eviction still has; otherwise all three agree.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quire.simulation.engine import Plan
from quire.simulation.load import Load
from quire.simulation.parts import prompts_of, simulate_prompts
from quire.simulation.queueing import mean_wait, waits
from quire.simulation.setup import Setup
from quire.timing.latency import StepWork, pairs_of


@dataclass(frozen=True)
class QueueCheck:
    """Mean seconds to the first token at a rate in requests/s.

    simulated   of the instance
    one_by_one  of the same requests, at the same times, in a queue with one server
    closed      of a queue with Poisson arrivals of these requests: M/G/1. Infinite if it gets too many
    """

    rate: float
    simulated: float
    one_by_one: float
    closed: float

    def facts(self) -> dict[str, float | None]:
        """All numbers, for JSON; None for an infinite one."""
        return {name: value if math.isfinite(value) else None for name, value in dataclasses.asdict(self).items()}


def queue_check(setup: Setup, load: Load, tpot: float, rate: float, seed: int) -> QueueCheck:
    """Simulates one instance for prompts at a rate. tpot: see Parts."""
    (replicas,), ways = setup.replicas, setup.ways
    drawn = load.drawn(rate, seed)
    outcome, workload = simulate_prompts(replicas, ways, drawn, tpot, seed), prompts_of(drawn, tpot)
    alone = np.array(
        [
            prompt_seconds(replicas.plan, cached, whole)
            for cached, whole in zip(workload.cached_tokens.tolist(), workload.prompt_tokens.tolist(), strict=True)
        ]
    )
    messages = 2 * (ways.server + ways.hop)
    order = np.argsort(outcome.arrived, kind="stable")
    busy, whole = alone[order].T
    times = whole + messages
    closed = mean_wait(rate, float(busy.mean()), float((busy**2).mean()))
    return QueueCheck(
        rate,
        float(outcome.ttft.mean()),
        float((waits(outcome.arrived[order], busy) + times).mean()),
        closed + float(times.mean()),
    )


def prompt_seconds(plan: Plan, cached: int, whole: int) -> tuple[float, float]:
    """Seconds of a prompt alone on an engine: until the next one may begin, and until its first token.

    cached, whole  tokens that are cached, and all
    """
    budget = plan.config.scheduler.token_budget
    assert budget is not None, "a configuration with automatic values"
    latency, window, busy = plan.latency, math.inf if plan.window is None else plan.window, 0.0
    for start, end in pairwise([*range(cached, whole, budget), whole]):
        work = StepWork(end - start, pairs_of(start, end - start, window), num_prompts=1)
        last = latency.occupancy(work)
        busy += last
    return busy, busy - last + latency.seconds(work)
