"""The processes of instances: starts them, ends them, and gives them cores and memory of this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from quire import parent_watch
from quire.cluster.instance import LaunchConfig
from quire.config import EngineConfig

log = logging.getLogger("quire")

END_SECONDS = 10.0
"""Seconds that an instance has to end by itself."""


@dataclass(frozen=True)
class _Instance:
    """An instance's process, and a pipe to it. The pipe closes if the parent ends while the instance starts. Then the
    instance ends, too.
    """

    process: subprocess.Popen[bytes]
    writing: int


class Processes:
    """The instances that this process has started, by name.

    transport  default transport of their caches
    is_local   whether they share the cores and the memory of this machine
    arguments  Python's arguments that start an instance; the number of a pipe is appended, see `cluster.start`
    """

    transport = "shm"
    is_local = True
    arguments: tuple[str, ...] = ("-m", "quire.cluster.start")

    def __init__(self) -> None:
        self._running: dict[str, _Instance] = {}
        self._killed: list[subprocess.Popen[bytes]] = []

    async def open(self, roles: Mapping[str, str], config: EngineConfig, weight_bytes: int) -> str:
        """Prepares for instances. Returns the host at which they reach this process. Raises ConfigError.

        roles  roles by place
        """
        return "127.0.0.1"

    def group(self, place: str) -> str:
        """The group of instances that must share a machine with this one."""
        return ""

    def start(self, launch_config: LaunchConfig) -> None:
        """Starts an instance. Raises OSError if that fails.

        The instance reads its configuration, with the secret, from an anonymous file in memory. A pipe would block the
        caller until the instance reads, because pinned prefixes may be longer than a pipe's buffer.
        """
        environment = (
            {**os.environ, "OMP_NUM_THREADS": str(max(1, len(launch_config.cores)))} if launch_config.cores else None
        )
        with open(os.memfd_create("quire-launch-config"), "w+b") as file:
            file.write(launch_config.to_json().encode() + b"\n")
            file.seek(0)
            started = parent_watch.start([sys.executable, *self.arguments], stdin=file, env=environment)
            self._running[launch_config.name] = _Instance(*started)

    def kill(self, name: str) -> None:
        """Ends an instance at once, even a stopped one. The system may take a while to free its memory."""
        instance = self._running.pop(name, None)
        if instance is not None:
            instance.process.kill()
            os.close(instance.writing)
            self._killed.append(instance.process)

    def pid(self, name: str) -> int | None:
        """The process id of an instance."""
        instance = self._running.get(name)
        return None if instance is None else instance.process.pid

    def ended(self) -> list[str]:
        """The instances that ended by themselves."""
        self._killed = [process for process in self._killed if process.poll() is None]
        return [name for name, each in self._running.items() if each.process.poll() is not None]

    async def wait(self, seconds: float = END_SECONDS) -> None:
        """Waits for all instances, which were told to end, and kills the rest."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while any(each.process.poll() is None for each in self._running.values()) and loop.time() < end:
            await asyncio.sleep(0.02)
        for name in list(self._running):
            self.kill(name)
        end = loop.time() + seconds
        while any(process.poll() is None for process in self._killed) and loop.time() < end:
            await asyncio.sleep(0.02)
