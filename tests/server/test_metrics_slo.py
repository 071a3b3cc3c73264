"""Latency targets: which requests meet them, and what the metrics say."""

import math

import pytest
from prometheus_client import CollectorRegistry

from quire.config import SloConfig
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.server import metrics
from quire.server.metrics import RECENT, Metrics, RequestTimer, SloMetrics
from tests.server.fake_engine import FakeEngine


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


def answer(found, clock, ttft, gaps, choices=1, reason="abort", ends=True):
    """A request whose tokens come after some seconds."""
    timer = RequestTimer(found, clock.now, 5, choices)
    for place, seconds in enumerate((ttft, *gaps)):
        clock.now += seconds
        is_last = ends and place == len(gaps)
        outputs = [CompletionOutput(index, "x", [1], None) for index in range(choices)]
        for each in outputs:
            each.finish_reason = "length" if is_last else None
        timer.record(RequestOutput("r", None, [1], None, outputs, is_last, 0))
    clock.now += 7  # the client is slow to take the last one: that is no token's time
    timer.end(reason)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(metrics, "time", found)
    return found


def counts(found):
    lines = found.text().decode().splitlines()
    return {
        line.partition('"')[2].partition('"')[0]: float(line.split()[-1])
        for line in lines
        if line.startswith("quire_slo_requests_total")
    }


def value(found, name):
    return found.registry.get_sample_value(name)


def test_a_request_attains_its_targets_only_if_it_meets_both(clock):
    found = Metrics(FakeEngine().stats, SloConfig(ttft=1.0, tpot=0.1))
    for _ in range(8):
        answer(found, clock, 0.9, [0.09] * 4)
    answer(found, clock, 1.1, [0.09] * 4)
    answer(found, clock, 0.9, [0.11] * 4)
    assert counts(found) == {"both": 8, "tpot": 1, "ttft": 1, "neither": 0}
    assert value(found, "quire_slo_attainment_ratio") == 0.8
    assert value(found, "quire_slo_attainment_target_ratio") == 0.9
    targets = {"ttft": 1.0, "tpot": 0.1}
    for name, seconds in targets.items():
        assert found.registry.get_sample_value("quire_slo_target_seconds", {"target": name}) == seconds


def test_the_first_token_is_not_in_the_time_per_token_and_one_token_has_none(clock):
    found = Metrics(FakeEngine().stats, SloConfig(ttft=1.0, tpot=0.1))
    answer(found, clock, 0.9, [0.05, 0.14])  # 0.095 on average; with the first token it would be 0.36
    answer(found, clock, 0.9, [])
    answer(found, clock, 1.1, [])
    assert counts(found) == {"both": 2, "tpot": 1, "ttft": 0, "neither": 0}


def test_choices_of_a_request_share_its_steps(clock):
    found = Metrics(FakeEngine().stats, SloConfig(tpot=0.1))
    answer(found, clock, 50.0, [0.09] * 3, choices=4)
    assert counts(found)["both"] == 1


def test_failed_requests_meet_nothing_and_those_of_clients_that_left_do_not_count(clock):
    found = Metrics(FakeEngine().stats, SloConfig(ttft=1.0))
    answer(found, clock, 0.5, [0.01], reason="error", ends=False)
    answer(found, clock, 0.5, [0.01], reason="abort", ends=False)
    RequestTimer(found, clock.now, 5, 1).end(None)  # refused
    RequestTimer(found, clock.now, 5, 1).end("error")
    assert counts(found) == {"both": 0, "tpot": 0, "ttft": 0, "neither": 2}


def test_without_targets_there_are_no_metrics_of_them(clock):
    found = Metrics(FakeEngine().stats, SloConfig())
    answer(found, clock, 0.5, [0.01])
    assert not [each for each in found.registry._names_to_collectors if "slo" in each]


def test_attainment_is_that_of_the_last_requests():
    found = SloMetrics(SloConfig(ttft=1.0), CollectorRegistry())
    assert math.isnan(found.attainment())
    for _ in range(RECENT):
        found.record(2.0, None)
    for _ in range(RECENT // 4):
        found.record(0.5, None)
    assert found.attainment() == 0.25
