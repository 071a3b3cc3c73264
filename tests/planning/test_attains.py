"""The share of requests that meet their targets, and doubts of a goodput."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.config import ClusterConfig
from quire.planning.attains import CLEARLY, Attains, ceiling_of, find_goodput, noted
from quire.planning.goodput import Goodput
from quire.simulation.load import Load
from quire.simulation.run import SimulationRun
from quire.simulation.setup import Setup
from quire.workload.fitted import fit
from quire.workload.slo import Slo
from tests.cli.test_simulate import fitted as fitted
from tests.cli.test_simulate import folder as folder
from tests.cli.test_simulate import local as local
from tests.cli.test_simulate import made_workload
from tests.effort import tries
from tests.simulation.test_outcome import outcome
from tests.workloads import equal_conversations


def test_what_few_requests_clearly_miss_is_not_simulated_with_more() -> None:
    runs: list[tuple[str, float, int]] = []

    def made(kind: str, share_of: Callable[[float, int], float]) -> Callable[[float, int], Any]:
        def run(rate: float, seed: int) -> Any:
            runs.append((kind, rate, seed))
            num_met = round(100 * share_of(rate, seed))
            found = outcome([0.1] * num_met + [0.9] * (100 - num_met), [0.01] * 100)
            return SimpleNamespace(count=100, outcome=lambda progress: found)

        return run

    # With few requests the rates 1, 2 and 3 attain these shares, or a little more or less; with many, 0.9 and 0.5.
    few = made("few", lambda rate, seed: {1: 0.95, 2: 0.75, 3: 0.65}[int(rate)] + (0.05 if seed else -0.05))
    many = made("many", lambda rate, seed: {1: 0.9, 2: 0.5}[int(rate)])
    loads = {Load(made_workload(), 60): few, (load := Load(made_workload(), 600)): many}
    first = next(iter(loads))
    attains = Attains(lambda load, *given: loads[load](*given), load, Slo(0.5, 0.1, 0.9), ((0, 1),), first=first)
    assert attains(1.0, 0) == attains(1.0, 1) == 0.9
    assert attains(2.0, 0) == 0.5, "0.75 is not clearly less than 0.9, though seed 0 alone would be"
    assert attains(3.0, 1) == pytest.approx(0.7) and attains(3.0, 0) == pytest.approx(0.6)
    pairs = [(kind, rate, seed) for rate in (1.0, 2.0) for kind in ("few", "many") for seed in (0, 1)]
    assert runs == [*pairs, ("few", 3.0, 0), ("few", 3.0, 1)]


def test_few_requests_for_a_loose_target_are_a_doubt() -> None:
    load = Load(made_workload(), 60)
    found = noted(Goodput(10.0, 0.95), load, Slo(4.0, attainment=0.9))
    (told,) = found.doubts
    # 60 requests in 6 s: with 5.74 requests/s the 54th waits for 4 s.
    assert "up to 43% of this rate" in told and "--requests" in told
    late, early = (outcome([seconds] * 60, [0.01] * 60) for seconds in (9.0, 0.1))
    attains = Attains(
        lambda load, rate, seed: SimpleNamespace(count=60, outcome=lambda progress: late if rate > 10 else early),
        load, Slo(4.0, attainment=0.9),
    )  # fmt: skip
    assert "of this rate may be a queue that still grows" in find_goodput(attains, 20.0, 0).doubts[0]
    assert not noted(Goodput(10.0, 0.95), load, Slo(0.2, attainment=0.9)).doubts
    assert not noted(Goodput(10.0, 0.95), load, Slo(tpot=0.1, attainment=0.9)).doubts
    days = equal_conversations(20, turns=2, gap=2.0, pause=1e4, num_in=9, num_out=2)
    (told,) = noted(Goodput(1.0, 0.95), Load(days, 20, fit(days)), Slo(0.2)).doubts
    assert "conversations pause so long" in told


def test_what_few_requests_clearly_miss_many_miss_too(local: Callable[..., Setup], seed: int) -> None:
    missed = 0
    for number in range(tries(1)):
        random = np.random.default_rng(seed + number)
        options = {"cache.memory": str(random.choice(["1MiB", "4MiB"])), "scheduler.max_running": 16}
        setup = local(ClusterConfig(mixed=int(random.integers(1, 3))), **options)
        slo = Slo(float(random.choice([0.05, 0.2])), float(random.choice([0.01, 0.02])))
        fitted = fit(made_workload())
        for part in (0.6, 0.9):
            rate = part * ceiling_of(setup, made_workload())
            few, many = (
                fmean(SimulationRun(setup, Load(made_workload(), count, fitted), rate, each).outcome().attainment(slo)
                      for each in (seed, seed + 1))
                for count in (60, 300)
            )  # fmt: skip
            if few < CLEARLY * slo.attainment:
                missed += 1
                assert many < slo.attainment, (number, part)
    assert missed
