"""Seconds of steps from a profile: those of the program's blocks, step by step, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.evaluation.latency_bench import LatencyFiles
from quire.offload.costs import BlockWorkload, OffloadPolicy
from quire.offload.files import policy_text
from quire.offload.planner import predict
from quire.offload.profile import Corrections, Profile, profile_text
from quire.offload.profiled import ProfiledTime
from quire.offload.units import ALL, NONE, Share, Split
from quire.planning.offload_sizes import Subject
from quire.timing.latency import StepWork
from tests.offload.test_profile import BUDGET, SIZES, profile_with, with_device
from tests.tiny_models import save_tiny

CORRECTED = Corrections(1.4, 1.1, 1.2, 0.3, 0.002, 0.0005, bus=1.3)


def split(*shares: float) -> Split:
    return Split(tuple(map(Share, shares)))


@pytest.mark.parametrize(
    ("profile", "weights"),
    [
        (profile_with(corrections=CORRECTED), split(1.0, 0.0)),
        (profile_with(corrections=CORRECTED), split(0.6, 0.4)),
        (profile_with(), split(0.0, 1.0)),
        (with_device(corrections=CORRECTED), split(0.2, 0.5, 0.3)),
    ],
)
def test_a_block_takes_as_long_as_its_steps(profile: Profile, weights: Split) -> None:
    near = Split((ALL, *[NONE] * (len(weights.shares) - 1)))
    block, prompt, answer = 8, 60, 21
    said = predict(
        profile, SIZES, BlockWorkload(prompt, answer), OffloadPolicy(block, 1, weights, near, near), budget=BUDGET
    )
    times = ProfiledTime(profile, SIZES, weights)
    prompts = StepWork(block * prompt, block * prompt**2 / 2, num_prompts=block)
    assert times.seconds(prompts) == times.occupancy(prompts) == pytest.approx(said.prefill_seconds)
    middle = block * (prompt + answer / 2)
    steps = (answer - 1) * times.seconds(StepWork(decode_rows=block, context=middle, unique=middle))
    assert steps == pytest.approx(said.decode_seconds)
    first = StepWork(decode_rows=block, context=block * (prompt + 1), unique=0.0)
    each = [times.seconds(first._replace(context=block * (prompt + 1 + step))) for step in range(answer - 1)]
    assert times.quiet(first, answer - 1) == pytest.approx(sum(each)) == pytest.approx(said.decode_seconds, rel=0.02)


def test_what_is_larger_than_what_was_measured_is_not_covered() -> None:
    times = ProfiledTime(profile_with(), SIZES, split(1.0, 0.0))
    inside = StepWork(prompt_rows=40, prompt_pairs=800.0, decode_rows=8, context=8 * 480.0, num_prompts=1)
    assert times.covers(inside)
    for change in ({"prompt_rows": 70}, {"decode_rows": 9, "context": 100.0}, {"context": 8 * 520.0}):
        assert not times.covers(inside._replace(**change)), change
    attention = times.profile.attention
    assert [attention.of_rows(rows).at(context) for rows, context in ((3, 100), (20, 900))] == pytest.approx(
        [attention.at(3, 100), attention.at(20, 900)]
    )


OPTIONS: dict[str, Any] = {"model.dtype": "float32", "runtime.device": "cpu", "runtime.threads": 1}


def test_a_simulation_reads_a_profile_as_it_reads_a_latency_model(tmp_path: Path) -> None:
    name = str(save_tiny(tmp_path / "model", tokenizer=False))
    subject = Subject.of(name, EngineConfig.from_options({**OPTIONS, "offload.mode": "auto"}))
    conditions = dataclasses.replace(subject.conditions(), processor="another one", kernels="v9")
    file, policy = tmp_path / "machine.json", tmp_path / "policy.json"
    file.write_text(profile_text(profile_with(conditions=conditions)))
    files = LatencyFiles([f"decode={file}"], name)

    def times(role: str = "decode", **options: Any) -> ProfiledTime:
        found = files.of(role, EngineConfig.from_options(OPTIONS | options), "")
        assert isinstance(found, ProfiledTime)
        return found

    assert times().weights == split(1.0, 0.0) and times().sizes == subject.sizes
    near = split(1.0, 0.0)
    policy.write_text(policy_text(OffloadPolicy(4, 1, split(0.25, 0.75), near, near), ("cpu", "disk")))
    assert times(**{"offload.mode": str(policy)}).weights == split(0.25, 0.75)
    policy.write_text(policy_text(OffloadPolicy(4, 1, near, split(0.5, 0.5), near), ("cpu", "disk")))
    for options, message in (
        ({"offload.mode": str(policy)}, "plan with --only-weights"),
        ({"offload.mode": "auto"}, "give a policy of quire plan offload"),
        ({"retain.budget": 0.5}, "no speed of retention"),
        ({"runtime.threads": 2}, "runtime.threads 1, not 2"),
        ({"cache.codec": "g4"}, "cache.codec dense, not g4"),
        ({"role": "prefill"}, "no --latency is for instances with the role prefill"),
    ):
        with pytest.raises(ConfigError, match=message):
            times(**options)
    file.write_text(json.dumps({**json.loads(file.read_text()), "yardstick": "fast"}))
    with pytest.raises(ConfigError, match=r"latency model .*machine.json: yardstick: Expected `float`"):
        LatencyFiles([str(file)], name)
