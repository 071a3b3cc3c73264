"""Plans of a batch: the mean request, the policy and its settings, and a batch that runs as planned."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli import main
from quire.config import EngineConfig
from quire.engine.build import resolve
from quire.errors import ConfigError
from quire.offload.planning.batches import BatchPlan, plan_batch, workload_of
from quire.offload.planning.costs import BlockWorkload
from quire.offload.planning.profile import profile_text, read_profile
from quire.offload.planning.subject import Subject
from quire.offload.policy import policy_text
from quire.offload.units import Share, Split
from tests.offload.planning.test_profile import profile_with
from tests.tiny_models import save_tiny

SETTINGS = {"model.dtype": "float32", "runtime.threads": 1, "offload.mode": "auto", "offload.disk_bandwidth": 100 << 20}


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return sorted([generator.randrange(3, 250) for _ in range(generator.randrange(5, 150))] for _ in range(count))


def test_the_mean_request_of_a_batch() -> None:
    found = workload_of([[1] * 10, [2] * 30], [4, 8])
    assert found == BlockWorkload(20, 6)


def test_prefixes_are_shared_in_whole_chunks() -> None:
    """130 tokens in common are two chunks. 64 tokens that are all of a prompt are computed."""
    first, second = list(range(130)), [9] * 64
    prompts = [[*first, 5], [*first, 6, 7], second, second]
    found = workload_of(prompts, [1] * 4)
    assert found.num_prefixes == 1
    assert found.computed_tokens(4) == pytest.approx(sum(map(len, prompts)) - 128)
    assert workload_of(prompts[:2], [1, 1]).shared_tokens == 128


def test_retention_keeps_its_share() -> None:
    found = workload_of([[1] * 10], [4], Share(0.25))
    assert found.kept == found.growth == 0.25


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return save_tiny(path, num_hidden_layers=6, hidden_size=128, intermediate_size=256, num_attention_heads=4)


@pytest.fixture
def profile(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from quire.kernels import load

    load()  # from the user's cache, before that is another one
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = profile_with(conditions=Subject.of(str(model), EngineConfig.from_options(SETTINGS)).conditions())
    made = dataclasses.replace(made, disk=dataclasses.replace(made.disk, folder=str(tmp_path)))
    file = tmp_path / "machine.json"
    file.write_text(profile_text(made))
    return file


def plan_of(model: Path, profile: Path, prompts: list[list[int]], outputs: list[Any], **more: Any) -> BatchPlan:
    settings = {**SETTINGS, "offload.profile": str(profile), **more}
    plan = plan_batch(str(model), EngineConfig.from_options(settings), prompts, outputs)
    assert plan is not None
    return plan


def test_prompts_that_the_model_refuses_are_not_planned_for(model: Path, profile: Path) -> None:
    settings = {**SETTINGS, "offload.profile": str(profile), "model.max_context": 128}
    config, prompts = EngineConfig.from_options(settings), [[5] * 200, [5] * 100]
    plan = plan_batch(str(model), config, prompts, [None, 90])
    assert plan is not None and plan.policy.block == 1 and plan.settings["model.max_context"] == 128
    assert plan_batch(str(model), config, prompts[:1], [1]) is None
    assert plan_batch(str(model), config, [[], *prompts[:1]], [1, 1]) is None
    assert plan_batch(str(model), config, [], []) is None


def test_a_plan_keeps_to_the_limits_that_are_set(model: Path, profile: Path) -> None:
    prompts, tight = prompts_of(40), {"offload.memory": 7 << 20}
    assert plan_of(model, profile, prompts, [10] * 40, **tight).policy.block > 4
    assert plan_of(model, profile, prompts, [10] * 40, **tight, **{"scheduler.max_running": 4}).policy.block <= 4
    # The model takes 100 tokens, which are no whole chunks.
    plan = plan_of(model, profile, [[5] * 90], [None], **{"model.max_context": 100})
    assert plan.settings["model.max_context"] == 100


def test_memory_for_all_leaves_nothing_on_the_disk(model: Path, profile: Path) -> None:
    prompts = prompts_of(20)
    plan = plan_of(model, profile, prompts, [10] * 20)
    assert plan.is_in_memory and plan.policy.block == 20
    longest = max(map(len, prompts)) + 10
    assert plan.settings["model.max_context"] == -(-longest // 64) * 64


def test_less_memory_puts_more_on_the_disk_and_is_predicted_to_be_slower(model: Path, profile: Path) -> None:
    prompts, plans = prompts_of(40), []
    for memory in (64, 8, 4):
        plans.append(plan_of(model, profile, prompts, [10] * 40, **{"offload.memory": memory << 20}))
        assert plans[-1].prediction.memory["cpu"] <= memory << 20
    rates = [plan.rate(40, 400) for plan in plans]
    assert plans[0].is_in_memory and not plans[2].is_in_memory and rates == sorted(rates, reverse=True)


def test_blocks_are_chosen_for_the_lines_that_there_are(model: Path, profile: Path) -> None:
    """21 lines in blocks of 20 would take two blocks."""
    plan = plan_of(model, profile, prompts_of(21), [10] * 21)
    assert plan.policy.block == 21
    seconds = plan.prediction.seconds
    assert plan.rate(21, 210) == pytest.approx(210 / seconds) and plan.rate(22, 220) == pytest.approx(110 / seconds)


@pytest.mark.parametrize("setting", [{"cache.sparse_values": 0.5}, {"retain.budget": 0.5}])
def test_a_cache_that_must_be_in_memory_is_planned_there(model: Path, profile: Path, setting: dict[str, Any]) -> None:
    prompts, tight = [[token] * 400 for token in range(8)], {"offload.memory": 11 << 19}
    assert plan_of(model, profile, prompts, [10] * 8, **tight).policy.cache.shares[1] > 0
    plan = plan_of(model, profile, prompts, [10] * 8, **tight, **setting)
    assert plan.policy.cache.shares[1] == 0


def test_without_sharing_every_prompt_is_computed_and_stored(model: Path, profile: Path) -> None:
    prompts = [[7] * 400] * 8
    seconds = [
        plan_of(model, profile, prompts, [10] * 8, **{"cache.share": share}).prediction.seconds
        for share in (True, False)
    ]
    assert seconds[1] > 2 * seconds[0]


def test_room_on_the_disk_moves_no_cache_that_is_planned_in_memory(model: Path, profile: Path) -> None:
    memory = {"offload.memory": 4 << 20, "offload.cache": 64 << 20, "cache.sparse_values": 0.5}
    plan = plan_of(model, profile, [[5] * 20, [6] * 20], [10] * 2, **memory)
    assert plan.policy.weights.shares[1] > 0 and plan.policy.cache.shares[1] == 0
    assert plan.settings["offload.cache"] is None


def test_what_cannot_be_planned_is_refused(model: Path, profile: Path) -> None:
    with pytest.raises(ConfigError, match="no placement fits offload.memory: .*cpu lacks"):
        plan_of(model, profile, prompts_of(4), [10] * 4, **{"offload.memory": 1 << 20})
    with pytest.raises(ConfigError, match="no placement fits offload.memory: .*cpu lacks"):
        plan_of(model, profile, prompts_of(4), [10] * 4, **{"offload.memory": 0})
    on_disk = plan_of(model, profile, prompts_of(12), [10] * 12, **{"offload.memory": 3 << 20})
    assert on_disk.policy.cache.beyond(0) > 0
    changes = {"offload.memory": 3 << 20, "offload.cache": 0}
    assert plan_of(model, profile, prompts_of(12), [10] * 12, **changes).policy.cache.beyond(0) == 0
    with pytest.raises(ConfigError, match="made with runtime.threads 1, not 2"):
        plan_of(model, profile, prompts_of(4), [10] * 4, **{"runtime.threads": 2})
    made = read_profile(profile)
    profile.write_text(profile_text(dataclasses.replace(made, disk=dataclasses.replace(made.disk, folder="/nowhere"))))
    with pytest.raises(ConfigError, match="/nowhere of the profile: No such file.*set offload.cache"):
        plan_of(model, profile, prompts_of(4), [10] * 4)


@pytest.mark.parametrize(
    ("prompts", "settings"),
    [
        ([[index] * 20 for index in range(39)] + [[77] * 450], {"cache.sparse_values": 0.5}),
        ([[9] * 384 + [index] * 20 for index in range(40)], {"cache.sparse_values": 0.5}),
        ([[index] * 400 for index in range(40)], {"retain.budget": 0.5}),
    ],
    ids=["ragged", "shared", "retention"],
)
def test_the_memory_of_a_plan_holds_its_cache(
    model: Path, profile: Path, prompts: list[list[int]], settings: dict[str, Any]
) -> None:
    """Chunks of finished sequences stay cached until the arena is full."""
    memory = 24 << 20
    plan = plan_of(model, profile, prompts, [10] * 40, **{"offload.memory": memory}, **settings)
    assert plan.policy.cache.shares[1] == 0, "otherwise this tests nothing"
    assert plan.settings["cache.memory"] - (4 << 20) <= 1.02 * memory


@pytest.mark.parametrize("codec", [{"cache.codec": "g4"}, {"cache.codec": "nuq3", "cache.outlier_slots": 1}])
def test_a_plan_counts_what_the_codec_stores(tmp_path: Path, codec: dict[str, Any]) -> None:
    model = save_tiny(tmp_path / "wide", head_dim=64, num_hidden_layers=4)
    config = EngineConfig.from_options({"model.dtype": "float32", "runtime.device": "cpu"} | codec)
    subject = Subject.of(str(model), config)
    _, sizes = resolve(config, subject.shape)
    assert subject.sizes.cache_bytes * subject.sizes.num_layers == sizes.bytes_per_token
    assert sizes.bytes_per_token < subject.shape.kv_bytes_per_token(4) / 3


@pytest.mark.parametrize("is_far", [False, True])
def test_a_whole_block_of_an_encoded_cache_runs_at_once(profile: Path, tmp_path: Path, is_far: bool) -> None:
    model, codec = save_tiny(tmp_path / "wide", head_dim=64, num_hidden_layers=4), {"cache.codec": "g4"}
    subject = Subject.of(str(model), EngineConfig.from_options(SETTINGS | codec))
    made = dataclasses.replace(read_profile(profile), conditions=subject.conditions())
    profile.write_text(profile_text(made))
    prompts = [[5 + index] * 100 for index in range(24)]
    plan = plan_of(model, profile, prompts, [40] * 24, **codec)
    assert plan.is_in_memory and plan.policy.block == 24
    options = {"model.dtype": "float32", **codec, **plan.settings}
    if is_far:
        file, disk = tmp_path / "policy.json", Split((Share(0.0), Share(1.0)))
        file.write_text(policy_text(dataclasses.replace(plan.policy, cache=disk), plan.tiers))
        options |= {"offload.mode": str(file), "cache.memory": "auto"}
    params, most = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True), 0
    with LLM(str(model), options) as llm:
        scheduler = llm.engine.scheduler
        for index, prompt in enumerate(prompts):
            llm.engine.add(str(index), prompt, params)
        while scheduler.waiting or scheduler.running:
            llm.engine.step()
            most = max(most, len(scheduler.running))
        assert most == 24 and not scheduler.counters.preemptions


@pytest.mark.parametrize("memory", ["64MiB", "5MiB"])
def test_a_batch_runs_as_planned_and_answers_as_ever(
    model: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], memory: str
) -> None:
    lines = [
        {"prompt_token_ids": prompt, "max_tokens": 3 + len(prompt) % 9, "ignore_eos": True} for prompt in prompts_of(24)
    ]
    random.Random(1).shuffle(lines)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [f"--{key}={value}" for key, value in SETTINGS.items() if not key.startswith("offload")]
    found = []
    for name, more in (
        ("plain", ["--cache.memory=32MiB"]),
        (
            "planned",
            [
                "--offload.mode=auto", f"--offload.profile={profile}", f"--offload.memory={memory}",
                "--offload.disk_bandwidth=100MiB",
            ],
        ),
    ):  # fmt: skip
        output = tmp_path / f"{name}.jsonl"
        words = ["generate", str(model), "--input", str(source), "--output", str(output), *flags, *more]
        assert main(words) == 0
        answers = map(json.loads, output.read_text().splitlines())
        found.append({answer["id"]: answer["token_ids"] for answer in answers})
    said = capsys.readouterr().err
    assert found[0] == found[1] and len(found[0]) == 24
    assert "quire: blocks of " in said and "predicted" in said.splitlines()[-2]
    assert ("loaded " in said) == (memory == "5MiB"), "only what is on the disk is read"
    (plan,) = [line for line in said.splitlines() if line.startswith("quire: blocks of ")]
    moved = [line for line in said.splitlines() if line.startswith("in memory: ")]
    assert any("cache" in line for line in moved) == ("cache 100 %" not in plan), "the cache is not where it is planned"
