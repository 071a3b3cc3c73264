"""What simulations say of requests, and that a simulated engine is the queue that formulas describe."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from quire.simulation.bulk import BulkSimulation
from quire.simulation.cluster import Alone
from quire.simulation.engine import make_engine
from quire.simulation.outcome import Outcome, Used
from quire.simulation.queueing import waits
from quire.simulation.simulate import simulate
from quire.timing.latency import LatencyModel
from quire.workload.slo import Slo
from quire.workload.workload import Arrival, Span, Workload
from tests.benchmark_scripts import benchmark
from tests.simulation.test_bulk import Stages, plan_of

queues = benchmark("queues")


def outcome(ttft: list[float], tpot: list[float], num_out: int = 11) -> Outcome:
    arrived = np.arange(len(ttft), dtype=np.float64)
    first = arrived + ttft
    last = first + np.array(tpot) * (num_out - 1)
    counts = np.full(len(ttft), num_out)
    return Outcome(arrived, first, last, counts, counts * 10, counts * 0, {}, {}, (), 100.0)


def test_a_request_must_meet_both_targets() -> None:
    found = outcome([0.9, *[0.1] * 9], [0.01] * 9 + [0.5])
    slo = Slo(0.5, 0.1)
    assert found.attainment(slo) == pytest.approx(0.8)
    assert (found.ttft <= 0.5).mean() == (found.tpot <= 0.1).mean() == pytest.approx(0.9)
    assert found.attainment(slo.scaled(2)) == pytest.approx(0.9) and found.attainment(slo.scaled(5.01)) == 1.0


def test_the_time_per_token_leaves_out_the_first() -> None:
    """Tokens at 0.5, 0.6, 0.72 and 0.8 s."""
    one = np.zeros(1)
    found = Outcome(one, one + 0.5, one + 0.8, np.array([4]), np.array([9]), np.array([0]), {}, {}, (), 1.0)
    assert found.ttft.tolist() == [0.5] and found.tpot[0] == pytest.approx(0.1) != 0.075


def test_what_failed_meets_nothing() -> None:
    found = outcome([0.1, np.inf], [0.01, np.inf])
    assert found.num_failed == 1 and found.attainment(Slo()) == 0.5 and found.tpot[1] == np.inf


def test_the_time_before_the_first_request_is_nobody_s() -> None:
    used = (Used("mixed-0", "mixed", 25.0, 10, 0),)
    found = dataclasses.replace(outcome([0.1] * 51, [0.01] * 51), used=used, seconds=100.0)
    late = dataclasses.replace(found, arrived=found.arrived + 3600, first=found.first + 3600, last=found.last + 3600)
    late = dataclasses.replace(late, seconds=3700.0)
    for each in (found, late):
        assert each.utilisation() == {"mixed-0": 0.25} and each.duration == 100.0 and each.offered == 1.0
        said = each.facts(1.0, Slo(1.0), "fitted")
        assert said["seconds"] == 100.0 and said["tokens_per_second"] == pytest.approx(51 * 11 / 50.2)


def test_only_requests_that_arrive_in_time_count() -> None:
    found = outcome([0.1] * 5 + [9.0] * 5, [0.01] * 10)
    tiers, stages = {"disk": np.arange(10)}, {"queue": np.arange(10.0)}
    found = dataclasses.replace(found, by_tier=tiers, stages=stages)
    part = found.counting((3.0, 7.0))
    assert part.arrived.tolist() == [3, 4, 5, 6] and part.attainment(Slo(1.0)) == 0.5
    assert part.by_tier["disk"].tolist() == [3, 4, 5, 6] == part.stages["queue"].tolist()
    assert found.counting((0.0, np.inf)) is found and found.counting((50.0, 60.0)) is found
    # An instance that was busy for 60 of all 100 s was no busier while the others counted.
    busy = dataclasses.replace(found, used=(Used("mixed-0", "mixed", 60.0, 10, 0),)).counting((3.0, 7.0))
    assert busy.utilisation() == {"mixed-0": 0.6} and busy.offered == 1.0
    assert busy.tokens_per_second == pytest.approx(4 * 11 / (6 + 9.0 + 0.1 - 3))


def test_shares_are_those_of_stages_that_are_known() -> None:
    """Of 4 s between arrival and last token, 1 s is decoding; nothing is known of the request that failed."""
    arrived, first, last = np.zeros(3), np.array([1.5, 1.5, np.inf]), np.array([2.0, 2.0, np.inf])
    unknown, counts = np.full(3, np.nan), np.full(3, 2)
    stages = {"queue": unknown, "prefill": unknown, "transfer": unknown, "decode": np.array([0.5, 0.5, np.nan])}
    found = Outcome(arrived, first, last, counts, counts, counts * 0, {}, stages, (), 2.0)
    assert found.shares() == {"decode": 0.25}
    known = {"queue": np.array([0.5, 1.0, 3.0]), "prefill": np.array([1.0, 0.5, np.nan]), "decode": stages["decode"]}
    assert dataclasses.replace(found, stages=known).shares() == {"queue": 0.375, "prefill": 0.375, "decode": 0.25}


def test_tokens_per_second_are_those_of_answers() -> None:
    found = outcome([0.1, np.inf, 0.1], [0.01, np.inf, 0.01])
    assert found.facts(1.0, Slo(), "fitted")["tokens_per_second"] == pytest.approx(2 * 11 / 2.2)


def served(times: list[float], seconds: float, stages: int = 1) -> dict[str, np.ndarray]:
    """TTFT of prompts that an instance of one or two stages computes one after the other, each in as many seconds."""
    fixed = LatencyModel({}, {"base": seconds}, (1,), {}, {})
    plan = plan_of(30, **{"scheduler.max_running": 1})
    plan = dataclasses.replace(plan, latency=fixed if stages == 1 else Stages(fixed))
    load = Workload("fixed", [Arrival(at, (Span(number, 100),), 1) for number, at in enumerate(times)])
    prompts = [[number % 200] * 100 for number in range(len(times))]
    exact = simulate(load, prompts, lambda events: Alone(events, partial(make_engine, plan)))
    return {"exact": exact.ttft, "bulk": BulkSimulation(load, plan, 1).run().ttft}


@pytest.mark.parametrize("stages,expected", [(1, [0.1, 0.15, 0.1]), (2, [0.1, 0.1, 0.1])])
def test_three_requests_wait_as_by_hand(stages: int, expected: list[float]) -> None:
    for name, found in served([0.0, 0.05, 0.3], 0.1, stages).items():
        assert found.tolist() == pytest.approx(expected), name
    faster = served([0.0, 0.05, 0.3], 0.0625)
    assert faster["exact"].tolist() == pytest.approx([0.0625, 0.075, 0.0625])


@pytest.mark.parametrize("stages", [1, 2])
def test_an_instance_is_the_queue_of_the_formulas(stages: int) -> None:
    times = queues.poisson_arrivals(7.0, 400, np.random.default_rng(0))
    expected = queues.tandem(times, [0.1 / stages] * stages) - times
    assert stages > 1 or expected == pytest.approx(waits(times, 0.1) + 0.1)
    for name, found in served(times.tolist(), 0.1, stages).items():
        np.testing.assert_allclose(found, expected, atol=1e-9, err_msg=name)


def test_steps_outside_of_the_measured_range_are_counted() -> None:
    plan = plan_of(30)
    known = LatencyModel({}, {"base": 0.01}, (1,), {}, {"decode_rows": (0.0, 4.0), "prompt_rows": (0.0, 50.0)})
    plan = dataclasses.replace(plan, latency=known)
    load = Workload("long", [Arrival(0.0, (Span(0, 100),), 5)])
    for found in (
        simulate(load, [[7] * 100], lambda events: Alone(events, partial(make_engine, plan))),
        BulkSimulation(load, plan, 1).run(),
    ):
        assert (found.used[0].num_steps, found.used[0].num_out) == (5, 1)
