"""The protocol of a hand-over: complete state spaces, planted defects, and the tables of the page of the design."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.cluster import protocol
from quire.cluster.messages import (
    CLIENT,
    ROUTER,
    Abort,
    Ack,
    Admitted,
    Attempt,
    Begin,
    CachePart,
    Cancel,
    Compute,
    Envelope,
    Expired,
    Failed,
    HandedOver,
    InstanceDown,
    Lost,
    Manifest,
    ManifestRequest,
    PartsRequest,
    Receive,
    Token,
    TokenSampled,
)
from quire.cluster.protocol import ReceiverPhase, ReceiverState, RequestPhase, RequestState, SourcePhase, SourceState
from tests.effort import full_only
from tests.protocol_checker import Budget, ModelChecker, Violation, changed
from tests.protocol_table import NO_TEXT, tables

ROOT = Path(__file__).parents[2]
FIRST = Attempt(0, 1)
TOKEN = Token(FIRST, NO_TEXT)


def explore(budget: Budget, **more: Any) -> ModelChecker:
    explorer = ModelChecker(budget=budget, **more)
    assert explorer.explore(), "there are more states than that"
    return explorer


# Complete state spaces.


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_without_faults_every_request_is_answered_once(tokens: int) -> None:
    """An answer of one token is never handed over."""
    assert explore(Budget(0, 0, 0, 0, 0), tokens=tokens, parts=2).outcomes == {(("ended", tokens),)}


@pytest.mark.parametrize(
    "budget",
    [Budget(1, 0, 0, 0, 0), Budget(0, 1, 1, 0, 0), Budget(0, 0, 0, 1, 0), Budget(0, 1, 0, 0, 1)],
    ids=["a crash", "a loss and a repeat", "an early deadline", "a loss and a client that leaves"],
)
@pytest.mark.parametrize("alone", [False, True], ids=["again with a source", "again alone"])
def test_one_request_survives(budget: Budget, alone: bool) -> None:
    explore(budget, requests=1, parts=2, tries=2, alone=alone)


@pytest.mark.parametrize("budget", [Budget(0, 0, 0, 0, 0), Budget(0, 0, 1, 0, 0)], ids=["nothing", "a repeat"])
def test_two_requests_share_the_room_of_their_instances(budget: Budget) -> None:
    explore(budget, requests=2, has=1)


@pytest.mark.parametrize(
    ("requests", "tokens", "budget"),
    [(1, 2, Budget(1, 0, 0, 0, 0)), (1, 2, Budget(0, 1, 1, 0, 0)), (2, 1, Budget(0, 0, 1, 0, 0))],
    ids=["a crash", "a loss and a repeat", "two requests and a repeat"],
)
def test_equivalent_states_that_are_visited_once_hide_no_outcome(requests: int, tokens: int, budget: Budget) -> None:
    found = [explore(budget, requests=requests, tokens=tokens, merges=merges) for merges in (True, False)]
    assert found[0].outcomes == found[1].outcomes and found[0].num_states < found[1].num_states


def test_two_requests_survive_a_crash_together() -> None:
    """With memory for one of them, only one can have got so far that it tries again before the router hears of it."""
    outcomes = explore(Budget(1, 0, 0, 0, 0), requests=2).outcomes
    assert (("ended", 2), ("ended", 2)) in outcomes
    assert all(("ended", 2) in each for each in outcomes), outcomes


def test_merging_hides_no_outcome_of_a_wrong_protocol() -> None:
    """What is dropped because it changes nothing is asked of the code that is explored."""
    code = changed(advance_request=router_ignores_the_attempt)
    found = [explore(EARLY, code=code, merges=merges).outcomes for merges in (True, False)]
    assert found[0] == found[1] != explore(EARLY).outcomes


@full_only("up to a million states take minutes")
@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "budget"),
    [(1, Budget(1, 1, 0, 1, 0)), (2, Budget(1, 1, 1, 0, 0)), (3, Budget(1, 0, 0, 0, 0)), (3, Budget(0, 1, 1, 0, 0))],
)
def test_larger_state_spaces(requests: int, budget: Budget) -> None:
    explore(budget, requests=requests)


# Planted defects: each must be found in a small system.


def source_frees_when_all_is_sent(state: Any, sender: str, event: Any) -> Any:
    """Before it knows that anything has arrived."""
    after, sent = protocol.advance_source(state, sender, event)
    if any(isinstance(each.message, CachePart) for each in sent):
        return SourceState(after.attempt, SourcePhase.ENDED), sent
    return after, sent


def source_serves_what_it_has_freed(state: Any, sender: str, event: Any) -> Any:
    if state is not None and state.phase is SourcePhase.ENDED and isinstance(event, PartsRequest):
        return state, [Envelope(sender, CachePart(event.attempt, part)) for part in sorted(event.parts)]
    if state is not None and state.phase is SourcePhase.HELD and isinstance(event, PartsRequest):
        after, sent = protocol.advance_source(state, sender, event)
        return SourceState(after.attempt, SourcePhase.ENDED), sent
    return protocol.advance_source(state, sender, event)


def source_has_no_lease(state: Any, sender: str, event: Any) -> Any:
    if isinstance(event, Expired) and state.phase is SourcePhase.HELD:
        return state, []
    return protocol.advance_source(state, sender, event)


def source_sends_what_is_not_computed(state: Any, sender: str, event: Any) -> Any:
    """And says before that it is."""
    after, sent = protocol.advance_source(state, sender, event)
    if isinstance(event, ManifestRequest) and after is not None and after.phase is SourcePhase.RUNNING:
        return after, [Envelope(sender, Manifest(event.attempt, frozenset({0, 1}), Token(event.attempt, NO_TEXT)))]
    if isinstance(event, PartsRequest) and after is not None and after.phase is SourcePhase.RUNNING:
        return after, [Envelope(sender, CachePart(event.attempt, part)) for part in sorted(event.parts)]
    return after, sent


def source_answers_one_wish(state: Any, sender: str, event: Any) -> Any:
    if isinstance(event, PartsRequest) and state is not None and state.phase is SourcePhase.HELD:
        if not state.is_asked:
            return state, []
        _, sent = protocol.advance_source(state, sender, event)
        return replace(state, is_asked=False), sent
    return protocol.advance_source(state, sender, event)


def receiver_starts_without_a_part(state: Any, event: Any) -> Any:
    if isinstance(event, CachePart) and state is not None and state.phase is ReceiverPhase.PULLING:
        return protocol.advance_receiver(replace(state, missing=frozenset({event.part})), event)
    return protocol.advance_receiver(state, event)


def receiver_starts_when_it_has_room(state: Any, event: Any) -> Any:
    if isinstance(event, Admitted) and state.phase is ReceiverPhase.QUEUED:
        return protocol.advance_receiver(state, Admitted(state.parts))
    return protocol.advance_receiver(state, event)


def receiver_takes_room_before_the_source_has_begun(state: Any, event: Any) -> Any:
    """The order that the first draft had: two requests wait for each other's room until a deadline."""
    if state is None and isinstance(event, Receive):
        return ReceiverState(event.attempt, ReceiverPhase.QUEUED, event.source), []
    if isinstance(event, Admitted) and state.phase is ReceiverPhase.QUEUED and not state.parts:
        asked = replace(state, phase=ReceiverPhase.PULLING, missing=frozenset({-1}))
        return asked, [Envelope(state.source, ManifestRequest(state.attempt))]
    if isinstance(event, Manifest) and state is not None and state.missing == frozenset({-1}):
        num_tokens = event.token.position + 1
        pulling = replace(state, parts=event.parts, missing=event.parts, num_tokens=num_tokens, token=event.token)
        return pulling, [Envelope(state.source, PartsRequest(state.attempt, event.parts))]
    return protocol.advance_receiver(state, event)


