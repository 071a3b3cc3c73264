"""The router: gives requests to instances, passes their tokens on once, and begins again where an instance fails.

Everything runs on the server's event loop. `protocol.route` decides; this module does what it says.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quire.cluster import protocol
from quire.cluster.bodies import ComputeJob, Job, Load, ReceiveJob, TokenOf, Told
from quire.cluster.members import Choice, Health, Index, Member, choose, keys_of
from quire.cluster.messages import (
    CLIENT,
    Abort,
    Begin,
    Compute,
    Down,
    Expired,
    Failed,
    Message,
    Receive,
    Taken,
    Token,
)
from quire.cluster.protocol import Route, Routed
from quire.errors import InstancesFailedError

log = logging.getLogger("quire")

TICK_SECONDS = 0.1
"""Interval at which deadlines are looked at."""


@dataclass(frozen=True)
class Stages:
    """Seconds of a request: to its first token, then until its receiver has the cache, and then to its end."""

    prefill: float
    transfer: float
    decode: float


@dataclass(eq=False)
class Ticket:
    """A request of one sequence at the router.

    told       tokens by position, until the client gets them
    token_ids  that the client has; `cumulative` is the sum of their log-probabilities
    answer     is told what the client gets: tokens, then None after the last one, or an error
    deadline   when the attempt is given up
    """

    state: Routed
    job: Job
    keys: list[bytes]
    answer: Callable[[Told | Exception | None], None]
    told: dict[int, Told] = field(default_factory=dict)
    choice: Choice | None = None
    deadline: float = 0.0
    begun: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    cumulative: float = 0.0
    first: float | None = None
    taken: float | None = None
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the client has everything, or an error."""
        return self.state.phase in (Route.ENDED, Route.FAILED)


