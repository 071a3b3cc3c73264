"""The router: gives requests to instances, passes their tokens on once, and begins again where an instance fails.

Everything runs on the server's event loop. `protocol.route` decides; this module does what it says.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cluster import protocol
from quire.cluster.bodies import ComputeJob, Job, Load, ReceiveJob, TokenOf, Told
from quire.cluster.members import Choice, Health, Index, Member, Serving, choose, index_keys
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
from quire.cluster.stages import Stages, StageTimes
from quire.cluster.tracing import Span, Trace, Tracer
from quire.errors import InstancesFailedError

log = logging.getLogger("quire")

COUNTERS = (
    "preemptions", "steps", "decode_tokens", "replayed_tokens", "prefill_tokens_computed", "prefill_tokens_cached",
)  # fmt: skip
"""Counters of engines that only grow."""

TICK_SECONDS = 0.1
"""Interval at which deadlines are looked at."""


@dataclass(eq=False)
class Ticket:
    """A request of one sequence at the router.

    known      tokens of the prompt and of the answer so far; `keys` are those of their chunks for the index
    told       tokens by position, until the client gets them
    avoided    instances of the last attempt, if it failed
    num_cached  prompt tokens that whoever computed it had cached
    token_ids  that the client has; `cumulative` is the sum of their log-probabilities
    answer     is told what the client gets: tokens, then None after the last one, or an error
    deadline   when the attempt is given up
    begun      when it arrived; `admitted` is when an instance, `computed_by`, began with its prompt; `first` when its
               first token came; `taken` when the receiver had its cache. On the router's clock
    """

    state: Routed
    job: Job
    known: list[int]
    keys: ChunkKeys
    answer: Callable[[Told | Exception | None], None]
    told: dict[int, Told] = field(default_factory=dict)
    choice: Choice | None = None
    avoided: tuple[str, ...] = ()
    deadline: float = 0.0
    trace: Trace | None = None
    begun: float = 0.0
    admitted: float = 0.0
    computed_by: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative: float = 0.0
    first: float | None = None
    num_cached: int = 0
    taken: float | None = None
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the client has everything, or an error."""
        return self.state.phase in (Route.ENDED, Route.FAILED)


