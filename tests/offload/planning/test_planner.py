"""Plans on a profile: what each stage takes, what fits, and the placements that are found."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.measure import offload_profile
from quire.offload.planning.costs import BlockWorkload
from quire.offload.planning.planner import block_passes, model_of, plan_all, predict, prompt_passes
from quire.offload.planning.profile import Corrections, Profile
from quire.offload.planning.program import PlanError
from quire.offload.planning.sizes import matrices_of
from quire.offload.policy import OffloadPolicy, policy_text
from quire.offload.units import ALL, NONE, TIERS, Split
from quire.offload.weight_placement import assign_tiers
from tests.offload.planning.test_profile import (
    BUDGET,
    MEMORY,
    MIB,
    SIZES,
    beside,
    on_disk,
    plan,
    profile_with,
    with_device,
)
from tests.offload.planning.test_profile import cache_folder as cache_folder
from tests.offload.planning.test_program import grid_best
from tests.tiny_models import save_tiny, tiny_shape

WORK = BlockWorkload(64, 16)


def rate_of_grid(made: Profile, work: BlockWorkload, room: tuple[float, ...], step: float) -> float:
    """Tokens per second of the best placement of a grid that fits; of six block sizes."""
    sizes = itertools.product((1, 4, 8), (1, 2))
    models = [model_of(made, SIZES, work, room, *size, budget=BUDGET) for size in sizes]
    return max(model.block * work.output_tokens / grid_best(model, step) for model in models)


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


def test_the_prompts_of_a_block_wait_for_the_one_that_computes_what_they_share() -> None:
    assert block_passes(BlockWorkload(64, 8), 4, BUDGET) == [256]
    assert block_passes(BlockWorkload(320, 8), 4, BUDGET) == [1024, 256]
    assert block_passes(BlockWorkload(320, 8, shared_tokens=256, num_prefixes=1), 4, BUDGET) == [320, 192]


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
    policy = OffloadPolicy(2, 2, MEMORY, MEMORY, Split((NONE, ALL)))
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
            policy = OffloadPolicy(micro, count, MEMORY, cache, hidden)
            fast, found = (predict(each, SIZES, WORK, policy, budget=BUDGET) for each in (made, slow))
            for phase, number in zip(("prefill", "decode"), requests, strict=True):
                more = sum(found.stages[phase].values()) - sum(fast.stages[phase].values())
                assert more == pytest.approx(count * number), (phase, requests)


def test_corrections_have_the_effects_that_they_are_named_for() -> None:
    def seconds(share: float, work: BlockWorkload = WORK, **changes: float) -> tuple[float, float]:
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
    one, two = (
        predict(profile_with(), SIZES, BlockWorkload(tokens, 2), on_disk(1.0), budget=256) for tokens in (64, 128)
    )
    assert two.stages["prefill"]["disk to cpu"] == pytest.approx(3 * one.stages["prefill"]["disk to cpu"])


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
@pytest.mark.parametrize("slow", [2.0, 80.0])
def test_no_placement_of_a_grid_beside_a_gpu_is_faster_than_the_plan(gpu: int, slow: float) -> None:
    """slow: factor on attention on the host, which decides whether it is worth it."""
    made, work = with_device(slow), BlockWorkload(448, 16)
    room = gpu * float(MIB), 1000.0 * MIB, 1000.0 * MIB
    found = plan(made, SIZES, work, room, budget=BUDGET, micro_batches=[1, 4, 8], num_batches=[1, 2])
    best_rate, policy = rate_of_grid(made, work, room, 0.2), found.policy
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
    for found in plan_all(with_device(), sizes, BlockWorkload(448, 16), room, **given):
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
    made = with_device(0.2)
    for window, attends in ((math.inf, True), (464.0, True), (463.0, False)):
        sizes = dataclasses.replace(SIZES, window=window)
        found = plan(made, sizes, BlockWorkload(448, 16), room, budget=BUDGET, micro_batches=[4], num_batches=[2])
        assert (found.policy.attended > 0) == attends


def test_attention_on_the_host_is_planned_where_it_is_worth_it() -> None:
    """A cache that a GPU cannot hold: loaded if the host is slow, attended to where it is if it is fast."""
    work, room = BlockWorkload(448, 16), (28.0 * MIB, 1000.0 * MIB, 1000.0 * MIB)
    attended = {}
    for slow in (0.2, 2000.0):
        policy = plan(with_device(slow), SIZES, work, room, budget=BUDGET, micro_batches=[4], num_batches=[2]).policy
        assert policy.cache.beyond(0) > 0
        attended[slow] = policy.attended > 0
    assert attended == {0.2: True, 2000.0: False}


def test_only_weights_leave_a_gpu_where_they_must() -> None:
    tight = (40.0 * MIB, 1000.0 * MIB, 1000.0 * MIB)
    policy = plan(with_device(), SIZES, BlockWorkload(448, 16), tight, budget=BUDGET, only_weights=True).policy
    assert policy.cache.shares == policy.hidden.shares == (1, 0, 0) and policy.weights.beyond(0) > 0


def test_memory_has_whole_matrices_in_two_buffers_of_the_largest_layer() -> None:
    """Of ten layers with two matrices each, half of the bytes are on the disk: in each layer one, 1 or 3 MiB."""
    layer = SIZES.layer_bytes / MIB
    matrices = ((0.25 * layer * MIB, 0.75 * layer * MIB),) * SIZES.num_layers
    made, sizes = profile_with(), dataclasses.replace(SIZES, matrices=matrices)
    work, policy = BlockWorkload(62, 2), on_disk(0.5, 1)
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


ROOM = (100.0 * MIB, 1000.0 * MIB)


@pytest.mark.parametrize("memory", [34, 48, 64])
@pytest.mark.parametrize("exposed", [0.0, 0.4])
def test_no_placement_of_a_grid_is_faster_than_the_plan(memory: int, exposed: float) -> None:
    made = profile_with(corrections=Corrections(exposed=exposed, step_seconds=0.001))
    room = memory * float(MIB), 1000.0 * MIB
    found = plan(made, SIZES, WORK, room, budget=BUDGET, micro_batches=[1, 4, 8], num_batches=[1, 2])
    best = rate_of_grid(made, WORK, room, 0.1)
    assert best > 0
    assert found.prediction.throughput >= best * (1 - 1e-6)
    assert found.prediction.memory["cpu"] <= room[0] * (1 + 1e-6)


def test_of_equal_placements_the_one_that_moves_least_is_found() -> None:
    """With memory for all and a disk that keeps up, every placement takes the time of the products."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        layer, cache, hidden = 10 ** rng.uniform((4, 2, 2), (6, 3.5, 3.5))
        sizes = dataclasses.replace(SIZES, layer_bytes=layer, cache_bytes=cache, hidden_bytes=hidden)
        work = BlockWorkload(float(rng.integers(10, 400)), float(rng.integers(4, 64)))
        room = 10 ** rng.uniform(9.5, 10.5), 10 ** rng.uniform(9.5, 11)
        given = {"micro_batches": [int(rng.integers(1, 32))], "num_batches": [int(rng.integers(1, 5))]}
        policy = plan(profile_with(), sizes, work, room, budget=BUDGET, **given).policy
        assert policy.weights == policy.cache == policy.hidden == MEMORY, f"seed {seed}"


