"""Which instances of a cluster have failed: their processes have ended, or they give no sign of life."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from quire.cluster.members import Health, Member
from quire.cluster.processes import Processes
from quire.cluster.router import TICK_SECONDS

log = logging.getLogger("quire")

LOADING_SECONDS = 60.0
"""Seconds without a sign of life after which an instance that loads counts as failed. Loading may keep the interpreter
busy for long.
"""


class Liveness:
    """Watches instances.

    heartbeat  most seconds between two signs of life
    start      most seconds until the first one
    failed     is called with an instance that has failed, and the reason
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        processes: Processes,
        heartbeat: float,
        start: float,
        failed: Callable[[Member, str], None],
    ) -> None:
        self._members, self._processes = members, processes
        self._heartbeat, self._start, self._failed = heartbeat, start, failed

    async def watch(self, tick: Callable[[], None]) -> None:
        """Looks at the instances until it is cancelled. tick: is called after each look."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            late, looked = now - looked - TICK_SECONDS, now
            try:
                self._look(now, late)
                tick()
            except Exception:  # nobody else would find what fails from now on
                log.exception("watching the instances")

    def _look(self, now: float, late: float) -> None:
        """late: seconds in which this process was stopped or its loop busy. Signs of life of that time are not heard
        yet.
        """
        ended = self._processes.ended()
        for member in list(self._members.values()):
            if late > TICK_SECONDS:
                member.seen += late
            if member.name in ended:
                self._failed(member, "it ended")
            elif now - member.seen > self._patience(member):
                self._failed(member, "it gave no sign of life")

    def _patience(self, member: Member) -> float:
        """Most seconds between two signs of life."""
        if member.health is not Health.STARTING:
            return self._heartbeat
        return max(LOADING_SECONDS, self._heartbeat) if member.is_loading else self._start
