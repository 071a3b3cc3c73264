"""`quire bench latency`: the steps it makes an engine run, and the model it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cli import main
from quire.config import EngineConfig
from quire.measure.latency_bench import retention_text, settings_of
from quire.measure.latency_points import DesignPoint
from quire.measure.latency_steps import Measurement, Visit, measure
from quire.models.fingerprint import fingerprint
from quire.timing.kept_latencies import kept_folder, kept_models
from quire.timing.latency import KINDS, LatencyModel, StepWork, mismatch
from quire.timing.latency_fit import fit
from tests.engines import make_engine
from tests.tiny_models import save_tiny


def test_a_measurement_keeps_visits_that_nothing_disturbed() -> None:
    seconds = iter(range(1, 9))

    def visit(cores: float) -> Visit:
        return Visit(cores, [(StepWork(decode_rows=1), float(next(seconds)))])

    busy, quiet, once = DesignPoint("prompt", 1), DesignPoint("prompt", 2), DesignPoint("prompt", 3)
    visits = {
        busy: [visit(0.0), visit(99.0), visit(90.0)],
        quiet: [visit(0.0), visit(99.0), visit(0.0), visit(0.0)],
        once: [visit(99.0)],
    }
    found = Measurement([busy, quiet, once], visits)
    assert [seconds for _, seconds in found.records] == [3.0, 6.0, 7.0, 8.0]
    assert (found.num_visits, found.num_disturbed) == (6, 4)


@pytest.fixture(scope="module")
def measured() -> Measurement:
    engine = make_engine()
    runner = engine.any_runner
    found = measure(engine, 6.0)
    engine.check()
    assert engine.any_runner is runner and engine.holds_nothing
    assert engine.scheduler.manager.tree.num_chunks == 0 and engine.scheduler.counters.steps == 0
    return found


def test_an_engine_runs_steps_of_all_kinds(measured: Measurement) -> None:
    # Of all visits: other programs may have disturbed those of a point.
    visits = [visit for each in measured.visits.values() for visit in each]
    works = [work for visit in visits for work, _ in visit.records]
    assert {work.kind for work in works} == {*KINDS}
    assert {1, 2, 4, 8} <= {work.decode_rows for work in works if work.kind == "decode"}
    assert max(work.rows for work in works) >= 200
    assert any(work.prompt_rows == 1 for work in works), "the last row of a cached prompt"
    assert any(work.num_prompts == 4 for work in works)
    assert any(work.prompt_pairs > 200 * work.prompt_rows for work in works), "rows behind many tokens"
    assert any(work.unique < work.context / 2 for work in works), "a shared beginning"
    assert all(seconds > 0 for _, seconds in measured.records)


def test_a_model_of_some_steps_predicts_others(measured: Measurement) -> None:
    records = measured.records
    model = fit(records[::2], {})
    ratios = [seconds / model.seconds(work) for work, seconds in records[1::2]]
    assert 0.7 < np.median(ratios) < 1.5
    assert sum(model.covers(work) for work, _ in records[1::2]) > 0.9 * len(ratios)


def test_steps_with_retention_are_measured() -> None:
    engine = make_engine(**{"retain.budget": 0.5, "retain.profile_rows": 16})
    records = measure(engine, 0.7, seed=1).records
    assert {work.kind for work, _ in records} == {*KINDS}
    engine.check()
    assert engine.holds_nothing


def test_the_command_writes_a_model_that_is_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    folder = save_tiny(tmp_path / "tiny")
    flags = ["--model.dtype", "float32", "--runtime.device", "cpu", "--runtime.threads", "1"]
    flags += ["--scheduler.max_running", "8", "--scheduler.token_budget", "128", "--cache.memory", "8MiB"]
    flags += ["--tiers.disk", f"{tmp_path / 'cache'}:64MiB"]
    files = {name: tmp_path / name for name in ("model.json", "plot.svg", "rows.jsonl")}
    words = [
        "--seconds",
        "2",
        "--output",
        files["model.json"],
        "--plot",
        files["plot.svg"],
        "--json",
        files["rows.jsonl"],
    ]
    assert main(["bench", "latency", str(folder), *flags, *map(str, words)]) == 0
    text = capsys.readouterr().out
    assert "measured / predicted" in text and "DistServe, Appendix A" in text and "disk (measured): " in text
    model = LatencyModel.read(files["model.json"])
    assert all(model.counts[kind] > 0 for kind in KINDS)
    assert model.about["codec"] == "dense" and model.about["threads"] == 1 and model.about["max_running"] == 8
    assert model.links["disk"].bytes_per_second > 1e6
    assert model.seconds(StepWork(decode_rows=1, context=64.0, unique=64.0)) > 0
    rows = [json.loads(line) for line in files["rows.jsonl"].read_text().splitlines()]
    assert [row["kind"] for row in rows] == [*KINDS]
    assert all(row["p10"] <= row["p50"] <= row["p99"] and row["median_seconds"] > 0 for row in rows)
    assert files["plot.svg"].read_text().lstrip().startswith("<?xml")
    (kept,) = kept_folder().iterdir()
    assert LatencyModel.read(kept) == model, "simulations find it without --latency"
    assert not [*(tmp_path / "cache").rglob("*.run")], "nothing of the measurement stays"


@pytest.mark.parametrize("hardware", [{"processor": "Z80", "level": "v9"}, {"processor": "H200", "level": None}, {}])
def test_a_model_of_a_log_is_one_of_the_log_s_hardware(
    hardware: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that fits it may run on other hardware. Old logs do not say theirs, and simulations here do not take
    such a model by themselves.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    folder, file = save_tiny(tmp_path / "tiny"), tmp_path / "steps.log"
    config = EngineConfig.from_options({"runtime.device": "cpu", "runtime.threads": 1, "model.dtype": "float32"})
    head = {"model": fingerprint(folder), "options": config.to_options(), **hardware}
    steps = [[0, 0.0, rows, 99.0 * rows, 99.0 * rows, 0, 0.01, None] for rows in (1, 2, 4) * 9]
    steps += [[rows, rows * rows / 2, 0, 0.0, 0.0, 1, 0.01 * rows, None] for rows in (64, 128, 256) * 9]
    file.write_text("".join(json.dumps(line) + "\n" for line in (head, *steps)))
    words = ["--steps", str(file), "--plot", str(tmp_path / "plot.svg")]
    assert main(["bench", "latency", str(folder), *words]) == 0
    ((_, model),) = kept_models(kept_folder())
    assert {name: model.about[name] for name in ("processor", "level") if name in model.about} == hardware
    wanted = settings_of(fingerprint(folder), config)
    told = str(mismatch(model.about, wanted))
    assert f"the processor {hardware.get('processor', 'an unknown value')}, not {wanted['processor']}" in told
    assert mismatch(model.about, {**wanted, **model.about}) is None or not hardware


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0"], "--seconds is 0; it must be above 0"),
        (["--plot", "plot.txt"], "its ending selects the format"),
        (["--output", "/no/folder/x.json"], "there is no folder"),
        (["--batch", "3"], "--batch is for quire bench throughput, not for latency"),
    ],
)
def test_wrong_flags_are_told_before_a_model_is_loaded(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "latency", "no-such-model", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_says_what_other_settings_it_was_made_with() -> None:
    def config(**options: Any) -> EngineConfig:
        fixed = {"runtime.device": "cpu", "model.dtype": "float32", "runtime.threads": 2}
        return EngineConfig.from_options(fixed | options)

    for options in ({"scheduler.max_running": 3}, {"cache.codec": "g4", "cache.outlier_slots": 2}):
        plain = config(**{"cache.codec": options.get("cache.codec", "dense")})
        assert mismatch(settings_of("ab", plain), settings_of("ab", config(**options))) is None
    slots = [settings_of("ab", config(**{"cache.codec": "nuq3", "cache.outlier_slots": count})) for count in (1, 2)]
    assert "cache.outlier_slots 1, not 2" in str(mismatch(*slots))
    made = settings_of("ab", config())
    for options, message in [
        ({"cache.codec": "g4"}, "cache.codec dense, not g4"),
        ({"runtime.threads": 1}, "runtime.threads 2, not 1"),
        ({"runtime.cpu_level": "v2"}, f"runtime.cpu_level {made['level']}, not v2"),
        ({"retain.budget": 0.5}, "retain off, not budget 0.5, profile_rows 256"),
    ]:
        assert message in str(mismatch(made, settings_of("ab", config(**options))))
    chain = retention_text(config(**{"retain.threshold": 0.9, "retain.local": 0.2}).retain)
    assert chain == (
        "threshold 0.9, frequent 0.3, local 0.2, chain special,punctuation,frequent,local, profile_rows 256"
    )
