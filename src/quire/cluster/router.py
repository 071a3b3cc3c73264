"""The router: assigns requests to instances, delivers each token once, and retries when an instance fails.

Everything runs on the server's event loop. `protocol.advance_request` decides; this module carries out its decisions.
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
from quire.cluster.bodies import ComputeJob, InstanceLoad, ReceiveJob, SequenceJob
from quire.cluster.members import (
    Health,
    Member,
    PrefixIndex,
    RoutingDecision,
    ServingInstances,
    choose_instances,
    index_keys,
)
from quire.cluster.messages import (
    CLIENT,
    Abort,
    Begin,
    Compute,
    Expired,
    Failed,
    HandedOver,
    InstanceDown,
    Message,
    Receive,
    Token,
)
from quire.cluster.protocol import RequestPhase, RequestState
from quire.cluster.stages import Stages, StageTimes
from quire.cluster.tracing import TraceContext, Tracer, TraceSpan
from quire.errors import InstancesFailedError

log = logging.getLogger("quire")

COUNTERS = (
    "preemptions", "steps", "decode_tokens", "replayed_tokens", "prefill_tokens_computed", "prefill_tokens_cached",
)  # fmt: skip
"""Counters of engines that never decrease."""

TICK_SECONDS = 0.1
"""Interval between checks of deadlines."""


@dataclass(eq=False)
class RoutedRequest:
    """A request of one sequence at the router.

    known      tokens of the prompt and of the answer so far; `keys` are the keys of their chunks for the index
    avoided    instances of the last attempt, if it failed
    num_cached  number of prompt tokens that the computing instance had cached
    token_ids  tokens that the client has; `cumulative` is the sum of their log-probabilities
    answer     called with the client's items: tokens, then None after the last one, or an error
    deadline   time at which the attempt is given up
    begun      time of arrival; `admitted`: when the instance `computed_by` began with its prompt; `first`: when its
               first token came; `handed_over`: when the receiver had its cache. All on the router's clock
    """

    state: RequestState
    job: SequenceJob
    known: list[int]
    keys: ChunkKeys
    answer: Callable[[Token | Exception | None], None]
    choice: RoutingDecision | None = None
    avoided: tuple[str, ...] = ()
    deadline: float = 0.0
    trace: TraceContext | None = None
    begun: float = 0.0
    admitted: float = 0.0
    computed_by: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative: float = 0.0
    first: float | None = None
    num_cached: int = 0
    handed_over: float | None = None
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the client has the whole answer, or an error."""
        return self.state.phase in (RequestPhase.ENDED, RequestPhase.FAILED)


