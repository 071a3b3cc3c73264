"""Metrics from an engine's counters, read at the scrape: requests, cache, tiers, offloading and a cluster.

Metrics of tiers, offloading, a calibration and a cluster exist only if the engine has these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

CALIBRATION_STATES = ("calibrating", "waiting", "taken", "failed")

COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily
Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
Rows = Mapping[str, tuple[Family, str, str]]
"""Kind, name and description of metrics, by the name of their counter."""

_ENGINE: Rows = {
    "running": (GAUGE, "quire_requests_running", "Requests in the batch."),
    "waiting": (GAUGE, "quire_requests_waiting", "Requests in the queue."),
    "preemptions": (COUNTER, "quire_preemptions", "Preempted requests."),
    "steps": (COUNTER, "quire_steps", "Engine steps."),
    "decode_tokens": (COUNTER, "quire_decode_tokens", "Tokens decoded by the engine."),
    "replayed_tokens": (COUNTER, "quire_replayed_tokens", "Tokens computed again after a preemption."),
}
_CACHE: Rows = {
    "bytes_total": (GAUGE, "quire_cache_capacity_bytes", "Size of the cache's arena."),
    "bytes_peak": (GAUGE, "quire_cache_peak_bytes", "Most bytes ever used at once."),
    "bytes_pinned": (GAUGE, "quire_cache_pinned_bytes", "Bytes, cached or used, held by pins."),
    "bytes_saved": (
        GAUGE,
        "quire_cache_saved_bytes",
        "Additional bytes that running requests would need without sharing.",
    ),
    "bytes_evicted": (COUNTER, "quire_cache_evicted_bytes", "Bytes of evicted prefixes."),
    "bytes_retention_freed": (
        COUNTER,
        "quire_retention_freed_bytes",
        "Bytes that retention freed in running requests.",
    ),
}
_TIERS: Rows = {
    "bytes": (GAUGE, "quire_tier_bytes", "Bytes that a tier holds."),
    "cap_bytes": (GAUGE, "quire_tier_capacity_bytes", "Most bytes that a tier may hold, of all engines together."),
    "chunks": (GAUGE, "quire_tier_chunks", "Chunks of 64 tokens that a tier holds."),
    "is_on": (GAUGE, "quire_tier_on", "Whether a tier is read and written; 0 while its disk fails."),
    "bytes_read": (COUNTER, "quire_tier_fetched_bytes", "Bytes read from a tier."),
    "bytes_written": (COUNTER, "quire_tier_demoted_bytes", "Bytes written to a tier."),
    "num_failed": (COUNTER, "quire_tier_failed_reads", "Reads of runs that failed, damaged runs included."),
    "num_refused": (COUNTER, "quire_tier_refused_runs", "Runs that a tier had no room for."),
    "num_collected": (COUNTER, "quire_tier_collected_files", "Files that a tier removed to make room."),
}
_MOVES: Rows = {
    "fetched": (COUNTER, "quire_fetched_chunks", "Chunks that came from a tier."),
    "wasted": (COUNTER, "quire_wasted_chunks", "Chunks that were read from a tier and never used."),
    "computed_instead": (
        COUNTER,
        "quire_computed_instead_chunks",
        "Chunks of a tier that were computed because that was faster.",
    ),
    "failed_transfers": (
        COUNTER,
        "quire_failed_fetches",
        "Fetches that ended with an error; their chunks were computed.",
    ),
    "lost": (COUNTER, "quire_lost_chunks", "Evicted chunks that no tier took."),
}
_OFFLOADED: Rows = {
    "weights_bytes_read": (COUNTER, "quire_offload_weights_read_bytes", "Bytes of weights read from the disk."),
    "weights_wait_seconds": (COUNTER, "quire_offload_wait_seconds", "Seconds that computing waited for weights."),
    "cache_bytes_read": (COUNTER, "quire_offload_cache_read_bytes", "Bytes of the offloaded cache read from the disk."),
    "cache_bytes_written": (COUNTER, "quire_offload_cache_written_bytes", "Bytes of the cache written to the disk."),
    "hidden_bytes_read": (COUNTER, "quire_offload_activations_read_bytes", "Bytes of activations read from the disk."),
    "hidden_bytes_written": (
        COUNTER,
        "quire_offload_activations_written_bytes",
        "Bytes of activations written to the disk.",
    ),
}
_LOADS: Rows = {
    "num_running": (GAUGE, "quire_instance_requests_running", "Sequences in an instance's batch."),
    "num_waiting": (
        GAUGE,
        "quire_instance_requests_waiting",
        "Sequences of an instance that wait for room or their turn.",
    ),
    "num_held": (GAUGE, "quire_instance_requests_held", "Sequences whose receiver has not taken their cache yet."),
    "prompt_rows": (GAUGE, "quire_instance_prompt_rows_queued", "Prompt rows that an instance has still to compute."),
    "free_bytes": (
        GAUGE,
        "quire_instance_cache_free_bytes",
        "Bytes of an instance's cache that are free or can be evicted.",
    ),
    "total_bytes": (GAUGE, "quire_instance_cache_capacity_bytes", "Size of an instance's cache."),
}
_COUNTS: Rows = {
    "attempts": (COUNTER, "quire_cluster_attempts", "Attempts at requests."),
    "again": (COUNTER, "quire_cluster_failed_attempts", "Attempts that failed; another one may follow."),
    "again_streamed": (
        COUNTER,
        "quire_cluster_failed_attempts_streamed",
        "Failed attempts whose client had tokens already.",
    ),
    "expired": (COUNTER, "quire_cluster_expired_attempts", "Attempts that were given up for want of a token in time."),
    "down": (COUNTER, "quire_cluster_instances_ended", "Instances that failed, or that were drained."),
    "failed": (COUNTER, "quire_cluster_requests_failed", "Sequences whose client got an error."),
    "ended": (COUNTER, "quire_cluster_requests_ended", "Sequences that ended without one, aborted ones included."),
}


class EngineCollector(Collector):
    """The engine's own counters at the time of the scrape."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self.stats = stats

    def collect(self) -> Iterable[Metric]:
        """All metrics of the engine (prometheus_client)."""
        stats = self.stats()
        yield from _plain(_ENGINE, stats)
        computed, cached = stats["prefill_tokens_computed"], stats["prefill_tokens_cached"]
        sources = [("computed", computed), ("cached", cached)]
        yield _labelled(COUNTER, "quire_prefill_tokens", "Prompt tokens by source.", "source", sources)
        text = "Share of the prompt tokens since start that came from the cache."
        yield GAUGE("quire_prefix_cache_hit_rate", text, hit_rate(cached, computed))
        cache = stats["cache"]
        states = [(name, cache[f"bytes_{name}"]) for name in ("used", "cached", "free")]
        yield _labelled(GAUGE, "quire_cache_bytes", "Bytes of the arena by state.", "state", states)
        yield from _plain(_CACHE, cache)
        if (report := stats.get("calibration")) is not None:
            yield from _calibration(report)
        if tiers := stats.get("tiers"):
            yield from _by_label(_TIERS, "tier", tiers)
            yield from _moves(tiers, stats["moves"])
        offload = stats.get("offload", {})
        yield from _plain({name: row for name, row in _OFFLOADED.items() if name in offload}, offload)
        if (cluster := stats.get("cluster")) is not None:
            yield from _cluster(cluster)


