"""Divides the event loop's time among requests. Knows nothing of their contents."""

from __future__ import annotations

import asyncio
import heapq
import itertools

TURN_SECONDS = 0.005
"""Time in which requests may begin within one turn of the event loop; the last one may take longer. Hundreds of
requests may arrive at once, and each takes up to 25 ms before it first waits."""

WOKEN = 16
"""Number of requests that are woken for a turn. Those without time in it wait again, which costs 5 us each."""


ARRIVAL_SECONDS = 0.02
"""Maximum time for which requests give way to new connections. /health may wait behind hundreds of connections that are
not accepted yet: without the pause, 3,000 of them delay it four times as long."""


class StartThrottle:
    """Lets requests begin in order of arrival, for TURN_SECONDS in each turn of the loop, and at least one per turn. In
    between, connections, streams and /health have their turn. While connections arrive, requests give way for a while.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # a heap
        self._until: float | None = None  # end of this turn's time; None: no request has begun in this turn
        self._is_counting = False  # whether `_begin_turn` is scheduled
        self._num_calm = 2  # counted turns since the last connection arrived
        self._gave_way_since: float | None = None

    def connection_arrived(self) -> None:
        """Notes that a connection has arrived; more may be waiting to be accepted."""
        self._num_calm = 0
        self._count(asyncio.get_running_loop())

    async def acquire(self) -> None:
        """Returns when the caller may begin: at once if this turn has time, no connection has just arrived, and no
        earlier caller waits.
        """
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        waits = self.waits  # a woken caller has its turn, even if a connection has arrived since
        while waits or (self._waiting and self._waiting[0][0] < number) or not self._has_time(loop):
            woken = loop.create_future()
            heapq.heappush(self._waiting, (number, woken))
            await woken
            waits = False

    @property
    def waits(self) -> bool:
        """Whether `acquire` would wait."""
        is_over = self._until is not None and asyncio.get_running_loop().time() >= self._until
        return self._is_arriving or bool(self._waiting) or is_over

    @property
    def _is_arriving(self) -> bool:
        # A turn runs what is ready, and then accepts connections.
        return self._num_calm < 2

    def _has_time(self, loop: asyncio.AbstractEventLoop) -> bool:
        if self._until is not None:
            return loop.time() < self._until
        self._until = loop.time() + TURN_SECONDS
        self._count(loop)
        return True

    def _count(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._begin_turn, loop)

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called once in each turn while requests wait. A woken request continues in the turn after this one."""
        self._until = None
        num_woken = 0
        if not self._gives_way(loop.time()):
            while self._waiting and num_woken < WOKEN:
                _, woken = heapq.heappop(self._waiting)
                if not woken.done():  # its request may have been cancelled
                    woken.set_result(None)
                    num_woken += 1
        self._num_calm += 1
        self._is_counting = False
        if num_woken or self._waiting or self._is_arriving:
            self._count(loop)

    def _gives_way(self, now: float) -> bool:
        """Whether requests wait because of connections that have just arrived."""
        if not (self._is_arriving and self._waiting):
            self._gave_way_since = None
            return False
        if self._gave_way_since is None:
            self._gave_way_since = now
        if now - self._gave_way_since < ARRIVAL_SECONDS:
            return True
        self._gave_way_since = None
        return False