class Router:
    """All requests of a cluster.

    send     sends a message to an instance
    shares   whether instances keep prompts for later requests with the same prefix
    fetches  whether instances fetch prefixes from each other
    members  instances by name
    past_counters     summed engine counters of ended instances
    soon     schedules a call after the current event; None: on the event loop
    ended    called with each answered request
    tracer   exports the spans of requests; None: no export
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
        self.index = PrefixIndex()
        self.counts: Counter[str] = Counter()
        self.times = StageTimes()
        self.past_counters: Counter[str] = Counter()
        self.ended: Callable[[RoutedRequest], None] = lambda request: None
        self._shares, self._fetches = shares, fetches
        self._send = send
        self._timeout, self._tries, self._routing = timeout, tries, routing
        self._clock = clock
        self._soon = soon or _on_loop
        self._tracer = tracer
        self._requests: dict[int, RoutedRequest] = {}
        self._numbers = itertools.count(1)

    # ---- requests --------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests without a first token."""
        return sum(each.state.delivered == 0 for each in self._requests.values())

    @property
    def num_running(self) -> int:
        """Number of unfinished requests with tokens."""
        return len(self._requests) - self.num_waiting

    def begin(
        self,
        job: SequenceJob,
        answer: Callable[[Token | Exception | None], None],
        trace: TraceContext | None = None,
    ) -> RoutedRequest:
        """Takes a request. answer: gets each token, then None, or an error. trace: for the request's spans."""
        number, now = next(self._numbers), self._clock()
        known = list(job.prompt_ids)
        request = RoutedRequest(
            RequestState(number, self._tries),
            job,
            known,
            index_keys(job.cache_hints().cache_salt, known),
            answer,
            trace=trace,
        )
        request.begun, request.deadline = now, now + self._timeout
        self._requests[number] = request
        self._try(request)
        return request

    def abort(self, request: RoutedRequest) -> None:
        """Ends a request whose client has disconnected."""
        self._route(request, Abort())

    def handle(self, message: Message) -> None:
        """Handles a message of an instance about an attempt."""
        request = self._requests.get(message.attempt.request)
        if request is None:
            return
        if isinstance(message, HandedOver) and request.handed_over is None:
            state = request.state
            if message.attempt == state.attempt and state.phase is RequestPhase.RUNNING:
                request.handed_over = self._clock()
                log.info("%s: %s has the cache of %s", _described(request), state.receiver, state.source)
        self._route(request, message)

    def tick(self) -> None:
        """Expires attempts, and begins those that waited for an instance."""
        now = self._clock()
        # A draining instance makes room for another one in its place.
        has_pending_instance = any(each.health in (Health.STARTING, Health.DRAINING) for each in self.members.values())
        for request in list(self._requests.values()):
            if request.state.phase is RequestPhase.QUEUED:
                self._try(request)
                if has_pending_instance:
                    request.deadline = now + self._timeout
                if request.state.phase is RequestPhase.QUEUED and now >= request.deadline:
                    request.reason = request.reason or "there is no instance"
                    self._end(request, InstancesFailedError(f"the request was not begun in time: {request.reason}"))
            elif now >= request.deadline:
                self.counts["expired"] += 1
                self._route(request, Expired())

    # ---- instances -------------------------------------------------------------------------------------------------

    def handle_load(self, load: InstanceLoad) -> None:
        """Handles a heartbeat. Renews the deadlines of attempts that wait for their turn on a working instance."""
        if (member := self.members.get(load.instance)) is None:
            return
        now = self._clock()
        deadline = now + self._timeout
        member.set_load(load, now)
        member.stats = load.stats or member.stats
        for attempt in load.at_work:
            request = self._requests.get(attempt.request)
            if request is not None and request.state.phase is RequestPhase.RUNNING and request.state.attempt == attempt:
                request.deadline = deadline

    def down(self, name: str) -> None:
        """Handles the failure of an instance, which has lost everything."""
        member = self.members.get(name)
        if member is None or member.health is Health.DOWN:
            return
        member.health = Health.DOWN
        self.index.forget(name)
        self.counts["down"] += 1
        self.past_counters.update({name: (member.stats or {}).get(name, 0) for name in COUNTERS})
        for request in list(self._requests.values()):
            self._route(request, InstanceDown(name))
        del self.members[name]

    def num_attempts(self, name: str) -> int:
        """Number of attempts in which an instance takes part. A source takes part until its receiver has the cache."""
        running = (each.state for each in self._requests.values() if each.state.phase is RequestPhase.RUNNING)
        return sum(name == each.receiver or (name == each.source and not each.is_handed_over) for each in running)

    def close(self, error: Exception) -> None:
        """Ends all requests with an error."""
        for request in list(self._requests.values()):
            self._end(request, error)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _try(self, request: RoutedRequest) -> None:
        keys = self._keys(request)
        # The last retry uses a single instance.
        choice = choose_instances(
            ServingInstances.of(self.members.values()), self.index, keys, len(request.known), self._routing,
            avoided=request.avoided, alone=request.state.number > 0 and request.state.tries == 1, fetches=self._fetches,
        )  # fmt: skip
        if choice is None:
            return
        request.choice, request.handed_over = choice, None
        source = "" if choice.source is None else choice.source.name
        self.counts["attempts"] += 1
        self._route(request, Begin(source, choice.receiver.name))
        attempt = request.state.attempt
        computing = choice.source or choice.receiver
        computing.begin_prefill(attempt, choice.num_rows)
        choice.receiver.sequences.add(attempt)
        for member in (computing, choice.receiver):
            self.index.add(member.name, keys)
        log.info(
            "%s: %s computes %d rows, %s decodes",
            _described(request), computing.name, choice.num_rows, choice.receiver.name,
        )  # fmt: skip

    def _keys(self, request: RoutedRequest) -> list[bytes]:
        """Keys of the whole chunks of its tokens so far, for the index."""
        return request.keys.first(len(request.known) // PAGE_TOKENS) if self._shares else []

    def _route(self, request: RoutedRequest, event: Any) -> None:
        before = request.state
        request.state, sent = protocol.advance_request(before, event)
        reason = event.reason if isinstance(event, Failed) else "its instance is down"
        for to, message in sent:
            if to != CLIENT:
                self._post(request, to, message)
            elif isinstance(message, Token):
                self._deliver(request, message)
            elif isinstance(message, Failed):
                request.reason = message.reason
        if request.state.phase is RequestPhase.QUEUED and before.phase is RequestPhase.RUNNING:
            request.reason = "no answer in time" if isinstance(event, Expired) else reason
            # If one of the two instances is down, the other one may be chosen again, and may have the prompt cached.
            request.avoided = () if isinstance(event, InstanceDown) else (before.source, before.receiver)
            self._again(request, before)
        if request.is_over:
            failed = request.state.phase is RequestPhase.FAILED and not isinstance(event, Abort)
            tries = f"after {self._tries} attempts" if self._tries > 1 else "after one attempt"
            self._end(
                request, InstancesFailedError(f"the request failed {tries}: {request.reason}") if failed else None
            )

    def _post(self, request: RoutedRequest, to: str, message: Any) -> None:
        job = replace(request.job, token_ids=list(request.token_ids), cumulative=request.cumulative)
        remote_prefix = None if request.choice is None else request.choice.remote_prefix
        if isinstance(message, Compute):
            self._send(to, ComputeJob(message, job, remote_prefix))
        elif isinstance(message, Receive):
            if message.source:
                job, remote_prefix = replace(job, hints={**job.hints, "cache_pin": None}), None
            self._send(to, ReceiveJob(message, job, remote_prefix))
        else:
            self._send(to, message)

    def _deliver(self, request: RoutedRequest, token: Token) -> None:
        output = token.output
        request.deadline = self._clock() + self._timeout  # tokens after a lost one do not renew it
        request.token_ids += output.token_ids
        request.known += output.token_ids
        request.cumulative = output.cumulative_logprob or 0.0
        if request.first is None:
            request.first = self._clock()
            request.num_cached = 0 if token.first is None else token.first.num_cached_tokens
            seconds = 0.0 if token.first is None else token.first.seconds
            request.admitted = max(request.begun, request.first - seconds)
            request.computed_by = request.state.source or request.state.receiver
        if request.choice is not None:
            computing = request.choice.source or request.choice.receiver
            computing.end_prefill(request.state.attempt)
        request.answer(token)

    def _again(self, request: RoutedRequest, before: RequestState) -> None:
        """Retries after a failed attempt."""
        log.warning(
            "%s on %s: %s; %d tokens were delivered, %d attempts are left",
            request.job.described(before.number), _instances(before), request.reason, before.delivered,
            request.state.tries,
        )  # fmt: skip
        self.counts["again"] += 1
        self.counts["again_streamed"] += before.delivered > 0
        self._release(request, before)
        request.deadline = self._clock() + self._timeout
        # Not at once: more instances may be down, whose failures are not reported yet.
        self._soon(partial(self._try_again, request))

    def _try_again(self, request: RoutedRequest) -> None:
        if request.state.phase is RequestPhase.QUEUED and not request.is_over:
            self._try(request)

    def _end(self, request: RoutedRequest, error: Exception | None) -> None:
        if self._requests.pop(request.state.request, None) is None:
            return
        self._release(request, request.state)
        self.counts["failed" if error else "ended"] += 1
        request.state = replace(request.state, phase=RequestPhase.FAILED if error else request.state.phase)
        request.answer(error)
        self._note_end(request, error)

    def _release(self, request: RoutedRequest, state: RequestState) -> None:
        if request.choice is not None:
            for member in (request.choice.source, request.choice.receiver):
                if member is not None:
                    member.forget(state.attempt)

    def _note_end(self, request: RoutedRequest, error: Exception | None) -> None:
        """Logs the end of a request, and records the times of its stages."""
        now, spans = self._clock(), list[TraceSpan]()
        is_answered = error is None and request.state.phase is RequestPhase.ENDED
        if is_answered:  # the next turn of a conversation begins with this answer
            self.index.add(request.state.receiver, self._keys(request))
        if request.first is not None:
            first, receiver = request.first, request.state.receiver
            handed_over = max(first, request.handed_over or first)
            spans = [
                TraceSpan("queue", request.begun, request.admitted, request.computed_by),
                TraceSpan("prefill", request.admitted, first, request.computed_by),
                TraceSpan("transfer", first, handed_over, receiver),
                TraceSpan("decode", handed_over, now, receiver),
            ]
        if is_answered:
            self.ended(request)
            self.times.add(Stages(*(each.ended - each.begun for each in spans)))
        seconds = ", ".join(f"{each.name} {each.ended - each.begun:.3f} s" for each in spans) or "no token"
        how = str(error) if error else "ended" if is_answered else "aborted"
        log.log(
            logging.WARNING if error else logging.INFO, "%s on %s: %s after %d tokens (%s)",
            _described(request), _instances(request.state), how, len(request.token_ids), seconds,
        )  # fmt: skip
        if self._tracer is not None and request.trace is not None:
            facts: dict[str, str | int] = {
                "quire.request": request.job.name, "quire.attempts": request.state.number,
                "quire.prompt_tokens": len(request.job.prompt_ids), "quire.tokens": len(request.token_ids),
            }  # fmt: skip
            whole = TraceSpan("request", request.begun, now, "")
            self._tracer.record(request.trace, whole, spans, facts, "" if is_answered else how)


def _on_loop(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(call)


def _described(request: RoutedRequest) -> str:
    return request.job.described(request.state.number)


def _instances(state: RequestState) -> str:
    """The instances of the last attempt."""
    return " and ".join(each for each in (state.source, state.receiver) if each) or "no instance"
