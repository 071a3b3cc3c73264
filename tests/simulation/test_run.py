"""Drivers of a load: whole setups, exactly and with skipped steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from quire.config import ClusterConfig
from quire.placement.placement_file import Instances, Placement, Predicted
from quire.planning.option_trials import OptionTrials
from quire.simulation.load import Load
from quire.simulation.run import SimulationRun, quickly
from quire.simulation.setup import Setup
from quire.workload.slo import Slo
from quire.workload.workload import Arrival, Span, Workload
from tests.cli.test_plan_placement import _quick as _quick
from tests.cli.test_plan_placement import made_workload, planner


def setup_of_three(planned: OptionTrials, **settings: Any) -> Setup:
    placement = Placement((Instances("mixed", 3),), Predicted(3.0, 3.0, "GPU", 1.0, 0.9))
    return dataclasses.replace(planned.model.setup(placement), cluster=ClusterConfig(**settings))


def test_a_whole_setup_is_simulated_with_its_routing() -> None:
    planned = planner(Slo())
    load = Load(made_workload(40), 40)
    found = {
        routing: SimulationRun(setup_of_three(planned, routing=routing), load, 12.0, 0, quickly).outcome().last
        for routing in ("expected", "queue", "affinity")
    }
    for routing, last in found.items():
        exact = SimulationRun(setup_of_three(planned, routing=routing), load, 12.0, 0).outcome()
        assert exact.last == pytest.approx(last, rel=0.03), routing
    assert not np.array_equal(found["expected"], found["affinity"])


def test_messages_take_as_long_where_steps_are_skipped() -> None:
    planned, load = planner(Slo()), Load(made_workload(20), 20)
    setup = planned.model.setup(Placement((Instances("mixed", 1),), Predicted(1.0, 1.0, "GPU", 1.0, 0.9)))
    assert setup.cluster is not None and setup.ways.hop > 1e-6
    quick, exact = (SimulationRun(setup, load, 0.5, 0, *driver).outcome() for driver in ((quickly,), ()))
    assert quick.first == pytest.approx(exact.first, abs=1e-6) and quick.last == pytest.approx(exact.last, abs=1e-6)


def test_a_cluster_that_fetches_prefixes_skips_no_steps() -> None:
    planned = planner(Slo())
    alike = Workload("alike", [Arrival(0.1 * each, (Span(1, 256), Span(10 + each, 40)), 5) for each in range(20)])
    load, setup = Load(alike, 20), setup_of_three(planned)
    found = SimulationRun(setup, load, 12.0, 0, quickly).outcome()
    assert np.array_equal(found.last, SimulationRun(setup, load, 12.0, 0).outcome().last)
    assert any("neighbour" in str(each.counters) for each in found.used)
    assert not np.isnan(found.stages["queue"]).any()
    (first,), config = setup.replicas, setup.replicas[0].config
    unshared = dataclasses.replace(config, cache=dataclasses.replace(config.cache, share=False))
    first = dataclasses.replace(first, plan=dataclasses.replace(first.plan, config=unshared))
    alone = SimulationRun(dataclasses.replace(setup, replicas=(first,)), load, 12.0, 0, quickly).outcome()
    assert not any("neighbour" in str(each.counters) for each in alone.used)
    assert np.isnan(alone.stages["queue"]).all(), "steps are skipped"
