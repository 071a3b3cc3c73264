"""The circuit breaker of a disk."""

from __future__ import annotations

import logging
from typing import Any

from quire.stores.circuit_breaker import CircuitBreaker


def test_an_outage_waits_longer_each_time_and_says_it_once(caplog: Any) -> None:
    now = 1000.0
    circuit_breaker = CircuitBreaker("the thing", 3, lambda: now)
    circuit_breaker.fail("a")
    circuit_breaker.fail("b")
    circuit_breaker.succeed()
    circuit_breaker.fail("c")
    circuit_breaker.fail("d")
    assert circuit_breaker.is_on and not caplog.records
    circuit_breaker.fail("e")
    for seconds in (30, 60, 120, 240, 480, 600, 600):
        assert not circuit_breaker.is_on
        now += seconds - 1
        assert not circuit_breaker.is_on, seconds
        now += 2
        assert circuit_breaker.is_on
        circuit_breaker.fail("again")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "e; it is tried" in caplog.text
    circuit_breaker.succeed()
    circuit_breaker.succeed()
    assert circuit_breaker.is_on and len(caplog.records) == 2 and circuit_breaker.reason is None
