"""`quire simulate`: what it simulates, what it prints, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cli import main, simulation_common
from quire.config import ClusterConfig, EngineConfig
from quire.placement.placement_file import Instances, Placement, Predicted
from quire.simulation.load import Load
from quire.simulation.setup import LocalModel, Setup
from quire.timing.kept_latencies import kept_folder
from quire.timing.latency import LatencyModel
from quire.workload.fitted import fit
from quire.workload.workload import Arrival, Span, Workload
from tests.cli.commands import printed, refused
from tests.tiny_models import save_tiny

COEFFICIENTS = {"base": 0.004, "rows_from_1": 4e-4, "prompt_pairs": 1e-7, "context": 1e-6}
OPTIONS = ["--cache.memory", "4MiB", "--scheduler.max_running", "16", "--scheduler.token_budget", "128"]
TARGETS = ["--slo.ttft", "0.2", "--slo.tpot", "0.03"]
GPU = ["llama-2-7b", "--hardware", "a100-80g"]


def latency(**about: Any) -> LatencyModel:
    return LatencyModel(about, COEFFICIENTS, (1,), {}, {"rows": (1, 600)})


def made_workload(count: int = 60, rate: float = 8.0, seed: int = 0) -> Workload:
    """Prompts of some lengths, of which half begin alike."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / rate, count))
    arrivals = []
    for index, at in enumerate(times.tolist()):
        own = Span(100 + index, int(random.integers(8, 300)))
        shared = (Span(1, 64),) if index % 2 else ()
        arrivals.append(Arrival(at, (*shared, own), int(random.integers(1, 40))))
    return Workload("made", arrivals)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a latency model and a trace."""
    found = tmp_path_factory.mktemp("simulate")
    save_tiny(found / "model", tokenizer=False)
    latency().write(found / "latency.json")
    made_workload().write(found / "trace.jsonl")
    return found


@pytest.fixture
def words(folder: Path) -> list[str]:
    """A command that works."""
    return [
        "simulate", str(folder / "model"), "--trace", str(folder / "trace.jsonl"), "--latency",
        str(folder / "latency.json"), *OPTIONS,
    ]  # fmt: skip


def latency_of(role: str, config: EngineConfig, fingerprint: str) -> LatencyModel:
    return latency()


@pytest.fixture
def local(folder: Path) -> Callable[..., Setup]:
    """Makes the setup of a server with these settings."""

    def make(settings: ClusterConfig | None = None, placement: Placement | None = None, **options: Any) -> Setup:
        usual = {"cache.memory": "4MiB", "scheduler.max_running": 16, "scheduler.token_budget": 128}
        base, model = EngineConfig.from_options({**usual, **options}), LocalModel(str(folder / "model"), latency_of)
        return model.setup(model.candidate(base, settings or ClusterConfig(), placement))

    return make


# Results.


@pytest.fixture(scope="module")
def fitted() -> Load:
    return Load(made_workload(), 40, fit(made_workload()))


def test_a_faster_load_waits_longer(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = printed(capsys, *words, *TARGETS, "--rates", "2,40")["rates"]
    assert (slow["rate"], fast["rate"]) == (2.0, 40.0)
    assert slow["ttft"]["mean"] < fast["ttft"]["mean"] and slow["attainment"] > fast["attainment"]
    by_scale = list(fast["attainment_by_scale"].values())
    assert by_scale == sorted(by_scale) and by_scale[0] < by_scale[-1]


def test_processes_that_simulate_never_see_an_interrupt() -> None:
    script = """
from pathlib import Path
from types import SimpleNamespace
from quire.simulation.pool import Workers

def is_blocked(status):
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["SigBlk"], 16) >> 1 & 1, fields["PPid"].strip()

def own():
    return is_blocked(Path("/proc/self/status").read_text())

