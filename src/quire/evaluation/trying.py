"""The goodput of a configuration of this machine, as another process searches it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from quire.planning.auto import Rung
from quire.planning.goodput import Goodput, goodput
from quire.simulation.attains import LOWEST, Attains, noted
from quire.simulation.candidate import Candidate, Maker
from quire.simulation.load import Load
from quire.simulation.parts import Parts
from quire.simulation.run import SimulationRun
from quire.simulation.setup import Setup
from quire.workload.slo import Slo
from quire.workload.workload import Workload

CONFIRMATIONS = 2
"""Fresh seeds that confirm the goodput of a finalist."""

MOST_TPOT = 1.0
"""Seconds per token that answers are taken to need at most, before what follows them in a conversation."""


@dataclass(frozen=True, eq=False)
class Slices(Load):
    """Disjoint slices of a workload, chosen by seed. Gaps are those of the slice, scaled."""

    @property
    def num_slices(self) -> int:
        """Slices of `count` requests. Conversations are one slice, because their requests follow each other."""
        columns = self.workload.columns
        return 1 if (columns.after >= 0).any() else max(1, len(self.workload.arrivals) // self.count)

    def drawn(self, rate: float | None, seed: int) -> Workload:
        """See Load. Seeds that differ by a multiple of `num_slices` draw the same requests."""
        first = seed % self.num_slices * self.count
        if not first:
            return super().drawn(rate, seed)
        columns = self.workload.columns
        begun = float(columns.at[first])
        part = [replace(each, at=each.at - begun) for each in columns[first : first + self.count]]
        found = Workload(self.workload.name, part)
        return found if rate is None else found.at_rate(rate)


def fresh_seeds(load: Load, seed: int) -> tuple[int, ...]:
    """Seeds that draw other requests than a seed does, each of them others: CONFIRMATIONS, or fewer if there are not
    enough requests.
    """
    parts = load.num_slices if isinstance(load, Slices) else 1
    count = CONFIRMATIONS if load.fitted is not None else min(CONFIRMATIONS, parts - 1)
    return tuple(range(seed + 1, seed + 1 + count))


class _OverError(Exception):
    """The time is over."""


@dataclass(frozen=True)
class Trying:
    """The goodput of a candidate, which another process may search.

    Instances for prompts and for decoding are simulated as a tandem, and to confirm the result as a cluster.

    limits  requests/s: a floor, at or below which a result is useless, and an upper bound of the goodput
    end     time of `time.monotonic` at which the search gives up
    """

    maker: Maker
    candidate: Candidate
    load: Load
    slo: Slo
    limits: tuple[float, float]
    guess: float
    rung: Rung
    seed: int = 0
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

        def run(rate: float, seed: int) -> SimulationRun:
            if time.monotonic() >= self.end:
                raise _OverError
            if not setup.is_cluster or (is_pair and seed == self.seed):
                return SimulationRun(setup, self.load, rate, seed, Parts(min(self.slo.tpot, MOST_TPOT)))
            return SimulationRun(setup, self.load, rate, seed)

        fresh = fresh_seeds(self.load, self.seed) if self.rung.confirms else ()
        attains = Attains(run, self.slo, ((self.seed,), fresh))
        found = goodput(
            attains,
            self.slo.attainment,
            low=min(max(floor, ceiling / LOWEST), ceiling),
            high=ceiling,
            guess=self.guess,
            tolerance=self.rung.tolerance,
            seeds=(self.seed,),
            confirm_seeds=fresh,
            probes=(),
        )
        return noted(found, self.load, self.slo) if self.rung.confirms and found.rate else found
