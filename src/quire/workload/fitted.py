"""Distributions fitted to a workload, and workloads drawn from them.

Gaps between arrivals are a gamma distribution with the rate and the coefficient of variation of the workload.
Everything else is drawn as it stood in the workload, so that what depends on each other stays together:

- A request is drawn with its prompt and its answer, not each from its own distribution: long prompts may have short
  answers.
- A conversation is drawn whole, with its pauses.
- Conversations that share a beginning are drawn together, as a group, with the distances that they had in the workload,
  counted in conversations. Each copy of a group gets spans of its own: it shares with itself what the group shares, and
  nothing with other copies. So the share of cached tokens survives, and how far apart requests that share are, which
  decides what a cache of limited size still has. Requests drawn one by one would share with copies of themselves.
- A beginning of at least 5 % of all conversations, such as a system prompt, makes no group. All copies share it.

A copy of a group begins where a random group of similar extent began in the workload. So arrivals are as dense at
every place as in the workload, and no copy is longer than it. More requests than the workload has are drawn as several
workloads in a row, with none of their groups in common; fewer are a part of one from a random place on.

Source: DistServe, arXiv 2401.09670, section 4 (fits distributions to the history and resamples them). The prefixes are
ours.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quire.errors import ConfigError
from quire.workload.workload import Arrivals, Floats, Ints, Workload

COMMON_SHARE = 0.05
"""Share of the conversations that a common beginning has at least."""
COMMON_LEAST = 20
"""Conversations that it has at least: few are rather a group."""
ACCEPTED = 0.05
"""Kolmogorov-Smirnov distance of the lengths up to which a fit is accepted."""
SIMILAR = 0.01
"""Groups of similar extent are this share of all groups apart, if groups are sorted by it."""
REGULAR = 1e-6
"""Gaps with a smaller coefficient of variation differ by rounding alone."""
SETTLED = 0.95
"""Share of the rate that arrives before requests count. In the beginning no conversation has paused yet."""
MOST_DRAWN = 8
"""The most requests that are drawn, as a multiple of those that count. The others come before them."""
JUDGED = 20_000
"""Requests that are drawn to measure distances of lengths. On average so few are 0.006 away from what they are drawn
from."""


@dataclass(frozen=True, eq=False)
class Groups:
    """The conversations of a workload, in groups that share a beginning.

    source      all requests
    order       i64 [n]: their indices, by conversation
    turns       i64 [conversations + 1]: conversation c has the requests order[turns[c]] to order[turns[c + 1]]
    before      i64 [n]: of a request that follows another, that one's index in the conversation; else -1
    members     i64 [conversations]: conversations by group, in the order of the workload
    bounds      i64 [groups + 1]: group g has the conversations members[bounds[g]] to members[bounds[g + 1]]
    places      i64 [conversations]: by member, conversations of the workload since the first one of its group
    span_ids    i64 [spans]: an id of a common beginning from 0; another one from `num_common`, within its group
    num_common  number of ids of common beginnings
    num_ids     i64 [groups]: number of the other ids
    """

    source: Arrivals
    order: Ints
    turns: Ints
    before: Ints
    members: Ints
    bounds: Ints
    places: Ints
    span_ids: Ints
    num_common: int
    num_ids: Ints

    @property
    def mean_turns(self) -> float:
        """Mean number of requests of a conversation."""
        return len(self.source) / (len(self.turns) - 1)

    @classmethod
    def of(cls, source: Arrivals) -> Groups:
        """Finds them."""
        count = len(source)
        roots = np.flatnonzero(source.after < 0)
        conversation = np.cumsum(source.after < 0) - 1
        for index in np.flatnonzero(source.after >= 0).tolist():
            conversation[index] = conversation[source.after[index]]
        order = np.argsort(conversation, kind="stable")
        turns = _bounds(np.bincount(conversation, minlength=len(roots)))
        rank = np.empty(count, dtype=np.int64)
        rank[order] = np.arange(count)
        rank -= turns[conversation]
        before = np.where(source.after < 0, -1, rank[source.after])

        parts, depths = _parts(source, roots)
        members = np.array(list(itertools.chain.from_iterable(parts)), dtype=np.int64)
        bounds = _bounds(np.array([len(part) for part in parts], dtype=np.int64))
        lengths = np.diff(bounds)
        places = members - np.repeat(members[bounds[:-1]], lengths)

        group = np.empty(len(roots), dtype=np.int64)
        group[members] = np.repeat(np.arange(len(parts)), lengths)
        num_spans = np.diff(source.start)
        span_group = np.repeat(group[conversation], num_spans)
        is_common = np.zeros(len(source.ids), dtype=np.bool_)
        is_common[_ranges(source.start[roots], depths)] = True
        common, span_ids = np.unique(source.ids[is_common]), np.empty(len(source.ids), dtype=np.int64)
        span_ids[is_common] = np.searchsorted(common, source.ids[is_common])
        own = np.flatnonzero(~is_common)
        own = own[np.lexsort((source.ids[own], span_group[own]))]
        groups, ids = span_group[own], source.ids[own]
        is_new = np.ones(len(own), dtype=np.bool_)
        is_new[1:] = (groups[1:] != groups[:-1]) | (ids[1:] != ids[:-1])
        num_ids = np.bincount(groups[is_new], minlength=len(parts))
        span_ids[own] = len(common) + np.cumsum(is_new) - 1 - _bounds(num_ids)[groups]
        return cls(source, order, turns, before, members, bounds, places, span_ids, len(common), num_ids)

    def draw(self, count: int, random: np.random.Generator) -> Arrivals:
        """Draws `count` requests. All times are 0."""
        sizes, lengths = np.diff(self.turns), np.diff(self.bounds)
        period, periods = len(sizes), math.ceil(count / len(self.source))
        # As many groups as have the requests of whole periods, so that these are as dense as the workload.
        totals = np.add.reduceat(sizes[self.members], self.bounds[:-1])
        groups = random.integers(len(lengths), size=periods * len(lengths))
        while totals[groups].sum() < periods * len(self.source):
            groups = np.append(groups, random.integers(len(lengths), size=periods * len(lengths)))
        groups = groups[: np.searchsorted(np.cumsum(totals[groups]), periods * len(self.source)) + 1]
        starts = self._starts(groups, random) + period * random.integers(periods, size=len(groups))
        copies = np.repeat(np.arange(len(groups)), lengths[groups])
        entries = _ranges(self.bounds[groups], lengths[groups])
        order = np.argsort(starts[copies] + self.places[entries], kind="stable")
        chosen, copies = self.members[entries[order]], copies[order]
        first = 0
        if count < len(self.source):
            # Any conversation that enough requests follow.
            ends = np.cumsum(sizes[chosen])
            first = int(random.integers(np.searchsorted(ends, ends[-1] - count, side="right") + 1))
        return self._copied(chosen[first:], groups, copies[first:], count)

    def _starts(self, groups: Ints, random: np.random.Generator) -> Floats:
        """Places in the workload where copies of groups begin: where other groups of similar extent did."""
        extents, firsts = self.places[self.bounds[1:] - 1], self.members[self.bounds[:-1]]
        total = len(extents)
        order = np.lexsort((random.random(total), extents))
        rank = np.empty(total, dtype=np.int64)
        rank[order] = np.arange(total)
        near = max(1, int(SIMILAR * total))
        # Reflected at both ends, so that every group lends its place as often.
        other = rank[groups] + random.integers(-near, near + 1, len(groups))
        other = np.minimum(np.maximum(other, -1 - other), 2 * total - 1 - other)
        places: Floats = firsts[order[other]] + random.random(len(groups))
        return places

    def _copied(self, chosen: Ints, groups: Ints, copies: Ints, count: int) -> Arrivals:
        """The first `count` requests of some conversations.

        chosen  i64 [c]: conversations
        groups  i64 [k]: groups of the copies
        copies  i64 [c]: the copies that the conversations belong to
        """
        source, sizes = self.source, np.diff(self.turns)[chosen]
        begins = np.repeat(np.cumsum(sizes) - sizes, sizes)[:count]
        requests = self.order[_ranges(self.turns[chosen], sizes)[:count]]
        before = self.before[requests]
        num_spans = np.diff(source.start)[requests]
        spans = _ranges(source.start[requests], num_spans)
        own = self.num_ids[groups]
        base = np.repeat(np.repeat((np.cumsum(own) - own)[copies], sizes)[:count], num_spans)
        ids = self.span_ids[spans]
        return Arrivals(
            np.zeros(count),
            source.pause[requests],
            source.num_out[requests],
            np.where(before < 0, -1, begins + before),
            _bounds(num_spans),
            np.where(ids < self.num_common, ids, ids + base),
            source.sizes[spans],
        )


@dataclass(frozen=True, eq=False)
class Fitted:
    """A workload as distributions; see the module's docstring.

    name      of the workload
    rate      requests per second
    cv        coefficient of variation of the gaps between arrivals
    groups    what the workload's requests are
    ks_in     Kolmogorov-Smirnov distance between the workload's prompt lengths and drawn ones
    ks_out    the same of its answers
    ks_gaps   the same of its gaps and the gamma distribution. Far from 0 where silences interrupt the traffic: Azure's
              trace of a code assistant has 0.91
    """

    name: str
    rate: float
    cv: float
    groups: Groups
    ks_in: float
    ks_out: float
    ks_gaps: float

    @property
    def accepted(self) -> bool:
        """Whether drawn lengths are like those of the workload. Gaps do not count: the rate may be another one."""
        return max(self.ks_in, self.ks_out) < ACCEPTED

    @cached_property
    def settling(self) -> float:
        """Seconds until SETTLED of the rate arrives: pauses delay the rest. 0 without conversations."""
        waited = Workload(self.name, self.groups.source).waited
        return float(np.quantile(waited, SETTLED)) if self.groups.mean_turns > 1 else 0.0

    def sample(self, count: int, seed: int, rate: float | None = None) -> Workload:
        """Draws `count` requests.

        The same seed gives the same requests at any rate, and the same gaps in units of the mean gap. Pauses are not
        scaled, so conversations reach the rate only after them: see `steady`.

        rate  requests per second; None: as fitted
        Raises ConfigError for a rate that is none.
        """
        rate = self.rate if rate is None else rate
        if not 0 < rate < math.inf:
            raise ConfigError(f"a rate is {rate}; it must be above 0 requests per second")
        assert count >= 1, count
        draws, gaps = (np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(2))
        drawn = self.groups.draw(count, draws)
        is_root = drawn.after < 0
        num_roots = int(is_root.sum())
        units = gaps.gamma(self.cv**-2, self.cv**2, num_roots) if self.cv > REGULAR else np.ones(num_roots)
        at = np.zeros(count)
        at[is_root] = np.cumsum(units) * (self.groups.mean_turns / rate)
        return Workload(self.name, dataclasses.replace(drawn, at=at))

    def steady(self, count: int, seed: int, rate: float | None = None) -> Workload:
        """Draws requests that arrive at the rate from `counted[0]` on: conversations are under way then. About `count`
        requests arrive within `counted`. Without conversations this is `sample`.
        """
        if self.groups.mean_turns == 1:
            return self.sample(count, seed, rate)
        rate = self.rate if rate is None else rate
        whole = self.sample(MOST_DRAWN * count, seed, rate)
        begin = min(self.settling, (MOST_DRAWN - 1) * count / rate)
        end = begin + count / rate
        comes = whole.waited < end - whole.begun
        comes[0] = True
        return dataclasses.replace(whole.only(comes), counted=(begin, end))

    def settles(self, count: int, rate: float) -> bool:
        """Whether `steady` reaches the rate. Long pauses need more than MOST_DRAWN * count requests."""
        return self.settling * rate <= (MOST_DRAWN - 1) * count


def fit(workload: Workload) -> Fitted:
    """Fits distributions to a workload.

    Where its clock ticks, arrivals of a tick are spread over it: see `_spread`.
    Raises ConfigError if all its requests arrive at once.
    """
    if math.isinf(workload.rate):
        raise ConfigError(f"all requests of the workload {workload.name} arrive at once; a fit needs their times")
    groups = Groups.of(workload.columns)
    gaps = np.diff(_spread(workload.times))
    cv = float(gaps.std() / gaps.mean())
    drawn = Workload(workload.name, groups.draw(JUDGED, np.random.default_rng(0)))
    return Fitted(
        workload.name,
        workload.rate,
        cv,
        groups,
        _distance(workload.prompt_tokens, drawn.prompt_tokens),
        _distance(workload.columns.num_out, drawn.columns.num_out),
        _gamma_distance(gaps / gaps.mean(), cv),
    )


def _parts(source: Arrivals, roots: Ints) -> tuple[list[list[int]], Ints]:
    """Groups of conversations that share a beginning, and the spans of common beginnings before it.

    roots    i64 [conversations]: their first requests
    returns  conversations of each group; i64 [conversations]: number of common spans that their prompts begin with
    """
    starts, ends = source.start[roots].tolist(), source.start[roots + 1].tolist()
    ids = source.ids.tolist()
    least = max(COMMON_LEAST, math.ceil(COMMON_SHARE * len(roots)))
    depths = np.zeros(len(roots), dtype=np.int64)
    parts: list[list[int]] = []
    waiting = [(0, list(range(len(roots))))]
    while waiting:
        depth, alike = waiting.pop()
        depths[alike] = depth
        following: dict[int, list[int]] = {}
        for each in alike:
            place = starts[each] + depth
            if place == ends[each]:
                parts.append([each])
            else:
                following.setdefault(ids[place], []).append(each)
        for part in following.values():
            if len(part) < least:
                parts.append(part)
            else:
                waiting.append((depth + 1, part))
    return parts, depths


def _spread(times: Floats) -> Floats:
    """Arrival times without the ticks of a coarse clock.

    If many arrive at a time and no two times are much closer than the typical ones, the clock ticks, as that of the
    Mooncake traces every 3 s. Gaps of 0 s and 3 s would then pass for bursts. Arrivals of a tick are put at random
    places before the next tick, where those of a Poisson process are if their number is known.
    """
    ticks, counts = np.unique(times, return_counts=True)
    steps = np.diff(ticks)
    if len(ticks) == len(times) or not len(steps) or steps.min() < 0.9 * np.median(steps):
        return times
    lengths = np.repeat(np.append(steps, np.median(steps)), counts)
    return np.sort(times + lengths * np.random.default_rng(0).random(len(times)))


def _distance(one: Ints, other: Ints) -> float:
    from scipy import stats

    return float(stats.ks_2samp(one, other, method="asymp").statistic)


def _gamma_distance(units: Floats, cv: float) -> float:
    """How far gaps of mean 1 are from the gamma distribution."""
    from scipy import stats

    if cv <= REGULAR:
        return 0.0
    return float(stats.kstest(units, stats.gamma(cv**-2, scale=cv**2).cdf).statistic)


def _bounds(counts: Ints) -> Ints:
    """Where runs of these lengths begin and the last one ends."""
    bounds = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _ranges(begins: Ints, counts: Ints) -> Ints:
    """The numbers begin, begin + 1, ... of every run, one run after another."""
    firsts = np.cumsum(counts) - counts
    runs: Ints = np.arange(int(counts.sum())) + np.repeat(begins - firsts, counts)
    return runs
