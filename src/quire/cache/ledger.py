"""Which pages of an arena are whose: sizes, holders and holds. Knows neither bytes nor tokens, heads or codecs.

A page id counts 128-byte units from the start of the arena, so every page starts on a 128-byte boundary and an int32 id
reaches 256 GiB.
The arena is divided into equal slabs; a slab holds pages of one size and goes back to the common stock when its last
page is given back.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.errors import CacheFullError, ConfigError

PAGE_TOKENS = 64
"""Token slots of a page: ChunkAttention's chunk, and 98 % of copy bandwidth on an H200 against 86 % at 16."""

UNIT = 128
"""Bytes a page id counts by; every page size is a multiple of it."""

MAX_ARENA_BYTES = np.iinfo(np.int32).max * UNIT
"""What page ids reach: 256 GiB."""

_MOVED_SHARE = 256
"""Where slabs must be emptied, one of so many is, if that is more than are wanted: the taker of the pages has to look
for them in all it holds, which costs as much as moving about that share of the arena."""


class Move(NamedTuple):
    """Pages of one size that are to lie elsewhere: their ids before and after, int32 [n] each."""

    page_bytes: int
    before: NDArray[np.int32]
    after: NDArray[np.int32]


class Demand(tuple[int, ...]):
    """How many pages are wanted of each size class of a ledger, in its order, and last how many rows of a chunk table.
    Negative numbers are what would be given back before.
    """

    __slots__ = ()

    def __add__(self, other: tuple[int, ...]) -> Demand:  # type: ignore[override]
        return Demand([a + b for a, b in zip(self, other, strict=True)])

    def __sub__(self, other: tuple[int, ...]) -> Demand:
        return Demand([a - b for a, b in zip(self, other, strict=True)])

    def __mul__(self, count: int) -> Demand:  # type: ignore[override]
        return Demand([each * count for each in self])


