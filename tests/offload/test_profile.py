"""Profiles of a machine: files, interpolation, the fit, plans on them, and `quire plan hardware` from end to end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.cli import main
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.evaluation import offload_profile
from quire.evaluation.offload_profile import fitted, seconds_of_run
from quire.models.layers import TorchOps
from quire.models.weights import open_model
from quire.offload import hardware, quiet
from quire.offload.blocks import BlockAttention
from quire.offload.costs import Policy, Scratch, Sizes, Workload
from quire.offload.files import policy_text, read_policy
from quire.offload.fit import fit
from quire.offload.planner import model_of, num_passes, plan_all, predict, prompt_passes
from quire.offload.policy import Found, PlanError, best
from quire.offload.profile import (
    Attention,
    Conditions,
    Corrections,
    Curve,
    Device,
    Disk,
    Profile,
    Rate,
    Read,
    Run,
    profile_text,
    read_profile,
)
from quire.offload.sizes import matrices_of
from quire.offload.units import ALL, NONE, TIERS, Share, Split
from quire.offload.weight_placement import assign_tiers
from quire.planning.offload_sizes import conditions_of, sizes_from
from tests.tiny_models import save_tiny, tiny_shape

MIB = 1 << 20
SIZES = Sizes(
    num_layers=10, layer_bytes=4.0 * MIB, cache_bytes=1024.0, hidden_bytes=512.0, layer_flops=4e6, pair_flops=1e3,
    fixed_bytes=8.0 * MIB,
)  # fmt: skip
WORK = Workload(64, 16)
BUDGET = 1024
MEMORY = Split((ALL, NONE))


def profile_with(**changes: Any) -> Profile:
    conditions = Conditions(
        "tiny", {"hidden_size": 48}, "bfloat16", "native", 4.0 * MIB, "dense", "a processor", 2, "v3", 100e6
    )  # fmt: skip
    found = Profile(
        made="2026-11-25T00:00:00Z",
        conditions=conditions,
        disk=Disk("/tmp", True, (Read(MIB, 2, Rate(90e6, 0.1)),), Rate(100e6), Rate(50e6)),
        copy=Rate(1e9),
        yardstick=0.001,
        products=Curve((1, 8, 64), (0.002, 0.004, 0.020)),
        head=Curve((1, 64), (0.001, 0.004)),
        attention=Attention((1, 8), (32, 480), ((1e-5, 1e-4), (8e-5, 8e-4))),
        prompt=Curve((32, 480), (1e-4, 1e-2)),
        corrections=Corrections(),
        runs=(Run(Share(0.5), 4, 64, 8, BUDGET, 1.0, 0.1, 1.1),),
    )
    return dataclasses.replace(found, **changes)


def with_device(**changes: Any) -> Profile:
    """A machine with a GPU, whose attention on the host takes twice as long as on the GPU."""
    made = profile_with()
    far = dataclasses.replace(
        made.attention, seconds=tuple(tuple(2 * each for each in line) for line in made.attention.seconds)
    )
    return dataclasses.replace(made, device=Device(Rate(1e9), Rate(5e8), far), **changes)


def plan(*arguments: Any, **more: Any) -> Found:
    """The block size and placement with the highest throughput."""
    found = best(plan_all(*arguments, **more))
    assert found is not None
    return found


def grid_best(made: Profile, work: Workload, room: tuple[float, ...], grid: Any) -> float:
    """Tokens per second of the best placement of a grid, rows as of CostModel.vector, that fits; of six block sizes."""
    best = 0.0
    for micro, count in itertools.product((1, 4, 8), (1, 2)):
        model = model_of(made, SIZES, work, room, micro, count, budget=BUDGET)
        fits = np.ones(len(grid), bool)
        for rows, limit in zip(model.memory().values(), room, strict=True):
            fits &= np.all([grid @ row <= limit for row in rows], axis=0)
        prefill, decode = (
            np.max([grid @ bound for bound in bounds.values()], axis=0)
            for bounds in (model.prefill_bounds(), model.decode_bounds())
        )
        rates = micro * count * 16 / (10 * (prefill + 15 * decode))
        best = max(best, *rates[fits], 0.0)
    return best


def on_disk(share: float, block: int = 4) -> Policy:
    return Policy(block, 1, Split((Share(1 - share), Share(share))), MEMORY, MEMORY)


# Files.


@pytest.mark.parametrize("make", [profile_with, lambda: with_device()])
def test_a_profile_survives_its_file(tmp_path: Path, make: Callable[[], Profile]) -> None:
    file = tmp_path / "machine.json"
    file.write_text(profile_text(make()))
    assert read_profile(file) == make()


BROKEN: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("format",), 2, "not a profile of format 1"),
    (("made",), 3, "made is 3; it must be a text"),
    (("extra",), 3, "unknown field 'extra'"),
    (("conditions",), [], "conditions is []; it must be an object"),
    (("conditions", "extra"), 1, "unknown field 'conditions.extra'"),
    (("conditions", "threads"), 1.5, "conditions.threads is 1.5; it must be a whole number"),
    (("conditions", "disk_bandwidth"), "fast", "conditions.disk_bandwidth is 'fast'; it must be a number or null"),
    (("conditions", "shape"), 3, "conditions.shape is 3; it must be an object"),
    (("conditions", "shape", "hidden_size"), True, "conditions.shape.hidden_size is True"),
    (("disk", "is_direct"), 1, "disk.is_direct is 1; it must be true or false"),
    (("disk", "reads"), {}, "disk.reads is {}; it must be a list"),
    (("disk", "reads", 0, "rate", "bandwidth"), -1.0, "disk.reads[0].rate: bandwidth is -1.0; it must be"),
    (("disk", "streamed", "bandwidth"), math.inf, "disk.streamed.bandwidth is inf; it must be a number"),
    (("disk", "request_seconds"), -1, "disk: request_seconds is -1"),
    (("copy", "bandwidth"), True, "copy.bandwidth is True; it must be a number"),
    (("yardstick",), None, "yardstick is None; it must be a number"),
    (("products", "counts"), [1, 8, 8], "products: counts are [1, 8, 8]"),
    (("products", "counts"), [0, 8, 64], "products: counts are [0, 8, 64]"),
    (("products", "counts"), [], "products: counts are []"),
    (("head", "seconds"), [0.1], "head: seconds has 1 numbers for 2 counts"),
    (("head", "seconds", 1), 0, "head: seconds is 0"),
    (("attention", "seconds"), [[1e-5, 1e-4]], "attention: seconds has 1 lines for 2 rows"),
    (("attention", "rows"), [8, 1], "attention: rows are [8, 1]"),
    (("prompt", "seconds", 0), "x", "prompt.seconds[0] is 'x'"),
    (("corrections", "disk"), 0, "corrections: disk is 0"),
    (("corrections", "exposed"), 1.5, "corrections: exposed is 1.5; it must be a share from 0 to 1"),
    (("corrections", "step_seconds"), -1, "corrections: step_seconds is -1"),
    (("runs", 0, "seconds"), 0, "runs[0]: seconds is 0"),
    (("runs", 0, "disk_share"), 2, "runs[0]: disk_share is 2"),
    (("runs", 0, "sequences"), "4", "runs[0].sequences is '4'"),
    (("runs", 0, "host_share"), -1, "runs[0]: host_share is -1"),
    (("corrections", "bus"), 0, "corrections: bus is 0"),
    (("device",), 3, "device is 3; it must be an object"),
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


@pytest.mark.parametrize("name", ["made", "conditions", "disk", "yardstick", "products", "prompt"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    fields = json.loads(profile_text(profile_with()))
    del fields[name]
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        read_profile(file)


@pytest.mark.parametrize("text", ["", "[", "3", None])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "machine.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="machine.json"):
        read_profile(file)


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
    curve = Curve((2, 4, 8), (1.0, 3.0, 4.0))
    assert [curve.at(count) for count in (1, 2, 3, 4, 6, 8, 16)] == pytest.approx([1, 1, 2, 3, 3.5, 4, 8])


def test_attention_is_linear_in_rows_and_context() -> None:
    table = Attention((2, 4), (32, 64), ((1.0, 2.0), (3.0, 6.0)))
    assert table.at(2, 32) == 1 and table.at(4, 64) == 6
    assert table.at(3, 48) == pytest.approx(3.0)
    assert table.at(8, 128) == pytest.approx(24.0)


# Passes.


@pytest.mark.parametrize(
    ("prompts", "budget", "passes"),
    [
        ([64], 1024, [64]),
        ([500] * 2, 1024, [1000]),
        ([320] * 4, 1024, [1024, 256]),  # the last prompt's first chunk fits the first pass
        ([2000], 1024, [1024, 976]),
        ([100] * 12, 1024, [1000 + 0, 200]),
    ],
)
def test_prompts_are_divided_as_the_scheduler_does(prompts: list[int], budget: int, passes: list[int]) -> None:
    assert prompt_passes(prompts, budget) == passes


def test_a_block_has_a_pass_for_each_token_and_more_for_its_prompts() -> None:
    assert num_passes(Workload(64, 8), 4, BUDGET) == 8
    assert num_passes(Workload(320, 8), 4, BUDGET) == 9
    assert num_passes(Workload(320, 8, shared_tokens=256, num_prefixes=1), 4, BUDGET) == 9


# Predictions.


def test_the_slower_stage_counts() -> None:
    made = profile_with()
    none, half = (predict(made, SIZES, WORK, on_disk(share), budget=BUDGET) for share in (0, 0.5))
    # A step of 4 rows: products, attention, a tenth of the head.
    context = 64 + 8
    head = made.head.at(4)
    compute = made.products.at(4) + made.attention.at(4, context) + head / 10
    assert none.decode_seconds == pytest.approx(15 * 10 * compute)
    assert half.decode_seconds == pytest.approx(15 * 10 * 0.5 * 4 * MIB / 100e6)
    assert half.stages["decode"]["compute"] == pytest.approx(compute)
    assert none.prefill_seconds == pytest.approx(10 * (made.products.at(256) + 4 * made.prompt.at(64)) + head)
    assert none.throughput == pytest.approx(4 * 16 / none.seconds)


def test_reads_and_writes_of_a_disk_take_turns() -> None:
    made, wide = profile_with(), dataclasses.replace(SIZES, hidden_bytes=float(MIB))
    policy = Policy(2, 2, MEMORY, MEMORY, Split((NONE, ALL)))
    found = predict(made, wide, WORK, policy, budget=BUDGET)
    layer = 4 * MIB / 100e6 + 4 * MIB / 50e6
    assert found.decode_seconds == pytest.approx(15 * 10 * layer)
    assert found.prefill_seconds == pytest.approx(10 * 64 * layer)


def test_a_layer_s_requests_take_their_time_for_every_micro_batch() -> None:
    made = profile_with()
    slow = dataclasses.replace(made, disk=dataclasses.replace(made.disk, request_seconds=1.0))
    far = Split((NONE, ALL))
    for cache, hidden, requests in ((MEMORY, MEMORY, (0, 0)), (far, MEMORY, (1, 1)), (MEMORY, far, (2, 2))):
        for micro, count in ((8, 1), (2, 4)):
            policy = Policy(micro, count, MEMORY, cache, hidden)
            fast, found = (predict(each, SIZES, WORK, policy, budget=BUDGET) for each in (made, slow))
            for phase, number in zip(("prefill", "decode"), requests, strict=True):
                more = sum(found.stages[phase].values()) - sum(fast.stages[phase].values())
                assert more == pytest.approx(count * number), (phase, requests)


def test_corrections_have_the_effects_that_they_are_named_for() -> None:
    def seconds(share: float, work: Workload = WORK, **changes: float) -> tuple[float, float]:
        made = profile_with(corrections=Corrections(**changes))
        found = predict(made, SIZES, work, on_disk(share), budget=BUDGET)
        return found.prefill_seconds, found.decode_seconds

    prefill, decode = seconds(0)
    assert seconds(0, prefill=2) == pytest.approx((2 * prefill, decode))
    assert seconds(0, decode=2) == pytest.approx((prefill, 2 * decode))
    assert seconds(0, step_seconds=0.5) == pytest.approx((prefill + 0.5, decode + 15 * 0.5))
    assert seconds(0, sequence_seconds=0.5) == pytest.approx((prefill + 2, decode + 15 * 2))
    assert seconds(0, disk=2, exposed=1) == pytest.approx((prefill, decode))
    assert seconds(1, disk=2)[1] == pytest.approx(2 * seconds(1)[1])
    both = seconds(1, exposed=1)[1]
    assert both == pytest.approx(seconds(1)[1] + decode)
    assert seconds(1, exposed=0.25)[1] == pytest.approx(seconds(1)[1] + 0.25 * decode)


def test_prompts_in_two_passes_read_the_weights_twice() -> None:
    one, two = (predict(profile_with(), SIZES, Workload(tokens, 2), on_disk(1.0), budget=256) for tokens in (64, 128))
    assert two.stages["prefill"]["disk to cpu"] == pytest.approx(3 * one.stages["prefill"]["disk to cpu"])


# A GPU.


def beside(weights: tuple[float, ...], cache: tuple[float, ...] = (1, 0, 0), attended: float = 0.0) -> Policy:
    near = Split((ALL, NONE, NONE))
    return Policy(2, 2, Split(tuple(map(Share, weights))), Split(tuple(map(Share, cache))), near, Share(attended))


def test_the_links_of_a_gpu_and_of_the_disk_are_stages_of_their_own() -> None:
    made = with_device(corrections=Corrections(bus=2.0))
    found = predict(made, SIZES, WORK, beside((0.2, 0.3, 0.5)), budget=BUDGET).stages["decode"]
    assert found["cpu to gpu"] == pytest.approx(0.8 * SIZES.layer_bytes / 0.5e9)
    assert found["disk to cpu"] == pytest.approx(0.5 * SIZES.layer_bytes / 100e6)
    compute = 2 * made.products.at(2) + 2 * made.attention.at(2, 72) + made.head.at(4) / 10
    assert found["compute"] == pytest.approx(compute)
    far = predict(made, SIZES, WORK, beside((1, 0, 0), (0, 1, 0), 1.0), budget=BUDGET).stages["decode"]
    assert far["compute"] == pytest.approx(compute + 2 * made.attention.at(2, 72))
    assert far["cpu to gpu"] == 0
    loaded = predict(made, SIZES, WORK, beside((1, 0, 0), (0, 1, 0)), budget=BUDGET).stages["decode"]
    assert loaded["cpu to gpu"] == pytest.approx(4 * 72 * SIZES.cache_bytes / 0.5e9)


def test_a_gpu_s_memory_has_two_layers_of_what_it_has_not() -> None:
    made = with_device()
    near, far = (
        predict(made, SIZES, WORK, beside(split), budget=BUDGET).memory for split in ((1, 0, 0), (0, 0.4, 0.6))
    )
    layers = SIZES.num_layers * SIZES.layer_bytes
    assert near["gpu"] - far["gpu"] == pytest.approx(layers - 2 * SIZES.layer_bytes)
    assert near["cpu"] == near["disk"] == 0 and far["disk"] == layers, "an image has all weights, or there is none"
    assert far["cpu"] == pytest.approx(0.4 * layers + 2 * 0.6 * SIZES.layer_bytes)


@pytest.mark.parametrize("gpu", [40, 50, 80])
@pytest.mark.parametrize("slow", [1.0, 40.0])
def test_no_placement_of_a_grid_beside_a_gpu_is_faster_than_the_plan(gpu: int, slow: float) -> None:
    """slow: factor on attention on the host, which decides whether it is worth it."""
    made, work = with_device(), Workload(448, 16)
    assert made.device is not None
    lines = tuple(tuple(slow * each for each in line) for line in made.device.far.seconds)
    far = dataclasses.replace(made.device.far, seconds=lines)
    made = dataclasses.replace(made, device=dataclasses.replace(made.device, far=far))
    room = gpu * float(MIB), 1000.0 * MIB, 1000.0 * MIB
    found = plan(made, SIZES, work, room, budget=BUDGET, micro_batches=[1, 4, 8], num_batches=[1, 2])
    shares = [each / 5 for each in range(6)]
    splits = [(a, b, 1 - a - b) for a in shares for b in shares if a + b <= 1 + 1e-9]
    pairs = [(a, 1 - a, 0) for a in shares]
    grid = np.array([
        [*w, *c, *h, attended, 1]
        for w in splits for c in pairs for h in pairs for attended in {0.0, c[1]}
    ])  # fmt: skip
    best_rate, policy = grid_best(made, work, room, grid), found.policy
    # A plan counts more memory than the program.
    assert best_rate > 0 and found.prediction.throughput >= best_rate * 0.99
    assert policy.cache.shares[2] == policy.hidden.shares[2] == 0, "beside a GPU only weights are on the disk"
    assert policy.attended in (0, pytest.approx(policy.cache.shares[1])), "all or nothing is attended to on the host"
    assert all(found.prediction.memory[tier] <= size * (1 + 1e-6) for tier, size in zip(TIERS, room, strict=True))


@pytest.mark.parametrize("cpu", [15.0, 25.0, 60.0])
def test_a_plan_keeps_to_the_memory_of_every_tier(cpu: float) -> None:
    """The host has all of a cache that is not all on the GPU, and buffers for two layers of what is on the disk."""
    sizes = dataclasses.replace(SIZES, matrices=((1.0 * MIB, 3.0 * MIB),) * SIZES.num_layers)
    room = (40.0 * MIB, cpu * MIB, 50.0 * MIB)
    given: Any = {"budget": BUDGET, "micro_batches": [1, 4, 8], "num_batches": [1, 2]}
    for found in plan_all(with_device(), sizes, Workload(448, 16), room, **given):
        policy, memory = found.policy, found.prediction.memory
        assert all(memory[tier] <= size * (1 + 1e-6) for tier, size in zip(TIERS, room, strict=True))
        layers = SIZES.num_layers * SIZES.layer_bytes
        least = policy.weights.shares[1] * layers
        if policy.cache.beyond(0) > 0:
            least += policy.block * 464 * SIZES.cache_bytes * SIZES.num_layers
        if policy.weights.shares[2] > 0:
            tiers = assign_tiers([[round(size) for size in each] for each in sizes.matrices], policy.weights)
            of_disk = [
                sum(size for size, tier in zip(sizes.matrices[0], each, strict=True) if tier == 2) for each in tiers
            ]
            least += 2 * min(size for size in of_disk if size) if any(of_disk) else 0
        assert memory["cpu"] >= least and memory["disk"] == (layers if policy.weights.shares[2] > 0 else 0)


def test_a_window_is_loaded_and_not_attended_to_on_the_host() -> None:
    room = (28.0 * MIB, 1000.0 * MIB, 1000.0 * MIB)
    made = with_device()
    assert made.device is not None
    lines = tuple(tuple(0.1 * each for each in line) for line in made.device.far.seconds)
    far = dataclasses.replace(made.device.far, seconds=lines)
    made = dataclasses.replace(made, device=dataclasses.replace(made.device, far=far))
    for window, attends in ((math.inf, True), (464.0, True), (463.0, False)):
        sizes = dataclasses.replace(SIZES, window=window)
        found = plan(made, sizes, Workload(448, 16), room, budget=BUDGET, micro_batches=[4], num_batches=[2])
        assert (found.policy.attended > 0) == attends


def test_attention_on_the_host_is_planned_where_it_is_worth_it() -> None:
    """A cache that a GPU cannot hold: loaded if the host is slow, attended to where it is if it is fast."""
    work, room = Workload(448, 16), (28.0 * MIB, 1000.0 * MIB, 1000.0 * MIB)
    attended = {}
    for slow in (0.1, 1000.0):
        made = with_device()
        assert made.device is not None
        lines = tuple(tuple(slow * each for each in line) for line in made.device.far.seconds)
        far = dataclasses.replace(made.device.far, seconds=lines)
        made = dataclasses.replace(made, device=dataclasses.replace(made.device, far=far))
        policy = plan(made, SIZES, work, room, budget=BUDGET, micro_batches=[4], num_batches=[2]).policy
        assert policy.cache.beyond(0) > 0
        attended[slow] = policy.attended > 0
    assert attended == {0.1: True, 1000.0: False}


def test_only_weights_leave_a_gpu_where_they_must() -> None:
    tight = (40.0 * MIB, 1000.0 * MIB, 1000.0 * MIB)
    policy = plan(with_device(), SIZES, Workload(448, 16), tight, budget=BUDGET, only_weights=True).policy
    assert policy.cache.shares == policy.hidden.shares == (1, 0, 0) and policy.weights.beyond(0) > 0


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
    monkeypatch.setattr(offload_profile, "has_device", lambda config: True)
    sizes = dataclasses.replace(SIZES, fixed_bytes=4.0 * MIB)
    subject = offload_profile.Subject("tiny", {}, None, EngineConfig(), sizes, 512)
    found = offload_profile.placements(subject)
    assert [pytest.approx(each, abs=1e-3) for each in expected] == [split.shares for split in found]


# The fit.


def test_the_fit_recovers_known_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    made = profile_with()
    truth = Corrections(1.3, 0.8, 1.6, 0.3, 0.004, 0.0005)  # and the bus, which no run without a GPU shows

    def seconds_of(run: Run, corrections: Corrections) -> float:
        work = Workload(run.prompt_tokens, run.output_tokens)
        chosen = dataclasses.replace(made, corrections=corrections)
        return predict(chosen, SIZES, work, on_disk(run.disk_share, run.sequences), budget=run.budget).seconds

    shapes = [(1, 32, 8), (4, 320, 2), (8, 96, 6), (32, 32, 6)]
    blank = [Run(Share(share), *shape, BUDGET, 1.0) for share in (0.0, 0.1, 0.5, 1.0) for shape in shapes]
    runs = [dataclasses.replace(run, seconds=seconds_of(run, truth)) for run in blank]
    found = fit(runs, seconds_of)
    assert [seconds_of(run, found) / run.seconds for run in runs] == pytest.approx([1] * len(runs), rel=0.05)
    monkeypatch.setattr(sys.modules[fit.__module__], "PULL", 1e-4)
    found = fit(runs, seconds_of)
    for name in ("disk", "prefill", "decode", "exposed", "step_seconds", "sequence_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02), found


def test_the_fit_recovers_the_corrections_of_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made, truth = with_device(), Corrections(1.3, 0.8, 1.6, 0.3, 0.004, 0.0005, bus=2.5)
    # So that copies are slower than products.
    sizes = dataclasses.replace(SIZES, layer_bytes=20.0 * MIB, decode=(Scratch(1.0),))
    shapes = [(1, 32, 8), (4, 320, 2), (8, 96, 6), (32, 32, 6)]
    places = [(0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (0.2, 0.8), (1.0, 0.0)]
    blank = [Run(Share(disk), *shape, BUDGET, 1.0, host_share=Share(host)) for disk, host in places for shape in shapes]

    def seconds_of(run: Run, corrections: Corrections) -> float:
        return seconds_of_run(dataclasses.replace(made, corrections=corrections), sizes, run)

    monkeypatch.setattr(sys.modules[fit.__module__], "PULL", 1e-4)
    runs = [dataclasses.replace(run, seconds=seconds_of(run, truth)) for run in blank]
    found = fitted(made, sizes, runs).corrections
    for name in ("disk", "prefill", "decode", "exposed", "step_seconds", "sequence_seconds", "bus"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02), found


def test_one_run_leaves_what_it_does_not_show() -> None:
    made = profile_with()

    def seconds_of(run: Run, corrections: Corrections) -> float:
        return corrections.disk

    found = fit([dataclasses.replace(made.runs[0], seconds=2.0)], seconds_of)
    assert 1.9 < found.disk <= 2
    assert (found.prefill, found.decode) == pytest.approx((1, 1), abs=1e-3)


def test_the_scratch_of_products_is_what_explains_the_largest_memory() -> None:
    made, rows = profile_with(), 256
    sizes = dataclasses.replace(SIZES, decode=(Scratch(1000.0), Scratch(3000.0)))

    def memory(share: float, shape: tuple[int, int, int], factor: float) -> float:
        chosen = dataclasses.replace(made, corrections=Corrections(scratch=factor))
        work = Workload(shape[1], shape[2])
        return predict(chosen, sizes, work, on_disk(share, shape[0]), budget=BUDGET).memory["cpu"]

    def shape_of(run: Run) -> tuple[int, int, int]:
        return run.sequences, run.prompt_tokens, run.output_tokens

    shapes = [(1, 32, 8), (4, 64, 2)]
    runs = [Run(Share(share), *shape, BUDGET, 1.0) for share in (0.0, 0.5, 1.0) for shape in shapes]
    runs = [dataclasses.replace(run, memory=memory(run.disk_share, shape_of(run), 2.5)) for run in runs]
    assert memory(0.0, (4, 64, 2), 2.5) - memory(0.0, (4, 64, 2), 1.0) == pytest.approx(1.5 * 3000 * rows)
    assert fitted(made, sizes, runs).corrections.scratch == pytest.approx(2.5)


def test_memory_has_whole_matrices_in_two_buffers_of_the_largest_layer() -> None:
    """Of ten layers with two matrices each, half of the bytes are on the disk: in each layer one, 1 or 3 MiB."""
    layer = SIZES.layer_bytes / MIB
    matrices = ((0.25 * layer * MIB, 0.75 * layer * MIB),) * SIZES.num_layers
    made, sizes = profile_with(), dataclasses.replace(SIZES, matrices=matrices)
    work, policy = Workload(62, 2), on_disk(0.5, 1)
    before, after = (predict(made, each, work, policy, budget=BUDGET).memory["cpu"] for each in (SIZES, sizes))
    tiers = assign_tiers([[round(size) for size in each] for each in matrices], policy.weights)
    loaded = [sum(size for size, tier in zip(matrices[0], each, strict=True) if tier) for each in tiers]
    shares = SIZES.num_layers * SIZES.layer_bytes * 0.5 + 2 * 0.5 * SIZES.layer_bytes
    assert max(loaded) > 0.5 * SIZES.layer_bytes
    whole = SIZES.num_layers * SIZES.layer_bytes - sum(loaded) + 2 * max(loaded)
    assert after - before == pytest.approx(whole - shares)


def test_what_a_product_multiplies_together_is_placed_together() -> None:
    shape = tiny_shape(num_layers=2)
    found = matrices_of(shape, lambda name, size: float(math.prod(size)), lambda name: "plain")
    hidden, width = shape.hidden_size, shape.q_size + 2 * shape.kv_size
    assert found == ((hidden * width, shape.q_size * hidden, 2 * shape.ffn_size * hidden, shape.ffn_size * hidden),) * 2
    mixed = matrices_of(shape, lambda name, size: 1.0, lambda name: "Q6_K" if ".v." in name else "Q4_K")
    assert mixed == ((2.0, 1.0, 1.0, 2.0, 1.0),) * 2


# Plans.

ROOM = (100.0 * MIB, 1000.0 * MIB)


@pytest.mark.parametrize("memory", [34, 48, 64])
@pytest.mark.parametrize("exposed", [0.0, 0.4])
def test_no_placement_of_a_grid_is_faster_than_the_plan(memory: int, exposed: float) -> None:
    made = profile_with(corrections=Corrections(exposed=exposed, step_seconds=0.001))
    room = memory * float(MIB), 1000.0 * MIB
    found = plan(made, SIZES, WORK, room, budget=BUDGET, micro_batches=[1, 4, 8], num_batches=[1, 2])
    shares = [each / 10 for each in range(11)]
    grid = np.array(
        [[1 - w, w, 1 - c, c, 1 - h, h, 0, 1] for w, c, h in itertools.product(shares, repeat=3)]
    )  # as CostModel.vector
    best = grid_best(made, WORK, room, grid)
    assert best > 0
    assert found.prediction.throughput >= best * (1 - 1e-6)
    assert found.prediction.memory["cpu"] <= room[0] * (1 + 1e-6)


def test_of_equal_placements_the_one_that_moves_least_is_found() -> None:
    """With memory for all and a disk that keeps up, every placement takes the time of the products."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        layer, cache, hidden = 10 ** rng.uniform((4, 2, 2), (6, 3.5, 3.5))
        sizes = dataclasses.replace(SIZES, layer_bytes=layer, cache_bytes=cache, hidden_bytes=hidden)
        work = Workload(float(rng.integers(10, 400)), float(rng.integers(4, 64)))
        room = 10 ** rng.uniform(9.5, 10.5), 10 ** rng.uniform(9.5, 11)
        given = {"micro_batches": [int(rng.integers(1, 32))], "num_batches": [int(rng.integers(1, 5))]}
        policy = plan(profile_with(), sizes, work, room, budget=BUDGET, **given).policy
        assert policy.weights == policy.cache == policy.hidden == MEMORY, f"seed {seed}"


