"""What searches have in common: a time, options that are not taken, each with a reason, and doubts of the result.

Strategies decide what is tried next and what cannot win any more. `quire.planning.auto` tries settings in rounds with
more requests for fewer of them; `quire.planning.placement` tries divisions by their upper bounds, roughly first. Both
try an option by simulation: see `quire.simulation.attains`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

Option = TypeVar("Option")


class Reason(StrEnum):
    """Why an option is not part of the result.

    UNFIT    it cannot run, or the memory is not enough
    UNKNOWN  its loss or its latency is neither measured nor modelled
    LOSSY    it loses more quality than any budget near the given one allows
    COVERED  another option is at least as good in everything that is known without trying
    MISSES   no rate meets the latency targets
    BOUND    an upper bound, or one simulation, shows that another option is better
    SLOWER   it was tried, and another option is better
    UNTRIED  the time was over
    """

    UNFIT = "unfit"
    UNKNOWN = "unknown"
    LOSSY = "lossy"
    COVERED = "covered"
    MISSES = "misses"
    BOUND = "bound"
    SLOWER = "slower"
    UNTRIED = "untried"


@dataclass(frozen=True)
class Rejected(Generic[Option]):
    """An option that is not part of the result.

    reason         a sentence with the numbers that decided
    rate_per_unit  its goodput per GPU or machine; None: it is not known
    """

    option: Option
    why: Reason
    reason: str
    rate_per_unit: float | None = None


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
