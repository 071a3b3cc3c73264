"""The hand-over of a request from the instance that computes its prompt to the one that decodes it, as pure functions:
(state, event) -> (state, messages). Knows no socket, clock or thread. The driver passes events in, sends the messages,
and keeps the deadlines.

    router    names the two instances, and passes each token on once
    source    computes the prompt, and holds its pages until the receiver has them or a lease ends
    receiver  pulls the parts it lacks once it has room, and decodes once all parts have arrived

    router --Compute--> source       router --Receive--> receiver
                        source <--ManifestRequest, PartsRequest-- receiver
                        source ---Manifest, CachePart-----------> receiver
                        source <--Ack---------------------------- receiver
    router <--Token---- source       router <--HandedOver, Token------------- receiver

Computed chunks of a long prompt may be sent before the manifest. The protocol need not know of them, because they are
ordinary cached chunks. An attempt without a source is computed by its receiver alone.

A try of a request is an attempt. A failure ends the attempt, and the router begins another one, whose prompt includes
the tokens so far, as long as tries are left. Every message names its attempt, so two attempts are never confused.

Messages may be lost and repeated, and messages between different pairs of processes may overtake each other. A failed
instance loses its states, and may come back without them. States that hold resources have a deadline (`has_deadline`).
Ended attempts are remembered for a while, so that late messages do not restart them.

Source: DistServe, OSDI 2024, section 4.3 (decoding instances pull; prefill memory is the queue). Ours differs: parts
that the receiver already has are not sent, and failures are handled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

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
    Message,
    PartsRequest,
    Receive,
    Token,
    TokenSampled,
)

PULL_TRIES = 3
"""Number of times that a receiver asks a source that does not answer."""


# ---- router ----------------------------------------------------------------------------------------------------------


class RequestPhase(Enum):
    """The phase of a request at the router."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request at the router.

    request    number of the request
    tries      number of attempts that may still begin
    phase      QUEUED: the next attempt waits for Begin
    number     number of the last attempt
    source     source of the last attempt; empty if the receiver computes the prompt
    receiver   receiver of the last attempt
    is_handed_over  whether the receiver no longer needs the source
    delivered  number of tokens that the client has
    early      tokens that arrived before their predecessors, by rising position
    """

    request: int
    tries: int
    phase: RequestPhase = RequestPhase.QUEUED
    number: int = 0
    source: str = ""
    receiver: str = ""
    is_handed_over: bool = False
    delivered: int = 0
    early: tuple[Token, ...] = ()

    @property
    def attempt(self) -> Attempt:
        """The last attempt."""
        return Attempt(self.request, self.number)


def advance_request(
    state: RequestState, event: Begin | InstanceDown | Abort | Expired | Message
) -> tuple[RequestState, list[Envelope]]:
    """The router's part. The client gets each position once, until the last one or Failed."""
    if isinstance(event, Begin):
        if state.phase is not RequestPhase.QUEUED:
            return state, []
        begun = replace(
            state, phase=RequestPhase.RUNNING, tries=state.tries - 1, number=state.number + 1, source=event.source,
            receiver=event.receiver, is_handed_over=not event.source,
        )  # fmt: skip
        receive = Envelope(event.receiver, Receive(begun.attempt, event.source, begun.delivered))
        if not event.source:
            return begun, [receive]
        return begun, [Envelope(event.source, Compute(begun.attempt, begun.delivered, event.receiver)), receive]
    if isinstance(event, Abort):
        if state.phase in (RequestPhase.ENDED, RequestPhase.FAILED):
            return state, []
        return replace(state, phase=RequestPhase.FAILED), [
            *_cancels(state),
            Envelope(CLIENT, Failed(state.attempt, "aborted")),
        ]
    if state.phase is not RequestPhase.RUNNING:
        return state, []
    if isinstance(event, InstanceDown):
        needs = {state.receiver} if state.is_handed_over else {state.receiver, state.source}
        return _retried(state, f"{event.instance} is down") if event.instance in needs else (state, [])
    if isinstance(event, Expired):
        return _retried(state, "no answer in time")
    if event.attempt != state.attempt:
        return state, []
    match event:
        case Failed(_, reason):
            return _retried(state, reason)
        case HandedOver():
            return replace(state, is_handed_over=True), []
        case Token() if event.position >= state.delivered:
            return _passed_on(state, event)
    return state, []


def _passed_on(state: RequestState, token: Token) -> tuple[RequestState, list[Envelope]]:
    """Delivers a token and the early tokens after it, or keeps it until its predecessors have arrived."""
    sent, delivered = [], state.delivered
    early = {token.position: token} | {each.position: each for each in state.early}
    while (following := early.pop(delivered, None)) is not None:
        sent.append(Envelope(CLIENT, following))
        delivered += 1
        if following.is_last:
            # If the source ended the answer, the receiver still waits for the cache.
            ended = replace(state, phase=RequestPhase.ENDED, delivered=delivered, early=())
            return ended, [*sent, *_cancels(state)]
    return replace(state, delivered=delivered, early=tuple(early[position] for position in sorted(early))), sent


