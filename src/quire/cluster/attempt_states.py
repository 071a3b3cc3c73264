"""The protocol states of an instance's attempts in one role, and their deadlines."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from quire.cluster import protocol
from quire.cluster.messages import Attempt, Envelope
from quire.cluster.protocol import ReceiverPhase, ReceiverState, SourcePhase, SourceState

REMEMBERED_SECONDS = 120.0
"""Time for which an ended attempt is remembered, so that a late message begins nothing again."""

Phase = SourcePhase | ReceiverPhase

State = TypeVar("State", SourceState, ReceiverState)


def deadlines_within(seconds: float) -> dict[Phase, float]:
    """The seconds after which each state expires, for each try of a receiver. seconds: time without a token after which
    the router gives up a request.
    """
    third = seconds / protocol.PULL_TRIES
    return {
        SourcePhase.EXPECTED: third, SourcePhase.QUEUED: seconds, SourcePhase.HELD: seconds,
        ReceiverPhase.ASKED: third, ReceiverPhase.QUEUED: third, ReceiverPhase.PULLING: min(5.0, third),
    }  # fmt: skip


class Timers:
    """Scheduled calls on a clock. The owner calls `run`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Schedules a call in `seconds`."""
        heapq.heappush(self._calls, (self.clock() + seconds, next(self._numbers), call))

    @property
    def next(self) -> float:
        """The time of the next call."""
        return self._calls[0][0]

    def run(self) -> None:
        """Runs all due calls."""
        now = self.clock()
        while self._calls[0][0] <= now:
            heapq.heappop(self._calls)[2]()


@dataclass(eq=False)
class _Deadline:
    """The time at which a state expires. It may be postponed."""

    moment: float


class AttemptStates(Generic[State]):
    """The states of attempts in one role.

    step       the role's function of the protocol: (state, sender of a message, event) -> (state, messages)
    deadlines  see `deadlines_within`
    send       sends a message
    expired    called with an attempt when the deadline of its state is over
    ended      called with an attempt when it has ended

    by_attempt  the states; an ended one is forgotten after a while
    """

    def __init__(
        self,
        step: Callable[[State | None, str, Any], tuple[State | None, list[Envelope]]],
        deadlines: Mapping[Phase, float],
        timers: Timers,
        send: Callable[[Envelope], None],
        expired: Callable[[Attempt], None],
        ended: Callable[[Attempt], None],
    ) -> None:
        self.by_attempt: dict[Attempt, State] = {}
        self._step: Callable[[State | None, str, Any], tuple[State | None, list[Envelope]]] = step
        self._deadlines, self._timers = deadlines, timers
        self._send, self._expired, self._ended = send, expired, ended
        self._due: dict[Attempt, _Deadline] = {}

    def advance(self, attempt: Attempt, event: Any, sender: str = "") -> None:
        """Passes an event to an attempt."""
        before = self.by_attempt.get(attempt)
        after, sent = self._step(before, sender, event)
        if after is not None:
            self._note(attempt, before, after)
        for each in sent:
            self._send(each)

    def _note(self, attempt: Attempt, before: State | None, after: State) -> None:
        self.by_attempt[attempt] = after
        if after.phase in (SourcePhase.ENDED, ReceiverPhase.ENDED):
            if before is None or before.phase is not after.phase:
                self._due.pop(attempt, None)
                self._timers.after(REMEMBERED_SECONDS, partial(self.by_attempt.pop, attempt, None))
                self._ended(attempt)
        elif protocol.has_deadline(after):
            self.wait(attempt)  # a repeated request renews a lease
        else:
            self._due.pop(attempt, None)

    def is_in(self, attempt: Attempt, *phases: Phase) -> bool:
        """Whether an attempt is known, and in one of these phases."""
        state = self.by_attempt.get(attempt)
        return state is not None and state.phase in phases

    def wait(self, attempt: Attempt) -> None:
        """Sets the deadline of a state."""
        seconds = self._deadlines[self.by_attempt[attempt].phase]
        due = self._due[attempt] = _Deadline(self._timers.clock() + seconds)
        self._timers.after(seconds, partial(self._expire, attempt, due))

    def renew(self, attempt: Attempt, phase: Phase) -> None:
        """Postpones the deadline of an attempt, if it is in this phase."""
        if self.is_in(attempt, phase):
            self._due[attempt].moment = self._timers.clock() + self._deadlines[self.by_attempt[attempt].phase]

    def _expire(self, attempt: Attempt, due: _Deadline) -> None:
        if self._due.get(attempt) is not due:
            return
        if (left := due.moment - self._timers.clock()) > 0:
            self._timers.after(left, partial(self._expire, attempt, due))
        else:
            self._expired(attempt)
