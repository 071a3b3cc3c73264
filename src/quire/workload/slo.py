"""Latency targets of requests, and the share of them that should meet both."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Slo:
    """Latency targets.

    ttft        most seconds to the first token
    tpot        most seconds per token after it, on average over a request
    attainment  share of requests that should meet both
    """

    ttft: float = math.inf
    tpot: float = math.inf
    attainment: float = 0.9

    def scaled(self, scale: float) -> Slo:
        """Both targets times `scale`: smaller is tighter."""
        return Slo(self.ttft * scale, self.tpot * scale, self.attainment)

    def facts(self) -> dict[str, float | None]:
        """The targets, for JSON; None: no target."""
        return {"ttft": finite(self.ttft), "tpot": finite(self.tpot), "attainment": self.attainment}

    @property
    def has_targets(self) -> bool:
        """Whether a request can miss one."""
        return min(self.ttft, self.tpot) < math.inf


ANYTHING = Slo(attainment=0.0)
"""Targets that every request meets."""


def finite(value: float) -> float | None:
    """A number for JSON; None if it is not finite."""
    return value if math.isfinite(value) else None
