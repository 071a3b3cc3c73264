"""Instances that end, stop or do not start are started again, and are ended with their cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cluster import supervisor
from quire.cluster.bodies import InstanceLoad, InstanceReady, LoadingHeartbeat
from quire.cluster.cluster import Cluster
from quire.cluster.instance import LaunchConfig
from quire.cluster.processes import Processes
from quire.config import ClusterConfig
from quire.engine.params import SamplingParams
from quire.errors import EngineStoppedError
from tests.clusters import LIMITS

from ..tiny_models import save_tiny


class Nobody(Processes):
    """Starts nothing. The first `refused` starts fail."""

    def __init__(self, refused: int = 0) -> None:
        super().__init__()
        self.started: list[LaunchConfig] = []
        self.killed: list[str] = []
        self.gone: list[str] = []
        self._refused = refused

    def start(self, launch_config: LaunchConfig) -> None:
        self.started.append(launch_config)
        if len(self.started) <= self._refused:
            raise OSError("no more processes")

    def kill(self, name: str) -> None:
        self.killed.append(name)

    def ended(self) -> list[str]:
        return self.gone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LEAST_PAUSE", 0.01)


def idle_cluster(model: Path, processes: Processes, **settings: Any) -> Cluster:
    options = {"model.dtype": "float32", "runtime.device": "cpu", "cache.memory": "4MiB"}
    config = ClusterConfig(**({"mixed": 1} | settings))
    return Cluster(str(model), options, settings=config, processes=processes)


async def started(cluster: Cluster) -> asyncio.Task[None]:
    """Begins to start a cluster, and says for its instances that they are ready."""
    task = asyncio.create_task(cluster.start())
    while not cluster.router.members:
        await asyncio.sleep(0)
    for name in cluster.router.members:
        ready(cluster, name)
    await task
    return task


def ready(cluster: Cluster, name: str) -> None:
    cluster.supervisor._handle(name, InstanceReady(name, "shm://nowhere", 64, 8, LIMITS, 1e-3, 1e-3))


def alive(cluster: Cluster, name: str) -> None:
    cluster.supervisor._handle(name, InstanceLoad(name, 0, 0, 0, 0, 1, 1))


@pytest.mark.slow
def test_an_instance_that_cannot_be_started_again_is_tried_again(model: Path, short: None) -> None:
    async def scenario() -> None:
        processes = Nobody()
        cluster = idle_cluster(model, processes)
        await started(cluster)
        processes._refused = 3
        processes.gone = ["mixed-0.1"]
        async with asyncio.timeout(5):
            while len(processes.started) < 4:
                await asyncio.sleep(0.01)
        assert [each.name for each in processes.started] == [f"mixed-0.{number}" for number in (1, 2, 3, 4)]
        processes.gone = []
        await cluster.close()

    asyncio.run(scenario())


def test_an_instance_that_has_served_again_is_restarted_as_soon_as_ever(model: Path) -> None:
    """One that fails before it serves waits longer each time."""

    async def scenario() -> None:
        cluster, pauses = idle_cluster(model, Nobody()), list[float]()
        await started(cluster)

        def call_later(pause: float, call: Callable[[], None]) -> None:
            pauses.append(pause / supervisor.LEAST_PAUSE)
            call()

        cluster.supervisor._loop = SimpleNamespace(call_later=call_later)  # type: ignore[assignment]
        for number in range(1, 5):
            if number == 4:
                ready(cluster, "mixed-0.4")
            cluster.supervisor._on_connection_lost(f"mixed-0.{number}")
        assert pauses == [1, 2, 4, 1]
        await cluster.close()

    asyncio.run(scenario())


def test_a_router_that_was_stopped_does_not_end_its_instances(model: Path) -> None:
    """What they said meanwhile is still on its way."""

    async def scenario() -> None:
        processes = Nobody()
        cluster = idle_cluster(model, processes, heartbeat=0.5)
        await started(cluster)
        alive(cluster, "mixed-0.1")
        loop = asyncio.get_running_loop()
        clock = supervisor.time.monotonic
        skipped = [0.0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: clock() + skipped[0]))
            await asyncio.sleep(0.15)
            skipped[0] = 20.0
            await asyncio.sleep(0.25)
            assert not processes.killed and "mixed-0.1" in cluster.router.members
            end = loop.time() + 5
            while not processes.killed and loop.time() < end:
                await asyncio.sleep(0.05)
        assert processes.killed[:1] == ["mixed-0.1"], "it gives no sign of life, and the router hears"
        await cluster.close()

    asyncio.run(scenario())


def test_an_instance_that_stops_while_it_loads_is_started_again(
    model: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        processes = Nobody()
        cluster = idle_cluster(model, processes, heartbeat=0.5)
        await started(cluster)
        processes.gone = ["mixed-0.1"]
        async with asyncio.timeout(5):
            while len(processes.started) < 2:
                await asyncio.sleep(0.01)
            processes.gone = []
            cluster.supervisor._handle("mixed-0.2", LoadingHeartbeat("mixed-0.2"))
            while "mixed-0.2" not in processes.killed:
                await asyncio.sleep(0.01)
        await cluster.close()

    monkeypatch.setattr(supervisor, "LOADING_SECONDS", 0.5)
    asyncio.run(scenario())


def test_clients_do_not_wait_for_a_cluster_that_is_closed(model: Path) -> None:
    async def scenario() -> None:
        cluster = idle_cluster(model, Nobody())
        await started(cluster)

        async def client() -> None:
            async for _ in cluster.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4)):
                pass

        waiting = asyncio.create_task(client())
        await asyncio.sleep(0.01)
        await cluster.close()
        with pytest.raises(EngineStoppedError):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(scenario())


def test_a_process_that_was_ended_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anybody wait while the system frees its memory."""

    async def scenario() -> None:
        processes = Processes()
        processes.start(LaunchConfig("a.1", "", "", "", {}))
        pid = processes.pid("a.1")
        processes.kill("a.1")
        assert processes.ended() == [] and processes.pid("a.1") is None
        await processes.wait(5.0)
        assert not Path(f"/proc/{pid}").exists(), "a zombie"

    asyncio.run(scenario())