def test_only_weights_leave_cache_and_activations_in_memory() -> None:
    made, tight = profile_with(), (26.0 * MIB, 1000.0 * MIB)
    free = plan(made, SIZES, BlockWorkload(448, 16), tight, budget=BUDGET)
    bound = plan(made, SIZES, BlockWorkload(448, 16), tight, budget=BUDGET, only_weights=True)
    assert free.policy.cache.shares[1] > 0
    assert bound.policy.cache.shares == (1, 0) and bound.policy.hidden.shares == (1, 0)
    assert bound.policy.num_batches == 1
    # Activations of 67 MB in a pass, or buffers of 26 MB for four sequences.
    wide = dataclasses.replace(SIZES, hidden_bytes=65536.0)
    given: Any = {"budget": BUDGET, "micro_batches": [1], "num_batches": [16]}
    assert plan(made, wide, BlockWorkload(100, 16), (66.0 * MIB, 2000.0 * MIB), **given).policy.hidden.shares[1] > 0
    with pytest.raises(PlanError, match="cpu lacks"):
        plan(made, wide, BlockWorkload(100, 16), (66.0 * MIB, 2000.0 * MIB), only_weights=True, **given)
    assert bound.prediction.throughput <= free.prediction.throughput * (1 + 1e-6)


def test_activations_are_those_of_a_pass_and_of_its_buffers() -> None:
    made, wide = profile_with(), dataclasses.replace(SIZES, hidden_bytes=4096.0)

    def memory(hidden: Split, tokens: int) -> float:
        found = predict(
            made, wide, BlockWorkload(tokens, 2), OffloadPolicy(2, 8, MEMORY, MEMORY, hidden), budget=BUDGET
        )
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
    config = EngineConfig.from_options(options)
    with offload_profile.generator(model, config, on_disk(disk_share).weights) as made:
        made.run(1, 8, 2)
        streamed = made.model.weights.streamed_bytes
        assert streamed > 0
        for sequences, prompt, output in ((1, 5, 3), (3, 100, 4), (20, 70, 2), (2, 400, 3)):
            timing = made.run(sequences, prompt, output)
            passes = len(block_passes(BlockWorkload(prompt, output), sequences, budget)) + output - 1
            assert timing.bytes_read == passes * streamed and timing.seconds > 0


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
            work = BlockWorkload(shared + own, output, shared, 1)
            assert steps == len(block_passes(work, sequences, budget)) + output - 1
