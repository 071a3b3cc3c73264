"""When a placement should be searched again: requests have changed, and have stayed changed. No clock, no cluster.

quiet --a window differs--> suspect --the next windows differ too--> search --better--> switch --> quiet
                               |                                        |
                               +------- a window is as planned          +--- not better by enough: quiet, and what is
                                        again: quiet                         now counts as planned

A window of requests differs from what was planned for if a mean length or its hit rate is off by more than a share, or
if its rate exceeds what the placement serves by that share. Chance must not explain it. Fewer requests are no reason to
search: the placement that serves most still does. Searches are rare: see `Patience`.

Source: DistServe, arXiv 2401.09670, section 4.3, which searches again when the pattern of requests shifts, and does not
say when that is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from quire.errors import ConfigError
from quire.options import format_number
from quire.records import above

NAMES = {"rate": "requests/s", "mean_in": "prompt tokens", "mean_out": "answer tokens", "shared": "cached share"}
"""What is watched, in words."""

LONGEST = 20
"""Windows that last this many times as long as wanted end, however few requests they have."""


class Seen(NamedTuple):
    """A request that was answered.

    num_in      tokens of its prompt
    num_out     tokens of its answer
    num_cached  prompt tokens that were cached
    """

    num_in: int
    num_out: int
    num_cached: int


@dataclass(frozen=True)
class TrafficStats:
    """What a placement was planned for, or what requests are now.

    rate      requests/s; of a placement those that it serves
    mean_in   tokens of a prompt
    mean_out  tokens of an answer
    shared    share of the prompts' tokens that are cached
    errors    standard error of each of these by name; empty: they are exact
    """

    rate: float
    mean_in: float
    mean_out: float
    shared: float
    errors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("rate", "mean_in", "mean_out"):
            above(getattr(self, name), name)
        if not 0 <= self.shared <= 1:
            raise ConfigError(f"shared is {self.shared!r}; it must be a share from 0 to 1")

    @classmethod
    def of(cls, arrived: Sequence[float], answered: Iterable[Seen], seconds: float) -> TrafficStats | None:
        """What the requests of some seconds are like; None for fewer than two that arrived or were answered.

        arrived  when requests arrived, answered or not: of a cluster with too many of them, answers tell what it can do
        """
        found = list(answered)
        count, num_arrived = len(found), len(arrived)
        if min(count, num_arrived) < 2 or seconds <= 0:
            return None
        ins, outs = [each.num_in for each in found], [each.num_out for each in found]
        total = sum(ins)
        shares = [each.num_cached / each.num_in for each in found]
        errors = {
            "rate": _burstiness(arrived) * math.sqrt(num_arrived) / seconds,
            "mean_in": _error(ins),
            "mean_out": _error(outs),
            "shared": _error(shares),
        }
        cached = sum(each.num_cached for each in found)
        return cls(num_arrived / seconds, total / count, sum(outs) / count, cached / total, errors)


def _burstiness(arrived: Sequence[float]) -> float:
    """Coefficient of variation of the gaps, by which a count varies more than that of Poisson arrivals; at least 1."""
    gaps = [after - before for before, after in itertools.pairwise(arrived)]
    mean = sum(gaps) / len(gaps)
    return max(1.0, math.sqrt(sum((each - mean) ** 2 for each in gaps) / len(gaps)) / mean) if mean > 0 else 1.0


def _error(values: list[int] | list[float]) -> float:
    """Standard error of the mean."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((each - mean) ** 2 for each in values) / (len(values) - 1) / len(values))


@dataclass(frozen=True)
class Change:
    """A feature that is not as planned."""

    feature: str
    planned: float
    now: float

    def __str__(self) -> str:
        return f"{NAMES[self.feature]} {format_number(self.planned)} -> {format_number(self.now)}"


@dataclass(frozen=True)
class Patience:
    """How much has to change, and how often a search may run.

    share        relative change of rate and lengths, and absolute change of the hit rate, that matters
    deviations   standard errors of a window beyond which a change is not chance
    windows      consecutive windows that must differ
    seconds      of a window, at least
    requests    of a window, at least, unless it takes much too long
    pause        least seconds from one search to the next
    gain         relative gain in goodput for which a switch pays
    """

    share: float = 0.25
    deviations: float = 4.0
    windows: int = 3
    seconds: float = 60.0
    requests: int = 50
    pause: float = 600.0
    gain: float = 0.1


