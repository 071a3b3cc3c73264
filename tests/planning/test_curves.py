"""Curves of quality: how losses follow from them, and how they are kept."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.planning.curves import (
    FITTED_TEXT,
    NOTHING,
    Curves,
    Loss,
    LossCurve,
    Losses,
    Reading,
    compared,
    parts_of,
    read_curve,
    summed,
)
from quire.planning.space import SearchLimits, Settings, Space
from quire.timing.latency import Origin
from tests.tiny_models import save_tiny

SPACE = Space.of(SearchLimits(cores=2, is_packed=True))


def curve(settings: Any = "dense", losses: tuple[float, ...] = (2.0, 2.2), **changes: Any) -> LossCurve:
    fields = {
        "model": "m", "settings": {"codec": settings}, "text": "t", "text_name": "t.txt", "context": 128,
        "continuation": None, "losses": losses,
    }  # fmt: skip
    return LossCurve(**{**fields, **changes})


def settings_of(*names: str, space: Space = SPACE) -> Settings:
    """The plain choices, but for some by their names."""
    choices = {choice.name: choice for tried in space.tried.values() for choice in tried}
    wanted = {choices[name].axis: choices[name] for name in names}
    return Settings(tuple(wanted.get(axis.name, space.plain[axis.name]) for axis in space.axes))


def key_of(settings: Settings) -> dict[str, Any]:
    return {"codec": SPACE.name(settings)}


# ---- from curves to losses -------------------------------------------------------------------------------------------


def test_a_loss_is_the_ratio_of_perplexities_and_its_error_comes_from_the_differences() -> None:
    found = compared(curve("nuq3", (2.01, 2.23, 2.42)), curve("dense", (2.00, 2.20, 2.40)))
    differences = [0.01, 0.03, 0.02]
    assert found.log_ratio == pytest.approx(sum(differences) / 3)
    assert found.value == pytest.approx(math.exp(0.02) - 1)
    assert found.error == pytest.approx(0.01 / math.sqrt(3))  # far below the spread of the windows themselves
    quantile = 2.92  # of Student's t distribution with two degrees of freedom, 0.95
    assert found.most == pytest.approx(math.exp(0.02 + quantile * 0.01 / math.sqrt(3)) - 1, rel=1e-4)
    assert found.least == pytest.approx(math.exp(0.02 - quantile * 0.01 / math.sqrt(3)) - 1, rel=1e-3)
    assert found.origin is Origin.MEASURED and found.how == "3 windows of 128 tokens of t.txt"


def test_only_windows_that_both_have_read_count() -> None:
    found = compared(curve("nuq3", (2.1, 2.3, 9.0)), curve("dense", (2.0, 2.2)))
    assert found.log_ratio == pytest.approx(0.1) and found.how.startswith("2 windows")


def test_a_single_window_is_within_no_budget() -> None:
    found = compared(curve("nuq3", (2.0,)), curve("dense", (2.0,)))
    assert found.value == 0 and found.error is None and not found.is_within(0.5)


def test_a_budget_holds_with_its_margin() -> None:
    assert Loss(0.005, 0.001, Origin.MEASURED).is_within(0.01)
    assert not Loss(0.005, 0.004, Origin.MEASURED).is_within(0.01)
    assert NOTHING.is_within(0.0)


def test_parts_multiply_their_ratios_and_say_that_they_are_modelled() -> None:
    parts = {
        "codec": Loss(math.log(1.01), 0.003, Origin.MEASURED),
        "retention": Loss(math.log(1.02), 0.004, Origin.MEASURED),
    }
    found = summed(parts)
    assert found.value == pytest.approx(1.01 * 1.02 - 1) and found.error == pytest.approx(0.005)
    assert found.origin is Origin.MODELLED and found.how == "sum of codec and retention"
    assert summed({**parts, "weights": Loss(0.0, None, Origin.MEASURED)}).error is None


# ---- kept curves -----------------------------------------------------------------------------------------------------


def test_a_kept_curve_is_found_again_by_what_decides_it_and_more_windows_replace_fewer(tmp_path: Path) -> None:
    kept, longer = Curves(tmp_path, "m"), curve("nuq3", (2.0, 2.1))
    kept.keep(curve("nuq3", (2.0,)))
    kept.keep(longer)
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.name == f"{longer.name}.json"
    again = Curves(tmp_path, "m")
    assert again.find({"codec": "nuq3"}, Reading("t", 128)) == longer
    for other in (Reading("t", 256), Reading("u", 128), Reading("t", 128, 32)):
        assert again.find({"codec": "nuq3"}, other) is None
    assert again.find({"codec": "nuq2"}, Reading("t", 128)) is None
    assert Curves(tmp_path, "another").find({"codec": "nuq3"}, Reading("t", 128)) is None


def test_a_damaged_file_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Curves(tmp_path, "m").keep(curve())
    (file,) = tmp_path.rglob("*.json")
    file.write_text(file.read_text()[:-20])
    with caplog.at_level(logging.WARNING, "quire"):
        assert Curves(tmp_path, "m").scorings({"codec": "dense"}) == []
    assert str(file) in caplog.text


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 2}, "not a curve of format 1"),
        ({"losses": [1.0, -2.0]}, r"losses\[1\] is -2.0"),
    ],
)
def test_a_file_that_is_no_curve_names_the_field(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    Curves(tmp_path, "m").keep(curve())
    (file,) = tmp_path.rglob("*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=complaint):
        read_curve(file)


def test_a_folder_that_cannot_be_written_costs_only_later_plans(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    kept = Curves(tmp_path / "file", "m")
    with caplog.at_level(logging.WARNING, "quire"):
        kept.keep(curve())
    assert "the next plan measures again" in caplog.text
    assert kept.find({"codec": "dense"}, Reading("t", 128)) == curve()


# ---- what is known of settings ---------------------------------------------------------------------------------------


@pytest.fixture
def losses(tmp_path: Path) -> Losses:
    return Losses(SPACE, Curves(tmp_path, "m"), key_of, Reading("t", 128, 32))


def test_settings_without_any_loss_are_the_reference(losses: Losses) -> None:
    for names in ((), ("dequantized weights",), ("prefill + decode",)):
        assert losses.of(settings_of(*names)) is NOTHING


def test_a_text_that_the_codec_was_calibrated_on_comes_last_and_is_said(losses: Losses) -> None:
    nuq3 = settings_of("nuq3")
    key, plain = {**key_of(nuq3), FITTED_TEXT: "t"}, key_of(losses.reference(nuq3))
    fitted = replace(losses, key_of=lambda each: key if each == nuq3 else key_of(each))
    four, two = (2.0, 2.2, 2.4, 2.6), (2.1, 2.3)
    for text, windows in (("t", four), ("other", two)):
        losses.curves.keep(replace(curve(losses=tuple(each - 0.05 for each in windows), text=text), settings=plain))
    losses.curves.keep(replace(curve(losses=four), settings=key))
    own = fitted.measured(nuq3)
    assert own is not None and own.is_fitted and own.num_windows == 4
    assert summed({"codec": own, "weights": Loss(0.0, 0.0, Origin.MEASURED)}).is_fitted
    losses.curves.keep(replace(curve(losses=two, text="other"), settings=key))
    other = fitted.measured(nuq3)
    assert other is not None and not other.is_fitted and other.num_windows == 2


def test_what_is_measured_together_is_preferred_to_the_sum_of_its_parts(losses: Losses) -> None:
    both, plain = settings_of("nuq3", "budget 0.5"), curve("default", (2.0, 2.0), continuation=32)
    assert losses.of(both) is None
    losses.curves.keep(curve("default", (2.0, 2.0)))
    losses.curves.keep(plain)
    losses.curves.keep(curve("nuq3", (2.01, 2.01)))
    assert losses.of(both) is None, "one of the parts is not known"
    losses.curves.keep(curve("budget 0.5", (2.03, 2.03), continuation=32))
    found = losses.of(both)
    assert found is not None and found.origin is Origin.MODELLED and found.log_ratio == pytest.approx(0.04)
    losses.curves.keep(curve("nuq3, budget 0.5", (2.06, 2.06), continuation=32))
    found = losses.of(both)
    assert found is not None and found.origin is Origin.MEASURED and found.log_ratio == pytest.approx(0.06)


def test_retention_is_compared_in_decoded_tokens_and_a_codec_in_whole_windows(losses: Losses) -> None:
    assert losses.scoring_of(settings_of("nuq3")) == Reading("t", 128)
    assert losses.scoring_of(settings_of("nuq3", "budget 0.5")) == Reading("t", 128, 32)
    losses.curves.keep(curve("default", (2.0, 2.0)))
    losses.curves.keep(curve("budget 0.5", (2.1, 2.1), continuation=32))
    assert losses.measured(settings_of("budget 0.5")) is None  # the reference was not read in this way


def test_the_plan_s_own_text_is_preferred_to_others(losses: Losses) -> None:
    for text, ratio in (("other", 0.5), ("t", 0.01)):
        losses.curves.keep(curve("default", (2.0,) * 4, text=text))
        losses.curves.keep(curve("nuq3", (2.0 + ratio,) * (4 if text == "other" else 2), text=text))
        found = losses.measured(settings_of("nuq3"))
        assert found is not None and found.log_ratio == pytest.approx(ratio)


def test_parts_that_are_cheap_to_measure_come_first_and_each_once() -> None:
    wanted = [settings_of("budget 0.5", "nuq3"), settings_of("nuq3", "0 slots"), settings_of("g4 weights", "nuq3")]
    found = [SPACE.name(part) for part in parts_of(SPACE, wanted)]
    assert found == ["nuq3", "g4 weights", "nuq3, 0 slots", "budget 0.5"]


# ---- measuring -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), hidden_size=64))
