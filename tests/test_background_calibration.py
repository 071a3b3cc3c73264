"""A codec that is calibrated beside requests: dense pages first, then another cache over the same weights."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import background_calibration
from quire.async_llm import AsyncLLM
from quire.background_calibration import BackgroundCalibration
from quire.calibrate.estimate import duration_text, estimated_seconds
from quire.calibrate.settings import CalibrationSettings
from quire.config import CacheConfig, EngineConfig
from quire.engine.params import SamplingParams
from quire.errors import ConfigError
from quire.load import load_engine
from quire.models.fingerprint import fingerprint

from .engines import GREEDY, keep_calibration, make_engine
from .tiny_models import save_tiny, tiny_shape

load_module = importlib.import_module("quire.load")

OPTIONS = {
    "model.dtype": "float32",
    "cache.codec": "nuq3",
    "cache.memory": "8MiB",
    "cache.check": False,
    "runtime.threads": 1,
    "runtime.device": "cpu",
}
LONG = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
PROMPT = list(range(100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16, max_position_embeddings=256)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.calibrate.settings.cache_folder", lambda: tmp_path / "cache" / "models")


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of the model."""
    with pytest.MonkeyPatch.context() as patch:
        kept = tmp_path_factory.mktemp("made")
        patch.setattr("quire.calibrate.settings.cache_folder", lambda: kept / "models")
        keep_calibration(folder)
        return CalibrationSettings().file(fingerprint(folder))


class Process:
    """In place of the process: ends when it is let, with a calibration or with a failure."""

    def __init__(self, folder: Path, made: Path) -> None:
        self.may_end, self.failure = threading.Event(), ""
        self._folder, self._made = folder, made

    def calibrate(self) -> str:
        assert self.may_end.wait(30)
        if not self.failure:
            keep(self._folder, self._made)
        return self.failure


def keep(folder: Path, made: Path) -> None:
    file = CalibrationSettings().file(fingerprint(folder))
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(made, file)