def test_only_weights_leave_cache_and_activations_in_memory() -> None:
    made, tight = profile_with(), (26.0 * MIB, 1000.0 * MIB)
    free = plan(made, SIZES, Workload(448, 16), tight, budget=BUDGET)
    bound = plan(made, SIZES, Workload(448, 16), tight, budget=BUDGET, only_weights=True)
    assert free.policy.cache.shares[1] > 0
    assert bound.policy.cache.shares == (1, 0) and bound.policy.hidden.shares == (1, 0)
    assert bound.policy.num_batches == 1
    # Activations of 67 MB in a pass, or buffers of 26 MB for four sequences.
    wide = dataclasses.replace(SIZES, hidden_bytes=65536.0)
    given: Any = {"budget": BUDGET, "micro_batches": [1], "num_batches": [16]}
    assert plan(made, wide, Workload(100, 16), (66.0 * MIB, 2000.0 * MIB), **given).policy.hidden.shares[1] > 0
    with pytest.raises(PlanError, match="cpu lacks"):
        plan(made, wide, Workload(100, 16), (66.0 * MIB, 2000.0 * MIB), only_weights=True, **given)
    assert bound.prediction.throughput <= free.prediction.throughput * (1 + 1e-6)


def test_activations_are_those_of_a_pass_and_of_its_buffers() -> None:
    made, wide = profile_with(), dataclasses.replace(SIZES, hidden_bytes=4096.0)

    def memory(hidden: Split, tokens: int) -> float:
        found = predict(made, wide, Workload(tokens, 2), Policy(2, 8, MEMORY, MEMORY, hidden), budget=BUDGET)
        return found.memory["cpu"] - 16 * -(-(tokens + 2) // 64) * 64 * 1024 * 10  # the cache

    assert memory(MEMORY, 480) == pytest.approx(memory(MEMORY, 64)), "16 x 64 rows fill a pass"
    far = Split((NONE, ALL))
    assert memory(MEMORY, 64) - memory(far, 64) == pytest.approx(4096 * (16 * 64 - 4 * 2 * 64))
    assert memory(far, 32) - memory(far, 16) == pytest.approx(4096 * 4 * 2 * 16)


def test_too_little_memory_is_said_in_bytes() -> None:
    with pytest.raises(PlanError, match="cpu lacks"):
        plan(profile_with(), SIZES, WORK, (4.0 * MIB, 1000.0 * MIB), budget=BUDGET)
    with pytest.raises(ConfigError, match="scheduler.token_budget 1024"):
        plan(profile_with(), SIZES, WORK, ROOM, budget=BUDGET, micro_batches=[1000])
    with pytest.raises(ConfigError, match=r"scheduler\.max_running, 8"):
        plan(profile_with(), SIZES, WORK, ROOM, budget=BUDGET, micro_batches=[16], most=8)


def test_slack_leaves_memory_free() -> None:
    made, room = profile_with(), (40.0 * MIB, 1000.0 * MIB)
    needs = [
        plan(made, SIZES, WORK, room, budget=BUDGET, micro_batches=[4], num_batches=[1], slack=slack).prediction.memory
        for slack in (1.0, 0.8)
    ]
    assert needs[0]["cpu"] == pytest.approx(room[0], rel=0.01)
    assert needs[1]["cpu"] == pytest.approx(0.8 * room[0], rel=0.01)


# Measuring.


def test_a_throttle_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "FILE_BYTES", 8 * MIB)
    monkeypatch.setattr(hardware, "READ_SIZES", (256 << 10,))
    monkeypatch.setattr(hardware, "READ_THREADS", (1, 2))
    monkeypatch.setattr(quiet, "MOST_TRIES", 1)
    found = hardware.measure_disk(tmp_path, 32e6, 1)
    assert [(read.request_bytes, read.threads) for read in found.reads] == [(256 << 10, 1), (256 << 10, 2)]
    for rate in (found.streamed, found.writes, *(read.rate for read in found.reads)):
        # A throttle lets 0.05 s more pass, and a busy machine wakes late.
        assert 8e6 < rate.bandwidth < 45e6
    assert not list(tmp_path.iterdir()) and 0 < found.request_seconds < 1


