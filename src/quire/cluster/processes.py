"""The processes of instances: starts them, ends them, and gives them cores and memory of this machine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Sequence

from quire.cluster.instance import Order

log = logging.getLogger("quire")

END_SECONDS = 10.0
"""Time in which an instance may end by itself."""


class Processes:
    """The instances that this process has started, by name."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, order: Order) -> None:
        """Starts an instance. It gets its order, with the secret, over a pipe."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, len(order.cores)))} if order.cores else None
        process = subprocess.Popen(
            [sys.executable, "-m", "quire.cluster.instance"], stdin=subprocess.PIPE, env=environment
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(order.to_json().encode() + b"\n")
        self._running[order.name] = process

    def kill(self, name: str) -> None:
        """Ends an instance at once, also a stopped one."""
        process = self._running.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def pid(self, name: str) -> int | None:
        """The process id of an instance."""
        process = self._running.get(name)
        return None if process is None else process.pid

    def ended(self) -> list[str]:
        """The instances that ended since they were started, and no longer count."""
        return [name for name, process in self._running.items() if process.poll() is not None]

    async def wait(self, seconds: float = END_SECONDS) -> None:
        """Waits for all of them, which were told to end, and then kills the others."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while any(process.poll() is None for process in self._running.values()) and loop.time() < end:
            await asyncio.sleep(0.02)
        for name in list(self._running):
            self.kill(name)


def share_cores(count: int) -> list[tuple[int, ...]]:
    """Cores of each of `count` instances: a part of those of this process. Empty, with fewer cores than instances: the
    system then divides them.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        return [()] * count
    bounds = [index * len(cores) // count for index in range(count + 1)]
    return [tuple(cores[first:end]) for first, end in itertools.pairwise(bounds)]


def share_memory(count: int, weight_bytes: int, cache_bytes: int) -> int:
    """Bytes for the cache of each instance where one alone would take `cache_bytes` beside its weights."""
    return max(cache_bytes // (4 * count), (weight_bytes + cache_bytes) // count - weight_bytes)


def places_of(counts: Sequence[tuple[str, int]]) -> list[tuple[str, str]]:
    """Place and role of each instance, given the number for each role."""
    return [(f"{role}-{index}", role) for role, count in counts for index in range(count)]
