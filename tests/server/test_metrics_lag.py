"""The lag of the event loop is a metric: it shows what a stall costs others."""

import asyncio
import time

import pytest

from quire.server import metrics
from quire.server.metrics import Metrics
from tests.server.fake_engine import FakeEngine
from tests.server.harness import socket_server

pytestmark = pytest.mark.anyio


def lags(found, name):
    lines = found.text().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(name)}


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(metrics, "LAG_PERIOD", 0.005)
    return Metrics(FakeEngine().stats)


async def test_a_stall_is_observed_with_its_length(watched):
    watching = asyncio.ensure_future(watched.watch_lag())
    await asyncio.sleep(0.02)
    time.sleep(0.12)
    await asyncio.sleep(0.02)
    watching.cancel()
    found = lags(watched, "quire_event_loop_lag_seconds")
    assert found["quire_event_loop_lag_seconds_count"] >= 3
    above = found["quire_event_loop_lag_seconds_count"] - found['quire_event_loop_lag_seconds_bucket{le="0.1"}']
    assert above == 1
    assert 0.1 < lags(watched, "quire_event_loop_lag_worst_seconds")["quire_event_loop_lag_worst_seconds"] < 1


async def test_the_worst_lag_is_forgotten_after_two_windows(watched, monkeypatch):
    monkeypatch.setattr(metrics, "LAG_WINDOW", 0.05)
    watching = asyncio.ensure_future(watched.watch_lag())
    await asyncio.sleep(0.01)
    time.sleep(0.2)
    await asyncio.sleep(0.03)
    worst = watched.worst_lag._value.get
    assert worst() > 0.15
    async with asyncio.timeout(3):
        while worst() > 0.15:
            await asyncio.sleep(0.01)
    watching.cancel()


def test_the_buckets_reach_from_a_millisecond_to_half_a_minute():
    assert metrics.LAG_SECONDS[0] == 0.001 and metrics.LAG_SECONDS[-1] == 30
    assert list(metrics.LAG_SECONDS) == sorted(metrics.LAG_SECONDS)


async def test_a_server_watches_its_loop(monkeypatch):
    monkeypatch.setattr(metrics, "LAG_PERIOD", 0.005)
    async with socket_server() as server:
        async with asyncio.timeout(3):
            while not lags(server.app.state.service.metrics, "quire_event_loop_lag_seconds_count").popitem()[1]:
                await asyncio.sleep(0.005)
