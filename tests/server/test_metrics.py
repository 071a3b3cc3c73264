"""The metrics of requests and of the process."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.version import __version__
from tests.server.fake_engine import FakeEngine
from tests.server.harness import client

pytestmark = pytest.mark.anyio


async def test_what_is_refused_is_counted_by_its_status_alone():
    async with client(FakeEngine(queue_limit=1, max_context=50)) as http:
        full = await http.post("/v1/completions", json={"prompt": ["ab", "cd"], "max_tokens": 2})
        assert full.status_code == 429
        assert (await http.post("/v1/completions", json={"prompt": "x" * 60})).status_code == 400
        metrics = (await http.get("/metrics")).text
    assert 'quire_requests_finished_total{reason="error"}' not in metrics
    assert 'quire_http_responses_total{route="/v1/completions",status="429"} 1.0' in metrics


async def test_metrics_count_what_happened():
    engine = FakeEngine()
    async with client(engine) as http:
        await http.post("/v1/completions", json={"prompt": "abcde", "max_tokens": 5, "n": 2})
        engine.kept_fraction = 0.25
        await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 9, "stream": True})
        await http.post("/v1/completions", json={"foo": 1})
        await http.get("/some/unknown/url")
        response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["quire_prompt_tokens_total",] == 6 + 4
    assert values["quire_generation_tokens_total",] == 2 * 5 + 4
    assert values["quire_requests_finished_total", "length"] == 2
    assert values["quire_requests_finished_total", "stop"] == 1
    assert values["quire_http_responses_total", "/v1/completions", "200"] == 2
    assert values["quire_http_responses_total", "/v1/completions", "400"] == 1
    assert values["quire_http_responses_total", "404", "other"] == 1
    for name in ("time_to_first_token", "time_per_output_token", "request"):
        assert values[f"quire_{name}_seconds_count",] == 2
    assert values["quire_retention_kept_ratio_count",] == 1
    assert values["quire_retention_kept_ratio_sum",] == 0.25
    assert values["quire_retention_freed_bytes_total",] == 12
    assert values["quire_cache_bytes", "cached"] == 7
    assert values["quire_prefill_tokens_total", "computed"] == 10
    assert values["quire_prefix_cache_hit_rate",] == 5 / 15
    assert values["quire_cache_pinned_bytes",] == 3
    assert values["quire_cache_saved_bytes",] == 2
    assert values["quire_cache_evicted_bytes_total",] == 11
    assert {
        "quire_requests_running",
        "quire_requests_waiting",
        "quire_preemptions",
        "quire_cache_capacity_bytes",
    } <= families.keys()


async def test_metrics_tell_the_version_and_what_the_process_takes():
    async with client() as http:
        text = (await http.get("/metrics")).text
    (build,) = [line for line in text.splitlines() if line.startswith("quire_build_info{")]
    assert f'version="{__version__}"' in build and build.endswith(" 1.0")
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1]) > 0
