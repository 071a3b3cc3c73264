"""The latency model: its terms, what it covers, and its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.timing.latency import LatencyModel, Link, Origin, StepWork, mismatch
from quire.timing.latency_fit import Record, fit

TRUE = LatencyModel(
    about={},
    coefficients={
        "base": 8e-3,
        "rows_from_1": 1e-5,
        "rows_from_8": 4e-4,
        "rows_from_64": 1.2e-4,
        "prompt_pairs": 3e-8,
        "context": 6e-8,
        "unique": 2.5e-7,
        "num_prompts": 5e-4,
        "decode_rows": 9e-5,
    },
    knots=(1, 8, 64),
    residuals={},
    ranges={},
)
"""Flat while weights are read, steep where caches are too small, less steep where products are large."""


def random_work(draw: np.random.Generator) -> StepWork:
    prompts, decodes = int(draw.integers(0, 4)), int(2 ** draw.uniform(0, 6)) * int(draw.integers(0, 2))
    if not prompts and not decodes:
        return random_work(draw)
    rows = [int(2 ** draw.uniform(0, 9)) for _ in range(prompts)]
    pairs = sum(count * (draw.integers(0, 2000) + count / 2) for count in rows)
    context = float(decodes * draw.integers(1, 2000))
    return StepWork(sum(rows), float(pairs), decodes, context, context * draw.uniform(0.1, 1), prompts)


def random_records(count: int, seed: int = 0, model: LatencyModel = TRUE) -> list[Record]:
    draw = np.random.default_rng(seed)
    return [(work, model.seconds(work)) for work in (random_work(draw) for _ in range(count))]


# ---- the form --------------------------------------------------------------------------------------------------------


def test_seconds_are_the_sum_of_the_terms() -> None:
    work = StepWork(prompt_rows=70, prompt_pairs=7000.0, decode_rows=10, context=5000.0, unique=2000.0, num_prompts=2)
    rows = 1e-5 * 7 + 4e-4 * 56 + 1.2e-4 * 16
    terms = 3e-8 * 7000 + 6e-8 * 5000 + 2.5e-7 * 2000 + 5e-4 * 2 + 9e-5 * 10
    assert TRUE.seconds(work) == pytest.approx(8e-3 + rows + terms, rel=1e-12)
    assert TRUE.occupancy(work) == TRUE.seconds(work)
    assert TRUE.origin is Origin.FITTED


def test_a_link_that_moves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes_per_second is 0"):
        Link(0.0, 0)


# ---- what was measured -----------------------------------------------------------------------------------------------


def test_a_model_covers_what_was_measured() -> None:
    found = fit(random_records(400), {})
    inside = StepWork(100, 20000.0, 8, 4000.0, 2000.0, 1)
    assert found.covers(inside)
    for change in (
        {"prompt_rows": 5000}, {"prompt_pairs": 1e9}, {"decode_rows": 70}, {"context": 1e6, "unique": 1e6},
        {"num_prompts": 9}, {"unique": 100.0},
    ):  # fmt: skip
        assert not found.covers(inside._replace(**change)), change


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_holds_all_of_a_model(tmp_path: Path) -> None:
    about: dict[str, Any] = {"model": "made up", "threads": 2, "level": None, "sparse_values": 0.5, "is_real": False}
    found = fit(random_records(200), about, {"disk": Link(0.002, 5e8)})
    found.write(tmp_path / "model.json")
    assert LatencyModel.read(tmp_path / "model.json") == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "not a latency model of format 1"),
        ({"coefficients": {"base": -1.0}}, "coefficients.base is -1.0; it must be seconds, 0 to 1,000,000"),
        ({"coefficients": {"base": 1e308}}, "coefficients.base is 1e+308; it must be seconds, 0 to 1,000,000"),
        ({"coefficients": {"bass": 1.0}}, "coefficients.bass is no term; the terms are base, "),
        ({"coefficients": {"base": 0.0}}, "coefficients are all 0"),
        ({"knots": [4, 2]}, "knots are [4, 2]; they must increase"),
        ({"ranges": {"rows": [3.0, 2.0]}}, "ranges.rows is [3.0, 2.0]"),
        ({"links": {"disk": {"latency": 0.1, "bytes_per_second": 0.0}}}, "links.disk: bytes_per_second is 0.0"),
    ],
)
def test_a_bad_file_is_told_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(json.loads(TRUE.to_json()) | change))
    with pytest.raises(ConfigError) as raised:
        LatencyModel.read(path)
    assert str(raised.value).startswith(f"latency model {path}: ")
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_model_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        TRUE.write(tmp_path / "no" / "folder")


def test_a_model_of_other_settings_is_told() -> None:
    about: dict[str, Any] = {"fingerprint": "ab", "codec": "nuq4", "threads": 2, "date": "today"}
    assert mismatch(about, {"fingerprint": "ab", "codec": "nuq4", "threads": 2}) is None
    assert "made with cache.codec nuq4, not dense" in str(mismatch(about, {"fingerprint": "ab", "codec": "dense"}))
    assert "made with retain an unknown value, not off" in str(mismatch(about, {"retain": "off"}))
