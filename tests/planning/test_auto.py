"""The command `quire plan auto` on a tiny model: what it measures, keeps, simulates and prints."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli import main, parse, plan_auto
from quire.cli.parser import CommandParser
from quire.config import ClusterConfig, EngineConfig, SloConfig
from quire.errors import ConfigError
from quire.measure.latency_bench import settings_of as speed_settings
from quire.placement.rejected import Reason
from quire.planning import auto as planning
from quire.planning.curves import LossCurve
from quire.planning.halving import Rung, Trial
from quire.planning.quality import Quality, Text
from quire.planning.space import SearchLimits, Settings, Space
from quire.planning.speeds import Speeds
from quire.simulation.load import Load, Slices, fresh_seeds
from quire.simulation.setup import LINKS, LocalModel
from quire.timing.latency import Origin, StepWork
from quire.workload.fitted import fit
from quire.workload.workload import Arrival, Span, Workload
from tests.benchmark_scripts import benchmark
from tests.cli.commands import printed
from tests.planning.test_halving import chosen, latency
from tests.tiny_models import save_tiny

TARGETS = ["--slo.ttft", "0.4", "--slo.tpot", "0.05"]


def test_requests_longer_than_the_context_are_left_out_with_all_that_follow_them() -> None:
    load = Workload("w", [
        Arrival(0.0, (Span(1, 500),), 10), Arrival(1.0, (Span(0, 50),), 10),
        Arrival(0.0, (Span(2, 20),), 10, after=1, pause=1.0), Arrival(0.0, (Span(3, 5),), 1, after=0, pause=1.0),
        Arrival(0.0, (Span(4, 300),), 5, after=2, pause=1.0), Arrival(2.0, (Span(5, 9),), 9),
    ])  # fmt: skip
    found, (told,) = Load(load, 6).within(100)
    assert [(each.num_in, each.after) for each in found.workload.arrivals] == [(50, -1), (20, 0), (9, -1)]
    assert told.startswith("3 of 6 requests have more than 100 tokens, the model's context, and are left out")
    whole = Load(load, 6)
    assert whole.within(1000) == (whole, [])
    with pytest.raises(ConfigError, match="6 of 6 requests have more than 5 tokens, the model's context; take another"):
        whole.within(5)


def test_the_measured_goodput_is_where_attainment_falls_to_the_target() -> None:
    script = benchmark("plan_auto")
    assert script.knee({"1.0": 0.99, "1.2": 0.95, "1.4": 0.85}, 0.9) == pytest.approx(1.3)
    assert script.knee({"1.0": 0.99}, 0.9) == 1.0 and script.knee({"1.0": 0.5}, 0.9) == 0.0
    planned = {
        name: {"settings": name, "goodput": {"rate": rate}} for name, rate in (("chosen", 3.0), ("default", 1.0))
    }  # fmt: skip
    others = [{"settings": f"{rate}", "goodput": {"rate": rate}} for rate in (0.5, 2.0, 2.5)]
    found = script.finalists({**planned, "finalists": [*others, *planned.values()]}, 4)
    assert [each["settings"] for each in found] == ["chosen", "default", "2.5", "2.0"]
    found = script.finalists({**planned, "default": None, "finalists": others}, 3)
    assert [each["settings"] for each in found] == ["chosen", "2.5", "2.0"]


def test_the_benchmark_plans_for_the_attainment_that_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, commands = benchmark("plan_auto"), []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout="{}")

    monkeypatch.setattr(script.subprocess, "run", run)
    args = SimpleNamespace(
        model="m", memory="1GiB", quality="0.01", seconds="9", ttft=1.0, tpot=0.1, data=tmp_path, text="t", windows=1,
        processes=1, out=tmp_path, attainment=0.95, more=[],
    )  # fmt: skip
    assert script.plan(args, "conv", tmp_path / "trace.jsonl") == {}
    (command,) = commands
    assert command[command.index("--slo.attainment") + 1] == "0.95"


def test_gpus_that_are_not_here_are_planned_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "RUNGS", (Rung(20, 0.3, 3, confirms=True),))
    arrivals = [Arrival(0.05 * index, (Span(index, 400 + index),), 40) for index in range(40)]
    Workload("made", arrivals).write(tmp_path / "trace.jsonl")
    words = ["--hardware", "a100-80g", "--trace", str(tmp_path / "trace.jsonl"), *TARGETS, "--retain.budget", "off"]
    file = tmp_path / "quire.toml"
    file.write_text("[cluster]\nprefill = 0\ndecode = 0\n")
    told = printed(capsys, "plan", "auto", "llama-2-7b", *words, "--config", str(file), "--plan.seconds", "3")
    assert told["chosen"]["steps"]["origin"] == told["chosen"]["goodput"]["origin"] == "modelled"
    assert told["chosen"]["loss"]["value"] == 0  # nothing lossy is known of a model in numbers
    names = {each["settings"] for each in (*told["finalists"], *told["left"])}
    assert any("tp 2" in name for name in names) and any("pp 2" in name for name in names)


def test_a_division_that_no_engine_has_is_the_first_line_of_a_plan_and_of_its_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 132 GB need several GPUs."""
    monkeypatch.setattr(planning, "RUNGS", (Rung(10, 0.5, 2, confirms=True),))
    Workload("made", [Arrival(1.0 * index, (Span(index, 400),), 4) for index in range(20)]).write(tmp_path / "trace")
    file, words = (
        tmp_path / "quire.toml",
        ["--model.weights", "native", "--retain.budget", "off", "--cache.codec", "dense"],
    )
    command = [
        "plan",
        "auto",
        "opt-66b",
        "--hardware",
        "a100-80g",
        "--trace",
        str(tmp_path / "trace"),
        *TARGETS,
        *words,
    ]
    assert main([*command, "--plan.seconds", "2", "--output", str(file)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "not served yet" in line]
    assert len(said) == 1 and re.match(r"not served yet: tp \d pp \d is only modelled", said[0])
    assert file.read_text().startswith(f"# {said[0].partition(';')[0]}; this file leaves")


def test_parts_of_a_trace_begin_elsewhere_for_each_seed_and_keep_their_gaps() -> None:
    load = Workload("w", [Arrival(float(index**2), (Span(index, 5),), 1) for index in range(10)])
    parts = Slices(load, 4)
    first, second = (parts.drawn(None, seed) for seed in (0, 1))
    assert [each.prompt[0].id for each in first.arrivals] == [0, 1, 2, 3]
    assert [each.prompt[0].id for each in second.arrivals] == [4, 5, 6, 7]
    assert [each.at for each in second.arrivals] == [0.0, 9.0, 20.0, 33.0]
    faster = parts.drawn(2 * second.rate, 1)
    assert [each.at for each in faster.arrivals] == [0.0, 4.5, 10.0, 16.5]
    assert len(Slices(load, 20).drawn(None, 3).arrivals) == 10


def test_fresh_seeds_draw_requests_that_no_other_seed_draws() -> None:
    def parts(num_requests: int, after: int = -1) -> Slices:
        arrivals = [Arrival(float(index), (Span(index, 5),), 1) for index in range(num_requests)]
        arrivals[-1] = replace(arrivals[-1], after=after)
        return Slices(Workload("w", arrivals), 4)

    for num_requests, seed, count in ((15, 0, 2), (12, 5, 2), (8, 1, 1), (7, 0, 0), (3, 0, 0)):
        load = parts(num_requests)
        fresh = fresh_seeds(load, seed, 2)
        ids = [{each.prompt[0].id for each in load.drawn(3.0, each).arrivals} for each in (seed, *fresh)]
        assert len(fresh) == count and len(set.union(*ids)) == sum(map(len, ids)), (num_requests, ids)
    assert fresh_seeds(parts(15, after=3), 0, 2) == (), "a conversation has no parts"
    whole = parts(20).workload
    assert fresh_seeds(Load(whole, 4), 0, 2) == () and fresh_seeds(Load(whole, 4, fit(whole)), 3, 2) == (4, 5)


def test_a_goodput_that_no_other_requests_confirm_says_so(words: list[str], known: Path) -> None:
    planner = planner_from(words)
    arrivals = [Arrival(10.0 * (index // 2) + 0.1 * (index % 2), (Span(index, 30),), 4) for index in range(120)]
    workload = Workload("pairs", arrivals)
    planner.goal = replace(planner.goal, load=Load(workload, 30, fit(workload)))
    assert not any("not confirmed" in told for told in planner._prepare())
    planner.goal = replace(planner.goal, load=Load(workload, 61, fit(workload)))
    assert any("the trace has no second 61" in told for told in planner._prepare())
    trial = Trial(planner._made(planner.space.first, 1.0), 1.0)
    (found,) = planner.evaluate([trial], Rung(61, 0.5, 1, confirms=True), math.inf)
    assert found is not None and found.rate > 0 and not found.confirmed


TEXT = "It was the best of mills, it was the worst of mills. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a trace, a text, and a file that decides what would take long to simulate."""
    found = tmp_path_factory.mktemp("auto")
    save_tiny(found / "model", hidden_size=64)
    draw, at, arrivals = random.Random(0), 0.0, []
    for index in range(120):
        at += draw.expovariate(5)
        arrivals.append(Arrival(at, (Span(index, draw.randint(16, 120)),), draw.randint(2, 24)))
    Workload("made", arrivals).write(found / "trace.jsonl")
    (found / "text.txt").write_text(TEXT)
    (found / "quire.toml").write_text("[cluster]\nprefill = 0\ndecode = 0\n[runtime]\nthreads = 1\n")
    return found


@pytest.fixture
def known(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, with what an earlier plan has measured: dense is slower than g4, which loses 0.1 %."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, options = str(folder / "model"), {"runtime.threads": 1}
    space = Space.of(SearchLimits(cores=1))
    kept = tmp_path / "quire" / "latency"
    kept.mkdir(parents=True)
    for codec, base in (("dense", 0.012), ("g4", 0.006)):
        own = {**options, "cache.memory": "4MiB", "cache.codec": codec}
        local = LocalModel(model, lambda *_: latency(1.0))
        about = speed_settings(local.model_id, local.resolved(EngineConfig.from_options(own))[0])
        latency(base, 1e-7, 5e-5, **about).write(kept / f"{codec}.json")
    quality = Quality(model, EngineConfig.from_options(options), space, Text("text.txt", TEXT))
    for name, losses in (("default", (2.0, 2.1)), ("g4", (2.001, 2.1012))):
        settings = chosen(*([] if name == "default" else [name]), space=space)
        way = quality.losses.scoring_of(settings)
        assert way is not None
        quality.losses.curves.keep(
            LossCurve(quality.model_id, dict(quality.key_of(settings)), way.text, "text.txt", way.context, None, losses)
        )
    monkeypatch.setattr(planning, "RUNGS", (Rung(24, 0.3, 8, until=0.5), Rung(30, 0.2, 4, confirms=True)))
    return tmp_path


@pytest.fixture
def words(folder: Path) -> list[str]:
    """A command that works without measuring anything."""
    return [
        "plan", "auto", str(folder / "model"), "--config", str(folder / "quire.toml"), "--trace",
        str(folder / "trace.jsonl"), *TARGETS, "--plan.memory", "300MiB", "--model.weights", "native",
        "--retain.budget", "off", "--plan.seconds", "60",
    ]  # fmt: skip


def test_a_plan_is_printed_written_and_read_back(
    words: list[str], known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "planned.toml"
    told = printed(capsys, *words, "--output", str(file))
    best, default = told["chosen"], told["default"]
    assert best["options"]["cache.codec"] == "g4" and default["options"]["cache.codec"] == "dense"
    assert best["goodput"]["rate"] > 1.1 * default["goodput"]["rate"]
    assert best["loss"]["origin"] == "measured" and 0 < best["loss"]["most"] < 0.01
    assert best["steps"]["origin"] == best["goodput"]["origin"] == "fitted"
    assert best["memory"]["total"] <= 300 << 20 and told["frontier"]
    assert {each["why"] for each in told["left"]} <= {"unfit", "covered", "bound", "slower"}
    config, cluster = EngineConfig.from_options({}, file), ClusterConfig.from_options({}, file)
    assert (config.cache.codec, config.cache.memory) == ("g4", best["memory"]["cache"])
    assert config.runtime.threads == 1 and not cluster.is_on
    slo = SloConfig.from_options({}, file)
    assert (slo.ttft, slo.tpot) == (0.4, 0.05)
    text = file.read_text()
    assert "# Predicted: goodput (fitted):" in text and "# planned" in text and "# Quality lost: 0.1" in text


def test_people_get_a_frontier_with_the_origin_of_every_number(
    words: list[str], known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    told = capsys.readouterr().out
    parts = ("frontier within 300MiB", "chosen: g4", "(measured)", "(fitted)", "modelled", "differ from the chosen")
    assert [part for part in parts if part not in told] == []
    (row,) = (line for line in told.splitlines() if line.startswith("default "))
    assert row.split().count("fitted") == 2 and "measured" in row and "modelled" in row


def test_a_plan_without_a_text_or_curves_keeps_what_loses_nothing(
    words: list[str], folder: Path, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (known / "quire" / "curves").rglob("*.json"):
        file.unlink()
    planner = planner_from(words)
    lacking = planner.quality.measure_all(planner._possible(), 0.01, math.inf)  # type: ignore[union-attr]
    assert {"give --text FILE" in reason for reason in lacking.values() if "calibration" not in reason} == {True}
    known_ones = planner._known(planner._possible(), lacking)
    assert [planner.space.name(each) for each in known_ones] == ["default"]


@pytest.mark.parametrize(
    ("budget", "told"), [(0.0003, []), (0.0002, ["it loses 0.11% (measured), and the budget is 0.02%"])]
)
def test_what_loses_much_more_than_the_budget_is_not_tried(
    budget: float, told: list[str], words: list[str], known: Path
) -> None:
    """More than four times as much."""
    planner = planner_from([*words, "--plan.quality", str(budget)])
    names = [planner.space.name(each) for each in planner._known(planner._possible(), {})]
    assert "default" in names and ("g4" in names) == (not told)
    lossy = [each for each in planner.rejected if each.why is Reason.LOSSY]
    assert [each.reason for each in lossy if planner.space.name(each.option.settings) == "g4"] == told


@pytest.mark.parametrize(("budget", "is_measured"), [(0.01, False), (0.0012, True), (0.0001, False)])
def test_losses_that_too_few_windows_leave_open_are_measured_further(
    budget: float, is_measured: bool, words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = planner_from([*words, "--plan.quality", str(budget)])
    asked: list[Settings] = []
    monkeypatch.setattr(planner.quality, "measure", lambda settings, *_: asked.append(settings))
    g4 = next(each for each in planner.space.settings() if planner.space.name(each) == "g4")
    (found,) = planner.refine([planner._made(g4, 1.0)])
    assert found.loss.value == pytest.approx(0.0011, rel=0.01) and asked == [g4] * is_measured


def planner_from(words: list[str]) -> Any:
    return plan_auto.planner_of(parse(words))


def test_latencies_are_kept_ones_or_follow_from_their_parts(words: list[str], known: Path) -> None:
    speeds = planner_from(words).speeds
    dense = speeds.of(speeds.space.first)
    assert dense.origin is Origin.FITTED and dense.model.coefficients["base"] == 0.012
    both = chosen("g4 weights", "g4", space=Space.of(SearchLimits(cores=2)))
    assert speeds.of(both) is None  # nothing says what these weights save
    assert speeds.needed([both]) == [chosen("g4 weights", space=Space.of(SearchLimits(cores=2)))]
    about = {**speeds.wanted(chosen("g4 weights", space=Space.of(SearchLimits(cores=2))))}
    speeds.models.append(latency(0.008, 1e-7, 5e-5, **about))
    found = speeds.of(both)
    assert found.origin is Origin.MODELLED and found.how == "from the steps of g4 weights and of g4"
    assert found.model.seconds(StepWork(1)) == pytest.approx(0.008 + 0.006 - 0.012, rel=0.05)


def test_a_plan_that_cannot_be_made_says_what_decides(
    words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the commonest reason: that of the default settings. With a flag that exists."""
    monkeypatch.setattr(Speeds, "_steps", lambda self, timed, *_: ([], self.wanted(timed)))
    for path in (known / "quire" / "latency").iterdir():
        path.unlink()
    words = [word for word in words if word not in ("--model.weights", "native")]
    assert main([*words, "--plan.seconds", "5"]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "no settings can be tried" in line]
    assert error == (
        "quire: no settings can be tried; default: no steps were measured within 5 s; raise --plan.seconds"
    )
    assert "--plan.seconds" in CommandParser("plan", "auto").flags


def test_codecs_without_a_calibration_are_said_before_anything_is_measured(
    words: list[str], known: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(words) == 0
    (said,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert (
        "settings with nuq4, nuq3, nuq2 are left out: there is no calibration with 1 outlier slots; make it with"
        in said
    )
    assert "quire calibrate" in said and f"note: {said}" in capsys.readouterr().out


def test_a_disk_that_is_allowed_is_tried_with_its_measured_speed(words: list[str], known: Path, tmp_path: Path) -> None:
    planner = planner_from([*words, "--tiers.disk", f"{tmp_path / 'disk'}:64MiB"])
    assert [choice.name for choice in planner.space.tried["disk"]] == ["no disk", "disk"]
    settings = next(each for each in planner.space.settings() if planner.space.name(each) == "disk")
    planner.measure_latencies([settings], 0.0)
    trial = Trial(planner._made(settings, 1.0), 5.0)
    maker, candidate = planner.candidate(trial.point)
    (tier,) = maker.setup(candidate).replicas[0].tiers
    assert (tier.name, tier.cap) == ("disk", 64 << 20) and tier.link.bytes_per_second != LINKS["disk"].bytes_per_second
    (found,) = planner.evaluate([trial], Rung(20, 0.3, 1), math.inf)
    assert found is not None and found.rate > 0 and trial.point.cost > 1
    assert not (tmp_path / "disk").exists()  # a plan leaves nothing there


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(
    words: list[str], known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for processes in ("1", "2"):
        results.append(printed(capsys, *words, "--processes", processes))
    assert results[0] == results[1]
