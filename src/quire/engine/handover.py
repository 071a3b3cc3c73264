"""A sequence that goes from one engine to another: what an engine is told of one that others began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.cache.path import SwappedPath


@dataclass(frozen=True)
class Handover:
    """A request of one sequence, of which the caller may have the first tokens already.

    seed        of the sequence
    token_ids   generated elsewhere. Without their cache they are computed again, one by one where retention decides
    cumulative  sum of their log-probabilities
    will_hand_over      whether another engine goes on with it after its next token, unless it ends with it
    swapped     its cache, which a store has; None: it is computed
    """

    seed: int
    token_ids: tuple[int, ...] = ()
    cumulative: float = 0.0
    will_hand_over: bool = False
    swapped: SwappedPath | None = None
