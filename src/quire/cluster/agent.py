"""An instance's part of the protocol: passes events to its pure functions and carries out their messages.

One thread takes the events of connections and of the engine from the inbox, and keeps the deadlines.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.cache.run import HeldPages
from quire.cluster import protocol
from quire.cluster.attempt_states import REMEMBERED_SECONDS, AttemptStates, Phase, Timers
from quire.cluster.bodies import (
    ComputeJob,
    InstanceLoad,
    KeepAlive,
    ManifestMessage,
    PeerAddresses,
    PrefillProgress,
    PullExtents,
    PullNotFound,
    PullRequest,
    ReceiveJob,
    Shutdown,
)
from quire.cluster.connections import PeerConnections
from quire.cluster.engine_attempts import AdmittedNotice, Command, EngineAttempts, ExportedCache, Notice
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
    TokenSampled,
)
from quire.cluster.outgoing_pages import OutgoingPages
from quire.cluster.peer_store import PeerStore, Pull
from quire.cluster.protocol import ReceiverPhase, ReceiverState, SourcePhase, SourceState
from quire.cluster.pulls import PullsUnderWay
from quire.cluster.wire import WireError

log = logging.getLogger("quire")

LOAD_SECONDS = 0.2
"""Interval of an instance's heartbeats."""

STATS_EVERY = 5
"""Every n-th heartbeat includes the engine's counters."""

STEP_SECONDS = 60.0
"""Minimum time in one step after which an engine counts as failed. The first steps may compile kernels."""