before = own()[0]
with Workers(1) as workers:
    status, = workers.run([SimpleNamespace(count=1, outcome=Path("/proc/self/status").read_text)])
    worker, server = is_blocked(status)
    print(before, worker, is_blocked(Path(f"/proc/{server}/status").read_text())[0], own()[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "1", "0"], done


def test_the_rates_of_a_search_straddle_the_target(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, *words, *TARGETS, "--goodput", "--requests", "200")["goodput"]
    points = dict(found["points"])
    reached = [rate for rate, share in points.items() if share >= found["target"]]
    missed = [rate for rate, share in points.items() if share < found["target"]]
    assert found["verdict"] == "found" and found["confirmed"] and reached and missed
    assert any(found["rate"] <= rate <= found["rate"] * 1.5 for rate in missed)
    assert found["attainment"] >= 0.9 and found["rate_per_unit"] == found["rate"]


def test_every_block_says_where_its_numbers_come_from(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*words, *TARGETS, "--fit", "--cluster.prefill", "1", "--cluster.decode", "1", "--requests", "15"]) == 0
    told = capsys.readouterr().out
    assert "trace made (measured): 60 requests" in told
    assert "requests (fitted)" in told and "KS distances" in told
    assert "times in ms, from fitted latencies" in told
    assert "1 ms between client and server (modelled)" in told and "caches at" in told
    assert "time in transfer" in told and "prefill-0 busy" in told and "decode-0 busy" in told
    assert "preemptions" in told and "steps outside the latency model's range" in told
    assert "prompt tokens from" in told


