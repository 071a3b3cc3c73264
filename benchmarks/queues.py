"""Mean times to first token of queues in closed form, and queues simulated from arrivals.

Requests arrive at a Poisson rate and are served in order of arrival. A server needs `service` seconds for a request and
takes the next one after `occupancy` seconds, which is less in a pipeline. Rates are requests per second. A queue that
gets more than it can serve has an infinite mean.

Source: DistServe, arXiv 2401.09670, section 3, Eq. 1-3. Ours adds any number of stages, unequal service times
(Pollaczek-Khinchine), and the rates at which a mean time or a crossover is reached. The paper's equations hold for
prompts of one length without cached prefixes; `mixed_ttft` is for all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quire.errors import ConfigError
from quire.records import above
from quire.simulation.queueing import Floats, mean_wait, waits


def mean_ttft(rate: float, service: float, occupancy: float | None = None) -> float:
    """Mean seconds to the first token if all requests are alike: M/D/1, and pipelines of such servers.

    occupancy  seconds of the slowest stage of a pipeline; None: `service`. The waits before and inside a pipeline add
               up to those for its slowest stage alone
    """
    busy = service if occupancy is None else occupancy
    above(service, "service")
    return service + mean_wait(rate, busy, busy**2)


def inter_op_ttft(rate: float, service: float, stages: int = 2) -> float:
    """The same on a pipeline of equal stages, each of service / stages seconds: inter-operator parallelism."""
    _check_count("stages", stages)
    return mean_ttft(rate, service, service / stages)


def intra_op_ttft(rate: float, service: float, speedup: float) -> float:
    """The same if several devices compute each request `speedup` times as fast: intra-operator parallelism."""
    _check_speedup(speedup)
    return mean_ttft(rate, service / speedup)


def replicated_ttft(rate: float, service: float, replicas: int) -> float:
    """The same on `replicas` servers, each with an equal share of the requests drawn at random."""
    _check_count("replicas", replicas)
    return mean_ttft(rate / replicas, service)


def mixed_ttft(rate: float, services: Sequence[float], shares: Sequence[float] | None = None) -> float:
    """Mean seconds to the first token if requests take different times, as with mixed lengths or cached prefixes.

    shares  how often each service time occurs, in any unit; None: equally often
    """
    times = np.asarray(services, np.float64)
    weights = np.ones(len(times)) if shares is None else np.asarray(shares, np.float64)
    if not len(times) or len(weights) != len(times) or weights.min() < 0 or not weights.sum() > 0:
        raise ConfigError(f"{len(times)} service times have shares {weights.tolist()}; one share of at least 0 each")
    mean = float(np.average(times, weights=weights))
    return mean + mean_wait(rate, mean, float(np.average(times**2, weights=weights)))


def crossover(service: float, speedup: float, stages: int = 2) -> float:
    """The rate above which a pipeline of `stages` has a lower mean time to first token than `speedup` has.

    Below it, intra-operator parallelism is better: it shortens the service. Infinite if a speed-up reaches the number
    of stages, and 0 if there is no speed-up.
    """
    above(service, "service")
    _check_count("stages", stages)
    _check_speedup(speedup)
    if speedup >= stages:
        return math.inf
    # With load x = rate * service, both means are equal where 1/(K - x) - 1/(n - x) = 2 - 1/n - 1/K: a quadratic.
    gap, scale = stages - speedup, 2 - 1 / stages - 1 / speedup
    return (stages + speedup - math.sqrt(gap**2 + 4 * gap / scale)) / (2 * service)


def rate_for(ttft: float, service: float, occupancy: float | None = None) -> float:
    """The rate at which `mean_ttft` is `ttft`; 0 if even a request alone takes that long."""
    busy = service if occupancy is None else occupancy
    above(service, "service")
    above(busy, "occupancy")
    if not ttft > service:
        return 0.0
    if ttft == math.inf:
        return 1 / busy
    twice = 2 * (ttft - service)
    return twice / (busy * (busy + twice))


def poisson_arrivals(rate: float, count: int, rng: np.random.Generator) -> Floats:
    """Seconds of the arrivals of a Poisson process, float64 [count]. The same generator state at another rate gives the
    same gaps, scaled.
    """
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate is {rate:g}; arrivals need a positive number of requests per second")
    return np.cumsum(rng.standard_exponential(count)) / rate


def tandem(arrivals: Floats, stages: Sequence[Floats | float]) -> Floats:
    """Seconds at which each request leaves the last of several stages with queues between them, float64 [n].

    stages  seconds of each request in each stage, [n] each; a number: all alike
    """
    leaves = np.asarray(arrivals, np.float64)
    for services in stages:
        leaves = leaves + waits(leaves, services) + services
    return leaves


def simulate_md1(rate: float, service: float, count: int, seed: int) -> Floats:
    """Simulated times to first token of `count` requests that are alike, float64 [count]; the queue begins empty."""
    above(service, "service")
    return service + waits(poisson_arrivals(rate, count, np.random.default_rng(seed)), service)


def _check_count(name: str, count: int) -> None:
    if count < 1:
        raise ConfigError(f"{name} is {count}; at least 1 is needed")


def _check_speedup(speedup: float) -> None:
    if not 1 <= speedup < math.inf:
        raise ConfigError(f"speedup is {speedup:g}; it must be at least 1")
