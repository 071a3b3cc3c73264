"""No instance serves more than its bound, and what its bound excludes misses its targets alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.planning.attains import bound_of, ceiling_of
from quire.planning.bounds import Bound, RequestStats, joint_bound
from quire.simulation.bulk import BulkSimulation
from quire.simulation.engine import Plan
from quire.simulation.hardware import Target
from quire.simulation.run import run_of
from quire.simulation.setup import Replicas, Setup
from quire.timing.analytic import AnalyticModel
from quire.timing.devices import DEVICES
from quire.timing.latency import LatencyModel, StepTime, StepWork, pairs_of
from quire.workload.slo import ANYTHING, Slo
from quire.workload.workload import Arrival, Span, Workload
from tests.effort import tries
from tests.engines import chunk_bytes
from tests.tiny_models import of_layers, tiny_shape

SHAPE = tiny_shape(max_context=2048)
BUDGET, BATCH = 256, 24
FITTED = LatencyModel(
    {},
    {"base": 0.004, "rows_from_1": 2e-4, "rows_from_64": 1e-4, "prompt_pairs": 1e-7, "context": 2e-6, "unique": 1e-6},
    (1, 64), {}, {},
)  # fmt: skip


def latencies() -> list[StepTime]:
    target, config = Target("opt-13b", DEVICES["a100-80g"]), EngineConfig()
    return [FITTED, *(target.latency(config, tp, pp) for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 4), (1, 8)))]


def names(latency: StepTime) -> str:
    return f"tp {latency.tp} pp {latency.pp}" if isinstance(latency, AnalyticModel) else "fitted"


def plan_of(latency: StepTime, window: int | None = None, **options: Any) -> Plan:
    config = EngineConfig.from_options({
        "model.dtype": "float32", "runtime.device": "cpu", "runtime.threads": 1,
        "cache.memory": 2000 * chunk_bytes(SHAPE), "scheduler.max_running": BATCH, "scheduler.token_budget": BUDGET,
        "scheduler.max_queue": 10_000, **options,
    })  # fmt: skip
    shape = of_layers(SHAPE, window=window)
    resolved, sizes = resolve(config, shape)
    return Plan(shape, resolved, sizes, latency)


def load(seed: int, count: int, rate: float, num_out: int | None = None) -> Workload:
    rng, found = np.random.default_rng(seed), list[Arrival]()
    for index, at in enumerate(np.cumsum(rng.exponential(1 / rate, count)).tolist()):
        shared = (Span(int(rng.integers(3)), 128),) if rng.random() < 0.3 else ()
        prompt = (*shared, Span(100 + index, int(rng.integers(1, 900))))
        found.append(Arrival(at, prompt, num_out or int(rng.integers(1, 120))))
    return Workload("made up", found)


@pytest.mark.parametrize("seed", range(tries(2)))
@pytest.mark.parametrize("latency", latencies(), ids=names)
def test_what_arrives_at_once_takes_at_least_as_long_as_the_bound_says(latency: StepTime, seed: int) -> None:
    bound = Bound(latency, BUDGET, BATCH)
    for num_out in (None, 1):
        workload = load(seed, 100, 1e6, num_out)
        outcome = BulkSimulation(workload, plan_of(latency), 1).run()
        most = bound.mixed(RequestStats.of(workload), ANYTHING)
        assert (0.05 if getattr(latency, "pp", 1) > 2 else 0.3) * most < 100 / outcome.seconds <= most * (1 + 1e-9)
        if num_out == 1:
            assert 100 / outcome.seconds <= bound.prompts(RequestStats.of(workload), ANYTHING) * (1 + 1e-9)


@pytest.mark.parametrize("latency", latencies(), ids=names)
def test_a_bound_of_zero_is_right(latency: StepTime) -> None:
    """Targets from what requests really get when they come alone: those that half of them meet are not excluded."""
    workload = load(7, 60, 1e-3)
    outcome = BulkSimulation(workload, plan_of(latency), 1).run()
    asked, bound = RequestStats.of(workload), Bound(latency, BUDGET, BATCH)
    ttft, tpot = float(np.quantile(outcome.ttft, 0.5)), float(np.quantile(outcome.tpot, 0.5))
    for slo in (Slo(ttft, np.inf, 0.5), Slo(np.inf, tpot, 0.5)):
        assert outcome.attainment(slo) >= 0.5 and bound.mixed(asked, slo) > 0
    assert bound.prompts(asked, Slo(ttft, np.inf, 0.5)) > 0 and bound.decoding(asked, Slo(np.inf, tpot, 0.5)) > 0
    hard = Slo(float(np.quantile(outcome.ttft, 0.5)) / 10, np.inf, 0.9)
    assert bound.mixed(asked, hard) == 0 == bound.prompts(asked, hard)


@pytest.mark.parametrize("latency", latencies(), ids=names)
@pytest.mark.parametrize("seed", range(tries(5)))
def test_a_step_with_a_prompt_is_no_faster_with_more_work(latency: StepTime, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(50):
        rows, batch = int(rng.integers(1, 512)), int(rng.integers(0, 40))
        context = float(batch * rng.integers(1, 2000))
        work = StepWork(rows, rows * rows / 2.0, batch, context, context, 1)
        more = work._replace(prompt_rows=rows + 16, prompt_pairs=work.prompt_pairs + 16 * rows)
        alone = StepWork(rows, rows * rows / 2.0, num_prompts=1)
        assert latency.seconds(more) >= latency.seconds(work) >= latency.seconds(alone) * (1 - 1e-12)


def test_a_window_limits_what_a_token_attends_to() -> None:
    workload = Workload("long", [Arrival(0.0, (Span(1, 5000),), 100)])
    whole, near = RequestStats.of(workload), RequestStats.of(workload, window=1000)
    assert whole.context == 5050 and near.context == near.own == 1000
    assert whole.pairs == 5000 * 2500 and near.pairs == 1000 * 500 + 4000 * 1000


@pytest.mark.parametrize("seed", range(tries(5)))
def test_a_prompt_has_the_same_pairs_in_any_slices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cached, rows = int(rng.integers(1, 40)) * 64, int(rng.integers(1, 3000))
    for window in (None, 1, int(rng.integers(1, 5000))):
        most = np.inf if window is None else window
        cuts = sorted({0, rows, *rng.integers(0, rows, 5).tolist()})
        sliced = sum(pairs_of(cached + begin, end - begin, most) for begin, end in itertools.pairwise(cuts))
        exact = sum(min(place + 0.5, most) for place in range(cached, cached + rows))
        first = Arrival(0.0, (Span(1, cached),), 1)
        asked = RequestStats.of(
            Workload("twice", [first, Arrival(1.0, (Span(1, cached), Span(2, rows)), 1)]), window=window
        )
        # A prompt computes its last token even if that is cached.
        assert sliced == pytest.approx(exact, rel=1e-3) and asked.pairs[1] == pytest.approx(sliced, rel=1e-12)


@pytest.mark.parametrize("kind", ["window", "retention"])
def test_the_ceiling_counts_what_rows_attend_to_and_is_not_exceeded(kind: str) -> None:
    """What a window or retention leaves out takes no time: the ceiling is above that of a dense cache, and holds."""
    retention = {"retain.budget": 0.25, "retain.profile_rows": 16}
    plan = plan_of(FITTED, **(retention if kind == "retention" else {"window": 128}))
    setup = Setup((Replicas("mixed", plan),))
    workload = load(3, 60, 1e6)
    dense = bound_of(setup.replicas[0]).mixed(RequestStats.of(workload), ANYTHING)
    ceiling = ceiling_of(setup, workload)
    outcome = run_of(setup, workload, 0)
    assert 1.3 * dense < ceiling and 0.2 * ceiling < 60 / outcome.seconds <= ceiling * (1 + 1e-9)


def test_a_share_that_is_reached_but_for_rounding_is_reached() -> None:
    rows = np.array([10.0] * 93 + [1000.0] * 7)
    zeros = np.zeros(100)
    seconds = FITTED.seconds(StepWork(prompt_rows=100)) / 100 * 11
    assert Bound(FITTED, 256, 8).prompts(RequestStats(rows, zeros, zeros, zeros, zeros), Slo(seconds, 1.0, 0.93)) > 0


def test_instances_of_three_roles_serve_what_each_serves() -> None:
    """Prompts and decoding apart serve as much as the slower ones; mixed instances serve beside them."""
    made_up = LatencyModel({}, {"base": 0.01, "rows_from_1": 1e-4, "context": 1e-6}, (1,), {}, {})
    bound = Bound(made_up, 256, 16)
    asked = RequestStats.of(Workload("w", [Arrival(float(each), (Span(each, 90),), 9) for each in range(20)]))
    prompts, decoding, mixed = (bound.of(role, asked, ANYTHING) for role in ("prefill", "decode", "mixed"))
    roles = [("prefill", 2, bound), ("decode", 1, bound), ("mixed", 3, bound)]
    assert joint_bound(roles, asked, ANYTHING) == pytest.approx(3 * mixed + min(2 * prompts, decoding))
    assert joint_bound(roles[:1], asked, ANYTHING) == pytest.approx(2 * prompts)
    assert joint_bound(roles[::2], asked, ANYTHING) == pytest.approx(2 * prompts + 3 * mixed)
    assert joint_bound([*roles, roles[1]], asked, ANYTHING) == pytest.approx(3 * mixed + min(2 * prompts, 2 * decoding))
