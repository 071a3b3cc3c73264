"""The demand and limits that retention reports to cache and scheduler, and those of sequences that keep every token."""

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

from quire.cache.counts import ChunkCounts
from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import Path
from quire.cache.segment import PrefixMatch
from quire.cache.tree import PrefixTree

Newcomer = tuple[int, PrefixMatch]
"""Number of tokens to reserve room for, for a sequence that may be admitted, and the chunks it finds in the tree."""


class PromptLimits(NamedTuple):
    """The chunks that a sequence may take from the cache and may add to it. Fixed while its prompt is computed.

    num_reserved   tokens that admission reserves room for
    num_reusable   chunks that the sequence may take from the cache. Its last token is computed, for its logits
    copies_last    whether it may also take a copy of its last chunk, in which its last token is computed again
    num_shareable  chunks that the sequence may add to the tree
    needs_sums     whether it can use cached chunks only up to a boundary with column sums
    may_prefetch   whether it can use chunks that are fetched before its admission
    """

    num_reserved: int
    num_reusable: int
    copies_last: bool = False
    num_shareable: int = sys.maxsize
    needs_sums: bool = False
    may_prefetch: bool = False

    @property
    def num_fetchable(self) -> int:
        """Chunks that a store may bring."""
        return self.num_reusable + self.copies_last

    def find(self, tree: PrefixTree, keys: ChunkKeys) -> PrefixMatch:
        """The chunks in a tree that the sequence may take."""
        found = list(tree.walk(keys, self.num_reusable))
        while self.needs_sums and found and not found[-1][0].has_attachment(found[-1][1]):
            found.pop()
        return found


class SliceLimits(NamedTuple):
    """The limits of the next slice of a sequence.

    end        number of tokens at which it must end, if not before
    undivided  number of tokens before the rows that must be computed in one slice; all if there are no such rows
    """

    end: int
    undivided: int


class Profiling(NamedTuple):
    """The profiling of a slice: see `Profiled`. decides: whether retention decides on the prompt after this slice."""

    last_rows: int
    peaks: int = 0
    near: int = sys.maxsize
    decides: bool = False


class KeepAll:
    """Retention for heads that keep every token. `Retainer` has the same methods for other heads; cache and scheduler
    do not distinguish the two.

    per_chunk    the demand of a running sequence for one more chunk
    bytes_freed  bytes of pages that retention has freed since start
    replays  whether the tokens of an answer are computed differently from those of a prompt. Then chunks with such
             tokens stay out of the tree, where prompts would find them, and after a preemption they are computed again
             one token at a time
    """

    bytes_freed = 0

    def __init__(self, table: ChunkCounts, replays: bool) -> None:
        self.table, self.replays = table, replays
        self.per_chunk = table.demand(1)
        self._limits = functools.lru_cache(4096)(self._limits_of)

    def limits(self, holder: Holder) -> PromptLimits:
        """All tokens but the last one may come from the cache. The last chunk is copied only if sealed chunks are not
        encoded: tokens of an encoded chunk saw each other unencoded, so a part of it cannot be computed again.
        """
        return self._limits(len(holder.token_ids), holder.num_prompt)

    def _limits_of(self, num_tokens: int, num_prompt: int) -> PromptLimits:
        num_shareable = sys.maxsize
        last, copies = num_tokens - 1, not self.table.encodes and num_tokens % PAGE_TOKENS == 0
        if self.replays:
            last, copies = min(last, num_prompt), copies and num_tokens <= num_prompt
            num_shareable = num_prompt // PAGE_TOKENS
        return PromptLimits(num_tokens, last // PAGE_TOKENS, copies, num_shareable, False, True)

    def slice_limits(self, holder: Holder) -> SliceLimits:
        """A slice may have all tokens of the prompt. After the prompt, each replayed token is a slice of its own."""
        end, num_tokens = len(holder.token_ids), holder.path.num_tokens
        if not self.replays:
            return SliceLimits(end, end)
        return SliceLimits(holder.num_prompt if num_tokens < holder.num_prompt else num_tokens + 1, end)

    def profiling(self, holder: Holder, end: int) -> Profiling | None:
        """None: no slice is profiled."""
        return None

    def must_wait(self, holder: Holder) -> bool:
        """False: no sequence waits for the sums of another."""
        return False

    def expected(self, apart_from: Holder | None = None, newcomer: Newcomer | None = None) -> Demand:
        """The zero demand."""
        return self.table.zero_demand

    def growth(self, path: Path, num_tokens: int, num_sealed: int) -> Demand:
        """The zero demand."""
        return self.table.zero_demand

    def ignore(self, *happened: object, **named: object) -> None:
        """Does nothing."""

    enter = resume = extend = seal = leave = ignore
