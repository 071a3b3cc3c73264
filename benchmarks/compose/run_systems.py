"""Runs one configuration, and tells latencies and memory. A process of its own, so that its memory is the run's alone:

    python benchmarks/compose/run_systems.py    with an `Order` as JSON on the standard input

It prints a `Reply` as JSON on the last line of the standard output. Clients are tasks of this process, which cost
little. Without instances the engine is in this process too, on a thread; with instances it is the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asking import Asked, asked
from results import Served, Stage
from systems import Load

from quire.async_llm import AsyncLLM
from quire.cluster.cluster import Cluster
from quire.config import ClusterConfig
from quire.engine.params import SamplingParams
from quire.errors import ConfigError, QuireError

MEMORY_SECONDS = 0.5
"""Between two looks at the memory. Each takes some milliseconds of a core."""

POLL_SECONDS = 0.1
"""Between two looks at the counters."""

ALONE = 3
"""Requests that are sent one after the other, to know the latencies of an idle machine."""

QUIET_SECONDS = 20.0
"""Longest wait between two stages for what was cancelled."""

PATIENCE = 2.0
"""A stage takes at most this many times its seconds, as long as it has fewer answers than clients."""

START_SECONDS, STAGE_FACTOR = 300.0, 4.0
"""A run may take this long to start, and this many times the seconds of its stages."""


@dataclass(frozen=True)
class Order:
    """What to run.

    options    of each engine
    instances  numbers of instances by role; empty: one engine
    is_probe   two long requests at once, to learn what memory is taken beside the cache
    is_base    whether latencies of an idle machine are wanted
    """

    model: str
    options: dict[str, Any]
    instances: dict[str, int]
    load: Load
    is_probe: bool = False
    is_base: bool = False

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """What `to_json` wrote."""
        found = json.loads(text)
        load = found["load"] | {"clients": tuple(found["load"]["clients"])}
        return cls(**found | {"load": Load(**load)})


@dataclass
class Reply:
    """What was found.

    refused  why the configuration cannot run; empty: it did
    pss      most bytes of all processes together
    alone    times to the first token, and per token, of requests that were alone
    """

    refused: str = ""
    pss: int = 0
    stages: list[Stage] = field(default_factory=list)
    alone: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> Reply:
        """What `to_json` wrote."""
        found = json.loads(text)
        stages = [
            Stage(**each | {"served": tuple(Served(**one) for one in each["served"])}) for each in found.pop("stages")
        ]
        return cls(**found | {"stages": stages, "alone": [tuple(each) for each in found["alone"]]})

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))


def start(order: Order) -> Reply:
    """Runs an order in a process of its own. Raises QuireError if that does not end as it should."""
    limit = START_SECONDS + STAGE_FACTOR * order.load.seconds * len(order.load.clients)
    command = [sys.executable, __file__]
    try:
        done = subprocess.run(
            command, input=order.to_json(), capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        raise QuireError(f"a run took more than {limit:.0f} s: {order.options}") from None
    if done.returncode:
        raise QuireError(f"a run failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return Reply.from_json(done.stdout.splitlines()[-1])


# ---- in the process of its own ---------------------------------------------------------------------------------------


def family(pid: int) -> Iterator[int]:
    """A process and all that came from it."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))


def proportional_bytes(pid: int) -> int:
    """PSS of a process: of memory that several processes map, each has its part. 0 for one that has ended.

    Raises ConfigError where the system does not tell.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError) as error:
        if Path("/proc/self/smaps_rollup").exists():
            return 0
        raise ConfigError("the benchmark needs /proc/PID/smaps_rollup, which this system does not have") from error
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


class Meter:
    """Notes the most memory that this process and all that came from it have together."""

    def __init__(self) -> None:
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meter:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Notes the memory of now."""
        self.most = max(self.most, sum(proportional_bytes(pid) for pid in family(os.getpid())))

    def _watch(self) -> None:
        while not self._ended.wait(MEMORY_SECONDS):
            self.look()


Llm = AsyncLLM | Cluster


class Clients:
    """Clients that ask, and the answers that they got."""

    def __init__(self, llm: Llm, requests: Iterator[Asked]) -> None:
        self._llm, self._requests = llm, requests

    async def one(self, begun: float = 0.0) -> Served:
        """Asks once. begun: of its stage."""
        prompt, num_out = next(self._requests)
        params = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True, detokenize=False)
        sent, first, count = time.perf_counter(), 0.0, 0
        async for delta in self._llm.generate({"prompt_token_ids": prompt}, params):
            (output,) = delta.outputs
            if output.finish_reason == "error":
                raise QuireError(f"a request failed: {output.stop_reason}")
            count += len(output.token_ids)
            first = first or time.perf_counter()
        now = time.perf_counter()
        if count != num_out:
            raise QuireError(f"an answer has {count} tokens instead of {num_out}")
        return Served(now - begun, first - sent, (now - first) / (count - 1))

    async def stage(self, clients: int, seconds: float) -> Stage:
        """All clients ask again and again, until the seconds are over, or longer if answers are slow. Then what runs is
        cancelled.
        """
        served, begun, before = list[Served](), time.perf_counter(), self._llm.stats()["preemptions"]
        running = 0

        async def client() -> None:
            while True:
                served.append(await self.one(begun))

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        try:
            while (took := time.perf_counter() - begun) < seconds * (PATIENCE if len(served) < clients else 1.0):
                await asyncio.wait(tasks, timeout=POLL_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                for task in tasks:
                    if task.done():
                        task.result()
                running = max(running, self._llm.stats()["running"])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._settle()
        return Stage(clients, took, tuple(served), running, self._llm.stats()["preemptions"] - before)

    async def _settle(self) -> None:
        """Waits until nothing runs."""
        end = time.perf_counter() + QUIET_SECONDS
        while time.perf_counter() < end and (stats := self._llm.stats())["running"] + stats["waiting"]:
            await asyncio.sleep(POLL_SECONDS)


def _made(order: Order) -> Llm:
    if not order.instances:
        return AsyncLLM(order.model, order.options)
    settings = ClusterConfig(prefill=order.instances["prefill"], decode=order.instances["decode"])
    return Cluster(order.model, order.options, settings=settings)


async def run(order: Order) -> Reply:
    """Runs an order in this process."""
    try:
        async with _made(order) as llm:
            with Meter() as meter:
                clients = Clients(llm, asked(order.load, llm.shape.vocab_size))
                reply = Reply()
                if order.is_probe:
                    await asyncio.gather(clients.one(), clients.one())
                else:
                    await clients.one()  # the first steps warm caches
                if order.is_base:
                    alone = [await clients.one() for _ in range(ALONE)]
                    reply.alone = [(each.ttft, each.tpot) for each in alone]
                for count in () if order.is_probe else order.load.clients:
                    reply.stages.append(await clients.stage(count, order.load.seconds))
                meter.look()
            reply.pss = meter.most
            return reply
    except ConfigError as error:
        return Reply(refused=str(error))


def main() -> int:
    """Runs the order that the standard input describes."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        reply = asyncio.run(run(Order.from_json(sys.stdin.read())))
    except QuireError as error:
        print(error, file=sys.stderr)
        return 1
    print(reply.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