def _retried(state: RequestState, reason: str) -> tuple[RequestState, list[Envelope]]:
    sent = _cancels(state)
    if state.tries:
        return replace(state, phase=RequestPhase.QUEUED, early=()), sent
    return replace(state, phase=RequestPhase.FAILED), [*sent, Envelope(CLIENT, Failed(state.attempt, reason))]


def _cancels(state: RequestState) -> list[Envelope]:
    if state.phase is not RequestPhase.RUNNING:
        return []
    return [Envelope(instance, Cancel(state.attempt)) for instance in (state.source, state.receiver) if instance]


# ---- source ----------------------------------------------------------------------------------------------------------


class SourcePhase(Enum):
    """The phase of an attempt at its source.

    EXPECTED  the receiver has asked; Compute has not arrived yet
    QUEUED    waits for room
    RUNNING   computes
    HELD      holds the pages until the receiver has them
    ENDED     holds nothing
    """

    EXPECTED = "expected"
    QUEUED = "queued"
    RUNNING = "running"
    HELD = "held"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SourceState:
    """An attempt at its source.

    receiver  instance that may pull
    start     number of tokens that the client had when the attempt began
    parts     parts of the cache, once it is computed
    token     token that it has sampled, while it holds the cache
    is_asked  whether the receiver waits for the manifest
    is_over   whether the answer has ended here
    """

    attempt: Attempt
    phase: SourcePhase
    receiver: str = ""
    start: int = 0
    parts: frozenset[int] = frozenset()
    is_asked: bool = False
    is_over: bool = False
    token: Token | None = None


def advance_source(
    state: SourceState | None, sender: str, event: Admitted | TokenSampled | Expired | Message
) -> tuple[SourceState | None, list[Envelope]]:
    """The source's part. state: None if the attempt is unknown. sender: sender of a message."""
    if state is None:
        match event:
            case Compute(attempt, start, receiver):
                return SourceState(attempt, SourcePhase.QUEUED, receiver, start), []
            case ManifestRequest(attempt):
                return SourceState(attempt, SourcePhase.EXPECTED, sender, is_asked=True), []
            case PartsRequest(attempt):
                return None, [Envelope(sender, Lost(attempt))]
            case Cancel(attempt):
                return SourceState(attempt, SourcePhase.ENDED), []
        return None, []
    attempt, phase = state.attempt, state.phase
    if phase is SourcePhase.ENDED:
        return state, [Envelope(sender, Lost(attempt, state.is_over))] if isinstance(
            event, ManifestRequest | PartsRequest
        ) else []
    match event:
        case Cancel() | Ack() | Failed():
            return _ended_source(state), [Envelope(ROUTER, event)] if isinstance(event, Failed) else []
        case Compute(_, start, receiver) if phase is SourcePhase.EXPECTED:
            return replace(state, phase=SourcePhase.QUEUED, receiver=receiver, start=start), []
        case Admitted() if phase is SourcePhase.QUEUED:
            return replace(state, phase=SourcePhase.RUNNING), []
        case ManifestRequest() if phase is SourcePhase.HELD:
            assert state.token is not None, f"{attempt} is held without a token"
            return state, [Envelope(sender, Manifest(attempt, state.parts, state.token))]
        case ManifestRequest():
            return replace(state, is_asked=True), []
        case PartsRequest(_, parts) if phase is SourcePhase.HELD:
            return state, [Envelope(sender, CachePart(attempt, part)) for part in sorted(parts & state.parts)]
        case TokenSampled(sampled, parts) if phase is SourcePhase.RUNNING:
            token = sampled.at(state.start)
            sent = [Envelope(ROUTER, token)]
            if token.is_last:
                # The receiver must not report a failure, which might reach the router before the token.
                answer: Message = Lost(attempt, is_over=True)
                after = replace(_ended_source(state), is_over=True)
            else:
                answer = Manifest(attempt, parts, token)
                after = replace(state, phase=SourcePhase.HELD, parts=parts, token=token)
            return after, [*sent, Envelope(state.receiver, answer)] if state.is_asked else sent
        case Expired() if phase is SourcePhase.EXPECTED:
            return _ended_source(state), [Envelope(state.receiver, Lost(attempt))]
        case Expired() if phase is SourcePhase.QUEUED:
            return _ended_source(state), [Envelope(ROUTER, Failed(attempt, "no room"))]
        case Expired() if phase is SourcePhase.HELD:
            # The receiver may have everything, and its Ack is lost. Otherwise it asks again, and fails.
            return _ended_source(state), []
    return state, []


def _ended_source(state: SourceState) -> SourceState:
    return SourceState(state.attempt, SourcePhase.ENDED)


# ---- receiver --------------------------------------------------------------------------------------------------------


