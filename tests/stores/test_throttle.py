"""A throttle of reads and writes."""

from __future__ import annotations

import random
import threading
import time

import pytest

from quire.stores.throttle import BURST_SECONDS, Throttle

from ..disk_runs import MIB


def test_a_throttle_passes_its_bytes_over_time_and_no_burst(seed: int) -> None:
    rng, now = random.Random(seed), 0.0
    passed: list[tuple[float, int]] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    throttle = Throttle(1e6, lambda: now, sleep)
    for _ in range(1000):
        if rng.random() < 0.1:
            now += rng.random()
        size = rng.choice([100, 5000, 300_000])
        throttle.take(size)
        passed.append((now, size))
    for _ in range(200):
        first, last = sorted(rng.sample(range(1000), 2))
        seconds = passed[last][0] - (passed[first - 1][0] if first else 0.0)
        assert sum(size for _, size in passed[first : last + 1]) <= 1e6 * (seconds + BURST_SECONDS) * 1.0001
    begun = now
    for _ in range(100):
        throttle.take(100_000)
    assert now - begun == pytest.approx(10, rel=0.1)


def test_what_passes_first_waits_for_its_own_bytes_and_later_ones_make_up_for_it() -> None:
    waits: list[float] = []
    throttle = Throttle(1e6, lambda: 0.0, waits.append)
    for _ in range(2):
        throttle.take(1_000_000)
    throttle.take(100_000, first=True)
    throttle.take(1_000_000)
    assert waits == pytest.approx([1 - BURST_SECONDS, 2 - BURST_SECONDS, 0.1, 3.1 - BURST_SECONDS], abs=0.06)


def test_requests_that_pass_first_share_the_bandwidth() -> None:
    """Four threads of movers that never rest pass no more than the limit, though weights wait."""
    waits: list[float] = []
    throttle = Throttle(1e6, lambda: 0.0, waits.append)
    throttle.take(9_000_000)
    for _ in range(4):
        throttle.take(100_000, first=True)
    assert waits[1:] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_threads_share_a_throttle_and_closing_ends_their_wait() -> None:
    throttle, begun = Throttle(20e6), time.monotonic()
    threads = [threading.Thread(target=lambda: [throttle.take(MIB) for _ in range(4)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun == pytest.approx(8 * MIB / 20e6, rel=0.25)
    slow = Throttle(1.0)
    waiting = threading.Thread(target=lambda: slow.take(MIB))
    waiting.start()
    slow.close()
    waiting.join(5)
    assert not waiting.is_alive()
