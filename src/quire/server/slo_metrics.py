"""Latency targets: how many requests meet them. A request attains its targets only if it meets both."""

from __future__ import annotations

import functools
import math
from collections import deque
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge

if TYPE_CHECKING:
    from quire.config import SloConfig

RECENT = 1000
"""Requests that the gauge of attainment is about."""


class SloMetrics:
    """Counts requests by the targets that they meet. There are no metrics without a target.

    TTFT is the time from arrival to the first token. TPOT is the mean time of the tokens after it: an answer of one
    token meets every target of TPOT. A request that failed meets no target. Refused requests do not count, nor do those
    whose client left.
    """

    def __init__(self, config: SloConfig, registry: CollectorRegistry) -> None:
        self.config = config
        self._recent: deque[bool] = deque(maxlen=RECENT)
        self._requests: Counter | None = None
        targets = {"ttft": config.ttft, "tpot": config.tpot}
        if all(each is None for each in targets.values()):
            return
        gauge = functools.partial(Gauge, registry=registry)
        target = gauge("quire_slo_target_seconds", "Latency targets.", ["target"])
        for name, seconds in targets.items():
            if seconds is not None:
                target.labels(name).set(seconds)
        wanted = gauge("quire_slo_attainment_target_ratio", "Share of requests that should meet both targets.")
        wanted.set(config.attainment)
        self._requests = Counter(
            "quire_slo_requests",
            "Requests by the targets that they met: both, only one of them, or neither.",
            ["met"],
            registry=registry,
        )
        for met in ("both", "ttft", "tpot", "neither"):
            self._requests.labels(met)
        text = f"Share of the last {RECENT:,} requests that met both targets."
        attained = gauge("quire_slo_attainment_ratio", text)
        attained.set_function(self.attainment)

    def attainment(self) -> float:
        """The share of the last requests that met both targets; NaN without any."""
        return sum(self._recent) / len(self._recent) if self._recent else math.nan

    def record(self, ttft: float | None, tpot: float | None) -> None:
        """Counts a request. ttft: None if it failed. tpot: None if it has one token."""
        if self._requests is None:
            return
        is_soon = ttft is not None and (self.config.ttft is None or ttft <= self.config.ttft)
        is_fast = ttft is not None and (tpot is None or self.config.tpot is None or tpot <= self.config.tpot)
        met = {(True, True): "both", (True, False): "ttft", (False, True): "tpot"}.get((is_soon, is_fast), "neither")
        self._requests.labels(met).inc()
        self._recent.append(is_soon and is_fast)
