"""Makes sequences smaller. A prompt gets column sums while it is computed. Once it is decided on, its pages are packed,
and packed again with every chunk that decoding fills. Knows paths, the chunk table and the tree. The manager knows the
moment, and whether there is room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Floats, Int32s, Int64s
from quire.cache.codecs.sums import SumsCodec
from quire.cache.counts import POSITIONS_BYTES
from quire.cache.eviction import Eviction
from quire.cache.holder import Holder
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import Path
from quire.cache.reservations import Reservations
from quire.cache.retention.decisions import PageBytes, Recover, Retention, RetentionDecision
from quire.cache.retention.no_retention import NoRetention, PrefixMatch, Profiling
from quire.cache.retention.packing import check_packed, drop, pack, page_indices_of
from quire.cache.retention.retained import RetainedTokens
from quire.cache.run import Run
from quire.cache.segment import NO_ROWS
from quire.cache.table import ChunkTable

SUMS_ROWS = 3
"""Rows of sums promised for each chunk of a prompt: one for the prompt and two for the beginnings that the tree keeps.
Eviction may take these two. An encoded chunk has one more, for the positions beside its packed pages."""

KNOWN_RATIOS = 256
"""Number of last requests whose kept shares are remembered."""

LEAST_RATIOS, QUANTILE = 8, 0.9
"""A request is expected to keep the 90th percentile of recent shares, and everything until 8 shares are known."""


class Retainer(NoRetention):
    """Retention of all sequences of one engine.

    num_beginnings  number of beginnings of a prompt whose sums the tree keeps
    stops           by sequence, in the order of admission: numbers of chunks after which the tree gets its sums
    ratios          shares of their prompts' pages that the last requests kept
    on_decision           is told each decision, and the bytes of the prompt's pages before and after; None: nobody
    """

    num_beginnings = 0

    table: ChunkTable

    def __init__(self, retention: Retention, eviction: Eviction) -> None:
        super().__init__(eviction)
        table, sums = self.table, self.table.sums
        assert sums is not None, "the table has no room for sums"
        self.sums: SumsCodec = sums
        sealed, packed = table.page_sizes(table.sealed_codec), sums.page_bytes + POSITIONS_BYTES * table.encodes
        page_bytes = PageBytes(sealed.astype(np.int64), packed, table.open_codec.page_bytes, sums.page_bytes)
        self.retention = replace(retention, page_bytes=page_bytes)
        self.per_chunk = table.demand(1, sums=1)
        self.ratios: deque[float] = deque(maxlen=KNOWN_RATIOS)
        self._ratio = 1.0
        self.on_decision: Callable[[RetentionDecision, int, int], None] | None = None
        self.stops: dict[Holder, set[int]] = {}
        self._undecided: dict[Holder, None] = {}

    # ---- admission -------------------------------------------------------------------------------------------------

    def limit(self, holder: Holder) -> int:
        """The chunks before the last rows, over which retention decides."""
        return self.retention.num_reusable(holder.num_prompt)

    def can_copy_last_chunk(self, holder: Holder) -> bool:
        """Never: the last rows are computed."""
        return False

    def num_reserved(self, holder: Holder) -> int:
        """The tokens of the prompt."""
        return holder.num_prompt

    def beside(self, num_tokens: int) -> Demand:
        """Rows of sums, the tree's included, and room for the positions of packed pages."""
        kept = self.num_beginnings * self.retention.num_reusable(num_tokens)
        return self.table.demand(sums=(1 + self.table.encodes) * -(-num_tokens // PAGE_TOKENS) + kept)

    def outstanding(self, path: Path) -> Demand:
        """Without the chunks of an undecided path: `expected` counts these."""
        found = super().outstanding(path)
        if not path.is_decided:
            found += self.table.demand(-self.num_unsealed(path), sums=-len(path.sums), rows=path.num_stored)
            found += self.beside(path.num_reserved)
        return found

    def expected(self, apart_from: Holder | None = None) -> Demand:
        """Estimated from the shares that other requests kept."""
        return self.table.demand(self._at_most(apart_from))

    def wanted(self, holder: Holder, found: PrefixMatch) -> Demand:
        """With the rise of `expected` by this sequence."""
        more = self._at_most(None, (self._path_over(holder, found), found)) - self._at_most()
        return super().wanted(holder, found) + self.table.demand(more)

    def _at_most(self, apart_from: Holder | None = None, *newcomer: tuple[Path, PrefixMatch]) -> int:
        """Most sealed chunks that undecided sequences will need beyond those they hold, if they are computed one after
        the other and each then keeps the expected share.

        newcomer  a path that is in no tree yet, and the chunks it will find there
        """
        ratio, most, before = self._ratio, 0.0, 0.0
        reads = [
            (each.path, [(segment, len(segment.chunks)) for segment in each.path.segments])
            for each in self._undecided
            if each is not apart_from
        ]
        for path, found in (*reads, *newcomer):
            own, lacking, num_readers = path.num_stored - path.num_shared, self.num_unsealed(path), path.tip is not None
            # Packing copies a part of the found chunks. These are idle then, if nobody else reads them.
            idle = sum([count for segment, count in found if not segment.pins and segment.most_locks <= num_readers])
            after = ratio * (path.num_begun + lacking) - idle
            most = max(most, before + max(own + lacking, after) - own)
            before += after - own
        return math.ceil(most)

    def enter(self, holder: Holder) -> None:
        """The sequence is undecided."""
        self._undecided[holder] = None

    def leave(self, holder: Holder) -> None:
        """The sequence is not undecided any more, and the tree gets no more of its sums."""
        self._undecided.pop(holder, None)
        self.stops.pop(holder, None)

    def match(self, holder: Holder) -> int:
        """Gives the path's sums back: its new chunks have none."""
        taken = super().match(holder)
        if taken:
            self._give_sums(holder.path)
        return taken

    def prefetchable(self, far: list[Run]) -> list[Run]:
        """Nothing: the tree would get chunks without their sums."""
        return []

    # ---- slices ----------------------------------------------------------------------------------------------------

    def slice_end(self, holder: Holder) -> int:
        """The next stop, or the prompt's end. Behind the prompt, each replayed token is a slice."""
        num_tokens, stops = holder.path.num_tokens, self.stops.get(holder, ())
        ends = (holder.num_prompt, *(stop * PAGE_TOKENS for stop in stops))
        return min((end for end in ends if end > num_tokens), default=num_tokens + 1)

    def undivided(self, holder: Holder) -> int:
        """The last rows, over which retention decides, are computed in one slice."""
        return holder.path.num_tokens if holder.path.is_decided else self.limit(holder) * PAGE_TOKENS

    def last_rows(self, holder: Holder, num_tokens: int) -> int:
        """At the prompt's end, unless it is decided on."""
        is_end = num_tokens == holder.num_prompt and not holder.path.is_decided
        return self.retention.num_profiled(num_tokens) if is_end else 0

    def profiling(self, path: Path, num_last: int) -> Profiling | None:
        """While sums or peaks are wanted."""
        retained = path.retained
        if not len(path.sums):
            return None
        if self.retention.budget is None:
            # After the decision only if a head goes on needing sums.
            return Profiling(num_last) if retained is None or retained.has_sums.any() else None
        if retained is not None:
            # The open chunk, and the last sealed one where heads hold it in its row.
            return Profiling(0, 1, 1 + (path.num_sealed - 1 in retained.origins))
        # The recovery is shown to whoever watches, and decides nothing.
        return Profiling(num_last if self.on_decision is not None else 0, num_last) if num_last else None

    # ---- growth ----------------------------------------------------------------------------------------------------

    def growth(self, path: Path, num_tokens: int, num_sealed: int) -> Demand:
        """Rows of sums, and room for the positions of packed pages."""
        needs_sums = path.retained is not None or not path.is_decided
        missing = needs_sums * max(0, -(-num_tokens // PAGE_TOKENS) - len(path.sums) - path.num_dropped)
        packed = num_sealed * (self.table.encodes and path.retained is not None)
        return self.table.demand(sums=missing + packed)

    def extend(self, path: Path, num_sealed: int) -> None:
        """Takes rows of zero sums."""
        missing, rows = len(path.chunks) - len(path.sums), NO_ROWS
        if missing and (path.retained is not None or not path.is_decided):
            rows = self._new_sums(missing)
            path.sums = np.append(path.sums, rows)
        if path.retained is not None:
            self._grow(path, path.retained, num_sealed, rows)

    def seal(self, holder: Holder) -> Demand:
        """After the decision, each sealed chunk leads to a new choice among all tokens, whose pages are then packed."""
        path, retained = holder.path, holder.path.retained
        if retained is None:
            return super().seal(holder)
        retained.seal(path.num_sealed - 1, path.num_sealed)
        num_pages, tokens = retained.num_pages, holder.keys.tokens(0, path.num_sealed)
        retained.drop(self.retention.select_while_decoding(retained, tokens, self._sums_of(path, retained)))
        self._drop_unread_pages(path, retained)
        self._pack(path, retained, num_pages)
        return self.table.zero_demand

    # ---- once the prompt is computed ---------------------------------------------------------------------------------

    def choose(self, prompt_ids: Sequence[int], sums: Int32s, recover: Recover | None) -> RetentionDecision:
        """The tokens of a prompt that its heads are to keep.

        sums     int32 [chunks]: rows of the table with the attention that its tokens have had
        recover  see Retention.decide
        """
        found = self.table.load_sums(sums)[..., : len(prompt_ids)]
        return self.retention.decide(prompt_ids, found, recover)

    def retain(self, holder: Holder, decided: RetentionDecision, reservations: Reservations) -> None:
        """Drops the tokens that the heads do not keep of a prompt and packs the others.

        reservations  the reservations of all sequences
        """
        path, table = holder.path, self.table
        before = table.bytes_of(path.chunks) if self.on_decision is not None else 0
        self._retain(holder, decided, reservations)
        if self.on_decision is not None:
            self.on_decision(decided, before, table.bytes_of(np.concatenate((path.chunks, path.sums))))

    def _retain(self, holder: Holder, decided: RetentionDecision, reservations: Reservations) -> None:
        path, table = holder.path, self.table
        path.is_decided = True
        self.leave(holder)
        if (decided.policies == decided.chain.full).all():
            # Nothing changes, now or later.
            self._note_ratio(1.0)
            self._give_sums(path)
            return
        path.retained = retained = self._begin(decided, holder.num_prompt)
        retained.seal(0, path.num_sealed)
        num_pages = retained.num_pages
        retained.drop(decided.kept[..., : path.num_sealed * PAGE_TOKENS])
        stuck = retained.leave_in_place(path.segments)
        reservations.update(holder)  # it promises less, now that the prompt is decided on
        if not reservations.fits(self._copies(stuck)):
            retained.in_place |= stuck
        path.replace(0, table.borrow(path.chunks[: path.num_shared]))
        path.num_shared = 0
        self._drop_unread_pages(path, retained)  # now, so that eviction frees these pages
        # Eviction may make copies unnecessary: a page that the tree drops is the path's own.
        self.eviction.evict_for(lambda: self._copies(self._to_own(path, retained)))
        self._own(path, retained)
        self._pack(path, retained, num_pages)
        if num_pages.any():
            self._note_ratio(float(retained.num_pages.sum() / num_pages.sum()))

    def check(self, path: Path) -> None:
        """Compares pages, masks and sums."""
        if path.retained is not None:
            check_packed(self.table, path, path.retained)

    def _begin(self, decided: RetentionDecision, num_prompt: int) -> RetainedTokens:
        holds_last, keeps_first = decided.budget is not None, self.table.sinks is not None
        return RetainedTokens(decided.chain, decided.policies, num_prompt, holds_last, keeps_first)

    def _pack(self, path: Path, retained: RetainedTokens, num_pages: Int64s) -> None:
        """Packs a path and counts the bytes it freed of `num_pages` pages, [L, H]."""
        self._move(path, retained)
        sizes = self.table.page_sizes(self.table.sealed_codec)
        self.bytes_freed += int(((num_pages - retained.num_pages) * sizes).sum())

    # ---- pages, which a scheduler without a model only counts ------------------------------------------------------

    def _new_sums(self, count: int) -> Int32s:
        """Takes rows of zero sums."""
        rows = self.table.take(count, self.sums)
        self.table.store_sums(rows, np.zeros((*self.table.shape, count * PAGE_TOKENS), np.float32))
        return rows

    def _sums_of(self, path: Path, retained: RetainedTokens) -> Floats:
        """The sums of the tokens in all slots, float32 [L, H, slots]."""
        return self.table.load_sums(path.sums[: retained.num_rows])

    def _grow(self, path: Path, retained: RetainedTokens, num_sealed: int, sums: Int32s) -> None:
        """Prepares the new chunks of a path, of which `num_sealed` will be sealed, and their rows of sums. Takes pages
        for positions now, because there might be no room when a chunk is packed.
        """
        if num_sealed and self.table.encodes:
            chunk = path.num_stored - 1
            page_indices = page_indices_of(path.chunks[chunk - path.num_dropped :], retained.is_packed[..., None])
            positions = np.arange(PAGE_TOKENS, dtype=np.int32) + chunk * PAGE_TOKENS
            self.table.store_positions(page_indices, np.tile(positions, (len(page_indices[0]), 1)))
        drop(self.table, sums, ~retained.has_sums[..., None])

    def _copies(self, pages: NDArray[Any]) -> Demand:
        """The demand of copies of sealed pages, bool [L, H, rows], with room for the positions of all rows."""
        table = self.table
        return table.demand_of_pages(pages.sum(-1)) + table.demand(sums=pages.shape[-1] * table.encodes)

    def _to_own(self, path: Path, retained: RetainedTokens) -> NDArray[Any]:
        """Pages that others hold and that the path will write, now or later, bool [L, H, rows]."""
        own = retained.targets | (retained.stays & ~retained.in_place)
        own[own] = self.table.is_shared(page_indices_of(path.chunks, own))
        return np.asarray(own)

    def _own(self, path: Path, retained: RetainedTokens) -> None:
        """Copies these pages, and drops the sums of heads that need none."""
        self.table.unshare(page_indices_of(path.chunks, self._to_own(path, retained)))
        drop(self.table, path.sums, ~retained.has_sums[..., None])

    def _drop_unread_pages(self, path: Path, retained: RetainedTokens) -> None:
        """Drops pages without tokens. Unlocks heads in the tree of which the path reads no page in place."""
        held = retained.held
        drop(self.table, path.chunks[: retained.num_rows], ~held)
        heads, below = {}, np.zeros_like(retained.is_packed)
        for segment in reversed(path.segments):
            read = retained.in_place & held & retained.rows_of(segment)
            heads[segment] = below = below | read.any(-1)
        self.tree.unlock_heads(path, heads)

    def _move(self, path: Path, retained: RetainedTokens) -> None:
        """Moves tokens into as few pages as hold them."""
        pack(self.table, path, retained)

    def _note_ratio(self, ratio: float) -> None:
        self.ratios.append(ratio)
        if len(self.ratios) >= LEAST_RATIOS:
            self._ratio = sorted(self.ratios)[math.ceil(QUANTILE * len(self.ratios)) - 1]

    def _give_sums(self, path: Path) -> None:
        self.table.free(path.sums)
        path.sums = NO_ROWS