@dataclass(slots=True)
class _SizeClass:
    """Pages of one size.

    num_slabs  slabs that hold some of them, where pages have places
    num_held   slabs with a page under a hold
    open       slabs with a free page, in rising order
    """

    page_bytes: int
    pages_per_slab: int
    num_out: int = 0
    num_held: int = 0
    num_slabs: int = 0
    open: list[int] = field(default_factory=list)

    @property
    def num_free(self) -> int:
        return self.num_slabs * self.pages_per_slab - self.num_out

    def slabs_for(self, need: int) -> int:
        """Slabs that have its pages out and so many more, packed as densely as holds allow."""
        return max(self.num_held, -(-(self.num_out + need) // self.pages_per_slab))


class PageCounts:
    """How many pages of each size are out of an arena, and how many more would fit: all that decisions need, and all
    that a simulator has. Pages lie as densely as they can.

    num_bytes   size of the arena; rounded down to whole slabs
    slab_bytes  bytes of a slab; by default a 64th of the arena, between 256 KiB and 4 MiB
    bytes_out   of all pages that are not free
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
        """The sizes pages have had so far: the size classes, in the order of a `Demand`."""
        return list(self._classes)

    def size_class(self, page_bytes: int) -> int:
        """The place of a size in that order; a new one comes last. Raises ConfigError for a size that cannot be."""
        self._size_class(page_bytes)
        return self.page_sizes.index(page_bytes)

    def out(self, page_bytes: int) -> int:
        """Pages of a size taken and not given back."""
        return self._size_class(page_bytes).num_out

    def has_room(self, needs: Sequence[int]) -> bool:
        """Whether so many pages more of each size class fit if pages lie as densely as they can; what else stands in
        `needs` does not count.
        """
        assert len(needs) >= len(self._classes), "needs of other size classes"
        left = self.num_slabs
        for pages, need in zip(self._classes.values(), needs, strict=False):
            left -= pages.slabs_for(need)
        return left >= 0

    def count(self, needs: Sequence[int], by: int) -> None:
        """So many pages of each class are out now (by = 1), or back again (-1)."""
        for pages, need in zip(self._classes.values(), needs, strict=False):
            pages.num_out += by * need
            self.bytes_out += by * need * pages.page_bytes
            assert pages.num_out >= 0, f"more pages of {pages.page_bytes} bytes were given back than taken"

    def check(self) -> None:
        """Proves that what is out fits."""
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
    """The pages of one arena, taken and given back. Invariant, proved by `check`: of every slab of a size, free pages +
    pages out = all its pages, and some are out.

    A page may have several holders: it is free when the last of them has given it back, and counts once. A hold is a
    holder that copies the page's bytes elsewhere: until it is released the page neither moves nor becomes free.

    Raises ConfigError for more bytes than ids reach.
    """

    def __init__(self, num_bytes: int, slab_bytes: int | None = None) -> None:
        super().__init__(num_bytes, slab_bytes)
        if self.num_bytes > MAX_ARENA_BYTES:
            raise ConfigError(f"a cache holds at most 256 GiB, not {num_bytes} bytes; lower cache.memory")
        self._free_slabs = list(range(self.num_slabs))  # a heap
        self._page_bytes = np.zeros(self.num_slabs, np.int32)  # of the slab's pages, 0 in the common stock
        self._out = np.zeros(self.num_slabs, np.int32)  # pages taken and not given back
        self._held = np.zeros(self.num_slabs, np.int32)  # pages under a hold
        self._is_free = np.zeros((self.num_slabs, 0), bool)  # by slab, and page in the slab
        self._more = np.zeros((self.num_slabs, 0), np.uint16)  # holders of a page besides the first
        self._holds = np.zeros((self.num_slabs, 0), np.uint16)  # how many of them are holds

    def take(self, count: int, page_bytes: int) -> NDArray[np.int32]:
        """`count` page ids of a size, int32 [count], in rising order. Raises CacheFullError and takes nothing if they
        do not fit the free pages of that size and the free slabs.
        """
        pages = self._size_class(page_bytes)
        missing = count - pages.num_free
        if missing > 0:
            num_slabs = -(-missing // pages.pages_per_slab)
            if num_slabs > len(self._free_slabs):
                raise CacheFullError(
                    f"{count} pages of {page_bytes} bytes do not fit: {self.available(page_bytes)} of that size are"
                    f" free in {self.num_bytes} bytes (cache.memory)"
                )
            self._add_slabs(pages, num_slabs)
        return self._pop(pages, count)

    def share(self, ids: NDArray[np.int32], page_bytes: int) -> None:
        """Each page, named once, has one holder more, who will give it back too."""
        slabs, places = self._places(ids, page_bytes)
        assert not self._is_free[slabs, places].any(), "a free page cannot be shared"
        self._more[slabs, places] += 1

    def holders(self, ids: NDArray[np.int32], page_bytes: int) -> NDArray[np.int64]:
        """How many hold each page of a slab in use; none a free one."""
        slabs, places = self._places(ids, page_bytes)
        return np.where(self._is_free[slabs, places], 0, self._more[slabs, places].astype(np.int64) + 1)

    def hold(self, ids: NDArray[np.int32], page_bytes: int) -> None:
        """Each page, named once, stays where it is until `release`: its bytes are under way."""
        self.share(ids, page_bytes)
        slabs, places = self._places(ids, page_bytes)
        new = slabs[self._holds[slabs, places] == 0]
        self._holds[slabs, places] += 1
        self._count_held(page_bytes, new, 1)

    def release(self, ids: NDArray[np.int32], page_bytes: int) -> None:
        """Ends one hold of each page; those that nobody else holds are free."""
        slabs, places = self._places(ids, page_bytes)
        assert (self._holds[slabs, places] > 0).all(), "a page is released that nobody holds"
        self._holds[slabs, places] -= 1
        self._count_held(page_bytes, slabs[self._holds[slabs, places] == 0], -1)
        self.give(ids, page_bytes)

    def holds(self, ids: NDArray[np.int32], page_bytes: int) -> NDArray[np.int64]:
        """How many of the holders of each page are holds."""
        return np.asarray(self._holds[self._places(ids, page_bytes)], np.int64)

    def give(self, ids: NDArray[np.int32], page_bytes: int) -> None:
        """Takes back pages that came from `take` with the same size, from one holder each."""
        if not len(ids):
            return
        pages = self._classes[page_bytes]
        ids = np.sort(ids)
        slabs, places = self._places(ids, page_bytes)
        assert not self._is_free[slabs, places].any() and (ids[1:] > ids[:-1]).all(), "a page was given back twice"
        more = self._more[slabs, places]
        assert (more >= self._holds[slabs, places]).all(), "a page under a hold has no other holder"
        if more.any():
            stays = more > 0
            self._more[slabs[stays], places[stays]] -= 1
            ids, slabs, places = ids[~stays], slabs[~stays], places[~stays]
        self._is_free[slabs, places] = True
        starts = np.flatnonzero(np.diff(slabs, prepend=-1))
        touched, counts = slabs[starts], np.diff(starts, append=len(ids)).astype(np.int32)
        self._out[touched] -= counts
        pages.num_out -= len(ids)
        self.bytes_out -= len(ids) * page_bytes
        for slab, count, out in zip(touched.tolist(), counts.tolist(), self._out[touched].tolist(), strict=True):
            was_full = out + count == pages.pages_per_slab
            if out == 0:
                if not was_full:
                    del pages.open[bisect_left(pages.open, slab)]
                self._drop_slab(pages, slab)
            elif was_full:
                insort(pages.open, slab)

    def available(self, page_bytes: int) -> int:
        """How many pages of a size `take` can give now, none moved."""
        pages = self._size_class(page_bytes)
        return pages.num_free + len(self._free_slabs) * pages.pages_per_slab

    def ids_out(self, page_bytes: int) -> NDArray[np.int32]:
        """The ids of these pages, int32 [out] in rising order."""
        return self._ids_out(page_bytes, np.flatnonzero(self._page_bytes == page_bytes))

    def make_room(self, needs: Sequence[int]) -> list[Move]:
        """Empties sparsely used slabs, which become free, until `take` can give all of the needs, by size class, which
        fit. The bytes of the pages that moved have to follow before anything is taken, and so has who holds them.
        """
        assert self.has_room(needs), f"{needs} pages by size class do not fit, however they lie"
        more = {
            page_bytes: pages.slabs_for(need) - pages.num_slabs
            for (page_bytes, pages), need in zip(self._classes.items(), needs, strict=False)
        }
        wanted = sum(max(0, count) for count in more.values()) - len(self._free_slabs)
        if wanted <= 0:
            return []
        # If slabs are wanted and yet all fits, some sizes have more slabs than their pages and needs take when packed.
        # So many of each, none with a hold, can be emptied into its others, and together they are enough.
        spare = {page_bytes: -count for page_bytes, count in more.items() if count < 0}
        emptied = self._sparsest(spare, max(wanted, self.num_slabs // _MOVED_SHARE))
        return [self._empty(self._classes[page_bytes], np.array(slabs)) for page_bytes, slabs in emptied.items()]

    def slabs_of(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The slabs that pages lie in, in the shape of the ids."""
        return ids // np.int32(self.slab_bytes // UNIT)

    def check(self) -> None:
        """Proves the invariant, and that what is counted twice agrees."""
        free = sorted(self._free_slabs)
        assert np.flatnonzero(self._page_bytes == 0).tolist() == free, "a slab is lost, or free and in use"
        assert (self._out[free] == 0).all(), "a free slab has pages out"
        for page_bytes, pages in self._classes.items():
            slabs = np.flatnonzero(self._page_bytes == page_bytes)
            is_free, out = self._is_free[slabs], self._out[slabs]
            assert not is_free[:, pages.pages_per_slab :].any(), "a free page crosses the end of its slab"
            assert not self._more[slabs][is_free].any(), "a free page has holders"
            holds = self._holds[slabs]
            assert (holds <= self._more[slabs] + ~is_free).all(), "a page has more holds than holders"
            assert np.array_equal((holds > 0).sum(1), self._held[slabs]), "held pages are counted wrongly"
            assert (self._held[slabs] > 0).sum() == pages.num_held, "slabs with holds are counted wrongly"
            total = is_free.sum(1) + out
            assert (total == pages.pages_per_slab).all(), (
                f"leak: {total} != {pages.pages_per_slab} pages of {page_bytes} bytes a slab"
            )
            assert (out > 0).all(), f"an empty slab was kept for pages of {page_bytes} bytes"
            assert slabs[is_free.any(1)].tolist() == pages.open, "slabs with free pages are not those listed"
            assert (len(slabs), out.sum()) == (pages.num_slabs, pages.num_out), "pages or slabs are counted wrongly"
        super().check()

    def _places(self, ids: NDArray[np.int32], page_bytes: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The slabs of pages of a size, and where they lie in them."""
        slabs = self.slabs_of(ids)
        assert (self._page_bytes[slabs] == page_bytes).all(), f"a page of another size was named as one of {page_bytes}"
        return slabs, (ids - slabs * np.int32(self.slab_bytes // UNIT)) // np.int32(page_bytes // UNIT)

    def _size_class(self, page_bytes: int) -> _SizeClass:
        pages = super()._size_class(page_bytes)
        wider = pages.pages_per_slab - self._is_free.shape[1]
        if wider > 0:
            self._is_free, self._more, self._holds = (
                np.pad(each, ((0, 0), (0, wider))) for each in (self._is_free, self._more, self._holds)
            )
        return pages

    def _count_held(self, page_bytes: int, slabs: NDArray[np.int32], by: int) -> None:
        """One held page more or less in each of the slabs, which may be named several times."""
        before = np.count_nonzero(self._held)
        np.add.at(self._held, slabs, by)
        self._size_class(page_bytes).num_held += int(np.count_nonzero(self._held) - before)

    def _add_slabs(self, pages: _SizeClass, count: int) -> None:
        slabs = [heapq.heappop(self._free_slabs) for _ in range(count)]
        self._page_bytes[slabs] = pages.page_bytes
        self._is_free[slabs] = np.arange(self._is_free.shape[1]) < pages.pages_per_slab
        pages.num_slabs += count
        pages.open.extend(slabs)
        pages.open.sort()

    def _drop_slab(self, pages: _SizeClass, slab: int) -> None:
        pages.num_slabs -= 1
        self._page_bytes[slab] = 0
        heapq.heappush(self._free_slabs, slab)

    def _pop(self, pages: _SizeClass, count: int) -> NDArray[np.int32]:
        """Ids of free pages from the lowest slabs that have some: so pages gather there, and slabs above empty."""
        slabs = np.array(pages.open[:count], np.int32)
        # Each has a free page, so no more of them than pages; usually far fewer.
        found = np.cumsum(pages.pages_per_slab - self._out[slabs])
        slabs = slabs[: int(np.searchsorted(found, count)) + 1]
        at, places = np.divmod(np.flatnonzero(self._is_free[slabs])[:count], self._is_free.shape[1])
        self._is_free[slabs[at], places] = False
        self._out[slabs] += np.bincount(at, minlength=len(slabs)).astype(np.int32)
        # All but the last are full now.
        full = len(slabs) if len(slabs) and self._out[slabs[-1]] == pages.pages_per_slab else len(slabs) - 1
        del pages.open[: max(0, full)]
        pages.num_out += count
        self.bytes_out += count * pages.page_bytes
        return self._ids(slabs[at], places, pages.page_bytes)

    def _sparsest(self, spare: Mapping[int, int], count: int) -> dict[int, list[int]]:
        """The `count` slabs with the fewest bytes out, by page size; of each size at most as many as it can spare."""
        found = []
        for page_bytes, most in spare.items():
            # From the end of the arena, where slabs are equally full: pages gather at its start.
            slabs = np.flatnonzero((self._page_bytes == page_bytes) & (self._held == 0))[::-1]
            slabs = slabs[np.argsort(self._out[slabs], kind="stable")[: min(most, count)]]
            found += [(out * page_bytes, page_bytes, slab) for slab, out in zip(slabs, self._out[slabs], strict=True)]
        chosen: dict[int, list[int]] = {}
        for _, page_bytes, slab in sorted(found)[:count]:
            chosen.setdefault(page_bytes, []).append(int(slab))
        return chosen

    def _empty(self, pages: _SizeClass, slabs: NDArray[np.int64]) -> Move:
        """Lets what lies in some slabs, without holds, lie in the others of the class."""
        page_bytes = pages.page_bytes
        before = self._ids_out(page_bytes, slabs)
        # Off the list while the others are filled, and on it again to be found empty.
        emptied = set(slabs.tolist()).intersection(pages.open)  # the others are full
        pages.open = [slab for slab in pages.open if slab not in emptied]
        after = self._pop(pages, len(before))
        pages.open = sorted([*pages.open, *emptied])
        self._more[self._places(after, page_bytes)] = self._more[self._places(before, page_bytes)]
        self._more[self._places(before, page_bytes)] = 0
        self.give(before, page_bytes)
        return Move(page_bytes, before, after)

    def _ids_out(self, page_bytes: int, slabs: NDArray[np.int64]) -> NDArray[np.int32]:
        at, places = np.nonzero(~self._is_free[slabs, : self.slab_bytes // page_bytes])
        return self._ids(slabs[at], places, page_bytes)

    def _ids(self, slabs: NDArray[Any], places: NDArray[Any], page_bytes: int) -> NDArray[np.int32]:
        """Ids of the pages at some places in slabs."""
        return np.asarray(slabs * (self.slab_bytes // UNIT) + places * (page_bytes // UNIT), np.int32)
