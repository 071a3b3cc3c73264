"""The metrics of `/metrics`: the engine's counters, read at the scrape, and request times, observed at their end.

Nothing is recorded per token, so a stream costs the same with and without metrics.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.config import SloConfig
from quire.server.cluster_metrics import cluster_metrics
from quire.server.slo_metrics import SloMetrics
from quire.server.tier_metrics import offload_metrics, tier_metrics
from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.outputs import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# From one step of a small model on a CPU to a long answer of a large one.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)

# From an unnoticeable delay to a server that looks dead.
LAG_SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5,
    10, 30,
)  # fmt: skip
LAG_PERIOD = 0.05
"""Seconds between samples of the loop's lag: 20 timers a second, 0.02 percent of a core."""
LAG_WINDOW = 60.0
"""Minimum seconds for which the worst lag is shown; the maximum is twice that."""

CALIBRATION_STATES = ("calibrating", "waiting", "taken", "failed")

SHARES = tuple(count / 10 for count in range(1, 11))


def hit_rate(cached: int, computed: int) -> float:
    """The share of prompt tokens that came from the cache; 0 without prompt tokens."""
    return cached / (cached + computed) if cached + computed else 0.0


class Metrics:
    """The metrics of one server, in their own registry, so that one process can run two servers."""

    def __init__(self, stats: Callable[[], dict[str, Any]], slo: SloConfig | None = None) -> None:
        self.registry = CollectorRegistry()
        self.slo = SloMetrics(slo or SloConfig(), self.registry)
        self.registry.register(_EngineCollector(stats))
        ProcessCollector(registry=self.registry)
        Info("quire_build", "The running version.", registry=self.registry).info(
            {"version": __version__, "python": platform.python_version()}
        )
        self.first_token = Histogram(
            "quire_time_to_first_token_seconds",
            "Time from arrival to the first token.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.per_token = Histogram(
            "quire_time_per_output_token_seconds",
            "Mean time of a request's tokens after its first.",
            buckets=TOKEN_SECONDS,
            registry=self.registry,
        )
        self.whole = Histogram(
            "quire_request_seconds", "Time from arrival to the last token.", buckets=SECONDS, registry=self.registry
        )
        self.kept = Histogram(
            "quire_retention_kept_ratio",
            "Share of a prompt's tokens, over all heads, that retention kept.",
            buckets=SHARES,
            registry=self.registry,
        )
        self.prompt_tokens = Counter("quire_prompt_tokens", "Prompt tokens.", registry=self.registry)
        self.generation_tokens = Counter("quire_generation_tokens", "Generated tokens.", registry=self.registry)
        self.cached_tokens = Counter(
            "quire_cached_tokens", "Prompt tokens found in the cache, by tier.", ["tier"], registry=self.registry
        )
        self.finished = Counter(
            "quire_requests_finished",
            "Choices by how they ended, without refused requests.",
            ["reason"],
            registry=self.registry,
        )
        self.responses = Counter(
            "quire_http_responses",
            "HTTP responses by route and status; 499: the client left; route none: refused before a request.",
            ["route", "status"],
            registry=self.registry,
        )

        self.lag = Histogram(
            "quire_event_loop_lag_seconds",
            "Delay of the server's event loop.",
            buckets=LAG_SECONDS,
            registry=self.registry,
        )
        self.worst_lag = Gauge(
            "quire_event_loop_lag_worst_seconds", "The largest lag of the last one to two minutes.",
            registry=self.registry,
        )  # fmt: skip

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
    """Times and counts of one engine request, from its arrival."""

    def __init__(self, metrics: Metrics, arrived: float, num_prompt_tokens: int, num_choices: int) -> None:
        self.metrics = metrics
        self.arrived = arrived
        self.num_prompt_tokens = num_prompt_tokens
        self.unfinished = num_choices
        self.num_choices = num_choices
        self.num_tokens = 0
        self.num_items = 0
        self.first: float | None = None
        self.last = 0.0
        self.kept: float | None = None

    def record(self, item: RequestOutput) -> None:
        """Count one item of the engine."""
        self.num_items += 1
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

    @property
    def begun(self) -> bool:
        """Whether the engine has sent output for the request."""
        return self.num_items > 0

    def end(self, reason: str | None) -> None:
        """Records the request. Unfinished choices count as ended for `reason`; None: refused, counted nowhere."""
        now = time.monotonic()
        metrics = self.metrics
        if self.unfinished > 0 and reason is not None:
            metrics.finished.labels(reason).inc(self.unfinished)
        metrics.generation_tokens.inc(self.num_tokens)
        if self.first is not None:
            metrics.prompt_tokens.inc(self.num_prompt_tokens)
            metrics.first_token.observe(self.first - self.arrived)
            if self.kept is not None:
                metrics.kept.observe(self.kept)
            steps = self.num_tokens / self.num_choices - 1
            if steps >= 1:
                metrics.per_token.observe((now - self.first) / steps)
        if self.unfinished <= 0:
            metrics.whole.observe(now - self.arrived)
            self._meet(now)
        elif reason == "error":
            metrics.slo.record(None, None)

    def _meet(self, now: float) -> None:
        """Counts an answered request by the latency targets that it meets."""
        first = self.first or now
        steps = self.num_tokens / self.num_choices - 1
        self.metrics.slo.record(first - self.arrived, (self.last - first) / steps if steps > 0 else None)


