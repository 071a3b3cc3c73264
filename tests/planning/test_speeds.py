"""Steps are measured once, kept, and measured longer where nothing came of it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.planning.space import SearchLimits, Settings, Space
from quire.planning.speeds import LEAST_SECONDS, Speeds
from quire.timing.composed import grid
from quire.timing.latency import Origin, StepWork
from tests.planning.test_auto import folder as folder
from tests.planning.test_auto import known as known
from tests.planning.test_auto import planner_from
from tests.planning.test_auto import words as words
from tests.planning.test_halving import chosen, latency


def test_a_measurement_without_steps_that_decode_tells_nothing_and_is_not_kept(
    words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If time was over before the first one, a fit would give them the seconds of prompts, or none."""
    speeds, part = planner_from(words).speeds, chosen("nuq4", space=Space.of(SearchLimits(cores=2)))
    prompts = [(StepWork(rows, rows * rows / 2, 0, 0.0, 0.0, 1), 0.01 * rows) for rows in (64, 128, 256)]
    decoding = [(StepWork(0, 0.0, rows, 100.0 * rows, 100.0 * rows, 0), 0.01) for rows in (1, 2, 4)]
    before = sorted(path.name for path in speeds._folder.iterdir())
    for records, said in ((prompts, "no steps that decode were measured within 7 s"), (prompts + decoding, "")):
        monkeypatch.setattr(Speeds, "_steps", lambda self, timed, *_, found=records: (found, self.wanted(timed)))
        reason = speeds.measure(part, 7.0)
        assert reason.startswith(said) and bool(reason) == bool(said) == (speeds.exact(part) is None)
        assert (sorted(path.name for path in speeds._folder.iterdir()) == before) == bool(said)
    # Files of this kind that earlier versions have kept are not read.
    (path,) = (each for each in speeds._folder.iterdir() if each.name not in before)
    replace(speeds.exact(part), counts={"prompt": 3}).write(path)
    assert planner_from(words).speeds.exact(part) is None


def test_a_codec_that_was_not_measured_is_as_fast_as_one_like_it(words: list[str], known: Path) -> None:
    space = Space.of(SearchLimits(cores=2))
    speeds = planner_from(words).speeds
    speeds.models.append(latency(0.007, **speeds.wanted(chosen("nuq4", space=space))))
    assert speeds.of(chosen("nuq4", space=space)).origin is Origin.FITTED
    assert speeds.exact(chosen("nuq4", "2 slots", space=space)) is None
    quick = replace(latency(0.02, **speeds.wanted(chosen("nuq4", space=space))), counts={"mixed": 120})
    speeds.models.insert(0, quick)
    assert speeds.exact(chosen("nuq4", space=space)) is speeds.models[-1], "it has more steps"
    found = speeds.of(chosen("nuq3", "0 slots", space=space))
    assert found.origin is Origin.MODELLED and found.how == "from the steps of nuq3, 0 slots as nuq4"
    assert not found.is_poor
    wanted = [chosen(name, space=space) for name in ("nuq4", "nuq3", "nuq2")]
    assert speeds.needed(wanted) == wanted[1:]
    # A sum of parts is as little known as the part that was measured least.
    speeds.models = [
        replace(each, counts={"mixed": 9}) if each is speeds.models[-1] else each for each in speeds.models
    ]
    speeds.models.remove(quick)
    speeds._composed.clear()
    poor = speeds.of(chosen("nuq3", "0 slots", space=space))
    assert poor.is_poor and poor.origin is Origin.MODELLED


def test_steps_are_measured_once_and_kept(words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Settings, float]] = []

    def steps(self: Speeds, timed: Settings, seconds: float, progress: Any) -> Any:
        asked.append((timed, seconds))
        model = latency(0.02, 1e-7, 5e-5)
        return [(work, model.seconds(work)) for work in grid(model)], {**self.wanted(timed)}

    monkeypatch.setattr(Speeds, "_steps", steps)
    space = Space.of(SearchLimits(cores=2))
    weights, nuq4, nuq3 = (chosen(name, space=space) for name in ("g4 weights", "nuq4", "nuq3"))
    speeds = planner_from(words).speeds
    assert speeds.measure_all([weights], time.monotonic() + 100) == {} and len(asked) == 1
    assert planner_from(words).speeds.of(weights).origin is Origin.FITTED
    assert speeds.measure_all([weights], time.monotonic() + 100) == {} and len(asked) == 1
    told = speeds.measure_all([nuq4, nuq3], time.monotonic() + LEAST_SECONDS)
    assert told == {nuq3: "the time was over before its steps were measured"}
    assert asked[1] == (nuq4, LEAST_SECONDS)


def test_what_all_settings_need_is_measured_again_for_longer_if_nothing_came_of_it(
    words: list[str], known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a large model may take longer than the seconds that each of many parts gets."""
    asked: list[float] = []

    def steps(self: Speeds, timed: Settings, seconds: float, progress: Any) -> Any:
        asked.append(seconds)
        model = latency(0.02, 1e-7, 5e-5)
        return [(work, model.seconds(work)) for work in grid(model)] if seconds > 30 else [], self.wanted(timed)

    monkeypatch.setattr(Speeds, "_steps", steps)
    for path in (known / "quire" / "latency").iterdir():
        path.unlink()
    speeds = planner_from(words).speeds
    nuq4 = chosen("nuq4", space=Space.of(SearchLimits(cores=2)))
    now = time.monotonic()
    assert speeds.measure_all([nuq4], now + 20, last=now + 30)[speeds.space.first].startswith("no steps were measured")
    told = speeds.measure_all([nuq4], now + 20, last=now + 300)
    assert told == {nuq4: "the time was over before its steps were measured"}
    assert asked[-1] == pytest.approx(4 * asked[-2]) and asked[-1] > 30, "and no other part gets less"
