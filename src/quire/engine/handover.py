"""A sequence that goes from one engine to another: what an engine is told of one that others began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.cache.path import Swapped


@dataclass(frozen=True)
class Continued:
    """A request of one sequence, of which the caller may have the first tokens already.

    seed        of the sequence
    token_ids   generated elsewhere. Without their cache they are computed again, one by one where retention decides
    cumulative  sum of their log-probabilities
    leaves      whether another engine goes on with it after its next token, unless it ends with it
    swapped     its cache, which a store has; None: it is computed
    """

    seed: int
    token_ids: tuple[int, ...] = ()
    cumulative: float = 0.0
    leaves: bool = False
    swapped: Swapped | None = None