def test_the_quietest_samples_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "QUIET_CORES", 0.1)
    monkeypatch.setattr(quiet.torch, "get_num_threads", lambda: 1000)
    loads = iter([1.5, 0.0, 0.3, 0.05, 2.0])
    values = iter([9.0, 1.0, 5.0, 2.0, 9.0])

    class Load:
        def cores(self) -> float:
            return next(loads)

    monkeypatch.setattr(quiet, "OtherLoad", Load)
    assert quiet.quietest(lambda: next(values), 2) == [1.0, 2.0]
    loads, values = iter([0.5, 0.4, 0.3, 0.2]), iter([4.0, 3.0, 2.0, 1.0])
    assert quiet.quietest(lambda: next(values), 1) == [1.0]


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels import load

    load()  # from the user's cache, before that is another one
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("disk_share", [0.5, 1.0])
def test_a_generation_reads_what_its_passes_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_share: float
) -> None:
    monkeypatch.setattr(offload_profile, "QUIET_SECONDS", 0.05)
    model, budget = str(save_tiny(tmp_path / "model", num_hidden_layers=4)), 256
    options = {
        "cache.memory": "64MiB", "model.dtype": "bfloat16", "scheduler.token_budget": budget,
        "scheduler.max_running": 64,
    }  # fmt: skip
    with offload_profile.generator(model, options, None, on_disk(disk_share).weights) as made:
        made.run(1, 8, 2)
        streamed = made.model.weights.streamed_bytes
        assert streamed > 0
        for sequences, prompt, output in ((1, 5, 3), (3, 100, 4), (20, 70, 2), (2, 400, 3)):
            timing = made.run(sequences, prompt, output)
            passes = num_passes(Workload(prompt, output), sequences, budget)
            assert timing.bytes_read == passes * streamed and timing.seconds > 0


