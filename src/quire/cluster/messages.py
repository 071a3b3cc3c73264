"""What router, sources and receivers tell each other, and what else happens to them: see `cluster.protocol`.

Dataclasses, not named tuples: these are equal if their fields are, whatever their types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.outputs import CompletionOutput, Logprob


class Attempt(NamedTuple):
    """A try of a request. Numbers of one request increase."""

    request: int
    number: int


@dataclass(frozen=True, slots=True)
class FirstTokenInfo:
    """What is known of a prompt once its first token is sampled. seconds: from the admission to that token."""

    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    cached_by_tier: dict[str, int]
    num_pinned_tokens: int | None
    kept_fraction: float | None
    seconds: float = 0.0
    embedding: list[float] | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A token, from the engine that samples it to the client's stream. To the router, a message.

    output    what the client gets: text, log-probabilities, why the answer ends
    position  in the answer. The protocol counts it; an engine leaves it at 0
    is_last   the answer ends with it: one message says both, so that none is left if the other one is lost
    first     what is known of the prompt; only with the first token of the instance that computed it
    """

    attempt: Attempt
    output: CompletionOutput = field(hash=False)
    position: int = 0
    is_last: bool = False
    first: FirstTokenInfo | None = field(default=None, hash=False)

    def at(self, position: int) -> Token:
        """The same token at a position."""
        return Token(self.attempt, self.output, position, self.is_last, self.first)


@dataclass(frozen=True, slots=True)
class Compute:
    """Router to source: compute the prompt and one token. start: tokens that the client has already."""

    attempt: Attempt
    start: int
    receiver: str


@dataclass(frozen=True, slots=True)
class Receive:
    """Router to receiver: pull the cache from the source, and decode. Without a source it computes the prompt itself.

    start  tokens that the client had when the attempt began
    """

    attempt: Attempt
    source: str
    start: int


@dataclass(frozen=True, slots=True)
class ManifestRequest:
    """Receiver to source: what is there? Renews the source's lease."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Manifest:
    """Source to receiver: the prompt is computed, and retention has decided.

    parts  of the cache
    token  that the source has sampled
    """

    attempt: Attempt
    parts: frozenset[int]
    token: Token


@dataclass(frozen=True, slots=True)
class PartsRequest:
    """Receiver to source: send these parts."""

    attempt: Attempt
    parts: frozenset[int]


@dataclass(frozen=True, slots=True)
class CachePart:
    """Source to receiver: a part, whole. What arrives damaged does not count."""

    attempt: Attempt
    part: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Source to receiver: it has nothing of the attempt any more. is_over: the answer has ended, and nothing is left to
    decode.
    """

    attempt: Attempt
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Ack:
    """Receiver to source: all of it is here."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Receiver to router: the source is not needed any more."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Failed:
    """To the router: the attempt cannot go on."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """To an instance: the attempt is over."""

    attempt: Attempt


Message = (
    Compute
    | Receive
    | ManifestRequest
    | Manifest
    | PartsRequest
    | CachePart
    | Lost
    | Ack
    | HandedOver
    | Token
    | Failed
    | Cancel
)


class Envelope(NamedTuple):
    """A message and who gets it."""

    to: str
    message: Message


ROUTER, CLIENT = "router", "client"


# ---- events beside messages ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """At the router: an attempt may begin on these instances."""

    source: str
    receiver: str


@dataclass(frozen=True, slots=True)
class InstanceDown:
    """At the router: an instance has failed, and has lost everything."""

    instance: str


@dataclass(frozen=True, slots=True)
class Abort:
    """At the router: the client is gone."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """At an instance: there is room. parts: at a receiver, those that it has already, or does not need."""

    parts: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """At a source or receiver: the next token. parts: of the cache, at a source that keeps it for its receiver."""

    token: Token
    parts: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Expired:
    """The state's deadline is over."""
