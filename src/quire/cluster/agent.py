"""An instance's part of the protocol: what arrives goes into its pure functions, and what they answer is done.

One thread takes what links and the engine put into the inbox, and keeps the deadlines.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from quire.cache.run import HeldPages
from quire.cluster import engine_attempts as at_engine
from quire.cluster import protocol
from quire.cluster.bodies import (
    ComputeJob,
    InstanceLoad,
    KeepAlive,
    ManifestMessage,
    PeerAddresses,
    PrefillProgress,
    PullCached,
    PullExtents,
    PullNotFound,
    PullParts,
    ReceiveJob,
    SequenceJob,
    Shutdown,
    TokenMessage,
)
from quire.cluster.connections import PeerConnections
from quire.cluster.engine_attempts import EngineAttempts, Notice
from quire.cluster.messages import (
    ROUTER,
    Ack,
    Admitted,
    Attempt,
    CachePart,
    Cancel,
    Compute,
    Envelope,
    Expired,
    Failed,
    Lost,
    Manifest,
    ManifestRequest,
    PartsRequest,
    Receive,
    Token,
    TokenSampled,
)
from quire.cluster.outgoing_pages import OutgoingExport, OutgoingPages
from quire.cluster.peer_store import PeerStore, Pull
from quire.cluster.protocol import ReceiverPhase, ReceiverState, SourcePhase, SourceState
from quire.cluster.wire import WireError

log = logging.getLogger("quire")

LOAD_SECONDS = 0.2
"""Interval at which an instance says that it is alive."""

STATS_EVERY = 5
"""Every so many times it also tells the engine's counters."""

REMEMBERED_SECONDS = 120.0
"""Time for which an ended attempt is remembered, so that a late message begins nothing again."""

STEP_SECONDS = 60.0
"""Least time after which an engine that is in one step counts as failed. The first steps may compile kernels."""

PULL_SECONDS = 10.0
"""Time in which something must arrive of a pull beside the protocol, or of one before it."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a state ends by itself.

    expected, queued, held  of a source
    asked, waiting, pulling of a receiver, for each try
    """

    expected: float = 20.0
    queued: float = 60.0
    held: float = 60.0
    asked: float = 20.0
    waiting: float = 20.0
    pulling: float = 5.0

    @classmethod
    def within(cls, seconds: float) -> Deadlines:
        """For requests that are given up after so many seconds without a token."""
        third = seconds / protocol.PULL_TRIES
        return cls(third, seconds, seconds, third, third, min(5.0, third))

    def of(self, state: SourceState | ReceiverState) -> float:
        """Seconds from now on."""
        return self._of_phases[state.phase]

    @cached_property
    def _of_phases(self) -> dict[SourcePhase | ReceiverPhase, float]:
        return {
            SourcePhase.EXPECTED: self.expected, SourcePhase.QUEUED: self.queued, SourcePhase.HELD: self.held,
            ReceiverPhase.ASKED: self.asked, ReceiverPhase.QUEUED: self.waiting, ReceiverPhase.PULLING: self.pulling,
        }  # fmt: skip


@dataclass(eq=False)
class Deadline:
    """When a state ends by itself: `moment`, which may move on."""

    moment: float


