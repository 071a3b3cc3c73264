"""Waits in the queue of one server: their mean in closed form, and those of given arrivals.

Requests are served in order of arrival. Rates are requests per second. A queue that gets more than its server can serve
has an infinite mean. `benchmarks/queues.py` has the other equations of DistServe's analysis.

Source: DistServe, arXiv 2401.09670, section 3, Eq. 1. Ours is for unequal service times (Pollaczek-Khinchine).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.records import above

Floats = NDArray[np.float64]


def mean_wait(rate: float, mean: float, mean_square: float) -> float:
    """Mean seconds in the queue of one server, without the service: M/G/1.

    mean         mean seconds that a request keeps the server
    mean_square  mean of their squares
    """
    if not 0 <= rate < math.inf:
        raise ConfigError(f"rate is {rate:g}; it must be a number of requests per second, at least 0")
    above(mean, "service")
    load = rate * mean
    return rate * mean_square / (2 * (1 - load)) if load < 1 else math.inf


def waits(arrivals: Floats, services: Floats | float) -> Floats:
    """Seconds that each request waits for one server that serves in order of arrival, float64 [n].

    arrivals  seconds, not decreasing, [n]
    services  seconds that each request keeps the server, [n]; a number: all alike

    A request waits W' = max(0, W + S - A) if the one before it waited W and was served S, and A lies between the two
    arrivals (Lindley). With the running sums C of S - A that is C minus the smallest C so far, so that no loop is
    needed.
    """
    arrivals = np.asarray(arrivals, np.float64)
    if not len(arrivals):
        return np.zeros(0)
    gaps = np.diff(arrivals)
    assert (gaps >= 0).all(), "arrivals are not in order"
    steps = np.broadcast_to(np.asarray(services, np.float64), arrivals.shape)[:-1] - gaps
    sums = np.concatenate([np.zeros(1), np.cumsum(steps)])
    found: Floats = sums - np.minimum.accumulate(sums)
    return found
