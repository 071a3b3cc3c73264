"""What fits: chunks that sequences lack and were promised, against what is free or idle. Counts, changes nothing."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.cache.page import PAGE_TOKENS
from quire.cache.retainer import Retainer
from quire.cache.segment import ChunkTable, Path
from quire.cache.tree import PrefixTree


class Promised(Protocol):
    """Who is promised room."""

    path: Path


def chunks_of(num_tokens: int) -> int:
    """Chunks that hold so many tokens, the last perhaps open."""
    return -(-num_tokens // PAGE_TOKENS)


class Need(NamedTuple):
    """Chunks that are wanted: sealed ones, open ones where these are of another codec, sidecars, and rows of sums; and
    rows of the table for paths that will hold pages beside the tree.
    """

    sealed: int
    open: int = 0
    sidecars: int = 0
    sums: int = 0
    rows: int = 0

    def plus(self, other: Need) -> Need:
        """Both together."""
        return Need(*map(sum, zip(self, other, strict=True)))


class Ahead(NamedTuple):
    """Chunks of a sequence that retention will make smaller: those of its own it will hold until then, all it will have
    then, those of them in the tree that only it reads, and those of its own it holds now.
    """

    to_hold: int
    to_have: int
    alone: int
    held: int = 0


class Room:
    """The room of one cache.

    table, tree, retainer  as of `CacheManager`
    """

    def __init__(self, table: ChunkTable, tree: PrefixTree | None, retainer: Retainer | None) -> None:
        self.table = table
        self.tree = tree
        self.retainer = retainer

    def need(self, num_stored: int, has_open: bool, num_tokens: int) -> Need:
        """What a sequence with so many sealed chunks, and perhaps an open one, lacks for so many tokens."""
        if not self.table.encodes:
            return Need(max(0, chunks_of(num_tokens) - num_stored))
        sealed = max(0, num_tokens // PAGE_TOKENS - num_stored)
        in_open = num_tokens > (num_stored + sealed) * PAGE_TOKENS
        has_sidecar = self.table.sinks is not None and sealed > 0 and num_stored == 0
        return Need(sealed, int(in_open and not (has_open and not sealed)), int(has_sidecar))

    def fits(
        self,
        need: Need,
        apart_from: NDArray[np.int64] | int = 0,
        starts: int = 0,
        pages: NDArray[np.int64] | int = 0,
    ) -> bool:
        """Whether so much is free, or would be after eviction of what is idle, `apart_from` so many pages, int64
        [L, H], of chunks some of which begin sequences.

        pages  of sealed chunks that are wanted besides, int64 [L, H]
        """
        tree, sidecars, sums, rows = self.tree, need.sidecars, need.sums, need.rows
        if tree is not None:
            rows += int(np.max(apart_from)) - tree.num_idle
            pages = pages - (tree.idle - apart_from)
            sidecars -= (tree.num_idle_starts - starts) * self.has_sidecars
            # Sums may go wherever they are: what was found with them can be computed.
            sums -= tree.num_sums
        more = None if isinstance(pages, int) else pages
        return self.table.fits(need.sealed, need.open, sidecars, sums, more, rows)

    @property
    def has_sidecars(self) -> bool:
        """Whether chunks that begin a sequence have one."""
        return self.table.sinks is not None

    def fits_now(self, need: Need, pages: NDArray[np.int64] | None = None) -> bool:
        """Whether so much is free, and pages of sealed chunks besides, int64 [L, H]."""
        sealed, num_open, sidecars, sums, rows = need
        return self.table.fits(sealed, num_open, sidecars, sums, pages, rows)

    def capacity(self, num_chunks: int = 0, num_starts: int = 0) -> int:
        """Sealed chunks that one sequence may have beside so many more than there are now, some of which begin
        sequences.
        """
        most, has_open, has_sidecar = self.table.capacity, int(self.table.encodes), int(self.table.sinks is not None)

        def too_many(count: int) -> bool:
            sums = 0 if self.retainer is None else self.retainer.num_sums(count * PAGE_TOKENS)
            return not self.table.fits(num_chunks + count, has_open, (num_starts + 1) * has_sidecar, sums)

        return bisect.bisect_left(range(1, most + 1), True, key=too_many)

    def promised(
        self, live: Iterable[tuple[Promised, int]], apart_from: Promised | None = None, coming: Ahead | None = None
    ) -> Need:
        """Chunks that admitted sequences were promised and have not taken.

        live    sequences, and how many tokens each is to have room for
        coming  one more that is to be admitted
        """
        total = Need(0)
        ahead: list[Ahead] = []
        for holder, tokens in live:
            if holder is apart_from:
                continue
            path = holder.path
            num_chunks = path.num_chunks + path.num_gone
            has_open = num_chunks > path.num_stored
            lacks = self.need(path.num_stored, has_open, tokens)
            wants_open = self.table.encodes and not has_open and path.filled < 0
            # Where the prompt does not fill a chunk, the first one it fills will want its sidecar.
            has_none = self.table.sinks is not None and not path.num_stored
            sealed, sums, rows = lacks.sealed, 0, 0
            if self.retainer is not None and not path.is_decided:
                held = path.num_stored - path.num_shared
                alone = sum(
                    len(segment.chunks) for segment in path.segments if not segment.pins and segment.locks.max() <= 1
                )
                ahead.append(Ahead(held + sealed, num_chunks + sealed, alone, held))
                sums, rows = self.retainer.num_sums(tokens) - len(path.sums), path.num_stored
                sealed = 0
            total = total.plus(Need(sealed, int(wants_open), int(has_none), max(0, sums), rows))
        if coming is not None:
            ahead.append(coming)
        return total.plus(Need(self._at_most(ahead)))

    def _at_most(self, ahead: Sequence[Ahead]) -> int:
        """Chunks that sequences will hold at most, beyond those they hold, if one after the other is computed and then
        made as small as most requests are. With an expected ratio of 1, all that they lack together.
        """
        ratio = 1.0 if self.retainer is None else self.retainer.ratio.expected
        most = before = 0.0
        for to_hold, to_have, alone, held in ahead:
            # What was found is copied in part when it is packed; then it is idle, if nobody else reads it.
            after = ratio * to_have - alone
            most = max(most, before + max(to_hold, after) - held)
            before += after - held
        return math.ceil(most)
