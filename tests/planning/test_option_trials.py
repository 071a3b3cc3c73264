"""The search for a placement by simulation: rates, phases, links and whole setups."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from quire.placement.divisions import Division, Option, Pair, Role
from quire.placement.placement_file import Instances, Placement, Predicted
from quire.planning.goodput import Verdict
from quire.planning.placement import PlacementError
from quire.simulation import parts
from quire.simulation.parts import Parts, simulate_decoding, simulate_prompts
from quire.simulation.run import SimulationRun
from quire.timing.latency import StepWork
from quire.workload.slo import Slo
from quire.workload.workload import Arrival, Span, Workload
from tests.cli.test_plan_placement import _quick as _quick
from tests.cli.test_plan_placement import made_workload, planner


def test_a_replay_has_the_requests_and_the_gaps_of_the_trace() -> None:
    whole = made_workload(24)
    found = planner(Slo(2.0, 0.2, 0.9), workload=whole)
    placement = Placement((Instances("mixed", 2, 1, 1),), Predicted(1.0, 2.0, "GPU", 0.5, 0.9))
    replay, alike = found.replayed(placement, 12.0, 0)
    drawn = replay.load.drawn(replay.rate, replay.seed)
    assert drawn.prompt_tokens.tolist() == whole.prompt_tokens.tolist() and drawn.rate == pytest.approx(12.0)
    gaps, scaled = np.diff(whole.columns.at), np.diff(drawn.columns.at)
    assert scaled == pytest.approx(gaps * whole.rate / drawn.rate)
    assert np.isfinite(replay.outcome().last).all()
    # Two instances would get 48 requests. Runs of different length attain differently, so 24 are drawn beside these.
    assert found.joint(placement, 12.0, 0).count == 48
    assert replay.count == alike.count == len(alike.outcome().last) == 24
    assert alike.load.fitted is not None


@pytest.mark.parametrize("kind", ["at once", "conversations"])
def test_a_recording_that_tells_nothing_of_a_rate_is_not_compared(kind: str) -> None:
    arrivals = [
        Arrival(0.0 if kind == "at once" else float(index), (Span(index, 40),), 5, pause=0.0) for index in range(24)
    ]
    if kind == "conversations":
        arrivals[5] = Arrival(0.0, (Span(5, 40),), 5, 4, 3.0)
    late = [Arrival(100.0 + each, (Span(50 + each, 40),), 5) for each in range(4)]
    found = planner(Slo(2.0, 0.2, 0.9), 12, workload=Workload(kind, [*arrivals, *late]))
    placement = Placement((Instances("mixed", 2, 1, 1),), Predicted(1.0, 2.0, "GPU", 0.5, 0.9))
    assert found.replayed(placement, 12.0, 0) == []


@pytest.mark.parametrize("option", [Division(Role.PREFILL), Division(Role.PREFILL, 2), Division(Role.PREFILL, 1, 2)])
def test_prompts_whose_steps_are_skipped_take_as_long_as_an_engine_s(
    option: Division, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planner(Slo(0.4, 0.04, 0.9), 120)
    setup = made.model.setup_of(option)
    for rate in (2.0, 8.0, 20.0):
        given = setup.replicas[0], setup.ways, made.load.drawn(rate, 0), 0.01, 0
        skipped = simulate_prompts(*given)
        with monkeypatch.context() as patch:
            patch.setattr(parts, "may_skip", lambda replicas: False)
            whole = simulate_prompts(*given)
        assert skipped.first == pytest.approx(whole.first, abs=1e-9), rate
        assert skipped.num_cached.tolist() == whole.num_cached.tolist()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.MIXED])
def test_an_option_serves_what_its_goodput_says(role: Role) -> None:
    found, option = planner(Slo(0.4, 0.04, 0.9), 60), Division(role)
    goodput = found.goodput_of(option)
    assert goodput.verdict is Verdict.FOUND
    assert found.serves(option, 0.9 * goodput.rate) and not found.serves(option, 1.3 * goodput.rate)
    assert not found.serves(option, 100 * goodput.rate), "more than any load of it lets through"
    rough = found.rough_goodput_of(option)
    assert 0.7 * goodput.rate < rough.rate < 1.5 * goodput.rate and not rough.confirmed
    assert found.serves_roughly(option, 0.8 * rough.rate) and not found.serves_roughly(option, 1.5 * rough.rate)


OPTIONS_OF_GPUS: list[Option] = [
    Division(Role.PREFILL), Division(Role.DECODE), Division(Role.MIXED),
    Pair(Division(Role.PREFILL), Division(Role.DECODE)),
]  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS_OF_GPUS, ids=str)
def test_the_rates_searched_for_an_option_straddle_the_target(option: Option) -> None:
    slo = Slo(0.12, 0.026, 0.8)
    made = planner(slo)
    found, bound = made.goodput_of(option), made.bound_of(option) * option.num_slots
    assert found.verdict is Verdict.FOUND and 0 < found.rate <= bound
    shares = [share for _, share in found.points]
    assert min(shares) < found.target <= max(shares)
    is_phase = not isinstance(option, Pair) and option.role is not Role.MIXED
    assert found.target == pytest.approx(math.sqrt(0.8) if is_phase else 0.8)


def test_only_its_own_target_counts_for_a_phase() -> None:
    """Without a target that it can miss, a phase is limited by its bound alone."""
    free = planner(Slo(math.inf, 0.03, 0.9), 12)
    prefill, decode = Division(Role.PREFILL), Division(Role.DECODE)
    assert free.goodput_of(prefill).verdict is Verdict.UNBOUNDED
    strict = planner(Slo(1e-4, 0.03, 0.9), 12)
    assert strict.goodput_of(prefill).verdict is Verdict.INFEASIBLE and strict.bound_of(prefill) == 0.0
    assert strict.bound_of(decode) == free.bound_of(decode) > 0


def test_a_slow_network_costs_time_per_token() -> None:
    fast, slow = planner(Slo(1.0, 0.03)), planner(Slo(1.0, 0.03), between=200_000_000)
    decode, pair = Division(Role.DECODE), Pair(Division(Role.PREFILL), Division(Role.DECODE))
    near, far = (each._simulation(decode)(each.load, 2.0, 0).outcome() for each in (fast, slow))
    assert far.tpot.mean() > 1.5 * near.tpot.mean()
    near, far = (each._simulation(pair)(each.load, 2.0, 0).outcome() for each in (fast, slow))
    assert far.tpot.mean() == pytest.approx(near.tpot.mean())  # a pair shares a machine


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_link_bounds_the_rate_of_instances_that_send_caches_and_of_those_that_get_them(role: Role) -> None:
    """154 tokens of 0.8 MB are on average 0.63 s on a link of 200 MB/s, however loose the target."""
    made = planner(Slo(math.inf, 10.0, 0.9), between=200_000_000)
    option = Division(role)
    mean = float(made.asked.rows[made.asked.tokens > 0].sum()) / len(made.asked.rows)
    bytes_per_token = made.model.setup_of(option).replicas[0].plan.sizes.bytes_per_token
    assert made.bound_of(option) == pytest.approx(2e8 / (mean * bytes_per_token), rel=0.01)
    assert planner(Slo(math.inf, 10.0, 0.9)).bound_of(option) > 5 * made.bound_of(option)


def test_caches_wait_for_those_before_them() -> None:
    """24 caches of 0.6 s each, at twice the rate that a link can bring: each waits 0.3 s longer than the one before."""
    made = planner(Slo(math.inf, 10.0, 0.9), between=200_000_000)
    decode = Division(Role.DECODE)
    slow, fast = (
        made._simulation(decode)(made.load, share * made.bound_of(decode), 0).outcome() for share in (0.02, 2.0)
    )
    waited = ((fast.last - fast.first) - (slow.last - slow.first))[fast.num_out > 1]
    assert waited[0] < 1.0 and waited[-1] > 4.0


def test_runs_last_long_enough_for_a_queue_that_grows_to_show() -> None:
    """Forty requests arrive within 4 s, and each may wait for 0.5 s: a tenth more than the instance serves would do."""
    slo = Slo(0.5, 0.03, 0.9)
    made, option = planner(slo, 40), Division(Role.MIXED, 1, 1)
    mean_out = float(made.load.workload.columns.num_out.mean())
    assert made.load.lasting(10.0, slo).count == math.ceil(10 * 0.5 / (0.9 * 0.05))
    assert made.load.lasting(10.0, Slo(tpot=0.2)).count == math.ceil(10 * 0.2 * mean_out / (0.9 * 0.05))
    assert made.load.lasting(1.0, Slo(0.01, 0.01)).count == 40 and made.load.lasting(1e4, slo).count == 20 * 40
    assert made.load.lasting(math.inf, slo).count == made.load.lasting(10.0, Slo()).count == 40
    found = made.goodput_of(option)
    assert found.rate > 0 and not found.notes
    longer = dataclasses.replace(made.load, count=1000)
    run = SimulationRun(made.model.setup_of(option), longer, found.rate, 77, Parts())
    assert run.outcome().attainment(slo) >= 0.85


def test_only_what_the_receiver_lacks_is_sent() -> None:
    """The second prompt has 256 of its 300 tokens in common with the first one."""
    prompts = [(Span(1, 256), Span(2, 44)), (Span(1, 256), Span(3, 44))]
    workload = Workload("alike", [Arrival(10.0 * index, prompt, 5) for index, prompt in enumerate(prompts)])
    made = planner(Slo(), between=200_000_000, workload=workload)
    setup = made.model.setup_of(Division(Role.DECODE))
    found = simulate_decoding(setup.replicas[0], setup.ways, workload, 0)
    first, second = (found.last - found.first).tolist()
    assert first - second == pytest.approx(256 * setup.replicas[0].plan.sizes.bytes_per_token / 2e8, rel=1e-3)


@pytest.mark.parametrize("kept", [1.0, 0.25])
def test_what_retention_drops_is_not_sent(kept: float) -> None:
    made = planner(Slo(), between=200_000_000, **{"retain.budget": kept, "retain.profile_rows": 16})
    setup = made.model.setup_of(Division(Role.DECODE))
    (replicas,) = setup.replicas
    seconds = kept * replicas.plan.sizes.bytes_per_token / 2e8
    assert parts.seconds_per_token(replicas, setup.ways) == pytest.approx(seconds)


@pytest.mark.parametrize("option", [OPTIONS_OF_GPUS[1], OPTIONS_OF_GPUS[3]], ids=str)
def test_answers_of_one_token_need_nobody_who_decodes(option: Option) -> None:
    workload = Workload("short", [Arrival(0.2 * index, (Span(index, 90),), 1) for index in range(12)])
    made = planner(Slo(0.5, 0.05), 12, workload=workload)
    with pytest.raises(
        PlacementError, match="every answer has one token: nothing decodes; plan with --algorithm mixed"
    ):
        made.goodput_of(option)
    assert made.goodput_of(Division(Role.MIXED)).rate > 0


def test_a_pair_is_searched_with_the_links_that_its_stages_have_in_the_whole() -> None:
    """Two stages of a pair take two machines with two GPUs each, where one stage of an instance would take one."""
    made = planner(Slo(), between=200_000_000)
    pair = Pair(Division(Role.PREFILL, 1, 2), Division(Role.DECODE, 1, 2))
    whole = made.model.setup(
        Placement(
            (Instances("prefill", 1, 1, 2), Instances("decode", 1, 1, 2)), Predicted(1.0, 4.0, "GPU", 0.25, 0.9),
            made={"algorithm": "pairs"},
        )
    )  # fmt: skip
    searched, work = made.model.setup_of(pair), StepWork(prompt_rows=256)
    for one, other in zip(searched.replicas, whole.replicas, strict=True):
        assert one.plan.latency == other.plan.latency
        alone = made.model.setup_of(Division(Role(one.role), 1, 2)).replicas[0].plan.latency
        assert one.plan.latency.seconds(work) > 1.2 * alone.seconds(work), "its stages share a machine"


def test_tiers_of_instances_that_decode_are_a_doubt(tmp_path: Path) -> None:
    apart = (Instances("prefill", 1), Instances("decode", 1))
    placement = Placement(apart, Predicted(1.0, 2.0, "GPU", 0.5, 0.9), warnings=("one",))
    with_tiers = planner(Slo(), **{"tiers.memory": "1GiB"}).warned(placement).warnings
    assert with_tiers[0] == "one" and "instances that decode have no tiers in the search" in with_tiers[1]
    assert planner(Slo()).warned(placement).warnings == ("one",)
