"""What came of a load: times of requests, and the shares of them that meet their targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.workload.slo import Slo, finite

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors by which both latency targets are scaled."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

STAGES = ("queue", "prefill", "transfer", "decode")


@dataclass(frozen=True)
class Used:
    """What an instance did.

    busy       seconds of steps
    num_steps  steps
    num_out    steps outside of the range that its latency model is known for
    counters   of its engine, and of its tiers
    """

    name: str
    role: str
    busy: float
    num_steps: int
    num_out: int
    counters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Outcome:
    """Requests by index, in the order of the workload. Times in seconds since the beginning.

    arrived     when each came
    first       its first token; inf if it failed before
    last        its last token; inf if it failed
    num_out     tokens of its answer
    num_in      tokens of its prompt
    num_cached  prompt tokens that were cached
    by_tier     the same by tier
    stages      seconds of each stage by name; nan where unknown
    used        instances
    seconds     time of the last token of all
    begun       time of the first arrival, if requests were left out; None: that of the first one here
    """

    arrived: Floats
    first: Floats
    last: Floats
    num_out: Ints
    num_in: Ints
    num_cached: Ints
    by_tier: Mapping[str, Ints]
    stages: Mapping[str, Floats]
    used: tuple[Used, ...]
    seconds: float
    begun: float | None = None

    def within(self, span: tuple[float, float]) -> NDArray[np.bool_]:
        """Which requests arrived from one time on and before another; all if none did."""
        found = (self.arrived >= span[0]) & (self.arrived < span[1])
        return found if found.any() else np.ones_like(found)

    def only(self, kept: NDArray[np.bool_]) -> Outcome:
        """Some of the requests. Instances and the duration remain those of all. kept: bool [n]"""
        if kept.all():
            return self
        arrays = ("arrived", "first", "last", "num_out", "num_in", "num_cached")
        found: dict[str, Any] = {name: getattr(self, name)[kept] for name in arrays}
        for name in ("by_tier", "stages"):
            found[name] = {key: each[kept] for key, each in getattr(self, name).items()}
        return replace(self, **found, begun=self._begun)

    def counting(self, span: tuple[float, float]) -> Outcome:
        """The requests that arrived within a span: see `Workload.counted`."""
        return self.only(self.within(span))

    @property
    def offered(self) -> float:
        """Requests/s that arrived, infinite if all did at once."""
        seconds = float(self.arrived.max() - self.arrived.min()) if len(self.arrived) else 0.0
        return (len(self.arrived) - 1) / seconds if seconds else math.inf

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last token. A workload may begin at any time."""
        return self.seconds - self._begun

    @property
    def tokens_per_second(self) -> float:
        """Tokens of these requests' answers over the seconds from their first arrival to their last token."""
        answered = np.isfinite(self.last)
        seconds = float(self.last[answered].max() - self.arrived.min()) if answered.any() else 0.0
        return float(self.num_out[answered].sum()) / seconds if seconds else 0.0

    @property
    def _begun(self) -> float:
        return float(self.arrived.min(initial=self.seconds)) if self.begun is None else self.begun

    @property
    def ttft(self) -> Floats:
        """Seconds to the first token (DistServe, section 2.1)."""
        return self.first - self.arrived

    @property
    def tpot(self) -> Floats:
        """Seconds per token after the first one; 0 for answers of one token."""
        with np.errstate(invalid="ignore"):
            found = (self.last - self.first) / np.maximum(1, self.num_out - 1)
        return np.where(np.isfinite(self.last), found, np.inf)

    def met(self, slo: Slo) -> NDArray[np.bool_]:
        """Which requests meet both targets. Those that failed meet none."""
        return np.asarray((self.ttft <= slo.ttft) & (self.tpot <= slo.tpot) & np.isfinite(self.last))

    def attainment(self, slo: Slo) -> float:
        """Share of requests that meet both targets: jointly, not the smaller one of two shares."""
        return float(self.met(slo).mean()) if len(self.arrived) else math.nan

    @property
    def num_failed(self) -> int:
        """Requests without an answer."""
        return int((~np.isfinite(self.last)).sum())

    @property
    def cached(self) -> float:
        """Share of the prompts' tokens that were cached anywhere."""
        return float(self.num_cached.sum() / max(1, int(self.num_in.sum())))

    @property
    def hit_rate(self) -> dict[str, float]:
        """Share of the prompts' tokens that came from each tier."""
        total = max(1, int(self.num_in.sum()))
        return {tier: float(counts.sum() / total) for tier, counts in self.by_tier.items()}

    def utilisation(self) -> dict[str, float]:
        """Share of the time in which each instance computed."""
        return {each.name: each.busy / self.duration if self.duration else 0.0 for each in self.used}

    def shares(self) -> dict[str, float]:
        """Share of the latency of answered requests in each stage that is known."""
        answered = np.isfinite(self.last)
        total = float((self.last - self.arrived)[answered].sum())
        known = {name: found for name, each in self.stages.items() if not np.isnan(found := each[answered]).all()}
        return {name: float(np.nansum(seconds)) / total if total else 0.0 for name, seconds in known.items()}

    def times(self) -> dict[str, dict[str, float | None]]:
        """Mean and quantiles of TTFT and TPOT, in seconds, over the answered requests; None without any."""
        answered = np.isfinite(self.last)
        has_tokens = answered & (self.num_out > 1)
        found: dict[str, dict[str, float | None]] = {}
        for name, values in (("ttft", self.ttft[answered]), ("tpot", self.tpot[has_tokens])):
            found[name] = {"mean": float(values.mean()) if len(values) else None}
            for quantile, share in QUANTILES.items():
                found[name][quantile] = float(np.quantile(values, share)) if len(values) else None
        return found

    def facts(self, rate: float, slo: Slo, origin: str) -> dict[str, Any]:
        """All numbers, for JSON.

        rate    that was asked for
        origin  of the latencies
        """
        return {
            "rate": finite(rate),
            "requests": len(self.arrived),
            "failed": self.num_failed,
            "attainment": self.attainment(slo) if slo.has_targets else None,
            "attainment_by_scale": {
                f"{scale:g}": self.attainment(slo.scaled(scale)) for scale in (SCALES if slo.has_targets else ())
            },
            **self.times(),
            "offered": finite(self.offered),
            "seconds": self.duration,
            "tokens_per_second": self.tokens_per_second,
            "utilisation": self.utilisation(),
            "hit_rate": self.hit_rate,
            "shares": {name: share for name, share in self.shares().items() if math.isfinite(share)},
            "preemptions": sum(int(str(each.counters.get("preemptions", 0))) for each in self.used),
            "steps": sum(each.num_steps for each in self.used),
            "steps_outside": sum(each.num_out for each in self.used),
            "origin": origin,
        }
