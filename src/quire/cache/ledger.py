"""The bookkeeping of an arena's pages: sizes, holders and holds. Knows neither bytes nor tokens, heads or codecs.

A page id counts 128-byte units from the start of the arena, so every page starts on a 128-byte boundary, and an int32
id reaches 256 GiB. The arena is divided into equal slabs. A slab holds pages of one size. It becomes free when its last
page is freed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.cache.arrays import Int32s, Int64s
from quire.errors import CacheFullError, ConfigError

PAGE_TOKENS = 64
"""Token slots of a page: ChunkAttention's chunk, and 98 % of copy bandwidth on an H200 against 86 % at 16."""

UNIT = 128
"""Bytes of a page id's unit. Every page size is a multiple of it."""

MAX_ARENA_BYTES = np.iinfo(np.int32).max * UNIT
"""The largest arena that page ids can address: 256 GiB."""

_MOVED_SHARE = 256
"""Compaction empties at least one of 256 slabs at a time. Finding the holders of moved pages scans the chunk table,
which costs about as much as moving that share of the arena."""


class Move(NamedTuple):
    """Pages of one size that compaction moves: their ids before and after, int32 [n] each."""

    page_bytes: int
    before: Int32s
    after: Int32s


class Demand(tuple[int, ...]):
    """Number of pages of each size class of a ledger, in its order, and last the number of rows of a chunk table.
    Negative numbers are given back first.
    """

    __slots__ = ()

    def __add__(self, other: tuple[int, ...]) -> Demand:  # type: ignore[override]
        return Demand(map(operator.add, self, other))

    def __sub__(self, other: tuple[int, ...]) -> Demand:
        return Demand(map(operator.sub, self, other))

    def __mul__(self, count: int) -> Demand:  # type: ignore[override]
        return Demand(map(count.__mul__, self))


