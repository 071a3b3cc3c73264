"""Waits of a queue: the same as those of a server, request by request."""

from __future__ import annotations

import numpy as np
import pytest

from quire.simulation.queueing import waits

D = 0.1
"""Seconds of a prompt alone."""


def one_by_one(arrivals: np.ndarray, services: np.ndarray) -> list[float]:
    """Waits of a single server, request by request."""
    free, found = 0.0, list[float]()
    for arrival, service in zip(arrivals, services, strict=True):
        begin = max(arrival, free)
        found.append(begin - arrival)
        free = begin + service
    return found


@pytest.mark.parametrize("load", [0.3, 0.9, 1.5])
def test_waits_without_a_loop_are_those_of_a_server(load: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(D / load, 5_000))
    services = rng.gamma(2, D / 2, 5_000)
    np.testing.assert_allclose(waits(arrivals, services), one_by_one(arrivals, services), rtol=0, atol=1e-9)


def test_waits_of_no_request_and_of_one() -> None:
    assert waits(np.zeros(0), D).tolist() == []
    assert waits(np.array([3.0]), D).tolist() == [0]


def test_requests_that_arrive_together_wait_for_each_other() -> None:
    assert waits(np.zeros(4), np.array([1.0, 2.0, 3.0, 4.0])).tolist() == [0, 1, 3, 6]
