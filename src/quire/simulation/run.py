"""A load of a setup, and what comes of it.

A driver simulates a workload: `exactly` lets every step of every instance happen, with the router; `quickly` skips
steps in which nothing happens where that changes no time; `quire.simulation.parts` has the instances of each role by
themselves.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from quire.simulation.bulk import BulkSimulation
from quire.simulation.load import Load
from quire.simulation.outcome import Outcome
from quire.simulation.pool import Progress
from quire.simulation.setup import Replicas, Setup, silent
from quire.simulation.simulate import simulate
from quire.workload.traces import tokens
from quire.workload.workload import Workload


class Driver(Protocol):
    """Simulates a workload on a setup. seed: of its tokens. The outcome has the requests that count."""

    def __call__(self, setup: Setup, workload: Workload, seed: int, progress: Progress) -> Outcome: ...  # noqa: D102


def exactly(setup: Setup, workload: Workload, seed: int, progress: Progress) -> Outcome:
    """See Driver."""
    return run_of(setup, workload, seed, progress).counting(workload.counted)


def quickly(setup: Setup, workload: Workload, seed: int, progress: Progress) -> Outcome:
    """See Driver. Only the times of the outcome count: mixed instances skip steps where that changes none of them."""
    first, *others = setup.replicas
    fetches = first.config.cache.share and first.count > 1 and bool(workload.cached_tokens.any())
    if others or first.role != "mixed" or not may_skip(first) or fetches:
        return exactly(setup, workload, seed, progress)
    if setup.cluster is None:
        return skipping(first, workload, setup.ways.server, progress).counting(workload.counted)
    messages = setup.ways.server + setup.ways.hop
    return skipping(first, workload, messages, progress, setup.cluster.routing).counting(workload.counted)


def run_of(setup: Setup, workload: Workload, seed: int, progress: Progress = lambda done, total: None) -> Outcome:
    """What comes of a workload, with the requests that do not count."""
    prompts = tokens(workload, range(setup.vocab_size), seed)
    with silent():
        return simulate(workload, prompts, setup.front_of, progress=progress)


def may_skip(replicas: Replicas) -> bool:
    """Whether steps can be skipped: without retention, tiers and a window of attention."""
    return not (replicas.config.retain.is_on or replicas.tiers or replicas.plan.window)


def skipping(
    replicas: Replicas, workload: Workload, messages: float, progress: Progress, routing: str = "expected"
) -> Outcome:
    """What comes of a workload on equal instances, of which steps are skipped.

    messages  seconds of a message from the client to an instance, one way
    routing   see ClusterConfig
    """
    prompt_rows = replicas.capacity.prompt_rows if replicas.role == "prefill" else None
    found = BulkSimulation(
        workload, replicas.plan, replicas.count, routing=routing, prompt_rows=prompt_rows, progress=progress
    ).run()
    return dataclasses.replace(found, first=found.first + 2 * messages, last=found.last + 2 * messages)


@dataclass(frozen=True)
class SimulationRun:
    """A load of a setup: see Simulation. rate: requests/s; None: the workload's own."""

    setup: Setup
    load: Load
    rate: float | None = None
    seed: int = 0
    driver: Driver = exactly

    def __post_init__(self) -> None:
        self.setup.measure(all_roles=self.driver in (exactly, quickly))

    @property
    def count(self) -> int:
        """See Simulation."""
        return self.load.count

    def outcome(self, progress: Progress = lambda done, total: None) -> Outcome:
        """See Simulation."""
        return self.driver(self.setup, self.load.drawn(self.rate, self.seed), self.seed, progress)
