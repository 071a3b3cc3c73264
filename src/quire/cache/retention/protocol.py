"""What retention answers to the cache and the scheduler, and the answers for sequences that keep every token."""

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
    """What a sequence may take from the cache, and what it may leave there. Fixed while its prompt is computed.

    num_reserved   tokens that admission reserves room for
    num_reusable   chunks that the sequence may take from the cache. Its last token is computed, for its logits
    copies_last    whether it may take its last chunk, too: a copy of it, in which its last token is computed again
    num_shareable  chunks that the tree may get from it
    needs_sums     whether cached chunks are of use only up to a boundary with column sums
    may_prefetch   whether chunks are of use to it that are fetched before its admission
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
    """Where the next slice of a sequence ends.

    end        number of tokens at which it must end, if not before
    undivided  number of tokens before the rows that must be computed in one slice; all if there are no such rows
    """

    end: int
    undivided: int


class Profiling(NamedTuple):
    """How a slice is profiled: see `Profiled`. decides: whether retention decides on the prompt after this slice."""

    last_rows: int
    peaks: int = 0
    near: int = sys.maxsize
    decides: bool = False


class KeepAll:
    """Every head keeps every token. `Retainer` has the same methods for heads that do not; neither cache nor scheduler
    asks which of the two it has.

    per_chunk    the demand of a running sequence for one more chunk
    bytes_freed  bytes of the pages that retention took from requests since start
    replays  whether the tokens of an answer are computed otherwise than those of a prompt. Then chunks with such tokens
             stay out of the tree, where prompts would find them, and after a preemption they are computed again one
             token at a time
    """

    bytes_freed = 0

    def __init__(self, table: ChunkCounts, replays: bool) -> None:
        self.table, self.replays = table, replays
        self.per_chunk = table.demand(1)
        self._limits = functools.lru_cache(4096)(self._limits_of)

    def limits(self, holder: Holder) -> PromptLimits:
        """Everything but the last token. Where sealed chunks are encoded, their tokens read each other exactly: a part
        of a chunk cannot be computed again.
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
        """All tokens. Behind the prompt, each replayed token is a slice."""
        end, num_tokens = len(holder.token_ids), holder.path.num_tokens
        if not self.replays:
            return SliceLimits(end, end)
        return SliceLimits(holder.num_prompt if num_tokens < holder.num_prompt else num_tokens + 1, end)

    def profiling(self, holder: Holder, end: int) -> Profiling | None:
        """Never."""
        return None

    def must_wait(self, holder: Holder) -> bool:
        """Never."""
        return False

    def expected(self, apart_from: Holder | None = None, newcomer: Newcomer | None = None) -> Demand:
        """Nothing."""
        return self.table.zero_demand

    def growth(self, path: Path, num_tokens: int, num_sealed: int) -> Demand:
        """Nothing."""
        return self.table.zero_demand

    def ignore(self, *happened: object, **named: object) -> None:
        """Does nothing."""

    enter = resume = extend = seal = leave = ignore