def receiver_never_asks_again(state: Any, event: Any) -> Any:
    if isinstance(event, Expired):
        return state, []
    return protocol.advance_receiver(state, event)


def receiver_keeps_what_was_cancelled(state: Any, event: Any) -> Any:
    if isinstance(event, Cancel) and state is not None and state.phase is not ReceiverPhase.RUNNING:
        return replace(state, tries=0), []
    if isinstance(event, Expired) and not state.tries:
        return state, []
    return protocol.advance_receiver(state, event)


def router_passes_on_what_comes(state: Any, event: Any) -> Any:
    after, sent = protocol.advance_request(state, event)
    if isinstance(event, Token) and not sent and state.phase is RequestPhase.RUNNING:
        return after, [Envelope("client", event)]
    return after, sent


def router_does_not_hear_of_crashes(state: Any, event: Any) -> Any:
    if isinstance(event, InstanceDown | Expired):
        return state, []
    return protocol.advance_request(state, event)


def router_gives_up_at_once(state: Any, event: Any) -> Any:
    after, sent = protocol.advance_request(state, event)
    if after.phase is RequestPhase.QUEUED and state.phase is RequestPhase.RUNNING:
        return replace(after, phase=RequestPhase.FAILED), [*sent, Envelope("client", Failed(state.attempt, "gave up"))]
    return after, sent


