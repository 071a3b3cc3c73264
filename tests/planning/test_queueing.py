"""Closed forms of queues: the numbers of DistServe's analysis, and simulations that agree with the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.planning.queueing import (
    crossover,
    inter_op_ttft,
    intra_op_ttft,
    mean_ttft,
    mean_wait,
    mixed_ttft,
    poisson_arrivals,
    rate_for,
    replicated_ttft,
    simulate_md1,
    tandem,
    waits,
)

D = 0.1
"""Seconds of a prompt alone."""

TRACE = np.array([0.0, 0.05, 0.3])


def one_by_one(arrivals: np.ndarray, services: np.ndarray) -> list[float]:
    """Waits of a single server, request by request."""
    free, found = 0.0, list[float]()
    for arrival, service in zip(arrivals, services, strict=True):
        begin = max(arrival, free)
        found.append(begin - arrival)
        free = begin + service
    return found


# ---- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "single", "inter", "intra"),
    [(2, 0.1125, 0.1028, 0.0670), (5, 0.150, 0.1083, 0.0767), (8, 0.300, 0.1167, 0.0938)],
)
def test_the_means_of_the_papers_equations(rate: float, single: float, inter: float, intra: float) -> None:
    assert round(mean_ttft(rate, D), 4) == single
    assert round(inter_op_ttft(rate, D), 4) == inter
    assert round(intra_op_ttft(rate, D, 1.6), 4) == intra


def test_the_forms_are_those_of_the_paper() -> None:
    """As they are printed there; ours are one formula with an occupancy."""
    for rate in (0.5, 3.0, 7.5, 9.9):
        assert mean_ttft(rate, D) == pytest.approx(D + rate * D**2 / (2 * (1 - rate * D)), rel=1e-14)
        assert inter_op_ttft(rate, D) == pytest.approx(D + rate * D**2 / (4 * (2 - rate * D)), rel=1e-14)
        for k in (1.2, 1.9):
            expected = D / k + rate * D**2 / (2 * k * (k - rate * D))
            assert intra_op_ttft(rate, D, k) == pytest.approx(expected, rel=1e-14)


def test_replicas_share_the_rate() -> None:
    assert replicated_ttft(10, D, 2) == mean_ttft(5, D)
    assert replicated_ttft(10, D, 1) == math.inf


@pytest.mark.parametrize(("speedup", "rate"), [(1.3, 6.11), (1.5, 9.36), (1.6, 10.95), (1.8, 14.29)])
def test_the_crossover_between_both_parallelisms(speedup: float, rate: float) -> None:
    found = crossover(D, speedup)
    assert round(found, 2) == rate
    assert intra_op_ttft(found, D, speedup) == pytest.approx(inter_op_ttft(found, D))
    assert intra_op_ttft(found * 0.99, D, speedup) < inter_op_ttft(found * 0.99, D)
    assert intra_op_ttft(found * 1.01, D, speedup) > inter_op_ttft(found * 1.01, D)


def test_the_crossover_of_more_stages_and_of_no_or_full_speedup() -> None:
    found = crossover(D, 2.5, stages=4)
    assert intra_op_ttft(found, D, 2.5) == pytest.approx(inter_op_ttft(found, D, 4))
    assert crossover(D, 1.0) == pytest.approx(0, abs=1e-12)
    assert crossover(D, 2.0) == math.inf


def test_mixed_lengths_need_the_second_moment() -> None:
    """Two lengths, equally often; with the mean alone the queue looks shorter than it is."""
    assert round(mixed_ttft(5, [0.1, 0.025]), 5) == 0.08182
    assert round(mean_ttft(5, 0.0625), 5) == 0.07670
    assert mixed_ttft(5, [0.1, 0.025], [3, 1]) == pytest.approx(0.08125 + mean_wait(5, 0.08125, 0.00765625))
    assert mixed_ttft(5, [D, D, D]) == pytest.approx(mean_ttft(5, D))


def test_the_rate_at_which_a_mean_is_reached() -> None:
    found = rate_for(0.2, 0.0731)
    assert round(found, 2) == 10.62 and round(found * 0.0731, 3) == 0.776
    assert mean_ttft(found, 0.0731) == pytest.approx(0.2)
    piped = rate_for(0.2, 0.0731, 0.0731 / 4)
    assert inter_op_ttft(piped, 0.0731, 4) == pytest.approx(0.2)
    assert rate_for(0.0731, 0.0731) == 0 and rate_for(math.inf, D) == pytest.approx(1 / D)


def test_a_queue_that_gets_too_much_has_an_infinite_mean() -> None:
    assert mean_ttft(10, D) == mean_ttft(11, D) == inter_op_ttft(20, D) == intra_op_ttft(16, D, 1.6) == math.inf
    assert mixed_ttft(16, [0.1, 0.025]) == math.inf
    assert mean_ttft(0, D) == D


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda: mean_ttft(-1, D), "rate is -1"),
        (lambda: mean_ttft(1, 0), "service is 0"),
        (lambda: mean_ttft(1, D, -D), "service is -0.1"),
        (lambda: inter_op_ttft(1, D, 0), "stages is 0"),
        (lambda: intra_op_ttft(1, D, 0.5), "speedup is 0.5"),
        (lambda: replicated_ttft(1, D, 0), "replicas is 0"),
        (lambda: crossover(math.inf, 1.5), "service is inf"),
        (lambda: mixed_ttft(1, []), "0 service times"),
        (lambda: mixed_ttft(1, [D, D], [1]), r"2 service times have shares \[1.0\]"),
        (lambda: mixed_ttft(1, [D, D], [1, -1]), "of at least 0"),
        (lambda: rate_for(1, D, 0), "occupancy is 0"),
        (lambda: poisson_arrivals(0, 3, np.random.default_rng(0)), "rate is 0"),
    ],
)
def test_what_no_queue_has_is_refused(wrong, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        wrong()


# ---- simulation ------------------------------------------------------------------------------------------------------


def test_a_toy_trace_has_the_times_of_the_formulas_server() -> None:
    """One server, two stages of half a service, and one that is 1.6 times as fast."""
    assert (waits(TRACE, D) + D).tolist() == pytest.approx([0.1, 0.15, 0.1])
    assert (tandem(TRACE, [D / 2, D / 2]) - TRACE).tolist() == pytest.approx([0.1, 0.1, 0.1])
    assert (waits(TRACE, D / 1.6) + D / 1.6).tolist() == pytest.approx([0.0625, 0.075, 0.0625])


@pytest.mark.parametrize("load", [0.3, 0.9, 1.5])
def test_waits_without_a_loop_are_those_of_a_server(load: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrivals = poisson_arrivals(load / D, 5_000, rng)
    services = rng.gamma(2, D / 2, 5_000)
    np.testing.assert_allclose(waits(arrivals, services), one_by_one(arrivals, services), rtol=0, atol=1e-9)


def test_waits_of_no_request_and_of_one() -> None:
    assert waits(np.zeros(0), D).tolist() == []
    assert waits(np.array([3.0]), D).tolist() == [0]


def test_requests_that_arrive_together_wait_for_each_other() -> None:
    assert waits(np.zeros(4), np.array([1.0, 2.0, 3.0, 4.0])).tolist() == [0, 1, 3, 6]


def test_a_pipeline_of_unequal_stages_waits_for_its_slowest(seed: int) -> None:
    """Wherever the slowest stage is, and wherever requests wait: the sum is what `mean_ttft` is told."""
    rng = np.random.default_rng(seed)
    arrivals = poisson_arrivals(8, 20_000, rng)
    expected = arrivals + 0.16 + waits(arrivals, D)
    for stages in ([D, 0.02, 0.04], [0.02, D, 0.04], [0.04, 0.02, D]):
        np.testing.assert_allclose(tandem(arrivals, stages), expected, rtol=0, atol=1e-9)


def test_one_seed_gives_the_same_gaps_at_every_rate(seed: int) -> None:
    slow, fast = (poisson_arrivals(rate, 1_000, np.random.default_rng(seed)) for rate in (2.0, 8.0))
    np.testing.assert_allclose(slow, 4 * fast)
    assert (np.diff(fast) > 0).all() and slow[-1] == pytest.approx(500, rel=0.15)


@pytest.mark.parametrize("rate", [2.0, 5.0, 8.0])
def test_simulated_queues_have_the_mean_of_the_formula(rate: float) -> None:
    """400,000 arrivals with each of 20 seeds. One seed alone deviates by up to 0.2 %, 0.5 % and 1.8 % at these rates,
    because waits of a busy queue hang together.
    """
    means = [float(simulate_md1(rate, D, 400_000, seed).mean()) for seed in range(20)]
    assert np.mean(means) == pytest.approx(mean_ttft(rate, D), rel=0.005)
    assert max(abs(mean / mean_ttft(rate, D) - 1) for mean in means) < {2.0: 0.003, 5.0: 0.008, 8.0: 0.03}[rate]


def test_a_simulated_pipeline_has_the_mean_of_the_formula() -> None:
    found = [
        float((tandem(arrivals, [D / 4] * 4) - arrivals).mean())
        for arrivals in (poisson_arrivals(20, 400_000, np.random.default_rng(seed)) for seed in range(4))
    ]
    assert np.mean(found) == pytest.approx(inter_op_ttft(20, D, 4), rel=0.005)


def test_simulated_mixed_lengths_have_the_mean_of_the_formula() -> None:
    found = list[float]()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        arrivals, services = poisson_arrivals(5, 400_000, rng), rng.choice([0.1, 0.025], 400_000)
        found.append(float((waits(arrivals, services) + services).mean()))
    assert np.mean(found) == pytest.approx(mixed_ttft(5, [0.1, 0.025]), rel=0.005)
