"""Makes what sequences hold smaller: column sums while a prompt is computed, packed pages once it is decided on, and
again with every chunk that decoding fills. Knows paths, the chunk table and the tree. The manager knows when, and
whether there is room.

Within a budget nothing is attached to the tree: what ranks tokens is what the last rows look at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quire.cache.arrays import Bools, Floats, Int32s, Int64s
from quire.cache.codecs.sums import SumsCodec
from quire.cache.counts import POSITIONS_BYTES
from quire.cache.eviction import Eviction
from quire.cache.holder import Holder
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import Path
from quire.cache.retention.decisions import Decided, PageBytes, Recover, Retention
from quire.cache.retention.expected import Ahead, KeepRatio
from quire.cache.retention.none import NoRetention
from quire.cache.retention.packing import check_packed, drop_empty, has_page, pack, places_of, sealed_rows, to_own
from quire.cache.retention.prefix_sums import PrefixSums
from quire.cache.retention.retained import Retained
from quire.cache.run import Run
from quire.cache.segment import NO_ROWS, Segment
from quire.cache.table import ChunkTable

SUMS_ROWS = 3
"""Rows of sums promised for each chunk of a prompt: its own, and those of two beginnings that the tree keeps, which may
go when others want their room. Where a chunk is encoded, positions beside its packed pages take one more."""


class Profiling(NamedTuple):
    """How a slice is profiled: see `Profiled`."""

    last_rows: int
    peaks: int = 0
    near: int = sys.maxsize


class Retainer(NoRetention):
    """Retention of all sequences of one engine.

    ratio  what requests have kept of their prompts' pages
    watch  is told what was decided on a prompt, and the bytes of its pages before and after; None: nobody
    """

    def __init__(self, retention: Retention, table: ChunkTable, eviction: Eviction) -> None:
        super().__init__(eviction)
        assert table.sums is not None and table.masks is not None, "the table has no room for sums"
        self.table: ChunkTable = table
        self.retention = retention
        self.per_chunk = table.demand(1, sums=1)
        self.ratio = KeepRatio()
        self.watch: Callable[[Decided, int, int], None] | None = None
        self.prefixes: PrefixSums | None = None  # what who finds a beginning in the tree needs
        self._sums: SumsCodec = table.sums
        self._undecided: dict[Holder, None] = {}
        if self.tree is not None and retention.budget is None:
            self.prefixes = PrefixSums(table, self.tree, eviction, self._sums)

    # ---- admission -------------------------------------------------------------------------------------------------

    def limit(self, holder: Holder) -> int:
        """Chunks that a sequence may find in the cache: none of the last rows, over which is decided."""
        return self.retention.num_reusable(holder.num_prompt)

    def findable(self, holder: Holder) -> int:
        """Chunks that a sequence finds if they are cached."""
        limit = self.limit(holder)
        return limit if self.prefixes is None else self.prefixes.find(holder.keys, limit)[0]

    def num_reserved(self, holder: Holder) -> int:
        """Tokens that admission reserves room for."""
        return holder.num_prompt

    def beside(self, num_tokens: int) -> Demand:
        """Rows of sums that a prompt needs at most: its own, and two beginnings that the tree keeps."""
        kept = (SUMS_ROWS - 1) * self.retention.num_reusable(num_tokens) if self.prefixes is not None else 0
        return self.table.demand(sums=(1 + self.table.encodes) * -(-num_tokens // PAGE_TOKENS) + kept)

    def lacking(self, path: Path) -> Demand:
        """What a path lacks. Before it is decided on, `expected` counts its chunks."""
        found = super().lacking(path)
        if path.is_decided:
            return found
        rows = self.table.demand(-self.num_unsealed(path), sums=-len(path.sums), rows=path.num_stored)
        return found + rows + self.beside(path.num_reserved)

    def expected(self, apart_from: Holder | None = None) -> Demand:
        """What sequences that are yet to be decided on will hold at most beyond what they hold."""
        return self.table.demand(self.ratio.at_most(self._ahead(apart_from)))

    def wanted(self, holder: Holder, found: list[tuple[Segment, int]]) -> Demand:
        """What to reserve for a sequence that finds some chunks in the tree."""
        path, ahead = self._path_over(holder, found), self._ahead()
        own = Ahead.of(path, self.num_unsealed(path), found, 0)
        more = self.ratio.at_most([*ahead, own]) - self.ratio.at_most(ahead)
        return self.lacking(path) + self.table.demand(more)

    def enter(self, holder: Holder) -> None:
        """A sequence is admitted."""
        self._undecided[holder] = None

    def leave(self, holder: Holder) -> None:
        """A sequence ends, is preempted, or has been decided on."""
        self._undecided.pop(holder, None)
        if self.prefixes is not None:
            self.prefixes.forget(holder)

    def match(self, holder: Holder) -> int:
        """Extends a path without chunks of its own over what is cached. Returns the number of chunks it took."""
        if self.prefixes is not None:
            return self.prefixes.match(holder, self.limit(holder))
        taken, path = super().match(holder), holder.path
        if taken:
            self.table.give(path.sums)
            path.sums = NO_ROWS
        return taken

    def fetchable(self, keys: ChunkKeys, near: int, far: list[Run]) -> list[Run]:
        """As far as a run has sums attached, for a prompt goes on from these."""
        if self.prefixes is None:
            return far
        names = keys.first(near + len(far))[near:]
        ends = [end for end, (name, run) in enumerate(zip(names, far, strict=True), 1) if run.ends_with_sums(name)]
        return far[: max(ends, default=0)]

    def must_wait(self, holder: Holder) -> bool:
        """Whether a sequence should wait for what another is about to leave in the cache."""
        return self.prefixes is not None and holder.reads_cache and self.prefixes.must_wait(holder, self.limit(holder))

    def _ahead(self, apart_from: Holder | None = None) -> list[Ahead]:
        paths = [holder.path for holder in self._undecided if holder is not apart_from]
        return [
            Ahead.of(path, self.num_unsealed(path), ((each, len(each.chunks)) for each in path.segments), 1)
            for path in paths
        ]

    # ---- slices ----------------------------------------------------------------------------------------------------

    def slice_end(self, holder: Holder) -> int:
        """Where sums are to be kept, at the prompt's end, and after it with every token that is replayed."""
        num_tokens = holder.path.num_tokens
        if num_tokens >= holder.num_prompt:
            return num_tokens + 1
        ends = (stop * PAGE_TOKENS for stop in (self.prefixes.stops(holder) if self.prefixes is not None else ()))
        return next((end for end in ends if end > num_tokens), holder.num_prompt)

    def undivided(self, holder: Holder) -> int:
        """Number of tokens before the rows that must be computed in one slice."""
        return holder.path.num_tokens if holder.path.is_decided else self.limit(holder) * PAGE_TOKENS

    def last_rows(self, holder: Holder, num_tokens: int) -> int:
        """Number of last rows over which retention is decided once `num_tokens` tokens are computed; 0: not then."""
        is_end = num_tokens == holder.num_prompt and not holder.path.is_decided
        return self.retention.num_profiled(num_tokens) if is_end else 0

    def profiling(self, path: Path, num_last: int) -> Profiling | None:
        """How a slice is profiled; None if it is not.

        num_last  its rows at the end over which is decided then; 0: none
        """
        if not len(path.sums):
            return None
        if self.retention.budget is None:
            # After the decision, if a head goes on needing them.
            is_wanted = path.retained is None or self.retention.has_sums(path.retained.policies).any()
            return Profiling(num_last) if is_wanted else None
        if path.retained is not None:
            # The open chunk, and the last sealed one where heads hold it in its row.
            return Profiling(0, 1, 1 + int((path.retained.origins[-1:] == path.num_sealed - 1).sum()))
        # How much is recovered is shown, and decides nothing.
        return Profiling(num_last if self.watch is not None else 0, num_last) if num_last else None

    # ---- growth ----------------------------------------------------------------------------------------------------

    def growth(self, path: Path, num_tokens: int, num_sealed: int) -> Demand:
        """Rows of sums, and the room that positions of packed pages take."""
        packed = num_sealed * (self.table.encodes and path.retained is not None)
        return self.table.demand(sums=self._num_missing(path, num_tokens) + packed)

    def extend(self, path: Path, num_tokens: int, num_sealed: int) -> None:
        """Takes rows of sums, which are zero; once decided, only of heads that need them. A chunk that is sealed gets
        room for positions: when it is packed there might be none.
        """
        retained, table = path.retained, self.table
        if num_sealed and table.encodes and retained is not None:
            index = path.num_stored - path.num_dropped - 1
            first = (path.num_stored - 1) * PAGE_TOKENS
            packed = (retained.policies < retained.chain.full)[..., None]
            places = places_of(path.chunks[index : index + 1], packed)
            positions = np.arange(first, first + PAGE_TOKENS, dtype=np.int32)
            table.place(places, np.tile(positions, (len(places[0]), 1)))
        count = self._num_missing(path, num_tokens)
        if not count:
            return
        if retained is None:
            rows = table.take(count, self._sums)
        else:
            assert count == 1, "a sequence that decodes grows by a chunk"
            rows = np.array([table.blank(self._sums)], np.int32)
            table.fill(places_of(rows, self.retention.has_sums(retained.policies)[..., None]))
        self._sums.store(table, rows, np.zeros((*table.shape, count * PAGE_TOKENS), np.float32))
        path.sums = np.append(path.sums, rows)

    def seal(self, holder: Holder) -> Demand:
        """The sealed chunks of a sequence are computed: the tree gets them, or they are packed once it is decided on.
        Returns what it would take to attach to them what others may want.
        """
        path = holder.path
        if path.retained is not None:
            self._reseal(path, holder.token_ids[: path.num_tokens])
            return self.table.nothing
        super().seal(holder)
        is_stop = self.prefixes is not None and path.num_sealed in self.prefixes.stops(holder)
        return self.table.demand(sums=path.num_sealed * (is_stop and path.num_shared == path.num_sealed))

    def attach(self, holder: Holder) -> None:
        """Attaches it."""
        assert self.prefixes is not None
        self.prefixes.attach(holder)

    def _num_missing(self, path: Path, num_tokens: int) -> int:
        """Rows of sums to take before a path has so many tokens."""
        if path.is_decided and path.retained is None:
            return 0
        return max(0, -(-num_tokens // PAGE_TOKENS) - len(path.sums) - path.num_dropped)

    # ---- once the prompt is computed ---------------------------------------------------------------------------------

    def choose(self, prompt_ids: Sequence[int], sums: Int32s, recover: Recover | None) -> Decided:
        """What the heads are to keep of a prompt.

        sums     int32 [chunks]: rows of the table with the attention that its tokens have had
        recover  see Retention.decide
        """
        found = self._sums.load(self.table, sums)[..., : len(prompt_ids)]
        return self.retention.decide(prompt_ids, found, recover, self.page_bytes)

    def decide(self, holder: Holder, decided: Decided) -> Bools:
        """Notes what the heads keep of a prompt. Returns the pages that only a copy would make its own and that cannot
        be evicted, bool [L, H, chunks]: without room for `copies` of them the path is to read them in place.
        """
        path = holder.path
        path.is_decided = True
        self.leave(holder)
        is_stuck = np.zeros((*self.table.shape, path.num_sealed), bool)
        if (decided.policies == self.retention.chain.full).all():
            # Nothing changes, now or later.
            self.ratio.learn(1.0)
            self.table.give(path.sums)
            path.sums = NO_ROWS
            return is_stuck
        retained = Retained(decided.chain, decided.policies, holder.num_prompt, decided.budget is not None)
        retained.seal(0, path.num_sealed)
        path.retained = retained
        retained.drop(decided.kept[..., : path.num_sealed * PAGE_TOKENS])
        stays = np.ones(decided.policies.shape, bool)
        for segment, rows in _rows_of(path, retained):
            kept = retained.by_row(retained.positions >= 0)[:, :, rows]
            # A copy for each user takes more than the pages do. What follows copied pages is copied too: it could not
            # be evicted before them.
            stays &= segment.users * kept.mean((-2, -1)) >= 1
            is_held = kept.any(-1)
            retained.in_place[:, :, rows] = stays[..., None] & is_held
            others = (segment.locks > 1) | (segment.pins > 0)
            is_stuck[:, :, rows] = (others & ~stays)[..., None] & is_held
        return is_stuck

    def pack(self, path: Path) -> None:
        """Lets go of what the heads do not keep of a prompt and packs what they keep. The table has rows for what it
        shares.
        """
        retained, table = path.retained, self.table
        if retained is None:
            return
        path.replace(0, table.borrow(path.chunks[: path.num_shared]))
        path.num_shared = 0
        drop_empty(table, path)  # what is evicted of such pages is free at once
        self._loosen(path)

        def wanted() -> Demand:
            """Fewer pages once the tree has dropped some."""
            num_pages = np.zeros(table.shape, np.int64)
            np.add.at(num_pages, to_own(table, path)[1:], 1)
            return self.copies(num_pages, path.num_sealed)

        self.eviction.evict_for(wanted)
        num_pages = np.full(retained.policies.shape, path.num_sealed)  # that it had until it was decided on
        table.detach(to_own(table, path))
        self._pack(path, self._sums.load(table, path.sums[: retained.num_rows]))
        if num_pages.sum():
            self.ratio.learn(float(self._num_pages(path).sum() / num_pages.sum()))
        self._count_freed(num_pages, path)

    def copies(self, num_pages: Int64s, num_sealed: int) -> Demand:
        """What copies of sealed pages take, int64 [L, H], with the positions beside those of `num_sealed` chunks."""
        return self.table.demand_of_pages(num_pages) + self.table.demand(sums=num_sealed * self.table.encodes)

    def _reseal(self, path: Path, tokens: Sequence[int]) -> None:
        """One chunk more is sealed: decides again what is kept of all, and packs it."""
        retained, _ = sealed_rows(path)
        retained.seal(path.num_sealed - 1, path.num_sealed)
        num_pages = self._num_pages(path)
        sums = self._sums.load(self.table, path.sums[: retained.num_rows])
        retained.drop(self.retention.keep_on(retained, tokens, sums, self.page_bytes))
        self._pack(path, sums)
        self._loosen(path)
        self._count_freed(num_pages, path)

    def check(self, path: Path) -> None:
        """Proves that a path holds, of each head, the pages its tokens need, their sums, and no others."""
        if path.retained is not None:
            check_packed(self.table, path, self.retention.has_sums(path.retained.policies))

    def _pack(self, path: Path, sums: Floats) -> None:
        """Packs the path's pages, and gives it the sums in their new places."""
        table = self.table
        sums = pack(table, path, sums)
        (retained, rows), held = sealed_rows(path), has_page(table, path.sums)
        wanted = self.retention.has_sums(retained.policies)[..., None] & np.ones_like(held)
        wanted[..., : len(rows)] &= has_page(table, rows)
        table.drop(places_of(path.sums, held & ~wanted))
        table.fill(places_of(path.sums, wanted & ~held))
        self._sums.store(table, path.sums[: len(rows)], sums)

    def _loosen(self, path: Path) -> None:
        """Unlocks, in the tree, heads of which the path reads no page in place any more."""
        if self.tree is None or path.tip is None:
            return
        retained, rows = sealed_rows(path)
        held = has_page(self.table, rows) & retained.in_place
        heads, below = {}, np.zeros(retained.policies.shape, bool)
        for segment, of_segment in reversed(_rows_of(path, retained)):
            heads[segment] = below = below | held[:, :, of_segment].any(-1)
        self.tree.loosen(path, heads)

    @property
    def page_bytes(self) -> PageBytes:
        """What pages of any sequence take."""
        table, sums = self.table, self._sums.page_bytes
        sealed = table.page_sizes(table.sealed_codec).astype(np.int64)
        return PageBytes(sealed, sums + POSITIONS_BYTES * table.encodes, table.open_codec.page_bytes, sums)

    def _num_pages(self, path: Path) -> Int64s:
        return np.asarray(has_page(self.table, sealed_rows(path)[1]).sum(-1))

    def _count_freed(self, before: Int64s, path: Path) -> None:
        sizes = self.table.page_sizes(self.table.sealed_codec)
        self.bytes_freed += int(((before - self._num_pages(path)) * sizes).sum())


def _rows_of(path: Path, retained: Retained) -> list[tuple[Segment, Bools]]:
    """The segments of the tree that a path uses, and which of its sealed rows were chunks of each."""
    at = retained.origins * PAGE_TOKENS
    return [(segment, (at >= segment.start) & (at < segment.end)) for segment in path.segments]