class Agent:
    """The attempts of one instance.

    name       name of the instance
    submit     runs a command on the engine's thread
    deadlines  see `deadlines_within`
    timers     scheduled calls, by its clock
    """

    _engine_attempts: EngineAttempts  # from `begin` on

    def __init__(
        self,
        name: str,
        connections: PeerConnections,
        peer_store: PeerStore,
        submit: Callable[[Callable[[], object]], None],
        deadlines: Mapping[Phase, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.connections = connections
        self._peer_store = peer_store
        self._submit = submit
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.timers = timers = Timers(clock)
        self._sources = AttemptStates[SourceState](
            protocol.advance_source, deadlines, timers, self._send, self._on_source_expired, self._on_ended
        )
        self._receivers = AttemptStates[ReceiverState](
            lambda state, _, event: protocol.advance_receiver(state, event), deadlines, timers,
            self._send, self._on_receiver_expired, self._on_ended,
        )  # fmt: skip
        self._pulls = PullsUnderWay(connections, peer_store, timers)
        self._heartbeat = Heartbeat(
            name, timers, submit, self._send_load, max(STEP_SECONDS, deadlines[SourcePhase.QUEUED]), self.stop
        )
        self._exports: dict[Attempt, ExportedCache] = {}
        self._names: dict[Attempt, str] = {}  # names of requests, for logs
        self._peers: set[str] = set()

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
        """See Handler. An instance without its router ends."""
        if name == ROUTER:
            log.error("the router is gone")
            self.stop()
        else:
            self._inbox.put(partial(self._pulls.note_connection_lost, name))

    def notice(self, notices: list[Notice]) -> None:
        """Takes notices of the engine's attempts."""
        self._inbox.put(partial(self._on_notices, notices))

    def stop(self) -> None:
        """Ends `run`."""
        self._inbox.put(None)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def run(self, engine_attempts: EngineAttempts) -> None:
        """Runs until `stop`, or until the router is gone."""
        self.begin(engine_attempts)
        while self.turn(max(0.0, self.timers.next - self.timers.clock())):
            pass

    def begin(self, engine_attempts: EngineAttempts) -> None:
        """Starts the heartbeats."""
        self._engine_attempts = engine_attempts
        self._heartbeat.beat(engine_attempts)

    def turn(self, seconds: float) -> bool:
        """Waits at most `seconds` for an event, and handles it and all due timers. Returns False after `stop`."""
        try:
            call = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
            if call is None:
                return False
            call()
        except queue.Empty:
            pass
        self.timers.run()
        return True

    def _handle(self, sender: str, message: Any) -> None:
        match message:
            case ComputeJob(Compute(attempt) as begin):
                self._begin(message, self._sources)
                self._sources.advance(attempt, begin, sender)
                if self._sources.by_attempt[attempt].is_asked:
                    self._command(ManifestRequest(attempt))
            case ReceiveJob(Receive(attempt) as begin):
                self._begin(message, self._receivers)
                self._receivers.advance(attempt, begin)
            case ManifestMessage(Manifest(attempt) as manifest):
                is_asked = self._receivers.is_in(attempt, ReceiverPhase.ASKED)
                self._receivers.advance(attempt, manifest)
                if is_asked:
                    self._command(message)
            case PrefillProgress(attempt):
                if self._receivers.is_in(attempt, ReceiverPhase.ASKED):
                    self._command(message)
            case KeepAlive(attempts):
                for attempt in attempts:
                    self._sources.renew(attempt, SourcePhase.HELD)
                    self._receivers.renew(attempt, ReceiverPhase.ASKED)
            case PullRequest(attempt, pull, groups, names):
                # Pulls of chunks of an unfinished prompt are not part of the protocol.
                if names or self._sources.is_in(attempt, SourcePhase.RUNNING):
                    self._submit(partial(self._pack, sender, message))
                    return
                self._sources.advance(attempt, PartsRequest(attempt, message.parts), sender)
                export = self._exports.get(attempt)
                pages = None if export is None else export.outgoing_export.outgoing_pages(groups)
                self._send_pages(sender, attempt, pull, pages)
            case PullNotFound(_, pull):
                self._pulls.note_not_found(pull)
            case PeerAddresses(addresses):
                self._set_peers(addresses)
            case Shutdown():
                self.stop()
            case Cancel(attempt):
                self._sources.advance(attempt, message, sender)
                self._receivers.advance(attempt, message)
            case Lost(attempt):
                self._receivers.advance(attempt, message)
            case ManifestRequest(attempt):
                self._sources.advance(attempt, message, sender)
                if self._sources.is_in(attempt, SourcePhase.QUEUED, SourcePhase.RUNNING):
                    self._command(message)
            case Ack(attempt):
                self._sources.advance(attempt, message, sender)

    def _begin(self, message: ComputeJob | ReceiveJob, states: AttemptStates[Any]) -> None:
        """Starts an attempt at the engine, unless it is known."""
        attempt, job = message.message.attempt, message.job
        self._names[attempt] = job.described(attempt.number)
        if attempt not in states.by_attempt or states.is_in(attempt, SourcePhase.EXPECTED):
            self._engine_attempts.prepare(attempt, job)  # compiles the grammar outside the engine's steps
            self._command(message)

    def _on_extents(self, attempt: Attempt, number: int, is_whole: bool) -> None:
        """Handles the extents of a pull. Asks again for damaged ones of the protocol, which limits the tries."""
        asks_again = self._pulls.note_extents(attempt, number, is_whole)
        if asks_again and self._receivers.is_in(attempt, ReceiverPhase.PULLING):
            self._receivers.advance(attempt, Expired())

    def _on_notices(self, notices: list[Notice]) -> None:
        for each in notices:
            self._on_notice(each)

    def _on_notice(self, notice: Notice) -> None:
        match notice:
            case TokenSampled(token):
                self._advance(token.attempt, notice)
            case Pull():
                self._pulls.begin_beside(notice)
            case AdmittedNotice(attempt, pull):
                if (state := self._receivers.by_attempt.get(attempt)) is None or attempt in self._sources.by_attempt:
                    self._advance(attempt, Admitted())
                    return
                if pull is not None and state.phase is ReceiverPhase.QUEUED:
                    self._pulls.begin(attempt, pull)
                has = state.parts - (frozenset() if pull is None else pull.parts)
                self._receivers.advance(attempt, Admitted(has))
            case Ack(attempt):
                while self._receivers.is_in(attempt, ReceiverPhase.PULLING):
                    part = min(self._receivers.by_attempt[attempt].missing)
                    self._receivers.advance(attempt, CachePart(attempt, part))
            case ExportedCache(TokenSampled(token) as sampled):
                if self._sources.is_in(token.attempt, SourcePhase.RUNNING):
                    self._exports[token.attempt] = notice
                self._advance(token.attempt, sampled)
            case PrefillProgress(attempt):
                if self._sources.is_in(attempt, SourcePhase.RUNNING):
                    self.connections.send(self._sources.by_attempt[attempt].receiver, notice)
            case Failed(attempt):
                self._advance(attempt, notice)

    # ---- states ----------------------------------------------------------------------------------------------------

    def _advance(self, attempt: Attempt, event: Any) -> None:
        """Passes an event of the engine to an attempt of either role."""
        states: AttemptStates[Any] = self._sources if attempt in self._sources.by_attempt else self._receivers
        states.advance(attempt, event)

    def _on_source_expired(self, attempt: Attempt) -> None:
        log.info("%s: the deadline of its source is over", self._named(attempt))
        self._sources.advance(attempt, Expired())

    def _on_receiver_expired(self, attempt: Attempt) -> None:
        if self._receivers.is_in(attempt, ReceiverPhase.PULLING) and self._pulls.is_moving(attempt):
            self._receivers.wait(attempt)
            return
        log.info("%s: the deadline of its receiver is over", self._named(attempt))
        self._receivers.advance(attempt, Expired())

    def _on_ended(self, attempt: Attempt) -> None:
        self._pulls.end(attempt)
        self._command(Cancel(attempt))
        self.timers.after(REMEMBERED_SECONDS, partial(self._names.pop, attempt, None))
        self._exports.pop(attempt, None)

    def _named(self, attempt: Attempt) -> str:
        return self._names.get(attempt, f"request number {attempt.request}, attempt {attempt.number}")

    # ---- messages --------------------------------------------------------------------------------------------------

    def _command(self, command: Command) -> None:
        """Passes a message to the engine's attempts."""
        self._submit(partial(self._engine_attempts.run, command))

    def _send(self, sent: Envelope) -> None:
        to, message = sent
        attempt = message.attempt
        match message:
            case Manifest():
                try:
                    self.connections.send(to, ManifestMessage(message, self._exports[attempt].state))
                except WireError as error:
                    log.error("%s: its cache cannot be described: %s", self._named(attempt), error)
                    self._sources.advance(attempt, Failed(attempt, str(error)))
            case PartsRequest():
                if (pull := self._pulls.by_attempt.get(attempt)) is not None:
                    self._pulls.ask(pull)
            case CachePart():
                pass  # they were sent as extents: see `PullRequest`
            case _:
                self.connections.send(to, message)

    def _pack(self, to: str, wanted: PullRequest) -> None:
        """Sends the pages that the engine's attempts find. On the engine's thread."""
        self._send_pages(to, wanted.attempt, wanted.pull, self._engine_attempts.find_pages(wanted, self._release))

    def _send_pages(self, to: str, attempt: Attempt, pull: int, pages: OutgoingPages | None) -> None:
        if pages is None:
            self.connections.send(to, PullNotFound(attempt, pull))
        else:
            self.connections.send(to, PullExtents(attempt, pull), pages)

    def _release(self, pages: list[HeldPages]) -> None:
        self._submit(lambda: [each.release() for each in pages])  # type: ignore[func-returns-value]

    def _set_peers(self, addresses: dict[str, str]) -> None:
        others = {name: address for name, address in addresses.items() if name != self.name}
        for name in self._peers - others.keys():
            self.connections.forget(name)
            self._peer_store.forget(name)
        for name, address in others.items():
            self.connections.learn(name, address)
        self._peers = set(others)

    def _send_load(self, load: InstanceLoad) -> None:
        """Sends the load. Renews the deadlines of attempts that wait for their turn, here and at the other instance:
        the time in a queue is not limited, only the time without progress.
        """
        self.connections.send(ROUTER, load)
        by_peer: dict[str, list[Attempt]] = {}
        for attempt in load.at_work:
            self._sources.renew(attempt, SourcePhase.QUEUED)
            self._receivers.renew(attempt, ReceiverPhase.QUEUED)
            source, receiver = self._sources.by_attempt.get(attempt), self._receivers.by_attempt.get(attempt)
            if source is not None and source.is_asked and source.phase in (SourcePhase.QUEUED, SourcePhase.RUNNING):
                by_peer.setdefault(source.receiver, []).append(attempt)
            elif receiver is not None and receiver.phase in (ReceiverPhase.QUEUED, ReceiverPhase.PULLING):
                by_peer.setdefault(receiver.source, []).append(attempt)
        for other, attempts in by_peer.items():
            self.connections.send(other, KeepAlive(tuple(attempts)))


class Heartbeat:
    """Asks the engine's attempts for their load, and sends it regularly.

    name      name of the instance
    submit    runs a command on the engine's thread
    send      sends a load
    patience  maximum seconds of an engine's step
    stop      called when a step takes longer
    """

    def __init__(
        self,
        name: str,
        timers: Timers,
        submit: Callable[[Callable[[], object]], None],
        send: Callable[[InstanceLoad], None],
        patience: float,
        stop: Callable[[], None],
    ) -> None:
        self._name, self._timers, self._submit, self._send = name, timers, submit, send
        self._patience, self._stop = patience, stop
        self._num_loads = 0
        self._load: InstanceLoad | None = None
        self._asked_at: float | None = None  # time of the unanswered request for the load; None: none

    def beat(self, engine_attempts: EngineAttempts) -> None:
        """Sends the last load, requests the next one, and schedules the next heartbeat.

        While the engine's thread is in a long step, it sends the previous load without `at_work`. A step longer than
        `patience` ends the instance.
        """
        if self._load is not None:
            self._send(self._load if self._asked_at is None else replace(self._load, at_work=()))
        now = self._timers.clock()
        if self._asked_at is None:
            self._num_loads += 1
            self._asked_at = now
            self._submit(partial(self._read_load, engine_attempts, self._num_loads % STATS_EVERY == 1))
        elif now - self._asked_at > self._patience:
            log.error("the engine has not ended a step for %.0f s", self._patience)
            self._stop()
        self._timers.after(LOAD_SECONDS, partial(self.beat, engine_attempts))

    def _read_load(self, engine_attempts: EngineAttempts, with_stats: bool) -> None:
        """On the engine's thread."""
        self._load, self._asked_at = engine_attempts.load(self._name, with_stats=with_stats), None
