"""Operations of an administrator on a cluster: show it, drain and restart instances, change their roles and numbers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.cluster.bodies import AssignRole, Shutdown
from quire.cluster.members import ROLES, Health, Member
from quire.cluster.placements import (
    Action,
    Add,
    InstanceSpec,
    Remove,
    Restart,
    SetRole,
    check_instances,
    covers_both_phases,
    placement_name,
)
from quire.cluster.processes import END_SECONDS
from quire.cluster.supervisor import START_SECONDS, Supervisor
from quire.errors import EngineStoppedError, ModelError, RequestError
from quire.placement.placement_file import Placement

log = logging.getLogger("quire")


MEASURED = ("prompt_rows", "seconds_per_row", "batch", "seconds_per_step", "cache_bytes")
"""The measurements of an instance that is not ready yet."""

LOOK_SECONDS = 0.02
"""Interval of polling in operations that wait."""


class InstanceLifecycle:
    """Changes the instances of a supervisor, one at a time.

    All methods that wait raise EngineStoppedError if the cluster is closed meanwhile.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._members, self._desired = supervisor.members, supervisor.desired

    def at(self, place: str) -> list[Member]:
        """The instances at a place: one, or none while it is down."""
        return [each for each in self._members.values() if each.place == place]

    @property
    def serving(self) -> list[Member]:
        """The instances that get attempts."""
        return [each for each in self._members.values() if each.is_serving]

    def check_open(self) -> None:
        """Raises EngineStoppedError if the cluster is closed."""
        if self._supervisor.is_closing:
            raise EngineStoppedError("the cluster is closed")

    def set_role(self, place: str, role: str) -> None:
        """Changes the role of an instance. Its attempts continue."""
        if (spec := self._desired.specs.get(place)) is not None:
            self._desired.specs[place] = spec._replace(role=role)
        for member in self.at(place):
            member.role = role
            log.info("instance %s: its role is %s", member.name, role)
            self._supervisor.send(member.name, AssignRole(role))

    async def finish(self, member: Member) -> bool:
        """Drains an instance, and tells it to end. Returns false if it failed meanwhile."""
        supervisor, name = self._supervisor, member.name
        member.health = Health.DRAINING
        log.info("instance %s: finishes %d attempts", name, supervisor.router.num_attempts(name))
        while supervisor.router.num_attempts(name) and self._members.get(name) is member:
            await asyncio.sleep(LOOK_SECONDS)
        if self._members.get(name) is not member:
            return False
        supervisor.send(name, Shutdown())
        supervisor.router.down(name)
        supervisor.announce_peers()
        asyncio.get_running_loop().call_later(END_SECONDS, supervisor.processes.kill, name)
        self.check_open()
        return True

    async def wait_until_ended(self, name: str) -> None:
        """Waits for the end of an instance that was told to end, and kills it after a timeout."""
        processes, end = self._supervisor.processes, time.monotonic() + END_SECONDS
        while name not in processes.ended():
            if time.monotonic() > end:
                processes.kill(name)
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def wait_until_serving(self, place: str, name: str = "") -> None:
        """Waits until an instance serves at a place. Raises ModelError if it does not start; it is then started again.

        name  name of the instance that was started there; empty: any instance
        """
        while place in self._desired:
            if any(each.is_serving for each in self.at(place)):
                return
            self.check_open()
            if name and name not in self._members:
                raise ModelError(f"instance {name} did not start; see the log")
            await asyncio.sleep(LOOK_SECONDS)

    async def launch(self, place: str) -> None:
        """Starts an instance at a place, and waits until it serves."""
        await self.wait_until_serving(place, self._supervisor.launch(place))

    async def end(self, place: str, *, pauses: bool = False) -> None:
        """Drains an instance, and waits until it has ended. pauses: no other instance serves meanwhile."""
        if not pauses:
            await self._wait_for_others(place)
        del self._desired.specs[place]
        for member in self.at(place):
            if not member.is_serving:  # a loading instance reads no messages
                self._supervisor.kill(member)
            elif await self.finish(member):
                await self.wait_until_ended(member.name)

    async def start(self, place: str, spec: InstanceSpec, before: InstanceSpec | None = None) -> None:
        """Starts an instance, and waits until it serves. Raises ModelError if it does not start.

        before  instance to start again in its place if this one does not start
        """
        self.check_open()
        self._desired.assign(place, spec)
        try:
            await self.launch(place)
        except ModelError:
            if before is None:
                del self._desired.specs[place]
            else:
                self._desired.assign(place, before)
            raise

    async def _wait_for_others(self, place: str) -> None:
        """If the instance at a place serves, waits until the other instances alone compute prompts and decode. One of
        them may have failed meanwhile and be starting again.
        """
        end = time.monotonic() + START_SECONDS
        while True:
            others = [each.role for each in self.serving if each.place != place]
            if len(others) == len(self.serving) or covers_both_phases(others):
                return
            self.check_open()
            if time.monotonic() > end:
                raise ModelError(f"instance {place} cannot end, because the others do not serve; see the log")
            await asyncio.sleep(LOOK_SECONDS)

    def member_at(self, place: str) -> Member:
        """The instance at a place. Raises RequestError if none runs there."""
        if not (found := self.at(place)):
            known = ", ".join(self._desired.specs)
            raise RequestError(f"there is no instance {place!r} that runs; there are {known}", "instance")
        return found[-1]


