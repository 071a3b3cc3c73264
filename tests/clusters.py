"""Whole clusters for tests: the router and the instances of `quire serve`, in threads of this process or in processes.

In threads, too, an instance has an engine, links and an agent of its own, and what it sends is copied. Its arena is
full of poison at first, and where it has given pages back, so that nobody can read what is not theirs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from unittest import mock

from quire import LLM
from quire.cluster.cluster import Cluster
from quire.cluster.instance import Instance, LaunchConfig
from quire.cluster.messages import ROUTER
from quire.cluster.processes import END_SECONDS, Processes
from quire.config import ClusterConfig
from quire.engine.admission import PinLimits, Prompt, RequestLimits
from quire.engine.capacity import MeasuredCapacity
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.llm import merge_delta

from .poison import poison_free

Answer = TypeVar("Answer")

LIMITS = RequestLimits(1000, 512, "model.max_context", 100, PinLimits(4))
"""Of instances that only say that they are ready."""

SECONDS = 100.0
"""Longest time that a test waits for a cluster."""

SMALL: dict[str, Any] = {
    "model.dtype": "float32", "runtime.device": "cpu", "runtime.threads": 1, "cache.memory": "4MiB",
    "scheduler.max_running": 8, "scheduler.token_budget": 128,
}  # fmt: skip
"""Settings of engines that are small and fast to start."""

ByRole = Mapping[str, Mapping[str, Any]]
"""Further options of the instances of a role."""


_patching = threading.Lock()


def _capacity(engine: Engine) -> MeasuredCapacity:
    """Stands for a measurement that takes most of a start."""
    return MeasuredCapacity(64, engine.scheduler.policy.max_running, 1e-4, 1e-3)


class Poisoned(Instance):
    """An instance whose engine keeps nothing in pages that it has given back, and prefers fetching to computing."""

    def __init__(self, launch_config: LaunchConfig) -> None:
        super().__init__(launch_config)
        self.sent: list[tuple[str, Any]] = []
        """Messages to others, and who gets them."""
        self.may_send: Callable[[str, Any], bool] = _always
        """Whether a message is sent, or lost."""
        send = self._connections.send

        def noted(to: str, message: Any, bulk: Any = None) -> bool:
            if not self.may_send(to, message):
                return True
            self.sent.append((to, message))
            return send(to, message, bulk)

        self._connections.send = noted  # type: ignore[method-assign]

    @property
    def engine(self) -> Engine:
        """Of a started instance."""
        assert self.thread.loaded is not None, f"{self.launch_config.name} is not loaded"
        return self.thread.loaded.engine

    def has_started(self, error: BaseException | None) -> None:
        """See EngineListener."""
        if error is None:
            engine, end = self.engine, self.engine.end_export
            engine.scheduler.manager.fetching.costs.speed = 1e12
            table: Any = engine.scheduler.manager.table
            table.arena.data.fill_(0xFF)

            def end_export(request_id: str) -> None:
                end(request_id)
                poison_free(table)

            engine.end_export = end_export  # type: ignore[method-assign]
        with _patching, mock.patch("quire.cluster.instance.measure_capacity", _capacity):
            super().has_started(error)

    def connection_lost(self, name: str) -> None:
        """See Handler. While it loads, a process would exit."""
        if self._started.is_set():
            super().connection_lost(name)
        else:
            self.agent.connection_lost(name)
            if name == ROUTER:
                self._is_alone.set()

    def ask(self, question: Callable[[Engine], Answer]) -> Answer:
        """Runs a question on the engine's thread, between two steps."""
        found: list[Answer] = []
        is_there = threading.Event()

        def look() -> None:
            try:
                found.append(question(self.engine))
            finally:
                is_there.set()

        self.thread.submit(look)
        assert is_there.wait(SECONDS) and found, f"{self.launch_config.name} does not answer"
        return found[0]


class ThreadedInstances(Processes):
    """Instances in threads of this process, by name."""

    def __init__(self, options: ByRole | None = None) -> None:
        super().__init__()
        self.instances: dict[str, Poisoned] = {}
        self._options = options or {}
        self._threads: dict[str, threading.Thread] = {}

    def start(self, launch_config: LaunchConfig) -> None:
        """See Processes."""
        instance = self.instances[launch_config.name] = Poisoned(_with(launch_config, self._options))
        thread = self._threads[launch_config.name] = threading.Thread(
            target=instance.run, name=launch_config.name, daemon=True
        )
        thread.start()

    def kill(self, name: str) -> None:
        """See Processes. It ends as if its router were gone."""
        thread = self._threads.pop(name, None)
        if thread is not None:
            self.instances.pop(name).connection_lost(ROUTER)
            thread.join(END_SECONDS)

    def pid(self, name: str) -> int | None:
        """None: it has no process."""
        return None

    def ended(self) -> list[str]:
        """See Processes."""
        return [name for name, thread in self._threads.items() if not thread.is_alive()]

    async def wait(self, seconds: float = END_SECONDS) -> None:
        """See Processes."""
        await asyncio.gather(*(asyncio.to_thread(self.kill, name) for name in list(self._threads)))


