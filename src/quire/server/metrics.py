"""The metrics of `/metrics`: the engine's counters, read at the scrape, and request times, observed at their end.

Nothing is recorded per token, so a stream costs the same with and without metrics.
"""

from __future__ import annotations

import asyncio
import functools
import math
import platform
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

from quire.config import SloConfig
from quire.server.engine_metrics import EngineCollector
from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.outputs import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Buckets from one step of a small model on a CPU to a long answer of a large model.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)

# Buckets from an unnoticeable delay to a server that seems to have stopped.
LAG_SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5,
    10, 30,
)  # fmt: skip
LAG_PERIOD = 0.05
"""Seconds between samples of the loop's lag: 20 timers a second, 0.02 percent of a core."""
LAG_WINDOW = 60.0
"""Minimum seconds for which the worst lag is shown; the maximum is twice that."""

RECENT = 1000
"""Number of the latest requests in the gauge of attainment."""

SHARES = tuple(count / 10 for count in range(1, 11))


class Metrics:
    """The metrics of one server, in their own registry, so that one process can run two servers."""

    def __init__(self, stats: Callable[[], dict[str, Any]], slo: SloConfig | None = None) -> None:
        self.registry = CollectorRegistry()
        self.slo = SloMetrics(slo or SloConfig(), self.registry)
        self.registry.register(EngineCollector(stats))
        ProcessCollector(registry=self.registry)
        counter = functools.partial(Counter, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry)
        Info("quire_build", "The running version.", registry=self.registry).info(
            {"version": __version__, "python": platform.python_version()}
        )
        self.first_token = histogram(
            "quire_time_to_first_token_seconds", "Time from arrival to the first token.", buckets=SECONDS
        )
        self.per_token = histogram(
            "quire_time_per_output_token_seconds",
            "Mean time of a request's tokens after its first.",
            buckets=TOKEN_SECONDS,
        )
        self.whole = histogram("quire_request_seconds", "Time from arrival to the last token.", buckets=SECONDS)
        self.kept = histogram(
            "quire_retention_kept_ratio",
            "Share of a prompt's tokens, over all heads, that retention kept.",
            buckets=SHARES,
        )
        self.prompt_tokens = counter("quire_prompt_tokens", "Prompt tokens.")
        self.generation_tokens = counter("quire_generation_tokens", "Generated tokens.")
        self.cached_tokens = counter("quire_cached_tokens", "Prompt tokens found in the cache, by tier.", ["tier"])
        self.finished = counter(
            "quire_requests_finished", "Choices by how they ended, without refused requests.", ["reason"]
        )
        self.responses = counter(
            "quire_http_responses",
            "HTTP responses by route and status; 499: the client left; route none: refused before a request.",
            ["route", "status"],
        )
        self.lag = histogram("quire_event_loop_lag_seconds", "Delay of the server's event loop.", buckets=LAG_SECONDS)
        self.worst_lag = Gauge(
            "quire_event_loop_lag_worst_seconds",
            "The largest lag of the last one to two minutes.",
            registry=self.registry,
        )

    def refused(self, status: int) -> None:
        """Counts a connection that was refused before it sent a request."""
        self.responses.labels("none", str(status)).inc()

    async def watch_lag(self) -> None:
        """Observes the lag of the running event loop until cancelled."""
        loop = asyncio.get_running_loop()
        before, worst, begun = 0.0, 0.0, loop.time()
        while True:
            due = loop.time() + LAG_PERIOD
            await asyncio.sleep(LAG_PERIOD)
            now = loop.time()
            lag = max(0.0, now - due)
            self.lag.observe(lag)
            if now - begun > LAG_WINDOW:
                before, worst, begun = worst, 0.0, now
            worst = max(worst, lag)
            self.worst_lag.set(max(before, worst))

    def text(self) -> bytes:
        """The exposition in Prometheus's text format."""
        return generate_latest(self.registry)


class RequestTimer:
    """Times and counts of one engine request, from its arrival. begun: whether the engine has sent output for it."""

    def __init__(self, metrics: Metrics, arrived: float, num_prompt_tokens: int, num_choices: int) -> None:
        self.metrics = metrics
        self.arrived = arrived
        self.num_prompt_tokens = num_prompt_tokens
        self.unfinished = num_choices
        self.num_choices = num_choices
        self.num_tokens = 0
        self.begun = False
        self.first: float | None = None
        self.last = 0.0
        self.kept: float | None = None

    def record(self, item: RequestOutput) -> None:
        """Count one item of the engine."""
        self.begun = True
        for output in item.outputs:
            self.num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self.unfinished -= 1
                self.metrics.finished.labels(output.finish_reason).inc()
        if self.num_tokens:
            self.last = time.monotonic()
            self.first = self.first or self.last
        if item.kept_fraction is not None:
            self.kept = item.kept_fraction

    def end(self, reason: str | None) -> None:
        """Records the request. Unfinished choices count as ended for `reason`; None: refused, counted nowhere."""
        now = time.monotonic()
        metrics, steps = self.metrics, self.num_tokens / self.num_choices - 1
        if self.unfinished > 0 and reason is not None:
            metrics.finished.labels(reason).inc(self.unfinished)
        metrics.generation_tokens.inc(self.num_tokens)
        if self.first is not None:
            metrics.prompt_tokens.inc(self.num_prompt_tokens)
            metrics.first_token.observe(self.first - self.arrived)
            if self.kept is not None:
                metrics.kept.observe(self.kept)
            if steps >= 1:
                metrics.per_token.observe((now - self.first) / steps)
        if self.unfinished <= 0:
            metrics.whole.observe(now - self.arrived)
            first = self.first or now
            metrics.slo.record(first - self.arrived, (self.last - first) / steps if steps > 0 else None)
        elif reason == "error":
            metrics.slo.record(None, None)


class SloMetrics:
    """Counts requests by the latency targets that they meet; a request attains its targets only if it meets both.
    Without a target these metrics do not exist.

    TTFT is the time from arrival to the first token. TPOT is the mean time of the tokens after it: an answer of one
    token meets every target of TPOT. A failed request meets no target. Refused requests and requests whose client left
    do not count.
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
        """The share of the latest requests that met both targets; NaN without requests."""
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
