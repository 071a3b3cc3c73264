"""What an engine keeps and tells of the attempts that it is at, and what is left of those that end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cluster.bodies import CacheState, ComputeJob, KeepAlive, PrefillProgress, ReceiveJob
from quire.cluster.engine_attempts import EngineAttempt, EngineAttemptPhase, EngineAttempts, ExportedCache
from quire.cluster.messages import Attempt, Cancel, Compute, Failed, ManifestRequest, Receive, TokenSampled
from quire.cluster.peer_store import PeerStore
from quire.engine.request import SequenceState
from quire.stores.signer import ExtentSigner
from tests.cluster.test_agent import ATTEMPT, JOB, manifest, token

from ..engines import make_engine
from ..store_helpers import put_store
from ..tiny_models import tiny_shape

SEAL = ExtentSigner(bytes(32))

COMPUTE = ComputeJob(Compute(ATTEMPT, 0, "receiver"), JOB)

PLAN = ReceiveJob(Receive(ATTEMPT, "source", 0), JOB)

ALONE = ReceiveJob(Receive(ATTEMPT, "", 0), JOB)

OTHER_ALONE = ReceiveJob(Receive(Attempt(2, 1), "", 0), JOB)


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
