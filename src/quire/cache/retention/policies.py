"""Which tokens each head keeps: FastGen's policies, as numbers. Knows marks, sums and positions; no pages, no requests.

A policy is a prefix of a chain of members, each of which adds tokens to those of the members before it:

    special       tokens that begin a sequence or a turn
    punctuation   . : ? and the like
    frequent      among all other tokens those with the most attention, a share of the current length
    local         the last tokens, a share of the prompt's length
    full          all tokens, for a head of which no shorter chain recovers enough attention

    recovery(C) = mean_i sum_{j in C} A_ij,   A_ij the attention of row i to column j

Once in a request, a head takes the shortest chain whose recovery reaches the threshold. Each chain holds the one before
it, so the shortest is the cheapest. The tokens that the head keeps then change by the rules of its members.

Source: FastGen, arXiv 2310.01801, equations 1 and 2 and algorithms 1 and 2. The paper does not name a norm: recovery is
one minus the total variation between a row and the same row over the kept columns alone, averaged over rows. Unlike
there, query heads that share a kv head have one policy, by the mean of their attention; a share of the length is
rounded up; and tokens are dropped when a chunk is sealed, not with every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Bools, Bytes, Int32s

Sums = NDArray[np.float64]

MEMBERS = ("special", "punctuation", "frequent", "local")

LocalRecovery = Callable[[Bools, int], Sums]
"""Recovery of all heads over the rows that are profiled, float64 [L, H]. The heads keep columns, bool [L, H, n], and of
each row a number of last tokens, itself among them."""


@dataclass(frozen=True)
class PolicyChain:
    """The members that may keep tokens, and the share of attention that they must recover.

    threshold  the least recovery of a head; above 1 only `full` passes
    frequent   share of the current length that this member keeps
    local      share of the prompt's length that this member keeps
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
        """The policy that keeps everything. Policy p keeps members 0 to p of the chain."""
        return len(self.members)

    def has(self, policies: Bytes, member: str) -> Bools:
        """Which policies have a member; `full` has none."""
        return (policies >= (*self.members, member).index(member)) & (policies < self.full)

    def num_frequent(self, num_tokens: int) -> int:
        """Number of tokens of a sequence that `frequent` keeps beside those of other members."""
        return math.ceil(self.frequent * num_tokens)

    def num_local(self, num_prompt: int) -> int:
        """Number of last tokens of a sequence that `local` keeps, however long the sequence has become."""
        return math.ceil(self.local * num_prompt)


@dataclass(frozen=True)
class RetentionDecision:
    """The tokens that heads keep of a prompt of n tokens, and why.

    policies  uint8 [L, H], see `PolicyChain.full`
    kept      bool [L, H, n]
    recovery  float64 [L, H, chain + 1], of each policy up to the one that passed; nan for the others
    chain     the chain of the decision
    budget    the budget of the decision, or None; with one, the chain only determines which heads have sums
    """

    policies: Bytes
    kept: Bools
    recovery: Sums
    chain: PolicyChain
    budget: float | None = None

    @property
    def kept_fraction(self) -> float:
        """Kept tokens / all tokens, over all heads."""
        return float(self.kept.mean())


def decide(
    chain: PolicyChain, marks: Mapping[str, Bools], sums: Sums, local_recovery: LocalRecovery
) -> RetentionDecision:
    """The policies of a prompt's heads, and the tokens they keep.

    marks     bool [n] for `special` and `punctuation`
    sums      float64 [L, H, n]: each column's attention, summed over all rows, averaged over the query heads of a kv
              head
    """
    *shape, num_tokens = sums.shape
    policies, kept = np.full(shape, chain.full, np.uint8), np.ones(sums.shape, bool)
    recovery = np.full((*shape, chain.full + 1), np.nan)
    columns = np.zeros(sums.shape, bool)  # of members that keep columns
    window, last = 0, np.zeros(num_tokens, bool)  # of the last tokens, once a member keeps them
    for policy, member in enumerate(chain.members):
        if member == "local":
            window = chain.num_local(num_tokens)
            last = np.arange(num_tokens) >= num_tokens - window
        elif member == "frequent":
            columns = columns | largest(sums, ~(columns | last), chain.num_frequent(num_tokens))
        else:
            columns = columns | marks[member]
        found = local_recovery(columns, window) if window else (sums * columns).sum(-1) / num_tokens
        left = policies == chain.full  # heads for which nothing has passed
        recovery[left, policy] = found[left]
        passes = left & (found >= chain.threshold)
        policies[passes], kept[passes] = policy, (columns | last)[passes]
    recovery[policies == chain.full, chain.full] = 1.0
    return RetentionDecision(policies, kept, recovery, chain)


def select_while_decoding(
    chain: PolicyChain,
    policies: Bytes,
    positions: Int32s,
    marks: Mapping[str, Bools],
    sums: NDArray[Any],
    num_prompt: int,
    num_tokens: int,
) -> Bools:
    """The tokens that heads keep of a sequence that has grown to `num_tokens`, bool [L, H, slots].

    policies   uint8 [L, H]
    positions  int32 [L, H, slots], in any order: of the tokens kept before, and of all tokens since; -1 in other slots
    marks      bool [num_tokens]
    sums       [L, H, slots], the attention that these tokens got so far
    """
    first_local = num_tokens - chain.num_local(num_prompt)
    held = positions >= 0
    kept: Bools = held & (policies == chain.full)[..., None]
    for member in chain.members:
        if member != "frequent":
            found = positions >= first_local if member == "local" else marks[member][positions]
            kept |= held & found & chain.has(policies, member)[..., None]
    heads = chain.has(policies, "frequent")
    kept[heads] |= largest(sums[heads], (held & ~kept)[heads], chain.num_frequent(num_tokens), positions[heads])
    return kept


def largest(sums: NDArray[Any], candidates: Bools, count: int, order: Int32s | None = None) -> Bools:
    """The `count` candidates with the largest sums of each row, bool [..., n]; all candidates if there are fewer. Among
    equal sums the first in `order`, [..., n], win; by default the first in the row.
    """
    size = sums.shape[-1]
    if count >= size:
        return candidates.copy()
    values = np.where(candidates, sums, -np.inf)
    # A full sort takes a quarter of the time of a partition where many sums are equal.
    least = np.sort(values)[..., size - count : size - count + 1].min(-1, keepdims=True, initial=np.inf)
    found: Bools = candidates & (values >= least)
    surplus = found.sum(-1) - count
    for row in zip(*np.nonzero(surplus > 0), strict=True):
        equal = np.flatnonzero(values[row] == least[row])
        if order is not None:
            equal = equal[np.argsort(order[row][equal])]
        found[row][equal[-surplus[row] :]] = False
    return found


def occurrences(tokens: Sequence[int] | Int32s, marks: Sequence[Sequence[int]]) -> Bools:
    """The tokens that belong to a marker, bool [n]. A marker is one token or more in a row."""
    ids = np.asarray(tokens, np.int64)
    singles = [mark[0] for mark in marks if len(mark) == 1]
    found = np.isin(ids, singles) if singles else np.zeros(len(ids), bool)
    for mark in marks:
        if 1 < len(mark) <= len(ids):
            begins = (np.lib.stride_tricks.sliding_window_view(ids, len(mark)) == mark).all(1)
            for place in range(len(mark)):
                found[place : place + len(begins)] |= begins
    return found
