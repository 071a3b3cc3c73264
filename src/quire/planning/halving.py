"""The search of `quire plan auto`: which settings serve most requests for the quality that they may lose.

Points are tried in rungs (successive halving): all of them with few requests, the better ones with more. What is not
tried has a reason that follows from numbers: another point is at least as good in everything that is known without
trying, or an upper bound of its goodput is below what was found. The best points are tried with less memory as well.

Pure: what a point serves comes from a callable, and so does the time. Results are the same however many points the
callable tries at once.

Source of the halving: Jamieson and Talwalkar, Non-stochastic best arm identification, AISTATS 2016. Ours differs: a
rung keeps points that are best for their loss and memory, and not only the fastest ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.errors import QuireError
from quire.placement.rejected import Reason
from quire.planning.curves import Loss
from quire.planning.goodput import Goodput
from quire.planning.points import (
    ROUNDING,
    TIE,
    PlanResult,
    SettingsPoint,
    Tried,
    Variant,
    beats,
    covers,
    is_no_worse,
    needs_no_more,
)
from quire.planning.search import Search
from quire.planning.space import Settings, Space
from quire.timing.latency import Origin

BATCH = 4
"""Points that are tried together. Between batches bounds are compared with what was found."""

SHARES, VARIED = (0.5, 0.25), 6
"""Parts of its cache with which a good point is tried as well, and the number of these points. They are tried with the
choices of late axes, too.
"""


class NoPlanError(QuireError):
    """No settings do what is wanted. The message names what is missing."""


class Rung(NamedTuple):
    """How points are tried.

    requests   of each simulation
    tolerance  of the goodput
    keep       points that go on to the next rung
    confirms   whether fresh requests confirm the goodput
    until      share of the search's time by which it ends
    """

    requests: int
    tolerance: float
    keep: int
    confirms: bool = False
    until: float = 1.0


RUNGS = (Rung(100, 0.12, 16, until=0.5), Rung(200, 0.06, 8, until=0.75), Rung(400, 0.03, 8, confirms=True))
"""At 0.9 attainment, requests of the first rung leave an error of 3 % of the share, and those of the last one 1.5 %."""


class Trial(NamedTuple):
    """A point to try.

    guess  requests/s at which the search begins
    floor  requests/s that others serve who lose no more and need no more memory: a point that serves less is of no use,
           and its goodput need not be known
    """

    point: SettingsPoint
    guess: float
    floor: float = 0.0


def is_open(loss: Loss, budget: float) -> bool:
    """Whether a loss may be within the budget, and more windows would tell: it is modelled, or known from too few."""
    is_settled = loss.origin is Origin.MEASURED and loss.is_within(budget)
    return not is_settled and loss.least <= budget


Evaluate = Callable[[Sequence[Trial], Rung, float], Sequence[Goodput | None]]
"""Goodputs of some points, by a time of the clock; None for those that would take longer."""


@dataclass
class HalvingSearch(Search[Variant]):
    """A search in rungs: see Search.

    space     of the settings
    points    that can run and do not lose far more than the budget, with what is known of them
    evaluate  see Evaluate. Its results do not depend on how many points there are
    quality   loss that the chosen point may have
    made      the point of some settings, with a part of the cache that they can have; None if that cannot run
    refine    points again, with what was measured for them meanwhile; None for one that turned out not to run
    progress  is told the rung, the points done, and all
    rungs     of the halving
    """

    space: Space
    points: Sequence[SettingsPoint]
    evaluate: Evaluate
    quality: float
    made: Callable[[Settings, float], SettingsPoint | None] = lambda settings, share: None
    refine: Callable[[Sequence[SettingsPoint]], Sequence[SettingsPoint | None]] = lambda points: points
    progress: Callable[[int, int, int], None] = lambda rung, done, total: None
    rungs: Sequence[Rung] = RUNGS

    def run(self) -> PlanResult:
        """Searches. Raises NoPlanError if no point meets the targets within the quality budget."""
        points = self._without_covered(self.points)
        begun = self.clock()
        tried: list[Tried] = []
        for number, rung in enumerate(self.rungs):
            if number:
                kept = self._best(tried, self.rungs[number - 1].keep)
                self._leave_slower(tried, kept)
                points = [each.point for each in kept]
                if number == 1:
                    points += self._varied(points[:VARIED])
            if number == len(self.rungs) - 1:
                points = self._refined(points)
            tried = self._try(number, rung, points, tried, begun + rung.until * (self.deadline - begun))
        chosen, tried = self._choose(tried)
        frontier = self._frontier(tried)
        baseline = next((each for each in tried if self._is_baseline(each.point)), None)
        return PlanResult(chosen, tuple(frontier), baseline, tuple(tried), tuple(self.rejected), tuple(self.warnings))

    # ---- what is not tried ---------------------------------------------------------------------------------------

    def _without_covered(self, points: Sequence[SettingsPoint]) -> list[SettingsPoint]:
        found: list[SettingsPoint] = []
        for point in sorted(points, key=lambda each: (each.loss.value, sum(each.profile))):
            over = next((each for each in found if covers(self.space, each, point)), None)
            if over is None or self._is_baseline(point):
                found.append(point)
            else:
                reason = f"{self.space.name(over.settings)} is no slower in any step, loses no more, and holds as much"
                self.reject(point.key, Reason.COVERED, reason)
        return found

    def _varied(self, points: Sequence[SettingsPoint]) -> list[SettingsPoint]:
        """The points with parts of their caches, and with other choices of late axes."""
        found: list[SettingsPoint | None] = []
        for settings in (point.settings for point in points if point.share == 1):
            found += [self.made(settings, share) for share in SHARES]
            found += [self.made(other, 1.0) for other in self.space.later(settings)]
        return [each for each in found if each is not None]

    def _refined(self, points: Sequence[SettingsPoint]) -> list[SettingsPoint]:
        found = self.refine(points)
        for before, after in zip(points, found, strict=True):
            if after is None:
                self.reject(before.key, Reason.UNFIT, "it could not be measured")
        return [each for each in found if each is not None]

    # ---- rungs ---------------------------------------------------------------------------------------------------

    def _try(
        self, number: int, rung: Rung, points: Sequence[SettingsPoint], before: Sequence[Tried], end: float
    ) -> list[Tried]:
        """Tries points, those first that cost little to simulate and may serve much. What there is no time for keeps
        what was found before.
        """
        known = {each.point.key: each for each in before}
        waiting = sorted(points, key=lambda each: (not self._is_baseline(each), each.cost, -self._hope(each, known)))
        done: list[Tried] = []
        late: list[SettingsPoint] = []
        while waiting and not (self.is_over(end) and (known or done)):
            self.progress(number, len(done), len(done) + len(waiting))
            batch, waiting = self._batch(waiting, done, known)
            trials = [self._trial(each, rung, done, known) for each in batch]
            # Something has to be known in the end.
            goodputs = self.evaluate(trials, rung, end if known or done else math.inf) if trials else ()
            for trial, found in zip(trials, goodputs, strict=True):
                point = trial.point
                if found is None:
                    late.append(point)
                elif found.rate or not trial.floor:
                    done.append(Tried(point, found, rung.requests))
                else:
                    reason = f"below {trial.floor / point.units:.4g} requests/s, which others serve who lose no more"
                    self.reject(point.key, Reason.SLOWER, reason)
        self._untried(rung, [*late, *waiting], known, done)
        self.progress(number, len(done), len(done))
        return done

    def _batch(
        self, waiting: Sequence[SettingsPoint], done: Sequence[Tried], known: Mapping[Variant, Tried]
    ) -> tuple[list[SettingsPoint], list[SettingsPoint]]:
        """The next points to try, and those after them. Points that a bound excludes are left."""
        batch: list[SettingsPoint] = []
        for place, point in enumerate(waiting):
            if len(batch) == BATCH:
                return batch, list(waiting[place:])
            better = next((each for each in done if self._excludes(each, point)), None)
            if better is None or point.key in known or self._is_baseline(point):
                batch.append(point)
                continue
            reason = (
                f"at most {point.bound / point.units:.4g} requests/s, but {self.space.name(better.point.settings)} has"
                f" {better.rate:.4g}, loses no more, and needs no more memory"
            )
            self.reject(point.key, Reason.BOUND, reason)
        return batch, []

    def _excludes(self, tried: Tried, point: SettingsPoint) -> bool:
        mine = tried.point
        return (
            tried.rate > point.bound / point.units * (1 + ROUNDING)
            and is_no_worse(mine.loss, point.loss)
            and needs_no_more(mine, point)
        )

    def _untried(
        self,
        rung: Rung,
        waiting: Sequence[SettingsPoint],
        known: Mapping[Variant, Tried],
        done: list[Tried],
    ) -> None:
        if not waiting:
            return
        self.warnings.append(
            f"the time was over before {len(waiting)} of {len(waiting) + len(done)} points were tried with"
            f" {rung.requests} requests; raise --plan.seconds"
        )
        for point in waiting:
            if point.key in known:
                done.append(replace(known[point.key], point=point))
            else:
                self.reject(point.key, Reason.UNTRIED, "the time was over")

    def _trial(self, point: SettingsPoint, rung: Rung, done: Sequence[Tried], known: Mapping[Variant, Tried]) -> Trial:
        before = known.get(point.key) or known.get(Variant(point.settings))
        guess = before.goodput.rate if before is not None else 0.0
        if self._is_baseline(point):
            return Trial(point, guess or point.bound / 2)
        over = [
            each.rate for each in done if is_no_worse(each.point.loss, point.loss) and needs_no_more(each.point, point)
        ]
        floor = (1 - rung.tolerance) * max(over, default=0.0) * point.units
        return Trial(point, max(guess, floor) or point.bound / 2, floor)

    def _hope(self, point: SettingsPoint, known: Mapping[Variant, Tried]) -> float:
        before = known.get(point.key)
        return point.bound / point.units if before is None else before.rate

    def _best(self, tried: Sequence[Tried], count: int) -> list[Tried]:
        """Points that go on, the best ones within the budget first: a half of these, those that are best for what they
        need, and the baseline.
        """
        order = sorted(tried, key=lambda each: (self._depth(each, tried), -each.rate))
        within = sorted((each for each in tried if each.point.loss.is_within(self.quality)), key=self._merit)
        kept = {each.point.key: each for each in [*within[: count // 2], *order]}
        found = list(kept.values())[:count]
        return found + [each for each in tried if self._is_baseline(each.point) and each not in found]

    def _depth(self, one: Tried, tried: Sequence[Tried]) -> int:
        return sum(beats(other, one) for other in tried)

    def _leave_slower(self, tried: Sequence[Tried], kept: Sequence[Tried]) -> None:
        keys = {each.point.key for each in kept}
        for each in tried:
            if each.point.key in keys:
                continue
            better = next((other for other in kept if beats(other, each)), None) or max(kept, key=lambda it: it.rate)
            reason = (
                f"{each.rate:.4g} requests/s with {each.requests} requests, where"
                f" {self.space.name(better.point.settings)} has {better.rate:.4g}"
            )
            self.reject(each.point.key, Reason.SLOWER, reason)

    # ---- the result ----------------------------------------------------------------------------------------------

    def _choose(self, tried: Sequence[Tried]) -> tuple[Tried, list[Tried]]:
        """The best point that is surely within the budget. Losses that may be within it are measured first, as far as
        there is time.
        """
        current = list(tried)
        asked: set[Variant] = set()
        while True:
            is_late = self.is_over(self.deadline)
            served = [each for each in current if each.rate > 0]
            unsure = {
                each.point.key
                for each in served
                if not is_late and each.point.key not in asked and is_open(each.point.loss, self.quality)
            }
            able = [each for each in served if each.point.key in unsure or each.point.loss.is_within(self.quality)]
            if not able:
                raise NoPlanError(self._nothing(current))
            best = self._pick(able)
            point = best.point
            if point.key not in unsure:
                break
            asked.add(point.key)
            (after,) = self.refine([point])
            place = next(index for index, each in enumerate(current) if each is best)
            if after is None:
                del current[place]
            elif after.profile == point.profile:
                current[place] = replace(best, point=after)
            else:
                rung = self.rungs[-1]
                (goodput,) = self.evaluate([Trial(after, best.goodput.rate)], rung, self.deadline)
                current[place] = replace(best, point=after) if goodput is None else Tried(after, goodput, rung.requests)
        if point.loss.origin is not Origin.MEASURED:
            self.warnings.append("the loss of the chosen settings is modelled; give --text and raise --plan.seconds")
        self.warnings += [f"{self.space.name(point.settings)}: {doubt}" for doubt in best.goodput.doubts]
        return best, current

    def _pick(self, within: Sequence[Tried]) -> Tried:
        most = max(each.rate for each in within)
        equal = [each for each in within if each.rate >= (1 - TIE) * most]
        return min(equal, key=self._merit_of_equals)

    def _merit_of_equals(self, each: Tried) -> tuple[int, float, int, float]:
        point = each.point
        return point.room.total, point.loss.value, len(point.settings.differs(self.space.first)), -each.rate

    def _merit(self, each: Tried) -> tuple[float, int]:
        return -each.rate, each.point.room.total

    def _nothing(self, tried: Sequence[Tried]) -> str:
        if any(each.rate > 0 for each in tried):
            least = min((each for each in tried if each.rate > 0), key=lambda each: each.point.loss.most)
            return (
                f"no settings that meet the latency targets lose at most {self.quality:.2%}; the least loss is that of"
                f" {self.space.name(least.point.settings)}: {least.point.loss.value:.2%}, at most"
                f" {least.point.loss.most:.2%}; raise plan.quality, or measure more windows"
            )
        best = max(tried, key=lambda each: each.goodput.attainment)
        return (
            f"no settings meet the latency targets; the best are {self.space.name(best.point.settings)}:"
            f" {best.goodput.attainment:.1%} of requests meet both at the lowest rate; raise slo.ttft or slo.tpot"
        )

    def _frontier(self, tried: Sequence[Tried]) -> list[Tried]:
        best = [each for each in tried if each.rate > 0 and not any(beats(other, each) for other in tried)]
        return sorted(best, key=lambda each: (-each.rate, each.point.room.total))

    def _is_baseline(self, point: SettingsPoint) -> bool:
        return point.settings == self.space.first and point.share == 1
