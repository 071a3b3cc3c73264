"""`quire plan hardware`: from a measured machine to a plan, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.cli import main
from quire.config import EngineConfig
from quire.measure import offload_profile
from quire.offload.planning import hardware, quiet
from quire.offload.planning.profile import profile_text, read_profile
from quire.offload.planning.subject import Subject
from quire.offload.policy import read_policy
from quire.offload.units import TIERS
from tests.cli.commands import printed, refused
from tests.offload.planning.test_profile import MIB, profile_with
from tests.offload.planning.test_profile import cache_folder as cache_folder
from tests.tiny_models import save_tiny


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: None) -> Callable[..., tuple[str, Path]]:
    """Measures a tiny model in seconds. Returns its folder and the profile."""
    for name, value in {
        "FILE_BYTES": 8 * MIB, "READ_SIZES": (MIB,), "READ_THREADS": (1,), "READ_SECONDS": 0.02, "COPY_BYTES": MIB,
        "SAMPLE_SECONDS": 0.0, "COLD_BYTES": 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(hardware, name, value)
    monkeypatch.setattr(quiet, "MOST_TRIES", 1)
    monkeypatch.setattr(offload_profile, "QUIET_SECONDS", 0.03)
    model, file = save_tiny(tmp_path / "model"), tmp_path / "machine.json"

    def measure(*words: str) -> tuple[str, Path]:
        given = ["--rounds", "1", "--cache.memory", "16MiB", "--model.dtype", "bfloat16", *words]
        assert main(["plan", "hardware", str(model), "--output", str(file), *given]) == 0
        return str(model), file

    return measure


SAME = ["--model.dtype", "bfloat16"]


def test_bench_latency_measures_the_same(quick: Callable[..., tuple[str, Path]], tmp_path: Path) -> None:
    model, file = quick()
    by_bench, rows = tmp_path / "by_bench.json", tmp_path / "rows.jsonl"
    words = ["bench", "latency", model, "--tiers", "--rounds", "1", "--cache.memory", "16MiB", *SAME]
    assert main([*words, "--output", str(by_bench), "--json", str(rows)]) == 0
    assert read_profile(by_bench).conditions == read_profile(file).conditions
    assert json.loads(rows.read_text()) == json.loads(by_bench.read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tiers"], "quire bench latency --tiers needs --output FILE"),
        (["--tiers", "--output", "machine.json", "--seconds", "5"], "--seconds is no setting of --tiers"),
        (["--tiers", "--output", "machine.json", "--points", "decode"], "--points is no setting of --tiers"),
        (["--tiers", "--output", "machine.json", "--steps", "a.log"], "--steps is no setting of --tiers"),
        (["--steps", "a.log", "--seconds", "5"], "--seconds is for measuring, and --steps measures nothing"),
        (["--steps", "a.log", "--points", "decode"], "--points is for measuring, and --steps measures nothing"),
        (["--rounds", "2"], "--rounds is a setting of --tiers"),
        (["--folder", "kv"], "--folder is a setting of --tiers"),
    ],
)
def test_flags_of_the_other_measurement_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, ["bench", "latency", str(save_tiny(tmp_path / "model")), *words], message)
    assert not Path("machine.json").exists()


def test_a_machine_is_measured_and_planned_for(
    quick: Callable[..., tuple[str, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = quick()
    told = capsys.readouterr().out
    assert "weights are read at" in told and "ms a layer" in told and "fitted: " in told
    made = read_profile(file)
    config = EngineConfig.from_options({"model.dtype": "bfloat16", "offload.mode": "auto"})
    made.check(Subject.of(model, config).conditions())
    assert made.products.counts == hardware.ROWS and made.conditions.dtype == "bfloat16"
    shares = sorted({run.disk_share for run in made.runs})
    assert len(shares) == 3 and shares[0] == 0 and shares[-1] == 1
    assert all(run.predicted > 0 for run in made.runs)

    output = tmp_path / "policy.json"
    words = ["--hardware", str(file), "--input-tokens", "64", "--output-tokens", "8", *SAME]
    found = printed(capsys, "plan", "offload", model, *words, "--only-weights", "--output", str(output))
    policy = read_policy(output, TIERS[1:])
    assert policy.block == found["micro_batch"] and found["throughput"] > 0
    assert found["weights"] == {"cpu": 1.0, "disk": 0.0}  # a tiny model fits
    options = {"model.dtype": "bfloat16", "cache.memory": "16MiB", "offload.mode": str(output)}
    with LLM(model, options) as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("action", "words", "message"),
    [
        ("offload", ["--model.dtype", "float32"], "model.dtype bfloat16, not float32"),
        ("offload", [*SAME, "--model.weights", "g4"], "model.weights native, not g4"),
        ("offload", [*SAME, "--cache.codec", "g4"], "cache.codec dense, not g4"),
        ("offload", [*SAME, "--offload.disk_bandwidth", "100MB"], "offload.disk_bandwidth auto, not 95.37MiB"),
        ("offload", [*SAME, "--form", "max"], "--form is for --hardware t4"),
        ("offload", [*SAME, "--plan.gpu", "1GiB"], "--plan.gpu has no effect"),
        ("offload", [*SAME, "--plan.cpu", "1MiB", "--micro-batch", "64", "--input-tokens", "64"], "cpu lacks"),
        ("offload", [*SAME, "--input-tokens", "1000"], "are 1032 in all; this model serves at most 512"),
        ("hardware", [], "needs --output FILE"),
        ("hardware", ["--output", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        ("hardware", ["--output", "x.json", "--plan.cpu", "1GiB"], "--plan.cpu is for quire plan offload"),
        ("hardware", ["--output", "x.json", "--slack", "0.5"], "--slack is for quire plan offload, not for hardware"),
        ("hardware", ["--output", "x.json", "--retain.budget", "0.5"], "measured without retain and tiers"),
    ],
)
def test_what_is_not_for_a_machine_or_its_profile_is_refused(
    tmp_path: Path, action: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profile is a made-up one of a tiny model."""
    model = str(save_tiny(tmp_path / "model"))
    if action == "offload":
        config = EngineConfig.from_options({"model.dtype": "bfloat16", "offload.mode": "auto"})
        file = tmp_path / "machine.json"
        file.write_text(profile_text(profile_with(conditions=Subject.of(model, config).conditions())))
        words = ["--hardware", str(file), *words]
    refused(capsys, ["plan", action, model, *words], message)
