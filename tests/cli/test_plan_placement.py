"""`quire plan placement`: what it searches, what it writes, and what it refuses."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.arguments import Arguments
from quire.cli import main, plan_placement, simulate
from quire.cluster.placements import shared_options
from quire.config import EngineConfig
from quire.placement.cluster_file import ClusterSpec, Network, Nodes
from quire.placement.divisions import Option
from quire.placement.placement_file import Gpus, Hosts, Instances, Placement, Predicted, read_placement
from quire.placement.rejected import Reason
from quire.planning import option_trials as search
from quire.planning import placements
from quire.planning.goodput import Goodput
from quire.planning.option_trials import OnCores, OnGpus, OptionTrials
from quire.simulation.hardware import Target
from quire.simulation.load import Load
from quire.simulation.setup import LINKS, Setup
from quire.timing.devices import DEVICES
from quire.timing.latency import LatencyModel, Link, StepWork
from quire.workload.fitted import fit
from quire.workload.slo import Slo
from quire.workload.workload import Arrival, Span, Workload
from tests.cli.commands import printed, refused
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
        for name in ("JOINT_SEEDS", "SEEDS", "CONFIRMATIONS"):
            patch.setattr(placements, name, 1)
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
) -> OptionTrials:
    """Options on machines with two GPUs of OPT-13B. between: bytes/s from one machine to another."""
    nodes = Nodes(count=1 if between is None else 2, gpus=2, gpu_memory=80 * 10**9, device="a100-80g")
    cluster = ClusterSpec(nodes, Network(between=between))
    small = {"scheduler.max_running": 16, "scheduler.token_budget": 256, **options}
    link = None if between is None else Link(1e-4, float(between))
    target = Target("opt-13b", DEVICES["a100-80g"], slow_link=link, gpus=2)
    workload = workload or made_workload(count)
    model = OnGpus(target, EngineConfig.from_options(small), cluster, 400)
    return OptionTrials(model, Load(workload, count, fit(workload)), slo)


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
        monkeypatch.setattr(placements, "ACCEPTED_SHARE", accepted)
        found = printed(capsys, *words_of(folder, "--rate", "3.5", "--algorithm", "mixed"))
        said = [each for each in found["made"].get("warnings", []) if "of the trace itself" in each]
        assert bool(said) == is_said and 0 <= found["made"]["attainment_of_trace"] <= 1


def test_two_points_of_attainment_between_drawn_and_recorded_requests_are_no_doubt() -> None:
    placement = Placement((Instances("mixed", 1),), Predicted(1.0, 1.0, "GPU", 1.0, 0.9))
    goal = placements.PlacementGoal(Load(made_workload(), 60), Slo(0.3, 0.05, 0.9), None, "mixed", False, 1.0, 0)
    for more, is_doubted in ((0.0199, False), (0.0201, True)):
        for replayed in ((0.9, 0.9 + more), (0.9 + more, 0.9)):
            result = placements.PlacementResult("mixed", placement, 0.9, replayed=replayed)
            told = placements._doubts(result, placement, goal)
            assert ["of the trace itself" in each for each in told] == [True] * is_doubted, replayed


def test_the_command_of_the_file_plans_the_same_again(placed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = read_placement(placed).made["command"].split()
    assert command[:3] == ["quire", "plan", "placement"]
    place = command.index("--output") if "--output" in command else len(command)
    again, before = printed(capsys, *command[1:place]), json.loads(placed.read_text())
    assert again["instances"] == before["instances"] and again["predicted"] == before["predicted"]


def test_quire_simulate_takes_the_file(placed: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [word for count in (1, 2) for word in ("--latency", str(folder / f"{count}.json"))]
    simulate = ["simulate", str(folder / "model"), "--trace", str(folder / "trace.jsonl"), *files, *TARGETS]
    found = printed(capsys, *simulate, "--cluster.placement", str(placed), "--rate", "3", "--requests", "20")
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
    assert (rejected["option"], rejected["why"]) == ("mixed on 1 core", Reason.UNFIT)
    assert "made with runtime.threads 2, not 1" in rejected["reason"]
    assert found.instances[0].options["runtime.threads"] == 2


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


def test_instances_that_no_engine_runs_are_said_so_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of 26 GB need two GPUs of 20 GB."""
    machines, file = tmp_path / "small.toml", tmp_path / "placement.json"
    machines.write_text('[nodes]\ngpus = 2\ngpu_memory = "20GB"\ndevice = "a100-40g"\n')
    more = "--algorithm", "mixed", "--plan.seconds", "0.1", "--cluster.file", str(machines), "--output", str(file)
    assert main(words_of(folder, *more, machines="gpus")) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"not served yet: tp \d pp \d is only modelled, because .* one process with one GPU", first)
    assert not any("not served yet" in line for line in others)
    assert read_placement(file).made["warnings"][0] == first


