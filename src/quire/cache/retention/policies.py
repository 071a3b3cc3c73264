"""Which tokens each head keeps: FastGen's policies, as numbers. Knows marks, sums and positions; no pages, no requests.

A policy is how far a head goes along a chain of members, each of which adds tokens to the members before it:

    special       what begins a sequence or a turn
    punctuation   . : ? and the like
    frequent      of all other tokens those with the most attention, a share of the current length
    local         the last ones, a share of the prompt's length
    full          all: what a head keeps if no shorter chain recovers enough of its attention

    recovery(C) = mean_i sum_{j in C} A_ij,   A_ij the attention of row i to column j

A head takes the shortest chain whose recovery reaches the threshold, once a request; what it keeps then changes with
the members' own rules. Since each chain holds the one before it, the shortest is the cheapest.

Source: FastGen, arXiv 2310.01801, equations 1 and 2 and algorithms 1 and 2. The paper does not name a norm: recovery is
one minus the total variation between a row and the same row over the kept columns alone, averaged over rows. Unlike
there: query heads that share a kv head have one policy, by the mean of their attention; a share of the length is
rounded up; what is kept changes when a chunk is sealed and not with every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Sums = NDArray[np.float64]

COLUMN_MEMBERS = ("special", "punctuation", "frequent")
"""Members that keep whole columns, whichever row looks."""

MEMBERS = (*COLUMN_MEMBERS, "local")

LocalRecovery = Callable[[NDArray[np.int64], Mask, int], Sums]
"""Recovery of heads int64 [m], by number, that keep the columns [m, n] and of each row the last so many tokens, itself
among them: float64 [m], over the rows that are profiled."""


@dataclass(frozen=True)
class Chain:
    """What may be kept, and how much of the attention must be.

    threshold  a head's recovery at least; above 1 nothing but `full` passes
    frequent   tokens that member keeps, by the current length
    local      tokens that member keeps, by the prompt's length
    members    in the order in which they are added, each at most once
    """

    threshold: float
    frequent: float = 0.3
    local: float = 0.3
    members: tuple[str, ...] = MEMBERS

    def __post_init__(self) -> None:
        assert len(set(self.members)) == len(self.members) and set(self.members) <= set(MEMBERS), (
            f"no chain: {self.members}"
        )

    @property
    def full(self) -> int:
        """The policy that keeps everything. Policy p keeps the chain's members up to and with number p."""
        return len(self.members)

    def has(self, policy: int, member: str) -> bool:
        """Whether a policy that is not `full` has a member."""
        return member in self.members[: policy + 1]

    def num_frequent(self, num_tokens: int) -> int:
        """Tokens that `frequent` keeps beside those of other members, of a sequence that is so long."""
        return math.ceil(self.frequent * num_tokens)

    def num_local(self, num_prompt: int) -> int:
        """Tokens that `local` keeps, of a sequence with such a prompt, however long it has become."""
        return math.ceil(self.local * num_prompt)


@dataclass(frozen=True)
class Decision:
    """What heads keep of a prompt.

    policies  uint8 [heads], see `Chain.full`
    kept      bool [heads, n]
    recovery  float64 [heads, chain + 1] of every policy that was tried, nan for those past the one that passed
    """

    policies: NDArray[np.uint8]
    kept: Mask
    recovery: Sums