@dataclass
class PlacementSwitch:
    """A switch to another placement.

    to       name of the placement
    num_all  number of its actions
    num_done  number of finished actions
    now      the current action; empty: none
    error    why the switch was aborted
    """

    to: str
    num_all: int = 0
    num_done: int = 0
    now: str = ""
    error: str = ""


class ClusterOperations:
    """Operations on a supervisor's instances, one at a time.

    placement  placement of the first instances; None: they have no placement

    `replanning` returns the state of cluster.replan; None without it.
    """

    def __init__(self, supervisor: Supervisor, placement: Placement | None) -> None:
        self.replanning: Callable[[], dict[str, Any]] | None = None
        self._supervisor = supervisor
        self._lifecycle = InstanceLifecycle(supervisor)
        self._placement = placement
        self._switch: PlacementSwitch | None = None
        self._turn = asyncio.Lock()

    @property
    def placement(self) -> Placement | None:
        """The placement of the instances; None if they have none, or during a switch."""
        return None if self._is_switching else self._placement

    @property
    def _is_switching(self) -> bool:
        return self._switch is not None and not self._switch.error

    # ---- state -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All instances and empty places, the router's counters, and quantiles of stages in seconds."""
        router = self._supervisor.router
        members = {each.place: each for each in router.members.values()}
        roles = {**self._supervisor.desired.roles, **{each.place: each.role for each in members.values()}}
        return {
            "instances": [
                self._described(members.get(place) or Member("", place, role, Health.DOWN))
                for place, role in roles.items()
            ],
            "counts": dict(router.counts),
            "stages": router.times.quantiles(),
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
            "pid": self._supervisor.processes.pid(member.name),
            "attempts": self._supervisor.router.num_attempts(member.name),
            "cores": list(self._supervisor.desired.cores.get(member.place, ())),
            **{name: None if ready is None else getattr(ready, name) for name in MEASURED},
            "load": None if load is None else asdict(dataclasses.replace(load, stats=None)),
        }

    # ---- instances -------------------------------------------------------------------------------------------------

    async def drain(self, place: str, *, restart: bool = True) -> None:
        """Drains an instance, and ends it. restart: another one takes its place.

        Raises RequestError if no other instance would be left, EngineStoppedError if the cluster is closed meanwhile,
        and ModelError if the new instance does not start; it is then started again. Waits for other operations to end.
        """
        async with self._turn:
            await self._drain(place, restart=restart)

    async def _drain(self, place: str, *, restart: bool = True) -> None:
        member = self._lifecycle.member_at(place)
        if not restart:
            if not any(each is not member for each in self._lifecycle.serving):
                raise RequestError(f"{place} is the only instance that serves; it can be restarted", "restart")
            self._supervisor.desired.specs.pop(place, None)
            self._placement = None
        if not await self._lifecycle.finish(member):  # the supervisor starts it again
            await self._lifecycle.wait_until_serving(place)
        elif restart:
            await self._lifecycle.launch(place)
        else:
            await self._lifecycle.wait_until_ended(member.name)

    async def restart(self) -> None:
        """Restarts one instance after the other, without a failed request. Waits for other operations to end."""
        async with self._turn:
            for place in list(self._supervisor.desired.specs):
                if self._lifecycle.at(place):
                    await self._drain(place)
                else:
                    await self._lifecycle.wait_until_serving(place)  # the supervisor starts the failed instance again

    def set_role(self, place: str, role: str) -> None:
        """Changes the role of an instance. Its attempts continue."""
        if role not in ROLES:
            raise RequestError(f"{role!r} is no role; there are {', '.join(ROLES)}", "role")
        self._check_no_switch()
        self._lifecycle.member_at(place)
        self._placement = None
        self._lifecycle.set_role(place, role)

    # ---- placements ------------------------------------------------------------------------------------------------

    async def switch(self, placement: Placement, *, may_pause: bool = False) -> None:
        """Switches to the instances of another placement, without a failed request; see `plan_switch`.

        may_pause  whether requests may wait while no instance serves, if there is no other way
        Raises RequestError during another switch, ConfigError if no sequence of actions works, ModelError if an
        instance does not start, and EngineStoppedError if the cluster is closed meanwhile. After a ModelError the
        cluster continues with the instances that it has, and a restarted instance gets its former settings. Waits for
        other operations to end.
        """
        self._check_no_switch()
        self._switch = switch = PlacementSwitch(placement_name(placement))
        try:
            async with self._turn:
                actions = await self._planned(placement, may_pause=may_pause)
                before, self._placement, switch.num_all = self._placement, None, len(actions)
                try:
                    await self._do_all(actions, switch)
                except ModelError:
                    if not switch.num_done and isinstance(actions[0], Add):  # no instance has changed
                        self._placement = before
                    raise
        except BaseException:
            if not switch.error:  # no action was started
                self._switch = None
            raise
        self._switch, self._placement = None, placement
        self._supervisor.find_limits()

    async def _do_all(self, actions: Sequence[Action], switch: PlacementSwitch) -> None:
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
                left = ", ".join(f"{place} ({role})" for place, role in self._supervisor.desired.roles.items())
                raise ModelError(f"{switch.error}; the cluster goes on with {left}") from error
            raise

    async def _planned(self, placement: Placement, *, may_pause: bool) -> list[Action]:
        self._lifecycle.check_open()
        check_instances(placement)
        desired = self._supervisor.desired
        wanted = desired.specs_of(placement.instances)
        await asyncio.to_thread(desired.check, wanted)
        down = desired.specs.keys() - {each.place for each in self._lifecycle.serving}
        return desired.plan(wanted, down, may_pause=may_pause)

    async def _do(self, action: Action) -> None:
        match action:
            case SetRole(place, role):
                self._lifecycle.set_role(place, role)
            case Remove(place):
                await self._lifecycle.end(place)
            case Add(place, spec):
                await self._lifecycle.start(place, spec)
            case Restart(place, spec, pauses):
                before = self._supervisor.desired.specs[place]
                await self._lifecycle.end(place, pauses=pauses)
                await self._lifecycle.start(place, spec, before)

    def _check_no_switch(self) -> None:
        if self._switch is not None and self._is_switching:
            raise RequestError(f"a switch to {self._switch.to} is under way; try again when it has ended")
