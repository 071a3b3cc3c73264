"""`quire plan placement`: what it searches, what it writes, and what it refuses."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.arguments import Arguments
from quire.cli import main, plan_placement, simulate
from quire.cluster.placements import shared_options
from quire.config import EngineConfig
from quire.planning.candidates import Candidate, Option, Pair, Role
from quire.planning.cluster_file import ClusterSpec, Network, Nodes
from quire.planning.devices import DEVICES
from quire.planning.fitted import fit
from quire.planning.goodput import Goodput, Verdict
from quire.planning.latency import LatencyModel, Link, StepWork
from quire.planning.placement import PlacementError
from quire.planning.placement_file import Gpus, Hosts, Instances, Placement, Predicted, Why, read_placement
from quire.planning.queueing import poisson_arrivals
from quire.planning.slo import Slo
from quire.planning.workload import Arrival, Span, Workload
from quire.simulation import phases, search
from quire.simulation.hardware import Target
from quire.simulation.load import Load, Run
from quire.simulation.phases import DecodeRun, MixedRun, PromptRun
from quire.simulation.queue_check import prompt_seconds, queue_check
from quire.simulation.search import Joint, OnCores, OnGpus, Planner
from quire.simulation.setup import LINKS, Setup
from tests.tiny_models import save_tiny

GIB = 1 << 30
OPTIONS = ["--scheduler.max_running", "16", "--scheduler.token_budget", "128"]
TARGETS = ["--slo.ttft", "0.3", "--slo.tpot", "0.05"]
FEW = ["--requests", "16"]
CORES = '[nodes]\ncores = 2\nmemory = "4GiB"\n'
GPUS = '[nodes]\ngpus = 2\ngpu_memory = "80GB"\ndevice = "a100-80g"\n'


def latency(threads: int) -> LatencyModel:
    """Twice as fast with two threads, but for what no thread shares."""
    coefficients = {"base": 0.003, "rows_from_1": 8e-4 / threads, "prompt_pairs": 1e-7, "context": 2e-6 / threads}
    return LatencyModel({"threads": threads}, coefficients, (1,), {}, {}, {"shm": Link(0.001, 1e9)})


def made_workload(count: int = 60, seed: int = 0) -> Workload:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(0.2, count)).tolist()
    return Workload(
        "made",
        [
            Arrival(at, (Span(index, int(random.integers(8, 300))),), int(random.integers(1, 30)))
            for index, at in enumerate(times)
        ],
    )


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Searches with fewer seeds and steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "TOLERANCE", 0.25)
        for name in ("SEEDS", "CONFIRMATIONS"):
            patch.setattr(search, name, 1)
        patch.setattr(plan_placement, "JOINT_SEEDS", 1)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, latency models, a trace and machines."""
    found = tmp_path_factory.mktemp("placement")
    save_tiny(found / "model", tokenizer=False)
    for threads in (1, 2):
        latency(threads).write(found / f"{threads}.json")
    made_workload().write(found / "trace.jsonl")
    (found / "cores.toml").write_text(CORES)
    (found / "gpus.toml").write_text(GPUS)
    return found


def words_of(folder: Path, *more: str, machines: str = "cores", threads: tuple[int, ...] = (1, 2)) -> list[str]:
    files = [word for count in threads for word in ("--latency", str(folder / f"{count}.json"))]
    model = str(folder / "model") if machines == "cores" else "opt-13b"
    return [
        "plan", "placement", model, "--cluster.file", str(folder / f"{machines}.toml"), "--trace",
        str(folder / "trace.jsonl"), *(files if machines == "cores" else ()), *OPTIONS, *FEW, *TARGETS, *more,
    ]  # fmt: skip


