"""A log of an engine's steps while it serves: what each computed, and how long it took with all that happens between.

The first line of a file describes the engine. Every other line is a step: the fields of `StepWork`, seconds, and the
bytes a second of fetched chunks or null. `quire bench latency MODEL --steps FILE` fits a model to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.machine import hardware_of
from quire.engine.step_work import CountingRunner
from quire.errors import ConfigError
from quire.safe_io import parse_json, read_bytes, read_text
from quire.timing.latency import StepWork

MOST = 1e18
"""Numbers of a log are below it."""


class StepLog:
    """Writes the log of one engine, whose runner it wraps.

    A step's seconds run from the end of the one before, if the engine then had more to do: they include scheduling,
    answers, and what other threads of the process take. Otherwise they run from the beginning of the step.
    """

    def __init__(
        self,
        file: Path,
        engine: Engine,
        model: str,
        config: EngineConfig,
        *,
        transport: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Appends to a file. Raises ConfigError if it cannot be written.

        model      fingerprint of the checkpoint
        transport  how caches come from other instances; empty: there are none
        """
        try:
            is_cut = file.exists() and read_bytes(file)[-1:] not in (b"", b"\n")
            self._file = file.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"runtime.step_log {file} cannot be written: {error.strerror or error}") from None
        # The last line of an engine that was killed may be half a line.
        about = {"model": model, "options": config.to_options(), "transport": transport}
        head = {**about, **hardware_of(config.runtime)}
        self._file.write("\n" * is_cut + json.dumps(head) + "\n")
        self._costs = engine.scheduler.manager.fetching.costs
        self._clock, self._counted = clock, CountingRunner(engine)
        self._begun = self._ended = 0.0
        self._goes_on = False

    def begin(self) -> None:
        """The engine is about to take a step."""
        self._counted.forget()
        self._begun = self._clock()

    def end(self, *, goes_on: bool) -> None:
        """A step and its answers are done. goes_on: whether the engine has more to do."""
        now, work = self._clock(), self._counted.work
        if work is not None:
            seconds = now - (self._ended if self._goes_on else self._begun)
            self._file.write(json.dumps([*work, seconds, self._costs.speed]) + "\n")
        self._ended, self._goes_on = now, goes_on

    def close(self) -> None:
        """Writes what is left."""
        self._file.close()


@dataclass(frozen=True)
class Logged:
    """What logs say. All are of engines of one model with equal settings.

    model      fingerprint of the checkpoint
    records    steps and their seconds
    speeds     last bytes a second of fetched chunks in each log that knows them
    transport  how caches came from other instances; empty: there were none, or not all came in the same way
    hardware   as of `hardware_of`: of this, what every log says, and says alike
    """

    model: str
    config: EngineConfig
    records: list[tuple[StepWork, float]]
    speeds: list[float]
    transport: str = ""
    hardware: dict[str, str | None] = field(default_factory=dict)


def _number(value: Any) -> Any:
    """A number of a step. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < MOST:
        raise ValueError(f"{value!r:.60} is no number of a step")
    return value


def _step(work: list[Any], seconds: Any) -> tuple[StepWork, float]:
    """A step and its seconds. Raises ValueError if they are none."""
    if len(work) != len(StepWork._fields):
        raise ValueError(f"a step of {len(work)} numbers")
    return StepWork(*map(_number, work)), float(_number(seconds))


def read_steps(files: Iterable[Path]) -> Logged:
    """Reads logs. Raises ConfigError with file and line for one that cannot be read, or that is of another model or of
    other settings.
    """
    heads: list[dict[str, Any]] = []
    records: list[tuple[StepWork, float]] = []
    speeds: list[float] = []
    for file in files:
        try:
            lines = read_text(file).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the log of steps {file}: {error}") from None
        speed = None
        for number, line in enumerate(lines, 1):
            try:
                found = parse_json(line)
                if isinstance(found, dict) and {"model", "options"} <= found.keys():
                    heads.append(found)
                    continue
                *work, seconds, told = found
                records.append(_step(work, seconds))
                speed = speed if told is None else float(_number(told))
            except (ValueError, TypeError):
                if number == len(lines) or lines[number].startswith("{"):
                    continue  # the engine is writing it, or was killed while it did
                raise ConfigError(f"{file} line {number} is no step of a log") from None
        if speed is not None:
            speeds.append(speed)
    if not heads or not records:
        raise ConfigError("the log has no steps; set runtime.step_log for a server that answers requests")
    for head in heads[1:]:
        if head["model"] != heads[0]["model"]:
            raise ConfigError("the logs are of engines of different models")
        for key, value in head["options"].items():
            other = heads[0]["options"].get(key)
            if value != other and key != "runtime.step_log":
                raise ConfigError(f"the logs are of engines with other settings: {key} is {other!r} and {value!r}")
    options = {key: value for key, value in heads[0]["options"].items() if key != "runtime.step_log"}
    # What logs disagree about, or an old one does not say, is not known.
    common = {name: value for name, value in heads[0].items() if all(head.get(name, "") == value for head in heads)}
    hardware: dict[str, str | None] = {name: common[name] for name in ("processor", "level") if name in common}
    transport = common.get("transport", "")
    return Logged(heads[0]["model"], EngineConfig.from_options(options), records, speeds, transport, hardware)
