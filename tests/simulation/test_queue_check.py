"""Queues of simulated instances that compute prompts, compared with the formulas."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from quire.placement.divisions import Division, Role
from quire.simulation.load import Load
from quire.simulation.queue_check import prompt_seconds, queue_check
from quire.timing.latency import StepWork
from quire.workload.slo import Slo
from quire.workload.workload import Arrival, Span, Workload
from tests.benchmark_scripts import benchmark
from tests.cli.test_plan_placement import _quick as _quick
from tests.cli.test_plan_placement import latency, planner

queues = benchmark("queues")


def poisson_load(count: int) -> Load:
    rng = np.random.default_rng(1)
    at = queues.poisson_arrivals(1.0, count, rng).tolist()
    arrivals = [
        Arrival(time, (Span(index, int(size)),), 2)
        for index, (time, size) in enumerate(zip(at, rng.integers(200, 1200, count), strict=True))
    ]
    return Load(Workload("poisson", arrivals), count)


def test_a_simulated_instance_for_prompts_is_a_queue_where_it_computes_one_at_a_time() -> None:
    made = planner(Slo(1.0, 0.05, 0.9))
    setup = made.model.setup_of(Division(Role.PREFILL))
    alone = queue_check(setup, poisson_load(400), 0.0, 0.1, 0)
    assert alone.simulated == pytest.approx(alone.one_by_one, rel=0.01)
    assert alone.one_by_one == pytest.approx(alone.closed, rel=0.02)
    busy = queue_check(setup, poisson_load(2000), 0.0, 4.0, 0)
    assert busy.one_by_one == pytest.approx(busy.closed, rel=0.1) and busy.closed > 1.2 * alone.closed
    assert queue_check(setup, poisson_load(50), 0.0, 1e3, 0).closed == math.inf


def test_a_prompt_alone_takes_its_slices() -> None:
    model, made = latency(1), planner(Slo(1.0, 0.05, 0.9), **{"scheduler.token_budget": 128})
    plan = dataclasses.replace(made.model.setup_of(Division(Role.PREFILL)).replicas[0].plan, latency=model)
    busy, until = prompt_seconds(plan, 64, 264)
    slices = (StepWork(128, 128 * (64 + 192) / 2, num_prompts=1), StepWork(72, 72 * (192 + 264) / 2, num_prompts=1))
    assert busy == until == pytest.approx(sum(map(model.seconds, slices)))