def router_begins_again_from_the_start(state: Any, event: Any) -> Any:
    return protocol.advance_request(replace(state, delivered=0) if isinstance(event, Begin) else state, event)


def receiver_goes_on_after_its_end(state: Any, event: Any) -> Any:
    """A part that comes late revives what was cancelled."""
    if isinstance(event, CachePart) and state is not None and state.phase is ReceiverPhase.ENDED:
        return replace(state, phase=ReceiverPhase.RUNNING, source="p", num_tokens=1), []
    return protocol.advance_receiver(state, event)


def router_passes_on_tokens_of_old_attempts(state: Any, event: Any) -> Any:
    if isinstance(event, Token) and event.attempt != state.attempt:
        return state, [Envelope("client", event)]
    return protocol.advance_request(state, event)


def router_ignores_the_attempt(state: Any, event: Any) -> Any:
    if isinstance(event, Failed):
        return protocol.advance_request(state, replace(event, attempt=state.attempt))
    return protocol.advance_request(state, event)


LOSS, CRASH, BOTH = Budget(0, 1, 0, 0, 0), Budget(1, 0, 0, 0, 0), Budget(1, 1, 0, 0, 0)
EARLY = Budget(0, 0, 0, 1, 0)

DEFECTS: list[tuple[dict[str, Any], Budget, int, str]] = [
    ({"advance_source": source_serves_what_it_has_freed}, LOSS, 1, "decodes without"),
    ({"advance_source": source_has_no_lease}, BOTH, 1, "never given back"),
    ({"advance_source": source_sends_what_is_not_computed}, Budget(0, 0, 0, 0, 0), 1, "decodes without"),
    ({"advance_receiver": receiver_starts_when_it_has_room}, Budget(0, 0, 0, 0, 0), 1, "decodes without"),
    ({"advance_receiver": receiver_starts_without_a_part}, LOSS, 1, "decodes without"),
    (
        {"advance_receiver": receiver_takes_room_before_the_source_has_begun},
        Budget(0, 0, 0, 0, 0),
        2,
        "nothing went wrong",
    ),
    ({"advance_receiver": receiver_never_asks_again}, BOTH, 1, "never given back"),
    (
        {"advance_receiver": receiver_keeps_what_was_cancelled},
        Budget(0, 0, 0, 0, 1),
        1,
        "never given back|waits for ever",
    ),
    ({"advance_request": router_passes_on_what_comes}, Budget(0, 0, 0, 0, 0), 1, "a client has|after its end"),
    ({"advance_request": router_does_not_hear_of_crashes}, CRASH, 1, "waits for ever"),
    ({"advance_request": router_gives_up_at_once}, LOSS, 1, "although there are tries"),
    ({"advance_request": router_begins_again_from_the_start}, LOSS, 1, "a client has"),
    ({"advance_receiver": receiver_goes_on_after_its_end}, EARLY, 1, "decodes without"),
    ({"advance_request": router_passes_on_tokens_of_old_attempts}, EARLY, 1, "a client has|after its end"),
]


@pytest.mark.parametrize(("parts", "budget", "requests", "message"), DEFECTS, ids=lambda value: _name_of(value))
def test_a_planted_defect_is_found(parts: dict[str, Any], budget: Budget, requests: int, message: str) -> None:
    with pytest.raises(Violation, match=message):
        ModelChecker(budget=budget, requests=requests, parts=2, code=changed(**parts)).explore()


def _name_of(value: Any) -> str:
    return next(iter(value.values())).__name__ if isinstance(value, dict) else ""


