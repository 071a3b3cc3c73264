"""Many simulations: the number of processes changes nothing, and progress counts them all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.config import ClusterConfig
from quire.simulation.load import Load
from quire.simulation.pool import InProcess, Workers
from quire.simulation.run import SimulationRun
from quire.simulation.setup import Setup
from tests.cli.test_simulate import fitted as fitted
from tests.cli.test_simulate import folder as folder
from tests.cli.test_simulate import local as local
from tests.cli.test_simulate import made_workload


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
