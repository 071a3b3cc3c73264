"""Prefixes of a cluster: listed, found and dropped on all instances, and pinned by each of them when it starts."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.cache.ledger import PAGE_TOKENS
from quire.cluster.instance import LaunchConfig
from quire.cluster.prefixes import PrefixReply, merge_prefixes
from quire.cluster.processes import Processes
from quire.engine.engine import Engine
from quire.engine.params import SamplingParams
from quire.engine.pins import Pin
from quire.errors import ConfigError, EngineStoppedError, QuireError, RequestError
from quire.prefixes.cached import CachedPrefix, SaltFilter
from quire.prefixes.disk_index import TierCopy

from ..clusters import SECONDS, SMALL, RunningCluster, ThreadedInstances

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[RunningCluster]:
    with RunningCluster(model, SMALL, ThreadedInstances(), "shm") as running:
        yield running
        running.settle()


def prompt_of(rng: random.Random, num_tokens: int, salt: str = "") -> dict[str, Any]:
    return {"prompt_token_ids": [rng.randrange(3, 60) for _ in range(num_tokens)], "cache_salt": salt}


def test_a_prefix_is_listed_once_with_the_bytes_of_all_instances(running: RunningCluster, seed: int) -> None:
    prompt = prompt_of(random.Random(seed), 3 * PAGE_TOKENS + 5, "listed/")
    running.generate([prompt], PARAMS)
    cluster, visible = running.cluster, SaltFilter("listed/")
    key = cluster.prefix_key(prompt)
    (known,) = running.call(cluster.known_prefixes(visible))
    alone = running.call(cluster.supervisor.cluster_prefixes.prefixes(visible))
    assert {each.instance.split("-")[0] for each in alone} == {"prefill", "decode"}
    assert all(each.id == key for each in alone)
    assert known.key == key and known.num_tokens == 3 * PAGE_TOKENS
    assert known.tiers["arena"].num_bytes == sum(each.num_bytes for each in alone) > 0
    found = running.call(cluster.find_prefix(key, visible))
    assert found is not None and (found.key, found.num_tokens) == (key, known.num_tokens)
    assert found.tiers["arena"].num_bytes == known.tiers["arena"].num_bytes


def test_nobody_sees_or_drops_a_prefix_with_another_salt(running: RunningCluster, seed: int) -> None:
    prompt = prompt_of(random.Random(seed), PAGE_TOKENS + 1, "mine/")
    running.generate([prompt], PARAMS)
    cluster, other = running.cluster, SaltFilter("other/")
    key = cluster.prefix_key(prompt)
    assert running.call(cluster.known_prefixes(other)) == running.call(cluster.prefixes(other)) == []
    assert running.call(cluster.find_prefix(key, other)) is None
    assert running.call(cluster.drop_prefix(key, other)) is None
    assert running.call(cluster.find_prefix(key, SaltFilter("mine/"))) is not None


def test_a_prefix_is_dropped_everywhere_and_computed_again(
    running: RunningCluster, single_engine: LLM, seed: int
) -> None:
    prompt = prompt_of(random.Random(seed), 2 * PAGE_TOKENS + 1, "dropped/")
    (before,) = running.generate([prompt], PARAMS)
    cluster, visible = running.cluster, SaltFilter("dropped/")
    key = cluster.prefix_key(prompt)
    assert running.call(cluster.drop_prefix(key, visible)) == {"arena": 4}  # two chunks on each of two
    assert running.call(cluster.find_prefix(key, visible)) is None
    assert running.call(cluster.drop_prefix(key, visible)) is None
    (again,) = running.generate([prompt], PARAMS)
    assert again.num_cached_tokens == 0
    (right,) = single_engine.generate([prompt], PARAMS)
    assert again.outputs[0].token_ids == before.outputs[0].token_ids == right.outputs[0].token_ids


def test_what_is_no_key_or_too_short_is_refused(running: RunningCluster) -> None:
    for ask in (running.cluster.find_prefix, running.cluster.drop_prefix):
        with pytest.raises(RequestError, match="hexadecimal"):
            running.call(ask("no key"))
    with pytest.raises(RequestError, match="whole chunks"):
        running.cluster.prefix_key([1, 2, 3])


def test_an_instance_that_goes_meanwhile_is_not_waited_for(running: RunningCluster, seed: int) -> None:
    cluster_prefixes = running.cluster.supervisor.cluster_prefixes
    members = cluster_prefixes._members

    async def scenario() -> list[CachedPrefix]:
        asked = asyncio.ensure_future(cluster_prefixes.known_prefixes(SaltFilter("stays/")))
        await asyncio.sleep(0)
        cluster_prefixes._members = {name: each for name, each in members.items() if each.role == "prefill"}
        return await asked

    decode = running.instance("decode")
    decode.may_send = lambda to, message: not isinstance(message, PrefixReply)
    running.generate([prompt_of(random.Random(seed), PAGE_TOKENS + 1, "stays/")], PARAMS)
    try:
        found = running.call(asyncio.wait_for(scenario(), SECONDS))
    finally:
        cluster_prefixes._members = members
        decode.may_send = lambda to, message: True
    assert not cluster_prefixes._pending and len(found) == 1, "what the other one has"


def test_whoever_asks_a_closed_cluster_gets_an_error(model: Path) -> None:
    """Also if it asked before."""
    with RunningCluster(model, SMALL, ThreadedInstances(), "shm") as running:
        cluster = running.cluster
        running.instance("decode").may_send = lambda to, message: not isinstance(message, PrefixReply)

        async def scenario() -> None:
            asked = asyncio.ensure_future(cluster.known_prefixes())
            await asyncio.sleep(0.2)
            assert not asked.done()
            await cluster.close()
            with pytest.raises(EngineStoppedError, match="closed"):
                await asked
            with pytest.raises(EngineStoppedError, match="closed"):
                await cluster.prefixes()

        running.call(asyncio.wait_for(scenario(), SECONDS))


def test_an_instance_that_takes_no_message_is_named(running: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.cluster.supervisor.cluster_prefixes, "_send", lambda name, message: False)
    with pytest.raises(QuireError, match=r"instance \S+: it takes no messages now"):
        running.call(running.cluster.prefixes())


def test_a_disk_that_all_instances_share_is_counted_once(model: Path, tmp_path: Path, seed: int) -> None:
    options = SMALL | {"tiers.disk": f"{tmp_path}/pages:64MiB"}
    prompt = prompt_of(random.Random(seed), 3 * PAGE_TOKENS + 1)
    threads = ThreadedInstances()
    with RunningCluster(model, options, threads, "shm", prefill=1, decode=2) as running:
        running.generate([prompt], PARAMS)
        for each in threads.instances.values():
            assert each.ask(lambda engine: engine.tiering.flush(SECONDS))
        cluster = running.cluster
        key = cluster.prefix_key(prompt)
        known = running.call(cluster.find_prefix(key))
        assert known is not None
        own = known.tiers["disk"].num_bytes
        files = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        assert 0 < own <= files
        of_each = [each.ask(Engine.stats)["tiers"]["disk"] for each in threads.instances.values()]
        end = time.monotonic() + SECONDS
        while cluster.stats().get("tiers", {}).get("disk", {}).get("chunks") != max(each["chunks"] for each in of_each):
            assert time.monotonic() < end, "counters are not told"
            time.sleep(0.02)
        assert cluster.stats()["tiers"]["disk"]["cap_bytes"] == of_each[0]["cap_bytes"]
        dropped = running.call(cluster.drop_prefix(key))
        assert dropped is not None and dropped["disk"] == 3 and dropped["arena"] >= 3


def test_an_instance_that_cannot_answer_is_named(running: RunningCluster) -> None:
    decode = running.instance("decode")
    decode._prefix_service.prefixes = None  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(QuireError, match=r"instance decode-0\S+: it failed to answer; see the log"):
            running.call(running.cluster.prefixes())
    finally:
        del decode._prefix_service.prefixes


def test_sizes_and_speeds_are_not_summed(running: RunningCluster) -> None:
    own = [running.ask(role, Engine.stats)["costs"] for role in ("prefill", "decode")]
    end = time.monotonic() + SECONDS
    while any(each.stats is None for each in running.cluster.router.members.values()):
        assert time.monotonic() < end, "an instance does not tell its counters"
        time.sleep(0.02)
    assert running.cluster.stats()["costs"]["chunk_bytes"] == own[0]["chunk_bytes"] == own[1]["chunk_bytes"]


def test_caches_are_put_together_by_keys() -> None:
    """A disk is one for all instances of a machine."""
    one = CachedPrefix("a", None, 64, {"arena": TierCopy(10, 5.0, 0.0), "disk": TierCopy(4, 1.0, 0.0)})
    other = CachedPrefix("a", None, 64, {"arena": TierCopy(7, 3.0, 9.0), "disk": TierCopy(4, 1.0, 0.0)})
    last = CachedPrefix("b", None, 64, {"disk": TierCopy(1, 6.0, 0.0)})
    near = {"arena": TierCopy(17, 5.0, 9.0), "disk": TierCopy(4, 1.0, 0.0)}
    far = {"arena": TierCopy(17, 5.0, 9.0), "disk": TierCopy(8, 1.0, 0.0)}
    assert merge_prefixes([("", [one]), ("", [other, last])]) == [last, CachedPrefix("a", None, 64, near)]
    assert merge_prefixes([("x", [one]), ("y", [other, last])]) == [last, CachedPrefix("a", None, 64, far)]


# cache.pin.


@pytest.fixture
def pin_file(tmp_path: Path) -> Path:
    file = tmp_path / "pins.jsonl"
    file.write_text(json.dumps({"prompt": "a" * 150}) + "\n# a comment\n" + json.dumps({"prompt": "b" * 80}) + "\n")
    return file


def test_every_instance_pins_for_every_salt_also_one_that_is_started_again(model: Path, pin_file: Path) -> None:
    options = SMALL | {"cache.pin": str(pin_file)}
    with RunningCluster(model, options, ThreadedInstances(), "shm", salts=("one/", "two/")) as running:
        cluster = running.cluster
        running.call(cluster.pin(["one/", "two/"]))
        with pytest.raises(ConfigError, match="other salts"):
            running.call(cluster.pin(["three/"]))
        cached = [running.ask(role, num_pinned) for role in ("prefill", "decode")]
        assert cached[0] == cached[1] > 0
        assert cluster.max_context == running.ask("prefill", lambda engine: engine.max_context)
        for salt, expected in (("one/", 128), ("two/", 128), ("", 0)):
            (found,) = running.generate([{"prompt": "a" * 150 + salt, "cache_salt": salt}], PARAMS)
            assert found.num_cached_tokens == expected, salt
        running.call(cluster.operations.drain("prefill-0"))
        assert running.ask("prefill", num_pinned) == cached[0]
        (found,) = running.generate([{"prompt": "a" * 150 + "!", "cache_salt": "two/"}], PARAMS)
        assert found.num_cached_tokens == 128
        known = running.call(cluster.known_prefixes(SaltFilter("one/")))
        assert {each.tiers["arena"].pinned_until for each in known if each.num_tokens == 128} == {float("inf")}
        running.settle()


def test_an_instance_with_long_pins_is_started_without_waiting_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a pipe holds, for a process that reads nothing."""
    program, orders = tmp_path / "sleeps", Processes()
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    launch_config = LaunchConfig("prefill-0.1", "shm://nowhere", "00", "model", {}, pins=(Pin(1, list(range(50_000))),))
    starting = threading.Thread(target=orders.start, args=(launch_config,), daemon=True)
    starting.start()
    starting.join(20)
    try:
        assert not starting.is_alive() and not orders.ended()
        assert LaunchConfig.from_json(launch_config.to_json()) == launch_config
    finally:
        orders.kill(launch_config.name)
        asyncio.run(orders.wait())


def num_pinned(engine: Engine) -> int:
    count: int = engine.stats()["cache"]["bytes_pinned"]
    return count


def test_pins_without_room_are_refused_at_start_by_their_line(model: Path, pin_file: Path) -> None:
    pin_file.write_text(json.dumps({"prompt": "a" * 80}) + "\n" + json.dumps({"prompt": "b" * 900}) + "\n")
    options = SMALL | {"cache.pin": str(pin_file), "cache.memory": "256KiB"}
    with pytest.raises(ConfigError, match=r"cache\.pin .*, line 2: it would pin over"):
        RunningCluster(model, options, ThreadedInstances(), "shm", salts=("", "other/"))
