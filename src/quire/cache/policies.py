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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Sums = NDArray[np.float64]

COLUMN_MEMBERS = ("special", "punctuation", "frequent")
"""Members that keep whole columns, whichever row looks."""

MEMBERS = (*COLUMN_MEMBERS, "local")

SHARES = (1.0, 0.85, 0.7, 0.55, 0.4)
"""Of a budget, how much `frequent` and `local` may keep together, where shares are solved for."""

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
    sizes     int64 [heads, chain + 1], tokens that these keep of those that are packed; all for those past it
    """

    policies: NDArray[np.uint8]
    kept: Mask
    recovery: Sums
    sizes: NDArray[np.int64]


def decide(
    chain: Chain,
    marks: Mapping[str, Mask],
    sums: Sums,
    num_rows: int,
    local_recovery: LocalRecovery,
    num_packed: int | None = None,
) -> Decision:
    """The policies of a prompt's heads, and what they keep.

    marks     bool [n] for `special` and `punctuation`
    sums      float64 [heads, n]: each column's attention, summed over rows, averaged over the query heads of a kv head
    num_rows  rows summed over
    num_packed  first tokens that what is kept of is packed, for `Decision.sizes`; None: all
    Nothing is searched past the policy that passes.
    """
    num_heads, num_tokens = sums.shape
    policies = np.full(num_heads, chain.full, np.uint8)
    kept = np.ones((num_heads, num_tokens), bool)
    recovery = np.full((num_heads, chain.full + 1), np.nan)
    num_packed = num_tokens if num_packed is None else num_packed
    sizes = np.full((num_heads, chain.full + 1), num_packed, np.int64)
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
        sizes[left, policy] = (columns | last)[:, :num_packed].sum(1)
        passes = found >= chain.threshold
        policies[left[passes]] = policy
        kept[left[passes]] = columns[passes] | last
        left, columns = left[~passes], columns[~passes]
    recovery[left, chain.full] = 1.0
    return Decision(policies, kept, recovery, sizes)


def solve(
    chain: Chain,
    budget: float,
    marks: Mapping[str, Mask],
    sums: Sums,
    num_rows: int,
    local_recovery: LocalRecovery,
    page_bytes: NDArray[np.int64],
    page_tokens: int,
    most_bytes: float,
) -> Chain:
    """The chain, with threshold and shares, that recovers most on average over heads and keeps to a budget.

    budget       about the share of the tokens that fits it: where shares are sought
    page_bytes   int64 [heads, chain + 1], of a page and what a policy needs beside it
    page_tokens  that it holds: what is kept of whole pages of tokens is packed into whole pages
    most_bytes   that these may take
    Other arguments as of `decide`. Shares keep the ratio that the chain's have to each other; the larger they are, the
    fewer heads may keep everything. If not even the first member fits, that is what is kept.
    """
    num_heads, num_tokens = sums.shape
    both = max(1e-9, chain.frequent + chain.local)
    found, best = replace(chain, threshold=0.0, frequent=0.0, local=0.0), -1.0
    for share in SHARES:
        frequent, local = (min(1.0, share * budget * part / both) for part in (chain.frequent, chain.local))
        tried = replace(chain, threshold=2.0, frequent=frequent, local=local)
        decision = decide(tried, marks, sums, num_rows, local_recovery, num_tokens // page_tokens * page_tokens)
        taken = -(-decision.sizes // page_tokens) * page_bytes
        reached = np.concatenate((decision.recovery[:, :-1], np.full((num_heads, 1), np.inf)), 1)
        # The more is to be recovered the more is kept: of all thresholds that make a difference the last that fits.
        for threshold in (2.0, *np.unique(decision.recovery[:, :-1])[::-1].tolist()):
            policies = np.argmax(reached >= threshold, axis=1)[:, None]
            if np.take_along_axis(taken, policies, 1).sum() <= most_bytes:
                mean = float(np.take_along_axis(decision.recovery, policies, 1).mean())
                if mean > best:
                    found, best = replace(tried, threshold=threshold), mean
                break
    return found


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
