"""The phases of a pair, simulated apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from quire.config import ClusterConfig
from quire.simulation.load import Load
from quire.simulation.parts import Parts, arriving, prompts_of
from quire.simulation.run import SimulationRun, quickly
from quire.simulation.setup import Setup
from quire.workload.fitted import fit
from quire.workload.workload import Arrival, Span, Workload
from tests.cli.test_simulate import folder as folder
from tests.cli.test_simulate import local as local
from tests.cli.test_simulate import made_workload
from tests.workloads import equal_conversations


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_conversations_arrive_at_the_rate_that_is_asked_for(rate: float, local: Callable[..., Setup]) -> None:
    """Of five turns with pauses of 3 s, in an engine, in a cluster, and in each phase by itself."""
    workload = equal_conversations(200, turns=5, gap=2.0, pause=3.0, num_in=20, num_out=4)
    load, setup = Load(workload, 60, fit(workload)), local()
    apart = local(ClusterConfig(prefill=1, decode=1))
    phases = [dataclasses.replace(apart, replicas=(each,)) for each in apart.replicas]
    runs = [
        SimulationRun(setup, load, rate),
        SimulationRun(apart, load, rate),
        SimulationRun(apart, load, rate, driver=quickly),
    ]
    for run in [*runs, *(SimulationRun(each, load, rate, driver=Parts(0.01)) for each in (setup, apart, *phases))]:
        outcome = run.outcome()
        assert len(outcome.arrived) == pytest.approx(60, rel=0.15), run
        assert outcome.offered == pytest.approx(rate, rel=0.15), run
    assert SimulationRun(setup, Load(workload, 60), 4.0).outcome().offered < 3.5, (
        "a replay begins with first turns alone"
    )


def test_a_pair_as_a_tandem_is_like_a_cluster(local: Callable[..., Setup]) -> None:
    setup, load = local(ClusterConfig(prefill=1, decode=1)), Load(made_workload(60), 60)
    tandem = SimulationRun(setup, load, 10.0, driver=Parts(0.01)).outcome()
    whole = SimulationRun(setup, load, 10.0).outcome()
    assert tandem.ttft.mean() == pytest.approx(whole.ttft.mean(), rel=0.05)
    assert tandem.tpot.mean() == pytest.approx(whole.tpot.mean(), rel=0.1)


def test_conversations_keep_their_lengths_in_each_part() -> None:
    arrivals = [
        Arrival(0.0, (Span(1, 10), Span(2, 5)), 7),
        Arrival(0.0, (Span(3, 4),), 3, after=0, pause=1.0),
        Arrival(2.0, (Span(1, 10),), 2),
        Arrival(0.0, (Span(4, 6),), 1, after=1, pause=0.5),
    ]
    workload = Workload("turns", arrivals)
    prompts = prompts_of(workload, tpot=0.1)
    assert prompts.prompt_tokens.tolist() == workload.prompt_tokens.tolist() == [15, 26, 10, 35]
    assert prompts.columns.num_out.tolist() == [1, 1, 1, 1]
    assert prompts.columns.pause.tolist() == pytest.approx([0.0, 1.6, 0.0, 0.7])
    moved = arriving(workload, np.array([0.3, 5.0, 0.1, 9.0]))
    assert moved.prompt_tokens.tolist() == [10, 15, 26, 35] and moved.columns.after.tolist() == [-1] * 4
    assert moved.columns.at.tolist() == [0.1, 0.3, 5.0, 9.0] and moved.cached_tokens.tolist() == [0, 0, 0, 0]
