"""Loads of a simulation: seeds and rates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.simulation.load import Load
from quire.simulation.run import SimulationRun
from quire.simulation.setup import Setup
from tests.cli.test_simulate import fitted as fitted
from tests.cli.test_simulate import folder as folder
from tests.cli.test_simulate import local as local


def test_the_same_seed_gives_the_same_result_and_another_one_does_not(
    local: Callable[..., Setup], fitted: Load
) -> None:
    setup = local()
    one, same, other = (SimulationRun(setup, fitted, 12.0, seed).outcome() for seed in (3, 3, 4))
    assert np.array_equal(one.last, same.last) and one.used == same.used
    assert not np.array_equal(one.last, other.last)
