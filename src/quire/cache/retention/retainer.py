"""Decides which tokens sequences keep, and estimates the demand of undecided sequences. While a prompt is computed, it
gets column sums. After the decision its pages are packed, and packed again with every chunk that decoding fills.

Knows sequences, the chunk table and the tree. The manager decides when, and whether there is room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from quire.cache.arrays import Int32s
from quire.cache.counts import POSITIONS_BYTES
from quire.cache.eviction import Eviction
from quire.cache.holder import Holder
from quire.cache.ledger import PAGE_TOKENS, Demand
from quire.cache.path import Path, PathReservation
from quire.cache.retention.decisions import PageBytes, Recover, Retention, RetentionDecision
from quire.cache.retention.packing import PathPacker
from quire.cache.retention.protocol import Newcomer, Profiling, PromptLimits, SliceLimits
from quire.cache.retention.retained import RetainedTokens
from quire.cache.retention.shared_sums import SharedSums

SUMS_ROWS = 3
"""Rows of sums promised for each chunk of a prompt: one for the prompt and two for the beginnings that the tree keeps.
Eviction may take these two. An encoded chunk has one more, for the positions beside its packed pages."""

KNOWN_RATIOS = 256
"""Number of last requests whose kept shares are remembered."""

LEAST_RATIOS, QUANTILE = 8, 0.9
"""A request is expected to keep the 90th percentile of recent shares, and everything until 8 shares are known."""


class Retainer:
    """Retention of all sequences of one engine. `KeepAll` has the same methods for heads that keep every token.

    replays       see `KeepAll`. Here it matters only for answers to prompts that keep all tokens
    shares_sums   whether the tree keeps sums. False with a budget: a prompt's last rows rank its tokens, and every
                  prompt computes these rows itself
    shared_sums   those sums
    ratios        shares of their prompts' pages that the last requests kept
    on_decision   called with each decision and the bytes of the prompt's pages before and after it; or None
    """

    def __init__(self, retention: Retention, eviction: Eviction, replays: bool) -> None:
        self.packer = packer = PathPacker(eviction)
        self.table = table = packer.table
        sums = packer.sums
        sealed, packed = table.page_sizes(table.sealed_codec), sums.page_bytes + POSITIONS_BYTES * table.encodes
        page_bytes = PageBytes(sealed.astype(np.int64), packed, table.open_codec.page_bytes, sums.page_bytes)
        self.retention = replace(retention, page_bytes=page_bytes)
        self.replays = replays
        self.shares_sums = eviction.tree.shares and retention.budget is None
        self.shared_sums = SharedSums(eviction, packer)
        self.per_chunk = table.demand(1, sums=1)
        self.bytes_freed = 0
        self.ratios: deque[float] = deque(maxlen=KNOWN_RATIOS)
        self._ratio = 1.0
        self.on_decision: Callable[[RetentionDecision, int, int], None] | None = None
        self._undecided: dict[Holder, None] = {}

    # ---- limits ----------------------------------------------------------------------------------------------------

    def limits(self, holder: Holder) -> PromptLimits:
        """Cached chunks may be taken up to the last rows, over which retention decides. Prefetching is off, because the
        tree would get chunks without their sums.
        """
        num_prompt = holder.num_prompt
        limits = PromptLimits(num_prompt, self.retention.num_reusable(num_prompt), needs_sums=self.shares_sums)
        return limits._replace(num_shareable=num_prompt // PAGE_TOKENS) if self.replays else limits

    def slice_limits(self, holder: Holder) -> SliceLimits:
        """A slice ends at the next stop or the prompt's end, and has the last rows together. After the prompt, each
        replayed token is a slice of its own.
        """
        path, num_prompt = holder.path, holder.num_prompt
        ends = (num_prompt, *(stop * PAGE_TOKENS for stop in self.shared_sums.stops.get(holder, ())))
        end = min((end for end in ends if end > path.num_tokens), default=path.num_tokens + 1)
        if path.retention.is_decided:
            return SliceLimits(end, end)
        return SliceLimits(end, self.retention.num_reusable(num_prompt) * PAGE_TOKENS)

    def profiling(self, holder: Holder, end: int) -> Profiling | None:
        """Profiles slices while sums or peaks are needed. At the prompt's end retention decides, once."""
        kept, retained = holder.path.retention, holder.path.retention.retained
        if not len(kept.sums):
            return None
        is_end = end == holder.num_prompt and not kept.is_decided
        num_last = self.retention.num_profiled(end) if is_end else 0
        if self.retention.budget is None:
            # After the decision, only if a head still needs sums.
            needs_sums = retained is None or retained.has_sums.any()
            return Profiling(num_last, decides=is_end) if needs_sums else None
        if retained is not None:
            # The open chunk, and the last sealed one where heads hold it in its row.
            return Profiling(0, 1, 1 + (holder.path.num_sealed - 1 in retained.origins))
        # With a budget the recovery decides nothing; it is computed only for `on_decision`.
        num_shown = num_last if self.on_decision is not None else 0
        return Profiling(num_shown, num_last, decides=True) if is_end else None

    def must_wait(self, holder: Holder) -> bool:
        """Whether an earlier sequence is about to attach sums from which this one can continue."""
        return self.shared_sums.must_wait(holder, self.retention.num_reusable(holder.num_prompt))

    # ---- demands ---------------------------------------------------------------------------------------------------

    def expected(self, apart_from: Holder | None = None, newcomer: Newcomer | None = None) -> Demand:
        """The largest demand of undecided sequences beyond their reservations, which assume no retention. It assumes
        that prompts are computed one after the other and that each then keeps the share that recent requests kept. It
        includes rows of sums, the tree's among them, and room for the positions of packed pages. The number of chunks
        may be negative: sequences that shrink one after the other need less than all prompts at once.
        """
        reads = [
            (each.path, [(segment, len(segment.chunks)) for segment in each.path.segments])
            for each in self._undecided
            if each is not apart_from
        ]
        if newcomer is not None:
            num_reserved, found = newcomer
            count = sum(each for _, each in found)
            reservation = PathReservation(num_reserved, self.table.num_sealed_for(num_reserved))
            path = Path(num_shared=count, num_stored=count, chunks=np.empty(count, np.int32), reservation=reservation)
            reads.append((path, found))
        if not reads:
            return self.table.zero_demand
        ratio, most, before, reserved, num_sums, num_rows = self._ratio, 0.0, 0.0, 0, 0, 0
        for path, found in reads:
            own, lacking = path.num_stored - path.num_shared, path.num_unsealed
            # Packing copies a part of the found chunks. Afterwards these are idle, unless other sequences read them.
            num_readers = path.tip is not None
            idle = sum([count for segment, count in found if not segment.pins and segment.most_locks <= num_readers])
            after = ratio * (path.num_begun + lacking) - idle
            most = max(most, before + max(own + lacking, after) - own)
            before += after - own
            reserved += lacking
            # Rows of sums and positions for the prompt, and for the beginnings of it that the tree keeps.
            num_prompt = path.reservation.num_reserved
            kept = (SUMS_ROWS - 1) * self.retention.num_reusable(num_prompt) if self.shares_sums else 0
            num_sums += (1 + self.table.encodes) * -(-num_prompt // PAGE_TOKENS) + kept - len(path.retention.sums)
            num_rows += path.num_stored
        return self.table.demand(math.ceil(most) - reserved, sums=num_sums, rows=num_rows)

    def growth(self, path: Path, num_tokens: int, num_sealed: int) -> Demand:
        """The demand, beside chunks, of a path that grows to `num_tokens` tokens by `num_sealed` sealed chunks: rows of
        sums, and room for the positions of packed pages.
        """
        kept = path.retention
        missing = kept.needs_sums * max(0, -(-num_tokens // PAGE_TOKENS) - len(kept.sums) - kept.num_dropped)
        packed = num_sealed * (self.table.encodes and kept.retained is not None)
        return self.table.demand(sums=missing + packed)

    # ---- what happens ----------------------------------------------------------------------------------------------

    def enter(self, holder: Holder) -> None:
        """Registers an admitted sequence as undecided."""
        self._undecided[holder] = None

    def resume(self, holder: Holder, num_taken: int) -> None:
        """Called after a path was extended over `num_taken` cached chunks. Frees the path's sums: its new chunks have
        none, or bring those of their end.
        """
        if num_taken:
            self.packer.free_sums(holder.path)
        if self.shares_sums:
            self.shared_sums.resume(holder, num_taken, self.retention.num_reusable(holder.num_prompt))

    def extend(self, path: Path, num_sealed: int) -> None:
        """Takes the demand of `growth` for new chunks of a path: rows of zero sums."""
        self.packer.extend(path, num_sealed)

    def seal(self, holder: Holder, make_room: Callable[[Demand], bool]) -> None:
        """Called when sealed chunks of a sequence are computed and published. After the decision, each sealed chunk
        leads to a new choice among all tokens, whose pages are then packed.

        make_room  makes room for a demand of the sequence; False if it does not fit
        """
        path, retained = holder.path, holder.path.retention.retained
        if retained is None:
            self.shared_sums.attach(holder, make_room)
            return
        retained.seal(path.num_sealed - 1, path.num_sealed)
        num_pages, tokens = retained.num_pages, holder.keys.tokens(0, path.num_sealed)
        sums = self.table.load_sums(path.retention.sums[: retained.num_rows])
        retained.drop(self.retention.select_while_decoding(retained, tokens, sums))
        self.bytes_freed += self.packer.pack(path, retained, num_pages)

    def leave(self, holder: Holder) -> None:
        """Called when a sequence ends, is preempted or has been decided on: it attaches no more sums to the tree."""
        self._undecided.pop(holder, None)
        self.shared_sums.stops.pop(holder, None)

    # ---- once the prompt is computed -------------------------------------------------------------------------------

    def choose(self, prompt_ids: Sequence[int], sums: Int32s, recover: Recover | None) -> RetentionDecision:
        """Decides which tokens of a prompt its heads keep.

        sums     int32 [chunks]: rows of the table with the attention that its tokens got
        recover  see Retention.decide
        """
        found = self.table.load_sums(sums)[..., : len(prompt_ids)]
        return self.retention.decide(prompt_ids, found, recover)

    def retain(self, holder: Holder, decided: RetentionDecision, fits: Callable[[Demand], bool]) -> None:
        """Drops the tokens that the heads do not keep of a prompt and packs the others.

        fits  whether a demand fits beside the reservations of all sequences
        """
        path, table = holder.path, self.table
        before = table.bytes_of(path.chunks) if self.on_decision is not None else 0
        path.retention.is_decided = True
        self.leave(holder)
        if (decided.policies == decided.chain.full).all():
            # Nothing changes, now or later.
            self._note_ratio(1.0)
            self.packer.free_sums(path)
        else:
            holds_last, keeps_first = decided.budget is not None, table.sinks is not None
            retained = RetainedTokens(decided.chain, decided.policies, holder.num_prompt, holds_last, keeps_first)
            path.retention.retained = retained
            retained.seal(0, path.num_sealed)
            num_pages = retained.num_pages
            retained.drop(decided.kept[..., : path.num_sealed * PAGE_TOKENS])
            self.bytes_freed += self.packer.shrink(path, retained, num_pages, fits)
            if num_pages.any():
                self._note_ratio(float(retained.num_pages.sum() / num_pages.sum()))
        if self.on_decision is not None:
            self.on_decision(decided, before, table.bytes_of(np.concatenate((path.chunks, path.retention.sums))))

    def _note_ratio(self, ratio: float) -> None:
        self.ratios.append(ratio)
        if len(self.ratios) >= LEAST_RATIOS:
            self._ratio = sorted(self.ratios)[math.ceil(QUANTILE * len(self.ratios)) - 1]
