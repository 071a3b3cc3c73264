"""What every message does in every state, as the tables of docs/design/disaggregation.md: computed, not written.

python -m tests.protocol_table    prints them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from quire.cluster import protocol
from quire.cluster.messages import (
    Abort,
    Ack,
    Admitted,
    Attempt,
    Begin,
    CachePart,
    Cancel,
    Compute,
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
from quire.engine.outputs import CompletionOutput

NO_TEXT = CompletionOutput(0, "", [])
"""The output of tokens whose text does not matter."""

AT, PARTS = Attempt(0, 1), frozenset({0, 1})
TOKEN, LAST = Token(AT, NO_TEXT), Token(AT, NO_TEXT, is_last=True)
UNKNOWN = "unknown"

ROUTE_EVENTS = (
    Begin("p", "d"), TOKEN, LAST, HandedOver(AT), Failed(AT, "reason"), InstanceDown("p"),
    InstanceDown("d"), Expired(), Abort(),
)  # fmt: skip
SOURCE_EVENTS = (
    Compute(AT, 0, "d"), Admitted(), ManifestRequest(AT), PartsRequest(AT, PARTS), TokenSampled(TOKEN, PARTS),
    TokenSampled(LAST), Ack(AT), Cancel(AT), Failed(AT, "reason"), Expired(),
)  # fmt: skip
RECEIVER_EVENTS = (
    Receive(AT, "p", 0), Receive(AT, "", 0), Manifest(AT, PARTS, TOKEN), Admitted(frozenset({0})), Admitted(PARTS),
    CachePart(AT, 1), Lost(AT), Lost(AT, is_over=True), TokenSampled(TOKEN), TokenSampled(LAST),
    Cancel(AT), Failed(AT, "reason"), Expired(),
)  # fmt: skip


def route_states() -> dict[Any, Any]:
    """A router's states by phase."""
    return {phase: RequestState(0, 1, phase, 1, "p", "d") for phase in RequestPhase}


def source_states() -> dict[Any, Any]:
    """A source's states by phase. While it computes, the receiver has asked."""
    found: dict[Any, Any] = {UNKNOWN: None} | {phase: SourceState(AT, phase, "d") for phase in SourcePhase}
    found[SourcePhase.RUNNING] = SourceState(AT, SourcePhase.RUNNING, "d", is_asked=True)
    found[SourcePhase.HELD] = SourceState(AT, SourcePhase.HELD, "d", parts=PARTS, token=TOKEN)
    return found


def receiver_states() -> dict[Any, Any]:
    """A receiver's states by phase. While it pulls, one part is missing."""
    found: dict[Any, Any] = {UNKNOWN: None} | {phase: ReceiverState(AT, phase, "p") for phase in ReceiverPhase}
    found[ReceiverPhase.QUEUED] = ReceiverState(AT, ReceiverPhase.QUEUED, "p", parts=PARTS, num_tokens=1, token=TOKEN)
    found[ReceiverPhase.PULLING] = ReceiverState(AT, ReceiverPhase.PULLING, "p", 2, PARTS, frozenset({1}), 1, TOKEN)
    found[ReceiverPhase.RUNNING] = ReceiverState(AT, ReceiverPhase.RUNNING, "p", num_tokens=1)
    return found


def tables() -> str:
    """All three, in Markdown."""
    return "\n".join(
        [
            *_table("router", ROUTE_EVENTS, route_states(), protocol.advance_request),
            "",
            *_table(
                "source",
                SOURCE_EVENTS,
                source_states(),
                lambda state, event: protocol.advance_source(state, "d", event),
            ),
            "",
            *_table("receiver", RECEIVER_EVENTS, receiver_states(), protocol.advance_receiver),
        ]
    )


def _table(name: str, events: Sequence[Any], states: dict[Any, Any], step: Callable[[Any, Any], Any]) -> list[str]:
    phases = [_name(phase) for phase in states]
    lines = [f"| {name} | {' | '.join(phases)} |", "|---" * (len(phases) + 1) + "|"]
    for event in events:
        cells = []
        for state in states.values():
            after, sent = step(state, event)
            told = [f"{type(each.message).__name__} to {_who(each.to)}" for each in sent]
            is_same = after == state and not sent
            phase = "" if after is None or (state is None and after is None) else _name(after.phase)
            moved = [f"*{phase}*"] if phase and (state is None or after.phase is not state.phase) else []
            noted = ["noted"] if after != state and not moved and not told else []
            cells.append("" if is_same else ", ".join([*moved, *noted, *dict.fromkeys(told)]))
        lines.append(f"| {_event(event)} | {' | '.join(cells)} |")
    return lines


def _name(phase: Enum | str) -> str:
    return phase if isinstance(phase, str) else str(phase.value)


def _who(to: str) -> str:
    return {"p": "source", "d": "receiver"}.get(to, to)


def _event(event: Any) -> str:
    kind = type(event).__name__
    what = event.token if isinstance(event, TokenSampled) else event
    flags = [name for name in ("is_last", "is_over") if getattr(what, name, False)]
    if isinstance(event, Receive) and not event.source:
        flags.append("no source")
    if event == Admitted(PARTS):
        flags.append("has all")
    if isinstance(event, InstanceDown):
        flags.append(_who(event.instance))
    return f"{kind} ({', '.join(flags)})" if flags else kind


if __name__ == "__main__":
    print(tables())