@dataclass(slots=True)
class _SizeClass:
    """Pages of one size.

    num_slabs  slabs that hold pages of this size; 0 in a ledger that only counts
    num_held   slabs with a page under a hold
    """

    page_bytes: int
    pages_per_slab: int
    num_out: int = 0
    num_held: int = 0
    num_slabs: int = 0

    @property
    def num_free(self) -> int:
        return self.num_slabs * self.pages_per_slab - self.num_out

    def slabs_for(self, need: int) -> int:
        """Slabs for the pages out and `need` more, packed as densely as holds allow."""
        return max(self.num_held, -(-(self.num_out + need) // self.pages_per_slab))


class PageCounts:
    """The number of pages of each size that are out of an arena, and how many more fit. This is enough for decisions,
    and all that a simulator has. Pages are packed as densely as possible.

    num_bytes   size of the arena; rounded down to whole slabs
    slab_bytes  bytes of a slab; by default a 64th of the arena, between 256 KiB and 4 MiB
    bytes_out   bytes of all pages that are not free
    Raises ConfigError if not even one slab fits.
    """

    def __init__(self, num_bytes: int, slab_bytes: int | None = None) -> None:
        if slab_bytes is None:
            slab_bytes = min(max(num_bytes // 64, 256 << 10), 4 << 20, num_bytes)
        self.slab_bytes = slab_bytes // UNIT * UNIT
        self.num_slabs = num_bytes // self.slab_bytes if self.slab_bytes else 0
        if self.num_slabs < 1:
            raise ConfigError(f"a cache of {num_bytes} bytes holds no slab of {slab_bytes} bytes; raise cache.memory")
        self.num_bytes = self.num_slabs * self.slab_bytes
        self.bytes_out = 0
        self._classes: dict[int, _SizeClass] = {}

    @property
    def page_sizes(self) -> list[int]:
        """The size classes so far, in the order of a `Demand`."""
        return list(self._classes)

    def size_class(self, page_bytes: int) -> int:
        """The index of a size in that order. A new size comes last. Raises ConfigError for an impossible size."""
        self._size_class(page_bytes)
        return self.page_sizes.index(page_bytes)

    def out(self, page_bytes: int) -> int:
        """Number of pages of a size that are taken and not given back."""
        return self._size_class(page_bytes).num_out

    def has_room(self, needs: Sequence[int]) -> bool:
        """Whether `needs` more pages of each size class fit if pages are packed as densely as possible. Ignores numbers
        after the size classes.
        """
        assert len(needs) >= len(self._classes), "needs of other size classes"
        left = self.num_slabs
        for pages, need in zip(self._classes.values(), needs, strict=False):
            left -= max(pages.num_held, -(-(pages.num_out + need) // pages.pages_per_slab))
        return left >= 0

    def count(self, needs: Sequence[int], by: int) -> None:
        """Counts pages of each class as taken (by = 1) or given back (-1)."""
        for pages, need in zip(self._classes.values(), needs, strict=False):
            pages.num_out += by * need
            self.bytes_out += by * need * pages.page_bytes
            assert pages.num_out >= 0, f"more pages of {pages.page_bytes} bytes were given back than taken"

    def check(self) -> None:
        """Proves that the pages that are out fit."""
        assert self.has_room([0] * len(self._classes)), "more pages are out than there is room for"
        bytes_out = sum(pages.num_out * page_bytes for page_bytes, pages in self._classes.items())
        assert bytes_out == self.bytes_out, f"{bytes_out} != {self.bytes_out} bytes out"

    def _size_class(self, page_bytes: int) -> _SizeClass:
        pages = self._classes.get(page_bytes)
        if pages is None:
            if page_bytes < UNIT or page_bytes % UNIT or page_bytes > self.slab_bytes:
                raise ConfigError(
                    f"a page of {page_bytes} bytes must be a multiple of {UNIT} and fit a slab of {self.slab_bytes};"
                    " raise cache.memory"
                )
            pages = self._classes[page_bytes] = _SizeClass(page_bytes, self.slab_bytes // page_bytes)
        return pages


class PageLedger(PageCounts):
    """The pages of one arena, taken and given back. Invariant (`check`): a slab with a page size has a page out, and
    every page out has a holder.

    A page may have several holders. It counts once, and is free when its last holder has given it back. A hold is a
    holder that copies the page's bytes elsewhere. Until its release, the page neither moves nor becomes free.

    Raises ConfigError for more bytes than ids reach.
    """

    def __init__(self, num_bytes: int, slab_bytes: int | None = None) -> None:
        super().__init__(num_bytes, slab_bytes)
        if self.num_bytes > MAX_ARENA_BYTES:
            raise ConfigError(f"a cache holds at most 256 GiB, not {num_bytes} bytes; lower cache.memory")
        self._page_bytes = np.zeros(self.num_slabs, np.int32)  # page size of each slab; 0: a free slab
        self._out = np.zeros(self.num_slabs, np.int32)  # pages taken and not given back
        self._held = np.zeros(self.num_slabs, np.int32)  # pages under a hold
        self._holders = np.zeros((self.num_slabs, 0), np.int16)  # by slab, and page in the slab
        self._holds = np.zeros((self.num_slabs, 0), np.int16)  # holders that are holds

    def take(self, count: int, page_bytes: int) -> Int32s:
        """Takes `count` pages of a size. Returns their ids, int32 [count], ascending. Raises CacheFullError, and takes
        nothing, if the free pages of this size and the free slabs are too few.
        """
        pages = self._size_class(page_bytes)
        num_slabs = -(-(count - pages.num_free) // pages.pages_per_slab)
        if num_slabs > 0:
            if num_slabs > self._num_free_slabs:
                raise CacheFullError(
                    f"{count} pages of {page_bytes} bytes do not fit: {self.available(page_bytes)} of that size are"
                    f" free in {self.num_bytes} bytes (cache.memory)"
                )
            self._page_bytes[np.flatnonzero(self._page_bytes == 0)[:num_slabs]] = page_bytes
            pages.num_slabs += num_slabs
        return self._pop(pages, count)

    def share(self, ids: Int32s, page_bytes: int) -> None:
        """Adds a holder, which must give the page back too, to each page. No page may occur twice."""
        at = self._at(ids, page_bytes)
        assert self._holders[at].all(), "a free page cannot be shared"
        self._holders[at] += 1

    def holders(self, ids: Int32s, page_bytes: int) -> Int64s:
        """Number of holders of each page of a slab in use; 0 for a free page."""
        return np.asarray(self._holders[self._at(ids, page_bytes)], np.int64)

    def hold(self, ids: Int32s, page_bytes: int) -> None:
        """Holds each page until `release`, because its bytes are being copied. No page may occur twice."""
        self.share(ids, page_bytes)
        self._count_holds(ids, page_bytes, 1)

    def release(self, ids: Int32s, page_bytes: int) -> None:
        """Ends one hold of each page. Pages without another holder become free."""
        assert self.holds(ids, page_bytes).all(), "a page is released that nobody holds"
        self._count_holds(ids, page_bytes, -1)
        self.give(ids, page_bytes)

    def holds(self, ids: Int32s, page_bytes: int) -> Int64s:
        """Number of holds of each page."""
        return np.asarray(self._holds[self._at(ids, page_bytes)], np.int64)

    def give(self, ids: Int32s, page_bytes: int) -> None:
        """Takes back pages that came from `take` with the same size, from one holder each."""
        if not len(ids):
            return
        ids = np.sort(ids)
        pages, at = self._classes[page_bytes], self._at(ids, page_bytes)
        holders = self._holders[at]
        assert holders.all() and (ids[1:] > ids[:-1]).all(), "a page was given back twice"
        assert (holders > self._holds[at]).all(), "a page under a hold has no other holder"
        self._holders[at] -= 1
        slabs = at[0][holders == 1]
        np.subtract.at(self._out, slabs, 1)
        empty = list(set(slabs[self._out[slabs] == 0].tolist()))
        self._page_bytes[empty] = 0
        pages.num_slabs -= len(empty)
        pages.num_out -= len(slabs)
        self.bytes_out -= len(slabs) * page_bytes

    def available(self, page_bytes: int) -> int:
        """Number of pages of a size that `take` can give now, without compaction."""
        pages = self._size_class(page_bytes)
        return pages.num_free + self._num_free_slabs * pages.pages_per_slab

    def ids_out(self, page_bytes: int) -> Int32s:
        """The ids of the pages of a size that are out, int32 [out], ascending."""
        return self._ids_out(page_bytes, np.flatnonzero(self._page_bytes == page_bytes))

    def make_room(self, needs: Sequence[int]) -> list[Move]:
        """Empties the slabs with the fewest bytes out until `take` can give all needs, by size class. The needs must
        fit. Before the caller takes pages, it copies the bytes of moved pages and updates the ids that their holders
        have.
        """
        assert self.has_room(needs), f"{needs} pages by size class do not fit, however they lie"
        more = [
            pages.slabs_for(need) - pages.num_slabs for pages, need in zip(self._classes.values(), needs, strict=False)
        ]
        wanted = sum(max(0, count) for count in more) - self._num_free_slabs
        if wanted <= 0:
            return []
        # If slabs are missing although the needs fit, some sizes have more slabs than their pages and needs take when
        # packed. The excess slabs of each size, none with a hold, can be emptied into its others. Together they
        # suffice.
        count, found = max(wanted, self.num_slabs // _MOVED_SHARE), []
        for page_bytes, missing in zip(self._classes, more, strict=False):
            # Among equally full slabs, those at the end of the arena first, so that pages gather at its start.
            slabs = np.flatnonzero((self._page_bytes == page_bytes) & (self._held == 0))[::-1]
            slabs = slabs[np.argsort(self._out[slabs], kind="stable")[: max(0, min(-missing, count))]]
            found += [(int(self._out[slab]) * page_bytes, page_bytes, int(slab)) for slab in slabs]
        emptied: dict[int, list[int]] = {}
        for _, page_bytes, slab in sorted(found)[:count]:
            emptied.setdefault(page_bytes, []).append(slab)
        return [self._empty(self._classes[page_bytes], np.array(slabs)) for page_bytes, slabs in emptied.items()]

    def slabs_of(self, ids: Int32s) -> Int32s:
        """The slabs of pages, in the shape of the ids."""
        return ids // np.int32(self.slab_bytes // UNIT)

    def check(self) -> None:
        """Proves the invariant, and that duplicate counts agree."""
        free = self._page_bytes == 0
        assert free.sum() == self._num_free_slabs, "a slab is lost, or free and in use"
        assert not self._out[free].any() and not self._holders[free].any(), "a free slab has pages out"
        for page_bytes, pages in self._classes.items():
            slabs = np.flatnonzero(self._page_bytes == page_bytes)
            holders, holds, out = self._holders[slabs], self._holds[slabs], self._out[slabs]
            assert not holders[:, pages.pages_per_slab :].any(), "a page crosses the end of its slab"
            assert (holds <= holders).all(), "a page has more holds than holders"
            assert np.array_equal((holds > 0).sum(1), self._held[slabs]), "held pages are counted wrongly"
            assert (self._held[slabs] > 0).sum() == pages.num_held, "slabs with holds are counted wrongly"
            assert np.array_equal((holders > 0).sum(1), out), f"leak: pages of {page_bytes} bytes are counted wrongly"
            assert (out > 0).all(), f"an empty slab was kept for pages of {page_bytes} bytes"
            assert (len(slabs), out.sum()) == (pages.num_slabs, pages.num_out), "pages or slabs are counted wrongly"
        super().check()

    @property
    def _num_free_slabs(self) -> int:
        return self.num_slabs - sum(pages.num_slabs for pages in self._classes.values())

    def _at(self, ids: Int32s, page_bytes: int) -> tuple[Int32s, Int32s]:
        """The slabs of pages of a size, and their indices in them."""
        slabs = self.slabs_of(ids)
        assert (self._page_bytes[slabs] == page_bytes).all(), f"a page of another size was named as one of {page_bytes}"
        return slabs, (ids - slabs * np.int32(self.slab_bytes // UNIT)) // np.int32(page_bytes // UNIT)

    def _size_class(self, page_bytes: int) -> _SizeClass:
        pages = super()._size_class(page_bytes)
        wider = pages.pages_per_slab - self._holders.shape[1]
        if wider > 0:
            self._holders, self._holds = (np.pad(each, ((0, 0), (0, wider))) for each in (self._holders, self._holds))
        return pages

    def _count_holds(self, ids: Int32s, page_bytes: int, by: int) -> None:
        """Each page has one hold more or less."""
        at, before = self._at(ids, page_bytes), np.count_nonzero(self._held)
        was_held = self._holds[at] > 0
        self._holds[at] += by
        np.add.at(self._held, at[0][was_held != (self._holds[at] > 0)], by)
        self._size_class(page_bytes).num_held += int(np.count_nonzero(self._held) - before)

    def _pop(self, pages: _SizeClass, count: int, without: Int64s | None = None) -> Int32s:
        """Ids of free pages from the lowest slabs that have some: pages gather there, and slabs above become empty.

        without  slabs that are passed over
        """
        has_free = (self._page_bytes == pages.page_bytes) & (self._out < pages.pages_per_slab)
        if without is not None:
            has_free[without] = False
        slabs = np.flatnonzero(has_free)
        num_free = np.cumsum(pages.pages_per_slab - self._out[slabs])
        slabs = slabs[: int(np.searchsorted(num_free, count)) + 1]
        free = self._holders[slabs, : pages.pages_per_slab] == 0
        at, index = np.divmod(np.flatnonzero(free)[:count], pages.pages_per_slab)
        self._holders[slabs[at], index] = 1
        self._out[slabs] += np.bincount(at, minlength=len(slabs)).astype(np.int32)
        pages.num_out += count
        self.bytes_out += count * pages.page_bytes
        return self._ids(slabs[at], index, pages.page_bytes)

    def _empty(self, pages: _SizeClass, slabs: Int64s) -> Move:
        """Moves the pages of some slabs, which have no holds, into the other slabs of the class."""
        page_bytes = pages.page_bytes
        before = self._ids_out(page_bytes, slabs)
        after = self._pop(pages, len(before), slabs)
        self._holders[self._at(after, page_bytes)] = self.holders(before, page_bytes)
        self._holders[self._at(before, page_bytes)] = 1
        self.give(before, page_bytes)
        return Move(page_bytes, before, after)

    def _ids_out(self, page_bytes: int, slabs: Int64s) -> Int32s:
        at, index = np.nonzero(self._holders[slabs])
        return self._ids(slabs[at], index, page_bytes)

    def _ids(self, slabs: NDArray[Any], index: NDArray[Any], page_bytes: int) -> Int32s:
        """Ids of the pages at some indices in slabs."""
        return np.asarray(slabs * (self.slab_bytes // UNIT) + index * (page_bytes // UNIT), np.int32)
