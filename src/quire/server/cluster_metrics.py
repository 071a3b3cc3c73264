"""The metrics of a cluster's instances, of its router, and of stages. None is there with one engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

_LOADS = {
    "num_running": ("quire_instance_requests_running", "Sequences in an instance's batch."),
    "num_waiting": ("quire_instance_requests_waiting", "Sequences of an instance that wait for room or their turn."),
    "num_held": ("quire_instance_requests_held", "Sequences whose receiver has not taken their cache yet."),
    "prompt_rows": ("quire_instance_prompt_rows_queued", "Prompt rows that an instance has still to compute."),
    "free_bytes": ("quire_instance_cache_free_bytes", "Bytes of an instance's cache that are free or can be evicted."),
    "total_bytes": ("quire_instance_cache_capacity_bytes", "Size of an instance's cache."),
}
_COUNTS = {
    "attempts": ("quire_cluster_attempts", "Attempts at requests."),
    "again": ("quire_cluster_failed_attempts", "Attempts that failed, and that another one may follow."),
    "again_streamed": ("quire_cluster_failed_attempts_streamed", "Those of them whose client had tokens already."),
    "expired": ("quire_cluster_expired_attempts", "Attempts that were given up for want of a token in time."),
    "down": ("quire_cluster_instances_ended", "Instances that failed, or that were drained."),
    "failed": ("quire_cluster_requests_failed", "Sequences whose client got an error."),
    "ended": ("quire_cluster_requests_ended", "Sequences that ended without one, aborted ones included."),
}


def cluster_metrics(stats: Mapping[str, Any]) -> Iterable[Metric]:
    """The metrics of an engine's `stats`."""
    cluster = stats.get("cluster")
    if cluster is None:
        return
    yield from _instances(cluster["instances"])
    for field, (name, text) in _COUNTS.items():
        yield CounterMetricFamily(name, text, cluster["counts"].get(field, 0))
    times = HistogramMetricFamily(
        "quire_stage_seconds", "Seconds of answered requests by stage: see docs/guide/machines.md.", labels=["stage"]
    )
    for stage, found in cluster["histograms"].items():
        bounds = [*map(str, map(float, found["bounds"])), "+Inf"]
        times.add_metric([stage], list(zip(bounds, found["counts"], strict=True)), found["sum"])
    yield times


def _instances(instances: list[dict[str, Any]]) -> Iterable[Metric]:
    up = GaugeMetricFamily("quire_instance_up", "Whether an instance gets requests.", labels=["instance"])
    role = GaugeMetricFamily("quire_instance_role", "1 for an instance's role.", labels=["instance", "role"])
    attempts = GaugeMetricFamily(
        "quire_instance_attempts", "Attempts that an instance has a part in.", labels=["instance"]
    )
    for each in instances:
        up.add_metric([each["place"]], float(each["health"] == "serving"))
        role.add_metric([each["place"], each["role"]], 1.0)
        attempts.add_metric([each["place"]], each["attempts"])
    yield from (up, role, attempts)
    for field, (name, text) in _LOADS.items():
        gauge = GaugeMetricFamily(name, text, labels=["instance"])
        for each in instances:
            if each["load"] is not None:
                gauge.add_metric([each["place"]], each["load"][field])
        yield gauge
