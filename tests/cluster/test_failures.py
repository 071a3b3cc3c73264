"""What fails in a cluster costs no token: instances that are killed or stopped, caches that are damaged or do not fit,
messages that are lost or come twice, and clients that leave. Afterwards nobody holds anything.

With the same seed an answer must be the one of a single engine, whatever happened on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.cluster.cluster import Cluster
from quire.cluster.members import Member
from quire.cluster.protocol import RequestPhase
from quire.cluster.router import RoutedRequest
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.params import SamplingParams
from quire.errors import InstancesFailedError, QueueFullError, RequestError

from ..clusters import SECONDS, SMALL, RunningCluster, ThreadedInstances
from ..effort import combine, tries
from ..faults import Faults, FaultyConnections, FaultyProcesses

PARAMS = SamplingParams(max_tokens=60, temperature=0.8, ignore_eos=True)


@pytest.fixture(scope="module")
def apart(model: Path) -> Iterator[RunningCluster]:
    """Real processes: one computes prompts, two decode. They copy slowly, and overwrite what they have let go."""
    processes = FaultyProcesses("delay=0.05,poison")
    with RunningCluster(model, SMALL, processes, "", prefill=1, decode=2, tries=6) as running:
        yield running


@contextlib.contextmanager
def threads(
    model: Path, faults: str = "", options: dict[str, Any] | None = None, **settings: Any
) -> Iterator[RunningCluster]:
    """Instances in threads of this process, which end with nothing held."""
    with pytest.MonkeyPatch.context() as patch:
        Faults.read(faults).install(patch.setattr)
        with RunningCluster(model, SMALL | (options or {}), ThreadedInstances(), "shm", **settings) as running:
            yield running
            running.settle()


def prompt_of(rng: random.Random, length: int) -> dict[str, Any]:
    return {"prompt_token_ids": [rng.randrange(3, 250) for _ in range(length)]}


def random_requests(rng: random.Random, count: int, **changes: Any) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts of all lengths, and parameters with seeds of their own, some of them greedy."""
    prompts = [prompt_of(rng, rng.choice([1, 63, 64, 65, 128, 200, 300])) for _ in range(count)]
    params = [replace(PARAMS, **changes, seed=rng.randrange(1 << 30)) for _ in prompts]
    return prompts, [replace(each, temperature=0.0) if index % 3 == 0 else each for index, each in enumerate(params)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in outputs]


