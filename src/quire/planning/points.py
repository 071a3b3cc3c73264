"""Points of the search of `quire plan auto`: settings with what they need, lose and serve, and which beat which."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from quire.placement.rejected import Rejected
from quire.planning.curves import Loss
from quire.planning.goodput import Goodput
from quire.planning.space import Effect, Settings, Space
from quire.timing.latency import Origin

TIE = 0.02
"""Goodputs that differ by less are equal, and less memory decides."""

SAME = 0.01
"""Memories that differ by less are equal: caches are whole slabs."""

ROUNDING = 1e-9


class Variant(NamedTuple):
    """Settings, with a part of the memory that is left for the cache."""

    settings: Settings
    share: float = 1.0


@dataclass(frozen=True)
class Room:
    """Memory of settings, in bytes.

    cache   of each instance
    total   of everything
    tokens  that all caches hold
    """

    cache: int
    total: int
    tokens: int


@dataclass(frozen=True)
class SettingsPoint:
    """Settings, and what is known of them without trying.

    share    part of the memory left for the cache that it takes
    loss     of quality
    bound    requests/s that it never exceeds
    profile  seconds of typical steps
    speed    where the latency comes from, and how
    units    machines, or GPUs, that it takes
    cost     how long it takes to simulate, beside others
    """

    settings: Settings
    room: Room
    loss: Loss
    bound: float
    profile: tuple[float, ...]
    speed: tuple[Origin, str] = (Origin.FITTED, "")
    share: float = 1.0
    units: int = 1
    cost: int = 1

    @property
    def key(self) -> Variant:
        """What tells it from others."""
        return Variant(self.settings, self.share)

    def name(self, space: Space) -> str:
        """In words."""
        return named(space, self.settings, self.share)


def named(space: Space, settings: Settings, share: float = 1.0) -> str:
    """Settings in words, with the share of the cache that they take."""
    return space.name(settings) + ("" if share == 1 else f", {share:g} of the cache")


@dataclass(frozen=True)
class Tried:
    """A point and its goodput. requests: of the simulations."""

    point: SettingsPoint
    goodput: Goodput
    requests: int

    @property
    def rate(self) -> float:
        """Requests/s per machine, or per GPU."""
        return self.goodput.rate / self.point.units


@dataclass(frozen=True)
class PlanResult:
    """The result of a search.

    chosen    serves most within the quality budget
    frontier  points that no other one beats in goodput, loss and memory, the fastest first
    baseline  what is set without a plan
    finalists points of the last rung
    rejected  all others
    warnings  one sentence for each reason to doubt the result
    """

    chosen: Tried
    frontier: tuple[Tried, ...]
    baseline: Tried | None
    finalists: tuple[Tried, ...]
    rejected: tuple[Rejected[Variant], ...]
    warnings: tuple[str, ...] = ()

    def neighbours(self, space: Space) -> list[tuple[Settings, float, str]]:
        """Settings that differ from the chosen ones in one axis or in the cache's share, and why each lost."""
        own = self.chosen.point
        told = {each.point.key: self._lost(each) for each in self.finalists}
        for each in self.rejected:
            told.setdefault(each.option, each.reason)
        found = []
        for (settings, share), reason in told.items():
            changes = len(settings.differs(own.settings))
            if (changes == 1 and share == own.share) or (not changes and share != own.share):
                found.append((settings, share, reason))
        return found

    def _lost(self, other: Tried) -> str:
        chosen = self.chosen
        if other.point.key == chosen.point.key:
            return "chosen"
        told = f"{other.rate:.4g} requests/s"
        if other.rate < (1 - TIE) * chosen.rate:
            return f"{told}, {1 - other.rate / chosen.rate:.0%} less"
        lost = other.point.loss
        if lost.value > chosen.point.loss.value + ROUNDING:
            return f"{told}, but it loses {lost.value:.2%}"
        if not is_no_worse(lost, chosen.point.loss):
            most = f"up to {lost.most:.2%}" if math.isfinite(lost.most) else "more than one window can tell"
            return f"{told}, but it may lose {most}"
        more = "as much" if needs_no_more(other.point, chosen.point) else "more"
        return f"{told}, no more, and it needs {more} memory"


def covers(space: Space, one: SettingsPoint, other: SettingsPoint) -> bool:
    """Whether a point is at least as good as another one in all that is known without trying: its steps are no longer,
    it loses no more, and its cache holds as much. Whatever else changes what is served must be equal, and so must be
    what steps attend to.

    A cache that holds more serves no less, or at least can be made smaller: points with parts of their caches are tried
    later.
    """
    return (
        all(
            one.settings.of(axis.name) == other.settings.of(axis.name)
            for axis in space.axes
            if axis.effect is not Effect.ADDS or axis.decodes
        )
        and one.share == other.share
        and is_no_worse(one.loss, other.loss)
        and one.room.tokens >= other.room.tokens
        and needs_no_more(one, other)
        and all(mine <= its * (1 + ROUNDING) for mine, its in zip(one.profile, other.profile, strict=True))
    )


def is_no_worse(one: Loss, other: Loss) -> bool:
    """Whether the first loss is at most the second one, and surely at most what the second one surely is at most."""
    return one.value <= other.value + ROUNDING and one.most <= other.most + ROUNDING


def needs_no_more(one: SettingsPoint, other: SettingsPoint) -> bool:
    """Whether the first point takes at most the memory of the second one."""
    return one.room.total <= (1 + SAME) * other.room.total


def beats(one: Tried, other: Tried) -> bool:
    """Whether a point is at least as good in goodput, loss and memory, and better in one of them."""
    mine, its = one.point, other.point
    if not (one.rate >= other.rate and is_no_worse(mine.loss, its.loss) and needs_no_more(mine, its)):
        return False
    return one.rate > other.rate or not is_no_worse(its.loss, mine.loss) or not needs_no_more(its, mine)
