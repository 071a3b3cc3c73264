"""What router, sources and receivers tell each other, and what else happens to them: see `cluster.protocol`.

Dataclasses, not named tuples: these are equal if their fields are, whatever their types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Attempt(NamedTuple):
    """A try of a request. Numbers of one request increase."""

    request: int
    number: int


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

    parts       of the cache
    num_tokens  of the answer so far
    """

    attempt: Attempt
    parts: frozenset[int]
    num_tokens: int


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
class Token:
    """To the router, and from there to the client: the token at a position of the answer.

    is_last  the answer ends with it: one message tells both, so that none is left if the other one is lost
    """

    attempt: Attempt
    position: int
    is_last: bool = False


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
    """At a source or receiver: the next token.

    is_last  the answer ends with it
    parts    at a source that keeps the cache for its receiver: the parts of it
    """

    is_last: bool
    parts: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Expired:
    """The state's deadline is over."""