def planner(
    slo: Slo, count: int = 24, *, between: int | None = None, workload: Workload | None = None, **options: Any
) -> Planner:
    """Options on machines with two GPUs of OPT-13B. between: bytes/s from one machine to another."""
    nodes = Nodes(count=1 if between is None else 2, gpus=2, gpu_memory=80 * 10**9, device="a100-80g")
    cluster = ClusterSpec(nodes, Network(between=between))
    small = {"scheduler.max_running": 16, "scheduler.token_budget": 256, **options}
    link = None if between is None else Link(1e-4, float(between))
    target = Target("opt-13b", DEVICES["a100-80g"], EngineConfig.from_options(small), slow_link=link, gpus=2)
    workload = workload or made_workload(count)
    return Planner(OnGpus(target, cluster, 400), Load(workload, count, fit(workload)), slo)


# The file.


@pytest.fixture(scope="module")
def placed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A placement for a rate that one instance does not serve."""
    file = tmp_path_factory.mktemp("placed") / "placement.json"
    assert main(words_of(folder, "--rate", "3.5", "--algorithm", "mixed", "--output", str(file))) == 0
    return file


def test_the_file_is_a_placement_with_all_that_it_was_made_for(placed: Path) -> None:
    found = read_placement(placed)
    assert found.slo == {"ttft": 0.3, "tpot": 0.05, "attainment": 0.9}
    assert found.workload["name"] == "made" and found.workload["origin"] == "fitted"
    assert found.workload["cached"] == 0, "no two prompts of the trace share anything"
    assert found.made["origin"] == "fitted" and found.made["algorithm"] == "mixed"
    assert found.made["seeds"] == {"first": 0, "search": 1, "confirm": 1, "joint": 1}
    assert found.made["rejected"] and found.made["version"]
    assert found.predicted.rate >= 3.5 and 0.8 <= found.predicted.attainment <= 1
    for each in found.instances:
        assert each.options["runtime.threads"] in (1, 2) and each.options["scheduler.token_budget"] == 128
        assert 2 * GIB * int(each.options["runtime.threads"]) > int(each.options["cache.memory"]) > 0


def test_a_plan_says_whether_the_trace_itself_fares_like_what_was_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for accepted, is_said in ((-1.0, True), (1.0, False)):
        monkeypatch.setattr(plan_placement, "ACCEPTED_SHARE", accepted)
        assert main(words_of(folder, "--rate", "3.5", "--algorithm", "mixed", "--json")) == 0
        found = json.loads(capsys.readouterr().out)
        said = [each for each in found["made"].get("warnings", []) if "of the trace itself" in each]
        assert bool(said) == is_said and 0 <= found["made"]["attainment_of_trace"] <= 1


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


def test_the_command_of_the_file_plans_the_same_again(placed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = read_placement(placed).made["command"].split()
    assert command[:3] == ["quire", "plan", "placement"]
    place = command.index("--output") if "--output" in command else len(command)
    assert main([*command[1:place], "--json"]) == 0
    again, before = json.loads(capsys.readouterr().out), json.loads(placed.read_text())
    assert again["instances"] == before["instances"] and again["predicted"] == before["predicted"]


def test_quire_simulate_takes_the_file(placed: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [word for count in (1, 2) for word in ("--latency", str(folder / f"{count}.json"))]
    simulate = ["simulate", str(folder / "model"), "--trace", str(folder / "trace.jsonl"), *files, *TARGETS]
    assert main([*simulate, "--cluster.placement", str(placed), "--rate", "3", "--requests", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = read_placement(placed).instances
    assert [(each["role"], each["count"]) for each in found["instances"]] == [
        (each.role, each.count) for each in wanted
    ]
    assert found["rates"][0]["attainment"] >= 0.9


# The search.


def test_cores_without_a_latency_model_are_rejected_with_the_reason(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "one.json"
    assert main(words_of(folder, "--algorithm", "mixed", "--output", str(file), threads=(2,))) == 0
    assert "mixed on 1 core" in capsys.readouterr().out
    found = read_placement(file)
    (rejected,) = found.made["rejected"]
    assert (rejected["option"], rejected["why"]) == ("mixed on 1 core", Why.UNFIT)
    assert "made with runtime.threads 2, not 1" in rejected["reason"]
    assert found.instances[0].options["runtime.threads"] == 2


@pytest.mark.parametrize("option", [Candidate(Role.PREFILL), Candidate(Role.PREFILL, 2), Candidate(Role.PREFILL, 1, 2)])
def test_prompts_whose_steps_are_skipped_take_as_long_as_an_engine_s(
    option: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planner(Slo(0.4, 0.04, 0.9), 120)
    replicas, ways = made.maker.replicas(option), made.maker.ways(option)
    for rate in (2.0, 8.0, 20.0):
        run, drawn = PromptRun(replicas, ways, made.load, 0.01, rate, 0), made.load.drawn(rate, 0)
        skipped = run.of(drawn)
        with monkeypatch.context() as patch:
            patch.setattr(phases, "may_skip", lambda replicas: False)
            whole = run.of(drawn)
        assert skipped.first == pytest.approx(whole.first, abs=1e-9), rate
        assert skipped.num_cached.tolist() == whole.num_cached.tolist()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.MIXED])
def test_an_option_serves_what_its_goodput_says(role: Role) -> None:
    found, option = planner(Slo(0.4, 0.04, 0.9), 60), Candidate(role)
    goodput = found.goodput_of(option)
    assert goodput.verdict is Verdict.FOUND
    assert found.serves(option, 0.9 * goodput.rate) and not found.serves(option, 1.3 * goodput.rate)
    assert not found.serves(option, 100 * goodput.rate), "more than any load of it lets through"
    rough = found.rough_goodput_of(option)
    assert 0.7 * goodput.rate < rough.rate < 1.5 * goodput.rate and not rough.confirmed
    assert found.serves_roughly(option, 0.8 * rough.rate) and not found.serves_roughly(option, 1.5 * rough.rate)


def test_all_algorithms_are_shown_beside_each_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words_of(folder, "--ablation", "--plan.seconds", "0.01", "--algorithm", "mixed")) == 0
    told = capsys.readouterr().out
    table = told[told.index("algorithm  ") :].splitlines()
    assert [line.split()[0] for line in table[1:4]] == [*plan_placement.ALGORITHMS]
    assert "placement (mixed, fitted latencies)" in told and "untried" in told


def test_modelled_gpus_need_no_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words_of(folder, "--algorithm", "mixed", "--plan.seconds", "0.5", machines="gpus")) == 0
    told = capsys.readouterr().out
    assert "predicted (modelled)" in told and "per GPU" in told and "rejected, modelled rates" in told


OPTIONS_OF_GPUS: list[Option] = [
    Candidate(Role.PREFILL), Candidate(Role.DECODE), Candidate(Role.MIXED),
    Pair(Candidate(Role.PREFILL), Candidate(Role.DECODE)),
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
    prefill, decode = Candidate(Role.PREFILL), Candidate(Role.DECODE)
    assert free.goodput_of(prefill).verdict is Verdict.UNBOUNDED
    strict = planner(Slo(1e-4, 0.03, 0.9), 12)
    assert strict.goodput_of(prefill).verdict is Verdict.INFEASIBLE and strict.bound_of(prefill) == 0.0
    assert strict.bound_of(decode) == free.bound_of(decode) > 0


def test_a_slow_network_costs_time_per_token() -> None:
    fast, slow = planner(Slo(1.0, 0.03)), planner(Slo(1.0, 0.03), between=200_000_000)
    decode, pair = Candidate(Role.DECODE), Pair(Candidate(Role.PREFILL), Candidate(Role.DECODE))
    near, far = (each._simulation(decode, each.load)(2.0, 0).outcome() for each in (fast, slow))
    assert far.tpot.mean() > 1.5 * near.tpot.mean()
    near, far = (each._simulation(pair, each.load)(2.0, 0).outcome() for each in (fast, slow))
    assert far.tpot.mean() == pytest.approx(near.tpot.mean())  # a pair shares a machine


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_link_bounds_the_rate_of_instances_that_send_caches_and_of_those_that_get_them(role: Role) -> None:
    """154 tokens of 0.8 MB are on average 0.63 s on a link of 200 MB/s, however loose the target."""
    made = planner(Slo(math.inf, 10.0, 0.9), between=200_000_000)
    option = Candidate(role)
    mean = float(made.asked.rows[made.asked.tokens > 0].sum()) / len(made.asked.rows)
    bytes_per_token = made.maker.replicas(option).plan.sizes.bytes_per_token
    assert made.bound_of(option) == pytest.approx(2e8 / (mean * bytes_per_token), rel=0.01)
    assert planner(Slo(math.inf, 10.0, 0.9)).bound_of(option) > 5 * made.bound_of(option)


def test_caches_wait_for_those_before_them() -> None:
    """24 caches of 0.6 s each, at twice the rate that a link can bring: each waits 0.3 s longer than the one before."""
    made = planner(Slo(math.inf, 10.0, 0.9), between=200_000_000)
    decode = Candidate(Role.DECODE)
    slow, fast = (
        made._simulation(decode, made.load)(share * made.bound_of(decode), 0).outcome() for share in (0.02, 2.0)
    )
    waited = ((fast.last - fast.first) - (slow.last - slow.first))[fast.num_out > 1]
    assert waited[0] < 1.0 and waited[-1] > 4.0


def test_runs_last_long_enough_for_a_queue_that_grows_to_show() -> None:
    """Forty requests arrive within 4 s, and each may wait for 0.5 s: a tenth more than the instance serves would do."""
    slo = Slo(0.5, 0.03, 0.9)
    made, option = planner(slo, 40), Candidate(Role.MIXED, 1, 1)
    mean_out = float(made.load.workload.columns.num_out.mean())
    assert made.load.lasting(10.0, slo).count == math.ceil(10 * 0.5 / (0.9 * 0.05))
    assert made.load.lasting(10.0, Slo(tpot=0.2)).count == math.ceil(10 * 0.2 * mean_out / (0.9 * 0.05))
    assert made.load.lasting(1.0, Slo(0.01, 0.01)).count == 40 and made.load.lasting(1e4, slo).count == 20 * 40
    assert made.load.lasting(math.inf, slo).count == made.load.lasting(10.0, Slo()).count == 40
    found = made.goodput_of(option)
    assert found.rate > 0 and not found.notes
    longer = dataclasses.replace(made.load, count=1000)
    run = MixedRun(made.maker.replicas(option), made.maker.ways(option), longer, found.rate, 77)
    assert run.outcome().attainment(slo) >= 0.85


def test_only_what_the_receiver_lacks_is_sent() -> None:
    """The second prompt has 256 of its 300 tokens in common with the first one."""
    prompts = [(Span(1, 256), Span(2, 44)), (Span(1, 256), Span(3, 44))]
    workload = Workload("alike", [Arrival(10.0 * index, prompt, 5) for index, prompt in enumerate(prompts)])
    made = planner(Slo(), between=200_000_000, workload=workload)
    run = made._simulation(Candidate(Role.DECODE), made.load)(0.1, 0)
    assert isinstance(run, DecodeRun)
    found = run.of(workload)
    first, second = (found.last - found.first).tolist()
    assert first - second == pytest.approx(256 * run.replicas.plan.sizes.bytes_per_token / 2e8, rel=1e-3)


@pytest.mark.parametrize("option", [OPTIONS_OF_GPUS[1], OPTIONS_OF_GPUS[3]], ids=str)
def test_answers_of_one_token_need_nobody_who_decodes(option: Option) -> None:
    workload = Workload("short", [Arrival(0.2 * index, (Span(index, 90),), 1) for index in range(12)])
    made = planner(Slo(0.5, 0.05), 12, workload=workload)
    with pytest.raises(
        PlacementError, match="every answer has one token: nothing decodes; plan with --algorithm mixed"
    ):
        made.goodput_of(option)
    assert made.goodput_of(Candidate(Role.MIXED)).rate > 0


def test_every_instance_of_a_placement_gets_as_many_requests_as_alone() -> None:
    made = planner(Slo(0.5, 0.05), 12)
    placement = Placement((Instances("mixed", 7),), Predicted(7.0, 7.0, "GPU", 1.0, 0.9))
    assert made.joint(placement, 7.0, 0).count == 7 * 12


def test_tiers_of_instances_that_decode_are_a_doubt(tmp_path: Path) -> None:
    apart = (Instances("prefill", 1), Instances("decode", 1))
    placement = Placement(apart, Predicted(1.0, 2.0, "GPU", 0.5, 0.9), warnings=("one",))
    with_tiers = planner(Slo(), **{"tiers.memory": "1GiB"}).warned(placement).warnings
    assert with_tiers[0] == "one" and "instances that decode have no tiers in the search" in with_tiers[1]
    assert planner(Slo()).warned(placement).warnings == ("one",)


# A whole setup.


def setup_of_three(planned: Planner, **fields: Any) -> Setup:
    placement = Placement((Instances("mixed", 3),), Predicted(3.0, 3.0, "GPU", 1.0, 0.9))
    return dataclasses.replace(planned.maker.setup(placement), **fields)


def test_a_whole_setup_is_simulated_with_its_routing() -> None:
    planned = planner(Slo())
    load = Load(made_workload(40), 40)
    found = {
        routing: Joint(setup_of_three(planned, routing=routing), load, 12.0, 0).outcome().last
        for routing in ("expected", "queue", "affinity")
    }
    for routing, last in found.items():
        exact = Run(setup_of_three(planned, routing=routing), load, 12.0, 0).outcome()
        assert exact.last == pytest.approx(last, rel=0.03), routing
    assert not np.array_equal(found["expected"], found["affinity"])


def test_a_cluster_that_fetches_prefixes_skips_no_steps() -> None:
    planned = planner(Slo())
    alike = Workload("alike", [Arrival(0.1 * each, (Span(1, 256), Span(10 + each, 40)), 5) for each in range(20)])
    load, setup = Load(alike, 20), setup_of_three(planned)
    found = Joint(setup, load, 12.0, 0).outcome()
    assert np.array_equal(found.last, Run(setup, load, 12.0, 0).outcome().last)
    assert any("neighbour" in str(each.counters) for each in found.used)
    alone = Joint(dataclasses.replace(setup, fetches=False), load, 12.0, 0).outcome()
    assert not any("neighbour" in str(each.counters) for each in alone.used)


def test_a_given_speed_within_machines_is_one_of_links_like_the_device_s_own() -> None:
    """An A100 has 300 GB/s. Steps of four GPUs that share layers take as long, whether that is said or not."""
    said, own, half = (
        Target.on(Gpus("a100-80g", 80 * 10**9, 8, inside), "opt-66b", EngineConfig())
        .latency(4, 1)
        .seconds(StepWork(prompt_rows=512))
        for inside in (300 * 10**9, None, 150 * 10**9)
    )
    assert said == own < half < 2 * own


def test_a_placement_is_simulated_on_the_gpus_that_it_is_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(
        '[nodes]\ncount = 2\ngpus = 2\ngpu_memory = "60GB"\ndevice = "a100-80g"\n\n'
        '[network]\ninside = "100GB"\nbetween = "1GB"\n'
    )
    words, file = (
        words_of(folder, "--algorithm", "pairs", "--plan.seconds", "0.1", machines="gpus"),
        tmp_path / "p.json",
    )
    words[words.index("--cluster.file") + 1] = str(tmp_path / "small.toml")
    planned: list[Setup] = []
    setup = OnGpus.setup

    def noted(self: OnGpus, placement: Placement) -> Setup:
        planned.append(setup(self, placement))
        return planned[-1]

    monkeypatch.setattr(OnGpus, "setup", noted)
    assert main([*words, "--output", str(file)]) == 0
    assert read_placement(file).gpus == Gpus("a100-80g", 60 * 10**9, 2, 100 * 10**9, 10**9)
    parser = argparse.ArgumentParser()
    simulate.add_arguments(Arguments(parser, []))
    command = ["opt-13b", "--hardware", "A100-80G", "--trace", str(folder / "trace.jsonl"), *OPTIONS]
    found = simulate._scenario(parser.parse_args([*command, "--cluster.placement", str(file)])).setup
    assert found.in_pairs and found.ways == planned[0].ways
    assert [each.plan.sizes.cache_bytes for each in found.replicas] == [
        each.plan.sizes.cache_bytes for each in planned[0].replicas
    ]
    assert [each.plan.latency for each in found.replicas] == [each.plan.latency for each in planned[0].replicas]
    other = simulate._scenario(parser.parse_args([*command, "--hardware", "h100", "--cluster.placement", str(file)]))
    assert other.setup.replicas[0].plan.latency.device == DEVICES["h100"]  # type: ignore[attr-defined]


def test_a_placement_on_machines_without_gpus_is_simulated_and_served_as_it_was_planned(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's instances are equal, use TCP on one machine too, and stay in their pairs."""
    machines = '[nodes]\ncount = 2\ncores = 4\nmemory = "8GiB"\n\n[network]\nbetween = "10MB"\n'
    (tmp_path / "hosts.toml").write_text(machines)
    for algorithm in ("pairs", "mixed", "apart"):
        words = words_of(folder, "--algorithm", algorithm, "--plan.seconds", "0.1")
        words[words.index("--cluster.file") + 1] = str(tmp_path / "hosts.toml")
        planned: list[Setup] = []
        setup = OnCores.setup

        def noted(self: OnCores, placement: Placement, planned: list[Setup] = planned, setup: Any = setup) -> Setup:
            planned.append(setup(self, placement))
            return planned[-1]

        monkeypatch.setattr(OnCores, "setup", noted)
        file = tmp_path / f"{algorithm}.json"
        assert main([*words, "--output", str(file)]) == 0
        monkeypatch.undo()
        placement = read_placement(file)
        assert placement.hosts == Hosts(2, 10**7) and placement.in_pairs == (algorithm == "pairs")
        shared_options(placement.instances, {}, None, is_local=False)  # refuses what Ray cannot have
        parser = argparse.ArgumentParser()
        simulate.add_arguments(Arguments(parser, []))
        latencies = [word for count in (1, 2) for word in ("--latency", str(folder / f"{count}.json"))]
        command = [str(folder / "model"), "--trace", str(folder / "trace.jsonl"), *OPTIONS, *latencies]
        subject = simulate._scenario(parser.parse_args([*command, "--cluster.placement", str(file)]))
        found = subject.setup
        assert (found.in_pairs, found.ways) == (planned[0].in_pairs, planned[0].ways)
        tcp = LINKS["tcp"].bytes_per_second
        assert found.ways.bulk.bytes_per_second == (tcp if algorithm == "pairs" else 10**7)
        assert [each.plan.sizes.cache_bytes for each in found.replicas] == [
            each.plan.sizes.cache_bytes for each in planned[0].replicas
        ]
        assert subject.units == placement.predicted.cost


