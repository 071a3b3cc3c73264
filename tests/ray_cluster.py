"""Ray for tests: a head in processes of its own, with a token, which is started and stopped by process id.

`ray stop` would end every Ray of the machine. All processes of a head, actors included, inherit a mark in their
environment, so that a test finds those that are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quire import RequestOutput, SamplingParams
from quire.cluster.instance import LaunchConfig
from quire.cluster.ray_processes import RayProcesses
from quire.config import ClusterConfig, EngineConfig

from .clusters import RunningCluster

START_SECONDS, STOP_SECONDS = 60.0, 30.0
MARK = "QUIRE_TEST_RAY"
TOKEN = secrets.token_hex(20)
"""Of all of them: a process reads its token once."""
SMALL = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}  # fmt: skip


class Head:
    """A head with one node, in a session of its own.

    mark    that its processes have in their environment
    folder  of its logs and sockets
    """

    def __init__(self, cores: int, **environment: str) -> None:
        self.mark = secrets.token_hex(8)
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, **SMALL, **environment}
        self._folder = short_folder()
        folder = self.folder = Path(self._folder.name)
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        output = folder / "head.txt"
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [
                    str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
                    "--include-dashboard=false", f"--port={port}", "--node-ip-address=127.0.0.1",
                    f"--temp-dir={folder}", f"--num-cpus={cores}", "--object-store-memory=80000000",
                    f"--ray-client-server-port={free_port()}", "--dashboard-agent-listen-port=0",
                ],
                env={**os.environ, **self.environment, MARK: self.mark}, start_new_session=True,
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        until(
            lambda: "blocks" in (text := output.read_text()) or "block forever" in text or self._has_ended(output),
            "the head is up", START_SECONDS,
        )  # fmt: skip

    def _has_ended(self, output: Path) -> bool:
        assert self.process.poll() is None, output.read_text()
        return False

    def actors(self) -> list[int]:
        """Processes with an instance."""
        return [pid for pid in marked(self.mark) if "InstanceActor" in command_of(pid)]

    def stop(self) -> None:
        """Ends it, and all that it has started."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
            ended(self.mark)
        finally:
            for pid in marked(self.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(STOP_SECONDS)
            self._folder.cleanup()


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for Ray's sockets, whose paths may have 107 characters: shorter than those of pytest."""
    return tempfile.TemporaryDirectory(prefix="quire-", dir="/tmp", ignore_cleanup_errors=True)


def ended(mark: str) -> None:
    """Waits until no process has a mark."""
    end = time.monotonic() + STOP_SECONDS
    while left := [f"{pid} {command_of(pid)}" for pid in marked(mark)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Processes that have a mark, without those that have ended and wait for their parents."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def parent_of(pid: int) -> int:
    """The process that has started another one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def until(is_so: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Waits until something is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not so after {seconds:g} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Variables of this process for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---- clusters of instances -------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "model.dtype": "float32", "runtime.device": "cpu", "cache.memory": "8MiB", "scheduler.max_running": 8,
    "scheduler.token_budget": 256,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [(7 * index + length) % 200 + 3 for index in range(length)]} for length in (5, 64, 200)]
PARAMS = [SamplingParams(max_tokens=12, temperature=0.8, seed=seed, ignore_eos=True) for seed in range(len(PROMPTS))]
LONG = SamplingParams(max_tokens=250, temperature=0.8, seed=3, ignore_eos=True)


class OnRayWith(RayProcesses):
    """Instances with further options."""

    def __init__(self, settings: ClusterConfig, options: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._further = options

    def start(self, launch_config: LaunchConfig) -> None:
        super().start(dataclasses.replace(launch_config, options={**launch_config.options, **self._further}))


def on_ray(address: str, model: Path, further: Mapping[str, Any] | None = None, **settings: Any) -> RunningCluster:
    config = ClusterConfig(address=address, **settings)
    return RunningCluster(model, OPTIONS, OnRayWith(config, further or {}), "tcp", address=address, **settings)


def tokens(answer: RequestOutput) -> list[int]:
    return list(answer.outputs[0].token_ids)


def instance(running: RunningCluster, place: str) -> dict[str, Any]:
    """What the cluster tells of an instance."""
    return next(each for each in running.cluster.operations.state()["instances"] if each["place"] == place)


def serves_anew(running: RunningCluster, place: str, before: dict[str, Any]) -> bool:
    now = instance(running, place)
    return now["health"] == "serving" and now["name"] != before["name"] and now["pid"] is not None


def places(address: str, prefill: int, decode: int, **settings: Any) -> dict[str, str]:
    """The nodes that Ray finds for instances, without starting any."""
    from ray.util.placement_group import placement_group_table

    counts = {"prefill": prefill, "decode": decode}
    roles = {f"{role}-{index}": role for role, count in counts.items() for index in range(count)}
    config = EngineConfig.from_options(OPTIONS)
    processes = RayProcesses(ClusterConfig(address=address, prefill=prefill, decode=decode, **settings))

    async def find() -> dict[str, str]:
        try:
            await processes.open(roles, config, 1000)
            found = {}
            for place, (group, index) in processes._bundles.items():
                found[place] = placement_group_table(group)["bundles_to_node_id"][index]
            return found
        finally:
            await processes.wait()

    return asyncio.run(find())