def test_a_loss_alone_costs_no_attempt_while_the_cache_is_pulled() -> None:
    """What the receiver and the source tell each other is asked for again."""

    class Pulling(ModelChecker):
        def events(self, system: Any) -> Any:
            """A receiver asks again before a lease ends, and that ends before the router begins again."""
            found = super().events(system)
            roles = [event.what[0] for event in found if event.kind == "expire"]
            first = next((role for role in ("receiver", "source", "route") if role in roles), "")
            return [event for event in found if event.kind != "expire" or event.what[0] == first]

        def after(self, system: Any, event: Any) -> Any:
            if event.kind == "lose" and event.what[0] not in (4, 5):
                return system
            return super().after(system, event)

        def _route(self, system: Any, event: Any) -> Any:
            if isinstance(event, Begin) and self.items[system.route].number:
                raise Violation("an attempt was lost")
            return super()._route(system, event)

    assert Pulling(budget=LOSS, requests=1, parts=2).explore()
    with pytest.raises(Violation, match="an attempt was lost"):
        code = changed(advance_source=source_frees_when_all_is_sent)
        Pulling(budget=LOSS, requests=1, parts=2, code=code).explore()
    with pytest.raises(Violation, match="an attempt was lost"):
        code = changed(advance_source=source_answers_one_wish)
        Pulling(budget=LOSS, requests=1, parts=2, code=code).explore()


# Single steps.


def test_a_part_that_has_not_come_is_asked_for_again() -> None:
    state = ReceiverState(FIRST, ReceiverPhase.PULLING, "p", 2, frozenset({0, 1}), frozenset({0, 1}), 1, TOKEN)
    after, _ = protocol.advance_receiver(state, CachePart(FIRST, 1))
    assert after is not None and after.missing == {0}
    again, sent = protocol.advance_receiver(after, Expired())
    assert sent == [Envelope("p", PartsRequest(FIRST, frozenset({0})))] and again is not None and again.tries == 1


def test_a_receiver_has_all_its_tries_for_the_manifest_and_then_for_room() -> None:
    state, sent = protocol.advance_receiver(None, Receive(FIRST, "p", 0))
    for place in ("asked", "queued"):
        while state is not None and state.tries:
            state, sent = protocol.advance_receiver(state, Expired())
            assert sent == [Envelope("p", ManifestRequest(FIRST))]
        assert state is not None and state.phase is ReceiverPhase(place)
        if place == "asked":
            state, _ = protocol.advance_receiver(state, Manifest(FIRST, frozenset({0}), TOKEN))
            assert state is not None and state.tries == protocol.PULL_TRIES
    ended, sent = protocol.advance_receiver(state, Expired())
    assert ended is not None and ended.phase is ReceiverPhase.ENDED
    assert sent == [Envelope("router", Failed(FIRST, "no room")), Envelope("p", Cancel(FIRST))]


def test_only_what_the_receiver_lacks_is_sent() -> None:
    parts = frozenset(range(4))
    state = ReceiverState(FIRST, ReceiverPhase.QUEUED, "p", parts=parts)
    after, sent = protocol.advance_receiver(state, Admitted(frozenset({0, 1, 2})))
    assert sent == [Envelope("p", PartsRequest(FIRST, frozenset({3})))] and after is not None and after.missing == {3}


@pytest.mark.parametrize("token", [replace(TOKEN, attempt=Attempt(FIRST.request, 2)), replace(TOKEN, is_last=True)])
def test_a_manifest_whose_token_is_not_the_attempts_fails_it(token: Token) -> None:
    state = ReceiverState(FIRST, ReceiverPhase.ASKED, "p", 2)
    ended, sent = protocol.advance_receiver(state, Manifest(FIRST, frozenset({0, 1}), token))
    assert ended is not None and ended.phase is ReceiverPhase.ENDED
    assert [(each.to, type(each.message)) for each in sent] == [(ROUTER, Failed), ("p", Cancel)]


def test_nothing_is_promised_before_retention_has_decided() -> None:
    state = found(protocol.advance_source(None, "d", ManifestRequest(FIRST)))
    for event in (Compute(FIRST, 0, "d"), Admitted(), ManifestRequest(FIRST)):
        state, sent = protocol.advance_source(state, "d", event)
        assert not sent
    state, sent = protocol.advance_source(state, "", TokenSampled(TOKEN, frozenset({0, 1})))
    assert sent == [
        Envelope(ROUTER, TOKEN),
        Envelope("d", Manifest(FIRST, frozenset({0, 1}), TOKEN)),
    ]
    assert found((state, sent)).phase is SourcePhase.HELD


def found(answer: tuple[Any, list[Envelope]]) -> Any:
    assert answer[0] is not None
    return answer[0]


def test_a_receiver_that_has_everything_asks_for_nothing() -> None:
    state = ReceiverState(FIRST, ReceiverPhase.QUEUED, "p", parts=frozenset({0}), num_tokens=1, token=TOKEN)
    after, sent = protocol.advance_receiver(state, Admitted(frozenset({0})))
    assert found((after, sent)).phase is ReceiverPhase.RUNNING
    assert [type(each.message) for each in sent] == [Ack, HandedOver, Token]