def decide(
    chain: Chain,
    marks: Mapping[str, Mask],
    sums: Sums,
    num_rows: int,
    local_recovery: LocalRecovery,
) -> Decision:
    """The policies of a prompt's heads, and what they keep.

    marks     bool [n] for `special` and `punctuation`
    sums      float64 [heads, n]: each column's attention, summed over rows, averaged over the query heads of a kv head
    num_rows  rows summed over
    Nothing is searched past the policy that passes.
    """
    num_heads, num_tokens = sums.shape
    policies = np.full(num_heads, chain.full, np.uint8)
    kept = np.ones((num_heads, num_tokens), bool)
    recovery = np.full((num_heads, chain.full + 1), np.nan)
    left = np.arange(num_heads)  # heads for which nothing has passed
    columns = np.zeros((num_heads, num_tokens), bool)  # of members that keep columns, for these
    window, last = 0, np.zeros(num_tokens, bool)  # of the last tokens, once a member keeps them
    for policy, member in enumerate(chain.members):
        if not len(left):
            break
        if member == "local":
            window = chain.num_local(num_tokens)
            last = np.arange(num_tokens) >= num_tokens - window
        elif member == "frequent":
            columns = columns | largest(sums[left], ~(columns | last), chain.num_frequent(num_tokens))
        else:
            columns = columns | marks[member]
        found = local_recovery(left, columns, window) if window else (sums[left] * columns).sum(1) / num_rows
        recovery[left, policy] = found
        passes = found >= chain.threshold
        policies[left[passes]] = policy
        kept[left[passes]] = columns[passes] | last
        left, columns = left[~passes], columns[~passes]
    recovery[left, chain.full] = 1.0
    return Decision(policies, kept, recovery)


def keep_on(
    chain: Chain,
    policies: NDArray[np.uint8],
    positions: NDArray[np.int32],
    marks: Mapping[str, Mask],
    sums: NDArray[Any],
    num_prompt: int,
    num_tokens: int,
) -> Mask:
    """What heads keep of a sequence that has grown to `num_tokens`, bool [heads, slots]; never what they had dropped.

    policies   uint8 [heads]
    positions  int32 [heads, slots], in any order: of the tokens they kept, and of all since; -1 in slots without one
    marks      bool [num_tokens]
    sums       [heads, slots], the attention that these tokens have had so far
    """
    window = chain.num_local(num_prompt)
    held = positions >= 0
    for policy in np.unique(policies[policies < chain.full]).tolist():
        heads = policies == policy
        at, alive = positions[heads], held[heads]
        wanted = np.zeros_like(alive)
        for member in ("special", "punctuation"):
            if chain.has(policy, member):
                wanted |= marks[member][at]
        if chain.has(policy, "local"):
            wanted |= at >= num_tokens - window
        wanted &= alive
        if chain.has(policy, "frequent"):
            wanted |= largest(sums[heads], alive & ~wanted, chain.num_frequent(num_tokens), at)
        held[heads] = wanted
    return held


def largest(sums: NDArray[Any], candidates: Mask, count: int, order: NDArray[np.int32] | None = None) -> Mask:
    """Of each row's candidates the `count` with the largest sums; all if there are fewer. Of equals those that `order`,
    [rows, n], names first; by default the first.
    """
    size = sums.shape[1]
    if count >= size:
        return candidates.copy()
    values = np.where(candidates, sums, -np.inf)
    # All of a row sorted takes a quarter of the time of a partition, where many are equal.
    least = np.sort(values, axis=1)[:, size - count, None] if count else np.inf
    found = values > least
    equal = candidates & (values == least)
    missing = count - found.sum(1)
    ties = equal.sum(1) > missing
    found[~ties] |= equal[~ties]
    for row in np.flatnonzero(ties & (missing > 0)).tolist():
        tied = np.flatnonzero(equal[row])
        if order is not None:
            tied = tied[np.argsort(order[row, tied], kind="stable")]
        found[row, tied[: missing[row]]] = True
    return found


def occurrences(tokens: Sequence[int], marks: Sequence[Sequence[int]]) -> Mask:
    """The tokens, bool [n], that belong to one of several markers, each of one token or more in a row."""
    ids = np.asarray(tokens, np.int64)
    found = np.isin(ids, [mark[0] for mark in marks if len(mark) == 1])
    for mark in marks:
        size = len(mark)
        if not 1 < size <= len(ids):
            continue
        begins = (np.lib.stride_tricks.sliding_window_view(ids, size) == np.asarray(mark, np.int64)).all(1)
        for place in range(size):
            found[place : len(ids) - size + 1 + place] |= begins
    return found
