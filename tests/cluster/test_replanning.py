"""A cluster searches another placement when its requests change, and switches if that pays."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.cache.keys import ChunkKeys
from quire.cluster import replanning
from quire.cluster.cluster import Cluster
from quire.cluster.drift import Patience
from quire.cluster.replanning import AnsweredRequest, PlacementProposal, Replanning, SearchCommand, workload_of
from quire.config import ClusterConfig, EngineConfig, SloConfig
from quire.engine.params import SamplingParams
from quire.errors import ConfigError, QuireError
from quire.measure.latency_bench import settings_of
from quire.placement.placement_file import Instances, Placement, Predicted
from quire.simulation.setup import LocalModel
from quire.timing.kept_latencies import keep, kept_folder
from quire.timing.latency import LatencyModel
from quire.workload.workload import Workload

from ..clusters import SMALL, RunningCluster, ThreadedInstances
from ..tiny_models import save_tiny

PREDICTED = Predicted(12.0, 2.0, "machine", 6.0, 0.95)
PRESENT = Placement(
    (Instances("mixed", 2),), PREDICTED, workload={"rate": 10.0, "mean_in": 200.0, "mean_out": 20.0, "shared": 0.0}
)
APART = dataclasses.replace(
    PRESENT, instances=(Instances("prefill", 1), Instances("decode", 1)),
    predicted=dataclasses.replace(PREDICTED, rate=13.0),
)  # fmt: skip
MACHINES = "[nodes]\ncount = 1\ncores = 4\nmemory = '8GiB'\n"
ONE_AT_A_TIME = {"runtime.threads": 1, "scheduler.max_running": 1}
PATIENCE = Patience(seconds=1.0, requests=20, windows=2, pause=3.0)


class Harness:
    """A clock, a search and a switch for one replanning."""

    def __init__(self, answer: Callable[[], Awaitable[PlacementProposal]]) -> None:
        self.now = 0.0
        self.searched: list[Workload] = []
        self.switched: list[Placement] = []
        self.fails = False
        self.present: Placement | None = PRESENT
        self.answer = answer
        self.replanning = Replanning(lambda: self.present, self.search, self.switch, lambda: self.now, PATIENCE)

    async def search(self, workload: Workload, present: Placement) -> PlacementProposal:
        self.searched.append(workload)
        return await self.answer()

    async def switch(self, placement: Placement) -> None:
        if self.fails:
            self.present = None  # the instances are of no placement then
            raise QuireError("an instance did not start")
        self.switched.append(placement)
        self.present = placement

    def requests(self, num_in: int, count: int = 10) -> None:
        for number in range(count):
            self.replanning.note_arrival()
            self.replanning.note(AnsweredRequest(self.now + number / count, (), num_in, 20, 0))

    async def seconds(self, count: int, num_in: int) -> None:
        for _ in range(count):
            self.requests(num_in)
            self.now += 1.0
            await asyncio.sleep(0.005)


async def found(present: float) -> PlacementProposal:
    return PlacementProposal(APART, 3.0, present)


def run(harness: Harness, story: Callable[[Harness], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanning, "TICK_SECONDS", 0.002)

    async def main() -> None:
        watching = asyncio.create_task(harness.replanning.watch())
        await story(harness)
        watching.cancel()

    asyncio.run(main())


def test_longer_prompts_lead_to_a_search_and_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(harness: Harness) -> None:
        await harness.seconds(8, 200)
        assert not harness.searched
        await harness.seconds(12, 2000)
        await harness.seconds(12, 2000)

    harness = Harness(lambda: found(2.0))
    run(harness, story, monkeypatch)
    assert len(harness.searched) == 1 and harness.switched == [APART], "once: then that is what was planned for"
    assert harness.present is APART
    assert harness.replanning.counts == {"searches": 1, "switches": 1, "failed": 0}
    assert harness.searched[0].mean_in == 2000 and harness.searched[0].rate == pytest.approx(10, rel=0.1)
    assert 20 <= len(harness.searched[0].arrivals) <= 40, "those of the windows that differ, and not those before"


def test_fewer_requests_are_no_reason_to_search_and_more_than_it_serves_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(harness: Harness) -> None:
        for _ in range(8):
            harness.requests(200, 3)
            harness.now += 1.0
            await asyncio.sleep(0.005)
        assert not harness.searched
        for _ in range(12):
            harness.requests(200, 100)
            harness.now += 1.0
            await asyncio.sleep(0.005)

    harness = Harness(lambda: found(25.0))
    run(harness, story, monkeypatch)
    assert len(harness.searched) == 1 and not harness.switched and harness.searched[0].rate > 50


def test_nothing_is_kept_while_the_instances_are_of_no_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(harness: Harness) -> None:
        harness.present = None
        for _ in range(6):
            await harness.seconds(1, 2000)
            await asyncio.sleep(0.02)
            assert len(harness.replanning._replanner._arrived) <= 10
        harness.present = PRESENT
        await harness.seconds(12, 200)

    harness = Harness(lambda: found(2.0))
    run(harness, story, monkeypatch)
    assert not harness.searched


def test_a_placement_that_is_hardly_better_is_not_worth_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(lambda: found(2.9))
    run(harness, lambda harness: harness.seconds(12, 2000), monkeypatch)
    assert len(harness.searched) == 1 and not harness.switched and harness.present is PRESENT


def test_a_search_or_a_switch_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing() -> PlacementProposal:
        raise QuireError("no option meets the latency targets")

    harness = Harness(nothing)
    run(harness, lambda harness: harness.seconds(12, 2000), monkeypatch)
    assert harness.replanning.counts == {"searches": 1, "switches": 0, "failed": 1}
    harness = Harness(lambda: found(2.0))
    harness.fails = True
    run(harness, lambda harness: harness.seconds(12, 2000), monkeypatch)
    assert harness.present is None and harness.replanning.counts["failed"] == 1
    assert harness.replanning.state() == {"phase": "quiet", "reason": "", "searches": 1, "switches": 0, "failed": 1}


def test_an_error_that_nobody_expects_ends_a_search_and_not_the_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [OSError("no space left on device"), PlacementProposal(APART, 3.0, 2.0)]

    async def answer() -> PlacementProposal:
        match answers.pop(0):
            case PlacementProposal() as proposal:
                return proposal
            case error:
                raise error

    async def story(harness: Harness) -> None:
        await harness.seconds(12, 2000)
        await harness.seconds(12, 200)

    harness = Harness(answer)
    run(harness, story, monkeypatch)
    assert harness.replanning.counts == {"searches": 2, "switches": 1, "failed": 1}


def test_what_somebody_changes_during_a_search_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = dataclasses.replace(APART, workload={**PRESENT.workload, "mean_in": 2000.0})
    harness = Harness(lambda: change())

    async def change() -> PlacementProposal:
        harness.present = by_hand
        return await found(2.0)

    run(harness, lambda harness: harness.seconds(12, 2000), monkeypatch)
    assert len(harness.searched) == 1 and not harness.switched and harness.present is by_hand


def test_requests_are_not_lost_while_a_search_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    done = asyncio.Event()

    async def slow() -> PlacementProposal:
        await done.wait()
        return await found(2.0)

    async def story(harness: Harness) -> None:
        await harness.seconds(8, 2000)
        assert harness.replanning.state()["phase"] == "search"
        await harness.seconds(8, 2000)
        assert len(harness.searched) == 1, "one at a time"
        done.set()
        await asyncio.sleep(0.02)

    harness = Harness(slow)
    run(harness, story, monkeypatch)
    assert harness.switched == [APART]


def test_the_last_requests_are_a_workload_that_shares_what_they_shared() -> None:
    tokens = list(range(300))
    keys = ChunkKeys("", tokens).first(4)
    requests = [AnsweredRequest(7.0, tuple(keys[:2]), 150, 9, 0), AnsweredRequest(5.0, tuple(keys), 300, 3, 128)]
    found = workload_of(requests)
    assert found.columns.at.tolist() == [0.0, 2.0] and found.columns.num_out.tolist() == [3, 9]
    assert found.prompt_tokens.tolist() == [300, 150] and found.cached_tokens.tolist() == [0, 128]


def test_a_placement_must_say_what_it_was_planned_for() -> None:
    bare = dataclasses.replace(PRESENT, workload={})
    with pytest.raises(ConfigError, match="planned for"):
        Replanning(lambda: bare, None, None, lambda: 0.0)  # type: ignore[arg-type]


def test_a_command_that_fails_says_why_in_one_line(tmp_path) -> None:
    command = SearchCommand("nowhere.gguf", {}, None, tmp_path / "machines.toml", {"slo.ttft": 1.0, "slo.tpot": 0.1})
    workload = workload_of([AnsweredRequest(float(number), (), 20, 3, 0) for number in range(30)])
    with pytest.raises(QuireError, match="^quire plan: .*machines.toml"):
        asyncio.run(command.search(workload, PRESENT))


def unused(role: str, config: EngineConfig, fingerprint: str) -> LatencyModel:
    raise AssertionError("nobody asks for seconds")


@pytest.mark.slow
@pytest.mark.alone  # its search has a low priority, and a time
@pytest.mark.timeout(300)
def test_the_command_simulates_what_it_finds_and_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, which find a kept latency model. There is one core, and a placement that wastes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, machines = save_tiny(tmp_path / "model", tokenizer=False), tmp_path / "machines.toml"
    machines.write_text("[nodes]\ncores = 1\nmemory = '4GiB'\n")
    options = {
        "cache.memory": "4MiB", "scheduler.max_running": 16, "scheduler.token_budget": 128,
        "attention.backend": "reference",
    }  # fmt: skip
    found, config = LocalModel(str(model), unused), EngineConfig.from_options({**options, "runtime.threads": 1})
    about = settings_of(found.model_id, found.resolved(config)[0])
    keep(LatencyModel(about, {"base": 0.02, "rows_from_1": 2e-4}, (1,), {}, {}), kept_folder())
    command = SearchCommand(str(model), options, None, machines, {"slo.ttft": 1.0, "slo.tpot": 0.1}, seconds=20.0)
    workload = workload_of([AnsweredRequest(0.2 * number, (), 100 + number, 10, 0) for number in range(60)])
    one = dataclasses.replace(PRESENT, instances=(Instances("mixed", 1, options=ONE_AT_A_TIME),))
    proposal = asyncio.run(command.search(workload, one))
    assert proposal.rate > 1.2 * proposal.present > 0, "a batch beside one request at a time"
    assert proposal.placement.workload["mean_in"] == pytest.approx(130, rel=0.1)


def test_a_search_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its process with it."""
    started = tmp_path / "started"
    code = f"import os, pathlib, time; pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(60)"
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    command = SearchCommand("model", {}, None, tmp_path / "machines.toml", {}, seconds=0.6)
    with pytest.raises(QuireError, match="longer than 3 s"):
        asyncio.run(command.search(workload_of([AnsweredRequest(0.0, (), 20, 3, 0)]), PRESENT))
    assert not Path(f"/proc/{started.read_text()}").exists()