# What is refused.


def test_errors_are_one_line_that_says_what_to_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unnamed.toml").write_text('[nodes]\ngpus = 2\ngpu_memory = "80GB"\n')
    (tmp_path / "small.toml").write_text('[nodes]\ngpus = 1\ngpu_memory = "8GB"\ndevice = "t4"\n')
    whole, gpus = words_of(folder), words_of(folder, machines="gpus")
    machines = whole.index("--cluster.file")

    def without(words: list[str], *flags: str) -> list[str]:
        places = {place + more for flag in flags for place in (words.index(flag),) for more in (0, 1)}
        return [word for place, word in enumerate(words) if place not in places]

    cases: list[tuple[list[str], str]] = [
        (without(whole, "--cluster.file"), "needs --cluster.file FILE with the machines"),
        (without(whole, "--trace"), "needs --trace FILE with the requests"),
        (without(whole, "--slo.ttft", "--slo.tpot"), "give --slo.ttft or --slo.tpot"),
        ([*whole, "--slo.attainment", "0"], "slo.attainment is 0"),
        ([*whole, "--plan.gpu", "1GiB"], "--plan.gpu is for quire plan offload, not for placement"),
        ([*whole, "--rate", "0"], "'0' is not a number above 0"),
        ([*whole, "--rate", "1000", "--algorithm", "mixed"], "1000 requests/s need "),
        ([*whole, "--slo.ttft", "0.0001", "--slo.tpot", "0.0001"], "no option meets the latency targets"),
        ([*whole, "--output", str(tmp_path / "no" / "folder.json")], "cannot write"),
        ([*gpus, "--latency", str(folder / "1.json")], "those on GPUs are modelled"),
        ([*gpus[: machines + 1], str(tmp_path / "unnamed.toml"), *gpus[machines + 2 :]], "nodes.device is missing"),
        ([*gpus[: machines + 1], str(tmp_path / "small.toml"), *gpus[machines + 2 :]], "no option fits"),
        (["plan", "offload", "x", "--cluster.file", "y"], "--cluster.file is for quire plan placement"),
        (["plan", "hardware", "x", "--slo.ttft", "1"], "--slo.ttft is for quire plan placement"),
    ]  # fmt: skip
    for given, message in cases:
        try:
            code = main(given)
        except SystemExit as error:
            code = int(str(error.code))
        told = capsys.readouterr().err
        assert code == 2 and told.count("\n") == 1 and message in told, (given, told)


