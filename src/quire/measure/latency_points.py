"""The points at which the steps of an engine are measured: how many prompts of which lengths, alone and together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.cache.ledger import PAGE_TOKENS
from quire.engine.engine import Engine

POINTS = ("prompt", "prefix", "decode")
"""Kinds of points: prompts; prompts behind cached tokens; decoding sequences that prompts join."""

LEAST_PROMPT, DECODE_STEPS = 16, 6
"""Tokens of the shortest prompt, and decode steps of a visit before prompts join."""

DETAILS = (2, 1, 0)
"""From many points with long contexts to few with short ones."""

ROUNDS = 3
"""Least number of visits of each point that there should be time for. Fewer points are planned until there is."""


@dataclass(frozen=True)
class DesignPoint:
    """Requests that lead to steps of a kind.

    kind       one of POINTS
    sequences  number that decode together
    own        tokens of each one's prompt behind the shared ones
    shared     first tokens of all prompts, which are cached
    joining    prompts that come after one another: how many at once, and the tokens of each behind the shared ones
    num_joins  prompts of any length that join decoding sequences, one after the other
    """

    kind: str
    sequences: int = 0
    own: int = 0
    shared: int = 0
    joining: tuple[tuple[int, int], ...] = ()
    num_joins: int = 0

    @property
    def num_steps(self) -> int:
        """Steps that it takes, about."""
        return len(self.joining) + 2 * self.num_joins + (DECODE_STEPS + 1) * (self.sequences > 0)

    @property
    def computed_tokens(self) -> int:
        """Tokens that it computes, about."""
        joining = sum(count * length for count, length in self.joining) + self.num_joins * 4 * PAGE_TOKENS
        return self.shared + joining + self.sequences * (self.own + DECODE_STEPS)

    @property
    def cached_tokens(self) -> int:
        """Tokens that are in the cache at once, at most, without prompts of any length."""
        each = self.own + DECODE_STEPS + 4 * self.num_joins + PAGE_TOKENS
        joining = max((count * (length + PAGE_TOKENS) for count, length in self.joining), default=0)
        return self.shared + self.sequences * each + joining


@dataclass(frozen=True)
class Limits:
    """What an engine takes.

    budget   rows of a step
    context  tokens of a sequence
    running  sequences at once
    tokens   tokens of the cache
    shares   whether prompts share what is cached
    """

    budget: int
    context: int
    running: int
    tokens: int
    shares: bool

    @classmethod
    def of(cls, engine: Engine) -> Limits:
        """The limits of an engine without requests."""
        scheduler = engine.scheduler
        return cls(
            scheduler.policy.token_budget,
            engine.max_context,
            min(scheduler.policy.max_running, scheduler.max_queue),
            scheduler.manager.reservations.capacity() * PAGE_TOKENS,
            scheduler.manager.tree.shares,
        )

    def allows(self, point: DesignPoint) -> bool:
        """Whether an engine with these limits can run the requests of a point."""
        longest = max((point.own, *(length for _, length in point.joining))) + point.shared
        return (
            point.cached_tokens <= self.tokens
            and longest <= self.longest
            and max((point.sequences, *(count for count, _ in point.joining))) <= self.running
            and (self.shares or not point.shared)
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt of a point."""
        return min(self.context - 2 * PAGE_TOKENS, self.tokens // 2)


def points_of(limits: Limits, kinds: Sequence[str] = POINTS, detail: int = DETAILS[0]) -> list[DesignPoint]:
    """The points that an engine can take, cheapest first. detail: one of DETAILS."""
    budget, most, fine = limits.budget, limits.longest, DETAILS[0]
    found = [DesignPoint("prompt", joining=((1, length),)) for length in _grid(LEAST_PROMPT, min(budget, most), detail)]
    for count in _grid(2, min(16, limits.running), min(detail, 1)):
        together = (budget // count, budget // (4 * count)) if detail else (budget // (2 * count),)
        found += [
            DesignPoint("prompt", joining=((count, length),)) for length in together if length >= LEAST_PROMPT // 2
        ]
    found.append(DesignPoint("prompt", joining=((1, min(budget * 2 ** (1 + detail), most)),)))
    behind = ((1, 1), (1, LEAST_PROMPT), (1, PAGE_TOKENS), (4, LEAST_PROMPT), (1, budget // 4))
    for depth in (budget // 2, budget * 2**detail)[: 1 + min(detail, 1)]:
        found.append(DesignPoint("prefix", shared=min(depth, most - budget // 2), joining=behind))
    for count in _grid(1, limits.running, detail):
        short = min(PAGE_TOKENS, max(LEAST_PROMPT // 2, budget // count))
        joins = 0 if count == limits.running else 2 + detail
        found.append(DesignPoint("decode", count, short, num_joins=joins))
    for count in _grid(4, limits.running, 0)[: fine if detail < fine else None]:
        depth, long = min(budget * 2**detail // 2, most // 2), min(budget * 2**detail // count, most)
        found.append(DesignPoint("decode", count, LEAST_PROMPT // 2, shared=depth))
        found += [DesignPoint("decode", count, long)] * (long > PAGE_TOKENS)
    found.append(DesignPoint("decode", 1, min(budget * 2**detail, most)))
    chosen = [each for each in dict.fromkeys(found) if each.kind in kinds and limits.allows(each)]
    return sorted(chosen, key=lambda point: point.computed_tokens)


def plan(
    limits: Limits, kinds: Sequence[str], seconds: float, tokens_per_second: float, step_seconds: float
) -> list[DesignPoint]:
    """The points of the highest detail that leaves time for ROUNDS visits of each.

    tokens_per_second  of a long prompt
    step_seconds       of a step with few rows
    """
    for detail in DETAILS:
        points = points_of(limits, kinds, detail)
        needed = sum(each.computed_tokens / tokens_per_second + each.num_steps * step_seconds for each in points)
        if ROUNDS * needed <= seconds:
            break
    return points


def _grid(low: int, high: int, detail: int) -> list[int]:
    """Numbers from `low` to `high`, which is the last one: powers of 4 times `low`; of 2; and those between them."""
    if high < low:
        return []
    found, number = {high}, low
    while number < high:
        found |= {number, number + number // 2} if detail > 1 and number * 3 // 2 < high else {number}
        number *= 4 if detail == 0 else 2
    return sorted(found)
