"""Latency models that are kept: which one is found, and which one replaces another."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.measure.latency_bench import settings_of
from quire.timing.kept_latencies import keep, kept_models
from quire.timing.latency import LatencyModel, StepWork, mismatch
from quire.timing.latency_fit import fit


def test_models_of_other_outlier_slots_are_others(tmp_path: Path) -> None:
    def made(slots: int) -> LatencyModel:
        options = {"runtime.device": "cpu", "cache.codec": "nuq3", "cache.outlier_slots": slots}
        return fit([(StepWork(1), 0.01)], settings_of("ab", EngineConfig.from_options(options)))

    assert len({keep(made(slots), tmp_path) for slots in (0, 1, 2)}) == 3 == len(kept_models(tmp_path))
    without = {name: value for name, value in made(1).about.items() if name != "outlier_slots"}
    assert mismatch(without, made(1).about) is not None, "a model that does not say its slots is not taken for one"


def test_a_quick_measurement_does_not_replace_a_careful_one(tmp_path: Path) -> None:
    model = fit([(StepWork(1), 0.01)], {"codec": "dense"})
    careful, quick = (dataclasses.replace(model, counts={"decode": count}) for count in (2000, 5))
    first, again = keep(quick, tmp_path), keep(careful, tmp_path)
    assert first == again is not None and keep(quick, tmp_path) is None
    assert [each for _, each in kept_models(tmp_path)] == [careful]
    newer = dataclasses.replace(careful, counts={"decode": 1000})
    assert keep(newer, tmp_path) == first and [each for _, each in kept_models(tmp_path)] == [newer]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        keep(fit([(StepWork(1), 0.01)], {"codec": "dense"}), tmp_path / "file" / "latencies")


def test_a_careful_model_comes_before_a_newer_quick_one(tmp_path: Path) -> None:
    careful, quick, rough = (
        dataclasses.replace(fit([(StepWork(1), 0.01)], {"codec": "dense"}), counts={"decode": count}, residuals=off)
        for count, off in ((2000, {"within": 0.1}), (150, {}), (9000, {"within": 0.5}))
    )
    for number, (model, prefix) in enumerate(((careful, ""), (quick, "auto-"), (rough, "rough-"))):
        file = keep(model, tmp_path, prefix)
        assert file is not None
        os.utime(file, (number, number))
    assert [model for _, model in kept_models(tmp_path)] == [careful, quick, rough]
