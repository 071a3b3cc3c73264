"""The handover of a sequence from one engine to another: what the next engine needs to continue it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.cache.path import SwappedPath


@dataclass(frozen=True)
class Handover:
    """A request of one sequence whose first tokens the caller may already have.

    seed        seed of the sequence
    token_ids   generated elsewhere. Without their cache they are computed again, one by one where retention decides
    cumulative  sum of their log-probabilities
    will_hand_over      whether another engine continues it after its next token, unless that token ends it
    swapped     its path in a store; None: its tokens are computed again
    """

    seed: int
    token_ids: tuple[int, ...] = ()
    cumulative: float = 0.0
    will_hand_over: bool = False
    swapped: SwappedPath | None = None
