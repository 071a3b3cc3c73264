"""Instances on the machines of a Ray cluster: each is an actor, in a bundle of a placement group.

Ray finds the machines, starts and ends the processes, and reports which have ended. Requests and caches travel over
connections, as between processes of one machine. A separate thread calls Ray, so that the router's loop never waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import sys
import threading
import time
from asyncio import get_running_loop, sleep
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quire.cluster.colocation import STRATEGIES, InstanceResources, colocated_groups, most_cores
from quire.cluster.instance import Instance, LaunchConfig, log_to_stderr
from quire.cluster.processes import END_SECONDS, Processes
from quire.cluster.start import ignore_terminal
from quire.config import ClusterConfig, EngineConfig
from quire.errors import ConfigError
from quire.extras import install_command

log = logging.getLogger("quire")

ANSWER_SECONDS = 5.0
"""Seconds in which the head of a Ray cluster must answer."""

LEFT_SECONDS = 2.0
"""Seconds in which Ray must end the process of an ended instance."""

LEAST_CACHE_SHARE = 0.25
"""Minimum share of the cache that an instance alone on its node would have; less only if the weights leave less."""

_TOKEN_HELP = "Ray reads it from RAY_AUTH_TOKEN, from the file RAY_AUTH_TOKEN_PATH or from ~/.ray/auth_token"


class InstanceActor:
    """An instance in the process of a Ray actor. The process ends with the actor."""

    def where(self) -> tuple[int, str]:
        """The process id, and the node's id."""
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id()

    def run(self, launch_config: str, cache_share: int | None) -> int:
        """Runs an instance until the router ends it or is gone. Returns the exit code.

        cache_share  bytes of the node for weights and cache, if this process must compute the size of the cache
        """
        import ray

        wanted = dataclasses.replace(LaunchConfig.from_json(launch_config), host=ray.util.get_node_ip_address())
        log_to_stderr(wanted)
        ignore_terminal()
        if cache_share is not None:
            options = {**wanted.options, "cache.memory": _cache_bytes(wanted, cache_share)}
            wanted = dataclasses.replace(wanted, options=options)
        code = Instance(wanted).run()
        # The router has Ray end the process. If Ray's own process of the node was killed, nothing ends it: an
        # abandoned actor of Ray 2.60 keeps running.
        timer = threading.Timer(LEFT_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()
        return code


@dataclasses.dataclass(eq=False)
class _ActorState:
    """An actor.

    actor     handle of the actor; None before it is requested
    pid, node process and node of the actor, once it runs
    """

    actor: Any = None
    pid: int | None = None
    node: str | None = None
    has_ended: bool = False


class RayProcesses(Processes):
    """The instances that this process has started on a Ray cluster, by name.

    Every place of an instance has a bundle of resources for as long as this process lives. A restarted instance gets
    the bundle of its predecessor, and Ray moves the bundles of a failed node to other nodes.
    """

    transport = "tcp"
    is_local = False

    def __init__(self, settings: ClusterConfig) -> None:
        """Raises ConfigError without Ray."""
        super().__init__()
        assert settings.address is not None, "no address"
        if any(importlib.util.find_spec(name) is None for name in ("ray", "grpc")):
            raise ConfigError(f"cluster.address needs Ray, which is not installed; {install_command('cluster')}")
        self._settings, self._address = settings, settings.address
        self._thread = ThreadPoolExecutor(1, "quire-ray")
        self._actors: dict[str, _ActorState] = {}
        self._bundles: dict[str, tuple[Any, int]] = {}
        self._groups: list[Any] = []
        self._ray: Any = None
        self._is_ours = self._is_closing = False
        self._share: int | None = None

    async def open(self, roles: Mapping[str, str], config: EngineConfig, weight_bytes: int) -> str:
        """Connects to the Ray cluster, and finds nodes for the instances.

        Raises ConfigError if there is no cluster, if the token is wrong or not required, or if there is no room.
        """
        self._config = config
        return await get_running_loop().run_in_executor(self._thread, self._open, roles, weight_bytes)

    def group(self, place: str) -> str:
        """See Processes. Only with `pairs` must instances share a machine."""
        return self._bundles[place][0].id.hex() if self._settings.placement == "pairs" else ""

    def start(self, launch_config: LaunchConfig) -> None:
        """Starts an instance. Its configuration, with the secret, is an argument of a call: Ray does not store it."""
        running = self._actors[launch_config.name] = _ActorState()
        self._thread.submit(self._begin, launch_config, running)

    def kill(self, name: str) -> None:
        """Ends an instance soon, even a stopped one."""
        if (running := self._actors.pop(name, None)) is not None:
            self._submit_end(running)

    def pid(self, name: str) -> int | None:
        """The process id of an instance, on its machine."""
        return None if name not in self._actors else self._actors[name].pid

    def node(self, name: str) -> str | None:
        """The id of the node on which an instance runs."""
        return None if name not in self._actors else self._actors[name].node

    def ended(self) -> list[str]:
        """See Processes."""
        return [name for name, running in self._actors.items() if running.has_ended]

    async def wait(self, seconds: float = END_SECONDS) -> None:
        """Waits for all instances, which were told to end, kills the rest, and leaves the Ray cluster."""
        self._is_closing = True
        loop = get_running_loop()
        end = loop.time() + seconds
        while any(not running.has_ended for running in self._actors.values()) and loop.time() < end:
            await sleep(0.02)
        await loop.run_in_executor(self._thread, self._leave)
        self._thread.shutdown(wait=False)

    # ---- on the thread for Ray -------------------------------------------------------------------------------------

    def _open(self, roles: Mapping[str, str], weight_bytes: int) -> str:
        ray = self._ray = self._connected()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        sizes = (
            [len(group) for group in colocated_groups(roles, "pairs")] if self._settings.placement == "pairs" else None
        )
        needs = self._needs(nodes, sizes or [1] * len(roles), weight_bytes)
        self._reserve(roles, needs, nodes)
        self._share = self._cache_share(nodes)
        self._cores = needs.cores
        self._actor = ray.remote(
            num_cpus=needs.cores, num_gpus=needs.gpus, memory=needs.memory or None, max_restarts=0
        )(InstanceActor)
        address: str = ray.util.get_node_ip_address()
        return address

    def _connected(self) -> Any:
        """Ray, connected. Raises ConfigError."""
        if "ray" not in sys.modules:
            # Ray reads them when it is imported. Its own default depends on whether there is a token, and a call after
            # a connection has ended would start a Ray of its own.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
        if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
            raise ConfigError(
                "Ray runs what anyone sends it, so Quire uses it with tokens only: set RAY_AUTH_MODE=token"
            )
        import ray
        from ray._private.services import canonicalize_bootstrap_address_or_die

        if self._address == "auto" and ray.is_initialized():
            address = ray.get_runtime_context().gcs_address
        else:
            try:
                address = canonicalize_bootstrap_address_or_die(self._address)
            except Exception as error:
                raise ConfigError(
                    f"no Ray cluster is found for cluster.address {self._address}: {error} Start one with `ray start`,"
                    " see docs/guide/machines.md"
                ) from error
        # Ray itself takes 20 seconds to notice a missing head, or ends the process.
        check_head(address)
        if ray.is_initialized():
            if (other := ray.get_runtime_context().gcs_address) != address:
                raise ConfigError(f"this process has joined the Ray cluster at {other}, and cannot use {address}")
            return ray
        try:
            ray.init(address=address, log_to_driver=True, logging_level=logging.ERROR)
        except Exception as error:
            raise ConfigError(f"the Ray cluster at {address} cannot be used from this machine: {error}") from error
        self._is_ours = True
        return ray

    def _needs(self, nodes: Sequence[Mapping[str, Any]], sizes: Sequence[int], weight_bytes: int) -> InstanceResources:
        config = self._config
        cpus = [int(node["Resources"].get("CPU", 0)) for node in nodes]
        cores = self._settings.cores or config.runtime.threads or most_cores(sizes, cpus)
        on_gpu = config.runtime.device == "cuda" or (
            config.runtime.device == "auto" and any(node["Resources"].get("GPU") for node in nodes)
        )
        cache = config.cache.memory
        memory = weight_bytes + cache if isinstance(cache, int) and not on_gpu else 0
        labels = {role: self._settings.labels(role) for role in ("prefill", "decode", "mixed")}
        return InstanceResources(cores, int(on_gpu), memory, labels)

    def _reserve(self, roles: Mapping[str, str], needs: InstanceResources, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Reserves a bundle for each place. Raises ConfigError if there is no room."""
        from ray.util.placement_group import placement_group

        placement = self._settings.placement
        wanted = colocated_groups(roles, placement)
        for places in wanted:
            labels = [dict(needs.labels[roles[place]]) for place in places]
            group = placement_group(
                [needs.bundle() for _ in places],
                strategy=STRATEGIES[placement],
                bundle_label_selector=labels if any(labels) else None,
            )
            self._groups.append(group)
            self._bundles.update((place, (group, index)) for index, place in enumerate(places))
        end = time.monotonic() + self._settings.place_seconds
        for group, places in zip(self._groups, wanted, strict=True):
            while not group.wait(0.2):
                if self._is_closing or time.monotonic() > end:
                    of = [roles[place] for place in places]
                    raise ConfigError(
                        f"Ray has no room for {' and '.join(places)} after {self._settings.place_seconds:g} s"
                        f"{', on one node' if placement == 'pairs' and len(places) > 1 else ''}:"
                        f" {needs.described(of)}. {_described(nodes)}. Add nodes, or change cluster.cores,"
                        " cache.memory, cluster.placement or the numbers of instances"
                    )

    def _cache_share(self, nodes: Sequence[Mapping[str, Any]]) -> int | None:
        """Bytes of memory per instance on the fullest node; None if instances need not know it."""
        if self._config.cache.memory != "auto" or self._config.runtime.device == "cuda":
            return None
        from ray.util.placement_group import placement_group_table

        used = Counter(
            node for group in self._groups for node in placement_group_table(group)["bundles_to_node_id"].values()
        )
        memory = {node["NodeID"]: int(node["Resources"].get("memory", 0)) for node in nodes}
        shares = [memory[node] // count for node, count in used.items() if memory.get(node)]
        return min(shares, default=None)

    def _begin(self, launch_config: LaunchConfig, running: _ActorState) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        try:
            options = self._config.to_options() | launch_config.options
            if self._config.runtime.threads is None:
                options["runtime.threads"] = self._cores
            group, index = self._bundles[launch_config.name.rpartition(".")[0]]
            # The file of settings exists only on this machine.
            sent = dataclasses.replace(launch_config, options=options, config_file=None, cores=())
            strategy = PlacementGroupSchedulingStrategy(group, index)
            running.actor = self._actor.options(scheduling_strategy=strategy).remote()
            where, done = running.actor.where.remote(), running.actor.run.remote(sent.to_json(), self._share)
        except Exception as error:
            log.error("instance %s: Ray does not start it: %s", launch_config.name, error)
            running.has_ended = True
            return

        def found(future: Future[tuple[int, str]]) -> None:
            if future.exception() is None:
                running.pid, running.node = future.result()

        def finished(future: Future[int]) -> None:
            if (error := future.exception()) is not None and self._actors.get(launch_config.name) is running:
                log.warning("instance %s: %s", launch_config.name, _first_lines(error))
            running.has_ended = True
            self._submit_end(running)

        where.future().add_done_callback(found)
        done.future().add_done_callback(finished)

    def _submit_end(self, running: _ActorState) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended, and Ray ends the remaining actors
            self._thread.submit(self._end, running)

    def _end(self, running: _ActorState) -> None:
        actor, running.actor = running.actor, None
        if actor is not None:
            with contextlib.suppress(Exception):  # Ray is gone, and its actors end with it
                self._ray.kill(actor)

    def _leave(self) -> None:
        for running in self._actors.values():
            self._end(running)
        if self._ray is None:
            return
        from ray.util.placement_group import remove_placement_group

        for group in self._groups:
            with contextlib.suppress(Exception):  # Ray is gone, and its groups are too
                remove_placement_group(group)
        if self._is_ours:
            self._ray.shutdown()


def check_head(address: str) -> None:
    """Raises ConfigError unless the head of a Ray cluster answers, accepts our token, and refuses calls without one."""
    import grpc

    token = find_token()
    if not token:
        raise ConfigError(f"there is no token for the Ray cluster at {address}; {_TOKEN_HELP}")
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")

        def refused(headers: Sequence[tuple[str, str]]) -> bool:
            try:
                ask(b"", timeout=ANSWER_SECONDS, metadata=headers)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                    return True
                raise ConfigError(f"no head of a Ray cluster answers at {address}: {error.details()}") from error
            return False

        if not refused([]):
            raise ConfigError(
                f"the Ray cluster at {address} runs whatever anyone sends: start all its nodes with RAY_AUTH_MODE=token"
            )
        if refused([("authorization", f"Bearer {token}")]):
            raise ConfigError(f"the Ray cluster at {address} has another token; {_TOKEN_HELP}")


def find_token() -> str:
    """The token that Ray uses; empty if there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _cache_bytes(launch_config: LaunchConfig, share: int) -> int:
    """Bytes of an instance's cache, given its share of the node's memory for weights and cache."""
    from quire.engine.build import resolve
    from quire.load import find_calibration
    from quire.models.resolve import resolve_model
    from quire.models.weights import open_model

    path, config = resolve_model(launch_config.model), EngineConfig.from_options(launch_config.options)
    with open_model(path) as checkpoint:
        _, alone = resolve(config, checkpoint.shape, checkpoint, find_calibration(path, config))
    least = int(alone.cache_bytes * LEAST_CACHE_SHARE)
    return min(alone.cache_bytes, max(least, share - alone.weight_bytes))


def _described(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The nodes of a Ray cluster, for an error message."""
    texts = []
    for node in nodes[:8]:
        has = node["Resources"]
        labels = ",".join(f"{key}={value}" for key, value in node["Labels"].items() if not key.startswith("ray.io/"))
        texts.append(
            f"{node['NodeManagerAddress']} has {has.get('CPU', 0):g} cores, {has.get('GPU', 0):g} GPUs and"
            f" {has.get('memory', 0) / 2**30:.1f} GiB{f' and is {labels}' if labels else ''}"
        )
    return "; ".join(texts) + (f"; and {len(nodes) - 8} more nodes" if len(nodes) > 8 else "")


def _first_lines(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:3]) or type(error).__name__