def hit_rate(cached: int, computed: int) -> float:
    """The share of prompt tokens that came from the cache; 0 without prompt tokens."""
    return cached / (cached + computed) if cached + computed else 0.0


def _plain(rows: Rows, counters: Mapping[str, Any]) -> Iterable[Metric]:
    for counter, (family, name, text) in rows.items():
        yield family(name, text, counters.get(counter, 0))


def _by_label(rows: Rows, label: str, counters: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    """Metrics with one value per label, such as per tier. counters: by the label's value."""
    for counter, (family, name, text) in rows.items():
        yield _labelled(family, name, text, label, ((each, own.get(counter, 0)) for each, own in counters.items()))


def _labelled(family: Family, name: str, text: str, labels: str, samples: Iterable[tuple[Any, ...]]) -> Metric:
    """A metric with labels. labels: their names, separated by spaces. samples: the labels' values, then the number."""
    found = family(name, text, labels=labels.split())
    for *said, value in samples:
        found.add_metric(said, float(value))
    return found


def _calibration(report: Mapping[str, Any]) -> Iterable[Metric]:
    """Metrics of the calibration for a codec that the server began without."""
    states = [(report["codec"], name, name == report["state"]) for name in CALIBRATION_STATES]
    text = "1 for the state of the calibration beside requests."
    yield _labelled(GAUGE, "quire_calibration_state", text, "codec state", states)
    yield GAUGE("quire_calibration_done_ratio", "Share of the calibration that is done.", report["done"])
    yield GAUGE("quire_calibration_seconds_left", "Estimated seconds until it is done.", report["seconds_left"])


def _moves(tiers: Mapping[str, Mapping[str, Any]], moves: Mapping[str, Any]) -> Iterable[Metric]:
    """Metrics of the chunks that move between tiers and the arena."""
    seconds = [
        (name, operation, each.get(counter, 0.0))
        for name, each in tiers.items()
        for operation, counter in (("read", "seconds_reading"), ("write", "seconds_writing"))
    ]
    text = "Seconds of reading from and writing to a tier."
    yield _labelled(COUNTER, "quire_tier_seconds", text, "tier operation", seconds)
    yield from _plain(_MOVES, moves)
    swapped = [("out", moves["swapped_out"]), ("in", moves["swapped_in"])]
    yield _labelled(COUNTER, "quire_swapped_chunks", "Chunks of preempted requests.", "direction", swapped)


def _cluster(cluster: Mapping[str, Any]) -> Iterable[Metric]:
    """Metrics of instances, their router, and stages."""
    instances = {each["place"]: each for each in cluster["instances"]}
    up = [(place, each["health"] == "serving") for place, each in instances.items()]
    yield _labelled(GAUGE, "quire_instance_up", "Whether an instance gets requests.", "instance", up)
    roles = [(place, each["role"], 1.0) for place, each in instances.items()]
    yield _labelled(GAUGE, "quire_instance_role", "1 for an instance's role.", "instance role", roles)
    attempts = [(place, each["attempts"]) for place, each in instances.items()]
    text = "Attempts that an instance has a part in."
    yield _labelled(GAUGE, "quire_instance_attempts", text, "instance", attempts)
    loads = {place: each["load"] for place, each in instances.items() if each["load"] is not None}
    yield from _by_label(_LOADS, "instance", loads)
    yield from _plain(_COUNTS, cluster["counts"])
    text = "Seconds of answered requests by stage: see docs/guide/machines.md."
    times = HistogramMetricFamily("quire_stage_seconds", text, labels=["stage"])
    for stage, found in cluster["histograms"].items():
        bounds = [*map(str, map(float, found["bounds"])), "+Inf"]
        times.add_metric([stage], list(zip(bounds, found["counts"], strict=True)), found["sum"])
    yield times
