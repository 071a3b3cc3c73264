"""The progress output of a calibration without a terminal, and its frequency."""

from __future__ import annotations

import importlib
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from quire.calibrate import CalibrationSettings, progress

from ..tiny_models import tiny_shape

run_module = importlib.import_module("quire.calibrate.run")


def test_without_a_terminal_a_line_comes_every_ten_seconds_inside_each_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with caplog.at_level(logging.INFO, "quire"), progress.progress_display(False) as report:
        for stage, seconds in (("gathering", 25), ("fitting", 12)):
            for step in range(seconds * 4):  # four reports a second
                now += 0.25
                report(stage, step, seconds * 4)
    assert [record.message for record in caplog.records] == [
        "calibration: gathering",
        "calibration: gathering, 40 % done",
        "calibration: gathering, 80 % done",
        "calibration: fitting",
        "calibration: fitting, 83 % done",
    ]


def test_who_waits_for_another_calibration_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with caplog.at_level(logging.INFO, "quire"), progress.progress_display(False) as report:
        for _ in range(100):
            now += 1
            report(progress.WAITING, 0, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_layer_that_is_fitted_for_long_does_not_stop_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of a large model takes longer than ten seconds."""
    reported = threading.Event()
    reports: list[int] = []

    def told(what: str, done: int, total: int) -> None:
        assert (what, total) == ("fitting", 2)
        reports.append(done)
        if len(reports) == 4:
            reported.set()

    def slow(samples: SimpleNamespace, *given: Any, **named: Any) -> str:
        assert reported.wait(10), "four reports while no layer is done"
        return f"layer {samples.layer}"

    made: list[list[str]] = []

    def make_tables(fits: list[str], *given: Any, **named: Any) -> tuple[None, None]:
        made.append(fits)
        return None, None

    monkeypatch.setattr(run_module, "fit_layer", slow)
    monkeypatch.setattr(run_module, "make_tables", make_tables)
    monkeypatch.setattr(run_module, "REPORT_SECONDS", 0.01)
    store = SimpleNamespace(layer=lambda layer, windows: SimpleNamespace(layer=layer, keys=range(128)))
    run_module._fit(store, CalibrationSettings(bits=(2,)), tiny_shape(), told)
    assert reports[:4] == [0, 0, 0, 0] and reports[-1] == 2
    assert made == [["layer 0", "layer 1"]], "in the order of the layers, whichever is done first"