def test_requests_beyond_the_context_are_left_out_and_said_so_second(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines, file = tmp_path / "small.toml", tmp_path / "placement.json"
    machines.write_text('[nodes]\ngpus = 2\ngpu_memory = "20GB"\ndevice = "a100-40g"\n')
    more = "--algorithm", "mixed", "--plan.seconds", "0.1", "--cluster.file", str(machines), "--output", str(file)
    assert main(words_of(folder, *more, "--model.max_context", "300", machines="gpus")) == 0
    told, found = capsys.readouterr().out, read_placement(file)
    unserved, second, *_ = found.made["warnings"]
    assert "not served yet" in unserved and told.startswith(unserved)
    assert second.startswith("3 of 60 requests have more than 300 tokens, the model's context") and second in told
    assert found.workload["mean_in"] < made_workload().mean_in


# A whole setup.


def test_a_given_speed_within_machines_is_one_of_links_like_the_device_s_own() -> None:
    """An A100 has 300 GB/s. Steps of four GPUs that share layers take as long, whether that is said or not."""
    said, own, half = (
        Target.on(Gpus("a100-80g", 80 * 10**9, 8, inside), "opt-66b")
        .latency(EngineConfig(), 4, 1)
        .seconds(StepWork(prompt_rows=512))
        for inside in (300 * 10**9, None, 150 * 10**9)
    )
    assert said == own < half < 2 * own


def planned_setup(model: Any, machines: str, file: Path, *words: str) -> Setup:
    """The first setup that a plan on these machines simulates. The placement is in the file then.

    model  OnGpus or OnCores
    """
    made, setup, cluster = list[Setup](), model.setup, file.with_suffix(".toml")
    cluster.write_text(machines)

    def noted(self: Any, placement: Placement) -> Setup:
        made.append(setup(self, placement))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "setup", noted)
        assert main([*words, "--plan.seconds", "0.1", "--cluster.file", str(cluster), "--output", str(file)]) == 0
    return made[0]


def scenario_of(model: str, folder: Path, placement: Path, *words: str) -> Any:
    """What `quire simulate` makes of a placement."""
    parser = argparse.ArgumentParser()
    simulate.add_arguments(Arguments(parser, []))
    files = ["--trace", str(folder / "trace.jsonl"), "--cluster.placement", str(placement)]
    return simulate._scenario(parser.parse_args([model, *files, *OPTIONS, *words]))


def cache_bytes(setup: Setup) -> list[int]:
    return [each.plan.sizes.cache_bytes for each in setup.replicas]


def test_a_placement_is_simulated_on_the_gpus_that_it_is_for(folder: Path, tmp_path: Path) -> None:
    nodes = '[nodes]\ncount = 2\ngpus = 2\ngpu_memory = "60GB"\ndevice = "a100-80g"\n'
    network, file = '[network]\ninside = "100GB"\nbetween = "1GB"\n', tmp_path / "placement.json"
    pairs = words_of(folder, "--algorithm", "pairs", machines="gpus")
    planned = planned_setup(OnGpus, nodes + network, file, *pairs)
    assert read_placement(file).gpus == Gpus("a100-80g", 60 * 10**9, 2, 100 * 10**9, 10**9)
    found = scenario_of("opt-13b", folder, file, "--hardware", "A100-80G").setup
    assert found.in_pairs and found.ways == planned.ways and cache_bytes(found) == cache_bytes(planned)
    assert [each.plan.latency for each in found.replicas] == [each.plan.latency for each in planned.replicas]
    other = scenario_of("opt-13b", folder, file, "--hardware", "h100").setup
    assert other.replicas[0].plan.latency.device == DEVICES["h100"]


@pytest.mark.parametrize("algorithm", ["pairs", "mixed", "apart"])
def test_a_placement_on_machines_without_gpus_is_simulated_and_served_as_it_was_planned(
    folder: Path, tmp_path: Path, algorithm: str
) -> None:
    """Ray's instances are equal, use TCP on one machine too, and stay in their pairs."""
    machines = '[nodes]\ncount = 2\ncores = 4\nmemory = "8GiB"\n\n[network]\nbetween = "10MB"\n'
    file = tmp_path / "placement.json"
    planned = planned_setup(OnCores, machines, file, *words_of(folder, "--algorithm", algorithm))
    placement = read_placement(file)
    assert placement.hosts == Hosts(2, 10**7) and placement.in_pairs == (algorithm == "pairs")
    shared_options(placement.instances, {}, None, is_local=False)  # refuses what Ray cannot have
    latencies = [word for count in (1, 2) for word in ("--latency", str(folder / f"{count}.json"))]
    subject = scenario_of(str(folder / "model"), folder, file, *latencies)
    found = subject.setup
    assert (found.in_pairs, found.ways) == (planned.in_pairs, planned.ways)
    tcp = LINKS["tcp"].bytes_per_second
    assert found.ways.bulk.bytes_per_second == (tcp if algorithm == "pairs" else 10**7)
    assert cache_bytes(found) == cache_bytes(planned) and subject.units == placement.predicted.cost


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
        refused(capsys, given, message)


def test_a_placement_that_misses_the_target_as_a_whole_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts promise what the whole does not keep if their goodput is thought to be five times as high."""
    goodput_of = OptionTrials.goodput_of

    def boasted(self: OptionTrials, option: Option) -> Goodput:
        found = goodput_of(self, option)
        return dataclasses.replace(found, rate=5 * found.rate)

    monkeypatch.setattr(OptionTrials, "goodput_of", boasted)
    file = tmp_path / "boasted.json"
    assert main(words_of(folder, "--algorithm", "mixed", "--output", str(file))) == 0
    found: Placement = read_placement(file)
    assert found.predicted.attainment < 0.5
    assert any("simulated as a whole" in warning for warning in found.made["warnings"])


# Queues.


def test_a_plan_shows_the_queues_of_its_prompts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "apart.json"
    words = words_of(folder, "--algorithm", "apart", "--plan.seconds", "2", "--output", str(file), machines="gpus")
    assert main(words) == 0
    assert "in closed form (M/G/1)" in capsys.readouterr().out
    check = read_placement(file).made["queue_check"]
    assert check["simulated"] > 0 and set(check) == {"rate", "simulated", "one_by_one", "closed"}