@pytest.fixture
def process(folder: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    process = Process(folder, made)
    monkeypatch.setattr(BackgroundCalibration, "_calibrate", lambda self: process.calibrate())
    monkeypatch.setattr(background_calibration, "LOOK_SECONDS", 0.01)
    yield process
    process.may_end.set()


def run(folder: Path, body: Callable[[AsyncLLM], Awaitable[None]], **options: object) -> None:
    async def main() -> None:
        async with AsyncLLM(str(folder), {**OPTIONS, **options}, calibrates_beside=True) as llm:
            await body(llm)

    asyncio.run(asyncio.wait_for(main(), 60))


async def tokens_of(llm: AsyncLLM, params: SamplingParams = GREEDY) -> list[int]:
    return [token async for delta in llm.generate(PROMPT, params) for token in delta.outputs[0].token_ids]


async def until(llm: AsyncLLM, state: str) -> None:
    for _ in range(3000):
        if llm.stats()["calibration"]["state"] == state:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{llm.stats()['calibration']}, not {state}")


# Another engine goes on


@pytest.mark.parametrize("steps", [0, 1, 4, 30])
def test_requests_go_on_in_another_engine_with_the_tokens_that_one_engine_gives(steps: int) -> None:
    prompts = [PROMPT, PROMPT[:40], PROMPT[::-1], list(range(200, 230))]
    asked = [GREEDY, dataclasses.replace(GREEDY, n=2, temperature=1.0, seed=3), GREEDY, GREEDY]
    options: dict[str, Any] = {"scheduler.max_running": 3, "scheduler.token_budget": 128}

    def answers(move: bool) -> list[list[int]]:
        engine = make_engine(tiny_shape(), **options)
        for index, (prompt, params) in enumerate(zip(prompts, asked, strict=True)):
            engine.add(str(index), prompt, params)
        found: dict[tuple[str, int], list[int]] = {}

        def step() -> None:
            for delta in engine.step():
                for output in delta.outputs:
                    found.setdefault((delta.request_id, output.index), []).extend(output.token_ids)

        for _ in range(steps):
            step()
        if move:
            old, engine = engine, make_engine(tiny_shape(), **options)
            engine.take_over(old)
            assert not old.has_work and old.holds_nothing
            old.scheduler.check()
        while engine.has_work:
            step()
        engine.check()
        assert engine.holds_nothing
        return [found[key] for key in sorted(found)]

    assert answers(move=True) == answers(move=False)


def test_counters_go_on_and_each_token_counts_once() -> None:
    old, new = make_engine(tiny_shape()), make_engine(tiny_shape())
    old.add("0", PROMPT, GREEDY)
    for _ in range(5):
        old.step()
    new.take_over(old)
    while new.has_work:
        new.step()
    counters = new.scheduler.counters
    assert counters.prefill_tokens_computed + counters.prefill_tokens_cached == len(PROMPT)
    assert counters.decode_tokens == GREEDY.max_tokens - 1 and counters.preemptions == 1
    assert counters.replayed_tokens > 0


# A server's engine


def test_an_engine_serves_dense_until_its_codec_is_there(
    folder: Path, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire")
    found: list[list[int]] = []

    async def body(llm: AsyncLLM) -> None:
        assert llm.is_ready and llm.config.cache.codec == "dense"
        report = llm.stats()["calibration"]
        assert (report["codec"], report["state"], report["reason"]) == ("nuq3", "calibrating", "")
        assert report["seconds_left"] >= 0 and report["done"] == 0
        assert len(await tokens_of(llm)) == 24
        old = weakref.ref(llm._parts.engine.scheduler.manager.table.arena)
        gc.freeze()  # as a server does
        process.may_end.set()
        await until(llm, "taken")
        assert gc.get_freeze_count() and old() is None, "the old cache takes memory"
        gc.unfreeze()
        assert llm.config.cache.codec == "nuq3" and llm.stats()["calibration"]["seconds_left"] == 0
        assert llm.stats()["cache"]["bytes_cached"] == 0, "the dense cache is dropped"
        found.append(await tokens_of(llm))

    run(folder, body)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "serving with dense pages while it is made, about" in said and "calibrate.when start waits" in said
    assert "cache.codec nuq3 is taken" in said

    async def again(llm: AsyncLLM) -> None:
        assert llm.config.cache.codec == "nuq3" and "calibration" not in llm.stats()
        found.append(await tokens_of(llm))

    run(folder, again)
    assert found[0] == found[1]


@pytest.mark.parametrize("quiet_seconds", [0.0, 60.0])
def test_running_requests_end_or_are_computed_again(
    quiet_seconds: float, folder: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute passes for requests to end; then they go on with the codec. In both cases they lose no token."""
    monkeypatch.setattr(background_calibration, "QUIET_SECONDS", quiet_seconds)

    async def body(llm: AsyncLLM) -> None:
        running = [asyncio.ensure_future(tokens_of(llm, LONG)) for _ in range(12)]
        while llm.stats()["decode_tokens"] < 10:
            await asyncio.sleep(0.001)
        process.may_end.set()
        assert [len(await each) for each in running] == [120] * 12
        await until(llm, "taken")
        assert bool(llm.stats()["preemptions"]) == (not quiet_seconds)
        assert len(await tokens_of(llm)) == 24

    run(folder, body, **{"scheduler.max_running": 2})


def test_a_calibration_that_fails_leaves_the_dense_cache(
    folder: Path, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    process.failure = "the disk is full"

    async def body(llm: AsyncLLM) -> None:
        process.may_end.set()
        await until(llm, "failed")
        assert llm.stats()["calibration"]["reason"] == "the disk is full"
        assert llm.config.cache.codec == "dense" and len(await tokens_of(llm)) == 24

    run(folder, body)
    assert "cache.codec nuq3 is not taken, and the cache stays dense: the disk is full" in caplog.text


def test_a_codec_that_does_not_work_is_not_taken(
    folder: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise ConfigError("cache.codec nuq3 does not work on this model")

    monkeypatch.setattr(load_module, "check_codec", refuse)
    process.may_end.set()

    async def body(llm: AsyncLLM) -> None:
        await until(llm, "failed")
        assert "does not work" in llm.stats()["calibration"]["reason"] and len(await tokens_of(llm)) == 24

    run(folder, body, **{"cache.check": True})


def test_a_request_that_the_new_cache_cannot_hold_ends_first(folder: Path, made: Path) -> None:
    loaded = load_engine(str(folder), EngineConfig.from_options(OPTIONS), may_calibrate_later=True)
    assert loaded.pending_config is not None
    keep(folder, made)
    calibration = load_module.find_calibration(folder, loaded.pending_config)
    config, fits = load_module.resolve(loaded.pending_config, loaded.shape, None, calibration)
    engine = loaded.engine
    engine.add("0", PROMPT, GREEDY)
    engine.step()
    small = dataclasses.replace(fits, max_context=len(PROMPT) + 23)
    take = load_module.with_codec
    assert take(loaded, config, fits, calibration, preempts=False) is None
    assert take(loaded, config, small, calibration, preempts=True) is None and engine.has_work
    assert engine.longest_request == len(PROMPT) + 24
    taken = take(loaded, config, fits, calibration, preempts=True)
    assert taken is not None and taken.engine.has_work and not engine.has_work and taken.pending_config is None
    assert taken.engine.runner.model is engine.runner.model, "the weights are loaded once"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache.pin": "pins"}, "with cache.pin the codec cannot change while the server runs"),
        ({"runtime.step_log": "steps"}, "with runtime.step_log the codec"),
        ({"attention.backend": "reference"}, "on cpu with attention.backend reference"),
    ],
)
def test_where_the_codec_cannot_change_the_start_waits_and_says_why(
    options: dict[str, str], said: str, folder: Path, made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "pins").write_text('{"prompt": "The mill"}\n')
    monkeypatch.chdir(tmp_path)
    asked: list[Path] = []

    def calibrated(path: Path, *given: Any) -> Any:
        asked.append(path)
        keep(path, made)
        return load_module.find_calibration(path, given[0])

    monkeypatch.setattr(load_module, "_calibrated", calibrated)
    config = EngineConfig.from_options(OPTIONS | options)
    loaded = load_engine(str(folder), config, may_calibrate_later=True)
    assert loaded.pending_config is None and loaded.config.cache.codec == "nuq3" and len(asked) == 1
    assert said in caplog.text


@pytest.mark.slow
def test_the_process_has_the_lowest_priority_and_ends_with_the_engine(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        background_calibration = llm._calibrating
        assert background_calibration is not None
        while background_calibration._process is None:
            await asyncio.sleep(0.01)
        ends.append(background_calibration._process)
        while os.getpriority(os.PRIO_PROCESS, ends[0].pid) != 19:
            await asyncio.sleep(0.01)

    ends: list[subprocess.Popen[str]] = []
    run(folder, body)
    assert ends[0].poll() is not None


# The process


def start(options: dict[str, Any], folder: Path, cache: Path) -> subprocess.Popen[str]:
    """The process, with the priority of the tests."""
    process = subprocess.Popen(
        [sys.executable, "-c", background_calibration._BEGIN.replace("os.nice(19)", "pass"), *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"XDG_CACHE_HOME": str(cache), "PATH": ""},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"path": str(folder), "options": options}) + "\n")
    process.stdin.flush()
    return process


def test_the_process_leaves_a_calibration_and_tells_its_progress(tmp_path: Path) -> None:
    # As short as the check allows.
    folder = save_tiny(tmp_path / "short", head_dim=16, max_position_embeddings=144, num_hidden_layers=1)
    config = EngineConfig.from_options(OPTIONS | {"cache.check": True})
    with start(config.to_options(), folder, tmp_path) as process:
        assert process.stdout is not None
        lines = [json.loads(line) for line in process.stdout]
        assert process.wait(60) == 0
    phases = list(dict.fromkeys(line["phase"] for line in lines))
    assert phases == ["writing a text", "gathering", "fitting"]
    assert list((tmp_path / "quire" / "calibrations").glob("*.safetensors"))
    assert list((tmp_path / "quire" / "checks").iterdir())


def test_the_process_says_what_is_wrong_and_ends_with_its_parent(folder: Path, tmp_path: Path) -> None:
    options = EngineConfig.from_options(OPTIONS).to_options()
    with start(options, tmp_path / "none", tmp_path) as process:
        assert process.stdout is not None and process.stdin is not None
        (line,) = process.stdout
        assert "none" in json.loads(line)["error"]
    with start(options, folder, tmp_path) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 1


def test_settings_reach_the_process_as_they_are() -> None:
    config = EngineConfig.from_options({**OPTIONS, "retain.budget": 0.5, "scheduler.max_running": 3})
    assert EngineConfig.from_options(json.loads(json.dumps(config.to_options()))) == config


# Estimates


def test_an_estimate_grows_with_the_model_and_falls_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.calibrate.estimate._product_rate", lambda: 1e9)
    small, large = tiny_shape(), tiny_shape(num_layers=8, hidden_size=96)
    settings = CalibrationSettings.of(CacheConfig(codec="nuq3"))
    seconds = estimated_seconds(small, settings, 1)
    assert 0 < seconds < estimated_seconds(large, settings, 1)
    assert estimated_seconds(small, settings, 2) == seconds / 2
    assert estimated_seconds(small, settings, 1, writes=False) < seconds
    assert [duration_text(each) for each in (1, 43, 240, 9000)] == [
        "about 5 s",
        "about 45 s",
        "about 4 minutes",
        "about 2.5 hours",
    ]
