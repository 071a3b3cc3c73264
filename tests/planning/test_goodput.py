"""The goodput search against attainment curves whose goodput is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import numpy as np
import pytest

from quire.planning.goodput import MOST_STEPS, RatePoint, Verdict, goodput
from tests.effort import tries

LIMITS = {"low": 0.01, "high": 1000.0}
BISECTIONS = 6
"""Halvings, on a logarithmic scale, of a factor of 2 into 2 %: 2 ** (1 / 64) = 1.0109."""


class Counted:
    """An attainment curve that keeps the pairs it was called with."""

    def __init__(self, curve: Callable[[float, int], float]) -> None:
        self.curve = curve
        self.calls: list[tuple[float, int]] = []

    def __call__(self, rate: float, seed: int) -> float:
        self.calls.append((rate, seed))
        return self.curve(rate, seed)

    def rates(self, seeds: tuple[int, ...] = (0,)) -> list[float]:
        return [rate for rate, seed in self.calls if seed in seeds]


def step(at: float) -> Counted:
    return Counted(lambda rate, seed: 1.0 if rate <= at else 0.5)


def queue(at: float, count: int = 1000) -> Counted:
    """Requests miss with a probability that grows with the rate. One seed draws the same numbers at all rates."""

    def attains(rate: float, seed: int) -> float:
        draws = np.random.default_rng(seed).random(count)
        return float(np.mean(draws >= 0.1 * (rate / at) ** 4))

    return Counted(attains)


@pytest.mark.parametrize("at", [0.011, 0.3, 1.0, 5.0, 16.5, 730.0, 999.0])
@pytest.mark.parametrize("guess", [None, 0.01, 4.0, 1000.0, 1e9])
@pytest.mark.parametrize("tolerance", [0.02, 0.001])
def test_a_step_is_found_within_the_tolerance(at: float, guess: float | None, tolerance: float) -> None:
    found = goodput(step(at), guess=guess, tolerance=tolerance, **LIMITS)
    assert found.verdict is Verdict.FOUND and found.confirmed and not found.exceptions and not found.doubts
    assert found.rate <= at < found.rate * (1 + tolerance)
    assert (found.attainment, found.spread) == (1.0, 0.0)


@pytest.mark.parametrize("at", [4.3, 5.0, 63.0, 3.0, 0.7, 0.02])
def test_rates_are_tried_once_and_no_more_of_them_than_halving_needs(at: float) -> None:
    """The guess of 4 is doubled until a rate is bad; or halved, after the lowest rate was tried."""
    curve, probes = step(at), (0.5, 2) if at > 4 else ()
    goodput(curve, guess=4.0, confirm_seeds=(1, 2), probes=probes, **LIMITS)
    num_tried = len(curve.calls)
    assert len(set(curve.calls)) == num_tried
    most = 1 + (at < 4) + math.floor(abs(math.log2(at / 4))) + 1 + BISECTIONS + 2 + len(probes)
    assert num_tried == most if at > 4 else num_tried <= most


def test_every_rate_is_tried_with_the_same_seeds_and_the_last_one_with_fresh_ones() -> None:
    curve = step(5.0)
    found = goodput(curve, guess=4.0, seeds=(7, 8), confirm_seeds=(1, 2, 3), **LIMITS)
    assert curve.rates((7,)) == curve.rates((8,)) and len(curve.rates((7,))) == len(found.points)
    assert [call for call in curve.calls if call[1] not in (7, 8)] == [(found.rate, seed) for seed in (1, 2, 3)]
    with pytest.raises(AssertionError, match="confirm their own result"):
        goodput(curve, seeds=(1, 2), confirm_seeds=(2, 3), **LIMITS)


def test_a_system_that_no_rate_suits_is_infeasible_after_two_evaluations() -> None:
    curve = Counted(lambda rate, seed: 0.62)
    found = goodput(curve, guess=8.0, probes=(), low=0.1, high=100.0)
    assert (found.verdict, found.rate, found.attainment, found.confirmed) == (Verdict.INFEASIBLE, 0.0, 0.62, False)
    assert curve.calls == [(8.0, 0), (0.1, 0)]
    assert len(found.doubts) == 1 and "62.0%" in found.doubts[0] and "90.0%" in found.doubts[0]


def test_a_lowest_rate_that_fresh_seeds_refuse_is_infeasible() -> None:
    found = goodput(lambda rate, seed: 0.95 if seed == 0 and rate < 0.1001 else 0.4, low=0.1, high=100.0)
    assert (found.verdict, found.rate, found.attainment) == (Verdict.INFEASIBLE, 0.0, 0.4)


def test_a_rate_above_the_limit_is_unbounded_and_not_silently_cut() -> None:
    """The public code cuts at 16 requests/s per GPU and says nothing."""
    found = goodput(step(40.0), guess=1.0, low=0.1, high=16.0)
    assert (found.verdict, found.rate, found.confirmed) == (Verdict.UNBOUNDED, 16.0, True)
    assert found.doubts == ("the goodput is at least 16 requests/s, the highest rate that was tried",)


def test_the_highest_rate_is_found_and_not_unbounded_if_fresh_seeds_refuse_it() -> None:
    found = goodput(lambda rate, seed: 1.0 if seed == 0 or rate < 15.9 else 0.5, low=0.1, high=16.0)
    assert found.verdict is Verdict.FOUND and found.confirmed and found.rate == pytest.approx(16 / 1.02)


def test_an_exception_of_the_callable_ends_the_search() -> None:
    """The public code takes it for an infeasible system."""

    def attains(rate: float, seed: int) -> float:
        raise RuntimeError("the simulator failed")

    with pytest.raises(RuntimeError, match="the simulator failed"):
        goodput(attains, **LIMITS)


def test_a_dip_below_the_found_rate_is_reported() -> None:
    found = goodput(Counted(lambda rate, seed: float(rate <= 9 and not 3.9 < rate < 4.1)), guess=6.0, **LIMITS)
    assert not found.exceptions, "no evaluated rate lies in the dip"
    found = goodput(
        Counted(lambda rate, seed: float(rate <= 9 and not 3.9 < rate < 4.5)), guess=6.0, probes=(0.45,), **LIMITS
    )
    assert found.rate == pytest.approx(9.0, rel=0.02) and found.exceptions
    ((lower, higher),) = found.exceptions
    assert lower == RatePoint(pytest.approx(0.45 * found.rate), 0.0) and higher == RatePoint(6.0, 1.0)
    assert "not monotone: 0.0% at 4.0" in found.doubts[0] and "100.0% at 6" in found.doubts[0]


def test_a_second_range_above_the_found_rate_is_reported() -> None:
    curve = Counted(lambda rate, seed: float(rate <= 5 or 7 < rate < 7.6))
    found = goodput(curve, guess=4.0, **LIMITS)
    assert found.rate == pytest.approx(5.0, rel=0.02) and found.exceptions
    assert [higher.rate for _, higher in found.exceptions] == [pytest.approx(1.5 * found.rate)]


def test_noise_below_the_target_steps_the_rate_down_until_fresh_seeds_confirm_it() -> None:
    """With its lucky seed the search finds 5; with all others the goodput is 4.8: two or three steps lower."""
    curve = Counted(lambda rate, seed: 0.95 if rate <= (5.0 if seed == 0 else 4.8) else 0.8)
    found = goodput(curve, guess=4.0, **LIMITS)
    assert found.confirmed and 4.8 / 1.02 <= found.rate <= 4.8
    steps = math.log(max(curve.rates((1,))) / found.rate, 1.02)
    assert steps == pytest.approx(round(steps)) and 1 <= round(steps) <= 3
    assert len(curve.rates((1, 2, 3, 4))) == 4 * (round(steps) + 1)


def test_a_rate_that_stays_unconfirmed_is_returned_as_such() -> None:
    curve = Counted(lambda rate, seed: 0.95 if rate <= 5.0 and seed == 0 else 0.8)
    found = goodput(curve, guess=4.0, **LIMITS)
    assert not found.confirmed and found.attainment == pytest.approx(0.8)
    assert len(curve.rates((1,))) == MOST_STEPS + 1 and min(curve.rates((1,))) == found.rate
    assert "not confirmed: with fresh seeds 80.0%" in found.doubts[0]
    untested = goodput(curve, guess=4.0, confirm_seeds=(), **LIMITS)
    assert not untested.confirmed and untested.attainment == 0.95 and "no fresh seeds" in untested.doubts[0]


def test_the_spread_of_the_fresh_seeds_is_reported() -> None:
    shares = {0: 1.0, 1: 0.94, 2: 0.88, 3: 0.97}
    found = goodput(lambda rate, seed: shares[seed] if rate <= 5 else 0.0, guess=4.0, confirm_seeds=(1, 2, 3), **LIMITS)
    assert found.confirmed and found.attainment == pytest.approx(0.93) and found.spread == pytest.approx(0.09)


@pytest.mark.parametrize("seed", range(tries(10)))
def test_noisy_attainment_has_a_confirmed_goodput_near_the_true_one(seed: int) -> None:
    """A mean over 4000 requests has a standard deviation of 0.0047; where it is 0.9, that is 1.2 % of the rate."""
    fresh = tuple(range(1000 + 4 * seed, 1004 + 4 * seed))
    found = goodput(queue(6.0), guess=1.0, seeds=(seed,), confirm_seeds=fresh, low=0.05, high=200.0)
    assert found.confirmed and not found.exceptions and found.attainment >= 0.9
    assert 6.0 * 0.85 <= found.rate <= 6.0 * 1.05


def test_a_mean_that_equals_the_target_but_for_rounding_reaches_it() -> None:
    shares = (0.82, 0.94, 0.94)
    assert fmean(shares) < 0.9
    found = goodput(
        lambda rate, seed: shares[seed] if rate <= 5 else 0.0, guess=4.0, seeds=(0, 1, 2), confirm_seeds=(), **LIMITS
    )
    assert found.verdict is Verdict.FOUND and found.rate == pytest.approx(5.0, rel=0.02)


def test_a_goodput_of_one_rate_has_no_range_to_search() -> None:
    found = goodput(step(5.0), low=3.0, high=3.0)
    assert (found.verdict, found.rate) == (Verdict.UNBOUNDED, 3.0)
    assert goodput(step(2.0), low=3.0, high=3.0).verdict is Verdict.INFEASIBLE
