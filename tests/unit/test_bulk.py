"""Instances that skip steps end requests at the same times as engines that are simulated step by step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from quire.cluster.members import Member
from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.planning.latency import LatencyModel, Link
from quire.planning.slo import Slo
from quire.planning.traces import tokens
from quire.planning.workload import Arrival, Span, Workload
from quire.simulation.bulk import simulate_bulk
from quire.simulation.cluster import Alone, Place, SimulatedCluster
from quire.simulation.engine import Plan, make_engine
from quire.simulation.outcome import Outcome
from quire.simulation.simulate import simulate
from tests.effort import tries
from tests.engines import chunk_bytes
from tests.tiny_models import tiny_shape

SHAPE = tiny_shape(max_context=1024)
LATENCY = LatencyModel(
    {}, {"base": 0.004, "rows_from_1": 0.0002, "prompt_pairs": 1e-7, "context": 2e-6, "num_prompts": 1e-4}, (1,), {}, {}
)


def plan_of(chunks: int, **options: Any) -> Plan:
    config = EngineConfig.from_options({
        "model.dtype": "float32", "runtime.device": "cpu", "runtime.threads": 1,
        "cache.memory": chunks * chunk_bytes(SHAPE), "scheduler.max_running": 6, "scheduler.token_budget": 200,
        "scheduler.max_queue": 10_000, **options,
    })  # fmt: skip
    resolved, sizes = resolve(config, SHAPE)
    return Plan(SHAPE, resolved, sizes, LATENCY)


def load(seed: int, count: int, rate: float) -> Workload:
    """Requests with common beginnings, some of them in conversations."""
    rng = np.random.default_rng(seed)
    times, found = np.cumsum(rng.exponential(1 / rate, count)), list[Arrival]()
    for index, at in enumerate(times.tolist()):
        shared = (Span(int(rng.integers(4)), 64 * int(rng.integers(1, 4))),) if rng.random() < 0.6 else ()
        prompt = (*shared, Span(100 + index, int(rng.integers(1, 200))))
        num_out = int(rng.choice([1, 2, rng.integers(3, 140)]))
        if index and rng.random() < 0.15:
            before = found[-1]
            if before.after < 0:
                found.append(Arrival(0.0, (Span(100 + index, 20),), num_out, index - 1, 0.05))
                continue
        found.append(Arrival(at, prompt, num_out))
    return Workload("made up", found)


def equal_times(left: Outcome, right: Outcome) -> None:
    for name in ("arrived", "first", "last"):
        np.testing.assert_allclose(getattr(left, name), getattr(right, name), rtol=1e-9, atol=1e-9, err_msg=name)
    assert left.num_cached.tolist() == right.num_cached.tolist()
    assert left.attainment(Slo(0.1, 0.01)) == right.attainment(Slo(0.1, 0.01))


@pytest.mark.parametrize("chunks", [18, 30, 200])
@pytest.mark.parametrize("seed", range(tries(3)))
def test_one_instance_that_skips_steps_answers_at_the_same_times(seed: int, chunks: int) -> None:
    plan, workload = plan_of(chunks), load(seed, 60, 8.0)
    prompts = tokens(workload, range(200), seed)
    exact = simulate(workload, prompts, lambda events: Alone(events, partial(make_engine, plan)))
    skipping = simulate_bulk(workload, plan, 1)
    equal_times(exact, skipping)
    assert exact.used[0].num_steps == skipping.used[0].num_steps
    counters = exact.used[0].counters
    for name in ("preemptions", "steps", "decode_tokens", "prefill_tokens_computed", "prefill_tokens_cached"):
        assert counters[name] == skipping.used[0].counters[name], name
    assert chunks > 18 or counters["cache"]["bytes_evicted"], "the small cache evicts"  # type: ignore[index]


@pytest.mark.parametrize("seed", range(tries(3)))
def test_many_instances_behind_the_router_s_choice_do_too(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Instances tell how full their memory is at other moments.
    monkeypatch.setattr(Member, "fullness", lambda member: len(member.sequences) / member.ready.batch)
    plan, workload = plan_of(200), load(seed, 80, 40.0)
    prompts, capacity = tokens(workload, range(200), seed), plan.capacity
    places = [Place(f"mixed-{number}", "mixed", partial(make_engine, plan), capacity) for number in range(3)]
    exact = simulate(
        workload, prompts,
        lambda events: SimulatedCluster(events, places, hop=0.0, bulk=Link(0.0, 1e9), fetches=False),
    )  # fmt: skip
    equal_times(exact, simulate_bulk(workload, plan, 3))
