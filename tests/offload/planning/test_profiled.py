"""Seconds of steps from a profile: those of the program's blocks, step by step, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.measure.latency_bench import LatencyFiles
from quire.offload.planning.costs import BlockWorkload
from quire.offload.planning.planner import predict
from quire.offload.planning.profile import Corrections, Profile, SecondsCurve, profile_text
from quire.offload.planning.profiled import ProfiledTime
from quire.offload.planning.subject import Subject
from quire.offload.policy import OffloadPolicy, policy_text
from quire.offload.units import ALL, NONE, Share, Split
from quire.timing.latency import StepWork, pairs_of
from tests.offload.planning.test_profile import BUDGET, MIB, SIZES, profile_with, with_device
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


def test_the_slices_of_a_prompt_take_as_long_as_all_of_it() -> None:
    """Their attention does: each has its share of the pairs of a prompt that ends where it does."""
    profile = profile_with(prompt=SecondsCurve((32, 112, 480, 992), tuple(2e-7 * n**2 for n in (32, 112, 480, 992))))
    free = dataclasses.replace(profile, products=SecondsCurve((1,), (1e-12,)), head=SecondsCurve((1,), (1e-12,)))
    times = ProfiledTime(free, SIZES, split(1.0, 0.0))

    def seconds(start: int, rows: int) -> float:
        return times.seconds(StepWork(rows, pairs_of(start, rows), num_prompts=1))

    whole = seconds(0, 992)
    assert whole == pytest.approx(10 * 2e-7 * 992**2, rel=1e-6)
    for size in (16, 32, 124):
        slices = sum(seconds(start, size) for start in range(0, 992, size))
        assert whole <= slices * (1 + 1e-9) < 1.15 * whole, size  # between measured lengths the curve is straight
    assert seconds(991, 1) < 0.003 * whole and seconds(960, 32) < 0.08 * whole
    measured = ProfiledTime(profile, SIZES, split(1.0, 0.0))
    assert measured.covers(StepWork(8, pairs_of(984, 8), num_prompts=1))
    assert not measured.covers(StepWork(8, pairs_of(2000, 8), num_prompts=1))


def test_a_window_counts_once() -> None:
    """A prompt whose attention was measured with a window takes what was measured."""
    windowed = ProfiledTime(profile_with(), dataclasses.replace(SIZES, window=64.0), split(1.0, 0.0))
    plain = ProfiledTime(profile_with(), SIZES, split(1.0, 0.0))
    long = windowed.seconds(StepWork(480, pairs_of(0, 480, 64.0), num_prompts=1))
    same = plain.seconds(StepWork(480, pairs_of(0, 480), num_prompts=1))
    assert long == pytest.approx(same, rel=0.2)


def test_a_mixed_step_has_both_and_the_correction_of_prompts() -> None:
    times = ProfiledTime(profile_with(corrections=Corrections(prefill=2.0, decode=3.0)), SIZES, split(1.0, 0.0))
    prompts, decoding = StepWork(60, 1800.0, num_prompts=1), StepWork(decode_rows=4, context=400.0)
    both = StepWork(60, 1800.0, 4, 400.0, 400.0, 1)
    profile, layers = times.profile, SIZES.num_layers
    attention = profile.prompt.at(60) + profile.attention.at(4, 100)
    expected = 2.0 * (layers * (profile.products.at(64) + attention) + profile.head.at(5))
    assert times.seconds(both) == pytest.approx(expected)
    assert times.seconds(prompts) < times.seconds(both)
    assert times.seconds(decoding) == pytest.approx(
        3.0 * (layers * (profile.products.at(4) + profile.attention.at(4, 100)) + profile.head.at(4))
    )
    far = StepWork(decode_rows=4, context=4 * 960.0)  # twice the last context that was measured
    more = times.seconds(far) - times.seconds(far._replace(context=4 * 480.0))
    assert more == pytest.approx(3.0 * layers * profile.attention.at(4, 480))


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


OPTIONS: dict[str, Any] = {
    "model.dtype": "float32", "runtime.device": "cpu", "runtime.threads": 1, "scheduler.max_running": 4,
}  # fmt: skip


def test_a_simulation_reads_a_profile_as_it_reads_a_latency_model(tmp_path: Path) -> None:
    name = str(save_tiny(tmp_path / "model", tokenizer=False))
    subject = Subject.of(name, EngineConfig.from_options({**OPTIONS, "offload.mode": "auto"}))
    conditions = dataclasses.replace(
        subject.conditions(), processor="another one", kernels="v9", disk_bandwidth=95.0 * MIB
    )
    file = tmp_path / "machine.json"
    file.write_text(profile_text(profile_with(conditions=conditions)))
    files = LatencyFiles([f"decode={file}"], name)

    def times(role: str = "decode", **options: Any) -> ProfiledTime:
        found = files.of(role, EngineConfig.from_options(OPTIONS | options), "")
        assert isinstance(found, ProfiledTime)
        return found

    assert times().weights == split(1.0, 0.0) and times().sizes == subject.sizes
    near, half = split(1.0, 0.0), split(0.5, 0.5)

    def policy_with(name: str, micro_batch: int, weights: Split, cache: Split, hidden: Split) -> dict[str, Any]:
        file = tmp_path / name
        file.write_text(policy_text(OffloadPolicy(micro_batch, 1, weights, cache, hidden), ("cpu", "disk")))
        return {"offload.mode": str(file), "offload.disk_bandwidth": 95 * MIB}

    good = policy_with("weights", 4, split(0.25, 0.75), near, near)
    assert times(**good).weights == split(0.25, 0.75)
    for options, message in (
        (policy_with("cache", 4, near, half, near), "plan with --only-weights"),
        (policy_with("hidden", 4, near, near, half), "plan with --only-weights"),
        (policy_with("micro", 2, half, near, near), "plan with --micro-batch 4 --num-batches 1"),
        (good | {"scheduler.max_running": 5}, "micro-batches of 4, and 5 sequences may run"),
        (good | {"offload.micro_batch": 1}, "micro-batches of 1"),
        (good | {"offload.cache": "64MiB"}, "offload.cache is set"),
        (good | {"offload.overlap": False}, "offload.overlap is set"),
        (good | {"offload.disk_bandwidth": 90 * MIB}, "made with offload.disk_bandwidth 95MiB, not 90MiB"),
        ({"offload.mode": "auto", "offload.disk_bandwidth": 95 * MIB}, "give a policy of quire plan offload"),
        ({"retain.budget": 0.5}, "no speed of retention"),
        ({"runtime.threads": 2}, "runtime.threads 1, not 2"),
        ({"cache.codec": "g4"}, "cache.codec dense, not g4"),
        ({"role": "prefill"}, "no --latency is for instances with the role prefill"),
    ):
        with pytest.raises(ConfigError, match=message):
            times(**options)
    gpu = dataclasses.replace(conditions, device="a GPU")
    (tmp_path / "gpu.json").write_text(profile_text(with_device(conditions=gpu)))
    with pytest.raises(ConfigError, match="made with the GPU a GPU, not none"):
        LatencyFiles([str(tmp_path / "gpu.json")], name).of("decode", EngineConfig.from_options(OPTIONS), "")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="neither a latency model nor a profile"):
        LatencyFiles([str(tmp_path / "list.json")], name)
    file.write_text(json.dumps({**json.loads(file.read_text()), "copy": "fast"}))
    with pytest.raises(ConfigError, match=r"latency model .*machine.json: copy: Expected `object`"):
        LatencyFiles([str(file)], name)