class Router:
    """All requests of a cluster.

    send     sends a message to an instance
    members  by name
    """

    def __init__(
        self,
        send: Callable[[str, Any], None],
        *,
        timeout: float,
        tries: int,
        routing: str = "expected",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members: dict[str, Member] = {}
        self.index = Index()
        self.counts: Counter[str] = Counter()
        self.stages: deque[Stages] = deque(maxlen=10_000)
        self._send = send
        self._timeout, self._tries, self._routing = timeout, tries, routing
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)

    # ---- requests --------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests without a first token."""
        return sum(each.state.delivered == 0 for each in self._tickets.values())

    @property
    def num_running(self) -> int:
        """Requests with tokens that have not ended."""
        return len(self._tickets) - self.num_waiting

    def begin(self, job: Job, answer: Callable[[Told | Exception | None], None]) -> Ticket:
        """Takes a request. answer: gets each token, then None, or an error."""
        number, now = next(self._numbers), self._clock()
        keys = keys_of(job.wishes().cache_salt, job.prompt_ids)
        ticket = Ticket(Routed(number, self._tries), job, keys, answer)
        ticket.begun, ticket.deadline = now, now + self._timeout
        self._tickets[number] = ticket
        self._try(ticket)
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """The client is gone."""
        self._route(ticket, Abort())

    def hear(self, message: Message | TokenOf) -> None:
        """A message of an instance about an attempt."""
        event: Any = message.message if isinstance(message, TokenOf) else message
        ticket = self._tickets.get(event.attempt.request)
        if ticket is None:
            return
        if isinstance(message, TokenOf) and event.attempt == ticket.state.attempt:
            ticket.told.setdefault(message.message.position, message.told)
            ticket.deadline = self._clock() + self._timeout
        if isinstance(event, Taken) and event.attempt == ticket.state.attempt:
            ticket.taken = self._clock()
        self._route(ticket, event)

    def tick(self) -> None:
        """Ends attempts whose time is over, and begins those that waited for an instance."""
        now = self._clock()
        for ticket in list(self._tickets.values()):
            if ticket.state.phase is Route.QUEUED:
                self._try(ticket)
                if ticket.state.phase is Route.QUEUED and now >= ticket.deadline:
                    ticket.reason = ticket.reason or "there is no instance"
                    self._end(ticket, InstancesFailedError(f"the request was not begun in time: {ticket.reason}"))
            elif now >= ticket.deadline:
                self.counts["expired"] += 1
                self._route(ticket, Expired())

    # ---- instances -------------------------------------------------------------------------------------------------

    def hear_load(self, load: Load) -> None:
        """A sign of life."""
        if (member := self.members.get(load.instance)) is not None:
            member.load, member.seen = load, self._clock()
            member.stats = load.stats or member.stats

    def down(self, name: str) -> None:
        """An instance has failed, and has lost everything."""
        member = self.members.get(name)
        if member is None or member.health is Health.DOWN:
            return
        member.health = Health.DOWN
        self.index.forget(name)
        self.counts["down"] += 1
        for ticket in list(self._tickets.values()):
            self._route(ticket, Down(name))
        del self.members[name]

    def num_attempts(self, name: str) -> int:
        """Attempts that an instance has a part in."""
        member = self.members.get(name)
        return 0 if member is None else len({*member.rows, *member.tokens})

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _try(self, ticket: Ticket) -> None:
        job = ticket.job
        num_tokens = len(job.prompt_ids) + len(ticket.token_ids)
        choice = choose(self.members.values(), self.index, ticket.keys, num_tokens, self._routing)
        if choice is None:
            return
        ticket.choice, ticket.taken = choice, None
        source = "" if choice.source is None else choice.source.name
        self.counts["attempts"] += 1
        self._route(ticket, Begin(source, choice.receiver.name))
        attempt = ticket.state.attempt
        computing = choice.source or choice.receiver
        computing.rows[attempt] = choice.num_rows
        choice.receiver.tokens[attempt] = num_tokens
        for member in (computing, choice.receiver):
            self.index.add(member.name, ticket.keys)
        log.debug(
            "request %s, attempt %d: %s computes %d rows, %s decodes",
            job.name, attempt.number, computing.name, choice.num_rows, choice.receiver.name,
        )  # fmt: skip

    def _route(self, ticket: Ticket, event: Any) -> None:
        before = ticket.state
        ticket.state, sent = protocol.route(before, event)
        reason = event.reason if isinstance(event, Failed) else "its instance is down"
        for to, message in sent:
            if to != CLIENT:
                self._post(ticket, to, message)
            elif isinstance(message, Token):
                self._deliver(ticket, message)
            elif isinstance(message, Failed):
                ticket.reason = message.reason
        if ticket.state.phase is Route.QUEUED and before.phase is Route.RUNNING:
            ticket.reason = "no answer in time" if isinstance(event, Expired) else reason
            self._again(ticket, before)
        if ticket.is_over:
            failed = ticket.state.phase is Route.FAILED and not isinstance(event, Abort)
            tries = f"after {self._tries} attempts" if self._tries > 1 else "after one attempt"
            self._end(ticket, InstancesFailedError(f"the request failed {tries}: {ticket.reason}") if failed else None)

    def _post(self, ticket: Ticket, to: str, message: Any) -> None:
        job = replace(ticket.job, token_ids=list(ticket.token_ids), cumulative=ticket.cumulative)
        if isinstance(message, Compute):
            self._send(to, ComputeJob(message, job))
        elif isinstance(message, Receive):
            if message.source:
                job = replace(job, hints={**job.hints, "cache_pin": None})
            self._send(to, ReceiveJob(message, job))
        else:
            self._send(to, message)

    def _deliver(self, ticket: Ticket, token: Token) -> None:
        told = ticket.told.pop(token.position)
        ticket.token_ids += told.output.token_ids
        ticket.cumulative = told.output.cumulative_logprob or 0.0
        if ticket.first is None:
            ticket.first = self._clock()
        if ticket.choice is not None:
            computing = ticket.choice.source or ticket.choice.receiver
            computing.rows.pop(ticket.state.attempt, None)
        ticket.answer(told)

    def _again(self, ticket: Ticket, before: Routed) -> None:
        """An attempt has failed, and another one may begin."""
        log.warning(
            "request %s, attempt %d: %s; %d tokens were told, %d attempts are left",
            ticket.job.name, before.number, ticket.reason, before.delivered, ticket.state.tries,
        )  # fmt: skip
        self.counts["again"] += 1
        self.counts["again_streamed"] += before.delivered > 0
        self._release(ticket, before)
        ticket.told.clear()
        ticket.deadline = self._clock() + self._timeout
        # Not at once: more instances may be down, and their news are on the way.
        asyncio.get_running_loop().call_soon(partial(self._try_again, ticket))

    def _try_again(self, ticket: Ticket) -> None:
        if ticket.state.phase is Route.QUEUED and not ticket.is_over:
            self._try(ticket)

    def _end(self, ticket: Ticket, error: Exception | None) -> None:
        if self._tickets.pop(ticket.state.request, None) is None:
            return
        self._release(ticket, ticket.state)
        self.counts["failed" if error else "ended"] += 1
        ticket.state = replace(ticket.state, phase=Route.FAILED if error else ticket.state.phase)
        ticket.answer(error)
        if ticket.first is not None and error is None:
            now, taken = self._clock(), ticket.taken or ticket.first
            self.stages.append(Stages(ticket.first - ticket.begun, max(0.0, taken - ticket.first), now - taken))

    def _release(self, ticket: Ticket, state: Routed) -> None:
        if ticket.choice is not None:
            for member in (ticket.choice.source, ticket.choice.receiver):
                if member is not None:
                    member.forget(state.attempt)
