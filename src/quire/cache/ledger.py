"""The bookkeeping of an arena's pages: sizes, holders and holds. Knows neither bytes nor tokens, heads or codecs.

A page id counts 128-byte units from the start of the arena, so every page starts on a 128-byte boundary, and an int32
id reaches 256 GiB. The arena is divided into equal slabs. A slab holds pages of one size. It becomes free when its last
page is freed.
"""

from __future__ import annotations

import math
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


class PageMove(NamedTuple):
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
        return tuple.__new__(Demand, map(operator.add, self, other))

    def __sub__(self, other: tuple[int, ...]) -> Demand:
        return tuple.__new__(Demand, map(operator.sub, self, other))

    def __mul__(self, count: int) -> Demand:  # type: ignore[override]
        return self if count == 1 else tuple.__new__(Demand, map(count.__mul__, self))


@dataclass(slots=True)
class _SizeClass:
    """Pages of one size.

    num_out    pages that are taken and not freed
    num_held   slabs with a page under a hold
    """

    page_bytes: int
    pages_per_slab: int
    num_out: int = 0
    num_held: int = 0

    def slabs_for(self, need: int) -> int:
        """Slabs for the pages out and `need` more, packed as densely as holds allow."""
        return max(self.num_held, -(-(self.num_out + need) // self.pages_per_slab))


class PageCounts:
    """The number of taken pages of each size in an arena, and how many more fit. Admission and eviction need no more,
    and a simulator has no more. Pages count as packed as densely as possible.

    num_bytes   size of the arena; rounded down to whole slabs
    slab_bytes  bytes of a slab; by default a 64th of the arena, between 256 KiB and 4 MiB
    allocated_bytes   bytes of all pages that are not free
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
        self.allocated_bytes = 0
        self._classes: list[_SizeClass] = []
        self._slab_shares = 1  # of a slab: a whole number of them for a page of each size

    @property
    def page_sizes(self) -> list[int]:
        """The size classes so far, in the order of a `Demand`."""
        return [pages.page_bytes for pages in self._classes]

    def size_class(self, page_bytes: int) -> int:
        """The index of a size in that order. A new size comes last. Raises ConfigError for an impossible size."""
        if page_bytes not in self.page_sizes:
            if page_bytes < UNIT or page_bytes % UNIT or page_bytes > self.slab_bytes:
                raise ConfigError(
                    f"a page of {page_bytes} bytes must be a multiple of {UNIT} and fit a slab of {self.slab_bytes};"
                    " raise cache.memory"
                )
            self._classes.append(_SizeClass(page_bytes, self.slab_bytes // page_bytes))
            self._slab_shares = math.lcm(self._slab_shares, self.slab_bytes // page_bytes)
        return self.page_sizes.index(page_bytes)

    @property
    def has_holds(self) -> bool:
        """Whether a page is under a hold."""
        return any(pages.num_held for pages in self._classes)

    def out(self, page_bytes: int) -> int:
        """Number of pages of a size that are taken and not given back."""
        return self._classes[self.size_class(page_bytes)].num_out

    def has_room(self, needs: Sequence[int]) -> bool:
        """Whether `needs` more pages of each size class fit if pages are packed as densely as possible. A number of
        rows at the end of `needs` is ignored.
        """
        left = self.num_slabs
        for pages, need in zip(self._classes, needs, strict=False):
            packed = -(-(pages.num_out + need) // pages.pages_per_slab)  # as in `slabs_for`; this loop is hot
            left -= packed if packed > pages.num_held else pages.num_held
        return left >= 0

    def shortage(self, needs: Sequence[int], each: Sequence[int]) -> int:
        """Least number of times that the pages of `each` must be freed until `needs` fit, both by size class. It is a
        lower bound, because pages fill whole slabs.
        """
        over, freed = -self.num_slabs * self._slab_shares, 0
        for index, pages in enumerate(self._classes):
            share = self._slab_shares // pages.pages_per_slab
            over += (pages.num_out + needs[index]) * share
            freed += each[index] * share
        return -(-over // freed)

    def count(self, needs: Sequence[int], by: int) -> None:
        """Counts pages of each class as taken (by = 1) or given back (-1)."""
        for index, pages in enumerate(self._classes):
            change = by * needs[index]
            pages.num_out += change
            self.allocated_bytes += change * pages.page_bytes
            assert pages.num_out >= 0, f"more pages of {pages.page_bytes} bytes were given back than taken"

    def check(self) -> None:
        """Proves that the taken pages fit."""
        assert self.has_room([0] * len(self._classes)), "more pages are out than there is room for"
        allocated_bytes = sum(pages.num_out * pages.page_bytes for pages in self._classes)
        assert allocated_bytes == self.allocated_bytes, f"{allocated_bytes} != {self.allocated_bytes} bytes out"


class PageLedger(PageCounts):
    """Takes and frees the pages of one arena. Invariant (`check`): a slab with a page size has a taken page, and every
    taken page has a holder. An id identifies a page; its slab has the size.

    A page may have several holders. It counts once, and is free when its last holder has freed it. A hold is a holder
    that copies the page's bytes elsewhere. Until its release the page neither moves nor becomes free.

    Raises ConfigError for more bytes than ids reach.
    """

    def __init__(self, num_bytes: int, slab_bytes: int | None = None) -> None:
        super().__init__(num_bytes, slab_bytes)
        if self.num_bytes > MAX_ARENA_BYTES:
            raise ConfigError(f"a cache holds at most 256 GiB, not {num_bytes} bytes; lower cache.memory")
        self._slab_units = np.int32(self.slab_bytes // UNIT)
        self._page_units = np.zeros(self.num_slabs, np.int32)  # of the slab's pages; 0: a free slab
        self._out = np.zeros(self.num_slabs, np.int32)  # pages taken and not given back
        self._is_held = np.zeros(self.num_slabs, bool)  # whether a page of it is under a hold
        self._holders = np.zeros((self.num_slabs, 0), np.int16)  # by slab, and page in the slab
        self._holds = np.zeros((self.num_slabs, 0), np.int16)  # how many of the holders are holds

    def size_class(self, page_bytes: int) -> int:
        """See PageCounts."""
        index = super().size_class(page_bytes)
        wider = self._classes[index].pages_per_slab - self._holders.shape[1]
        if wider > 0:
            self._holders, self._holds = (np.pad(each, ((0, 0), (0, wider))) for each in (self._holders, self._holds))
        return index

    def take(self, sizes: NDArray[Any]) -> Int32s:
        """Takes one page of each size. Returns their ids, in the shape of the sizes. Raises CacheFullError and takes
        nothing if they do not fit the free pages of their sizes and the free slabs.
        """
        ids, free, needs = np.zeros(sizes.shape, np.int32), np.flatnonzero(self._page_units == 0), self._by_class(sizes)
        new = [max(0, count) for count in self._missing_slabs(needs)]
        assert sum(needs) == sizes.size, "pages of an unknown size"
        if sum(new) > len(free):
            raise CacheFullError(
                f"{sizes.size} pages do not fit: they take {sum(new)} slabs of {self.slab_bytes} bytes, and"
                f" {len(free)} of {self.num_slabs} are free (cache.memory)"
            )
        self._page_units[free[: sum(new)]] = np.repeat(self.page_sizes, new) // UNIT
        for pages, need in zip(self._classes, needs, strict=True):
            if need:
                ids[sizes == pages.page_bytes] = self._pop(pages, self._slabs(pages), need)
        self.count(needs, 1)
        return ids

    def share(self, ids: Int32s) -> None:
        """Adds a holder to each page; ids are distinct. The holder frees the page like the others."""
        at = self._at(ids)
        assert self._holders[at].all(), "a free page cannot be shared"
        self._holders[at] += 1

    def holders(self, ids: Int32s) -> Int64s:
        """Number of holders of each page of a slab in use; 0 for a free page."""
        return np.asarray(self._holders[self._at(ids)], np.int64)

    def hold(self, ids: Int32s) -> None:
        """Puts a hold on each page; ids are distinct. The pages do not move until `release`."""
        self.share(ids)
        self._count_holds(ids, 1)

    def release(self, ids: Int32s) -> None:
        """Ends one hold of each page. Pages without another holder become free."""
        assert self.holds(ids).all(), "a page is released that has no hold"
        self._count_holds(ids, -1)
        self.free(ids)

    def holds(self, ids: Int32s) -> Int64s:
        """Number of holds of each page."""
        return np.asarray(self._holds[self._at(ids)], np.int64)

    def free(self, ids: Int32s) -> None:
        """Frees pages, for one holder each."""
        if not len(ids):
            return
        ids = np.sort(ids)
        at = slabs, _ = self._at(ids)
        holders = self._holders[at]
        assert holders.all() and (ids[1:] > ids[:-1]).all(), "a page was given back twice"
        assert (holders > self._holds[at]).all(), "a page under a hold has no other holder"
        self._holders[at] -= 1
        slabs = slabs[holders == 1]
        self._out -= np.bincount(slabs, minlength=self.num_slabs)
        self.count(self._by_class(self._page_units[slabs] * UNIT), -1)
        self._page_units[slabs[self._out[slabs] == 0]] = 0

    def page_bytes(self, ids: Int32s) -> Int32s:
        """The sizes of pages that are out."""
        return np.asarray(self._page_units[self.slabs_of(ids)] * UNIT)

    def allocated_ids(self) -> Int32s:
        """The ids of the pages that are out, int32 [out] in rising order."""
        return self._ids(*np.nonzero(self._holders))

    def compact(self, needs: Sequence[int]) -> list[PageMove]:
        """Empties the slabs with the fewest bytes out until `take` can give all of the needs, by size class, which fit.
        The caller copies the bytes of the moved pages and renames them for their holders before it takes any.
        """
        assert self.has_room(needs), f"{needs} pages by size class do not fit, however they lie"
        more = self._missing_slabs(needs)
        wanted = sum(max(0, count) for count in more) - int((self._page_units == 0).sum())
        if wanted <= 0:
            return []
        # If slabs are wanted although all needs fit, some sizes have more slabs than their packed pages and needs take.
        # Each such size can empty its surplus slabs. None of these has a hold, and together they are enough.
        count, found = max(wanted, self.num_slabs // _MOVED_SHARE), []
        for pages, missing in zip(self._classes, more, strict=True):
            # From the end of the arena, where slabs are equally full: pages gather at its start.
            slabs = self._slabs(pages)[::-1]
            slabs = slabs[~self._is_held[slabs]]
            slabs = slabs[np.argsort(self._out[slabs], kind="stable")[: max(0, min(-missing, count))]]
            found += [(int(self._out[slab]) * pages.page_bytes, pages.page_bytes, int(slab)) for slab in slabs]
        chosen = sorted(found)[:count]
        moves = []
        for pages in self._classes:
            if emptied := [slab for _, page_bytes, slab in chosen if page_bytes == pages.page_bytes]:
                moves.append(self._empty(pages, np.array(emptied)))
        return moves

    def slabs_of(self, ids: Int32s) -> Int32s:
        """The slabs of pages, in the shape of the ids."""
        return ids // self._slab_units

    def check(self) -> None:
        """Proves the invariant, and that redundant counts agree."""
        assert np.array_equal(self._out > 0, self._page_units > 0), (
            "a free slab has pages out, or an empty one was kept"
        )
        assert (self._holds <= self._holders).all(), "a page has more holds than holders"
        assert np.array_equal(self._holds.any(1), self._is_held), "a slab has holds and is not known to"
        assert np.array_equal((self._holders > 0).sum(1), self._out), "leak: pages are counted wrongly"
        for pages in self._classes:
            slabs = self._slabs(pages)
            assert not self._holders[slabs, pages.pages_per_slab :].any(), "a page crosses the end of its slab"
            assert self._is_held[slabs].sum() == pages.num_held, "slabs with holds are counted wrongly"
            assert self._out[slabs].sum() == pages.num_out, "pages are counted wrongly"
        super().check()

    def _slabs(self, pages: _SizeClass) -> Int64s:
        """The slabs of a size class."""
        return np.flatnonzero(self._page_units == pages.page_bytes // UNIT)

    def _missing_slabs(self, needs: Sequence[int]) -> list[int]:
        """Slabs that each size class needs beyond those it has; negative if it has too many."""
        return [pages.slabs_for(needs[at]) - self._slabs(pages).size for at, pages in enumerate(self._classes)]

    def _by_class(self, sizes: NDArray[Any]) -> list[int]:
        """Number of pages of each size class among pages of some sizes."""
        return [int((sizes == page_bytes).sum()) for page_bytes in self.page_sizes]

    def _at(self, ids: Int32s) -> tuple[Int32s, Int32s]:
        """The slabs of pages, and their indices in them."""
        slabs = self.slabs_of(ids)
        units = self._page_units[slabs]
        assert units.all(), "a page of a free slab was named"
        index, rest = np.divmod(ids % self._slab_units, units)
        assert not rest.any(), "no page of its slab has this id"
        return slabs, index

    def _count_holds(self, ids: Int32s, by: int) -> None:
        """Adds one hold to each page (by = 1), or removes one (-1)."""
        self._holds[self._at(ids)] += by
        slabs = np.unique(self.slabs_of(ids))
        self._is_held[slabs] = self._holds[slabs].any(1)
        for pages in self._classes:
            pages.num_held = int(self._is_held[self._slabs(pages)].sum())

    def _pop(self, pages: _SizeClass, slabs: Int64s, count: int) -> Int32s:
        """Ids of free pages in slabs of a size in rising order, from the lowest slabs that have some: pages gather
        there, and slabs above become empty.
        """
        slabs = slabs[self._out[slabs] < pages.pages_per_slab]
        num_free = np.cumsum(pages.pages_per_slab - self._out[slabs])
        slabs = slabs[: int(np.searchsorted(num_free, count)) + 1]
        free = self._holders[slabs, : pages.pages_per_slab] == 0
        at, index = np.divmod(np.flatnonzero(free)[:count], pages.pages_per_slab)
        slabs = slabs[at]
        self._holders[slabs, index] = 1
        self._out += np.bincount(slabs, minlength=self.num_slabs)
        return self._ids(slabs, index)

    def _empty(self, pages: _SizeClass, slabs: Int64s) -> PageMove:
        """Moves the pages of some slabs, without holds, into the others of the class."""
        at, index = np.nonzero(self._holders[slabs])
        before = self._ids(slabs[at], index)
        after = self._pop(pages, np.setdiff1d(self._slabs(pages), slabs), len(before))
        self._holders[self._at(after)] = self.holders(before)
        self._holders[slabs], self._out[slabs], self._page_units[slabs] = 0, 0, 0
        return PageMove(pages.page_bytes, before, after)

    def _ids(self, slabs: NDArray[Any], index: NDArray[Any]) -> Int32s:
        """Ids of the pages at some indices in slabs."""
        return np.asarray(slabs * self._slab_units + index * self._page_units[slabs], np.int32)
