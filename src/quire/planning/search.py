"""What searches have in common: a time, options that are not taken, each with a reason, and doubts of the result.

Strategies decide what is tried next and what cannot win any more. `quire.planning.halving` tries settings in rounds
with more requests for fewer of them; `quire.planning.placement` tries divisions by their upper bounds, roughly first.
Both try an option by simulation: see `quire.planning.attains`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from quire.placement.rejected import Reason, Rejected

Option = TypeVar("Option")


@dataclass(kw_only=True)
class Search(Generic[Option]):
    """A search. An option that is being tried when the time is over is finished.

    clock     seconds from any beginning
    deadline  on that clock
    warnings  one sentence for each reason to doubt the result
    """

    clock: Callable[[], float] = lambda: 0.0
    deadline: float = math.inf
    rejected: list[Rejected[Option]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def reject(self, option: Option, why: Reason, reason: str, rate_per_unit: float | None = None) -> None:
        """Notes an option that is not part of the result."""
        self.rejected.append(Rejected(option, why, reason, rate_per_unit))

    def is_over(self, end: float) -> bool:
        """Whether a time of the clock has come."""
        return self.clock() >= end
