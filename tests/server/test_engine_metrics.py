"""Metrics from counters of an engine: hits, offloading and tiers."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake_engine import MOVED, FakeEngine
from tests.server.harness import client

pytestmark = pytest.mark.anyio


async def test_the_hit_rate_of_nothing_is_zero():
    engine = FakeEngine()
    stats = engine.stats() | {"prefill_tokens_computed": 0, "prefill_tokens_cached": 0}
    engine.stats = lambda: stats
    async with client(engine) as http:
        assert "quire_prefix_cache_hit_rate 0.0\n" in (await http.get("/metrics")).text


async def test_metrics_tell_what_offloading_moved():
    engine = FakeEngine()
    async with client(engine) as http:
        assert "quire_offload" not in (await http.get("/metrics")).text
        moved = {"weights_bytes_read": 5, "weights_wait_seconds": 1.5, "weights_near": 0.25, "cache_bytes_read": 7}
        engine.moved = {"offload": moved | {"cache_bytes_written": 8, "hidden_bytes_read": 3}}
        lines = (await http.get("/metrics")).text.splitlines()
    assert {line for line in lines if line.startswith("quire_offload")} == {
        "quire_offload_weights_read_bytes_total 5.0",
        "quire_offload_wait_seconds_total 1.5",
        "quire_offload_cache_read_bytes_total 7.0",
        "quire_offload_cache_written_bytes_total 8.0",
        "quire_offload_activations_read_bytes_total 3.0",
    }


async def test_metrics_tell_what_each_tier_holds_and_what_moved():
    engine = FakeEngine()
    async with client(engine) as http:
        await http.post("/v1/completions", json={"prompt": ["abcde", "fg"], "max_tokens": 5})
        without = (await http.get("/metrics")).text
        engine.moved = MOVED
        text = (await http.get("/metrics")).text
    assert "quire_tier" not in without and "somebody" not in text
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, memory, disk in (
        ("bytes", 1, 10),
        ("capacity_bytes", 2, 20),
        ("chunks", 3, 30),
        ("fetched_bytes_total", 4, 40),
        ("demoted_bytes_total", 5, 50),
        ("failed_reads_total", 0, 6),
        ("refused_runs_total", 0, 7),
        ("collected_files_total", 0, 8),
        ("on", 1, 0),
    ):
        assert (values[f"quire_tier_{name}", "memory"], values[f"quire_tier_{name}", "disk"]) == (memory, disk), name
    assert (
        values["quire_tier_seconds_total", "disk", "read"],
        values["quire_tier_seconds_total", "disk", "write"],
    ) == (
        1.5,
        2.5,
    )
    for name, count in (
        ("fetched_chunks", 11),
        ("wasted_chunks", 12),
        ("computed_instead_chunks", 13),
        ("failed_fetches", 17),
        ("lost_chunks", 18),
    ):
        assert values[f"quire_{name}_total",] == count, name
    assert (values["quire_swapped_chunks_total", "out"], values["quire_swapped_chunks_total", "in"]) == (15, 16)
    assert (values["quire_cached_tokens_total", "arena"], values["quire_cached_tokens_total", "disk"]) == (2, 4)
