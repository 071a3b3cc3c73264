"""Makes what sequences hold smaller: attention sums while a prompt is computed, packed pages once it is decided on, and
again with every chunk that decoding fills. Knows paths, the chunk table and the tree; when, and whether there is room,
is the manager's matter.

Sums of a prompt are kept in the tree where its last rows begin, which are computed whatever is cached: a prompt that
begins with the same tokens goes on from there. Of two that are about to compute the same beginning the later one waits.
Within a budget nothing of this is needed: what ranks tokens is what the last rows look at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.cache.codecs.sums import SumsCodec
from quire.cache.counts import POSITIONS_BYTES
from quire.cache.keys import ChunkKeys
from quire.cache.ledger import PAGE_TOKENS
from quire.cache.path import Path
from quire.cache.retained import Retained, drop_empty, has_page, pack, places_of, to_own
from quire.cache.retention import Decided, KeepRatio, PageBytes, Recover, Retention
from quire.cache.segment import Segment
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree

SUMS_ROWS = 3
"""Rows of sums promised for each chunk of a prompt: its own, and those of two beginnings that the tree keeps, which may
go when others want their room. Where a chunk is encoded, positions beside its packed pages take one more."""


class Looks(NamedTuple):
    """How a slice is profiled: see `Profiled`."""

    last_rows: int
    peaks: int = 0
    near: int = sys.maxsize


class Prompted(Protocol):
    """What the retainer needs to know of a sequence."""

    path: Path

    @property
    def keys(self) -> ChunkKeys:
        """The names of its chunks."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens so far."""
        ...

    @property
    def num_prompt(self) -> int:
        """How many of them are the prompt."""
        ...