def test_a_switch_by_hand_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = dataclasses.replace(APART, workload={**PRESENT.workload, "mean_in": 2000.0})

    async def story(harness: Harness) -> None:
        await harness.seconds(4, 200)
        harness.present = longer
        await harness.seconds(12, 2000)

    harness = Harness(lambda: found(2.0))
    run(harness, story, monkeypatch)
    assert not harness.searched, "requests are what the other placement was planned for"


def test_a_cluster_whose_prompts_grow_tenfold_switches_while_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean prompt of 20 tokens becomes one of 200. The plan changes, and every request ends as if alone."""
    model = save_tiny(tmp_path / "model", max_position_embeddings=512)
    file = tmp_path / "plan.json"
    dataclasses.replace(PRESENT, workload={"rate": 30.0, "mean_in": 20.0, "mean_out": 8.0, "shared": 0.0}).write(file)
    asked: list[Workload] = []

    async def search(command: SearchCommand, workload: Workload, present: Placement) -> PlacementProposal:
        asked.append(workload)
        assert (command.machines.name, command.slo["slo.ttft"]) == ("machines.toml", 1.0)
        return PlacementProposal(APART, 3.0, 2.0)

    (tmp_path / "machines.toml").write_text(MACHINES)
    monkeypatch.setattr(SearchCommand, "search", search)
    monkeypatch.setattr(replanning, "Patience", lambda: Patience(seconds=0.4, requests=6, windows=2, pause=60.0))
    monkeypatch.setattr(replanning, "TICK_SECONDS", 0.05)
    monkeypatch.setattr("quire.cluster.cluster.SloConfig", lambda: SloConfig(ttft=1.0, tpot=0.1))
    rng = random.Random(0)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)

    def prompts(num_tokens: int) -> list[Any]:
        return [{"prompt_token_ids": [rng.randrange(200) for _ in range(num_tokens)]} for _ in range(6)]

    given = [prompts(20), *(prompts(200) for _ in range(60))]
    settings = {"mixed": 0, "placement": str(file), "replan": str(tmp_path / "machines.toml")}
    answers: list[list[int]] = []
    with RunningCluster(model, SMALL, ThreadedInstances(), "shm", **settings) as running:
        operations = running.cluster.operations
        for each in given:
            answers += [found.outputs[0].token_ids for found in running.generate(each, params)]
            roles = sorted(each["role"] for each in operations.state()["instances"])
            if roles == ["decode", "prefill"] and operations.state()["switch"] is None:
                break
        assert roles == ["decode", "prefill"], "the plan did not change"
        answers += [found.outputs[0].token_ids for found in running.generate(given[-1], params)]
        state = operations.state()
        assert running.cluster.router.counts["failed"] == 0 and state["placement"]["rate"] == 13.0
        assert {name: state["replanning"][name] for name in ("searches", "switches")} == {"searches": 1, "switches": 1}
    assert len(asked) == 1 and asked[0].mean_in > 100
    with LLM(str(model), SMALL) as alone:
        flat = [prompt for each in given for prompt in each][: len(answers) - 6] + given[-1]
        assert [found.outputs[0].token_ids for found in alone.generate(flat, params, use_tqdm=False)] == answers


@pytest.mark.parametrize(
    "settings,problem", [({"mixed": 2}, "set cluster.placement"), ({"placement": "plan.json"}, "set slo.ttft")]
)
def test_what_it_needs_is_said(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    model = save_tiny(tmp_path / "model")
    PRESENT.write(tmp_path / "plan.json")
    if "placement" in settings:
        settings = {"placement": str(tmp_path / "plan.json")}
    with pytest.raises(ConfigError, match=problem):
        Cluster(
            str(model), SMALL, settings=ClusterConfig(replan="machines.toml", **settings), processes=ThreadedInstances()
        )