class Agent:
    """The attempts of one instance.

    name    of the instance
    submit  runs a command on the engine's thread
    """

    def __init__(
        self,
        name: str,
        connections: PeerConnections,
        peer_store: PeerStore,
        submit: Callable[[Callable[[], object]], None],
        deadlines: Deadlines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.connections = connections
        self._peer_store = peer_store
        self._submit = submit
        self._deadlines = deadlines
        self._clock = clock
        self._engine_attempts: EngineAttempts | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sources: dict[Attempt, SourceState] = {}
        self._receivers: dict[Attempt, ReceiverState] = {}
        self._bodies: dict[Attempt, tuple[Any, Any]] = {}  # of the cache that a source holds: its state and token
        self._outgoing_exports: dict[Attempt, OutgoingExport] = {}
        self._names: dict[Attempt, str] = {}  # in logs
        self._pulls: dict[Attempt, Pull] = {}
        self._asked: dict[int, Pull] = {}  # beside the protocol
        self._progress: dict[Attempt, tuple[int, int]] = {}  # of pulls, when their deadline was set
        self._peers: set[str] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._due: dict[tuple[str, Attempt], Deadline] = {}
        self._numbers = itertools.count()
        self._num_loads = 0
        self._load: InstanceLoad | None = None
        self._asked_at: float | None = None  # when the engine was asked for it; None: it has answered

    # ---- from other threads ----------------------------------------------------------------------------------------

    def receive(self, sender: str, message: Any, extents: Iterator[memoryview]) -> None:
        """See Handler."""
        if isinstance(message, PullExtents):
            is_whole = self._peer_store.arrive(message.pull, extents)
            if not is_whole:
                log.warning(
                    "%s: the extents of pull %d from %s are damaged or late",
                    self._named(message.attempt), message.pull, sender,
                )  # fmt: skip
            self._inbox.put(partial(self._on_extents, message.attempt, message.pull, is_whole))
        else:
            self._inbox.put(partial(self._handle, sender, message))

    def connection_lost(self, name: str) -> None:
        """See Handler. Whoever lost its router ends."""
        if name == ROUTER:
            log.error("the router is gone")
            self.stop()
        else:
            self._inbox.put(partial(self._on_connection_lost, name))

    def notice(self, notices: list[Notice]) -> None:
        """From the engine's attempts."""
        self._inbox.put(lambda: [self._on_notice(each) for each in notices])  # type: ignore[func-returns-value, arg-type]

    def stop(self) -> None:
        """Ends `run`."""
        self._inbox.put(None)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def run(self, engine_attempts: EngineAttempts) -> None:
        """Until `stop`, or until the router is gone."""
        self.begin(engine_attempts)
        while self.turn(max(0.0, self.next_timer - self._clock())):
            pass

    def begin(self, engine_attempts: EngineAttempts) -> None:
        """Says that the instance is alive, from now on again and again."""
        self._engine_attempts = engine_attempts
        self._send_heartbeat()

    def turn(self, seconds: float) -> bool:
        """Waits for something in the inbox, for `seconds` at most, and does it and what is due. False after `stop`."""
        try:
            call = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
            if call is None:
                return False
            call()
        except queue.Empty:
            pass
        now = self._clock()
        while self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        return True

    @property
    def next_timer(self) -> float:
        """When the next thing is due, on its clock."""
        return self._timers[0][0]

    def _prepare(self, attempt: Attempt, job: SequenceJob) -> None:
        """What of a request need not hold up the engine's steps."""
        assert self._engine_attempts is not None
        self._engine_attempts.prepare(attempt, job)

    def _handle(self, sender: str, message: Any) -> None:
        match message:
            case ComputeJob(Compute(attempt) as begin, job, remote_prefix):
                self._names[attempt] = job.described(attempt.number)
                self._prepare(attempt, job)
                self._call_engine("compute", attempt, job, remote_prefix, unless=self._sources)
                self._advance_source(attempt, sender, begin)
                if self._sources[attempt].is_asked:
                    self._call_engine("report_progress", attempt)
            case ReceiveJob(Receive(attempt, source) as begin, job, remote_prefix):
                self._names[attempt] = job.described(attempt.number)
                self._prepare(attempt, job)
                if source:
                    self._call_engine("plan", attempt, job, unless=self._receivers)
                else:
                    self._call_engine("run_alone", attempt, job, remote_prefix, unless=self._receivers)
                self._advance_receiver(attempt, begin)
            case ManifestMessage(Manifest(attempt) as manifest, cache, told):
                state = self._receivers.get(attempt)
                self._advance_receiver(attempt, manifest)
                if state is not None and state.phase is ReceiverPhase.ASKED:
                    self._bodies[attempt] = (None, told)
                    self._call_engine("adopt", attempt, sender, cache, told)
            case PrefillProgress(attempt, num_chunks):
                state = self._receivers.get(attempt)
                if state is not None and state.phase is ReceiverPhase.ASKED:
                    self._call_engine("prefetch", attempt, sender, num_chunks)
            case KeepAlive(attempts):
                for attempt in attempts:
                    self._renew("source", attempt, SourcePhase.HELD)
                    self._renew("receiver", attempt, ReceiverPhase.ASKED)
            case PullParts(PartsRequest(attempt) as want, pull, groups):
                self._wanted(attempt, sender, want, pull, groups)
            case PullCached(attempt, pull, names, groups):
                self._pack(attempt, sender, pull, "cached", names, groups)
            case PullNotFound(_, pull):
                self._asked.pop(pull, None)
                self._peer_store.fail(pull, "the source has not what was asked for")
            case PeerAddresses(addresses):
                self._set_peers(addresses)
            case Shutdown():
                self.stop()
            case Cancel(attempt):
                self._advance_source(attempt, sender, message)
                self._advance_receiver(attempt, message)
            case Lost(attempt):
                self._advance_receiver(attempt, message)
            case ManifestRequest(attempt) | Ack(attempt):
                self._advance_source(attempt, sender, message)

    def _on_extents(self, attempt: Attempt, number: int, is_whole: bool) -> None:
        """The extents of a pull. Damaged ones are asked for again, where the protocol counts how often."""
        if is_whole:
            self._asked.pop(number, None)
        elif number in self._asked:
            self._give_up(number, "what the source has sent is damaged")
        elif self._is_pulling(attempt) and self._pulls[attempt].number == number:
            self._advance_receiver(attempt, Expired())

    def _is_pulling(self, attempt: Attempt) -> bool:
        state = self._receivers.get(attempt)
        return state is not None and state.phase is ReceiverPhase.PULLING

    def _on_connection_lost(self, peer: str) -> None:
        """The answers to pulls may be lost with the connection. Those of the protocol have a deadline, or their router
        ends them.
        """
        for pull in [each for each in self._asked.values() if each.source == peer]:
            self._give_up(pull.number, "the connection to the source has ended")

    def _on_notice(self, notice: Notice) -> None:
        match notice:
            case Pull():
                self._ask(notice)
            case at_engine.AdmittedNotice(attempt, pull):
                if attempt in self._sources:
                    self._advance_source(attempt, "", Admitted())
                elif (state := self._receivers.get(attempt)) is not None:
                    if pull is not None and state.phase is ReceiverPhase.QUEUED:
                        self._pulls[attempt], self._progress[attempt] = pull, self._progress_of(pull)
                    self._advance_receiver(
                        attempt, Admitted(state.parts - (frozenset() if pull is None else pull.parts))
                    )
            case at_engine.CacheCompleteNotice(attempt):
                while (found := self._receivers.get(attempt)) is not None and found.phase is ReceiverPhase.PULLING:
                    self._advance_receiver(attempt, CachePart(attempt, min(found.missing)))
            case at_engine.TokenNotice(attempt, told, is_last, cache):
                if (source := self._sources.get(attempt)) is not None:
                    if cache is not None and source.phase is SourcePhase.RUNNING:
                        self._bodies[attempt], self._outgoing_exports[attempt] = (
                            (cache.state, told),
                            cache.outgoing_export,
                        )
                    parts = frozenset[int]() if cache is None else cache.parts
                    self._advance_source(attempt, "", TokenSampled(is_last, parts), told)
                else:
                    self._advance_receiver(attempt, TokenSampled(is_last), told)
            case at_engine.ChunksNotice(attempt, num_chunks):
                if (source := self._sources.get(attempt)) is not None and source.phase is SourcePhase.RUNNING:
                    self.connections.send(source.receiver, PrefillProgress(attempt, num_chunks))
            case at_engine.FailureNotice(attempt, reason):
                failed = Failed(attempt, reason)
                (
                    self._advance_source(attempt, "", failed)
                    if attempt in self._sources
                    else self._advance_receiver(attempt, failed)
                )

    # ---- states ----------------------------------------------------------------------------------------------------

    def _advance_source(self, attempt: Attempt, sender: str, event: Any, told: Any = None) -> None:
        before = self._sources.get(attempt)
        after, sent = protocol.advance_source(before, sender, event)
        self._changed("source", self._sources, attempt, before, after)
        if before is not None and not before.is_asked and after is not None and after.is_asked:
            self._call_engine("report_progress", attempt)
        for each in sent:
            self._send(each, told)

    def _advance_receiver(self, attempt: Attempt, event: Any, told: Any = None) -> None:
        before = self._receivers.get(attempt)
        after, sent = protocol.advance_receiver(before, event)
        self._changed("receiver", self._receivers, attempt, before, after)
        for each in sent:
            self._send(each, told)
        if after is not None and after.phase is ReceiverPhase.RUNNING:
            self._bodies.pop(attempt, None)  # its token is told

    def _changed(self, role: str, states: dict[Attempt, Any], attempt: Attempt, before: Any, after: Any) -> None:
        if after is None:
            return
        states[attempt] = after
        if after.phase in (SourcePhase.ENDED, ReceiverPhase.ENDED):
            if before is None or before.phase is not after.phase:
                self._end_pulls(attempt)
                self._call_engine("end", attempt)
                self._at(REMEMBERED_SECONDS, partial(self._forget, states, attempt))
                self._progress.pop(attempt, None)
                self._bodies.pop(attempt, None)
                self._outgoing_exports.pop(attempt, None)
                self._due.pop((role, attempt), None)
        elif protocol.has_deadline(after):
            self._wait(role, attempt, after)  # asking again renews a lease
        else:
            self._due.pop((role, attempt), None)

    def _end_pulls(self, attempt: Attempt) -> None:
        """Nothing more is waited for. Not by a command: a step of the engine may stand still behind a layer that does
        not come.
        """
        own = self._pulls.pop(attempt, None)
        if own is not None:
            self._peer_store.fail(own.number, "the attempt has ended")
        for pull in [each for each in self._asked.values() if each.attempt == attempt]:
            self._give_up(pull.number, "the attempt has ended")

    def _wait(self, role: str, attempt: Attempt, state: Any) -> None:
        """Sets the deadline of a state."""
        seconds = self._deadlines.of(state)
        due = self._due[role, attempt] = Deadline(self._clock() + seconds)
        self._at(seconds, partial(self._expire, role, attempt, due))

    def _renew(self, role: str, attempt: Attempt, phase: SourcePhase | ReceiverPhase) -> None:
        """Moves the deadline of a state on, if it is in a phase."""
        state = self._sources.get(attempt) if role == "source" else self._receivers.get(attempt)
        if state is not None and state.phase is phase:
            self._due[role, attempt].moment = self._clock() + self._deadlines.of(state)

    def _is_in_line(self, attempt: Attempt) -> bool:
        """Whether a pull is late because its source still sends. To ask again would only have it sent twice."""
        if not self._is_pulling(attempt):
            return False
        before, now = self._progress[attempt], self._progress_of(self._pulls[attempt])
        self._progress[attempt] = now
        return now != before

    def _progress_of(self, pull: Pull) -> tuple[int, int]:
        """What has come of a pull, and of those before it from the same source. A source answers in order: once a later
        one comes, this one is lost.
        """
        number, num_bytes = self._peer_store.received(pull.source)
        return pull.num_bytes, num_bytes if number <= pull.number else 0

    def _expire(self, role: str, attempt: Attempt, due: Deadline) -> None:
        if self._due.get((role, attempt)) is not due:
            return
        if (left := due.moment - self._clock()) > 0:
            self._at(left, partial(self._expire, role, attempt, due))
            return
        if role == "receiver" and self._is_in_line(attempt):
            self._wait(role, attempt, self._receivers[attempt])
            return
        log.info("%s: the deadline of its %s is over", self._named(attempt), role)
        if role == "source":
            self._advance_source(attempt, "", Expired())
        else:
            self._advance_receiver(attempt, Expired())

    def _forget(self, states: dict[Attempt, Any], attempt: Attempt) -> None:
        states.pop(attempt, None)
        self._names.pop(attempt, None)

    def _named(self, attempt: Attempt) -> str:
        return self._names.get(attempt, f"request number {attempt.request}, attempt {attempt.number}")

    # ---- messages --------------------------------------------------------------------------------------------------

    def _send(self, sent: Envelope, told: Any = None) -> None:
        to, message = sent
        attempt = message.attempt
        match message:
            case Manifest():
                cache, first = self._bodies[attempt]
                try:
                    self.connections.send(to, ManifestMessage(message, cache, first))
                except WireError as error:
                    log.error("%s: its cache cannot be described: %s", self._named(attempt), error)
                    self._advance_source(attempt, "", Failed(attempt, str(error)))
            case Token():
                self.connections.send(to, TokenMessage(message, told or self._bodies[attempt][1]))
            case PartsRequest():
                if (pull := self._pulls.get(attempt)) is not None:
                    self.connections.send(to, PullParts(PartsRequest(attempt, pull.parts), pull.number, pull.groups))
            case CachePart():
                pass  # they went as extents: see `_wanted`
            case _:
                self.connections.send(to, message)

    def _wanted(self, attempt: Attempt, sender: str, want: PartsRequest, pull: int, groups: list[list[int]]) -> None:
        """Sends what a receiver asks for. While the prompt is computed, that is not a matter of the protocol."""
        state = self._sources.get(attempt)
        if state is None or state.phase is not SourcePhase.RUNNING:
            self._advance_source(attempt, sender, want)
            outgoing_export = self._outgoing_exports.get(attempt)
            self._send_pages(
                attempt, sender, pull, None if outgoing_export is None else outgoing_export.outgoing_pages(groups)
            )
        else:
            self._pack(attempt, sender, pull, "outgoing_pages", attempt, groups)

    def _pack(self, attempt: Attempt, to: str, pull: int, what: str, *given: Any) -> None:
        """Sends what the engine's attempts find."""

        def pack() -> None:
            self._send_pages(attempt, to, pull, getattr(self._engine_attempts, what)(*given, self._release))

        self._submit(pack)

    def _send_pages(self, attempt: Attempt, to: str, pull: int, outgoing_pages: OutgoingPages | None) -> None:
        if outgoing_pages is None:
            self.connections.send(to, PullNotFound(attempt, pull))
        else:
            self.connections.send(to, PullExtents(attempt, pull), outgoing_pages)

    def _release(self, pages: list[HeldPages]) -> None:
        self._submit(lambda: [each.release() for each in pages])  # type: ignore[func-returns-value]

    def _ask(self, pull: Pull) -> None:
        """A pull beside the protocol."""
        self._asked[pull.number] = pull
        if pull.names:
            self.connections.send(pull.source, PullCached(pull.attempt, pull.number, pull.names, pull.groups))
        else:
            self.connections.send(
                pull.source, PullParts(PartsRequest(pull.attempt, pull.parts), pull.number, pull.groups)
            )
        self._at(PULL_SECONDS, partial(self._overdue, pull, self._progress_of(pull)))

    def _overdue(self, pull: Pull, before: tuple[int, int]) -> None:
        """The time of a pull beside the protocol is over, unless something came meanwhile."""
        if pull.number in self._asked and (now := self._progress_of(pull)) != before:
            self._at(PULL_SECONDS, partial(self._overdue, pull, now))
        else:
            self._give_up(pull.number, "the source does not answer")

    def _give_up(self, number: int, reason: str) -> None:
        if self._asked.pop(number, None) is not None:
            self._peer_store.fail(number, reason)

    def _set_peers(self, addresses: dict[str, str]) -> None:
        others = {name: address for name, address in addresses.items() if name != self.name}
        for name in self._peers - others.keys():
            self.connections.forget(name)
            self._peer_store.forget(name)
        for name, address in others.items():
            self.connections.learn(name, address)
        self._peers = set(others)

    # ---- small things ----------------------------------------------------------------------------------------------

    def _call_engine(self, what: str, *given: Any, unless: dict[Attempt, Any] | None = None) -> None:
        """Calls a method of the engine's attempts on its thread, unless the attempt is known."""
        if unless is not None and given[0] in unless and unless[given[0]].phase is not SourcePhase.EXPECTED:
            return
        engine_attempts = self._engine_attempts
        assert engine_attempts is not None
        self._submit(lambda: getattr(engine_attempts, what)(*given))

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self._clock() + seconds, next(self._numbers), call))

    def _send_heartbeat(self) -> None:
        """The engine's thread may be in a long step: then the load is that of before, and says nothing of what goes on.
        An engine that stands still for longer than a request may wait ends its instance.
        """
        if self._load is not None:
            load = self._load if self._asked_at is None else replace(self._load, at_work=())
            self.connections.send(ROUTER, load)
            self._send_keep_alives(load.at_work)
        if self._asked_at is None:
            self._num_loads += 1
            self._asked_at = self._clock()
            self._submit(partial(self._read_load, self._num_loads % STATS_EVERY == 1))
        elif self._clock() - self._asked_at > (most := max(STEP_SECONDS, self._deadlines.queued)):
            log.error("the engine has not ended a step for %.0f s", most)
            self.stop()
        self._at(LOAD_SECONDS, self._send_heartbeat)

    def _send_keep_alives(self, at_work: tuple[Attempt, ...]) -> None:
        """Renews the deadlines of what waits for its turn, here and at the other instance: how long a request may be in
        a queue is not limited, only how long nothing goes on.
        """
        told: dict[str, list[Attempt]] = {}
        for attempt in at_work:
            self._renew("source", attempt, SourcePhase.QUEUED)
            self._renew("receiver", attempt, ReceiverPhase.QUEUED)
            supply, intake = self._sources.get(attempt), self._receivers.get(attempt)
            if supply is not None and supply.is_asked and supply.phase in (SourcePhase.QUEUED, SourcePhase.RUNNING):
                told.setdefault(supply.receiver, []).append(attempt)
            elif intake is not None and intake.phase in (ReceiverPhase.QUEUED, ReceiverPhase.PULLING):
                told.setdefault(intake.source, []).append(attempt)
        for other, attempts in told.items():
            self.connections.send(other, KeepAlive(tuple(attempts)))

    def _read_load(self, with_stats: bool) -> None:
        """On the engine's thread."""
        assert self._engine_attempts is not None
        self._load, self._asked_at = self._engine_attempts.load(self.name, with_stats=with_stats), None
