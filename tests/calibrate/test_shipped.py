"""The calibration that comes with Quire."""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.cache.codecs.nuq import NuqTables
from quire.calibrate import CalibrationSettings, shipped
from quire.config import EngineConfig
from quire.engine.calibration import check_tables
from quire.errors import ConfigError
from quire.load import find_calibration
from quire.models.fingerprint import fingerprint
from quire.models.weights import open_model
from tests.engine.test_calibration import NUQ3, made_up
from tests.engine.test_calibration import move as move
from tests.real_model import embedded_gguf


def test_packing_loses_nothing(tmp_path: Path) -> None:
    made = made_up()
    file = tmp_path / "packed"
    file.write_bytes(shipped.pack(made))
    found = shipped.unpack(file, "m")
    assert found.hash == made.hash and found.settings == made.settings and found.report == made.report
    for codec, tables in made.tables.items():
        for field in dataclasses.fields(NuqTables):
            assert torch.equal(getattr(found.tables[codec], field.name), getattr(tables, field.name)), field.name


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: lzma.compress(lzma.decompress(content)[:-100]),
        lambda content: lzma.compress(lzma.decompress(content)[:-1] + b"x"),
        lambda content: lzma.compress(json.dumps({"tensors": 3}).encode()),
    ],
)
def test_a_damaged_packed_file_is_one_line(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tmp_path / "packed"
    file.write_bytes(change(shipped.pack(made_up())))
    with pytest.raises(ConfigError, match=r"not a calibration that can be read|damaged") as refused:
        shipped.unpack(file, "m")
    assert "\n" not in str(refused.value)


def test_the_embedded_models_calibration_comes_with_quire(monkeypatch: pytest.MonkeyPatch) -> None:
    path = embedded_gguf()
    found = find_calibration(path, NUQ3)
    assert found is not None and found.model == fingerprint(path) and set(found.tables) == {"nuq2", "nuq3", "nuq4"}
    with open_model(path) as checkpoint:
        shape = checkpoint.shape
    for tables in found.tables.values():
        check_tables(tables, shape.num_layers, shape.num_kv_heads, shape.head_dim)
    usual = CalibrationSettings()
    assert found.settings["windows"] == usual.num_windows and found.settings["window_tokens"] == usual.tokens_of(shape)
    assert find_calibration(path, EngineConfig.from_options({"cache.codec": "nuq3", "cache.outlier_slots": 2})) is None
    # Whoever calibrates gets their own.
    made_up(found.model).save(usual.file(found.model))
    assert find_calibration(path, NUQ3).name == "model.gguf"  # type: ignore[union-attr]


def test_what_comes_with_quire_is_small() -> None:
    files = list(shipped.FOLDER.iterdir())
    assert len(files) == 1 and files[0].stat().st_size < 1_000_000