def test_an_attempt_without_a_source_is_computed_by_its_receiver() -> None:
    state, sent = protocol.advance_request(RequestState(0, 1, delivered=3), Begin("", "d"))
    assert sent == [Envelope("d", Receive(state.attempt, "", 3))] and state.is_handed_over
    receiver = found(protocol.advance_receiver(None, sent[0].message))
    assert receiver.phase is ReceiverPhase.RUNNING
    assert protocol.advance_receiver(receiver, TokenSampled(Token(state.attempt, NO_TEXT)))[1] == [
        Envelope(ROUTER, Token(state.attempt, NO_TEXT, 3))
    ]
    assert [each.to for each in protocol.advance_request(state, Expired())[1]][:1] == ["d"]


def test_what_has_ended_holds_nothing_and_begins_nothing() -> None:
    for event in (
        Cancel(FIRST),
        Ack(FIRST),
        Expired(),
        TokenSampled(Token(FIRST, NO_TEXT, is_last=True)),
        Admitted(),
        Failed(FIRST, ""),
    ):
        source, receiver = SourceState(FIRST, SourcePhase.ENDED), ReceiverState(FIRST, ReceiverPhase.ENDED)
        assert protocol.advance_source(source, "d", event) == (source, [])
        if not isinstance(event, Ack):
            assert protocol.advance_receiver(receiver, event) == (receiver, [])
    assert protocol.advance_source(SourceState(FIRST, SourcePhase.ENDED), "d", PartsRequest(FIRST, frozenset()))[1] == [
        Envelope("d", Lost(FIRST))
    ]


def test_a_crash_of_the_source_costs_nothing_once_the_receiver_has_the_cache() -> None:
    state = RequestState(0, 1, RequestPhase.RUNNING, 1, "p", "d")
    taken, _ = protocol.advance_request(state, HandedOver(FIRST))
    assert protocol.advance_request(taken, InstanceDown("p")) == (taken, [])
    again, sent = protocol.advance_request(taken, InstanceDown("d"))
    assert again.phase is RequestPhase.QUEUED and {each.to for each in sent} == {"p", "d"}
    assert protocol.advance_request(state, InstanceDown("p"))[0].phase is RequestPhase.QUEUED


def test_early_tokens_of_an_attempt_that_failed_are_not_delivered_by_the_next_one() -> None:
    state, sent = protocol.advance_request(RequestState(0, 2), Begin("", "d"))
    state, sent = protocol.advance_request(state, Token(state.attempt, NO_TEXT, 1))
    assert len(state.early) == 1 and not sent
    state, _ = protocol.advance_request(state, Failed(state.attempt, ""))
    state, _ = protocol.advance_request(state, Begin("", "d"))
    first = Token(state.attempt, NO_TEXT, 0)
    assert protocol.advance_request(state, first)[1] == [Envelope(CLIENT, first)]


def test_a_client_that_leaves_ends_everything() -> None:
    state = RequestState(0, 1, RequestPhase.RUNNING, 1, "p", "d")
    after, sent = protocol.advance_request(state, Abort())
    assert after.phase is RequestPhase.FAILED
    assert [each for each in sent if isinstance(each.message, Cancel)] == [
        Envelope("p", Cancel(FIRST)), Envelope("d", Cancel(FIRST)),
    ]  # fmt: skip


def test_every_state_that_waits_has_a_deadline() -> None:
    states: list[Any] = [SourceState(FIRST, phase) for phase in SourcePhase] + [
        ReceiverState(FIRST, phase) for phase in ReceiverPhase
    ]
    waits = {state.phase for state in states if protocol.has_deadline(state)}
    assert waits == {*SourcePhase, *ReceiverPhase} - {
        SourcePhase.RUNNING,
        SourcePhase.ENDED,
        ReceiverPhase.RUNNING,
        ReceiverPhase.ENDED,
    }
    assert {phase for phase in RequestPhase if protocol.has_deadline(RequestState(0, 1, phase))} == {
        RequestPhase.RUNNING
    }


def test_the_tables_of_the_docs_are_those_of_the_code() -> None:
    """Print them with python -m tests.protocol_table."""
    text = (ROOT / "docs" / "design" / "disaggregation.md").read_text()
    assert tables() in text
