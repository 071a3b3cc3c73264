"""The seconds of requests in each stage: quantiles over the last requests, and histograms since the start."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import astuple, dataclass, fields
from itertools import accumulate
from typing import Any

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
"""Upper ends of a histogram's buckets, in seconds. The last bucket holds all longer times."""

MOST = 10_000
"""Number of the last requests for quantiles."""


@dataclass(frozen=True)
class Stages:
    """Seconds of an answered request. Their sum is the time from its arrival to its last token.

    queue     until an instance admits it, messages and failed attempts included
    prefill   from then until its first token is sampled
    transfer  from then until the receiver has the cache; 0 if one instance did both
    decode    from then until the last token
    """

    queue: float
    prefill: float
    transfer: float
    decode: float


STAGES = tuple(each.name for each in fields(Stages))


class StageTimes:
    """The stage times of a router's requests."""

    def __init__(self) -> None:
        self.last: deque[Stages] = deque(maxlen=MOST)
        self._counts = {name: [0] * (len(BOUNDS) + 1) for name in STAGES}
        self._sums = dict.fromkeys(STAGES, 0.0)

    def add(self, stages: Stages) -> None:
        """Adds an answered request."""
        self.last.append(stages)
        for name, seconds in zip(STAGES, astuple(stages), strict=True):
            self._counts[name][bisect_left(BOUNDS, seconds)] += 1
            self._sums[name] += seconds

    def quantiles(self) -> dict[str, dict[str, float]]:
        """By stage: p50, p90 and p99 over the last requests; empty without requests."""
        return {name: _quantiles([getattr(each, name) for each in self.last]) for name in STAGES}

    def histograms(self) -> dict[str, dict[str, Any]]:
        """By stage: `counts`, the number of requests up to each of `bounds` and then of all, and `sum` in seconds."""
        return {
            name: {"bounds": BOUNDS, "counts": list(accumulate(self._counts[name])), "sum": self._sums[name]}
            for name in STAGES
        }


def _quantiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)}
