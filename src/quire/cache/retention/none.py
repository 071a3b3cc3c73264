"""Whether retention is on, asked nowhere: what the cache asks of it, answered for sequences that keep every token."""

from __future__ import annotations

from quire.cache.eviction import Eviction
from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import Path
from quire.cache.run import Run
from quire.cache.segment import Segment

Found = list[tuple[Segment, int]]
"""Segments of the tree with leading chunks of a sequence, and how many chunks of each."""


class NoRetention:
    """Every head keeps every token. `Retainer` answers the same questions for heads that do not.

    per_chunk    what a running sequence takes with one more chunk
    bytes_freed  of pages that requests held and that retention gave up, since start
    """

    bytes_freed = 0

    def __init__(self, eviction: Eviction) -> None:
        self.eviction = eviction
        self.table = eviction.table
        self.tree = eviction.tree
        self.per_chunk = self.table.demand(1)

    # ---- admission -------------------------------------------------------------------------------------------------

    def limit(self, holder: Holder) -> int:
        """Chunks that a sequence may find in the cache: never its last token, or there would be no logits."""
        return (len(holder.token_ids) - 1) // PAGE_TOKENS

    def findable(self, holder: Holder) -> int:
        """Chunks that a sequence finds if they are cached."""
        return self.limit(holder)

    def num_reserved(self, holder: Holder) -> int:
        """Tokens that admission reserves room for."""
        return len(holder.token_ids)

    def beside(self, num_tokens: int) -> Demand:
        """What a prompt takes beside its chunks while it is computed."""
        return self.table.nothing

    def lacking(self, path: Path) -> Demand:
        """What a path lacks of what was reserved: sealed chunks, an open one, a sidecar for the first sealed one."""
        table = self.table
        wants_open = table.encodes and not path.has_open and path.filled < 0
        return table.demand(self.num_unsealed(path), wants_open, not path.num_stored)

    def num_unsealed(self, path: Path) -> int:
        """Sealed chunks that a path lacks of what was reserved."""
        return max(0, self.table.num_sealed_for(path.num_reserved) - path.num_stored)

    def expected(self, apart_from: Holder | None = None) -> Demand:
        """What sequences that are yet to be decided on will hold at most beyond what they hold."""
        return self.table.nothing

    def wanted(self, holder: Holder, found: Found) -> Demand:
        """What to reserve for a sequence that finds some chunks in the tree."""
        return self.lacking(self._path_over(holder, found))

    def enter(self, holder: Holder) -> None:
        """A sequence is admitted."""

    def leave(self, holder: Holder) -> None:
        """A sequence ends, is preempted, or has been decided on."""

    def match(self, holder: Holder) -> int:
        """Extends a path without chunks of its own over what is cached. Returns the number of chunks it took."""
        if self.tree is None:
            return 0
        return self.tree.extend(holder.path, holder.keys, self.findable(holder), not holder.num_preemptions)

    def fetchable(self, keys: ChunkKeys, near: int, far: list[Run]) -> list[Run]:
        """Of the runs in which chunks are that follow the `near` ones of the tree, those to fetch: a run for each
        chunk.
        """
        return far

    def must_wait(self, holder: Holder) -> bool:
        """Whether a sequence should wait for what another is about to leave in the cache."""
        return False

    # ---- slices ----------------------------------------------------------------------------------------------------

    def slice_end(self, holder: Holder) -> int:
        """Number of tokens at which the next slice of a sequence ends at the latest."""
        return len(holder.token_ids)

    def undivided(self, holder: Holder) -> int:
        """Number of tokens before the rows that must be computed in one slice; all of them if there are no such
        rows.
        """
        return len(holder.token_ids)

    def last_rows(self, holder: Holder, num_tokens: int) -> int:
        """Number of last rows over which retention is decided once `num_tokens` tokens are computed; 0: not then."""
        return 0

    # ---- growth ----------------------------------------------------------------------------------------------------

    def growth(self, path: Path, num_tokens: int, num_sealed: int) -> Demand:
        """What a path takes, beside chunks, to grow to `num_tokens` tokens with `num_sealed` more sealed chunks."""
        return self.table.nothing

    def extend(self, path: Path, num_sealed: int) -> None:
        """Takes that."""

    def seal(self, holder: Holder) -> Demand:
        """The sealed chunks of a sequence are computed: the tree gets them. Returns what it would take to attach to
        them what others may want.
        """
        if self.tree is not None:
            path = holder.path
            self.table.give(self.tree.publish(path, holder.keys, path.num_sealed))
        return self.table.nothing

    def attach(self, holder: Holder) -> None:
        """Attaches it."""

    def check(self, path: Path) -> None:
        """Proves that a path holds what its heads keep."""

    def _path_over(self, holder: Holder, found: Found) -> Path:
        """A path over what was found, of which nothing is locked: to ask what it would lack."""
        count = sum(each for _, each in found)
        return Path(num_shared=count, num_stored=count, num_chunks=count, num_reserved=self.num_reserved(holder))
