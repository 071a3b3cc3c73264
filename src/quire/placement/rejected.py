"""Options that a search did not take, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
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
