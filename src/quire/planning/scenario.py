"""What `quire simulate` simulates: a setup under load, at given rates, and the highest rate that it sustains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.planning.attains import Attains, ceiling_of, find_goodput
from quire.planning.goodput import Goodput
from quire.simulation.load import Load
from quire.simulation.outcome import Outcome
from quire.simulation.pool import Pool, Progress
from quire.simulation.run import SimulationRun, quickly
from quire.simulation.setup import Setup
from quire.workload.slo import Slo

USUAL_RUNS = 20
"""Approximate number of simulations of a search for the goodput."""


@dataclass(frozen=True)
class Scenario:
    """Instances, requests and targets.

    units  number of GPUs or machines
    unit   GPU or machine
    cores  cores that all instances share; None: unknown, or no cores
    """

    setup: Setup
    load: Load
    slo: Slo
    units: float
    unit: str
    cores: int | None = None

    @property
    def origin(self) -> str:
        """The origin of its latencies, in words."""
        return " and ".join(sorted({each.plan.latency.origin.value for each in self.setup.replicas}))

    def outcomes(
        self, rates: Sequence[float | None], seed: int, pool: Pool, progress: Progress = lambda done, total: None
    ) -> dict[float, Outcome]:
        """The outcomes by rate. None among the rates: the workload's own."""
        rates = list(dict.fromkeys(rates))
        found = pool.run([SimulationRun(self.setup, self.load, rate, seed) for rate in rates], progress)
        own = self.load.workload.rate
        return {own if rate is None else rate: each for rate, each in zip(rates, found, strict=True)}

    def goodput(
        self, seed: int, pool: Pool, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[Goodput, float, Outcome]:
        """The goodput, its rate, or the lowest tried rate if there is none, and the outcome at this rate."""
        done = 0

        def on_run(rate: float, seed: int, outcome: Outcome) -> None:
            nonlocal done
            done += 1
            progress(done, max(done, USUAL_RUNS))

        attains = Attains(
            lambda load, rate, seed: SimulationRun(self.setup, load, rate, seed, quickly),
            self.load, self.slo, (), pool, on_run,
        )  # fmt: skip
        found = find_goodput(attains, ceiling_of(self.setup, self.load.workload), seed)
        rate = found.rate or min(point.rate for point in found.points)
        return found, rate, SimulationRun(self.setup, self.load, rate, seed + 1).outcome()

    def warnings(self) -> list[str]:
        """Doubts that neither latencies nor engines report themselves."""
        told, workload, setup = [], self.load.workload, self.setup
        count = int((workload.prompt_tokens + workload.columns.num_out > setup.max_context).sum())
        if count:
            told.append(
                f"{count:,} of the trace's requests exceed the context of {setup.max_context:,} tokens, and are refused"
            )
        threads = sum(each.count * (each.config.runtime.threads or 0) for each in setup.replicas)
        if self.cores is not None and threads > self.cores:
            told.append(
                f"{threads} threads would share the {self.cores} cores of this machine; the latencies are those of"
                " threads with cores of their own"
            )
        if self.load.fitted is not None and not self.load.fitted.accepted:
            told.append("requests that are drawn are not like those of the trace; results with them may differ from it")
        return told

    def facts(self) -> dict[str, Any]:
        """Requests, targets and instances, for JSON."""
        return {
            "workload": self.load.facts(),
            "slo": self.slo.facts(),
            "instances": [
                {
                    "role": each.role,
                    "count": each.count,
                    "each": each.unit,
                    "cache_tokens": each.plan.sizes.tokens,
                    "prompt_rows": each.capacity.prompt_rows,
                    "batch": each.capacity.batch,
                    "latency": each.plan.latency.origin.value,
                }
                for each in self.setup.replicas
            ],
        }

    def goodput_facts(self, found: Goodput) -> dict[str, Any]:
        """All numbers of a goodput, for JSON."""
        return {
            "rate": found.rate,
            "rate_per_unit": found.rate / self.units,
            "unit": self.unit,
            "attainment": found.attainment,
            "verdict": found.verdict.value,
            "confirmed": found.confirmed,
            "target": found.target,
            "points": [list(point) for point in found.points],
            "doubts": list(found.doubts),
            "origin": self.origin,
        }