class ProcessInstances(Processes):
    """Processes, with further options for the instances of a role."""

    def __init__(self, options: ByRole | None = None) -> None:
        super().__init__()
        self._options = options or {}

    def start(self, launch_config: LaunchConfig) -> None:
        """See Processes."""
        super().start(_with(launch_config, self._options))


def _with(launch_config: LaunchConfig, options: ByRole) -> LaunchConfig:
    role = launch_config.name.rpartition("-")[0]
    return replace(launch_config, options={**launch_config.options, **options.get(role, {})})


class RunningCluster:
    """A cluster on a loop of its own, called like `LLM`. One instance computes prompts and another one decodes, unless
    the settings say otherwise.

    processes  Threads or Apart
    transport  shm or tcp
    single_engine     one engine of the same settings, if somebody has put it here
    """

    single_engine: LLM

    def __init__(
        self,
        model: Path | str,
        options: Mapping[str, Any],
        processes: Processes,
        transport: str,
        *,
        salts: Sequence[str] = ("",),
        **settings: Any,
    ) -> None:
        self.processes = processes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster-loop", daemon=True)
        self._thread.start()
        wanted: dict[str, Any] = {"transport": transport or "auto"}
        if not {"prefill", "decode", "mixed"} & settings.keys():
            wanted |= {"prefill": 1, "decode": 1}
        config = ClusterConfig(**wanted, **settings)
        try:
            self.cluster = Cluster(str(model), options, settings=config, salts=salts, processes=processes)
            self.call(self.cluster.start())
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the instances."""
        try:
            self.call(self.cluster.close())
        finally:
            self._end_loop()

    def call(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs it on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """The answers to some prompts, all at once."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return self.call(self._all(list(zip(prompts, each, strict=True))))

    def deltas(self, prompt: Prompt, params: SamplingParams) -> list[RequestOutput]:
        """What the client of one request gets, item by item."""
        return self.call(self._one(prompt, params))

    async def _all(self, asked: list[tuple[Prompt, SamplingParams]]) -> list[RequestOutput]:
        found = await asyncio.gather(*(self._one(*each) for each in asked))
        answers = []
        for deltas in found:
            collected: dict[str, RequestOutput] = {}
            for delta in deltas:
                merge_delta(collected, delta)
            answers += collected.values()
        return answers

    async def _one(self, prompt: Prompt, params: SamplingParams) -> list[RequestOutput]:
        return [delta async for delta in self.cluster.generate(prompt, params)]

    # ---- instances in threads --------------------------------------------------------------------------------------

    def instance(self, role: str) -> Poisoned:
        """The first one of a role."""
        assert isinstance(self.processes, ThreadedInstances), "in a process of its own"
        members = self.cluster.router.members.values()
        return self.processes.instances[next(each.name for each in members if each.role == role)]

    def ask(self, role: str, question: Callable[[Engine], Answer]) -> Answer:
        """See Poisoned; of the first instance of a role."""
        return self.instance(role).ask(question)

    def settle(self) -> None:
        """Waits until no instance holds anything for a request, and proves that nothing is left."""
        assert isinstance(self.processes, ThreadedInstances), "in processes of their own"
        end = time.monotonic() + SECONDS
        # Not those that were drained, which end.
        members = self.cluster.router.members
        for instance in [each for name, each in self.processes.instances.items() if name in members]:
            while not instance.ask(_is_idle):
                assert time.monotonic() < end, f"{instance.launch_config.name} holds {instance.ask(Engine.stats)}"
                time.sleep(0.005)
            instance.ask(_check)

    def evict(self, role: str) -> None:
        """Writes what an instance has cached to its tiers, and drops it from the arena."""
        self.instance(role).ask(_evict)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


def _always(to: str, message: Any) -> bool:
    return True


def _is_idle(engine: Engine) -> bool:
    return engine.holds_nothing and not engine.exports and engine.stats()["cache"]["bytes_used"] == 0


def _check(engine: Engine) -> bool:
    engine.check()
    assert not engine.scheduler.manager.fetching.arriving
    return True


def _evict(engine: Engine) -> bool:
    assert engine.tiering.flush(SECONDS), "not written"
    engine.scheduler.manager.eviction.evict(engine.scheduler.manager.tree.num_chunks)
    assert not engine.scheduler.manager.tree.num_chunks
    table: Any = engine.scheduler.manager.table
    poison_free(table)
    return True
