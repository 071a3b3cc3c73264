"""Instances that skip steps end requests at the same times as engines that are simulated step by step."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest

from quire.cluster.members import Member
from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.simulation.bulk import BulkSimulation
from quire.simulation.cluster import Alone, Place, SimulatedCluster
from quire.simulation.engine import Plan, make_engine
from quire.simulation.outcome import Outcome
from quire.simulation.simulate import simulate
from quire.timing.latency import LatencyModel, Link, Origin, StepWork
from quire.workload.slo import Slo
from quire.workload.traces import tokens
from quire.workload.workload import Arrival, Span, Workload
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


def both(workload: Workload, plan: Plan) -> tuple[Outcome, Outcome]:
    """What comes of a workload on one engine: step by step, and with skipped steps."""
    prompts = tokens(workload, range(200), 0)
    exact = simulate(workload, prompts, lambda events: Alone(events, partial(make_engine, plan)))
    return exact, BulkSimulation(workload, plan, 1).run()


def cluster_of(plan: Plan, count: int, workload: Workload, **settings: Any) -> Outcome:
    """What comes of a workload on a cluster whose messages take no time."""
    places = [Place(f"mixed-{number}", "mixed", partial(make_engine, plan), plan.capacity) for number in range(count)]
    return simulate(
        workload, tokens(workload, range(200), 0),
        lambda events: SimulatedCluster(events, places, hop=0.0, bulk=Link(0.0, 1e9), fetches=False, **settings),
    )  # fmt: skip


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
    exact, skipping = both(workload, plan)
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
    equal_times(cluster_of(plan, 3, workload), BulkSimulation(workload, plan, 3).run())


@dataclasses.dataclass(frozen=True)
class Stages:
    """A pipeline of two stages: the next prompt enters when the one before has left the first."""

    inner: LatencyModel = LATENCY
    origin = Origin.MODELLED

    def seconds(self, work: StepWork) -> float:
        return self.inner.seconds(work)

    def occupancy(self, work: StepWork) -> float:
        return self.inner.seconds(work) / (1 if work.decode_rows else 2)

    def quiet(self, work: StepWork, count: int) -> float:
        return self.inner.quiet(work, count)

    def covers(self, work: StepWork) -> bool:
        return True


@pytest.mark.parametrize("num_out", [1, 2, 3, 80])
@pytest.mark.parametrize("length", [126, 127, 128])
def test_no_token_of_a_pipeline_comes_before_the_first_one(length: int, num_out: int) -> None:
    """Prompts that come alone, close to each other, and beside one that decodes."""
    plan = dataclasses.replace(plan_of(200), latency=Stages())
    times = [0.0, 2.0, 2.01, 2.02, 4.0, 4.1, 6.0, 6.0]
    lengths = [num_out] * 4 + [80, num_out, 1, num_out]
    workload = Workload("x", [Arrival(at, (Span(n, length),), lengths[n]) for n, at in enumerate(times)])
    exact, skipping = both(workload, plan)
    equal_times(exact, skipping)
    work = StepWork(length, length * length / 2, num_prompts=1)
    decodes = [StepWork(0, 0.0, 1, length + number, length + number) for number in range(1, num_out)]
    assert exact.ttft[0] == pytest.approx(LATENCY.seconds(work))
    assert exact.last[0] - exact.first[0] == pytest.approx(sum(map(LATENCY.seconds, decodes)))
    assert num_out > 1 or exact.first[2] - exact.first[1] < 0.9 * exact.ttft[0], "prompts follow each other closely"


def test_distinct_tokens_are_read_once_if_they_are_shared_and_only_then() -> None:
    reads = LatencyModel({}, {"base": 1e-4, "rows_from_1": 1e-5, "unique": 1e-5}, (1,), {}, {})
    spans = [(Span(0, 512), Span(10 + index, 100)) for index in range(12)]
    workload = Workload("alike", [Arrival(0.02 * index, prompt, 60) for index, prompt in enumerate(spans)])
    times = {}
    for shares in (False, True):
        plan = dataclasses.replace(plan_of(400, **{"cache.share": shares}), latency=reads)
        exact, skipping = both(workload, plan)
        assert skipping.tpot == pytest.approx(exact.tpot, rel=1e-9)
        times[shares] = float(exact.tpot.mean())
    assert times[False] > 1.5 * times[True]


def test_what_does_not_fit_into_the_context_fails_and_so_does_what_follows_it() -> None:
    turns = [
        Arrival(0.0, (Span(1, 600),), 425), Arrival(0.0, (Span(2, 20),), 5, after=0, pause=0.1),
        Arrival(0.0, (Span(3, 600),), 424), Arrival(0.5, (Span(4, 600),), 5),
    ]  # fmt: skip
    workload, plan = Workload("turns", turns), plan_of(200)
    exact, skipping = both(workload, plan)
    assert exact.num_failed == skipping.num_failed == 2
    assert exact.num_in.tolist() == skipping.num_in.tolist() == workload.prompt_tokens.tolist()
    equal_times(exact, skipping)
    assert cluster_of(plan, 2, workload).num_failed == 2


@pytest.mark.parametrize("most", [1, 3])
def test_requests_that_find_the_queue_full_fail(most: int) -> None:
    turns = [Arrival(0.001 * index, (Span(index, 100),), 20) for index in range(20)]
    turns += [Arrival(0.0, (Span(50, 30),), 5, after=18, pause=2.0)]
    workload, settings = Workload("many", turns), {"scheduler.max_queue": most, "scheduler.max_running": 4}
    plan = plan_of(200, **settings)
    exact, skipping = both(workload, plan)
    assert 0 < exact.num_failed < 20 and not np.isfinite(exact.last[18]) and np.isfinite(exact.last[20])
    assert exact.num_in.tolist() == skipping.num_in.tolist() == workload.prompt_tokens.tolist()
    # An engine says so at the end of its step, and what follows comes as much later.
    for name in ("arrived", "first", "last"):
        np.testing.assert_allclose(getattr(exact, name)[:20], getattr(skipping, name)[:20], rtol=1e-9, err_msg=name)
    assert exact.ttft[20] == pytest.approx(skipping.ttft[20])
    routed = cluster_of(plan, 2, workload, max_queue=most)
    assert routed.num_failed > 0
    equal_times(routed, BulkSimulation(workload, plan, 2).run())


def test_spans_may_have_any_id() -> None:
    spans = [(Span(1, 64),), (Span(1, 64), Span(2, 100)), (Span(3, 200),)]
    small = Workload("small", [Arrival(1.0 * index, prompt, 100) for index, prompt in enumerate(spans)])
    # The second one is what the first request's answer is called in bulk.
    ids = np.array([0, (1 << 62) - 1, 1 << 40, 1 << 48])
    large = Workload("large", dataclasses.replace(small.columns, ids=ids[small.columns.ids]))
    exact, skipping = both(small, plan_of(200))
    equal_times(exact, skipping)
    equal_times(exact, BulkSimulation(large, plan_of(200), 1).run())


def test_requests_of_the_same_time_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Member, "fullness", lambda member: len(member.sequences) / member.ready.batch)
    columns = load(0, 60, 4.0).columns
    ticks = Workload("ticks", dataclasses.replace(columns, at=np.floor(columns.at / 3) * 3))
    plan = plan_of(200)
    exact, skipping = both(ticks, plan)
    equal_times(exact, skipping)
    assert exact.used[0].num_steps == skipping.used[0].num_steps
    equal_times(cluster_of(plan, 3, ticks), BulkSimulation(ticks, plan, 3).run())


def test_a_router_knows_of_memory_that_is_free_again() -> None:
    """The first request ends just after its instance has told how full it is."""
    spans = [(0.0, 900, 3), (2.0, 100, 3), (4.0, 100, 3)]
    workload = Workload("memory", [Arrival(at, (Span(n, size),), out) for n, (at, size, out) in enumerate(spans)])
    plan = plan_of(20, **{"cache.share": False})
    exact, skipping = cluster_of(plan, 2, workload, shares=False), BulkSimulation(workload, plan, 2).run()
    assert [each.num_steps for each in skipping.used] == [each.num_steps for each in exact.used]
    assert skipping.used[1].num_steps == 0


def test_the_hit_rate_falls_with_the_number_of_instances() -> None:
    """Every instance has a cache of its own: what one has computed, another one computes again."""
    random = np.random.default_rng(0)
    spans = [(Span(int(random.integers(6)), 256), Span(100 + index, 30)) for index in range(80)]
    workload = Workload("alike", [Arrival(0.02 * index, prompt, 4) for index, prompt in enumerate(spans)])
    plan, rates = plan_of(400), []
    for count in (1, 2, 4):
        found = BulkSimulation(workload, plan, count, routing="queue").run()
        rates.append(found.hit_rate["arena"])
        if count > 1:
            exact = cluster_of(plan, count, workload, routing="queue")
            assert found.num_cached.tolist() == exact.num_cached.tolist()
    assert rates[0] > rates[1] > rates[2] > 0


def test_progress_is_told_of_small_loads_too() -> None:
    told: list[tuple[int, int]] = []
    BulkSimulation(load(0, 60, 8.0), plan_of(200), 1, progress=lambda *counts: told.append(counts)).run()
    assert told[-1] == (60, 60) and len(told) == 60
