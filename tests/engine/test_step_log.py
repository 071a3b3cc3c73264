"""The log of an engine's steps, and what is read from it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.machine import hardware_of, processor_name
from quire.engine.step_log import StepLog, read_steps
from quire.errors import ConfigError
from quire.kernels import runtime
from quire.timing.latency import StepWork
from tests.engines import GREEDY, make_engine
from tests.tiny_models import tiny_shape

CONFIG = EngineConfig.from_options({"cache.codec": "dense"})


class Clock:
    """A second for each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def logged(
    file: Path, engine: Engine, model: str = "abc", config: EngineConfig = CONFIG
) -> contextlib.closing[StepLog]:
    return contextlib.closing(StepLog(file, engine, model, config, clock=Clock()))


def answer(file: Path, *prompts: list[int], **options: Any) -> None:
    """An engine of its own answers, and appends its steps to a file."""
    engine = make_engine()
    with logged(file, engine, **options) as log:
        drive(engine, log, *prompts)


def drive(engine: Engine, log: StepLog, *prompts: list[int]) -> None:
    """Answers as an engine's thread does, with 4 tokens each."""
    for number, each in enumerate(prompts):
        engine.add(str(number), each, dataclasses.replace(GREEDY, max_tokens=4))
    while engine.has_work:
        log.begin()
        engine.step()
        log.end(goes_on=engine.has_work)


def test_steps_are_what_the_engine_computed_with_what_lies_between_them(tmp_path: Path) -> None:
    engine = make_engine()
    with logged(tmp_path / "steps.log", engine) as log:
        drive(engine, log, [5] * 70)
        found = read_steps([tmp_path / "steps.log"])  # the file is written as steps end
    works = [work for work, _ in found.records]
    assert works[0] == StepWork(prompt_rows=70, prompt_pairs=70 * 35.0, num_prompts=1)
    assert [(each.decode_rows, each.context) for each in works[1:]] == [(1, 71.0), (1, 72.0), (1, 73.0)]
    # The clock moves by a second whenever it is read: at the begin and the end of each step.
    assert [seconds for _, seconds in found.records] == [1.0, 2.0, 2.0, 2.0]
    assert (found.model, found.config, found.speeds) == ("abc", CONFIG, [])


def test_time_without_work_is_no_part_of_a_step(tmp_path: Path) -> None:
    engine = make_engine()
    with logged(tmp_path / "steps.log", engine) as log:
        drive(engine, log, [5] * 10)
        for _ in range(100):
            log._clock()
        drive(engine, log, [6] * 10)
    assert max(seconds for _, seconds in read_steps([tmp_path / "steps.log"]).records) == 2.0


def test_a_window_limits_the_context_that_is_counted(tmp_path: Path) -> None:
    shape = tiny_shape(max_context=512, sliding_window=64)
    engine = make_engine(shape)
    with logged(tmp_path / "steps.log", engine) as log:
        drive(engine, log, [5] * 100)
    assert [each.context for each, _ in read_steps([tmp_path / "steps.log"]).records[1:]] == [64.0] * 3


def test_a_killed_engine_leaves_half_a_line_and_the_next_one_goes_on_after_it(tmp_path: Path) -> None:
    file = tmp_path / "steps.log"
    answer(file, [5] * 10)
    before = len(read_steps([file]).records)
    with file.open("a") as cut:
        cut.write("[1, 2.0, 0, 0.")
    assert len(read_steps([file]).records) == before, "it may be writing"
    answer(file, [5] * 10)
    assert len(read_steps([file]).records) == 2 * before
    file.write_text(file.read_text().replace("[1, 2.0, 0, 0.\n{", "[1, 2.0, 0, 0.\n[1]\n{"))
    with pytest.raises(ConfigError, match=f"steps.log line {before + 2} is no step"):
        read_steps([file])


@pytest.mark.parametrize(
    "line",
    ["[1, 2, 3, 4, 5, 6, Infinity, null]", '["x", 0, 1, 2, 3, 0, 0.1, null]', "[1, 2, 3, 0.1, null]", "[[1]]", "7",
     "[1, 2, 3, 4, 5, 6, 0.1, -1]", "[NaN, 2, 3, 4, 5, 6, 0.1, null]", "[1, 2, 3, 4, 5, 6, 1" + "0" * 400 + ", null]"],
)  # fmt: skip
def test_what_is_no_step_is_named_with_its_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "steps.log"
    answer(file, [5] * 10)
    file.write_text(file.read_text() + line + "\n" + file.read_text().splitlines()[-1] + "\n")
    with pytest.raises(ConfigError, match=r"steps.log line \d+ is no step of a log"):
        read_steps([file])


def test_a_speed_is_that_of_the_transport(tmp_path: Path) -> None:
    for name, transport in (("a", "shm"), ("b", "tcp")):
        engine = make_engine()
        log = StepLog(tmp_path / name, engine, "abc", CONFIG, transport=transport)
        drive(engine, log, [5] * 10)
        log.close()
    assert read_steps([tmp_path / "a"]).transport == "shm"
    assert read_steps([tmp_path / "a", tmp_path / "b"]).transport == "", "nobody knows which speed is whose"


def test_a_log_names_the_hardware_of_its_engine(tmp_path: Path) -> None:
    """A model is fitted to it where the engine may never have run."""
    answer(tmp_path / "a", [5] * 10)
    own = hardware_of(CONFIG.runtime)
    assert read_steps([tmp_path / "a"]).hardware == own == {"processor": processor_name(), "level": runtime.level()}
    head, *steps = (tmp_path / "a").read_text().splitlines()
    for name, changes in (("b", {"level": "v9"}), ("c", {"processor": "Z80", "level": None})):
        lines = [json.dumps({**json.loads(head), **changes}), *steps]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    assert read_steps([tmp_path / "c"]).hardware == {"processor": "Z80", "level": None}
    assert read_steps([tmp_path / "a", tmp_path / "b"]).hardware == {"processor": own["processor"]}
    assert read_steps([tmp_path / "a", tmp_path / "c"]).hardware == {}
    old = {name: value for name, value in json.loads(head).items() if name not in own}
    (tmp_path / "old").write_text("\n".join([json.dumps(old), *steps]) + "\n")
    assert read_steps([tmp_path / "old"]).hardware == read_steps([tmp_path / "a", tmp_path / "old"]).hardware == {}


def test_logs_of_different_engines_are_not_mixed(tmp_path: Path) -> None:
    answer(tmp_path / "a", [5] * 10)
    answer(tmp_path / "b", [5] * 10, model="def")
    with pytest.raises(ConfigError, match="different models"):
        read_steps([tmp_path / "a", tmp_path / "b"])
    answer(tmp_path / "c", [5] * 10, config=EngineConfig.from_options({"scheduler.max_running": 7}))
    with pytest.raises(ConfigError, match="scheduler.max_running"):
        read_steps([tmp_path / "a", tmp_path / "c"])
    (tmp_path / "d").write_text(json.dumps({"model": "abc", "options": {}}) + "\n")
    with pytest.raises(ConfigError, match="has no steps"):
        read_steps([tmp_path / "d"])
    with pytest.raises(ConfigError, match="cannot read"):
        read_steps([tmp_path / "nowhere"])


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.step_log .*cannot be written"):
        answer(tmp_path / "no" / "steps.log")
