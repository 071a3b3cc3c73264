"""What agents, engines' attempts, routers and clusters do when messages are late, lost or damaged, and when something
ends earlier than expected. There are no processes, and time passes when a test says so.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cluster import supervisor
from quire.cluster.agent import Agent
from quire.cluster.attempt_states import deadlines_within
from quire.cluster.bodies import (
    CacheState,
    ComputeJob,
    InstanceLoad,
    InstanceReady,
    KeepAlive,
    LoadingHeartbeat,
    ManifestMessage,
    PeerAddresses,
    PrefillProgress,
    PullExtents,
    PullRequest,
    ReceiveJob,
    SequenceJob,
)
from quire.cluster.cluster import Cluster
from quire.cluster.engine_attempts import (
    AdmittedNotice,
    EngineAttempt,
    EngineAttemptPhase,
    EngineAttempts,
    ExportedCache,
)
from quire.cluster.instance import LaunchConfig
from quire.cluster.members import Health, Member
from quire.cluster.messages import (
    Attempt,
    Cancel,
    Compute,
    Failed,
    HandedOver,
    Manifest,
    ManifestRequest,
    Receive,
    Token,
    TokenSampled,
)
from quire.cluster.peer_store import Offer, PeerStore, Pull
from quire.cluster.processes import Processes
from quire.cluster.protocol import RequestPhase
from quire.cluster.router import RoutedRequest, Router
from quire.cluster.wire import WireError
from quire.config import ClusterConfig
from quire.engine.outputs import CompletionOutput
from quire.engine.params import SamplingParams
from quire.engine.request import SequenceState
from quire.errors import EngineStoppedError
from quire.stores.signer import ExtentSigner
from tests.clusters import LIMITS

from ..engines import make_engine
from ..store_helpers import put_store
from ..tiny_models import save_tiny, tiny_shape

ATTEMPT = Attempt(1, 1)
JOB = SequenceJob("r", list(range(3, 203)), {"max_tokens": 4, "ignore_eos": True}, {}, 7)
STATE: Any = None
SEAL = ExtentSigner(bytes(32))


def token(token_id: int, attempt: Attempt = ATTEMPT, position: int = 0, is_last: bool = False) -> Token:
    return Token(attempt, CompletionOutput(0, "", [token_id], None, None, None, None), position, is_last)


def exported(attempt: Attempt = ATTEMPT) -> ExportedCache:
    return ExportedCache(TokenSampled(token(5, attempt), frozenset({0})), STATE, STATE)


def manifest(source_token: Token) -> ManifestMessage:
    return ManifestMessage(Manifest(source_token.attempt, frozenset({0}), source_token), STATE)


COMPUTE = ComputeJob(Compute(ATTEMPT, 0, "receiver"), JOB)
PLAN = ReceiveJob(Receive(ATTEMPT, "source", 0), JOB)
ALONE = ReceiveJob(Receive(ATTEMPT, "", 0), JOB)
OTHER_ALONE = ReceiveJob(Receive(Attempt(2, 1), "", 0), JOB)


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


# ---- agents ----------------------------------------------------------------------------------------------------------


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


def test_damaged_extents_are_asked_for_again_at_once() -> None:
    wire, pulls = Wire(), Pulls()
    agent = agent_of(wire, pulls)
    pulling(agent, pull_of(3))
    pulls.is_whole = False
    agent.receive("source", PullExtents(ATTEMPT, 3), iter(()))
    run(agent)
    want = ("source", PullRequest(ATTEMPT, 3, [[0]]))
    assert [each for each in wire.sent if isinstance(each[1], PullRequest)] == [want] * 2


def test_a_source_that_sends_nothing_but_damage_is_given_up() -> None:
    wire, pulls = Wire(), Pulls()
    agent = agent_of(wire, pulls)
    pulling(agent, pull_of(3))
    pulls.is_whole = False
    for _ in range(5):
        agent.receive("source", PullExtents(ATTEMPT, 3), iter(()))
    run(agent)
    assert ("router", Failed(ATTEMPT, "the source does not answer")) in wire.sent


def test_a_pull_whose_source_still_sends_is_not_asked_for_again() -> None:
    """It would be sent twice, which makes those behind it later still."""
    now, wire, pulls = [0.0], Wire(), Pulls()
    agent = agent_of(wire, pulls, lambda: now[0])

    def wants() -> int:
        return sum(isinstance(message, PullRequest) for _, message in wire.sent)

    pulling(agent, pull_of(100))
    run(agent)
    for second in range(1, 40):
        now[0] = float(second)
        if second % 4 == 0 and second < 20:
            agent.receive("source", PullExtents(Attempt(9, 1), second), iter(()))  # of others that asked before
        run(agent)
        assert second >= 25 or wants() == 1
    assert wants() == 3 and ("router", Failed(ATTEMPT, "the source does not answer")) in wire.sent


@pytest.mark.parametrize("how", ["damaged", "lost", "late"])
def test_a_pull_beside_the_protocol_ends(how: str) -> None:
    """Its transfer holds room, and nobody else counts its tries."""
    now, pulls = [0.0], Pulls()
    agent = agent_of(Wire(), pulls, lambda: now[0])
    agent.notice([pull_of(4), pull_of(5, "another")])
    if how == "damaged":
        pulls.is_whole = False
        agent.receive("source", PullExtents(ATTEMPT, 4), iter(()))
    elif how == "lost":
        agent.connection_lost("source")
    run(agent)
    if how == "late":
        for second in (5, 12, 30):
            pulls.came = (2, second)  # one before them still comes
            now[0] = float(second)
            run(agent)
            assert pulls.failed == ([] if second < 10 else [5]), "the other source sends nothing"
        now[0] = 60.0
        run(agent)
    assert pulls.failed == ([5, 4] if how == "late" else [4])


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


# ---- engines' attempts -----------------------------------------------------------------------------------------------


def attempts_of(**options: Any) -> tuple[EngineAttempts, PeerStore, list[Any]]:
    peer_store, notices = PeerStore(SEAL), list[Any]()
    engine = put_store(make_engine(tiny_shape(head_dim=16), chunks=32, **options), peer_store)
    return EngineAttempts(engine, peer_store, SEAL, notices.extend, lambda call: call()), peer_store, notices


def test_an_attempt_that_cannot_be_adopted_leaves_nothing() -> None:
    """What was fetched ahead for it goes, too."""
    engine_attempts, peer_store, notices = attempts_of()
    engine_attempts.run(PLAN)
    engine_attempts.run(PrefillProgress(ATTEMPT, 3))
    assert engine_attempts.engine.scheduler.manager.fetching.prefetches and peer_store._offers
    wrong = CacheState(b"another", (0, 2), (0, 2), 3, 200, 3, 4, 256, 0, False, None, None)
    engine_attempts.run(replace(manifest(token(5)), cache=wrong))
    engine_attempts.has_stepped(engine_attempts.engine.step())
    (failed,) = [each for each in notices if isinstance(each, Failed)]
    assert "pages of another model" in failed.reason
    assert not engine_attempts.attempts and not engine_attempts._by_id
    assert (
        not engine_attempts.engine.scheduler.manager.fetching.prefetches
        and not peer_store._offers
        and not peer_store._by_name
    )
    engine_attempts.engine.check()
    assert engine_attempts.engine.stats()["cache"]["bytes_used"] == 0


def test_an_engine_says_which_attempts_it_is_at() -> None:
    """Not what waits for the other instance, nor what lacks room while nothing runs that could free it."""
    engine_attempts, _, notices = attempts_of()

    def at_work() -> tuple[Attempt, ...]:
        return engine_attempts.load("me", with_stats=False).at_work

    engine_attempts.run(COMPUTE)
    while not any(isinstance(each, ExportedCache) for each in notices):
        assert at_work() == (ATTEMPT,)
        engine_attempts.has_stepped(engine_attempts.engine.step())
    assert ATTEMPT in engine_attempts.attempts and at_work() == (), "it is held for its receiver"
    engine_attempts.end(ATTEMPT)
    engine_attempts.run(PLAN)
    assert at_work() == (), "it waits for its source"
    waiting: Any = SimpleNamespace(state=SequenceState.WAITING)
    engine_attempts.attempts[ATTEMPT] = EngineAttempt(ATTEMPT, JOB, EngineAttemptPhase.ADOPTED, waiting)
    assert at_work() == ()
    engine_attempts.run(OTHER_ALONE)
    engine_attempts.has_stepped(engine_attempts.engine.step())
    assert {*at_work()} >= {ATTEMPT}, "its turn comes when the other one has ended"
    del engine_attempts.attempts[ATTEMPT]
    engine_attempts.run(Cancel(Attempt(2, 1)))


def test_a_source_tells_its_receiver_of_each_chunk_once() -> None:
    engine_attempts, _, notices = attempts_of(**{"scheduler.token_budget": 72})
    engine_attempts.run(COMPUTE)
    engine_attempts.run(ManifestRequest(ATTEMPT))
    while not any(isinstance(each, ExportedCache) for each in notices):
        engine_attempts.has_stepped(engine_attempts.engine.step())
        engine_attempts.has_stepped([])  # a step that computes nothing of it
    assert [each.num_chunks for each in notices if isinstance(each, PrefillProgress)] == [1, 2]
    engine_attempts.end(ATTEMPT)


def test_chunks_that_are_fetched_ahead_are_no_leak() -> None:
    engine_attempts, _, _ = attempts_of()
    engine_attempts.run(PLAN)
    engine_attempts.run(PrefillProgress(ATTEMPT, 3))
    assert not engine_attempts.engine.has_work and engine_attempts.engine.holds_nothing
    engine_attempts.end(ATTEMPT)
    assert engine_attempts.engine.stats()["cache"]["bytes_used"] == 0


def test_chunks_that_are_sent_after_their_attempt_has_ended_are_no_leak() -> None:
    """A client may go while its cache is copied: an engine without requests then waits for the link."""
    engine_attempts, _, _ = attempts_of()
    engine_attempts.run(COMPUTE)
    while not engine_attempts.engine.exports:
        engine_attempts.has_stepped(engine_attempts.engine.step())
    outgoing_export = engine_attempts.attempts[ATTEMPT].outgoing_export
    assert outgoing_export is not None
    outgoing_pages = outgoing_export.outgoing_pages([[0, 1, 2], [3]])
    assert outgoing_pages is not None
    engine_attempts.end(ATTEMPT)
    assert (
        not engine_attempts.engine.has_work and engine_attempts.engine.holds_nothing and engine_attempts.engine.exports
    )
    assert outgoing_export.outgoing_pages([[0]]) is None, "it has ended"
    assert sum(len(extent) for extent in outgoing_pages.pack()) > 0
    outgoing_pages.done()
    assert not engine_attempts.engine.exports
    engine_attempts.engine.check()
    assert engine_attempts.engine.stats()["cache"]["bytes_used"] == 0


def test_a_message_that_is_no_command_is_refused() -> None:
    engine_attempts, _, _ = attempts_of()
    no_command: Any = KeepAlive((ATTEMPT,))
    with pytest.raises(TypeError, match="KeepAlive is no command of an engine"):
        engine_attempts.run(no_command)


def test_two_requests_may_have_one_name() -> None:
    engine_attempts, _, notices = attempts_of()
    engine_attempts.run(ALONE)
    engine_attempts.run(OTHER_ALONE)
    while engine_attempts.engine.has_work:
        engine_attempts.has_stepped(engine_attempts.engine.step())
    tokens = [each for each in notices if isinstance(each, TokenSampled)]
    assert len(tokens) == 8 and sum(each.token.is_last for each in tokens) == 2


# ---- the router ------------------------------------------------------------------------------------------------------


def router_of(tries: int = 3) -> tuple[Router, list[tuple[str, Any]], list[float]]:
    sent, now = list[tuple[str, Any]](), [0.0]
    router = Router(lambda to, message: sent.append((to, message)), timeout=10, tries=tries, clock=lambda: now[0])
    for name, role in (("p.1", "prefill"), ("d.2", "decode")):
        ready = InstanceReady(name, "", 64, 8, LIMITS, 1e-3, 1e-3)
        router.members[name] = Member(name, name[0], role, Health.SERVING, ready)
    return router, sent, now


def begun(router: Router) -> tuple[RoutedRequest, list[Any]]:
    answers: list[Any] = []
    return router.begin(JOB, answers.append), answers


def test_tokens_of_an_attempt_that_has_failed_are_not_those_of_the_next_one() -> None:
    async def scenario() -> None:
        router, _, _ = router_of()
        request, answers = begun(router)
        router.handle(token(5))
        router.handle(Failed(Attempt(1, 1), "no room"))
        router.handle(token(66, position=1))  # late, or of an instance that is mistaken
        await asyncio.sleep(0)
        assert request.state.number == 2
        router.handle(token(6, Attempt(1, 2), 1))
        assert [each.output.token_ids for each in answers] == [[5], [6]]
        assert not request.state.early

    asyncio.run(scenario())


def test_a_token_that_came_already_is_not_kept() -> None:
    router, _, _ = router_of()
    request, answers = begun(router)
    for _ in range(2):
        router.handle(token(5))
    router.handle(HandedOver(ATTEMPT))
    assert len(answers) == 1 and not request.state.early


def test_an_instance_has_a_part_in_an_attempt_until_its_cache_is_taken() -> None:
    """So that a drained source does not end before its receivers have what it holds."""
    router, _, _ = router_of()
    begun(router)
    assert router.num_attempts("p.1") == router.num_attempts("d.2") == 1
    router.handle(token(5))
    assert router.num_attempts("p.1") == 1
    router.handle(HandedOver(ATTEMPT))
    assert router.num_attempts("p.1") == 0 and router.num_attempts("d.2") == 1


def test_an_attempt_that_waits_for_its_turn_is_not_given_up() -> None:
    router, _, now = router_of(tries=1)
    requests = [begun(router)[0] for _ in range(2)]
    waits = requests[0].state.attempt
    for second in range(100):
        now[0] = float(second)
        router.handle_load(InstanceLoad("p.1", 0, 0, 0, 0, 1, 1, (waits, Attempt(1, 7), Attempt(99, 1))))
        router.tick()
    assert requests[0].state.phase is RequestPhase.RUNNING and requests[1].state.phase is RequestPhase.FAILED


def test_a_token_behind_one_that_is_lost_renews_nothing() -> None:
    router, _, now = router_of(tries=1)
    request, answers = begun(router)
    for second in range(30):
        now[0] = float(second)
        router.handle(token(5, position=second + 1))
        router.tick()
    assert request.state.phase is RequestPhase.FAILED and len(answers) == 1


@pytest.mark.parametrize("health", [Health.DRAINING, Health.STARTING])
def test_requests_wait_for_the_only_instance_that_is_restarted(health: Health) -> None:
    router, _, now = router_of()
    for name in list(router.members):
        router.members[name].health = health
    request, _ = begun(router)
    for second in range(100):
        now[0] = float(second)
        router.tick()
    assert request.state.phase is RequestPhase.QUEUED
    router.members.clear()
    now[0] = 200.0
    router.tick()
    assert request.state.phase is RequestPhase.FAILED, "nobody comes"


def test_counters_of_instances_that_are_gone_stay() -> None:
    router, _, _ = router_of()
    router.members["p.1"].stats = {"decode_tokens": 7, "running": 3}
    router.down("p.1")
    assert router.past_counters["decode_tokens"] == 7 and "running" not in router.past_counters


def test_members_forget_attempts_that_have_ended() -> None:
    async def scenario() -> None:
        router, _, _ = router_of(tries=4)
        requests = [begun(router)[0] for _ in range(6)]
        router.handle(Failed(requests[0].state.attempt, "no room"))
        router.handle(token(5, requests[1].state.attempt, is_last=True))
        await asyncio.sleep(0)
        for request in requests:
            router.abort(request)
        for member in router.members.values():
            assert not member.rows and not member.sequences
        assert not router._requests

    asyncio.run(scenario())


def test_a_prompt_counts_among_the_rows_of_its_instance_until_its_first_token() -> None:
    router, _, _ = router_of()
    request, _ = begun(router)
    member = router.members["p.1"]
    assert member.num_rows == len(JOB.prompt_ids)
    router.handle(token(5, request.state.attempt))
    assert not request.is_over and not member.rows and member.num_rows == 0


def test_only_who_computes_a_prompt_pins_it() -> None:
    router, sent, _ = router_of()
    router.begin(replace(JOB, hints={"cache_pin": {"tier": "arena"}, "cache_priority": 3}), lambda answer: None)
    hints = {to: message.job.cache_hints() for to, message in sent}
    assert [*hints] == ["p.1", "d.2"] and hints["p.1"].cache_pin and not hints["d.2"].cache_pin
    assert {each.cache_priority for each in hints.values()} == {3}


def test_instances_with_which_an_attempt_failed_come_last() -> None:
    """A connection between two instances may be broken while both say that they are alive."""

    async def scenario() -> None:
        router, _, _ = router_of(tries=3)
        for name, role in (("p.3", "prefill"), ("d.4", "decode")):
            ready = InstanceReady(name, "", 64, 8, LIMITS, 1e-3, 1e-3)
            router.members[name] = Member(name, name[0], role, Health.SERVING, ready)
        request, _ = begun(router)
        tried = [(request.state.source, request.state.receiver)]
        for number in (1, 2):
            router.handle(Failed(Attempt(1, number), "the source does not answer"))
            await asyncio.sleep(0)
            tried.append((request.state.source, request.state.receiver))
        assert {*tried[:2]} == {("p.1", "d.2"), ("p.3", "d.4")}
        assert tried[2][0] == "" and tried[2][1] not in tried[1], "the last attempt needs one instance"

    asyncio.run(scenario())


def test_a_source_whose_receiver_has_ended_computes_again() -> None:
    """It has the prompt in its cache."""

    async def scenario() -> None:
        router, _, _ = router_of()
        for name, role in (("p.3", "prefill"), ("d.4", "decode")):
            ready = InstanceReady(name, "", 64, 8, LIMITS, 1e-3, 1e-3)
            router.members[name] = Member(name, name[0], role, Health.SERVING, ready)
        request, _ = begun(router)
        source, receiver = request.state.source, request.state.receiver
        router.down(receiver)
        await asyncio.sleep(0)
        assert request.state.number == 2 and request.state.source == source and request.state.receiver != receiver

    asyncio.run(scenario())


# ---- the cluster -----------------------------------------------------------------------------------------------------


class Nobody(Processes):
    """Starts nothing. The first `refused` starts fail."""

    def __init__(self, refused: int = 0) -> None:
        super().__init__()
        self.started: list[LaunchConfig] = []
        self.killed: list[str] = []
        self.gone: list[str] = []
        self._refused = refused

    def start(self, launch_config: LaunchConfig) -> None:
        self.started.append(launch_config)
        if len(self.started) <= self._refused:
            raise OSError("no more processes")

    def kill(self, name: str) -> None:
        self.killed.append(name)

    def ended(self) -> list[str]:
        return self.gone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LEAST_PAUSE", 0.01)


def idle_cluster(model: Path, processes: Processes, **settings: Any) -> Cluster:
    options = {"model.dtype": "float32", "runtime.device": "cpu", "cache.memory": "4MiB"}
    config = ClusterConfig(**({"mixed": 1} | settings))
    return Cluster(str(model), options, settings=config, processes=processes)


async def started(cluster: Cluster) -> asyncio.Task[None]:
    """Begins to start a cluster, and says for its instances that they are ready."""
    task = asyncio.create_task(cluster.start())
    while not cluster.router.members:
        await asyncio.sleep(0)
    for name in cluster.router.members:
        ready(cluster, name)
    await task
    return task


def ready(cluster: Cluster, name: str) -> None:
    cluster.supervisor._handle(name, InstanceReady(name, "shm://nowhere", 64, 8, LIMITS, 1e-3, 1e-3))


def alive(cluster: Cluster, name: str) -> None:
    cluster.supervisor._handle(name, InstanceLoad(name, 0, 0, 0, 0, 1, 1))


@pytest.mark.slow
def test_an_instance_that_cannot_be_started_again_is_tried_again(model: Path, short: None) -> None:
    async def scenario() -> None:
        processes = Nobody()
        cluster = idle_cluster(model, processes)
        await started(cluster)
        processes._refused = 3
        processes.gone = ["mixed-0.1"]
        async with asyncio.timeout(5):
            while len(processes.started) < 4:
                await asyncio.sleep(0.01)
        assert [each.name for each in processes.started] == [f"mixed-0.{number}" for number in (1, 2, 3, 4)]
        processes.gone = []
        await cluster.close()

    asyncio.run(scenario())


def test_an_instance_that_has_served_again_is_restarted_as_soon_as_ever(model: Path) -> None:
    """One that fails before it serves waits longer each time."""

    async def scenario() -> None:
        cluster, pauses = idle_cluster(model, Nobody()), list[float]()
        await started(cluster)

        def call_later(pause: float, call: Callable[[], None]) -> None:
            pauses.append(pause / supervisor.LEAST_PAUSE)
            call()

        cluster.supervisor._loop = SimpleNamespace(call_later=call_later)  # type: ignore[assignment]
        for number in range(1, 5):
            if number == 4:
                ready(cluster, "mixed-0.4")
            cluster.supervisor._on_connection_lost(f"mixed-0.{number}")
        assert pauses == [1, 2, 4, 1]
        await cluster.close()

    asyncio.run(scenario())


def test_a_router_that_was_stopped_does_not_end_its_instances(model: Path) -> None:
    """What they said meanwhile is still on its way."""

    async def scenario() -> None:
        processes = Nobody()
        cluster = idle_cluster(model, processes, heartbeat=0.5)
        await started(cluster)
        alive(cluster, "mixed-0.1")
        loop = asyncio.get_running_loop()
        clock = supervisor.time.monotonic
        skipped = [0.0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: clock() + skipped[0]))
            await asyncio.sleep(0.15)
            skipped[0] = 20.0
            await asyncio.sleep(0.25)
            assert not processes.killed and "mixed-0.1" in cluster.router.members
            end = loop.time() + 5
            while not processes.killed and loop.time() < end:
                await asyncio.sleep(0.05)
        assert processes.killed[:1] == ["mixed-0.1"], "it gives no sign of life, and the router hears"
        await cluster.close()

    asyncio.run(scenario())


def test_an_instance_that_stops_while_it_loads_is_started_again(
    model: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        processes = Nobody()
        cluster = idle_cluster(model, processes, heartbeat=0.5)
        await started(cluster)
        processes.gone = ["mixed-0.1"]
        async with asyncio.timeout(5):
            while len(processes.started) < 2:
                await asyncio.sleep(0.01)
            processes.gone = []
            cluster.supervisor._handle("mixed-0.2", LoadingHeartbeat("mixed-0.2"))
            while "mixed-0.2" not in processes.killed:
                await asyncio.sleep(0.01)
        await cluster.close()

    monkeypatch.setattr(supervisor, "LOADING_SECONDS", 0.5)
    asyncio.run(scenario())


def test_clients_do_not_wait_for_a_cluster_that_is_closed(model: Path) -> None:
    async def scenario() -> None:
        cluster = idle_cluster(model, Nobody())
        await started(cluster)

        async def client() -> None:
            async for _ in cluster.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4)):
                pass

        waiting = asyncio.create_task(client())
        await asyncio.sleep(0.01)
        await cluster.close()
        with pytest.raises(EngineStoppedError):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(scenario())


def test_a_process_that_was_ended_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anybody wait while the system frees its memory."""

    async def scenario() -> None:
        processes = Processes()
        processes.start(LaunchConfig("a.1", "", "", "", {}))
        pid = processes.pid("a.1")
        processes.kill("a.1")
        assert processes.ended() == [] and processes.pid("a.1") is None
        await processes.wait(5.0)
        assert not Path(f"/proc/{pid}").exists(), "a zombie"

    asyncio.run(scenario())
