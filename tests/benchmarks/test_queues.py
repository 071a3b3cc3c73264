"""Closed forms of queues: the numbers of DistServe's analysis, and simulations that agree with the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.simulation.queueing import mean_wait, waits
from tests.benchmark_scripts import benchmark

queues = benchmark("queues")

D = 0.1
"""Seconds of a prompt alone."""

TRACE = np.array([0.0, 0.05, 0.3])


# ---- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "single", "inter", "intra"),
    [(2, 0.1125, 0.1028, 0.0670), (5, 0.150, 0.1083, 0.0767), (8, 0.300, 0.1167, 0.0938)],
)
def test_the_means_of_the_papers_equations(rate: float, single: float, inter: float, intra: float) -> None:
    assert round(queues.mean_ttft(rate, D), 4) == single
    assert round(queues.inter_op_ttft(rate, D), 4) == inter
    assert round(queues.intra_op_ttft(rate, D, 1.6), 4) == intra


def test_the_forms_are_those_of_the_paper() -> None:
    """As they are printed there; ours are one formula with an occupancy."""
    for rate in (0.5, 3.0, 7.5, 9.9):
        assert queues.mean_ttft(rate, D) == pytest.approx(D + rate * D**2 / (2 * (1 - rate * D)), rel=1e-14)
        assert queues.inter_op_ttft(rate, D) == pytest.approx(D + rate * D**2 / (4 * (2 - rate * D)), rel=1e-14)
        for k in (1.2, 1.9):
            expected = D / k + rate * D**2 / (2 * k * (k - rate * D))
            assert queues.intra_op_ttft(rate, D, k) == pytest.approx(expected, rel=1e-14)


def test_replicas_share_the_rate() -> None:
    assert queues.replicated_ttft(10, D, 2) == queues.mean_ttft(5, D)
    assert queues.replicated_ttft(10, D, 1) == math.inf


@pytest.mark.parametrize(("speedup", "rate"), [(1.3, 6.11), (1.5, 9.36), (1.6, 10.95), (1.8, 14.29)])
def test_the_crossover_between_both_parallelisms(speedup: float, rate: float) -> None:
    found = queues.crossover(D, speedup)
    assert round(found, 2) == rate
    assert queues.intra_op_ttft(found, D, speedup) == pytest.approx(queues.inter_op_ttft(found, D))
    assert queues.intra_op_ttft(found * 0.99, D, speedup) < queues.inter_op_ttft(found * 0.99, D)
    assert queues.intra_op_ttft(found * 1.01, D, speedup) > queues.inter_op_ttft(found * 1.01, D)


def test_the_crossover_of_more_stages_and_of_no_or_full_speedup() -> None:
    found = queues.crossover(D, 2.5, stages=4)
    assert queues.intra_op_ttft(found, D, 2.5) == pytest.approx(queues.inter_op_ttft(found, D, 4))
    assert queues.crossover(D, 1.0) == pytest.approx(0, abs=1e-12)
    assert queues.crossover(D, 2.0) == math.inf


def test_mixed_lengths_need_the_second_moment() -> None:
    """Two lengths, equally often; with the mean alone the queue looks shorter than it is."""
    assert round(queues.mixed_ttft(5, [0.1, 0.025]), 5) == 0.08182
    assert round(queues.mean_ttft(5, 0.0625), 5) == 0.07670
    assert queues.mixed_ttft(5, [0.1, 0.025], [3, 1]) == pytest.approx(0.08125 + mean_wait(5, 0.08125, 0.00765625))
    assert queues.mixed_ttft(5, [D, D, D]) == pytest.approx(queues.mean_ttft(5, D))


def test_the_rate_at_which_a_mean_is_reached() -> None:
    found = queues.rate_for(0.2, 0.0731)
    assert round(found, 2) == 10.62 and round(found * 0.0731, 3) == 0.776
    assert queues.mean_ttft(found, 0.0731) == pytest.approx(0.2)
    piped = queues.rate_for(0.2, 0.0731, 0.0731 / 4)
    assert queues.inter_op_ttft(piped, 0.0731, 4) == pytest.approx(0.2)
    assert queues.rate_for(0.0731, 0.0731) == 0 and queues.rate_for(math.inf, D) == pytest.approx(1 / D)


def test_a_queue_that_gets_too_much_has_an_infinite_mean() -> None:
    assert (
        queues.mean_ttft(10, D)
        == queues.mean_ttft(11, D)
        == queues.inter_op_ttft(20, D)
        == queues.intra_op_ttft(16, D, 1.6)
        == math.inf
    )
    assert queues.mixed_ttft(16, [0.1, 0.025]) == math.inf
    assert queues.mean_ttft(0, D) == D


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda: queues.mean_ttft(-1, D), "rate is -1"),
        (lambda: queues.mean_ttft(1, 0), "service is 0"),
        (lambda: queues.mean_ttft(1, D, -D), "service is -0.1"),
        (lambda: queues.inter_op_ttft(1, D, 0), "stages is 0"),
        (lambda: queues.intra_op_ttft(1, D, 0.5), "speedup is 0.5"),
        (lambda: queues.replicated_ttft(1, D, 0), "replicas is 0"),
        (lambda: queues.crossover(math.inf, 1.5), "service is inf"),
        (lambda: queues.mixed_ttft(1, []), "0 service times"),
        (lambda: queues.mixed_ttft(1, [D, D], [1]), r"2 service times have shares \[1.0\]"),
        (lambda: queues.mixed_ttft(1, [D, D], [1, -1]), "of at least 0"),
        (lambda: queues.rate_for(1, D, 0), "occupancy is 0"),
        (lambda: queues.poisson_arrivals(0, 3, np.random.default_rng(0)), "rate is 0"),
    ],
)
def test_what_no_queue_has_is_refused(wrong, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        wrong()


# ---- simulation ------------------------------------------------------------------------------------------------------


def test_a_toy_trace_has_the_times_of_the_formulas_server() -> None:
    """One server, two stages of half a service, and one that is 1.6 times as fast."""
    assert (waits(TRACE, D) + D).tolist() == pytest.approx([0.1, 0.15, 0.1])
    assert (queues.tandem(TRACE, [D / 2, D / 2]) - TRACE).tolist() == pytest.approx([0.1, 0.1, 0.1])
    assert (waits(TRACE, D / 1.6) + D / 1.6).tolist() == pytest.approx([0.0625, 0.075, 0.0625])


def test_a_pipeline_of_unequal_stages_waits_for_its_slowest(seed: int) -> None:
    """Wherever the slowest stage is, and wherever requests wait: the sum is what `mean_ttft` is told."""
    rng = np.random.default_rng(seed)
    arrivals = queues.poisson_arrivals(8, 20_000, rng)
    expected = arrivals + 0.16 + waits(arrivals, D)
    for stages in ([D, 0.02, 0.04], [0.02, D, 0.04], [0.04, 0.02, D]):
        np.testing.assert_allclose(queues.tandem(arrivals, stages), expected, rtol=0, atol=1e-9)


def test_one_seed_gives_the_same_gaps_at_every_rate(seed: int) -> None:
    slow, fast = (queues.poisson_arrivals(rate, 1_000, np.random.default_rng(seed)) for rate in (2.0, 8.0))
    np.testing.assert_allclose(slow, 4 * fast)
    assert (np.diff(fast) > 0).all() and slow[-1] == pytest.approx(500, rel=0.15)


@pytest.mark.parametrize("rate", [2.0, 5.0, 8.0])
def test_simulated_queues_have_the_mean_of_the_formula(rate: float) -> None:
    """400,000 arrivals with each of 20 seeds. One seed alone deviates by up to 0.2 %, 0.5 % and 1.8 % at these rates,
    because waits of a busy queue hang together.
    """
    means = [float(queues.simulate_md1(rate, D, 400_000, seed).mean()) for seed in range(20)]
    assert np.mean(means) == pytest.approx(queues.mean_ttft(rate, D), rel=0.005)
    assert max(abs(mean / queues.mean_ttft(rate, D) - 1) for mean in means) < {2.0: 0.003, 5.0: 0.008, 8.0: 0.03}[rate]


def test_a_simulated_pipeline_has_the_mean_of_the_formula() -> None:
    found = [
        float((queues.tandem(arrivals, [D / 4] * 4) - arrivals).mean())
        for arrivals in (queues.poisson_arrivals(20, 400_000, np.random.default_rng(seed)) for seed in range(4))
    ]
    assert np.mean(found) == pytest.approx(queues.inter_op_ttft(20, D, 4), rel=0.005)


def test_simulated_mixed_lengths_have_the_mean_of_the_formula() -> None:
    found = list[float]()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        arrivals, services = queues.poisson_arrivals(5, 400_000, rng), rng.choice([0.1, 0.025], 400_000)
        found.append(float((waits(arrivals, services) + services).mean()))
    assert np.mean(found) == pytest.approx(queues.mixed_ttft(5, [0.1, 0.025]), rel=0.005)