class Router:
    """All requests of a cluster.

    send     sends a message to an instance
    shares   whether instances keep prompts for others that begin alike
    fetches  whether they fetch such beginnings from each other
    members  by name
    past     counters of the engines of instances that are gone
    soon     calls something after what happens now; None: the event loop does
    ended    is told each request that was answered
    tracer   exports the spans of requests; None: they are not exported
    """

    def __init__(
        self,
        send: Callable[[str, Any], object],
        *,
        timeout: float,
        tries: int,
        routing: str = "expected",
        shares: bool = True,
        fetches: bool = True,
        clock: Callable[[], float] = time.monotonic,
        soon: Callable[[Callable[[], None]], object] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.members: dict[str, Member] = {}
        self.index = Index()
        self.counts: Counter[str] = Counter()
        self.times = StageTimes()
        self.past: Counter[str] = Counter()
        self.ended: Callable[[Ticket], None] = lambda ticket: None
        self._shares, self._fetches = shares, fetches
        self._send = send
        self._timeout, self._tries, self._routing = timeout, tries, routing
        self._clock = clock
        self._soon = soon or _on_loop
        self._tracer = tracer
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

    def begin(self, job: Job, answer: Callable[[Told | Exception | None], None], trace: Trace | None = None) -> Ticket:
        """Takes a request. answer: gets each token, then None, or an error. trace: to export its spans with."""
        number, now = next(self._numbers), self._clock()
        known = list(job.prompt_ids)
        ticket = Ticket(
            Routed(number, self._tries), job, known, index_keys(job.wishes().cache_salt, known), answer, trace=trace
        )
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
        is_current = event.attempt == ticket.state.attempt and ticket.state.phase is Route.RUNNING
        if isinstance(message, TokenOf) and is_current and event.position >= ticket.state.delivered:
            ticket.told.setdefault(event.position, message.told)
        if isinstance(event, Taken) and is_current and ticket.taken is None:
            ticket.taken = self._clock()
            log.info("%s: %s has the cache of %s", _described(ticket), ticket.state.receiver, ticket.state.source)
        self._route(ticket, event)

    def tick(self) -> None:
        """Ends attempts whose time is over, and begins those that waited for an instance."""
        now = self._clock()
        # One that drains makes room for another one in its place.
        is_coming = any(each.health in (Health.STARTING, Health.DRAINING) for each in self.members.values())
        for ticket in list(self._tickets.values()):
            if ticket.state.phase is Route.QUEUED:
                self._try(ticket)
                if is_coming:
                    ticket.deadline = now + self._timeout
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
            member.says(load, self._clock())
            member.stats = load.stats or member.stats
            self._renew(load)

    def _renew(self, load: Load) -> None:
        """Whoever waits for its turn on an instance that goes on is not given up."""
        deadline = self._clock() + self._timeout
        for attempt in load.at_work:
            ticket = self._tickets.get(attempt.request)
            if ticket is not None and ticket.state.phase is Route.RUNNING and ticket.state.attempt == attempt:
                ticket.deadline = deadline

    def down(self, name: str) -> None:
        """An instance has failed, and has lost everything."""
        member = self.members.get(name)
        if member is None or member.health is Health.DOWN:
            return
        member.health = Health.DOWN
        self.index.forget(name)
        self.counts["down"] += 1
        self.past.update({name: (member.stats or {}).get(name, 0) for name in COUNTERS})
        for ticket in list(self._tickets.values()):
            self._route(ticket, Down(name))
        del self.members[name]

    def num_attempts(self, name: str) -> int:
        """Attempts that an instance has a part in. A source has one until its receiver has the cache."""
        running = (each.state for each in self._tickets.values() if each.state.phase is Route.RUNNING)
        return sum(name == each.receiver or (name == each.source and not each.is_taken) for each in running)

    def close(self, error: Exception) -> None:
        """Ends all requests with an error."""
        for ticket in list(self._tickets.values()):
            self._end(ticket, error)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _try(self, ticket: Ticket) -> None:
        keys = self._keys(ticket)
        # The last attempt after others needs nothing but one instance.
        choice = choose(
            Serving.of(self.members.values()), self.index, keys, len(ticket.known), self._routing,
            avoided=ticket.avoided, alone=ticket.state.number > 0 and ticket.state.tries == 1, fetches=self._fetches,
        )  # fmt: skip
        if choice is None:
            return
        ticket.choice, ticket.taken = choice, None
        source = "" if choice.source is None else choice.source.name
        self.counts["attempts"] += 1
        self._route(ticket, Begin(source, choice.receiver.name))
        attempt = ticket.state.attempt
        computing = choice.source or choice.receiver
        computing.take(attempt, choice.num_rows)
        choice.receiver.sequences.add(attempt)
        for member in (computing, choice.receiver):
            self.index.add(member.name, keys)
        log.info(
            "%s: %s computes %d rows, %s decodes",
            _described(ticket), computing.name, choice.num_rows, choice.receiver.name,
        )  # fmt: skip

    def _keys(self, ticket: Ticket) -> list[bytes]:
        """Of the whole chunks of its tokens so far, for the index."""
        return ticket.keys.first(len(ticket.known) // PAGE_TOKENS) if self._shares else []

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
            # If one of two has ended, the other one has done nothing wrong, and may have the prompt in its cache.
            ticket.avoided = () if isinstance(event, Down) else (before.source, before.receiver)
            self._again(ticket, before)
        if ticket.is_over:
            failed = ticket.state.phase is Route.FAILED and not isinstance(event, Abort)
            tries = f"after {self._tries} attempts" if self._tries > 1 else "after one attempt"
            self._end(ticket, InstancesFailedError(f"the request failed {tries}: {ticket.reason}") if failed else None)

    def _post(self, ticket: Ticket, to: str, message: Any) -> None:
        job = replace(ticket.job, token_ids=list(ticket.token_ids), cumulative=ticket.cumulative)
        elsewhere = None if ticket.choice is None else ticket.choice.elsewhere
        if isinstance(message, Compute):
            self._send(to, ComputeJob(message, job, elsewhere))
        elif isinstance(message, Receive):
            if message.source:
                job, elsewhere = replace(job, hints={**job.hints, "cache_pin": None}), None
            self._send(to, ReceiveJob(message, job, elsewhere))
        else:
            self._send(to, message)

    def _deliver(self, ticket: Ticket, token: Token) -> None:
        told = ticket.told.pop(token.position)
        ticket.deadline = self._clock() + self._timeout  # not with tokens behind one that is lost
        ticket.token_ids += told.output.token_ids
        ticket.known += told.output.token_ids
        ticket.cumulative = told.output.cumulative_logprob or 0.0
        if ticket.first is None:
            ticket.first = self._clock()
            ticket.num_cached = 0 if told.first is None else told.first.num_cached_tokens
            seconds = 0.0 if told.first is None else told.first.seconds
            ticket.admitted = max(ticket.begun, ticket.first - seconds)
            ticket.computed_by = ticket.state.source or ticket.state.receiver
        if ticket.choice is not None:
            computing = ticket.choice.source or ticket.choice.receiver
            computing.has_computed(ticket.state.attempt)
        ticket.answer(told)

    def _again(self, ticket: Ticket, before: Routed) -> None:
        """An attempt has failed, and another one may begin."""
        log.warning(
            "%s on %s: %s; %d tokens were told, %d attempts are left",
            ticket.job.described(before.number), _instances(before), ticket.reason, before.delivered,
            ticket.state.tries,
        )  # fmt: skip
        self.counts["again"] += 1
        self.counts["again_streamed"] += before.delivered > 0
        self._release(ticket, before)
        ticket.told.clear()
        ticket.deadline = self._clock() + self._timeout
        # Not at once: more instances may be down, and their news are on the way.
        self._soon(partial(self._try_again, ticket))

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
        self._note_end(ticket, error)

    def _release(self, ticket: Ticket, state: Routed) -> None:
        if ticket.choice is not None:
            for member in (ticket.choice.source, ticket.choice.receiver):
                if member is not None:
                    member.forget(state.attempt)

    def _note_end(self, ticket: Ticket, error: Exception | None) -> None:
        """Logs the end of a request, and keeps the times of its stages."""
        now, spans = self._clock(), list[Span]()
        is_answered = error is None and ticket.state.phase is Route.ENDED
        if is_answered:  # the next turn of a conversation begins with this one
            self.index.add(ticket.state.receiver, self._keys(ticket))
        if ticket.first is not None:
            first, receiver = ticket.first, ticket.state.receiver
            taken = max(first, ticket.taken or first)
            spans = [
                Span("queue", ticket.begun, ticket.admitted, ticket.computed_by),
                Span("prefill", ticket.admitted, first, ticket.computed_by),
                Span("transfer", first, taken, receiver),
                Span("decode", taken, now, receiver),
            ]
        if is_answered:
            self.ended(ticket)
            self.times.add(Stages(*(each.ended - each.begun for each in spans)))
        told = ", ".join(f"{each.name} {each.ended - each.begun:.3f} s" for each in spans) or "no token"
        how = str(error) if error else "ended" if is_answered else "aborted"
        log.log(
            logging.WARNING if error else logging.INFO, "%s on %s: %s after %d tokens (%s)",
            _described(ticket), _instances(ticket.state), how, len(ticket.token_ids), told,
        )  # fmt: skip
        if self._tracer is not None and ticket.trace is not None:
            facts: dict[str, str | int] = {
                "quire.request": ticket.job.name, "quire.attempts": ticket.state.number,
                "quire.prompt_tokens": len(ticket.job.prompt_ids), "quire.tokens": len(ticket.token_ids),
            }  # fmt: skip
            whole = Span("request", ticket.begun, now, "")
            self._tracer.record(ticket.trace, whole, spans, facts, "" if is_answered else how)


def _on_loop(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(call)


def _described(ticket: Ticket) -> str:
    return ticket.job.described(ticket.state.number)


def _instances(state: Routed) -> str:
    """Those of the last attempt."""
    return " and ".join(each for each in (state.source, state.receiver) if each) or "no instance"
