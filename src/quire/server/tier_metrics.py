"""The metrics of tiers and of offloading, from the engine's counters at the scrape. None is there without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_GAUGES = {
    "bytes": ("quire_tier_bytes", "Bytes that a tier holds."),
    "cap_bytes": ("quire_tier_capacity_bytes", "Most bytes that a tier may hold, of all engines together."),
    "chunks": ("quire_tier_chunks", "Chunks of 64 tokens that a tier holds."),
    "is_on": ("quire_tier_on", "Whether a tier is read and written; 0 while its disk fails."),
}
_COUNTERS = {
    "bytes_read": ("quire_tier_fetched_bytes", "Bytes read from a tier."),
    "bytes_written": ("quire_tier_demoted_bytes", "Bytes written to a tier."),
    "num_failed": ("quire_tier_failed_reads", "Reads of runs that failed, damaged runs included."),
    "num_refused": ("quire_tier_refused_runs", "Runs that a tier had no room for."),
    "num_collected": ("quire_tier_collected_files", "Files that a tier removed to make room."),
}
_MOVES = {
    "fetched": ("quire_fetched_chunks", "Chunks that came from a tier."),
    "wasted": ("quire_wasted_chunks", "Chunks that were read from a tier and used by nobody."),
    "computed_instead": (
        "quire_computed_instead_chunks",
        "Chunks of a tier that were computed, being faster.",
    ),
    "failed_transfers": ("quire_failed_fetches", "Fetches that ended with an error; their chunks were computed."),
    "lost": ("quire_lost_chunks", "Evicted chunks that no tier took."),
}
_OFFLOADED = {
    "weights_bytes_read": ("quire_offload_weights_read_bytes", "Bytes of weights read from the disk."),
    "weights_wait_seconds": ("quire_offload_wait_seconds", "Seconds that computing waited for weights."),
    "cache_bytes_read": ("quire_offload_cache_read_bytes", "Bytes of the offloaded cache read from the disk."),
    "cache_bytes_written": ("quire_offload_cache_written_bytes", "Bytes of the cache written to the disk."),
    "hidden_bytes_read": ("quire_offload_activations_read_bytes", "Bytes of activations read from the disk."),
    "hidden_bytes_written": ("quire_offload_activations_written_bytes", "Bytes of activations written to the disk."),
}


def offload_metrics(stats: Mapping[str, Any]) -> Iterable[Metric]:
    """The metrics of offloading; none without it."""
    for field, value in stats.get("offload", {}).items():
        if field in _OFFLOADED:
            yield CounterMetricFamily(*_OFFLOADED[field], value)


def tier_metrics(stats: Mapping[str, Any]) -> Iterable[Metric]:
    """The metrics of an engine's `stats`."""
    tiers: Mapping[str, Mapping[str, Any]] = stats.get("tiers", {})
    if not tiers:
        return
    for field, (name, text) in _GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=["tier"])
        for tier, found in tiers.items():
            gauge.add_metric([tier], float(found[field]))
        yield gauge
    for field, (name, text) in _COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=["tier"])
        for tier, found in tiers.items():
            counter.add_metric([tier], found.get(field, 0))
        yield counter
    seconds = CounterMetricFamily(
        "quire_tier_seconds", "Seconds of reading from and writing to a tier.", labels=["tier", "operation"]
    )
    for tier, found in tiers.items():
        seconds.add_metric([tier, "read"], found.get("seconds_reading", 0.0))
        seconds.add_metric([tier, "write"], found.get("seconds_writing", 0.0))
    yield seconds
    for field, (name, text) in _MOVES.items():
        yield CounterMetricFamily(name, text, stats["moves"][field])
    swapped = CounterMetricFamily("quire_swapped_chunks", "Chunks of preempted requests.", labels=["direction"])
    swapped.add_metric(["out"], stats["moves"]["swapped_out"])
    swapped.add_metric(["in"], stats["moves"]["swapped_in"])
    yield swapped
