"""Requests to simulate: those of a trace, or drawn like them, at any rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.timing.latency import Origin
from quire.workload.fitted import Fitted, fit
from quire.workload.slo import Slo, finite
from quire.workload.traces import read_workload
from quire.workload.workload import Workload

SHORT = 0.05
"""A doubt is told if a queue that still grows may account for more than this share of a goodput."""

LONGEST = 20
"""A run has at most so many times the requests that are asked for."""


@dataclass(frozen=True, eq=False)
class Load:
    """Requests to simulate.

    workload  as it was recorded
    count     number of requests that count
    fitted    distributions to draw them from; None: the first ones of the workload, whatever the seed
    """

    workload: Workload
    count: int
    fitted: Fitted | None = None

    @classmethod
    def read(cls, file: Path, count: int, *, fitted: bool) -> Load:
        """The requests of a trace. fitted: drawn from distributions; otherwise its first ones. Raises ConfigError."""
        workload = read_workload(file)
        if fitted:
            return cls(workload, count, fit(workload))
        return cls(workload.first(count), min(count, len(workload.arrivals)))

    @property
    def origin(self) -> Origin:
        """Of the requests."""
        return Origin.MEASURED if self.fitted is None else Origin.FITTED

    def drawn(self, rate: float | None, seed: int) -> Workload:
        """The requests at a rate; None: at the workload's own. The same seed gives the same requests at any rate."""
        if self.fitted is not None:
            return self.fitted.steady(self.count, seed, rate)
        found = self.workload.first(self.count)
        return found if rate is None else found.at_rate(rate)

    def within(self, context: int) -> tuple[Load, list[str]]:
        """The load without requests of more than `context` tokens, prompt and answer, and a sentence that says how many
        were left out, if any. What follows such a request is longer, and left out as well. Raises ConfigError if no
        request is left.
        """
        workload = self.workload
        fits = workload.prompt_tokens + workload.columns.num_out <= context
        if fits.all():
            return self, []
        count = int((~fits).sum())
        long = f"{count:,} of {len(fits):,} requests have more than {context:,} tokens, the model's context"
        if not fits.any():
            raise ConfigError(f"{long}; take another trace, or raise model.max_context")
        part = workload.only(fits)
        fitted = None if self.fitted is None else fit(part)
        return replace(self, workload=part, fitted=fitted), [f"{long}, and are left out: a server refuses them"]

    def facts(self) -> dict[str, Any]:
        """Numbers of the requests, for JSON."""
        workload, fitted = self.workload, self.fitted
        found: dict[str, Any] = {
            "name": workload.name,
            "requests": self.count,
            "rate": finite(workload.rate),
            "cv": workload.cv,
            "mean_in": workload.mean_in,
            "mean_out": workload.mean_out,
            "shared": workload.shared,
            "origin": self.origin.value,
        }
        if fitted is not None:
            names = ("ks_in", "ks_out", "ks_gaps", "cv", "accepted")
            found["fit"] = {name: getattr(fitted, name) for name in names}
        return found

    def lasting(self, rate: float, slo: Slo) -> Load:
        """At least so many requests that at this rate a queue that grows shows: that it accounts for at most SHORT of
        the rate if they meet their targets. Requests may wait for their first token, and for room where they are
        decoded, which counts among the seconds of their tokens. See `noted`.
        """
        answer = slo.tpot * float(self.workload.columns.num_out.mean())
        wait = max((each for each in (slo.ttft, answer) if math.isfinite(each)), default=0.0)
        count = math.ceil(rate * wait / (slo.attainment * SHORT)) if math.isfinite(rate) else 0
        return replace(self, count=min(max(self.count, count), LONGEST * self.count))


@dataclass(frozen=True, eq=False)
class Slices(Load):
    """Disjoint slices of a workload, chosen by seed. Gaps are those of the slice, scaled."""

    @property
    def num_slices(self) -> int:
        """Slices of `count` requests. Conversations are one slice, because their requests follow each other."""
        columns = self.workload.columns
        return 1 if (columns.after >= 0).any() else max(1, len(self.workload.arrivals) // self.count)

    def drawn(self, rate: float | None, seed: int) -> Workload:
        """See Load. Seeds that differ by a multiple of `num_slices` draw the same requests."""
        first = seed % self.num_slices * self.count
        if not first:
            return super().drawn(rate, seed)
        columns = self.workload.columns
        begun = float(columns.at[first])
        part = [replace(each, at=each.at - begun) for each in columns[first : first + self.count]]
        found = Workload(self.workload.name, part)
        return found if rate is None else found.at_rate(rate)


def fresh_seeds(load: Load, seed: int, most: int) -> tuple[int, ...]:
    """Seeds that draw other requests than a seed does, each of them others: `most`, or fewer if there are not enough
    requests.
    """
    parts = load.num_slices if isinstance(load, Slices) else 1
    count = most if load.fitted is not None else min(most, parts - 1)
    return tuple(range(seed + 1, seed + 1 + count))
