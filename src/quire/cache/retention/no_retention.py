"""The cache's questions about retention, answered for sequences that keep every token. Nobody asks whether it is on."""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from quire.cache.eviction import Eviction
from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import Path
from quire.cache.run import Run
from quire.cache.segment import Segment

PrefixMatch = list[tuple[Segment, int]]
"""Segments that hold leading chunks of a sequence, and the number of these chunks in each."""


class Profiling(NamedTuple):
    """How a slice is profiled: see `Profiled`."""

    last_rows: int
    peaks: int = 0
    near: int = sys.maxsize


class NoRetention:
    """Every head keeps every token. `Retainer` answers the same questions for heads that do not.

    per_chunk    the demand of a running sequence for one more chunk
    bytes_freed  bytes of the pages that retention took from requests since start
    replays      whether the tokens of an answer are computed otherwise than those of a prompt, even before retention
                 has decided anything. Then chunks with such tokens stay out of the tree, where prompts would find them,
                 and after a preemption they are computed again one token at a time
    """

    bytes_freed = 0
    replays = False

    def __init__(self, eviction: Eviction) -> None:
        self.eviction = eviction
        self.table = eviction.table
        self.tree = eviction.tree
        self.per_chunk = self.table.demand(1)

    # ---- admission -------------------------------------------------------------------------------------------------

    def limit(self, holder: Holder) -> int:
        """Number of chunks that a sequence may take from the cache. Its last token is computed, for its logits."""
        last = len(holder.token_ids) - 1
        return (min(last, holder.num_prompt) if self.replays else last) // PAGE_TOKENS

    def can_copy_last_chunk(self, holder: Holder) -> bool:
        """Whether a sequence may take its last chunk, too, from the cache: a copy of it, in which its last token is
        computed again. Not where sealed chunks are encoded: the tokens of a chunk read each other exactly.
        """
        num_tokens = len(holder.token_ids)
        is_whole = not self.table.encodes and num_tokens % PAGE_TOKENS == 0
        return is_whole and not (self.replays and num_tokens > holder.num_prompt)

    def findable(self, holder: Holder) -> int:
        """Number of chunks up to which the cache is of use to a sequence."""
        return self.limit(holder)

    def num_reserved(self, holder: Holder) -> int:
        """Number of tokens that admission reserves room for."""
        return len(holder.token_ids)

    def beside(self, num_tokens: int) -> Demand:
        """The demand of a prompt beside its chunks while it is computed."""
        return self.table.zero_demand

    def outstanding(self, path: Path) -> Demand:
        """What a path has not taken of its reservation: sealed chunks, an open one, the first one's sidecar."""
        table = self.table
        wants_open = table.encodes and not path.has_open and path.filled < 0
        return table.demand(self.num_unsealed(path), wants_open, not path.num_stored)

    def num_unsealed(self, path: Path) -> int:
        """Number of reserved sealed chunks that a path has not taken."""
        return max(0, self.table.num_sealed_for(path.num_reserved) - path.num_stored)

    def expected(self, apart_from: Holder | None = None) -> Demand:
        """The demand that undecided sequences will have at most beyond the chunks they hold."""
        return self.table.zero_demand

    def wanted(self, holder: Holder, found: PrefixMatch) -> Demand:
        """The reservation of a sequence that finds chunks in the tree."""
        return self.outstanding(self._path_over(holder, found))

    def enter(self, holder: Holder) -> None:
        """A sequence is admitted."""

    def leave(self, holder: Holder) -> None:
        """A sequence ends, is preempted, or has been decided on."""

    def match(self, holder: Holder) -> int:
        """Extends a path without chunks of its own over cached chunks. Returns how many it took."""
        return self.tree.extend(holder.path, holder.keys, self.findable(holder), not holder.num_preemptions)

    def fetchable(self, keys: ChunkKeys, near: int, far: list[Run]) -> list[Run]:
        """The runs to fetch, one for each chunk. `far` has the runs of the chunks that follow the `near` first ones."""
        return far

    def prefetchable(self, far: list[Run]) -> list[Run]:
        """The part of `far` that is of use to a sequence that is not admitted yet."""
        return far

    def must_wait(self, holder: Holder) -> bool:
        """Whether another sequence is about to cache what this one needs."""
        return False

    # ---- slices ----------------------------------------------------------------------------------------------------

    def slice_end(self, holder: Holder) -> int:
        """Number of tokens at which the next slice must end, if not before."""
        if not self.replays:
            return len(holder.token_ids)
        num_tokens, num_prompt = holder.path.num_tokens, holder.num_prompt
        return num_prompt if num_tokens < num_prompt else num_tokens + 1

    def undivided(self, holder: Holder) -> int:
        """Number of tokens before the rows that must be computed in one slice; all if there are no such rows."""
        return len(holder.token_ids)

    def last_rows(self, holder: Holder, num_tokens: int) -> int:
        """Number of last rows over which retention decides after `num_tokens` tokens; 0: it does not decide then."""
        return 0

    def profiling(self, path: Path, num_last: int) -> Profiling | None:
        """How a slice is profiled; None if it is not.

        num_last  number of its last rows over which retention decides after it; 0: none
        """
        return None

    # ---- growth ----------------------------------------------------------------------------------------------------

    def growth(self, path: Path, num_tokens: int, num_sealed: int) -> Demand:
        """The demand, beside chunks, of a path that grows to `num_tokens` tokens by `num_sealed` sealed chunks."""
        return self.table.zero_demand

    def extend(self, path: Path, num_sealed: int) -> None:
        """Takes the demand of `growth`. The path has its new chunks."""

    def seal(self, holder: Holder) -> Demand:
        """The sealed chunks of a sequence are computed: the tree gets them. Returns the demand of `attach`."""
        path = holder.path
        end = min(path.num_sealed, holder.num_prompt // PAGE_TOKENS) if self.replays else path.num_sealed
        if end > path.num_shared or not self.replays:
            self.table.free(self.tree.publish(path, holder.keys, end))
        return self.table.zero_demand

    def attach(self, holder: Holder) -> None:
        """Attaches to the last sealed chunk what other sequences can go on from."""

    def check(self, path: Path) -> None:
        """Proves that a path holds the pages that its heads keep."""

    def _path_over(self, holder: Holder, found: PrefixMatch) -> Path:
        """A path over found chunks without locks, to compute a reservation."""
        count = sum(each for _, each in found)
        chunks, reserved = np.empty(count, np.int32), self.num_reserved(holder)
        return Path(num_shared=count, num_stored=count, num_reserved=reserved, chunks=chunks)