class Client:
    """One request, and what came of it so far."""

    def __init__(self, cluster: Cluster, prompt: Any, params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.stream: AsyncGenerator[RequestOutput, None] = cluster.generate(prompt, params)
        self.task = asyncio.create_task(self._read())
        self._cluster, self._before = cluster, {*cluster.router._requests}

    @property
    def request(self) -> RoutedRequest:
        """Its request at the router; those of later clients have higher numbers."""
        requests = self._cluster.router._requests
        return requests[min(requests.keys() - self._before)]

    def is_begun(self) -> bool:
        """Whether an attempt at it is on its way to the instances."""
        return (
            bool(self._cluster.router._requests.keys() - self._before)
            and self.request.state.phase is RequestPhase.RUNNING
        )

    async def until(self, is_there: Callable[[Client], bool]) -> None:
        """Waits for a state."""
        async with asyncio.timeout(SECONDS):
            while not is_there(self):
                assert not self.task.done(), "it was over before"
                await asyncio.sleep(0.001)

    async def leave(self) -> None:
        """The client closes its stream, wherever it is."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def _read(self) -> None:
        async with contextlib.aclosing(self.stream) as stream:
            async for output in stream:
                self.token_ids += output.outputs[0].token_ids


# ---- processes -------------------------------------------------------------------------------------------------------

MOMENTS: dict[str, tuple[str, Callable[[Client], bool]]] = {
    "the source computes": ("source", lambda client: True),
    "the source holds": ("source", lambda client: len(client.token_ids) == 1),
    "the receiver pulls": ("receiver", lambda client: len(client.token_ids) == 1),
    "the receiver decodes": ("receiver", lambda client: len(client.token_ids) > 5),
}
"""Who is hit, and when."""


async def whole(cluster: Cluster) -> None:
    """Waits until all instances serve, and hold nothing."""

    def held(member: Member) -> bool:
        load, stats = member.load, member.stats
        return (
            not member.is_serving or load is None or stats is None or stats["cache"]["bytes_used"] > 0
            or load.num_held + load.num_running + load.num_waiting > 0 or load.free_bytes < load.total_bytes
        )  # fmt: skip

    async with asyncio.timeout(SECONDS):
        while len(cluster.router.members) < 3 or any(map(held, cluster.router.members.values())):
            await asyncio.sleep(0.02)


def signalled(cluster: Cluster, name: str, number: signal.Signals) -> None:
    pid = cluster.supervisor.processes.pid(name)
    assert pid is not None
    os.kill(pid, number)


@pytest.mark.slow
@combine(1, moment=list(MOMENTS), how=["killed", "stopped"])
def test_an_instance_that_goes_costs_no_token(
    apart: RunningCluster, single_engine: LLM, moment: str, how: str, seed: int
) -> None:
    rng, cluster = random.Random(seed), apart.cluster
    role, is_there = MOMENTS[moment]
    # One that is hit, and others beside it.
    prompts, params = random_requests(rng, 5)
    prompts[0], params[0] = prompt_of(rng, 500), replace(params[0], max_tokens=300)

    async def scenario() -> list[list[int]]:
        await whole(cluster)
        if moment == "the source computes":
            # It is stopped before, so that it surely has not ended.
            source = next(each for each in cluster.router.members.values() if each.role == "prefill")
            signalled(cluster, source.name, signal.SIGSTOP)
        first = Client(cluster, prompts[0], params[0])
        await asyncio.sleep(0)
        others = [Client(cluster, *each) for each in zip(prompts[1:], params[1:], strict=True)]
        await first.until(is_there)
        state = first.request.state
        name = getattr(state, role)
        assert state.number == 1 and name
        if moment != "the receiver decodes":
            assert not state.is_handed_over, "it has been handed over before"
        if how == "killed":
            signalled(cluster, name, signal.SIGKILL)
        else:
            signalled(cluster, name, signal.SIGSTOP)
            await asyncio.sleep(1.0)
            signalled(cluster, name, signal.SIGCONT)
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*(each.task for each in (first, *others)))
        await whole(cluster)
        assert (name in cluster.router.members) == (how == "stopped")
        return [each.token_ids for each in (first, *others)]

    assert apart.call(scenario()) == tokens(single_engine.generate(prompts, params))


@pytest.mark.slow
def test_an_instance_that_is_silent_for_too_long_is_ended_and_replaced(
    apart: RunningCluster, single_engine: LLM, seed: int
) -> None:
    """Even if it would go on later."""
    rng, cluster = random.Random(seed), apart.cluster
    prompts, params = random_requests(rng, 1, max_tokens=300)

    async def scenario() -> list[list[int]]:
        await whole(cluster)
        client = Client(cluster, prompts[0], params[0])
        await client.until(lambda client: len(client.token_ids) > 5)
        name = client.request.state.receiver
        pid = cluster.supervisor.processes.pid(name)
        signalled(cluster, name, signal.SIGSTOP)
        async with asyncio.timeout(SECONDS):
            await client.task
        assert name not in cluster.router.members
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)
        await whole(cluster)
        return [client.token_ids]

    assert apart.call(scenario()) == tokens(single_engine.generate(prompts, params))


# ---- messages and extents --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", ["corrupt=0.2", "lose=0.1,peers", "lose=0.1", "repeat=0.5", "delay=0.02,poison"])
def test_damaged_lost_and_repeated_messages_cost_no_token(
    model: Path, single_engine: LLM, faults: str, seed: int
) -> None:
    rng = random.Random(seed)
    prompts, params = random_requests(rng, tries(8), max_tokens=10)
    expected = tokens(single_engine.generate(prompts, params))
    with threads(model, f"{faults},seed={seed}", timeout=1, tries=50) as running:
        connections = [running.instance(role)._connections for role in ("prefill", "decode")]
        for _ in range(30):  # few messages may all arrive
            assert tokens(running.generate(prompts, params)) == expected
            happened = sum((each.counts for each in connections if isinstance(each, FaultyConnections)), Counter[str]())
            if happened:
                break
        assert set(happened) == {faults.partition("=")[0]}, "nothing went wrong"


@pytest.mark.parametrize("faults", ["corrupt=1", "lose=1,peers"])
def test_one_instance_does_the_last_attempt_alone(model: Path, single_engine: LLM, faults: str, seed: int) -> None:
    """Nothing whole ever comes from the source to its receiver."""
    rng = random.Random(seed)
    prompts, params = random_requests(rng, 4, max_tokens=20)
    with threads(model, faults, timeout=1, tries=2) as running:
        assert tokens(running.generate(prompts, params)) == tokens(single_engine.generate(prompts, params))


def test_an_answer_that_cannot_go_on_ends_with_a_clear_error(model: Path, single_engine: LLM, seed: int) -> None:
    """The client has its first tokens already, and they are right."""
    rng = random.Random(seed)
    prompts, params = random_requests(rng, 1, max_tokens=300)
    with threads(model, timeout=1, tries=2) as running:

        async def scenario() -> list[int]:
            client = Client(running.cluster, prompts[0], params[0])
            await client.until(lambda client: len(client.token_ids) > 5)
            failed = pytest.raises(InstancesFailedError, match="the request failed after 2 attempts")
            with blocked(running, "prefill"), blocked(running, "decode"), failed:
                await asyncio.wait_for(client.task, 20)
            return client.token_ids

        found = running.call(scenario())
    (expected,) = tokens(single_engine.generate(prompts, params))
    assert len(found) > 5 and found == expected[: len(found)]


# ---- room ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def blocked(running: RunningCluster, role: str) -> Iterator[None]:
    """An instance whose engine stands still, while its links and its agent go on."""
    gate = threading.Event()
    running.instance(role).thread.submit(lambda: gate.wait(SECONDS))
    try:
        yield
    finally:
        gate.set()


@contextlib.contextmanager
def slowed(running: RunningCluster, role: str, seconds: float) -> Iterator[None]:
    """An instance whose steps take longer."""
    engine = running.instance(role).engine
    step = engine.step

    def slow() -> list[RequestOutput]:
        time.sleep(seconds)
        return step()

    engine.step = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.step = step  # type: ignore[method-assign]


def counted_steps(engine: Engine) -> list[None]:
    """Grows with each step from now on."""
    found, step = list[None](), engine.step

    def counted() -> list[RequestOutput]:
        found.append(None)
        return step()

    engine.step = counted  # type: ignore[method-assign]
    return found


def test_a_receiver_that_stands_still_fills_its_source_and_nothing_is_lost(
    model: Path, single_engine: LLM, seed: int
) -> None:
    """The source's memory is the queue: it begins no more prompts than it can hold."""
    rng = random.Random(seed)
    prompts = [prompt_of(rng, 300) for _ in range(24)]
    params = [replace(PARAMS, max_tokens=5, seed=index) for index in range(24)]
    with threads(model, options={"cache.memory": "512KiB", "scheduler.max_queue": 24}) as running:

        async def scenario() -> list[list[int]]:
            with blocked(running, "decode"):
                clients = []
                for each in zip(prompts, params, strict=True):
                    clients.append(Client(running.cluster, *each))
                    await asyncio.sleep(0)
                held, changed = -1, time.monotonic()
                while time.monotonic() < changed + 0.7:
                    now = await asyncio.to_thread(running.instance("prefill").ask, lambda engine: len(engine.exports))
                    if now != held:
                        held, changed = now, time.monotonic()
                    await asyncio.sleep(0.02)
                assert 0 < held < len(prompts)
                steps = await asyncio.to_thread(running.instance("prefill").ask, counted_steps)
                await asyncio.sleep(0.5)
                assert len(steps) < 100, "it takes the processor from others while it waits"
                assert sum(len(each.token_ids) for each in clients) == held
                # The queue has room for as many as were computed, and then the server answers 429.
                clients += [Client(running.cluster, prompts[0], params[0]) for _ in range(held)]
                await asyncio.gather(*(each.until(Client.is_begun) for each in clients[24:]))
                with pytest.raises(QueueFullError):
                    await anext(running.cluster.generate(prompts[0], params[0]))
            async with asyncio.timeout(SECONDS):
                await asyncio.gather(*(each.task for each in clients))
            return [each.token_ids for each in clients]

        found, expected = running.call(scenario()), tokens(single_engine.generate(prompts, params))
        assert found[:24] == expected and all(each == expected[0] for each in found[24:])


def test_a_receiver_without_room_takes_one_after_the_other(model: Path, single_engine: LLM, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [prompt_of(rng, 300) for _ in range(12)]
    params = [replace(PARAMS, max_tokens=30, seed=index) for index in range(12)]
    with threads(model, options={"cache.memory": "256KiB", "model.max_context": 400}) as running:
        assert tokens(running.generate(prompts, params)) == tokens(single_engine.generate(prompts, params))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_queue_may_be_longer_than_the_timeout(model: Path, single_engine: LLM, role: str, seed: int) -> None:
    """Seconds in a queue that moves are not seconds without an answer: who is given up only waits again."""
    rng = random.Random(seed)
    prompts = [prompt_of(rng, 300) for _ in range(24)]
    params = [replace(PARAMS, max_tokens=60 if role == "decode" else 2, seed=index) for index in range(24)]
    with threads(model, timeout=1.0, tries=10) as running, slowed(running, role, 0.1 if role == "prefill" else 0.004):
        running.instance(role).engine.scheduler.policy.max_running = 2
        begun = time.monotonic()
        assert tokens(running.generate(prompts, params)) == tokens(single_engine.generate(prompts, params))
        assert time.monotonic() - begun > 2.5, "the queue is too short to prove anything"
        # Whoever waits for longer than a second would be given up at least once. A busy machine may stand still, too.
        assert running.cluster.router.counts["again"] < 6


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_answers_have_as_many_tokens_as_were_asked_for(
    model: Path, single_engine: LLM, max_tokens: int, seed: int
) -> None:
    rng = random.Random(seed)
    with threads(model) as running:
        prompts, params = random_requests(rng, 6, max_tokens=max_tokens)
        found = tokens(running.generate(prompts, params))
    assert found == tokens(single_engine.generate(prompts, params))
    assert {len(each) for each in found} == {max_tokens}


def test_what_cannot_run_is_refused_at_once(model: Path) -> None:
    with threads(model, options={"scheduler.max_queue": 8}) as running:

        async def scenario() -> None:
            with pytest.raises(RequestError, match="1024"):
                await anext(running.cluster.generate({"prompt_token_ids": [5] * 1024}, PARAMS))
            with blocked(running, "prefill"):
                clients = [Client(running.cluster, {"prompt_token_ids": [5, 6, 7]}, PARAMS) for _ in range(8)]
                await asyncio.sleep(0.05)
                with pytest.raises(QueueFullError):
                    await anext(running.cluster.generate({"prompt_token_ids": [5, 6, 7]}, PARAMS))
            await asyncio.gather(*(each.task for each in clients))

        running.call(scenario())


# ---- clients ---------------------------------------------------------------------------------------------------------


def test_a_client_may_leave_in_every_state(model: Path, single_engine: LLM, seed: int) -> None:
    """While its request is queued, computed, held, pulled or decoded, and at random moments between."""
    rng = random.Random(seed)
    with threads(model, "delay=0.01,poison") as running:
        cluster = running.cluster
        prompts, params = random_requests(rng, 3, max_tokens=100)

        async def leaves(at: str) -> None:
            client = Client(cluster, prompt_of(rng, 300), PARAMS)
            if at == "at some time":
                await asyncio.sleep(rng.uniform(0, 0.15))
            elif at in ("queued", "computed"):
                await client.until(Client.is_begun)
                if at == "computed":
                    source = running.instance("prefill")
                    while not await asyncio.to_thread(source.ask, lambda engine: bool(engine.scheduler.running)):
                        pass
                assert not client.token_ids
            else:
                count = 1 if at in ("held", "pulled") else 5
                await client.until(lambda client: len(client.token_ids) >= count)
            await client.leave()

        async def scenario() -> list[list[int]]:
            staying = [Client(cluster, *each) for each in zip(prompts, params, strict=True)]
            await asyncio.gather(*(each.until(lambda client: len(client.token_ids) > 0) for each in staying))
            with blocked(running, "prefill"):
                await leaves("queued")
            with slowed(running, "prefill", 0.1):
                await leaves("computed")
            await leaves("pulled")
            with blocked(running, "decode"):
                await leaves("held")
            await leaves("decoded")
            for _ in range(tries(15)):
                await leaves("at some time")
            await asyncio.gather(*(leaves("at some time") for _ in range(10)))
            async with asyncio.timeout(SECONDS):
                await asyncio.gather(*(each.task for each in staying))
            assert not cluster.router._requests
            for member in cluster.router.members.values():
                assert not member.rows and not member.sequences
            return [each.token_ids for each in staying]

        assert running.call(scenario()) == tokens(single_engine.generate(prompts, params))


# ---- operations ------------------------------------------------------------------------------------------------------


def test_instances_are_restarted_and_change_their_roles_without_a_failed_request(
    model: Path, single_engine: LLM, seed: int
) -> None:
    rng = random.Random(seed)
    prompts, params = random_requests(rng, 40, max_tokens=60)
    with threads(model, prefill=1, decode=1, mixed=1, tries=1) as running:
        cluster = running.cluster

        async def scenario() -> list[list[int]]:
            found: list[list[int]] = [[] for _ in prompts]
            waiting = iter(range(len(prompts)))
            is_over = asyncio.Event()

            async def client() -> None:
                for index in waiting:
                    one = Client(cluster, prompts[index], params[index])
                    await one.task
                    found[index] = one.token_ids
                is_over.set()

            clients = [asyncio.create_task(client()) for _ in range(6)]
            await asyncio.sleep(0.05)
            cluster.operations.set_role("mixed-0", "decode")
            await cluster.operations.restart()
            cluster.operations.set_role("mixed-0", "prefill")
            await asyncio.sleep(0.05)
            cluster.operations.set_role("mixed-0", "mixed")
            async with asyncio.timeout(SECONDS):
                await asyncio.gather(*clients)
            assert cluster.router.counts["again"] == 0
            return found

        assert running.call(scenario()) == tokens(single_engine.generate(prompts, params))


@pytest.mark.slow
def test_an_engine_that_stops_by_itself_ends_its_instance(model: Path, single_engine: LLM, seed: int) -> None:
    rng = random.Random(seed)
    prompts, params = random_requests(rng, 6, max_tokens=100)
    with threads(model, prefill=1, decode=1, mixed=1) as running:

        def fail() -> None:
            raise RuntimeError("a kernel has failed")

        async def scenario() -> list[list[int]]:
            clients = [Client(running.cluster, *each) for each in zip(prompts, params, strict=True)]
            await asyncio.sleep(0.05)
            running.instance("decode").thread.submit(fail)
            async with asyncio.timeout(SECONDS):
                await asyncio.gather(*(each.task for each in clients))
            while sum(each.is_serving for each in running.cluster.router.members.values()) < 3:
                await asyncio.sleep(0.02)
            return [each.token_ids for each in clients]

        assert running.call(scenario()) == tokens(single_engine.generate(prompts, params))
