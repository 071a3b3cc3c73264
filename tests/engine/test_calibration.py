"""Calibrations that go from machine to machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.calibrate import CalibrationSettings
from quire.cli import main
from quire.config import EngineConfig
from quire.engine.calibration import Calibration
from quire.load import find_calibration, load_engine
from quire.models.fingerprint import fingerprint
from tests.engines import keep_calibration
from tests.nuq_tables import random_tables
from tests.tiny_models import save_tiny

FLAGS = ("--runtime.threads", "1", "--runtime.device", "cpu")
NUQ3 = EngineConfig.from_options({"cache.codec": "nuq3", "cache.memory": "4MiB", "cache.check": False})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16, max_position_embeddings=256)


@pytest.fixture(autouse=True)
def move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Goes to another machine: calibrations are kept elsewhere."""

    def go(name: str) -> None:
        monkeypatch.setattr("quire.calibrate.settings.cache_folder", lambda: tmp_path / name / "models")

    go("here")
    return go


def made_up(model: str = "m", **settings: Any) -> Calibration:
    tables = {f"nuq{bits}": random_tables(2, 2, 16, seed=bits, reach=1.0) for bits in (2, 3, 4)}
    return Calibration(model, tables, {"outlier_slots": 1, **settings}, {"why": "not"}, "model.gguf")


def test_an_exported_calibration_is_taken_elsewhere(
    folder: Path, tmp_path: Path, move: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    keep_calibration(folder)
    file = tmp_path / "travels.safetensors"
    assert main(["calibrate", str(folder), "--export", str(file), *FLAGS]) == 0
    made = find_calibration(folder, NUQ3)
    assert made is not None and made.name == folder.name
    assert made.hash in (out := capsys.readouterr().out) and "--import travels.safetensors" in out
    move("there")
    assert find_calibration(folder, NUQ3) is None
    assert main(["calibrate", str(folder), "--import", str(file), *FLAGS]) == 0
    assert f"quire serve {folder} --cache.codec nuq4" in capsys.readouterr().out
    found = find_calibration(folder, NUQ3)
    assert found is not None and found.hash == made.hash and found.report == made.report
    assert load_engine(str(folder), NUQ3).engine.namespace.calibration == made.hash


def test_an_export_makes_the_calibration_if_there_is_none(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "travels.safetensors"
    words = ["calibrate", str(folder), "--windows", "2", "--window", "64", "--export", str(file), *FLAGS]
    assert main(words) == 0
    found = find_calibration(folder, NUQ3)
    assert found is not None and Calibration.load(file, fingerprint(folder)).hash == found.hash


def test_a_calibration_of_another_model_is_refused_by_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.safetensors"
    made_up("0123456789abcdef0123").save(file)
    assert main(["calibrate", str(folder), "--import", str(file), *FLAGS]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line and "another model, model.gguf (fingerprint 0123456789abcdef)" in line
    assert fingerprint(folder)[:16] in line
    assert find_calibration(folder, NUQ3) is None


@pytest.mark.parametrize(
    ("settings", "flags", "said"),
    [
        ({"outlier_slots": 2}, [], "made with outlier_slots 2, not 1"),
        ({"skipped": 4}, [], "made with skipped 4, not 1"),
        ({"q_norm": True}, [], "made with q_norm True, not False"),
        ({}, ["--outlier-slots", "2"], "made with outlier_slots 1, not 2"),
        ({}, ["--bits", "3"], "made with bits"),
    ],
)
def test_a_calibration_with_other_settings_is_refused(
    settings: dict[str, Any], flags: list[str], said: str, folder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    usual = CalibrationSettings()
    known = {"bits": [2, 3, 4], "skipped": 1, "books": list(usual.kinds), "same_bits": False, "q_norm": False}
    file = tmp_path / "made.safetensors"
    made_up(fingerprint(folder), **{**known, **settings}).save(file)
    assert main(["calibrate", str(folder), "--import", str(file), *flags, *FLAGS]) == 2
    assert said in capsys.readouterr().err
    if not flags and not settings:
        assert main(["calibrate", str(folder), "--import", str(file), *FLAGS]) == 0


def test_a_calibration_of_another_shape_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_up(fingerprint(folder))
    wide = {"nuq3": random_tables(2, 2, 32, seed=0, reach=1.0)}
    file = tmp_path / "made.safetensors"
    dataclasses.replace(made, tables=wide).save(file)
    assert main(["calibrate", str(folder), "--import", str(file), *FLAGS]) == 2
    assert "head size 16 needs" in capsys.readouterr().err
