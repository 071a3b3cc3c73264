"""Starts the instances of a cluster, watches them, and starts those again that fail."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from quire.cluster.bodies import AssignRole, InstanceLoad, InstanceReady, LoadingHeartbeat, PeerAddresses, Shutdown
from quire.cluster.connections import PeerConnections
from quire.cluster.instance import LaunchConfig, compatibility_tag
from quire.cluster.members import ROLES, Health, Member
from quire.cluster.messages import ROUTER
from quire.cluster.placements import (
    Action,
    Add,
    InstanceSettings,
    InstanceSpec,
    MachineCapacity,
    Remove,
    Restart,
    ServedModel,
    SetRole,
    check_instances,
    check_settings,
    covers_both_phases,
    placement_name,
    plan_switch,
    specs_of,
)
from quire.cluster.prefixes import ClusterPrefixes, PrefixReply
from quire.cluster.processes import END_SECONDS, Processes, places_of
from quire.cluster.ray_processes import RayProcesses
from quire.cluster.router import TICK_SECONDS, Router
from quire.cluster.tracing import Tracer
from quire.config import ClusterConfig
from quire.engine.admission import RequestLimits, narrowest
from quire.errors import ConfigError, EngineStoppedError, ModelError, QuireError, RequestError
from quire.options import format_count
from quire.planning import candidates
from quire.planning.placement_file import Instances, Placement

log = logging.getLogger("quire")

START_SECONDS = 1800.0
"""Most time in which instances load: a first start may calibrate, pack weights and compile kernels."""

TELL_SECONDS = 10.0
"""Interval of log lines while instances load."""

LOADING_SECONDS = 60.0
"""Seconds without a sign of life after which an instance that loads counts as failed. Loading may keep the interpreter
busy for long.
"""

LEAST_PAUSE, MOST_PAUSE = 0.5, 30.0
"""Seconds before an instance that failed is started again; twice as many after each further failure."""


@dataclass
class PlacementSwitch:
    """A switch to another placement.

    to       name of the placement
    num_all  number of its actions, of which num_done are done
    now      what is done now; empty: nothing
    error    why it ended before its end
    """

    to: str
    num_all: int = 0
    num_done: int = 0
    now: str = ""
    error: str = ""


class Supervisor:
    """The instances of a cluster, and the router that knows them.

    processes, transport  in place of the settings': for tests
    placement             which instances there are at first, in place of the settings' numbers

    limits                what requests may ask for: as long as no instance is ready, this; then what every one accepts
    `replanning` tells how cluster.replan stands; None without it.
    """

    def __init__(
        self,
        model: ServedModel,
        settings: ClusterConfig,
        limits: RequestLimits,
        processes: Processes | None = None,
        transport: str = "",
        tracer: Tracer | None = None,
        placement: Placement | None = None,
    ) -> None:
        if placement is not None:  # Ray finds machines as it does without a file
            prefill, decode, mixed = map(placement.count, candidates.Role)
            strategy = "pairs" if placement.in_pairs and settings.address is not None else "pack"
            settings = dataclasses.replace(settings, placement=strategy, prefill=prefill, decode=decode, mixed=mixed)
        self._model, self._settings = model, settings
        self._placement = placement
        self._switch: PlacementSwitch | None = None
        self._turn = asyncio.Lock()
        self.limits = limits
        self.replanning: Callable[[], dict[str, Any]] | None = None
        self._secret = os.urandom(32)
        self._starts = itertools.count(1)
        self.processes = processes or (RayProcesses(settings) if settings.address else Processes())
        self._closing = False
        self._pauses: dict[str, float] = {}
        self._roles: dict[str, str] = {}
        self._instance_settings: dict[str, InstanceSettings] = {}
        self._cores: dict[str, tuple[int, ...]] = {}
        self._reserved: tuple[str, ...] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._all_ready = asyncio.Event()
        self._start_error: QuireError | None = None
        usual = self.processes.transport if settings.transport == "auto" else settings.transport
        self._transport = transport or usual
        self.router = Router(
            self._send, timeout=settings.timeout, tries=settings.tries, routing=settings.routing,
            shares=model.config.cache.share, fetches=model.config.cache.share and not model.config.retain.is_on,
            tracer=tracer,
        )  # fmt: skip
        self.cluster_prefixes = ClusterPrefixes(self.router.members, self._roles, self._send)
        self._connections = PeerConnections(
            ROUTER, self._secret, self, self._transport, compatibility_tag=compatibility_tag()
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- start and end ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all instances, and waits until they are ready. Raises ConfigError or ModelError if one cannot be."""
        self._loop = asyncio.get_running_loop()
        counts = [(role, getattr(self._settings, role)) for role in ROLES]
        instances = tuple(Instances(role, count) for role, count in counts if count)
        specs = self._specs(instances if self._placement is None else self._placement.instances)
        for (place, role), spec in zip(places_of(counts), sorted(specs, key=_role_rank), strict=True):
            assert spec.role == role, f"{spec} at {place}"
            self._assign_settings(place, spec)
        self._reserved = None if self.processes.is_local else tuple(self._roles)
        host = await self.processes.open(self._roles, self._model.config, self._model.weight_bytes)
        self._address = self._connections.listen(host)
        for place in self._roles:
            self._launch(place)
        self._watching = asyncio.create_task(self._watch())
        log.info(
            "starting %s: %s; each loads the model", format_count(len(self._roles), "instance"), ", ".join(self._roles)
        )
        async with asyncio.timeout(START_SECONDS):
            await self._ready_told(time.monotonic())
        if self._start_error is not None:
            raise self._start_error

    async def _ready_told(self, begun: float) -> None:
        """Waits until all instances are ready, or one cannot be, and says now and then which ones still load."""
        while not self._all_ready.is_set():
            try:
                async with asyncio.timeout(TELL_SECONDS):
                    await self._all_ready.wait()
            except TimeoutError:
                there = {each.place for each in self.router.members.values() if each.ready is not None}
                left = [place for place in self._roles if place not in there]
                log.info("%.0f s: still loading: %s", time.monotonic() - begun, ", ".join(left))

    async def close(self) -> None:
        """Ends all instances, and the requests that they have with an error."""
        self._closing = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        closed = EngineStoppedError("the cluster is closed")
        self.router.close(closed)
        self.cluster_prefixes.close(closed)
        for member in self.router.members.values():
            if member.health is Health.STARTING:
                self._connections.forget(member.name)
                self.processes.kill(member.name)  # it hears nothing while it loads
            self._connections.send(member.name, Shutdown())
        await self.processes.wait()
        await asyncio.to_thread(self._connections.close)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted. They wait if no instance serves for a while."""
        return self._all_ready.is_set() and self._start_error is None and not self._closing

    # ---- operations ------------------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement | None:
        """The placement that the instances are; None if they are of none, or are being switched."""
        is_switching = self._switch is not None and not self._switch.error
        return None if is_switching else self._placement

    def state(self) -> dict[str, Any]:
        """The instances, a place without one included, counters of the router, and quantiles of stages in seconds."""
        members = {each.place: each for each in self.router.members.values()}
        places = {**self._roles, **{each.place: each.role for each in members.values()}}
        return {
            "instances": [
                self._described(members.get(place) or Member("", place, role, Health.DOWN))
                for place, role in places.items()
            ],
            "counts": dict(self.router.counts),
            "stages": self.router.times.quantiles(),
            "placement": None if self._placement is None else {
                "name": placement_name(self._placement),
                "rate": self._placement.predicted.rate,
                "cost": self._placement.predicted.cost,
                "unit": self._placement.predicted.unit,
                "attainment": self._placement.predicted.attainment,
            },
            "switch": None if self._switch is None else asdict(self._switch),
            "replanning": None if self.replanning is None else self.replanning(),
        }  # fmt: skip

    def _described(self, member: Member) -> dict[str, Any]:
        ready, load = member.ready, member.load
        return {
            "place": member.place,
            "name": member.name,
            "role": member.role,
            "health": member.health.value,
            "pid": self.processes.pid(member.name),
            "attempts": self.router.num_attempts(member.name),
            "cores": list(self._cores.get(member.place, ())),
            "prompt_rows": None if ready is None else ready.prompt_rows,
            "seconds_per_row": None if ready is None else ready.seconds_per_row,
            "batch": None if ready is None else ready.batch,
            "seconds_per_step": None if ready is None else ready.seconds_per_step,
            "cache_bytes": None if ready is None else ready.cache_bytes,
            "load": None if load is None else asdict(dataclasses.replace(load, stats=None)),
        }

    async def drain(self, place: str, *, restart: bool = True) -> None:
        """Lets an instance finish what it has, and ends it. restart: another one takes its place.

        Raises RequestError if no other one would be left, EngineStoppedError if the cluster is closed meanwhile, and
        ModelError if the other one does not start; it is then tried again. Waits for other operations to end.
        """
        async with self._turn:
            await self._drain(place, restart=restart)

    async def _drain(self, place: str, *, restart: bool = True) -> None:
        member = self._member_at(place)
        if not restart:
            if not any(each.is_serving for each in self.router.members.values() if each is not member):
                raise RequestError(f"{place} is the only instance that serves; it can be restarted", "restart")
            self._roles.pop(place, None)
            self._placement = None
        if not await self._finish(member):  # it is started again
            await self._serving(place)
        elif restart:
            await self._serving(place, self._launch(place))
        else:
            await self._has_ended(member.name)

    async def _finish(self, member: Member) -> bool:
        """Lets an instance finish what it has, and tells it to end. Returns false if it failed meanwhile.

        Raises EngineStoppedError if the cluster is closed meanwhile.
        """
        member.health = Health.DRAINING
        log.info("instance %s: finishes %d attempts", member.name, self.router.num_attempts(member.name))
        while self.router.num_attempts(member.name) and self.router.members.get(member.name) is member:
            await asyncio.sleep(0.02)
        if self.router.members.get(member.name) is not member:
            return False
        self._connections.send(member.name, Shutdown())
        self.router.down(member.name)
        self._tell_peers()
        assert self._loop is not None
        self._loop.call_later(END_SECONDS, self.processes.kill, member.name)
        if self._closing:
            raise EngineStoppedError("the cluster is closed")
        return True

    async def _has_ended(self, name: str) -> None:
        """Waits until an instance that was told to end has ended, and kills it if it does not."""
        end = time.monotonic() + END_SECONDS
        while name not in self.processes.ended():
            if time.monotonic() > end:
                self.processes.kill(name)
                return
            await asyncio.sleep(0.02)

    async def _serving(self, place: str, name: str = "") -> None:
        """Waits until an instance serves at a place. Raises EngineStoppedError or ModelError: see `drain`.

        name  of an instance that was started there; without one it may be any
        """
        while place in self._roles:
            members = self.router.members
            if any(each.place == place and each.is_serving for each in members.values()):
                return
            if self._closing:
                raise EngineStoppedError("the cluster is closed")
            if name and name not in members:
                raise ModelError(f"instance {name} did not start; see the log")
            await asyncio.sleep(0.02)

    async def restart(self) -> None:
        """Restarts one instance after the other, without a failed request. Waits for other operations to end."""
        async with self._turn:
            for place in list(self._roles):
                if any(each.place == place for each in self.router.members.values()):
                    await self._drain(place)
                else:
                    await self._serving(place)  # it failed, and is started again soon

    def set_role(self, place: str, role: str) -> None:
        """Changes what an instance does. Attempts that it has go on."""
        if role not in ROLES:
            raise RequestError(f"{role!r} is no role; there are {', '.join(ROLES)}", "role")
        self._check_no_switch()
        self._member_at(place)
        self._placement = None
        self._change_role(place, role)

    def _change_role(self, place: str, role: str) -> None:
        if place in self._roles:
            self._roles[place] = role
        for member in [each for each in self.router.members.values() if each.place == place]:
            member.role = role
            log.info("instance %s: its role is %s", member.name, role)
            self._connections.send(member.name, AssignRole(role))

    def _member_at(self, place: str) -> Member:
        found = [each for each in self.router.members.values() if each.place == place]
        if not found:
            known = ", ".join(self._roles)
            raise RequestError(f"there is no instance {place!r} that runs; there are {known}", "instance")
        return found[-1]

    # ---- placements ------------------------------------------------------------------------------------------------

    async def place(self, placement: Placement, *, may_pause: bool = False) -> None:
        """Switches to the instances of another placement, without a failed request; see `plan_switch`.

        may_pause  requests may wait while no instance serves, if there is no other way
        Raises RequestError while another switch is under way, ConfigError if there is no way, ModelError if an
        instance does not start, and EngineStoppedError if the cluster is closed meanwhile. After a ModelError the
        cluster goes on with what it has, and a restarted instance gets the settings that it had. Waits for other
        operations to end.
        """
        self._check_no_switch()
        self._switch = switch = PlacementSwitch(placement_name(placement))
        try:
            async with self._turn:
                actions = await self._planned(placement, may_pause=may_pause)
                before, self._placement, switch.num_all = self._placement, None, len(actions)
                try:
                    await self._take(actions, switch)
                except ModelError:
                    if not switch.num_done and isinstance(actions[0], Add):  # the instances are those that were there
                        self._placement = before
                    raise
        except BaseException:
            if not switch.error:  # nothing was done
                self._switch = None
            raise
        self._switch, self._placement = None, placement
        self._find_limits()

    async def _take(self, actions: Sequence[Action], switch: PlacementSwitch) -> None:
        try:
            for action in actions:
                switch.now = str(action)
                log.info("switch to %s, %d of %d: %s", switch.to, switch.num_done + 1, switch.num_all, action)
                await self._do(action)
                switch.num_done += 1
        except BaseException as error:
            done, why = f"after {switch.num_done} of {switch.num_all} actions", str(error) or type(error).__name__
            switch.error = f"the switch to {switch.to} ended {done}, at {switch.now!r}: {why}"
            switch.now = ""
            if isinstance(error, ModelError):
                left = ", ".join(f"{place} ({role})" for place, role in self._roles.items())
                raise ModelError(f"{switch.error}; the cluster goes on with {left}") from error
            raise

    async def _planned(self, placement: Placement, *, may_pause: bool) -> list[Action]:
        if self._closing:
            raise EngineStoppedError("the cluster is closed")
        check_instances(placement)
        wanted = self._specs(placement.instances)
        await asyncio.to_thread(check_settings, wanted, self._model)
        present = {place: InstanceSpec(role, self._instance_settings[place]) for place, role in self._roles.items()}
        serving = {each.place for each in self.router.members.values() if each.is_serving}
        taken = [sum(spec.settings.memory for spec in specs) for specs in (present.values(), wanted)]
        # What both placements are is allowed: weights that instances map from one file are counted for each of them.
        capacity = MachineCapacity(self._num_cores, max(self._model.available_bytes, *taken), self._reserved)
        return plan_switch(present, wanted, capacity, down=present.keys() - serving, may_pause=may_pause)

    async def _do(self, action: Action) -> None:
        match action:
            case SetRole(place, role):
                self._change_role(place, role)
            case Remove(place):
                await self._end(place)
            case Add(place, spec):
                await self._begin(place, spec)
            case Restart(place, spec, pauses):
                before = InstanceSpec(self._roles[place], self._instance_settings[place])
                await self._end(place, pauses=pauses)
                await self._begin(place, spec, before)

    async def _end(self, place: str, *, pauses: bool = False) -> None:
        """Lets an instance finish what it has, and waits until it has ended. pauses: no other one serves."""
        if not pauses:
            await self._others_serve(place)
        del self._roles[place]
        for member in [each for each in self.router.members.values() if each.place == place]:
            if member.is_serving:
                if await self._finish(member):
                    await self._has_ended(member.name)
            else:  # it hears nothing while it loads
                self._connections.forget(member.name)
                self.processes.kill(member.name)
                self.router.down(member.name)

    async def _begin(self, place: str, spec: InstanceSpec, before: InstanceSpec | None = None) -> None:
        """Starts an instance. before: what is started again in its place if it does not start."""
        if self._closing:
            raise EngineStoppedError("the cluster is closed")
        self._assign_settings(place, spec)
        try:
            await self._serving(place, self._launch(place))
        except ModelError:
            if before is None:
                del self._roles[place]
            else:
                self._assign_settings(place, before)
            raise

    async def _others_serve(self, place: str) -> None:
        """Waits, if the instance at a place serves, until others compute prompts and decode, too. One of them may have
        failed meanwhile, and be started again.
        """
        end = time.monotonic() + START_SECONDS
        while True:
            serving = [each for each in self.router.members.values() if each.is_serving]
            others = [each.role for each in serving if each.place != place]
            if len(others) == len(serving) or covers_both_phases(others):
                return
            if self._closing:
                raise EngineStoppedError("the cluster is closed")
            if time.monotonic() > end:
                raise ModelError(f"instance {place} cannot end, because the others do not serve; see the log")
            await asyncio.sleep(0.02)

    def _check_no_switch(self) -> None:
        if self._switch is not None and not self._switch.error:
            raise RequestError(f"a switch to {self._switch.to} is under way; try again when it has ended")

    @property
    def _num_cores(self) -> int:
        return len(os.sched_getaffinity(0))

    def _specs(self, instances: Sequence[Instances]) -> list[InstanceSpec]:
        return specs_of(instances, self._model, self._num_cores, is_local=self.processes.is_local)

    def _assign_settings(self, place: str, spec: InstanceSpec) -> None:
        """Gives a place what the next instance there is started with, and cores that no other one has."""
        held = {core for each in self._roles if each != place for core in self._cores[each]}
        free = [core for core in sorted(os.sched_getaffinity(0)) if core not in held]
        assert spec.settings.cores <= len(free), f"{place} is to have {spec.settings.cores} cores, and {free} are free"
        self._roles[place], self._instance_settings[place] = spec
        self._cores[place] = tuple(free[: spec.settings.cores])

    # ---- instances -------------------------------------------------------------------------------------------------

    def _launch(self, place: str) -> str:
        """Starts an instance; returns its name."""
        name, cores = f"{place}.{next(self._starts)}", self._cores[place]
        model = self._model
        options = {**model.options, **dict(self._instance_settings[place].options)}
        if model.pins:
            options["cache.pin"] = None  # the file is here, and the instance may be elsewhere
        launch_config = LaunchConfig(
            name, self._address, self._secret.hex(), model.name, {key: _plain(each) for key, each in options.items()},
            None if model.config_file is None else str(model.config_file), self._roles[place], self._transport,
            "127.0.0.1", cores, self._settings.timeout, log.getEffectiveLevel(), model.config.cache.pin or "",
            model.pins, model.salts,
        )  # fmt: skip
        group = self.processes.group(place)
        member = Member(name, place, self._roles[place], seen=time.monotonic(), group=group)
        self.router.members[name] = member
        try:
            self.processes.start(launch_config)
        except OSError as error:
            self._fail(member, f"it could not be started: {error}")
        return name

    async def _watch(self) -> None:
        """Finds instances that failed, and starts others in their places."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            late, looked = now - looked - TICK_SECONDS, now
            try:
                self._look(now, late)
            except Exception:  # nobody else would find what fails from now on
                log.exception("watching the instances")

    def _look(self, now: float, late: float) -> None:
        """late: seconds in which this process was stopped or its loop busy. Signs of life of that time are not heard
        yet.
        """
        ended = self.processes.ended()
        for member in list(self.router.members.values()):
            if late > TICK_SECONDS:
                member.seen += late
            if member.name in ended:
                self._fail(member, "it ended")
            elif now - member.seen > self._patience(member):
                self._fail(member, "it gave no sign of life")
        self.router.tick()

    def _patience(self, member: Member) -> float:
        """Most seconds between two signs of life."""
        if member.health is not Health.STARTING:
            return self._settings.heartbeat
        return max(LOADING_SECONDS, self._settings.heartbeat) if member.is_loading else START_SECONDS

    def _fail(self, member: Member, reason: str) -> None:
        if self._closing or member.name not in self.router.members:
            return
        is_first = not self._all_ready.is_set()
        log.log(logging.DEBUG if is_first else logging.ERROR, "instance %s: %s", member.name, reason)
        self.processes.kill(member.name)
        self._connections.forget(member.name)
        self.router.down(member.name)
        self._tell_peers()
        if is_first:
            self._start_error = self._start_error or ModelError(f"instance {member.place} did not start: {reason}")
            self._all_ready.set()
        elif member.place in self._roles and member.health is Health.DOWN:
            pause = self._pauses.get(member.place, LEAST_PAUSE)
            self._pauses[member.place] = min(2 * pause, MOST_PAUSE)
            assert self._loop is not None
            self._loop.call_later(pause, partial(self._relaunch, member.place))

    def _relaunch(self, place: str) -> None:
        is_there = any(each.place == place for each in self.router.members.values())
        if not self._closing and place in self._roles and not is_there:
            self._launch(place)

    def _tell_peers(self) -> None:
        serving = [each for each in self.router.members.values() if each.ready is not None]
        addresses = {each.name: each.ready.address for each in serving if each.ready is not None}
        for member in serving:
            self._connections.send(member.name, PeerAddresses(addresses))

    def _is_ready(self, ready: InstanceReady) -> None:
        member = self.router.members.get(ready.instance)
        if member is None:
            return
        if ready.error:
            self._fail_to_start(member, ready.error)
            return
        member.set_ready(ready)
        member.health, member.seen = Health.SERVING, time.monotonic()
        self._pauses.pop(member.place, None)
        self._connections.send(
            member.name, AssignRole(member.role)
        )  # it may be another one than when the instance was started
        self._find_limits()
        # The first ones are printed together when the server is ready.
        log.log(
            logging.INFO if self._all_ready.is_set() else logging.DEBUG,
            "instance %s is ready: %d prompt rows saturate it (%.2f ms each), and %d sequences decode at once"
            " (%.1f ms a step)",
            ready.instance, ready.prompt_rows, 1e3 * ready.seconds_per_row, ready.batch, 1e3 * ready.seconds_per_step,
        )  # fmt: skip
        self._tell_peers()
        if all(each.is_serving for each in self.router.members.values()):
            self._all_ready.set()

    def _find_limits(self) -> None:
        found: list[RequestLimits] = []
        pinning: list[RequestLimits] = []
        for member in self.router.members.values():
            if member.ready is not None and member.ready.limits is not None:
                found.append(member.ready.limits)
                if member.role != "decode":
                    pinning.append(member.ready.limits)
        self.limits = narrowest(found or [self.limits], pinning or [self.limits])

    def _fail_to_start(self, member: Member, reason: str) -> None:
        if not self._all_ready.is_set():
            self._start_error = ConfigError(reason)
        self._fail(member, reason)

    # ---- links: on their threads -----------------------------------------------------------------------------------

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
                self._is_ready(message)
            case InstanceLoad():
                self.router.handle_load(message)
            case PrefixReply():
                self.cluster_prefixes.handle(message)
            case LoadingHeartbeat(name):
                if (member := self.router.members.get(name)) is not None:
                    member.seen, member.is_loading = time.monotonic(), True
            case _:
                self.router.handle(message)

    def _on_connection_lost(self, name: str) -> None:
        member = self.router.members.get(name)
        if member is not None:
            self._fail(member, "its connection ended")

    def _send(self, name: str, message: Any) -> bool:
        return self._connections.send(name, message)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _role_rank(spec: InstanceSpec) -> int:
    return ROLES.index(spec.role)
