"""Messages between router, sources and receivers, and their other events: see `cluster.protocol`.

Dataclasses, not named tuples: named tuples of different types are equal if their fields are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.outputs import CompletionOutput, Logprob


class Attempt(NamedTuple):
    """A try of a request. The numbers of one request's attempts increase."""

    request: int
    number: int


@dataclass(frozen=True, slots=True)
class FirstTokenInfo:
    """Facts about a prompt, known when its first token is sampled. seconds: from the admission to that token."""

    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    cached_by_tier: dict[str, int]
    num_pinned_tokens: int | None
    kept_fraction: float | None
    seconds: float = 0.0
    embedding: list[float] | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A token, from the engine that samples it to the client's stream; for the router it is a message.

    output    the client's output: text, log-probabilities, finish reason
    position  position in the answer. The protocol sets it; an engine leaves it at 0
    is_last   whether the answer ends with it. The token and the end are one message, so that neither arrives alone
    first     facts about the prompt; only with the first token of the instance that computed it
    """

    attempt: Attempt
    output: CompletionOutput = field(hash=False)
    position: int = 0
    is_last: bool = False
    first: FirstTokenInfo | None = field(default=None, hash=False)

    def at(self, position: int) -> Token:
        """A copy with another position."""
        return Token(self.attempt, self.output, position, self.is_last, self.first)


@dataclass(frozen=True, slots=True)
class Compute:
    """Router to source: compute the prompt and one token. start: number of tokens that the client has already."""

    attempt: Attempt
    start: int
    receiver: str


@dataclass(frozen=True, slots=True)
class Receive:
    """Router to receiver: pull the cache from the source, and decode. Without a source it computes the prompt itself.

    start  number of tokens that the client had when the attempt began
    """

    attempt: Attempt
    source: str
    start: int


@dataclass(frozen=True, slots=True)
class ManifestRequest:
    """Receiver to source: send the manifest. Renews the source's lease."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Manifest:
    """Source to receiver: the prompt is computed, and retention has decided.

    parts  parts of the cache
    token  token that the source has sampled
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
    """Source to receiver: one whole part. A damaged part counts as not received."""

    attempt: Attempt
    part: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Source to receiver: the source no longer has anything of the attempt. is_over: the answer has ended, and nothing
    is left to decode.
    """

    attempt: Attempt
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Ack:
    """Receiver to source: all parts have arrived."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Receiver to router: the source is no longer needed."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Failed:
    """To the router: the attempt cannot continue."""

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
    """A message and its recipient."""

    to: str
    message: Message


ROUTER, CLIENT = "router", "client"


# ---- events beside messages ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """At the router: the next attempt may begin on these instances."""

    source: str
    receiver: str


@dataclass(frozen=True, slots=True)
class InstanceDown:
    """At the router: an instance has failed and lost all its states."""

    instance: str


@dataclass(frozen=True, slots=True)
class Abort:
    """At the router: the client has disconnected."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """At an instance: the sequence is admitted. parts: at a receiver, the parts that it has or does not need."""

    parts: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """At a source or receiver: the next token. parts: parts of the cache that a source keeps for its receiver."""

    token: Token
    parts: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Expired:
    """The state's deadline is over."""
