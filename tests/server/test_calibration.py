"""What a server says of a codec that is calibrated beside its requests."""

from __future__ import annotations

import dataclasses

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import client

pytestmark = pytest.mark.anyio

REPORT = {"codec": "nuq3", "state": "calibrating", "done": 0.25, "seconds_left": 90, "reason": ""}


async def test_health_and_metrics_tell_how_far_a_calibration_is():
    engine = FakeEngine()
    engine.moved = {"calibration": REPORT}
    async with client(engine) as http:
        for path in ("/health", "/health/ready"):
            assert (await http.get(path)).json() == {"status": "ready", "calibration": REPORT}
        assert (await http.get("/health/live")).json() == {"status": "ok"}
        metrics = (await http.get("/metrics")).text
    assert 'quire_calibration_state{codec="nuq3",state="calibrating"} 1.0' in metrics
    for state in ("waiting", "taken", "failed"):
        assert f'quire_calibration_state{{codec="nuq3",state="{state}"}} 0.0' in metrics
    assert "quire_calibration_done_ratio 0.25" in metrics and "quire_calibration_seconds_left 90.0" in metrics


async def test_without_a_calibration_nothing_is_said_of_one():
    async with client(FakeEngine()) as http:
        assert (await http.get("/health/ready")).json() == {"status": "ready"}
        assert "quire_calibration" not in (await http.get("/metrics")).text


async def test_an_answers_fingerprint_changes_with_the_codec():

    engine = FakeEngine()
    async with client(engine) as http:
        asked = {"model": engine.model_name, "prompt": "a", "max_tokens": 1}
        before, again = [(await http.post("/v1/completions", json=asked)).json() for _ in range(2)]
        cache = dataclasses.replace(engine.config.cache, codec="nuq3")
        engine.config = dataclasses.replace(engine.config, cache=cache)
        after = (await http.post("/v1/completions", json=asked)).json()
    assert before["system_fingerprint"] == again["system_fingerprint"] != after["system_fingerprint"]