@pytest.mark.usefixtures("cache_folder")
def test_the_policy_of_a_generation_overrides_settings(tmp_path: Path) -> None:
    model, file = str(save_tiny(tmp_path / "model", num_hidden_layers=4)), tmp_path / "quire.toml"
    file.write_text(
        '[offload]\nmode = "auto"\nmemory = "8MiB"\ncache = "64MiB"\nmicro_batch = 2\nprofile = "x.json"\n'
        "overlap = false\n"
    )
    options = {"cache.memory": "16MiB", "model.dtype": "bfloat16"}
    with offload_profile.generator(model, options, file, on_disk(0.5).weights) as made:
        assert made.run(3, 5, 2).seconds > 0
        assert "cache_near" not in made.llm.stats()["offload"] and made.model.overlaps
        assert not isinstance(made.llm.engine.runner.attention, BlockAttention)


@pytest.mark.usefixtures("cache_folder")
def test_prompts_that_share_wait_for_the_first_of_them(tmp_path: Path) -> None:
    model, file, budget = str(save_tiny(tmp_path / "model", num_hidden_layers=4)), tmp_path / "policy.json", 256
    file.write_text(policy_text(on_disk(1.0, 8), TIERS[1:]))
    options = {
        "cache.memory": "64MiB", "model.dtype": "bfloat16", "offload.mode": str(file), "scheduler.token_budget": budget,
    }  # fmt: skip
    with LLM(model, options) as llm:
        for sequences, shared, own, output in ((4, 64, 5, 3), (6, 192, 100, 2), (1, 64, 5, 3)):
            first = 10 * sequences
            prompts = [[first] * shared + [first + 1 + number] * own for number in range(sequences)]
            before = llm.engine.scheduler.counters.steps
            params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
            llm.generate([{"prompt_token_ids": each} for each in prompts], params)
            steps = llm.engine.scheduler.counters.steps - before
            assert steps == num_passes(Workload(shared + own, output, shared, 1), sequences, budget)


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_layers_of_every_family_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(hardware, "COLD_BYTES", 0)
    with open_model(save_tiny(tmp_path / "model", family, num_hidden_layers=3)) as checkpoint:
        timer = hardware.LayerTimer(checkpoint, torch.bfloat16, "native", 1e6)
        assert timer.num_layers == 2 < checkpoint.shape.num_layers
    assert timer.products(5) > 0 and timer.head(3) > 0


