"""Operators change a cluster that serves: nothing fails, and every answer has the tokens of before."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM
from quire.cluster import supervisor
from quire.cluster.instance import LaunchConfig
from quire.engine.params import SamplingParams
from quire.errors import EngineStoppedError, InstancesFailedError, ModelError, RequestError
from tests.clusters import SMALL, RunningCluster, ThreadedInstances
from tests.tiny_models import save_tiny

OPTIONS = {"cache.memory": "8MiB", "runtime.device": "cpu", "runtime.threads": 1, "model.dtype": "float32"}
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
PROMPTS = [[each] * (70 + 30 * each) for each in range(1, 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("operated"))


@pytest.fixture
def running(model: Path) -> Iterator[RunningCluster]:
    with RunningCluster(model, OPTIONS, ThreadedInstances(), "shm") as found:
        yield found


def answers(running: RunningCluster) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in running.generate(PROMPTS, PARAMS)]


def test_a_start_says_what_is_still_loading(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="quire")
    monkeypatch.setattr(supervisor, "PROGRESS_SECONDS", 0.02)
    started, threads = threading.Event(), ThreadedInstances()
    start = threads.start

    def late(launch_config: LaunchConfig) -> None:
        """The second instance loads only after a line about it."""
        if launch_config.name.startswith("decode-"):
            start(launch_config)
            return
        threading.Thread(target=lambda: started.wait(10) and start(launch_config)).start()

    def told(record: logging.LogRecord) -> bool:
        if record.getMessage().endswith("still loading: prefill-0"):
            started.set()
        return True

    monkeypatch.setattr(threads, "start", late)
    caplog.handler.addFilter(told)
    with RunningCluster(model, OPTIONS, threads, "shm"):
        caplog.handler.removeFilter(told)
        said = [each.getMessage() for each in caplog.records]
    assert "starting 2 instances: prefill-0, decode-0; each loads the model" in said
    assert started.is_set() and any(line.endswith("s: still loading: prefill-0") for line in said)


def test_all_instances_are_restarted_and_change_their_roles_while_requests_run(running: RunningCluster) -> None:
    cluster, expected = running.cluster, answers(running)
    names = {each["place"]: each["name"] for each in cluster.operations.state()["instances"]}
    told: list[list[int]] = []

    async def operate() -> None:
        await cluster.operations.restart()
        cluster.operations.set_role("prefill-0", "mixed")
        cluster.operations.set_role("decode-0", "prefill")
        await asyncio.sleep(0.05)
        cluster.operations.set_role("decode-0", "decode")
        cluster.operations.set_role("prefill-0", "prefill")

    async def ask(until: asyncio.Future[None]) -> None:
        while not until.done():
            found = await asyncio.gather(*(running._one(prompt, PARAMS) for prompt in PROMPTS))
            told.extend([token for item in items for token in item.outputs[0].token_ids] for items in found)

    async def scenario() -> None:
        operating = asyncio.ensure_future(operate())
        await ask(operating)
        await operating

    running.call(scenario())
    assert len(told) >= len(PROMPTS) and all(each in expected for each in told)
    assert cluster.router.counts["failed"] == 0 and cluster.router.counts["down"] == 2
    state = cluster.operations.state()["instances"]
    assert [each["role"] for each in state] == ["prefill", "decode"]
    assert not {each["name"] for each in state} & {*names.values()}, "both are new"


def test_an_instance_may_leave_and_the_last_one_may_not(running: RunningCluster) -> None:
    cluster, expected = running.cluster, answers(running)
    with pytest.raises(RequestError, match="there is no instance 'mixed-7' that runs"):
        cluster.operations.set_role("mixed-7", "mixed")
    with pytest.raises(RequestError, match="'king' is no role"):
        cluster.operations.set_role("decode-0", "king")
    running.call(cluster.operations.drain("decode-0", restart=False))
    assert [each["place"] for each in cluster.operations.state()["instances"]] == ["prefill-0"]
    assert answers(running) == expected, "a prefill instance that is alone decodes, too"
    with pytest.raises(RequestError, match="prefill-0 is the only instance that serves"):
        running.call(cluster.operations.drain("prefill-0", restart=False))
    assert answers(running) == expected


def test_requests_wait_while_the_only_instance_is_restarted(model: Path, single_engine: LLM) -> None:
    with RunningCluster(model, SMALL, ThreadedInstances(), "shm", mixed=1) as running:
        cluster, prompt = running.cluster, {"prompt_token_ids": list(range(3, 80))}
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)

        async def scenario() -> list[int]:
            restarted = asyncio.ensure_future(cluster.operations.restart())
            while any(each.is_serving for each in cluster.router.members.values()):
                await asyncio.sleep(0)
            assert cluster.is_ready, "requests are accepted"
            with pytest.raises(InstancesFailedError, match="mixed-0 cannot be asked yet"):
                await cluster.drop_prefix("0" * 32)
            found: list[int] = []
            async for delta in cluster.generate(prompt, params):
                found += delta.outputs[0].token_ids
            await restarted
            return found

        (right,) = single_engine.generate([prompt], params)
        assert running.call(scenario()) == right.outputs[0].token_ids
    assert not cluster.is_ready


def test_a_restart_ends_at_the_first_instance_that_does_not_start(running: RunningCluster) -> None:
    cluster = running.cluster
    names = [each["name"] for each in cluster.operations.state()["instances"]]
    cluster.supervisor._model.options.update({"cache.share": False, "tiers.disk": "/nowhere:64MiB"})
    with pytest.raises(ModelError, match="instance prefill-0.3 did not start"):
        running.call(cluster.operations.restart())
    prefill, decode = cluster.operations.state()["instances"]
    assert prefill["health"] in ("down", "starting") and (decode["name"], decode["health"]) == (names[1], "serving")


def test_drains_and_restarts_take_turns(running: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    operations, under_way, done = running.cluster.operations, set[str](), list[str]()

    async def drain(place: str, *, restart: bool = True) -> None:
        assert not under_way, f"{place} is drained while {under_way} is"
        under_way.add(place)
        await asyncio.sleep(0.01)
        under_way.remove(place)
        done.append(place)

    async def scenario() -> None:
        await asyncio.gather(operations.drain("a"), operations.drain("b"), operations.restart())

    monkeypatch.setattr(operations, "_drain", drain)
    running.call(scenario())
    assert done == ["a", "b", *running.cluster.supervisor.desired.specs]


def test_a_cluster_that_closes_ends_its_requests_with_an_error(running: RunningCluster) -> None:
    long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True, detokenize=False)

    async def scenario() -> None:
        asked = asyncio.ensure_future(running._one([1] * 70, long))
        while not running.cluster.router.num_running:
            await asyncio.sleep(0.001)
        await running.cluster.close()
        with pytest.raises(EngineStoppedError, match="the cluster is closed"):
            await asked

    running.call(scenario())


def test_times_and_sizes_are_told_of_what_ran(running: RunningCluster) -> None:
    answers(running)
    state = running.cluster.operations.state()
    assert state["counts"]["ended"] == len(PROMPTS)
    for stage in ("queue", "prefill", "transfer", "decode"):
        assert state["stages"][stage]["p50"] > 0, stage
    for each in state["instances"]:
        assert 0 < each["cache_bytes"] <= 8 << 20 and each["prompt_rows"] > 0 and each["batch"] > 0
