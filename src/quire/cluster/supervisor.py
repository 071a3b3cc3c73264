"""Starts the instances of a cluster, watches them, and restarts failed ones."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from quire.cluster.bodies import AssignRole, InstanceLoad, InstanceReady, LoadingHeartbeat, PeerAddresses, Shutdown
from quire.cluster.connections import PeerConnections
from quire.cluster.instance import LaunchConfig, compatibility_tag
from quire.cluster.members import ROLES, Health, Member
from quire.cluster.messages import ROUTER
from quire.cluster.placements import (
    Action,
    InstanceSpec,
    MachineCapacity,
    ServedModel,
    plan_switch,
    specs_of,
)
from quire.cluster.prefixes import ClusterPrefixes, PrefixReply
from quire.cluster.processes import Processes
from quire.cluster.ray_processes import RayProcesses
from quire.cluster.router import TICK_SECONDS, Router
from quire.cluster.tracing import Tracer
from quire.config import ClusterConfig, EngineConfig
from quire.engine.admission import RequestLimits, narrowest
from quire.errors import ConfigError, EngineStoppedError, ModelError, QuireError
from quire.options import format_count
from quire.placement import divisions
from quire.placement.placement_file import Instances, Placement

log = logging.getLogger("quire")

START_SECONDS = 1800.0
"""Maximum seconds for loading: a first start may calibrate, pack weights and compile kernels."""

PROGRESS_SECONDS = 10.0
"""Interval of log lines while instances load."""

LOADING_SECONDS = 60.0
"""Seconds without a heartbeat after which a loading instance counts as failed. Loading may block the interpreter for
long.
"""

LEAST_PAUSE, MOST_PAUSE = 0.5, 30.0
"""Seconds before a failed instance is restarted; doubled after each further failure."""


class DesiredInstances:
    """The instances that the cluster should have, by place. A restarted instance takes the place of its predecessor.

    specs  their configurations
    cores  cores of this machine reserved for each
    """

    def __init__(self, model: ServedModel, *, is_local: bool) -> None:
        self.specs: dict[str, InstanceSpec] = {}
        self.cores: dict[str, tuple[int, ...]] = {}
        self._model, self._is_local = model, is_local
        self._reserved: tuple[str, ...] | None = None

    def __contains__(self, place: str) -> bool:
        return place in self.specs

    @property
    def roles(self) -> dict[str, str]:
        """The roles by place."""
        return {place: spec.role for place, spec in self.specs.items()}

    def specs_of(self, instances: Sequence[Instances]) -> list[InstanceSpec]:
        """The instances of a placement. Raises ConfigError: see `placements.specs_of`."""
        return specs_of(instances, self._model, _num_cores(), is_local=self._is_local)

    def open(self, specs: Iterable[InstanceSpec]) -> None:
        """Assigns places to the first instances, named after their roles. On other machines, no further places exist
        from now on.
        """
        numbers = Counter[str]()
        for spec in sorted(specs, key=_role_rank):
            self.assign(f"{spec.role}-{numbers[spec.role]}", spec)
            numbers[spec.role] += 1
        self._reserved = None if self._is_local else tuple(self.specs)

    def assign(self, place: str, spec: InstanceSpec) -> None:
        """Assigns a place to an instance, and reserves cores for it."""
        held = {core for each in self.specs if each != place for core in self.cores[each]}
        free = [core for core in sorted(os.sched_getaffinity(0)) if core not in held]
        assert spec.settings.cores <= len(free), f"{place} is to have {spec.settings.cores} cores, and {free} are free"
        self.specs[place] = spec
        self.cores[place] = tuple(free[: spec.settings.cores])

    def plan(self, wanted: Sequence[InstanceSpec], down: Collection[str], *, may_pause: bool) -> list[Action]:
        """The actions that lead from these instances to the wanted ones: see `plan_switch`."""
        needed = [sum(spec.settings.memory for spec in specs) for specs in (self.specs.values(), wanted)]
        # Each placement itself is allowed, although weights mapped from one file are counted for each instance.
        capacity = MachineCapacity(_num_cores(), max(self._model.available_bytes, *needed), self._reserved)
        return plan_switch(self.specs, wanted, capacity, down=down, may_pause=may_pause)

    def check(self, specs: Iterable[InstanceSpec]) -> None:
        """Raises ConfigError if the model cannot be loaded with the settings of an instance. Reads the model."""
        for spec in dict.fromkeys(specs):
            options = {**self._model.options, **dict(spec.settings.options)}
            try:
                self._model.check(EngineConfig.from_options(options, self._model.config_file))
            except ConfigError as error:
                raise ConfigError(f"the placement's instances with the role {spec.role}: {error}") from None


class Supervisor:
    """The instances of a cluster, and the router that knows them.

    processes  starts instances in place of the settings' processes; for tests
    placement  placement of the first instances, in place of the settings' numbers

    limits      limits of requests: the given ones until instances are ready, then the strictest of all instances
    desired     the instances that the cluster should have
    is_closing  whether `close` was called
    """

    def __init__(
        self,
        model: ServedModel,
        settings: ClusterConfig,
        limits: RequestLimits,
        processes: Processes | None = None,
        tracer: Tracer | None = None,
        placement: Placement | None = None,
    ) -> None:
        if placement is not None:  # settings.placement is the file's name; Ray needs one of its own strategies there
            prefill, decode, mixed = map(placement.count, divisions.Role)
            strategy = "pairs" if placement.in_pairs and settings.address is not None else "pack"
            settings = dataclasses.replace(settings, placement=strategy, prefill=prefill, decode=decode, mixed=mixed)
        self._model, self._settings, self._placement = model, settings, placement
        self.limits = limits
        self._secret = os.urandom(32)
        self._starts = itertools.count(1)
        self.processes = processes or (RayProcesses(settings) if settings.address else Processes())
        self.desired = DesiredInstances(model, is_local=self.processes.is_local)
        self.is_closing = False
        self._pauses: dict[str, float] = {}
        self._watching: asyncio.Task[None] | None = None
        self._all_ready = asyncio.Event()
        self._start_error: QuireError | None = None
        self._transport = self.processes.transport if settings.transport == "auto" else settings.transport
        self.router = Router(
            self.send, timeout=settings.timeout, tries=settings.tries, routing=settings.routing,
            shares=model.config.cache.share, fetches=model.config.cache.share and not model.config.retain.is_on,
            tracer=tracer,
        )  # fmt: skip
        self.members = self.router.members
        self.cluster_prefixes = ClusterPrefixes(self.members, self.desired.specs, self.send)
        self._connections = PeerConnections(
            ROUTER, self._secret, self, self._transport, compatibility_tag=compatibility_tag()
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- start and end ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all instances, and waits until they are ready. Raises ConfigError or ModelError if one does not."""
        self._loop = asyncio.get_running_loop()
        instances = tuple(Instances(role, count) for role in ROLES if (count := getattr(self._settings, role)))
        self.desired.open(self.desired.specs_of(instances if self._placement is None else self._placement.instances))
        host = await self.processes.open(self.desired.roles, self._model.config, self._model.weight_bytes)
        self._address = self._connections.listen(host)
        for place in self.desired.specs:
            self.launch(place)
        self._watching = asyncio.create_task(self._watch())
        found = ", ".join(self.desired.specs)
        log.info("starting %s: %s; each loads the model", format_count(len(self.desired.specs), "instance"), found)
        async with asyncio.timeout(START_SECONDS):
            await self._wait_until_ready(time.monotonic())
        if self._start_error is not None:
            raise self._start_error

    async def _wait_until_ready(self, begun: float) -> None:
        """Waits until all instances are ready or one fails, and logs now and then which ones still load."""
        while not self._all_ready.is_set():
            try:
                async with asyncio.timeout(PROGRESS_SECONDS):
                    await self._all_ready.wait()
            except TimeoutError:
                present = {each.place for each in self.members.values() if each.ready is not None}
                left = [place for place in self.desired.specs if place not in present]
                log.info("%.0f s: still loading: %s", time.monotonic() - begun, ", ".join(left))

    async def close(self) -> None:
        """Ends all instances. Ends their requests with an error."""
        self.is_closing = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        closed = EngineStoppedError("the cluster is closed")
        self.router.close(closed)
        self.cluster_prefixes.close(closed)
        for member in self.members.values():
            if member.health is Health.STARTING:
                self._connections.forget(member.name)
                self.processes.kill(member.name)  # a loading instance reads no messages
            self.send(member.name, Shutdown())
        await self.processes.wait()
        await asyncio.to_thread(self._connections.close)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted. They wait while no instance serves."""
        return self._all_ready.is_set() and self._start_error is None and not self.is_closing

    # ---- instances -------------------------------------------------------------------------------------------------

    def launch(self, place: str) -> str:
        """Starts an instance; returns its name."""
        name, model = f"{place}.{next(self._starts)}", self._model
        role, settings = self.desired.specs[place]
        options = {**model.options, **dict(settings.options)}
        if model.pins:
            options["cache.pin"] = None  # the file is on this machine, the instance perhaps on another
        launch_config = LaunchConfig(
            name, self._address, self._secret.hex(), model.name, options,
            None if model.config_file is None else str(model.config_file), self._transport, "127.0.0.1",
            self.desired.cores[place], self._settings.timeout, log.getEffectiveLevel(), model.config.cache.pin or "",
            model.pins, model.salts,
        )  # fmt: skip
        member = Member(name, place, role, seen=time.monotonic(), group=self.processes.group(place))
        self.members[name] = member
        try:
            self.processes.start(launch_config)
        except OSError as error:
            self._fail(member, f"it could not be started: {error}")
        return name

    def kill(self, member: Member) -> None:
        """Ends an instance at once. Its attempts are retried elsewhere."""
        self.processes.kill(member.name)
        self._connections.forget(member.name)
        self.router.down(member.name)

    def _fail(self, member: Member, reason: str) -> None:
        if self.is_closing or member.name not in self.members:
            return
        is_first = not self._all_ready.is_set()
        log.log(logging.DEBUG if is_first else logging.ERROR, "instance %s: %s", member.name, reason)
        self.kill(member)
        self.announce_peers()
        if is_first:
            self._start_error = self._start_error or ModelError(f"instance {member.place} did not start: {reason}")
            self._all_ready.set()
        elif member.place in self.desired and member.health is Health.DOWN:
            pause = self._pauses.get(member.place, LEAST_PAUSE)
            self._pauses[member.place] = min(2 * pause, MOST_PAUSE)
            assert self._loop is not None
            self._loop.call_later(pause, partial(self._relaunch, member.place))

    async def _watch(self) -> None:
        """Checks instances and requests periodically, until cancelled."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            late, looked = now - looked - TICK_SECONDS, now
            try:
                self._look(now, late)
                self.router.tick()
            except Exception:  # otherwise no later failure would be noticed
                log.exception("watching the instances")

    def _look(self, now: float, late: float) -> None:
        """Checks all instances. late: seconds in which this process was stopped or its loop busy; heartbeats of that
        time have not been handled yet.
        """
        ended = self.processes.ended()
        for member in list(self.members.values()):
            if late > TICK_SECONDS:
                member.seen += late
            if member.name in ended:
                self._fail(member, "it ended")
            elif now - member.seen > self._patience(member):
                self._fail(member, "it gave no sign of life")

    def _patience(self, member: Member) -> float:
        """Maximum seconds between two heartbeats."""
        if member.health is not Health.STARTING:
            return self._settings.heartbeat
        return max(LOADING_SECONDS, self._settings.heartbeat) if member.is_loading else START_SECONDS

    def _relaunch(self, place: str) -> None:
        is_there = any(each.place == place for each in self.members.values())
        if not self.is_closing and place in self.desired and not is_there:
            self.launch(place)

    def announce_peers(self) -> None:
        """Sends all instances the addresses of the others."""
        serving = [each for each in self.members.values() if each.ready is not None]
        addresses = {each.name: each.ready.address for each in serving if each.ready is not None}
        for member in serving:
            self.send(member.name, PeerAddresses(addresses))

    def _on_ready(self, ready: InstanceReady) -> None:
        member = self.members.get(ready.instance)
        if member is None:
            return
        if ready.error:
            if not self._all_ready.is_set():
                self._start_error = ConfigError(ready.error)
            self._fail(member, ready.error)
            return
        member.set_ready(ready)
        member.health, member.seen = Health.SERVING, time.monotonic()
        self._pauses.pop(member.place, None)
        self.send(member.name, AssignRole(member.role))  # the role may have changed since the instance was started
        self.find_limits()
        # The first instances are logged together when the server is ready.
        log.log(
            logging.INFO if self._all_ready.is_set() else logging.DEBUG,
            "instance %s is ready: %d prompt rows saturate it (%.2f ms each), and %d sequences decode at once"
            " (%.1f ms a step)",
            ready.instance, ready.prompt_rows, 1e3 * ready.seconds_per_row, ready.batch, 1e3 * ready.seconds_per_step,
        )  # fmt: skip
        self.announce_peers()
        if all(each.is_serving for each in self.members.values()):
            self._all_ready.set()

    def find_limits(self) -> None:
        """Computes the strictest limits of all instances."""
        known = [(each.role, each.ready.limits) for each in self.members.values() if each.ready is not None]
        found = [limits for _, limits in known if limits is not None]
        pinning = [limits for role, limits in known if limits is not None and role != "decode"]
        self.limits = narrowest(found or [self.limits], pinning or [self.limits])

    # ---- Handler: on the threads of connections --------------------------------------------------------------------

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        """See Handler."""
        self._on_loop(partial(self._handle, sender, message))

    def connection_lost(self, name: str) -> None:
        """See Handler."""
        self._on_loop(partial(self._on_connection_lost, name))

    def _on_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)

    def _handle(self, sender: str, message: Any) -> None:
        match message:
            case InstanceReady():
                self._on_ready(message)
            case InstanceLoad():
                self.router.handle_load(message)
            case PrefixReply():
                self.cluster_prefixes.handle(message)
            case LoadingHeartbeat(name):
                if (member := self.members.get(name)) is not None:
                    member.seen, member.is_loading = time.monotonic(), True
            case _:
                self.router.handle(message)

    def _on_connection_lost(self, name: str) -> None:
        member = self.members.get(name)
        if member is not None:
            self._fail(member, "its connection ended")

    def send(self, name: str, message: Any) -> bool:
        """Sends a message to an instance. Returns whether it was queued."""
        return self._connections.send(name, message)


def _role_rank(spec: InstanceSpec) -> int:
    return ROLES.index(spec.role)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
