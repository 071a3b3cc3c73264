"""Events: what happens when, and the time of it. Knows nothing of engines."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Call = Callable[[], object]


class Events:
    """A queue of calls by time. Calls of the same time run in the order in which they were added.

    now  seconds since the beginning; the time of the call that runs
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()

    def at(self, time: float, call: Call) -> None:
        """Adds a call, not before now."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._numbers), call))

    def after(self, seconds: float, call: Call) -> None:
        """Adds a call that runs in some seconds."""
        self.at(self.now + seconds, call)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Runs calls until nothing is left, or until `is_over` says so after a call."""
        while self._queue and not is_over():
            self.now, _, call = heapq.heappop(self._queue)
            call()


class StepClock:
    """The time of one engine. While it computes a step, it is ahead of the events: nothing that happens meanwhile
    reaches it before the step's end.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._ahead = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return max(self._events.now, self._ahead)

    def spend(self, seconds: float) -> None:
        """The engine is busy for some seconds."""
        self._ahead = self() + seconds

    def restart(self) -> None:
        """Forgets the seconds that the engine was busy: what it did before the first event takes no time."""
        self._ahead = 0.0
