"""Loads of a simulation: seeds, rates, processes, progress and bounds."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import numpy as np

from quire.config import ClusterConfig
from quire.planning.bounds import RequestStats
from quire.simulation.attains import CLEARLY, bound_of, ceiling_of
from quire.simulation.load import Load
from quire.simulation.pool import InProcess, Workers
from quire.simulation.run import SimulationRun
from quire.simulation.setup import Setup
from quire.workload.fitted import fit
from quire.workload.slo import ANYTHING, Slo
from tests.cli.test_simulate import fitted as fitted
from tests.cli.test_simulate import folder as folder
from tests.cli.test_simulate import local as local
from tests.cli.test_simulate import made_workload
from tests.effort import tries


def test_the_same_seed_gives_the_same_result_and_another_one_does_not(
    local: Callable[..., Setup], fitted: Load
) -> None:
    setup = local()
    one, same, other = (SimulationRun(setup, fitted, 12.0, seed).outcome() for seed in (3, 3, 4))
    assert np.array_equal(one.last, same.last) and one.used == same.used
    assert not np.array_equal(one.last, other.last)


def test_the_same_requests_arrive_at_another_rate(local: Callable[..., Setup], fitted: Load) -> None:
    slow, fast = (SimulationRun(local(), fitted, rate, 1).outcome() for rate in (2.0, 8.0))
    assert np.array_equal(slow.num_in, fast.num_in) and np.allclose(slow.arrived, 4 * fast.arrived)


def test_the_number_of_processes_changes_nothing(local: Callable[..., Setup]) -> None:
    setup, load = local(ClusterConfig(mixed=2)), Load(made_workload(20), 20)
    runs = [SimulationRun(setup, load, rate, seed) for rate, seed in ((4.0, 0), (16.0, 1), (8.0, 2))]
    with Workers(2) as workers:
        apart = workers.run(runs)
    for one, other in zip(InProcess().run(runs), apart, strict=True):
        for field in ("arrived", "first", "last", "num_cached"):
            assert np.array_equal(getattr(one, field), getattr(other, field)), field
        assert one.used == other.used


def test_progress_counts_the_requests_of_all_runs(local: Callable[..., Setup]) -> None:
    told: list[tuple[int, int]] = []
    load = Load(made_workload(5), 5)
    InProcess().run([SimulationRun(local(), load)] * 2, lambda *counts: told.append(counts))
    assert told == [(done, 10) for done in range(1, 11)]


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


def test_the_bound_of_a_rate_is_never_exceeded(local: Callable[..., Setup]) -> None:
    workload, everything = made_workload(80), ANYTHING
    setup = local()
    bound = bound_of(setup.replicas[0]).mixed(RequestStats.of(workload), everything)
    outcome = SimulationRun(setup, Load(workload, 80), 5 * bound).outcome()
    assert 0.4 * bound < 80 / outcome.seconds <= bound