def test_layers_are_timed_with_the_operations_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "COLD_BYTES", 0)
    with open_model(save_tiny(tmp_path / "model", num_hidden_layers=3)) as checkpoint:
        timer = hardware.LayerTimer(checkpoint, torch.float32, "native", 1e6, ops=TorchOps())
    assert timer.products(5) > 0 and timer.head(3) > 0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time is that of one call."""
    monkeypatch.setattr(hardware, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(quiet, "MOST_TRIES", 1)


@pytest.mark.parametrize("codec", ["dense", "g4"])
def test_attention_is_timed_on_the_engine_s_pages(tmp_path: Path, codec: str, short: None) -> None:
    model = save_tiny(tmp_path / "model", head_dim=64, max_position_embeddings=600)
    options = {"cache.memory": "64MiB", "cache.codec": codec, "cache.check": False}
    with LLM(str(model), options) as llm:
        free = llm.stats()["cache"]["bytes_free"]
        attention: Any = llm.engine.runner.attention
        timer = hardware.AttentionTimer(attention.clone(), attention.spec, 600)
        assert timer.decode(3, 200) > 0 and timer.prompt(130) > 0
        assert timer.decoding(1).contexts == (32, 480) and timer.prompts(1).counts == (32, 112, 480)
        assert llm.stats()["cache"]["bytes_free"] == free
        llm.engine.scheduler.manager.check()


@pytest.mark.parametrize("codec", ["dense", "g4"])
def test_attention_on_the_host_is_timed_with_what_crosses(tmp_path: Path, codec: str, short: None) -> None:
    """The engine's own memory has a device's place."""
    model = save_tiny(tmp_path / "model", head_dim=64, max_position_embeddings=600)
    options = {"cache.memory": "64MiB", "cache.codec": codec, "cache.check": False}
    with LLM(str(model), options) as llm:
        attention: Any = llm.engine.runner.attention
        timer = hardware.host_timer(attention.spec, 600, 48 * MIB)
        assert timer.decode(3, 200) > 0
        beside: Any = timer._beside
        spec = attention.spec
        heads = 3 * spec.num_layers * spec.num_kv_heads * spec.group_size
        there, back = spec.head_dim * spec.dtype.itemsize, spec.head_dim * spec.dtype.itemsize + 4
        assert beside.bytes_crossed == heads * (there + back), "queries; outputs and their log-sum-exp"
        assert timer.decoding(1).contexts == (32, 480)


def test_copies_to_a_device_are_timed_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "COPY_BYTES", MIB)
    monkeypatch.setattr(quiet, "MOST_TRIES", 1)
    assert all(rate.bandwidth > 1e6 for rate in hardware.measure_bus(torch.device("cpu"), 1))


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: None) -> Callable[..., tuple[str, Path]]:
    """Measures a tiny model in seconds. Returns its folder and the profile."""
    for name, value in {
        "FILE_BYTES": 8 * MIB, "READ_SIZES": (MIB,), "READ_THREADS": (1,), "READ_SECONDS": 0.02, "COPY_BYTES": MIB,
        "SAMPLE_SECONDS": 0.0, "COLD_BYTES": 0, "YARDSTICK": 32,
    }.items():  # fmt: skip
        monkeypatch.setattr(hardware, name, value)
    monkeypatch.setattr(quiet, "MOST_TRIES", 1)
    monkeypatch.setattr(offload_profile, "QUIET_SECONDS", 0.03)
    model, file = save_tiny(tmp_path / "model"), tmp_path / "machine.json"

    def measure(*words: str) -> tuple[str, Path]:
        given = ["--rounds", "1", "--cache.memory", "16MiB", "--model.dtype", "bfloat16", *words]
        assert main(["plan", "hardware", str(model), "--output", str(file), *given]) == 0
        return str(model), file

    return measure


SAME = ["--model.dtype", "bfloat16"]


def test_a_machine_is_measured_and_planned_for(
    quick: Callable[..., tuple[str, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = quick()
    told = capsys.readouterr().out
    assert "weights are read at" in told and "ms a layer" in told and "fitted: " in told
    made = read_profile(file)
    config = EngineConfig.from_options({"model.dtype": "bfloat16", "offload.mode": "auto"}, None)
    shape, sizes = sizes_from(model, config, Workload(1, 1))
    made.check(conditions_of(model, shape, config, sizes))
    assert made.products.counts == hardware.ROWS and made.conditions.dtype == "bfloat16"
    shares = sorted({run.disk_share for run in made.runs})
    assert len(shares) == 3 and shares[0] == 0 and shares[-1] == 1
    assert all(run.predicted > 0 for run in made.runs)

    output = tmp_path / "policy.json"
    words = ["--hardware", str(file), "--input-tokens", "64", "--output-tokens", "8", "--json", *SAME]
    assert main(["plan", "offload", model, *words, "--only-weights", "--output", str(output)]) == 0
    found = json.loads(capsys.readouterr().out)
    policy = read_policy(output, TIERS[1:])
    assert policy.block == found["micro_batch"] and found["throughput"] > 0
    assert found["weights"] == {"cpu": 1.0, "disk": 0.0}  # a tiny model fits
    options = {"model.dtype": "bfloat16", "cache.memory": "16MiB", "offload.mode": str(output)}
    with LLM(model, options) as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.dtype", "float32"], "model.dtype bfloat16, not float32"),
        ([*SAME, "--model.weights", "g4"], "model.weights native, not g4"),
        ([*SAME, "--cache.codec", "g4"], "cache.codec dense, not g4"),
        ([*SAME, "--offload.disk_bandwidth", "100MB"], "offload.disk_bandwidth auto, not 95.37MiB"),
        ([*SAME, "--form", "max"], "--form is for --hardware t4"),
        ([*SAME, "--plan.gpu", "1GiB"], "--plan.gpu has no effect"),
        ([*SAME, "--plan.cpu", "1MiB", "--micro-batch", "64", "--input-tokens", "64"], "cpu lacks"),
        ([*SAME, "--input-tokens", "1000"], "are 1032 in all; this model serves at most 512"),
    ],
)
def test_a_profile_of_something_else_is_refused(
    made_profile: tuple[str, Path], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = made_profile
    assert main(["plan", "offload", model, "--hardware", str(file), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def made_profile(tmp_path: Path) -> tuple[str, Path]:
    """A tiny model, and a made-up profile of it."""
    model = str(save_tiny(tmp_path / "model"))
    config = EngineConfig.from_options({"model.dtype": "bfloat16", "offload.mode": "auto"}, None)
    shape, sizes = sizes_from(model, config, Workload(1, 1))
    made = profile_with(conditions=conditions_of(model, shape, config, sizes))
    file = tmp_path / "machine.json"
    file.write_text(profile_text(made))
    return model, file


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs --output FILE"),
        (["--output", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        (["--output", "x.json", "--plan.cpu", "1GiB"], "--plan.cpu is for quire plan offload"),
        (["--output", "x.json", "--slack", "0.5"], "--slack is for quire plan offload, not for hardware"),
        (["--output", "x.json", "--retain.budget", "0.5"], "measured without retain and tiers"),
    ],
)
def test_wrong_arguments_of_plan_hardware_are_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny(tmp_path / "model")
    assert main(["plan", "hardware", str(model), *words]) == 2
    assert message in capsys.readouterr().err