class _EngineCollector(Collector):
    """The engine's own counters at the time of the scrape."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self.stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self.stats()
        yield GaugeMetricFamily("quire_requests_running", "Requests in the batch.", stats["running"])
        yield GaugeMetricFamily("quire_requests_waiting", "Requests in the queue.", stats["waiting"])
        yield CounterMetricFamily("quire_preemptions", "Preempted requests.", stats["preemptions"])
        yield CounterMetricFamily("quire_steps", "Engine steps.", stats["steps"])
        yield CounterMetricFamily("quire_decode_tokens", "Tokens decoded by the engine.", stats["decode_tokens"])
        yield CounterMetricFamily(
            "quire_replayed_tokens", "Tokens computed again after a preemption.", stats["replayed_tokens"]
        )
        computed, cached = stats["prefill_tokens_computed"], stats["prefill_tokens_cached"]
        prefill = CounterMetricFamily("quire_prefill_tokens", "Prompt tokens by source.", labels=["source"])
        prefill.add_metric(["computed"], computed)
        prefill.add_metric(["cached"], cached)
        yield prefill
        yield GaugeMetricFamily(
            "quire_prefix_cache_hit_rate",
            "Share of the prompt tokens since start that came from the cache.",
            hit_rate(cached, computed),
        )
        cache = stats["cache"]
        yield GaugeMetricFamily("quire_cache_capacity_bytes", "Size of the cache's arena.", cache["bytes_total"])
        yield GaugeMetricFamily("quire_cache_peak_bytes", "Most bytes ever used at once.", cache["bytes_peak"])
        state = GaugeMetricFamily("quire_cache_bytes", "Bytes of the arena by state.", labels=["state"])
        for name in ("used", "cached", "free"):
            state.add_metric([name], cache[f"bytes_{name}"])
        yield state
        yield GaugeMetricFamily(
            "quire_cache_pinned_bytes", "Bytes, cached or used, held by pins.", cache["bytes_pinned"]
        )
        yield GaugeMetricFamily(
            "quire_cache_saved_bytes",
            "Additional bytes that running requests would need without sharing.",
            cache["bytes_saved"],
        )
        yield CounterMetricFamily(
            "quire_cache_evicted_bytes",
            "Bytes of evicted prefixes.",
            cache["bytes_evicted"],
        )
        yield CounterMetricFamily(
            "quire_retention_freed_bytes",
            "Bytes that retention freed in running requests.",
            cache["bytes_retention_freed"],
        )
        yield from _calibration_metrics(stats)
        yield from tier_metrics(stats)
        yield from offload_metrics(stats)
        yield from cluster_metrics(stats)


def _calibration_metrics(stats: dict[str, Any]) -> Iterable[Metric]:
    """Of a codec that the server began without."""
    report = stats.get("calibration")
    if report is None:
        return
    state = GaugeMetricFamily(
        "quire_calibration_state", "1 for the state of the calibration beside requests.", labels=["codec", "state"]
    )
    for name in CALIBRATION_STATES:
        state.add_metric([report["codec"], name], float(name == report["state"]))
    yield state
    yield GaugeMetricFamily("quire_calibration_done_ratio", "Share of the calibration that is done.", report["done"])
    yield GaugeMetricFamily(
        "quire_calibration_seconds_left", "Estimated seconds until it is done.", report["seconds_left"]
    )