class Retainer:
    """Retention of all sequences of one engine.

    ratio        what requests have kept of their prompts' pages
    watch        is told what was decided on a prompt, and the bytes of its pages before and after; None: nobody
    bytes_freed  of pages that requests held and that retention gave up, since start
    """

    def __init__(self, retention: Retention, table: ChunkTable, tree: PrefixTree | None) -> None:
        assert table.sums is not None and table.masks is not None, "the table has no room for sums"
        self.retention = retention
        self.table = table
        self.tree = tree
        self.ratio = KeepRatio()
        self.watch: Callable[[Decided, int, int], None] | None = None
        self.bytes_freed = 0
        self._sums: SumsCodec = table.sums
        # Who is about to keep sums, in the order in which they first said so: of a beginning at each of its stops.
        self._coming: dict[Prompted, None] = {}

    # ---- while the prompt is computed ------------------------------------------------------------------------------

    def num_sums(self, num_prompt: int) -> int:
        """Rows of sums that a prompt needs at most: its own, and two beginnings that the tree keeps."""
        kept = (SUMS_ROWS - 1) * self.retention.num_reusable(num_prompt) if self._keeps_sums else 0
        return (1 + self.table.encodes) * -(-num_prompt // PAGE_TOKENS) + kept

    def lacks(self, path: Path, num_tokens: int) -> int:
        """Rows of sums to take before a path has so many tokens."""
        if path.is_decided and path.retained is None:
            return 0
        return max(0, -(-num_tokens // PAGE_TOKENS) - len(path.sums) - path.num_gone)

    def places(self, path: Path, num_sealed: int) -> int:
        """Rows of sums whose room the positions of packed pages take, of so many chunks that are sealed."""
        return num_sealed * (self.table.encodes and path.retained is not None)

    def extend(self, path: Path, num_tokens: int, num_sealed: int) -> None:
        """Takes rows of sums up to a number of tokens, which are zero; once decided, only of heads that need them. Then
        chunks that are sealed get room for positions: when they are packed there might be none.
        """
        if num_sealed and self.places(path, num_sealed):
            assert path.retained is not None
            index = path.num_stored - path.num_gone - 1
            row = path.chunks[index : index + 1]
            first = (path.num_stored - 1) * PAGE_TOKENS
            places = places_of(row, (path.retained.policies < path.retained.chain.full)[..., None])
            positions = np.arange(first, first + PAGE_TOKENS, dtype=np.int32)
            self.table.place(places, np.tile(positions, (len(places[0]), 1)))
        count = self.lacks(path, num_tokens)
        if not count:
            return
        if path.retained is None:
            rows = self.table.take(count, self._sums)
        else:
            assert count == 1, "a sequence that decodes grows by a chunk"
            rows = np.array([self.table.blank(self._sums)], np.int32)
            self.table.fill(places_of(rows, self.retention.has_sums(path.retained.policies)[..., None]))
        self._sums.store(self.table, rows, np.zeros((*self.table.shape, count * PAGE_TOKENS), np.float32))
        path.sums = np.append(path.sums, rows)

    def match(self, holder: Prompted, limit: int, is_hit: bool) -> tuple[int, NDArray[np.int32]]:
        """Carries a path without chunks of its own on, up to the last place, `limit` chunks at most, whose sums the
        tree has: chunks it took, and the rows of these sums, which are not its own.
        """
        path, tree = holder.path, self.tree
        assert tree is not None
        keys, first = holder.keys, path.num_shared
        if not self._keeps_sums:
            return tree.extend(path, keys, limit, is_hit), np.empty(0, np.int32)
        count, sums = tree.sums_within(keys, limit)
        if count > first:
            tree.extend(path, keys, count, is_hit)
        # Sums are kept where the last rows begin, and where what the tree has of this prompt ends: others may, too.
        known = sum(each for _, each in tree.walk(keys, limit))
        path.stops = tuple(sorted({stop for stop in (known, limit) if stop > path.num_shared}))
        if path.stops:
            self._coming.setdefault(holder)
        else:
            self.forget(holder)
        return max(0, count - first), sums

    def reusable(self, holder: Prompted, limit: int) -> int:
        """How many of its first `limit` chunks a sequence may find, if they are cached."""
        if not self._keeps_sums:
            return limit
        assert self.tree is not None
        return self.tree.sums_within(holder.keys, limit)[0]

    def copy_sums(self, path: Path, sums: NDArray[np.int32]) -> None:
        """The path, which has none, begins with these sums, in rows of its own."""
        path.sums = self._copy(sums)

    def is_coming(self, holder: Prompted) -> bool:
        """Whether another sequence that came before is about to keep sums this one could begin with."""
        if self.tree is None or not self._coming:
            return False
        limit = self.retention.num_reusable(holder.num_prompt)
        keys = holder.keys.first(limit)
        for other in self._coming:
            if other is holder:
                return False
            for stop in other.path.stops:
                is_ahead = holder.path.num_shared < stop <= limit and stop * PAGE_TOKENS > other.path.num_tokens
                if is_ahead and other.keys.first(stop)[-1] == keys[stop - 1]:
                    return True
        return False

    def slice_end(self, holder: Prompted) -> int:
        """See CacheManager.slice_end."""
        path = holder.path
        if path.num_tokens >= holder.num_prompt:
            return path.num_tokens + 1
        ends = (stop * PAGE_TOKENS for stop in path.stops)
        return next((end for end in ends if end > path.num_tokens), holder.num_prompt)

    def undivided(self, holder: Prompted) -> int:
        """See CacheManager.undivided."""
        path, num_prompt = holder.path, holder.num_prompt
        return path.num_tokens if path.is_decided else self.retention.num_reusable(num_prompt) * PAGE_TOKENS

    def last_rows(self, holder: Prompted, num_tokens: int) -> int:
        """See CacheManager.last_rows."""
        is_end = num_tokens == holder.num_prompt and not holder.path.is_decided
        return self.retention.num_profiled(num_tokens) if is_end else 0

    def looks(self, path: Path, num_last: int) -> Looks | None:
        """How a slice is profiled; None if it is not.

        num_last  its rows at the end over which is decided then; 0: none
        """
        if not len(path.sums):
            return None
        if self.retention.budget is None:
            # After the decision, if a head goes on needing them.
            is_wanted = path.retained is None or self.retention.has_sums(path.retained.policies).any()
            return Looks(num_last) if is_wanted else None
        if path.retained is not None:
            # The open chunk, and the last sealed one where heads hold it in its row.
            return Looks(0, 1, 1 + int((path.retained.origins[-1:] == path.num_sealed - 1).sum()))
        # How much is recovered is shown, and decides nothing.
        return Looks(num_last if self.watch is not None else 0, num_last) if num_last else None

    def to_store(self, path: Path) -> int:
        """Rows of sums that are to be kept for others now: of all of a path that ends at one of its stops."""
        return path.num_sealed if path.num_sealed in path.stops and path.num_shared == path.num_sealed else 0

    def store(self, path: Path) -> None:
        """Gives the tree a copy of the sums of all a path has."""
        assert self.tree is not None
        self.table.give(self.tree.keep_sums(path, path.num_sealed, self._copy(path.sums[: path.num_sealed])))

    def stop_coming(self, holder: Prompted) -> None:
        """Whatever was to be kept of a sequence is, or will not be."""
        if holder.path.num_tokens >= max(holder.path.stops, default=0) * PAGE_TOKENS:
            self.forget(holder)

    def forget(self, holder: Prompted) -> None:
        """A sequence is not about to keep sums any more: they are there, or it ends, or is preempted."""
        self._coming.pop(holder, None)

    # ---- once it is computed ---------------------------------------------------------------------------------------

    def decide(self, prompt_ids: Sequence[int], sums: NDArray[np.int32], recover: Recover | None) -> Decided:
        """What heads keep of a prompt, by the sums in some rows of the table, and what its last rows look at."""
        found = self._sums.load(self.table, sums)[..., : len(prompt_ids)]
        return self.retention.decide(prompt_ids, found, recover, self.page_bytes)

    def begin(self, holder: Prompted, decided: Decided, has_room: Callable[[NDArray[np.int64]], bool]) -> None:
        """The path lets go of what its heads do not keep of its prompt. What it keeps is to be packed by `finish`, when
        there is room for `wanted`. The table has rows for what it shares.

        has_room  whether pages of sealed chunks, int64 [L, H], would fit if all that is idle now went
        """
        path, table = holder.path, self.table
        path.is_decided = True
        self.forget(holder)
        if (decided.policies == self.retention.chain.full).all():
            # Nothing changes, now or later.
            self.ratio.learn(1.0)
            table.give(path.sums)
            path.sums = path.sums[:0]
            return
        retained = Retained.whole(
            decided.chain, decided.policies, holder.num_prompt, path.num_sealed, decided.budget is not None
        )
        retained.drop(decided.kept[..., : path.num_sealed * PAGE_TOKENS])
        stuck = np.zeros_like(retained.in_place)  # pages that cannot be evicted, and would take memory to copy
        stays = np.ones(decided.policies.shape, bool)
        for segment, rows in _rows_of(path, retained):
            kept = retained.by_row(retained.positions >= 0)[:, :, rows]
            # A copy for each user takes more than the pages do. What follows copied pages is copied too: it could not
            # be evicted before them.
            stays &= segment.users * kept.mean((-2, -1)) >= 1
            is_held = kept.any(-1)
            retained.in_place[:, :, rows] = stays[..., None] & is_held
            others = (segment.locks > 1) | (segment.pins > 0)
            stuck[:, :, rows] = (others & ~stays)[..., None] & is_held
        if stuck.any() and not has_room(stuck.sum(-1)):
            retained.in_place |= stuck
        path.replace(0, table.borrow(path.chunks[: path.num_shared]))
        path.num_shared = 0
        path.retained = retained
        drop_empty(table, path)  # what is evicted of such pages is free at once
        self._loosen(path)

    def wanted(self, path: Path) -> NDArray[np.int64]:
        """Pages of sealed chunks that packing takes now, int64 [L, H]: fewer once the tree has dropped some."""
        found = np.zeros(self.table.shape, np.int64)
        if path.retained is not None:
            _, layers, heads = to_own(self.table, path)
            np.add.at(found, (layers, heads), 1)
        return found

    def finish(self, path: Path) -> None:
        """Packs what a path keeps of its prompt."""
        retained = path.retained
        if retained is None:
            return
        num_pages = np.full(retained.policies.shape, path.num_sealed)  # that it had until it was decided on
        self.table.detach(to_own(self.table, path))
        self._pack(path, self._sums.load(self.table, path.sums[: retained.num_rows]))
        if num_pages.sum():
            self.ratio.learn(float(self._num_pages(path).sum() / num_pages.sum()))
        self._count_freed(num_pages, path)

    def reseal(self, path: Path, tokens: Sequence[int]) -> None:
        """One chunk more is sealed: what is kept of all is asked again, and packed."""
        retained = path.retained
        assert retained is not None
        retained.seal(path.num_sealed - 1)
        num_pages = self._num_pages(path)
        sums = self._sums.load(self.table, path.sums[: retained.num_rows])
        retained.drop(self.retention.keep_on(retained, tokens, sums, self.page_bytes))
        self._pack(path, sums)
        self._loosen(path)
        self._count_freed(num_pages, path)

    def check(self, path: Path) -> None:
        """Proves that a path holds, of each head, the pages its tokens need, and no others."""
        retained, table = path.retained, self.table
        if retained is None:
            return
        rows = path.chunks[: retained.num_rows]
        assert table.masks is not None
        alive = retained.by_row(retained.positions >= 0)
        masks = np.packbits(alive, axis=-1, bitorder="little").view("<u8")[..., 0]
        assert np.array_equal(masks, table.masks[rows].transpose(1, 2, 0)), "masks are not the tokens that are kept"
        own = ~retained.in_place
        pages = ((masks != 0) & own).sum(-1)
        tokens = (alive * own[..., None]).sum((-2, -1))
        assert np.array_equal(pages, -(-tokens // PAGE_TOKENS)), "tokens are not packed"
        assert not table.is_shared(places_of(rows, (masks != 0) & own)).any(), "a page that is written is shared"
        wanted = (masks != 0) & self.retention.has_sums(retained.policies)[..., None]
        assert np.array_equal(wanted, has_page(table, path.sums[: len(rows)])), "sums are not those of the pages"

    def _pack(self, path: Path, sums: NDArray[np.float32]) -> None:
        """Packs the path's pages, and gives it the sums in their new places."""
        sums = pack(self.table, path, sums)
        retained, table = path.retained, self.table
        assert retained is not None
        num_rows = retained.num_rows
        rows = path.sums[:num_rows]
        needs = self.retention.has_sums(retained.policies)[..., None]
        wanted = has_page(table, path.chunks[:num_rows]) & needs
        held = has_page(table, rows)
        table.drop(places_of(rows, held & ~wanted))
        table.fill(places_of(rows, wanted & ~held))
        self._sums.store(table, rows, sums)
        rest = path.sums[num_rows:]
        held = has_page(table, rest)
        table.drop(places_of(rest, held & ~needs))

    def _loosen(self, path: Path) -> None:
        """Unlocks, in the tree, heads of which the path reads no page in place any more."""
        if self.tree is None or path.tip is None:
            return
        retained = path.retained
        assert retained is not None
        held = has_page(self.table, path.chunks[: retained.num_rows]) & retained.in_place
        heads = {}
        below = np.zeros(retained.policies.shape, bool)
        for segment, rows in reversed(_rows_of(path, retained)):
            heads[segment] = below = below | held[:, :, rows].any(-1)
        if any((heads[segment] != (True if before is None else before)).any() for segment, before in path.reads()):
            self.tree.loosen(path, heads)

    @property
    def page_bytes(self) -> PageBytes:
        """What pages of any sequence take."""
        table, sums = self.table, self._sums.page_bytes
        sealed = table.page_sizes(table.sealed_codec).astype(np.int64)
        return PageBytes(sealed, sums + POSITIONS_BYTES * table.encodes, table.open_codec.page_bytes, sums)

    @property
    def _keeps_sums(self) -> bool:
        """Whether the tree has sums of prompts' beginnings: those that find these need them."""
        return self.tree is not None and self.retention.budget is None

    def _num_pages(self, path: Path) -> NDArray[np.int64]:
        retained = path.retained
        assert retained is not None
        return np.asarray(has_page(self.table, path.chunks[: retained.num_rows]).sum(-1))

    def _count_freed(self, before: NDArray[np.int64], path: Path) -> None:
        sizes = self.table.page_sizes(self.table.sealed_codec)
        self.bytes_freed += int(((before - self._num_pages(path)) * sizes).sum())

    def _copy(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """New rows with the same sums."""
        copied = self.table.take(len(rows), self._sums)
        if self.table.has_bytes:
            pages = self.table.pages
            self.table.arena.copy(pages[rows].reshape(-1), pages[copied].reshape(-1), self._sums.page_bytes)
        return copied


def _rows_of(path: Path, retained: Retained) -> list[tuple[Segment, NDArray[np.bool_]]]:
    """The segments of the tree that a path uses, and which of its sealed rows were chunks of each."""
    at = retained.origins * PAGE_TOKENS
    return [(segment, (at >= segment.start) & (at < segment.end)) for segment in path.segments]