def test_a_picture_is_drawn(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "load.svg"
    assert main([*words, *TARGETS, "--rates", "4,20", "--plot", str(file)]) == 0
    assert "requests/s" in capsys.readouterr().out and file.read_bytes().startswith(b"<?xml")


def test_steps_outside_the_range_are_counted_and_doubted(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataclasses.replace(latency(), ranges={"rows": (1.0, 2.0)}).write(tmp_path / "narrow.json")
    place = words.index("--latency") + 1
    found = printed(capsys, *words[:place], str(tmp_path / "narrow.json"), *words[place + 1 :])["rates"][0]
    assert 0 < found["steps_outside"] < found["steps"]
    for most, is_doubted in ((0.0, True), (1.0, False)):
        monkeypatch.setattr(simulation_common, "MOST_OUTSIDE", most)
        assert main([*words[:place], str(tmp_path / "narrow.json"), *words[place + 1 :]]) == 0
        assert ("doubt: up to" in capsys.readouterr().out) == is_doubted


def test_a_model_of_prompts_alone_is_not_for_instances_that_decode(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, place = tmp_path / "prompts.json", words.index("--latency") + 1
    dataclasses.replace(latency(), counts={"steps": 40, "prompt": 40}).write(file)
    assert main([*words[:place], str(file), *words[place + 1 :]]) == 2
    assert f"{file}: no steps that decode were measured for it" in capsys.readouterr().err


# What is simulated.


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("quire.engine.build.usable_cores", lambda: 4)
    yield


def test_a_kept_model_with_these_settings_is_found(
    words: list[str], local: Callable[..., Setup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from quire.measure.latency_bench import settings_of

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_folder().mkdir(parents=True)
    plan = local().replicas[0].plan
    kept = latency(**settings_of(plan.model_id, plan.config))
    kept.write(kept_folder() / "kept.json")
    place = words.index("--latency")
    without = words[:place] + words[place + 2 :]
    with caplog.at_level("INFO", "quire"):
        assert printed(capsys, *without)["instances"][0]["latency"] == "fitted"
    assert [each for each in caplog.messages if "kept in" in each and "kept.json" in each]
    dataclasses.replace(kept, about={**kept.about, "codec": "nuq3"}).write(kept_folder() / "kept.json")
    assert main(without) == 2
    told = capsys.readouterr().err
    assert "no latency model is kept" in told and "quire bench latency" in told


# Hardware that is not here.


def test_encoded_weights_and_cache_leave_room_for_more(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    trace = ["--trace", str(folder / "trace.jsonl"), "--requests", "5"]
    plain, packed = (
        printed(capsys, "simulate", *GPU, *trace, *more)["instances"][0]["cache_tokens"]
        for more in ([], ["--model.weights", "g4", "--cache.codec", "g4"])
    )
    assert packed > 4 * plain


# What is refused.


def test_errors_are_one_line_that_says_what_to_do(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = ["--trace", str(folder / "trace.jsonl")]
    latency(threads=7).write(tmp_path / "threads.json")
    (tmp_path / "bad.json").write_text("[]")
    two = Placement((Instances("mixed", 1, tp=2),), Predicted(1.0, 1.0, "GPU", 1.0, 0.9))
    two.write(tmp_path / "two.json")
    cases: list[tuple[list[str], str]] = [
        ([*words, "--goodput"], "--goodput needs a latency target: give --slo.ttft or --slo.tpot"),
        ([*words, "--goodput", "--slo.ttft", "1", "--slo.attainment", "0"], "slo.attainment is 0; --goodput needs"),
        ([*words, "--seed", "-1"], "--seed is -1"),
        ([*words, "--seed", str(1 << 64)], "--seed is 18446744073709551616"),
        ([*words, "--rate", "0"], "'0' is not a number above 0"),
        ([*words, "--rates", "1,x"], "'x' is not a number above 0"),
        ([*words, "--parallel.tp", "2"], "--parallel.tp is for GPUs that are not here"),
        ([*words, "--hardware", "h100"], "--latency is measured and --hardware is modelled"),
        ([*words[:2], *trace, "--hardware", "h9000"], "device 'h9000' is unknown"),
        (["simulate", "opt-66b", *trace], "name GPUs for it with --hardware"),
        (["simulate", "opt-66b", "--hardware", "t4", *trace], "raise --parallel.tp or --parallel.pp"),
        (["simulate", *GPU, *trace, "--retain.threshold", "0.9"], "simulate with retain.budget instead"),
        (["simulate", *GPU, *trace, "--cache.memory", "200GiB"], "cache.memory is 200GiB"),
        (["simulate", *GPU, *trace, "--model.max_context", "5000"], "this model serves at most 4096"),
        ([*words[:2], *trace, "--latency", str(tmp_path / "threads.json")], "made with runtime.threads 7"),
        ([*words[:2], *trace, "--latency", str(tmp_path / "bad.json")], "neither a latency model nor a profile"),
        ([*words[:2], *trace, "--latency", f"decode={folder / 'latency.json'}"], "no --latency is for instances"),
        ([*words[:2], *trace, "--latency", "bogus=a.json"], "bogus=a.json: no such file, and no role of prefill"),
        ([*words, "--cluster.placement", str(tmp_path / "two.json")], "--hardware NAME simulates more"),
        ([*words, "--trace", str(tmp_path / "none.csv")], "cannot read the workload"),
        ([*words, "--retain.threshold", "0.9"], "simulate with retain.budget instead"),
        ([*words, "--plot", "load.txt"], "its ending selects the format"),
    ]  # fmt: skip
    for given, message in cases:
        refused(capsys, given, message)


def test_a_role_may_have_a_latency_model_of_its_own(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {name: 10 * value for name, value in COEFFICIENTS.items()}
    dataclasses.replace(latency(), coefficients=slow).write(tmp_path / "slow.json")
    parts = ["--cluster.prefill", "1", "--cluster.decode", "1", "--rate", "2", "--requests", "20"]
    usual, mine = (
        printed(capsys, *words, *parts, *more)["rates"][0]
        for more in ([], ["--latency", f"decode={tmp_path / 'slow.json'}"])
    )
    assert mine["ttft"]["p50"] == pytest.approx(usual["ttft"]["p50"], rel=0.02)
    assert mine["tpot"]["p50"] > 5 * usual["tpot"]["p50"]


@pytest.mark.usefixtures("four_cores")
def test_what_the_latencies_do_not_know_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--runtime.threads", "3", "--cluster.mixed", "2", "--model.max_context", "64", "--requests", "8"]
    warnings = printed(capsys, *words, *more)["warnings"]
    assert len(warnings) == 2
    assert "exceed the context of 64 tokens, and are refused" in warnings[0]
    assert "6 threads would share the 4 cores" in warnings[1]
