"""What agents do when messages are late, lost or damaged, and when something ends earlier than expected. There are no
processes, and time passes when a test says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cluster.agent import Agent
from quire.cluster.attempt_states import deadlines_within
from quire.cluster.bodies import (
    ComputeJob,
    InstanceLoad,
    KeepAlive,
    ManifestMessage,
    PeerAddresses,
    ReceiveJob,
    SequenceJob,
)
from quire.cluster.engine_attempts import AdmittedNotice, ExportedCache
from quire.cluster.messages import (
    Attempt,
    Cancel,
    Compute,
    Failed,
    Manifest,
    ManifestRequest,
    Receive,
    Token,
    TokenSampled,
)
from quire.cluster.peer_store import Offer, Pull
from quire.cluster.wire import WireError
from quire.engine.outputs import CompletionOutput

ATTEMPT = Attempt(1, 1)
JOB = SequenceJob("r", list(range(3, 203)), {"max_tokens": 4, "ignore_eos": True}, {}, 7)
STATE: Any = None


def token(token_id: int, attempt: Attempt = ATTEMPT, position: int = 0, is_last: bool = False) -> Token:
    return Token(attempt, CompletionOutput(0, "", [token_id], None, None, None, None), position, is_last)


def exported(attempt: Attempt = ATTEMPT) -> ExportedCache:
    return ExportedCache(TokenSampled(token(5, attempt), frozenset({0})), STATE, STATE)


def manifest(source_token: Token) -> ManifestMessage:
    return ManifestMessage(Manifest(source_token.attempt, frozenset({0}), source_token), STATE)


class Wire:
    """Connections that note what they carry."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.known: dict[str, str] = {}

    def send(self, to: str, message: Any, bulk: Any = None) -> bool:
        if not isinstance(message, InstanceLoad):
            self.sent.append((to, message))
        return True

    def learn(self, name: str, address: str) -> None:
        self.known[name] = address

    def forget(self, name: str) -> None:
        del self.known[name]


class Pulls:
    """A peer store whose extents are whole or not, as `is_whole` says."""

    def __init__(self) -> None:
        self.is_whole = True
        self.failed: list[int] = []
        self.came: tuple[int, int] = (0, 0)

    def arrive(self, number: int, extents: Iterator[memoryview]) -> bool:
        self.came = (number, self.came[1] + 1000)
        return self.is_whole

    def received(self, source: str) -> tuple[int, int]:
        return self.came if source == "source" else (0, 0)

    def forget(self, source: str) -> None:
        pass

    def fail(self, number: int, reason: str) -> None:
        self.failed.append(number)


class Idle(SimpleNamespace):
    """Does nothing, whatever it is told."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **more: None


def agent_of(wire: Wire, pulls: Pulls, clock: Any = lambda: 0.0) -> Agent:
    return Agent("me", wire, pulls, lambda command: command(), deadlines_within(60.0), clock)  # type: ignore[arg-type]


def run(agent: Agent) -> Agent:
    """Lets an agent take all that it was told, look at its timers, and stop."""
    agent.notice([])
    agent.stop()
    agent.run(Idle())  # type: ignore[arg-type]
    return agent


def pull_of(number: int, source: str = "source") -> Pull:
    return Pull(number, Offer(ATTEMPT, source, STATE), [[0]], STATE, [])


def pulling(agent: Agent, pull: Pull) -> None:
    """Makes it a receiver that waits for a pull."""
    agent.receive("router", ReceiveJob(Receive(ATTEMPT, "source", 0), JOB), iter(()))
    agent.receive("source", manifest(token(5)), iter(()))
    agent.notice([AdmittedNotice(ATTEMPT, pull)])


def test_what_arrives_after_the_end_is_not_kept() -> None:
    """An engine may have sampled, or admitted, before it heard that the attempt is over."""
    agent = agent_of(Wire(), Pulls())
    agent.receive("router", ComputeJob(Compute(ATTEMPT, 0, "receiver"), JOB), iter(()))
    agent.receive("router", Cancel(ATTEMPT), iter(()))
    agent.notice([AdmittedNotice(ATTEMPT), exported()])
    other = Attempt(2, 1)
    agent.receive("router", ReceiveJob(Receive(other, "source", 0), JOB), iter(()))
    agent.receive("router", Cancel(other), iter(()))
    agent.notice([AdmittedNotice(other, pull_of(3))])
    run(agent)
    assert not agent._exports and not agent._pulls.by_attempt
    assert not agent._sources._due and not agent._receivers._due


def test_nothing_is_left_of_an_attempt_after_a_while() -> None:
    now = [0.0]
    agent = agent_of(Wire(), Pulls(), lambda: now[0])
    for number in range(20):
        attempt = Attempt(number, 1)
        agent.receive("router", ComputeJob(Compute(attempt, 0, "receiver"), JOB), iter(()))
        agent.notice([AdmittedNotice(attempt), exported(attempt)])
        agent.receive("router", Cancel(attempt), iter(()))
    run(agent)
    now[0] = 1000.0
    run(agent)
    for each in (
        agent._sources.by_attempt,
        agent._receivers.by_attempt,
        agent._pulls.by_attempt,
        agent._pulls._progress,
        agent._sources._due,
        agent._receivers._due,
        agent._names,
        agent._exports,
    ):
        assert not each
    assert len(agent.timers._calls) < 10


def test_what_is_waited_for_ends_with_its_attempt() -> None:
    """Also while the engine's thread stands still: its step may wait for a layer of the pull."""
    pulls, stuck = Pulls(), list[Any]()
    agent = Agent("me", Wire(), pulls, stuck.append, deadlines_within(60.0), lambda: 0.0)  # type: ignore[arg-type]
    pulling(agent, pull_of(3))
    agent.notice([pull_of(4)])
    agent.receive("router", Cancel(ATTEMPT), iter(()))
    run(agent)
    assert {*pulls.failed} == {3, 4}


