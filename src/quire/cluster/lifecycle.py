"""How single instances of a cluster start, end and change while requests go on."""

from __future__ import annotations

import asyncio
import logging
import time

from quire.cluster.bodies import AssignRole, Shutdown
from quire.cluster.members import Health, Member
from quire.cluster.placements import InstanceSpec, covers_both_phases
from quire.cluster.processes import END_SECONDS
from quire.cluster.supervisor import START_SECONDS, Supervisor
from quire.errors import EngineStoppedError, ModelError, RequestError

log = logging.getLogger("quire")

LOOK_SECONDS = 0.02
"""Interval at which something that is waited for is looked at."""


class InstanceLifecycle:
    """Changes the instances of a supervisor, one at a time.

    All that waits raises EngineStoppedError if the cluster is closed meanwhile.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._members, self._places = supervisor.members, supervisor.places

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
        """Changes what an instance does. Attempts that it has go on."""
        if (spec := self._places.specs.get(place)) is not None:
            self._places.specs[place] = spec._replace(role=role)
        for member in self.at(place):
            member.role = role
            log.info("instance %s: its role is %s", member.name, role)
            self._supervisor.send(member.name, AssignRole(role))

    async def finish(self, member: Member) -> bool:
        """Lets an instance finish what it has, and tells it to end. Returns false if it failed meanwhile."""
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
        """Waits until an instance that was told to end has ended, and kills it if it does not."""
        processes, end = self._supervisor.processes, time.monotonic() + END_SECONDS
        while name not in processes.ended():
            if time.monotonic() > end:
                processes.kill(name)
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def wait_until_serving(self, place: str, name: str = "") -> None:
        """Waits until an instance serves at a place. Raises ModelError if it does not start; it is then tried again.

        name  of an instance that was started there; without one it may be any
        """
        while place in self._places:
            if any(each.is_serving for each in self.at(place)):
                return
            self.check_open()
            if name and name not in self._members:
                raise ModelError(f"instance {name} did not start; see the log")
            await asyncio.sleep(LOOK_SECONDS)

    async def relaunch(self, place: str) -> None:
        """Starts another instance at a place whose instance was told to end, and waits until it serves."""
        await self.wait_until_serving(place, self._supervisor.launch(place))

    async def end(self, place: str, *, pauses: bool = False) -> None:
        """Lets an instance finish what it has, and waits until it has ended. pauses: no other one serves."""
        if not pauses:
            await self._wait_for_others(place)
        del self._places.specs[place]
        for member in self.at(place):
            if not member.is_serving:  # it hears nothing while it loads
                self._supervisor.kill(member)
            elif await self.finish(member):
                await self.wait_until_ended(member.name)

    async def start(self, place: str, spec: InstanceSpec, before: InstanceSpec | None = None) -> None:
        """Starts an instance, and waits until it serves. Raises ModelError if it does not start.

        before  what is started again in its place if it does not start
        """
        self.check_open()
        self._places.assign(place, spec)
        try:
            await self.relaunch(place)
        except ModelError:
            if before is None:
                del self._places.specs[place]
            else:
                self._places.assign(place, before)
            raise

    async def _wait_for_others(self, place: str) -> None:
        """Waits, if the instance at a place serves, until others compute prompts and decode, too. One of them may have
        failed meanwhile, and be started again.
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
            known = ", ".join(self._places.specs)
            raise RequestError(f"there is no instance {place!r} that runs; there are {known}", "instance")
        return found[-1]
