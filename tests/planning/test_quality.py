"""Curves of quality are measured once and go on where they were left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.planning import quality as measuring
from quire.planning.curves import LossCurve
from quire.planning.quality import Quality, Text
from quire.planning.space import SearchLimits, Settings, Space
from quire.timing.latency import Origin
from tests.planning.test_curves import model as model
from tests.planning.test_curves import settings_of

TEXT = Text("mills.txt", "It was the best of mills, it was the worst of mills. " * 40)


@pytest.fixture
def quality(model: str, tmp_path: Path) -> Callable[..., Quality]:
    def make(text: Text | None = TEXT, **changes: Any) -> Quality:
        settings = {"context": 160, "num_windows": 3, "folder": tmp_path, **changes}
        base = EngineConfig.from_options({"runtime.threads": 1, "model.dtype": "float32"})
        return Quality(model, base, Space.of(SearchLimits(cores=2)), text, **settings)

    return make


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The configuration of every engine that is loaded."""
    found, real = [], measuring.load_engines

    def load(name: str, config: Any, context: int) -> Any:
        found.append(config)
        return real(name, config, context)

    monkeypatch.setattr(measuring, "load_engines", load)
    yield found


def test_a_codec_is_measured_once_and_known_from_then_on(quality: Callable[..., Quality], loads: list[Any]) -> None:
    first = quality()
    g4 = settings_of("g4", space=first.space)
    assert first.measure_all([g4], 0.01, math.inf) == {}
    found = first.losses.of(g4)
    assert found is not None and found.origin is Origin.MEASURED and found.how.startswith("3 windows of 160 tokens")
    assert abs(found.log_ratio) > 0 and len(loads) == 2  # the reference, and the codec
    again = quality()
    assert again.measure_all([g4], 0.01, math.inf) == {} and len(loads) == 2
    assert again.losses.of(g4) == found


def test_a_measurement_that_ran_out_of_time_goes_on(
    quality: Callable[..., Quality], loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(float(number) for number in range(100))
    monkeypatch.setattr(measuring.time, "monotonic", lambda: next(now))
    first = quality()
    g4 = settings_of("g4", space=first.space)
    told = first.measure(g4, 3, 4.0)  # a window takes 1, and a third one would end at 5
    assert "the time was over" in told and first.losses.num_windows(first.losses.reference(g4)) == 2
    monkeypatch.undo()
    again = quality()
    assert again.measure(g4, 3, math.inf) == "" and again.losses.num_windows(g4) == 3


@pytest.mark.parametrize("context", [1, 3, 7])
def test_a_window_without_room_for_an_answer_is_refused(quality: Callable[..., Quality], context: int) -> None:
    with pytest.raises(ConfigError, match="give at least 8"):
        quality(context=context)


def test_retention_decodes_what_it_scores(quality: Callable[..., Quality]) -> None:
    found = quality(num_windows=1)
    budget = settings_of("budget 0.75", space=found.space)
    assert found.measure(budget, 1, math.inf) == ""
    loss = found.losses.measured(budget)
    assert loss is not None and loss.how == "1 window of 160 tokens, last 40 of mills.txt"


def test_without_a_text_only_kept_curves_count(quality: Callable[..., Quality]) -> None:
    measured = quality()
    g4 = settings_of("g4", space=measured.space)
    told = quality(None).measure_all([g4], 0.01, math.inf)
    assert "give --text FILE" in told[g4]
    measured.measure_all([g4], 0.01, math.inf)
    assert quality(None).losses.of(g4) == measured.losses.of(g4)


def test_a_codec_without_a_calibration_says_how_to_make_one(quality: Callable[..., Quality]) -> None:
    found = quality()
    nuq = settings_of("nuq3", "0 slots", space=found.space)
    (told,) = found.measure_all([nuq], 0.01, time.monotonic() + 100).values()
    assert "quire calibrate" in told and "--outlier-slots 0" in told


def test_nothing_is_measured_behind_a_choice_that_loses_too_much(
    quality: Callable[..., Quality], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = quality()
    asked = []

    def measure(settings: Settings, count: int, deadline: float, progress: Any) -> str:
        asked.append(found.space.name(settings))
        for each, loss in ((settings, 3.0), (found.losses.reference(settings), 2.0)):
            way = found.losses.scoring_of(settings)
            assert way is not None
            found.losses.curves.keep(
                LossCurve(
                    found.model_id, dict(found.key_of(each)), way.text, "", way.context, way.continuation,
                    (loss, loss),
                )
            )  # fmt: skip
        return ""

    monkeypatch.setattr(found, "measure", measure)
    kept = [settings_of(f"budget {share}", space=found.space) for share in (0.75, 0.5, 0.25)]
    told = found.measure_all(kept, 0.01, math.inf)
    assert asked == ["budget 0.75"] and {*told} == {*kept[1:]}
    assert "loses too much already" in told[kept[1]]