def test_a_cache_that_cannot_be_described_ends_its_attempt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, send = Wire(), Wire.send

    def refuses(self: Wire, to: str, message: Any, bulk: Any = None) -> bool:
        if isinstance(message, ManifestMessage):
            raise WireError("a message of 99 bytes; 9 are possible")
        return send(self, to, message, bulk)

    monkeypatch.setattr(Wire, "send", refuses)
    agent = agent_of(wire, Pulls())
    agent.receive("router", ComputeJob(Compute(ATTEMPT, 0, "receiver"), JOB), iter(()))
    agent.receive("receiver", ManifestRequest(ATTEMPT), iter(()))
    agent.notice([AdmittedNotice(ATTEMPT), exported()])
    run(agent)
    failed = Failed(ATTEMPT, "a message of 99 bytes; 9 are possible")
    assert ("router", failed) in wire.sent and not agent._exports


class Reporting(Idle):
    """An engine that says which attempts it is at."""

    at_work: tuple[Attempt, ...] = ()

    def load(self, instance: str, *, with_stats: bool) -> InstanceLoad:
        return InstanceLoad(instance, 0, 0, 0, 0, 1, 1, self.at_work)


def passes(agent: Agent, now: list[float], seconds: float) -> None:
    """Has time pass, in small steps, once the agent runs."""

    def step() -> None:
        now[0] += 0.25

    for _ in range(int(seconds / 0.25)):
        agent._inbox.put(step)


@pytest.mark.parametrize("phase", ["queued", "asked", "held", "waiting"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_waiting_for_a_turn_ends_only_if_nothing_goes_on(phase: str, goes_on: bool) -> None:
    """Queues may be longer than the deadlines of the states, at the source and at the receiver."""
    now, wire, engine_attempts = [0.0], Wire(), Reporting()
    agent = agent_of(wire, Pulls(), lambda: now[0])
    if phase in ("queued", "held"):
        agent.receive("router", ComputeJob(Compute(ATTEMPT, 0, "other"), JOB), iter(()))
        if phase == "held":
            agent.notice([AdmittedNotice(ATTEMPT), exported()])
    else:
        agent.receive("router", ReceiveJob(Receive(ATTEMPT, "other", 0), JOB), iter(()))
        if phase == "waiting":
            agent.receive("other", manifest(token(5)), iter(()))
    engine_attempts.at_work = (ATTEMPT,) if goes_on and phase in ("queued", "waiting") else ()
    for _ in range(40):
        if goes_on and phase in ("asked", "held"):
            agent.receive("other", KeepAlive((ATTEMPT,)), iter(()))
        passes(agent, now, 5)
    agent.stop()
    agent.run(engine_attempts)  # type: ignore[arg-type]
    state = agent._sources.by_attempt.get(ATTEMPT) or agent._receivers.by_attempt.get(ATTEMPT)
    assert (state is not None and state.phase.value != "ended") is goes_on
    goes = [to for to, message in wire.sent if message == KeepAlive((ATTEMPT,))]
    assert bool(goes) is (goes_on and phase == "waiting"), "a receiver that waits for room holds its source's pages"


def test_a_source_tells_who_waits_for_it_that_it_goes_on() -> None:
    now, wire, engine_attempts = [0.0], Wire(), Reporting()
    agent = agent_of(wire, Pulls(), lambda: now[0])
    asked, other = ATTEMPT, Attempt(2, 1)
    for attempt in (asked, other):
        agent.receive("router", ComputeJob(Compute(attempt, 0, "receiver"), JOB), iter(()))
    agent.receive("receiver", ManifestRequest(asked), iter(()))
    engine_attempts.at_work = (asked, other)
    passes(agent, now, 5)
    agent.stop()
    agent.run(engine_attempts)  # type: ignore[arg-type]
    assert {message for _, message in wire.sent} == {KeepAlive((asked,))}
    assert {to for to, _ in wire.sent} == {"receiver"}


def test_who_is_gone_is_forgotten() -> None:
    wire = Wire()
    agent = agent_of(wire, Pulls())
    agent.receive("router", PeerAddresses({"me": "a", "old.1": "b", "other.2": "c"}), iter(()))
    agent.receive("router", PeerAddresses({"me": "a", "other.2": "c", "old.3": "d"}), iter(()))
    run(agent)
    assert wire.known == {"other.2": "c", "old.3": "d"}


def test_an_attempt_that_was_ended_before_it_came_does_not_begin() -> None:
    commands: list[Any] = []
    agent = agent_of(Wire(), Pulls())
    agent.receive("router", Cancel(ATTEMPT), iter(()))
    agent.receive("router", ComputeJob(Compute(ATTEMPT, 0, "receiver"), JOB), iter(()))
    agent.receive("router", ReceiveJob(Receive(ATTEMPT, "source", 0), JOB), iter(()))
    agent.stop()
    agent.run(Idle(run=commands.append))  # type: ignore[arg-type]
    assert {*map(type, commands)} == {Cancel}


def test_an_engine_that_stands_still_ends_its_instance() -> None:
    """Its agent would go on to say that it is alive, and its short queue would attract requests."""
    now, wire = [0.0], Wire()
    stuck: list[Any] = []
    agent = Agent("me", wire, Pulls(), stuck.append, deadlines_within(5.0), lambda: now[0])  # type: ignore[arg-type]
    thread = threading.Thread(target=agent.run, args=(Idle(),), daemon=True)
    thread.start()
    for _ in range(80):
        now[0] += 1.0
        agent.notice([])
        thread.join(0.002)
    thread.join(5.0)
    assert not thread.is_alive() and len(stuck) == 1
