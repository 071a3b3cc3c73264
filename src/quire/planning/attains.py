"""The share of requests that meet their targets at a rate, and the highest rate at which enough of them do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from quire.config import RetainConfig
from quire.options import format_number
from quire.planning.bounds import Bound, RequestStats, joint_bound
from quire.planning.goodput import Goodput, goodput
from quire.simulation.candidate import Candidate, Maker
from quire.simulation.load import SHORT, Load
from quire.simulation.outcome import Outcome
from quire.simulation.parts import Parts
from quire.simulation.pool import InProcess, Pool
from quire.simulation.run import SimulationRun
from quire.simulation.setup import Replicas, Setup
from quire.workload.slo import ANYTHING, Slo
from quire.workload.workload import Workload

CONFIRMATIONS = 4
"""Fresh seeds that confirm a goodput."""

CLEARLY = 0.8
"""Few requests whose share is below this part of the target are taken to miss it with more of them, too."""

MOST_TPOT = 1.0
"""Seconds per token that answers are taken to need at most, before what follows them in a conversation."""

LOWEST = 1000
"""The lowest rate of a search for the goodput is this part of the highest one."""


@dataclass
class Attains:
    """The share of requests that meet both targets, by rate and seed: what `quire.planning.goodput` asks for.

    simulation  of a load, a rate and a seed
    load        the requests
    groups      seeds that are simulated at the same time: those of a search, and those of its confirmation
    on_run      is told of each simulation
    first       fewer requests, which are simulated first: where they clearly miss the target, theirs are the outcomes.
                Few may meet targets that many miss, because a queue takes time to grow, but hardly the reverse
    outcomes    by rate and seed, of all that was simulated
    """

    simulation: Callable[[Load, float, int], SimulationRun]
    load: Load
    slo: Slo
    groups: Sequence[Sequence[int]] = ()
    pool: Pool = field(default_factory=InProcess)
    on_run: Callable[[float, int, Outcome], None] = lambda rate, seed, outcome: None
    first: Load | None = None
    outcomes: dict[tuple[float, int], Outcome] = field(default_factory=dict)

    def __call__(self, rate: float, seed: int) -> float:
        """The share, from 0 to 1."""
        if (rate, seed) not in self.outcomes:
            together = next((group for group in self.groups if seed in group), (seed,))
            found = [] if self.first is None else self._run(self.first, rate, together)
            if not found or self._share(found) >= CLEARLY * self.slo.attainment:
                found = self._run(self.load, rate, together)
            for each, outcome in zip(together, found, strict=True):
                self.outcomes[rate, each] = outcome
                self.on_run(rate, each, outcome)
        return self.outcomes[rate, seed].attainment(self.slo)

    def _run(self, load: Load, rate: float, seeds: Sequence[int]) -> Sequence[Outcome]:
        return self.pool.run([self.simulation(load, rate, each) for each in seeds])

    def _share(self, outcomes: Sequence[Outcome]) -> float:
        return fmean(each.attainment(self.slo) for each in outcomes)


def ceiling_of(setup: Setup, workload: Workload) -> float:
    """A rate in requests/s that a setup never serves for long, whatever the latency targets."""
    first = setup.replicas[0]
    asked = asked_of(workload, first.config.retain, first.plan.window)
    return joint_bound([(each.role, each.count, bound_of(each)) for each in setup.replicas], asked, ANYTHING)


def asked_of(workload: Workload, retain: RetainConfig, window: int | None) -> RequestStats:
    """What the requests of a workload ask at least of instances with this retention and window of attention."""
    return RequestStats.of(workload, 1.0 if retain.budget == "off" else retain.budget, window)


def bound_of(replicas: Replicas) -> Bound:
    """Upper bounds of the rates of an instance."""
    limits = replicas.config.scheduler
    assert limits.token_budget is not None, "a configuration with automatic values"
    return Bound(replicas.plan.latency, limits.token_budget, limits.max_running)


def find_goodput(
    attains: Attains,
    ceiling: float,
    seed: int,
    num_seeds: int = 1,
    confirmations: int = CONFIRMATIONS,
    guess: float | None = None,
    floor: float = 0.0,
    **settings: Any,
) -> Goodput:
    """The goodput of what `attains` simulates: the highest rate that reaches the target, with the doubts of `noted`.

    ceiling        requests/s; higher rates are not tried, because no system serves them for long
    seed           the first one
    num_seeds      number of seeds of the search
    confirmations  number of fresh seeds after them, which confirm its result
    guess          the first rate; None: half the ceiling
    floor          requests/s; lower rates are not tried
    settings       of `quire.planning.goodput.goodput`, in place of its own
    """
    own, fresh = range(seed, seed + num_seeds), range(seed + num_seeds, seed + num_seeds + confirmations)
    attains.groups = (own, fresh)
    found = goodput(
        attains, attains.slo.attainment, low=min(max(floor, ceiling / LOWEST), ceiling), high=ceiling,
        guess=ceiling / 2 if guess is None else guess, seeds=own, confirm_seeds=fresh, **settings,
    )  # fmt: skip
    return noted(found, attains.load, attains.slo)


def noted(found: Goodput, load: Load, slo: Slo) -> Goodput:
    """A goodput with the reasons why its requests may meet their targets only because they are few."""
    if not found.rate:
        return found
    told, rate, count = list[str](), found.rate, load.count
    # With a capacity of C requests/s request k waits k / C - k / rate. The wait of request attainment * count reaches
    # the target at rate / C = 1 + excess.
    excess = rate * slo.ttft / (slo.attainment * count)
    if math.isfinite(excess) and excess > SHORT:
        told.append(
            f"{count:,} requests arrive within {format_number(count / rate)} s at {rate:.4g} requests/s; up to"
            f" {excess / (1 + excess):.0%} of this rate may be a queue that still grows, because requests may wait for"
            f" {slo.ttft:.4g} s; more --requests show it"
        )
    if load.fitted is not None and not load.fitted.settles(count, rate):
        told.append(
            f"conversations pause so long ({load.fitted.settling:.4g} s) that {count:,} requests are over before"
            f" {rate:.4g} requests/s arrive; more --requests reach it"
        )
    return replace(found, notes=tuple(told))


class _OverError(Exception):
    """The time is over."""


@dataclass(frozen=True)
class GoodputSearch:
    """The search for a candidate's goodput, in any process: see Simulation.

    Instances for prompts and for decoding are simulated as a tandem, and to confirm the result as a cluster.

    limits         requests/s: a floor, at or below which a result is useless, and an upper bound of the goodput
    tolerance      relative error of the goodput
    confirmations  fresh seeds that confirm it; 0: it is not confirmed
    end            time of `time.monotonic` at which the search gives up
    """

    maker: Maker
    candidate: Candidate
    load: Load
    slo: Slo
    limits: tuple[float, float]
    guess: float
    tolerance: float
    seed: int = 0
    confirmations: int = 0
    end: float = math.inf

    @property
    def count(self) -> int:
        """See Simulation."""
        return self.load.count

    def outcome(self, progress: object = None) -> Goodput | None:
        """Searches. None: there was no time."""
        if time.monotonic() >= self.end:
            return None
        try:
            return self._search(self.maker.setup(self.candidate))
        except _OverError:
            return None

    def _search(self, setup: Setup) -> Goodput:
        floor, ceiling = self.limits
        roles = [(each.role, each.count) for each in setup.replicas]
        is_pair = roles == [("prefill", 1), ("decode", 1)]

        def run(load: Load, rate: float, seed: int) -> SimulationRun:
            if time.monotonic() >= self.end:
                raise _OverError
            if setup.cluster is None or (is_pair and seed == self.seed):
                return SimulationRun(setup, load, rate, seed, Parts(min(self.slo.tpot, MOST_TPOT)))
            return SimulationRun(setup, load, rate, seed)

        return find_goodput(
            Attains(run, self.load, self.slo), ceiling, self.seed, 1, self.confirmations, guess=self.guess, floor=floor,
            tolerance=self.tolerance, probes=(),
        )  # fmt: skip