def changes(planned: TrafficStats, now: TrafficStats, patience: Patience) -> list[Change]:
    """What has changed by more than matters and by more than chance."""
    found = []
    for name in NAMES:
        before, after = getattr(planned, name), getattr(now, name)
        least = patience.share * (1.0 if name == "shared" else before)
        change = after - before if name == "rate" else abs(after - before)
        if change > max(least, patience.deviations * now.errors.get(name, 0.0)):
            found.append(Change(name, before, after))
    return found


class Phase(Enum):
    """Where a replanner is; see the module."""

    QUIET = "quiet"
    SUSPECT = "suspect"
    SEARCH = "search"
    SWITCH = "switch"


class Replanner:
    """Decides when to search, and whether to switch. Times are seconds of the caller's clock.

    planned   what the placement was planned for
    phase     where it is
    reason    what has changed, since it suspects that anything has
    since     when the first of the windows began that differ; infinite: none does
    """

    def __init__(self, planned: TrafficStats, patience: Patience, now: float) -> None:
        self.planned, self.phase = planned, Phase.QUIET
        self.reason: list[Change] = []
        self.since = math.inf
        self._patience = patience
        self._served = 0.0
        self._begin(now)
        self._differing = 0
        self._searched = -math.inf
        self._current: TrafficStats | None = None

    def note_arrival(self, now: float) -> None:
        """A request arrives."""
        self._arrived.append(now)

    def note(self, request: Seen) -> None:
        """A request was answered."""
        self._seen.append(request)

    def pause(self, now: float) -> None:
        """The cluster runs no placement now. The window begins again."""
        self._begin(now)

    def tick(self, now: float) -> bool:
        """Looks at the window if it is over. Returns whether a search should begin now."""
        seconds = now - self._window_begun
        least, is_busy = self._patience.seconds, self.phase in (Phase.SEARCH, Phase.SWITCH)
        is_long = len(self._seen) >= self._patience.requests or seconds >= LONGEST * least
        if seconds < least or not is_long or is_busy:
            return False
        current, begun = TrafficStats.of(self._arrived, self._seen, seconds), self._window_begun
        self._begin(now)
        if current is None:
            return False
        found = changes(self.planned, current, self._patience)
        self._differing = self._differing + 1 if found else 0
        self.since = min(self.since, begun) if found else math.inf
        self.reason = found
        self.phase = Phase.SUSPECT if found else Phase.QUIET
        if self._differing < self._patience.windows or now < self._searched + self._patience.pause:
            return False
        self.phase, self._searched, self._current = Phase.SEARCH, now, current
        return True

    def found(self, goodput: float, present: float, now: float) -> bool:
        """A search has ended. Returns whether to switch.

        goodput  requests/s of the placement that it found
        present  requests/s that the present placement is predicted to serve of the same requests
        """
        assert self.phase is Phase.SEARCH and self._current is not None, f"a search that was not wanted: {self.phase}"
        if goodput >= present * (1 + self._patience.gain):
            self.phase, self._served = Phase.SWITCH, goodput
            return True
        self._served = present
        self._settle(now)
        return False

    def failed(self, now: float) -> None:
        """A search has found nothing, or a switch did not succeed. What requests are now counts as planned."""
        self._settle(now)

    def switched(self, now: float) -> None:
        """The cluster runs the placement that was found."""
        assert self.phase is Phase.SWITCH, f"a switch that was not wanted: {self.phase}"
        self._settle(now)

    def _begin(self, now: float) -> None:
        """A window begins."""
        self._window_begun = now
        self._arrived: list[float] = []
        self._seen: list[Seen] = []

    def _settle(self, now: float) -> None:
        if (now_is := self._current) is not None:
            rate = max(now_is.rate, self._served)
            self.planned = TrafficStats(rate, now_is.mean_in, now_is.mean_out, now_is.shared)
        self.phase, self._differing, self.reason, self._current = Phase.QUIET, 0, [], None
        self.since, self._served = math.inf, 0.0
        self._begin(now)
