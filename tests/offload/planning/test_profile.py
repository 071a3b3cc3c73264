"""Profiles of a machine: their files and interpolation, and the runs that they are fitted to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.measure import offload_profile
from quire.offload.blocks import BlockAttention
from quire.offload.planning import subject as subjects
from quire.offload.planning.costs import Sizes
from quire.offload.planning.planner import plan_all
from quire.offload.planning.profile import (
    AttentionTimes,
    Conditions,
    Corrections,
    DiskSpeeds,
    Profile,
    ProfiledGpu,
    ProfiledRun,
    Rate,
    Read,
    SecondsCurve,
    profile_text,
    read_profile,
)
from quire.offload.planning.program import PlacedBlock, best
from quire.offload.policy import OffloadPolicy
from quire.offload.units import ALL, NONE, Share, Split
from tests.tiny_models import save_tiny, tiny_shape

MIB = 1 << 20
SIZES = Sizes(
    num_layers=10, layer_bytes=4.0 * MIB, cache_bytes=1024.0, hidden_bytes=512.0, layer_flops=4e6, pair_flops=1e3,
    fixed_bytes=8.0 * MIB,
)  # fmt: skip
BUDGET = 1024
MEMORY = Split((ALL, NONE))


def profile_with(**changes: Any) -> Profile:
    conditions = Conditions(
        "tiny", {"hidden_size": 48}, "bfloat16", "native", 4.0 * MIB, "dense", "a processor", 2, "v3", 100e6
    )  # fmt: skip
    found = Profile(
        made="2026-11-25T00:00:00Z",
        conditions=conditions,
        disk=DiskSpeeds("/tmp", True, (Read(MIB, 2, Rate(90e6, 0.1)),), Rate(100e6), Rate(50e6)),
        copy=Rate(1e9),
        products=SecondsCurve((1, 8, 64), (0.002, 0.004, 0.020)),
        head=SecondsCurve((1, 64), (0.001, 0.004)),
        attention=AttentionTimes((1, 8), (32, 480), ((1e-5, 1e-4), (8e-5, 8e-4))),
        prompt=SecondsCurve((32, 480), (1e-4, 1e-2)),
        corrections=Corrections(),
        runs=(ProfiledRun(Share(0.5), 4, 64, 8, BUDGET, 1.0, 0.1, 1.1),),
    )
    return dataclasses.replace(found, **changes)


def with_device(slow: float = 2.0, **changes: Any) -> Profile:
    """A machine with a GPU. slow: factor on the seconds of attention on the host, beside those of the GPU."""
    made = profile_with()
    far = dataclasses.replace(
        made.attention, seconds=tuple(tuple(slow * each for each in line) for line in made.attention.seconds)
    )
    return dataclasses.replace(made, device=ProfiledGpu(Rate(1e9), Rate(5e8), far), **changes)


def plan(*arguments: Any, **more: Any) -> PlacedBlock:
    """The block size and placement with the highest throughput."""
    found = best(plan_all(*arguments, **more))
    assert found is not None
    return found


def on_disk(share: float, block: int = 4) -> OffloadPolicy:
    return OffloadPolicy(block, 1, Split((Share(1 - share), Share(share))), MEMORY, MEMORY)


# Files.


@pytest.mark.parametrize("make", [profile_with, lambda: with_device()])
def test_a_profile_survives_its_file(tmp_path: Path, make: Callable[[], Profile]) -> None:
    file = tmp_path / "machine.json"
    file.write_text(profile_text(make()))
    assert read_profile(file) == make()


def test_a_profile_of_an_older_version_has_a_field_that_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**json.loads(profile_text(profile_with())), "yardstick": 0.001}))
    assert read_profile(file) == profile_with()


BROKEN: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("format",), 2, "not a profile of format 1"),
    (("disk", "reads"), {}, "disk.reads: Expected `array`, got `object`"),
    (("disk", "reads", 0, "rate", "bandwidth"), -1.0, "disk.reads[0].rate: bandwidth is -1.0; it must be"),
    (("disk", "request_seconds"), -1, "disk: request_seconds is -1"),
    (("products", "counts"), [1, 8, 8], "products: counts are [1, 8, 8]"),
    (("products", "counts"), [0, 8, 64], "products: counts are [0, 8, 64]"),
    (("products", "counts"), [], "products: counts are []"),
    (("head", "seconds"), [0.1], "head: seconds has 1 numbers for 2 counts"),
    (("head", "seconds", 1), 0, "head: seconds is 0"),
    (("attention", "seconds"), [[1e-5, 1e-4]], "attention: seconds has 1 lines for 2 rows"),
    (("attention", "rows"), [8, 1], "attention: rows are [8, 1]"),
    (("corrections", "disk"), 0, "corrections: disk is 0"),
    (("corrections", "exposed"), 1.5, "corrections: exposed is 1.5; it must be a share from 0 to 1"),
    (("corrections", "step_seconds"), -1, "corrections: step_seconds is -1"),
    (("runs", 0, "seconds"), 0, "runs[0]: seconds is 0"),
    (("runs", 0, "disk_share"), 2, "runs[0]: disk_share is 2"),
    (("runs", 0, "host_share"), -1, "runs[0]: host_share is -1"),
    (("corrections", "bus"), 0, "corrections: bus is 0"),
    (("device", "up", "bandwidth"), 0, "device.up: bandwidth is 0"),
    (("device", "far", "rows"), [8, 1], "device.far: rows are [8, 1]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_damaged_profile_is_refused_by_its_field(
    tmp_path: Path, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    fields = json.loads(profile_text(with_device()))
    at = fields
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as caught:
        read_profile(file)
    assert message in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": {"hidden_size": 64}}, "its model has hidden_size 48, this one has 64"),
        ({"shape": {"hidden_size": 48, "num_layers": 2}}, "its model has num_layers None, this one has 2"),
        ({"dtype": "float32"}, "it was made with model.dtype bfloat16, not float32"),
        ({"weights": "g4"}, "model.weights native, not g4"),
        ({"layer_bytes": 5.0}, "bytes of a layer"),
        ({"codec": "g4"}, "cache.codec dense, not g4"),
        ({"processor": "another one"}, "the processor a processor, not another one"),
        ({"threads": 1}, "runtime.threads 2, not 1"),
        ({"kernels": "v4"}, "runtime.cpu_level v3, not v4"),
        ({"disk_bandwidth": None}, "offload.disk_bandwidth 95.37MiB, not auto"),
        ({"device": "H200"}, "the GPU none, not H200"),
    ],
)
def test_another_model_or_setting_is_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    made = profile_with()
    made.check(dataclasses.replace(made.conditions, model="another name"))
    with pytest.raises(ConfigError, match="the profile of tiny is not for this") as caught:
        made.check(dataclasses.replace(made.conditions, **changes))
    assert message in str(caught.value)


# Tables.


def test_a_curve_is_linear_between_its_counts_and_proportional_beyond() -> None:
    curve = SecondsCurve((2, 4, 8), (1.0, 3.0, 4.0))
    assert [curve.at(count) for count in (1, 2, 3, 4, 6, 8, 16)] == pytest.approx([1, 1, 2, 3, 3.5, 4, 8])


def test_attention_is_linear_in_rows_and_context() -> None:
    table = AttentionTimes((2, 4), (32, 64), ((1.0, 2.0), (3.0, 6.0)))
    assert table.at(2, 32) == 1 and table.at(4, 64) == 6
    assert table.at(3, 48) == pytest.approx(3.0)
    assert table.at(8, 128) == pytest.approx(24.0)


# A GPU.


def beside(weights: tuple[float, ...], cache: tuple[float, ...] = (1, 0, 0), attended: float = 0.0) -> OffloadPolicy:
    near = Split((ALL, NONE, NONE))
    return OffloadPolicy(
        2, 2, Split(tuple(map(Share, weights))), Split(tuple(map(Share, cache))), near, Share(attended)
    )


@pytest.mark.parametrize(("gpu", "cpu", "expected"), [
    (1000, 1000, [(1, 0, 0), (0.5, 0.5, 0), (0, 1, 0), (0, 0.5, 0.5)]),
    (20, 1000, [(0.25, 0.75, 0), (0.125, 0.875, 0), (0, 1, 0), (0, 0.5, 0.5)]),
    (0, 10, [(0, 0.175, 0.825)]),
])  # fmt: skip
def test_runs_beside_a_gpu_have_weights_on_all_tiers(
    monkeypatch: pytest.MonkeyPatch, gpu: int, cpu: int, expected: list[tuple[float, ...]]
) -> None:
    """Ten layers of 4 MiB, and 4 MiB beside them; 0.7 of the free memory is used."""
    free = {"cuda": gpu * MIB, "cpu": cpu * MIB}
    monkeypatch.setattr(offload_profile, "available_memory", lambda device: free[device.type])
    monkeypatch.setattr(subjects, "device_type_of", lambda device: "cuda")
    sizes = dataclasses.replace(SIZES, fixed_bytes=4.0 * MIB)
    subject = subjects.Subject("tiny", EngineConfig(), tiny_shape(), sizes)
    found = offload_profile.placements(subject)
    assert [pytest.approx(each, abs=1e-3) for each in expected] == [split.shares for split in found]


# Measuring.


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import load

    load()  # from the user's cache, before that is another one
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache_folder")
def test_the_policy_of_a_generation_overrides_settings(tmp_path: Path) -> None:
    model, file = str(save_tiny(tmp_path / "model", num_hidden_layers=4)), tmp_path / "quire.toml"
    file.write_text(
        '[offload]\nmode = "auto"\nmemory = "8MiB"\ncache = "64MiB"\nmicro_batch = 2\nprofile = "x.json"\n'
        "overlap = false\n"
    )
    options = {"cache.memory": "16MiB", "model.dtype": "bfloat16"}
    config = EngineConfig.from_options(options, file)
    with offload_profile.generator(model, config, on_disk(0.5).weights) as made:
        assert made.run(3, 5, 2).seconds > 0
        assert "cache_near" not in made.llm.stats()["offload"] and made.model.overlaps
        assert not isinstance(made.llm.engine.runner.attention, BlockAttention)
