"""The file of a placement: its format, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.placement.divisions import Role
from quire.placement.placement_file import Instances, Placement, read_placement
from quire.planning.placement import PlacementTask, place
from tests.planning.test_placement import MOTIVATION, SMALL, gpus, rates


def planned() -> Placement:
    needs = dataclasses.replace(SMALL, num_layers=2)
    placement = place(
        PlacementTask(
            gpus(1, 4), needs, rates(MOTIVATION), rate=10.0, options_of=lambda candidate: {"cache.memory": "1GiB"}
        ),
        "apart",
    )
    slo = {"ttft": 0.25, "tpot": 0.1, "attainment": 0.9}
    return dataclasses.replace(placement, workload={"name": "chat", "rate": 10.0}, slo=slo)


def test_a_placement_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    placement, file = planned(), tmp_path / "placement.json"
    placement.write(file)
    found = read_placement(file)
    for name in ("instances", "predicted", "workload", "slo"):
        assert getattr(found, name) == getattr(placement, name)
    assert found.to_json() == placement.to_json()
    assert found.count(Role.PREFILL) == 2 and found.count(Role.MIXED) == 0
    rejected = found.made["rejected"]
    assert len(rejected) == len(placement.rejected) > 0 and rejected[0]["option"] == str(placement.rejected[0].option)
    assert found.made["algorithm"] == "apart"


def test_the_format_of_a_placement_file(tmp_path: Path) -> None:
    fields = {
        "version": 1,
        "instances": [
            {"role": "prefill", "count": 1, "tp": 1, "pp": 1,
             "options": {"scheduler.token_budget": 512, "cache.memory": "1GiB", "runtime.threads": 1}},
            {"role": "decode", "count": 1},
        ],
        "predicted": {"rate": 2.0, "cost": 2.0, "unit": "machine", "rate_per_unit": 1.0, "attainment": 0.93},
    }  # fmt: skip
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(fields))
    placement = read_placement(file)
    assert placement.instances[0].options["scheduler.token_budget"] == 512
    assert placement.instances[1] == Instances("decode", 1) and placement.predicted.fits
    written = json.loads(placement.to_json())
    assert list(written) == ["version", "instances", "predicted", "workload", "slo", "made"]
    assert written["instances"][0] == fields["instances"][0]


def edited(path: str, value: Any) -> str:
    """The text of a placement file with another value at a path; without the field if the value is Ellipsis."""
    fields = json.loads(planned().to_json())
    *way, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
    inner = fields
    for part in way:
        inner = inner[part]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 2, "not a placement of version 1; quire plan placement makes one"),
        ("extra", 1, "unknown field 'extra'"),
        ("instances", [], "instances is empty"),
        ("instances/0/role", "both", "instances[0]: role is 'both'; it must be prefill, decode, mixed"),
        ("instances/0/count", 0, "instances[0]: count is 0; it must be at least 1"),
        ("instances/0/count", ..., "instances[0].count is missing"),
        ("instances/0/options", {"cache.memry": "1GiB"}, "did you mean cache.memory?"),
        ("instances/0/options", {"cache.memory": "x"}, "cache.memory is 'x'; it must be a size"),
        ("instances/1/role", "prefill", "instances have the role prefill alone"),
        ("instances/0/role", "decode", "instances have the role decode alone"),
        ("predicted/rate", 0, "predicted: rate is 0.0; it must be a number above 0"),
        ("predicted/attainment", 1.5, "predicted: attainment is 1.5; it must be a share"),
        ("slo/ttft", -1, "slo.ttft is -1; it must be a number of at least 0"),
        ("slo/ttfb", 1, "unknown field 'slo.ttfb'; the fields are ttft, tpot, attainment"),
    ],
)
def test_a_bad_placement_file_is_refused_with_the_field(path: str, value: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "placement.json"
    file.write_text(edited(path, value))
    with pytest.raises(ConfigError) as error:
        read_placement(file)
    assert message in str(error.value) and str(error.value).startswith(f"placement {file}: ")


def test_a_placement_file_that_cannot_be_read_or_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a placement of version 1"):
        read_placement(tmp_path / "list.json")
    with pytest.raises(ConfigError, match="cannot write the placement"):
        planned().write(tmp_path / "no folder" / "placement.json")
