"""How many sequences a cache holds, compared with real engines."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from quire import LLM
from quire.engine.params import SamplingParams
from quire.errors import ConfigError
from tests.benchmark_scripts import benchmark
from tests.benchmarks.test_compose import LOAD, MIB, TINY, Recipe, asked, systems
from tests.benchmarks.test_compose import model as model
from tests.clusters import RunningCluster, ThreadedInstances

holding = benchmark("holding")
fill, held = holding.fill, holding.held

pytestmark = pytest.mark.usefixtures("own_cache")

ROOM: dict[str, dict[str, Any]] = {
    "none": {"cache.share": False},
    "sharing": {"cache.share": True},
    "codec": {"cache.share": False, "cache.codec": "nuq3"},
    "sharing + codec": {"cache.share": True, "cache.codec": "nuq3"},
    "retention": {"cache.share": False, "retain.budget": 0.5, "retain.profile_rows": 32},
}


@pytest.mark.parametrize("name", ROOM)
def test_a_cache_holds_the_sequences_that_a_real_engine_runs_at_once(model: str, name: str) -> None:
    options = {
        **TINY, "cache.check": False, "cache.memory": 4 * MIB, "model.max_context": 320,
        "scheduler.max_running": 64, "scheduler.token_budget": 4096, **ROOM[name],
    }  # fmt: skip
    counted = held(model, options, asked(LOAD, 256))
    with LLM(model, options) as llm:
        real = fill(llm.engine, asked(LOAD, 256))
    assert 2 <= counted.sequences < 64 and counted.num_bytes <= 4 * MIB
    # What heads keep depends on attention, which is not computed, and so does what the next admission expects.
    assert abs(counted.sequences - real.sequences) <= (name == "retention")
    if name != "retention":
        assert counted == real


FAR: dict[str, dict[str, Any]] = {
    "offload": {"cache.share": True},
    "offload + codec": {"cache.share": False, "cache.codec": "nuq3"},
    "offload + retention": {"cache.share": False, "retain.budget": 0.5, "retain.profile_rows": 32},
}

MOST_FAR = {"offload": 16, "offload + codec": 12, "offload + retention": 12}
"""Sequences for which 4 MiB have the frames that a cache on the disk needs."""


@pytest.mark.parametrize("name", FAR)
def test_a_cache_on_the_disk_holds_the_sequences_that_a_real_engine_runs_at_once(model: str, name: str) -> None:
    options = {
        **TINY, "cache.check": False, "cache.memory": 4 * MIB, "offload.mode": "auto", "offload.memory": "2MiB",
        "offload.cache": 8 * MIB, "model.max_context": 320, **FAR[name],
    }  # fmt: skip
    counted = held(model, options, asked(LOAD, 256))
    limits = {"scheduler.max_running": MOST_FAR[name], "scheduler.token_budget": 4096}
    with LLM(model, options | limits) as llm:
        real = fill(llm.engine, asked(LOAD, 256))
    assert 2 <= counted.sequences <= MOST_FAR[name] and counted.num_bytes <= 8 * MIB
    assert abs(counted.sequences - real.sequences) <= (name == "offload + retention")
    with pytest.raises(ConfigError, match="an offloaded cache needs at least"):
        LLM(model, options | limits | {"scheduler.max_running": MOST_FAR[name] + 1})


@pytest.mark.parametrize("name", ["none", "sharing", "retention"])
def test_two_instances_hold_the_sequences_that_real_ones_have_begun_at_once(model: str, name: str) -> None:
    load = replace(LOAD, output=120)  # answers do not end before both caches are full
    options = {
        **TINY, "cache.check": False, "cache.memory": 4 * MIB, "model.max_context": 420,
        "scheduler.max_running": 64, "scheduler.token_budget": 4096, **ROOM[name],
    }  # fmt: skip
    one = held(model, options, asked(load, 256))
    counted = held(model, options, asked(load, 256), roles={"prefill": 1, "decode": 1})
    now, most = 0, 0

    async def ask(pair: RunningCluster, prompt: list[int], num_out: int) -> None:
        nonlocal now, most
        params = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True, detokenize=False)
        deltas = pair.cluster.generate({"prompt_token_ids": prompt}, params)
        await anext(deltas)
        now += 1
        most = max(most, now)
        async for _ in deltas:
            pass
        now -= 1

    async def ask_all(pair: RunningCluster) -> None:
        first = itertools.islice(asked(load, 256), counted.sequences + 4)
        await asyncio.gather(*(ask(pair, each.prompt, each.num_out) for each in first))

    with RunningCluster(model, options, ThreadedInstances(), "shm") as pair:
        pair.call(ask_all(pair))
    assert abs(counted.sequences - most) <= (name == "retention")
    # A prompt that waits for the other instance needs no room to grow.
    assert counted.sequences > 2 * one.sequences and counted.num_bytes <= 8 * MIB


def test_a_request_that_instances_refuse_is_an_error(model: str) -> None:
    options = {**TINY, "cache.memory": 4 * MIB, "model.max_context": 200}
    with pytest.raises(ConfigError, match="do not fit into the context of 200"):
        held(model, options, asked(LOAD, 256), roles={"prefill": 1, "decode": 1})


def test_more_is_held_with_each_system(model: str) -> None:
    counts = {}
    for name in ("none", "sharing", "codec", "sharing + codec", "offload"):
        options = Recipe.of(TINY).options(systems.systems_of(name), LOAD, 4 * MIB, 2 * MIB)
        counts[name] = held(model, options, asked(LOAD, 256)).sequences
    assert counts["none"] < counts["sharing"] and counts["none"] < counts["offload"] <= 2 * counts["none"] + 1
    assert counts["none"] < counts["codec"] < counts["sharing + codec"]


def test_a_threshold_cannot_be_counted(model: str) -> None:
    options = {**TINY, "cache.memory": 4 * MIB, "model.max_context": 320, "retain.threshold": 0.9}
    with pytest.raises(ConfigError, match="known only after a prompt; simulate with retain.budget"):
        held(model, options, asked(LOAD, 256))
