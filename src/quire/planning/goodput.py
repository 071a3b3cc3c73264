"""The goodput of a system: the highest rate at which enough requests meet their latency targets.

Knows rates and shares of requests; what serves the requests is a callable. Exceptions of the callable are not caught.

Source: DistServe, arXiv 2401.09670, sections 2.3 and 4.1. Ours differs from the public code: there is no highest rate
that a result is silently cut to, the found rate is tested again with seeds that the search has not seen, and rates that
contradict a single crossing of the target are reported.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

Attains = Callable[[float, int], float]
"""The share of requests that meet both targets, TTFT and TPOT, at a rate in requests/s and with a seed."""

PROBES = (1 / 3, 1 / 1.5, 1.5, 3.0)
"""Multiples of the found rate at which the search checks that lower rates reach the target and higher rates miss it."""

MOST_STEPS = 8
"""Steps down, of one tolerance each, after which a rate that fresh seeds do not confirm is returned unconfirmed."""

ROUNDING = 1e-9
"""A share that misses the target by less reaches it: a mean of shares is rounded."""


class Verdict(StrEnum):
    """How a search ended.

    FOUND       the rate is the goodput
    INFEASIBLE  the lowest rate of the search misses the target
    UNBOUNDED   the highest rate of the search reaches the target: the goodput is at least this rate
    """

    FOUND = "found"
    INFEASIBLE = "infeasible"
    UNBOUNDED = "unbounded"


class RatePoint(NamedTuple):
    """A rate in requests/s, and the share of requests that meet both targets there."""

    rate: float
    attainment: float


@dataclass(frozen=True)
class Goodput:
    """The result of a search.

    rate        requests/s; 0 if infeasible
    attainment  share of requests that meet both targets at this rate, mean over the fresh seeds; if infeasible, the
                share at the lowest rate
    verdict     how the search ended
    confirmed   whether the mean over fresh seeds reaches the target
    spread      largest minus smallest share of the fresh seeds
    target      wanted share of requests
    points      what the search has seen, by rate; means over its own seeds
    notes       reasons for doubt that the search itself cannot know, one sentence each
    """

    rate: float
    attainment: float
    verdict: Verdict = Verdict.FOUND
    confirmed: bool = True
    spread: float = 0.0
    target: float = 0.9
    points: tuple[RatePoint, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exceptions(self) -> tuple[tuple[RatePoint, RatePoint], ...]:
        """Neighbouring points of which the lower rate misses the target and the higher one reaches it."""
        return tuple(
            (lower, higher)
            for lower, higher in itertools.pairwise(self.points)
            if not _reaches(lower.attainment, self.target) and _reaches(higher.attainment, self.target)
        )

    @property
    def doubts(self) -> tuple[str, ...]:
        """One sentence for each reason not to take the rate for the goodput. Empty: there is none."""
        found: list[str] = []
        if self.verdict is Verdict.INFEASIBLE:
            found.append(
                f"no rate reaches the target: at the lowest one {self.attainment:.1%} of requests meet the latency"
                f" targets, wanted are {self.target:.1%}"
            )
        if self.verdict is Verdict.UNBOUNDED:
            found.append(f"the goodput is at least {self.rate:.4g} requests/s, the highest rate that was tried")
        if not self.confirmed and self.verdict is not Verdict.INFEASIBLE:
            is_tested = not _reaches(self.attainment, self.target)
            said = f"with fresh seeds {self.attainment:.1%} of requests meet" if is_tested else "no fresh seeds test"
            targets = f" the latency targets, wanted are {self.target:.1%}" if is_tested else " it"
            found.append(f"the rate of {self.rate:.4g} requests/s is not confirmed: {said}{targets}")
        found += [
            f"attainment is not monotone: {lower.attainment:.1%} at {lower.rate:.4g} requests/s, but"
            f" {higher.attainment:.1%} at {higher.rate:.4g}"
            for lower, higher in self.exceptions
        ]
        return (*found, *self.notes)


def goodput(
    attains: Attains,
    target: float = 0.9,
    *,
    low: float,
    high: float,
    guess: float | None = None,
    tolerance: float = 0.02,
    seeds: Sequence[int] = (0,),
    confirm_seeds: Sequence[int] = (1, 2, 3, 4),
    probes: Sequence[float] = PROBES,
) -> Goodput:
    """The highest rate within [low, high] at which a share `target` of the requests meets both latency targets.

    Doubles or halves from the first guess until one rate reaches the target and one misses it, and bisects between them
    on a logarithmic scale. Every rate is tried with the same seeds (common random numbers): the noise of one seed then
    moves all rates alike. The rate is tested again with fresh seeds. While their mean misses the target, the rate
    steps down by one tolerance.

    attains        share of requests at a rate and a seed; called once for each pair
    low, high      requests/s; the limits of the search
    guess          first rate; None: the geometric mean of the limits
    tolerance      largest relative distance between the rate and one that misses the target
    seeds          of the search; shares are means over them
    confirm_seeds  of the test afterwards; none of `seeds`. Empty: there is no test, and nothing is confirmed
    probes         multiples of the found rate that are tried for monotonicity, where they lie within the limits
    """
    assert 0 < target <= 1, f"a target of {target}"
    assert 0 < low <= high < math.inf, f"rates from {low} to {high}"
    assert tolerance >= 1e-6 and seeds, f"tolerance {tolerance}, {len(seeds)} seeds"
    assert not set(seeds) & set(confirm_seeds), f"seeds {set(seeds) & set(confirm_seeds)} confirm their own result"
    first = math.sqrt(low * high) if guess is None else min(max(guess, low), high)
    search = _Search(attains, target, low, high, tolerance, tuple(seeds))
    good, bad = search.narrow(*search.bracket(first))
    for probe in probes if good else ():
        if low < (rate := good * probe) < high:
            search.attainment(rate)
    return search.result(good, bad, tuple(confirm_seeds))


@dataclass
class _Search:
    """A search and what it has seen. A good rate reaches the target, a bad one misses it."""

    attains: Attains
    target: float
    low: float
    high: float
    tolerance: float
    seeds: tuple[int, ...]
    shares: dict[tuple[float, int], float] = field(default_factory=dict)

    def share(self, rate: float, seed: int) -> float:
        """The share of requests at a rate with one seed."""
        if (rate, seed) not in self.shares:
            share = self.attains(rate, seed)
            assert 0 <= share <= 1, f"a share of {share} at {rate} requests/s"
            self.shares[rate, seed] = share
        return self.shares[rate, seed]

    def attainment(self, rate: float) -> float:
        """The share of requests at a rate: the mean over the seeds of the search."""
        return fmean(self.share(rate, seed) for seed in self.seeds)

    def is_good(self, rate: float) -> bool:
        """Whether a rate reaches the target."""
        return _reaches(self.attainment(rate), self.target)

    def bracket(self, rate: float) -> tuple[float, float]:
        """A good rate, 0 if none is known, and a higher bad one, infinity if none is known; at most a factor of 2."""
        if self.is_good(rate):
            good = rate
            while good < self.high:
                rate = min(2 * good, self.high)
                if not self.is_good(rate):
                    return good, rate
                good = rate
            return good, math.inf
        # The lowest rate comes next: no other one is needed of a system that no rate suits.
        bad = rate
        if not self.is_good(self.low):
            return 0.0, self.low
        good = self.low
        while bad > 2 * good:
            rate = bad / 2
            if self.is_good(rate):
                good = rate
            else:
                bad = rate
        return good, bad

    def narrow(self, good: float, bad: float) -> tuple[float, float]:
        """A bracket of at most the tolerance within another one."""
        while good > 0 and bad < math.inf and bad > good * (1 + self.tolerance):
            middle = math.sqrt(good * bad)
            if self.is_good(middle):
                good = middle
            else:
                bad = middle
        return good, bad

    def result(self, good: float, bad: float, fresh: tuple[int, ...]) -> Goodput:
        """The goodput, tested with fresh seeds."""
        if not good:
            return self._found(0.0, Verdict.INFEASIBLE, [self.attainment(self.low)], confirmed=False)
        verdict = Verdict.FOUND if bad < math.inf else Verdict.UNBOUNDED
        if not fresh:
            return self._found(good, verdict, [self.attainment(good)], confirmed=False)
        for _ in range(MOST_STEPS + 1):
            shares = [self.share(good, seed) for seed in fresh]
            if _reaches(fmean(shares), self.target):
                return self._found(good, verdict, shares, confirmed=True)
            if good == self.low:
                return self._found(0.0, Verdict.INFEASIBLE, shares, confirmed=False)
            tested, verdict = good, Verdict.FOUND
            good = max(self.low, good / (1 + self.tolerance))
        return self._found(tested, verdict, shares, confirmed=False)

    def _found(self, rate: float, verdict: Verdict, shares: Sequence[float], *, confirmed: bool) -> Goodput:
        rates = sorted({rate for rate, seed in self.shares if seed in self.seeds})
        return Goodput(
            rate=rate,
            attainment=fmean(shares),
            verdict=verdict,
            confirmed=confirmed,
            spread=max(shares) - min(shares),
            target=self.target,
            points=tuple(RatePoint(rate, self.attainment(rate)) for rate in rates),
        )


def _reaches(attainment: float, target: float) -> bool:
    return attainment >= target - ROUNDING