def test_a_placement_that_misses_the_target_as_a_whole_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts promise what the whole does not keep if their goodput is thought to be five times as high."""
    goodput_of = Planner.goodput_of

    def boasted(self: Planner, option: Option) -> Goodput:
        found = goodput_of(self, option)
        return dataclasses.replace(found, rate=5 * found.rate)

    monkeypatch.setattr(Planner, "goodput_of", boasted)
    file = tmp_path / "boasted.json"
    assert main(words_of(folder, "--algorithm", "mixed", "--output", str(file))) == 0
    found: Placement = read_placement(file)
    assert found.predicted.attainment < 0.5
    assert any("simulated as a whole" in warning for warning in found.made["warnings"])


# Queues.


def poisson_load(count: int) -> Load:
    rng = np.random.default_rng(1)
    at = poisson_arrivals(1.0, count, rng).tolist()
    arrivals = [
        Arrival(time, (Span(index, int(size)),), 2)
        for index, (time, size) in enumerate(zip(at, rng.integers(200, 1200, count), strict=True))
    ]
    return Load(Workload("poisson", arrivals), count)


def test_a_simulated_instance_for_prompts_is_a_queue_where_it_computes_one_at_a_time() -> None:
    made = planner(Slo(1.0, 0.05, 0.9))
    option = Candidate(Role.PREFILL)
    replicas, ways = made.maker.replicas(option), made.maker.ways(option)
    alone = queue_check(replicas, ways, poisson_load(400), 0.0, 0.1, 0)
    assert alone.simulated == pytest.approx(alone.one_by_one, rel=0.01)
    assert alone.one_by_one == pytest.approx(alone.closed, rel=0.02)
    busy = queue_check(replicas, ways, poisson_load(2000), 0.0, 4.0, 0)
    assert busy.one_by_one == pytest.approx(busy.closed, rel=0.1) and busy.closed > 1.2 * alone.closed
    assert queue_check(replicas, ways, poisson_load(50), 0.0, 1e3, 0).closed == math.inf


def test_a_prompt_alone_takes_its_slices() -> None:
    model, made = latency(1), planner(Slo(1.0, 0.05, 0.9), **{"scheduler.token_budget": 128})
    plan = dataclasses.replace(made.maker.replicas(Candidate(Role.PREFILL)).plan, latency=model)
    busy, until = prompt_seconds(plan, 64, 264)
    slices = (StepWork(128, 128 * (64 + 192) / 2, num_prompts=1), StepWork(72, 72 * (192 + 264) / 2, num_prompts=1))
    assert busy == until == pytest.approx(sum(map(model.seconds, slices)))


def test_a_plan_shows_the_queues_of_its_prompts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "apart.json"
    words = words_of(folder, "--algorithm", "apart", "--plan.seconds", "2", "--output", str(file), machines="gpus")
    assert main(words) == 0
    assert "in closed form (M/G/1)" in capsys.readouterr().out
    check = read_placement(file).made["queue_check"]
    assert check["simulated"] > 0 and set(check) == {"rate", "simulated", "one_by_one", "closed"}