class ReceiverPhase(Enum):
    """The phase of an attempt at its receiver.

    ASKED    waits for the manifest
    QUEUED   waits for room, only after the source holds the whole cache: otherwise two instances could wait for each
             other's room for ever
    PULLING  waits for parts
    RUNNING  decodes, or computes the prompt if there is no source
    ENDED    holds nothing
    """

    ASKED = "asked"
    QUEUED = "queued"
    PULLING = "pulling"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ReceiverState:
    """An attempt at its receiver.

    source      instance that has the cache; empty if there is nothing to pull
    tries       number of times that it may still ask
    parts       parts of the cache
    missing     parts that have not arrived
    num_tokens  number of tokens of the answer so far
    token       token that the source has sampled, until it was also sent to the router from here
    """

    attempt: Attempt
    phase: ReceiverPhase
    source: str = ""
    tries: int = PULL_TRIES
    parts: frozenset[int] = frozenset()
    missing: frozenset[int] = frozenset()
    num_tokens: int = 0
    token: Token | None = None


def advance_receiver(
    state: ReceiverState | None, event: Admitted | TokenSampled | Expired | Message
) -> tuple[ReceiverState | None, list[Envelope]]:
    """The receiver's part. state: None if the attempt is unknown."""
    if state is None:
        match event:
            case Receive(attempt, "", start):
                return ReceiverState(attempt, ReceiverPhase.RUNNING, num_tokens=start), []
            case Receive(attempt, source):
                return ReceiverState(attempt, ReceiverPhase.ASKED, source, PULL_TRIES - 1), [
                    Envelope(source, ManifestRequest(attempt))
                ]
            case Cancel(attempt):
                return ReceiverState(attempt, ReceiverPhase.ENDED), []
        return None, []
    attempt, phase = state.attempt, state.phase
    if phase is ReceiverPhase.ENDED:
        return state, []
    match event:
        case Cancel():
            return _ended_receiver(state), []
        case Failed():
            return _ended_receiver(state), [Envelope(ROUTER, event), *_released(state)]
        case Manifest(_, parts, token) if phase is ReceiverPhase.ASKED:
            if token.attempt != attempt or token.is_last:
                reason = "a manifest with a token of another attempt, or with the last one"
                return _ended_receiver(state), [Envelope(ROUTER, Failed(attempt, reason)), *_released(state)]
            queued = replace(state, phase=ReceiverPhase.QUEUED, parts=parts, tries=PULL_TRIES)
            return replace(queued, num_tokens=token.position + 1, token=token), []
        case Admitted(has) if phase is ReceiverPhase.QUEUED:
            missing = state.parts - has
            pulling = replace(state, phase=ReceiverPhase.PULLING, missing=missing, tries=PULL_TRIES - 1)
            return (
                (pulling, [Envelope(state.source, PartsRequest(attempt, missing))]) if missing else _complete(pulling)
            )
        case CachePart(_, part) if phase is ReceiverPhase.PULLING:
            after = replace(state, missing=state.missing - {part})
            return (after, []) if after.missing else _complete(after)
        case Lost(_, True) if phase is not ReceiverPhase.RUNNING:
            return _ended_receiver(state), []
        case Lost() if phase is not ReceiverPhase.RUNNING:
            return _ended_receiver(state), [Envelope(ROUTER, Failed(attempt, "the source has lost the cache"))]
        case TokenSampled(token) if phase is ReceiverPhase.RUNNING:
            after = _ended_receiver(state) if token.is_last else replace(state, num_tokens=state.num_tokens + 1)
            return after, [Envelope(ROUTER, token.at(state.num_tokens))]
        case Expired() if phase is not ReceiverPhase.RUNNING:
            if not state.tries:
                reason = "no room" if phase is ReceiverPhase.QUEUED else "the source does not answer"
                return _ended_receiver(state), [Envelope(ROUTER, Failed(attempt, reason)), *_released(state)]
            # While it waits for room, a repeated request renews the source's lease.
            again = PartsRequest(attempt, state.missing) if phase is ReceiverPhase.PULLING else ManifestRequest(attempt)
            return replace(state, tries=state.tries - 1), [Envelope(state.source, again)]
    return state, []


def _complete(state: ReceiverState) -> tuple[ReceiverState, list[Envelope]]:
    attempt, token = state.attempt, state.token
    assert token is not None, f"{attempt} has a cache without a token"
    # The source's own message with this token may have been lost.
    sent = [Envelope(state.source, Ack(attempt)), Envelope(ROUTER, HandedOver(attempt)), Envelope(ROUTER, token)]
    return replace(state, phase=ReceiverPhase.RUNNING, token=None), sent


def _released(state: ReceiverState) -> list[Envelope]:
    return (
        [Envelope(state.source, Cancel(state.attempt))]
        if state.source and state.phase is not ReceiverPhase.RUNNING
        else []
    )


def _ended_receiver(state: ReceiverState) -> ReceiverState:
    return ReceiverState(state.attempt, ReceiverPhase.ENDED)


_WAITING = frozenset(
    (
        RequestPhase.RUNNING, SourcePhase.EXPECTED, SourcePhase.QUEUED, SourcePhase.HELD, ReceiverPhase.QUEUED,
        ReceiverPhase.ASKED, ReceiverPhase.PULLING,
    )
)  # fmt: skip


def has_deadline(state: RequestState | SourceState | ReceiverState) -> bool:
    """Whether a state expires after a time. The other states hold nothing, or compute."""
    return state.phase in _WAITING
