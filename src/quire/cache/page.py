"""The page pool: one arena of bytes per tier, cut into pages. It knows sizes and ids, not tokens, heads or codecs.

A page id counts 128-byte units from the start of the arena, so every page starts on a 128-byte boundary and an int32 id
reaches 256 GiB.
The arena is divided into equal slabs; a slab holds pages of one size and goes back to the common stock when its last
page is given back.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.errors import CacheFullError, ConfigError
from quire.kernels.memory import huge_pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE_TOKENS = 64
"""Token slots of a page: ChunkAttention's chunk, and 98 % of copy bandwidth on an H200 against 86 % at 16."""

UNIT = 128
"""Bytes a page id counts by; every page size is a multiple of it."""

MAX_ARENA_BYTES = np.iinfo(np.int32).max * UNIT
"""What page ids reach: 256 GiB."""

_MOVED_SHARE = 256
"""Where slabs must be emptied, one of so many is, if that is more than are wanted: the taker of the pages has to look
for them in all it holds, which costs as much as moving about that share of the arena."""

_COPY_BYTES = 16 << 20
"""Bytes that moving pages holds beside the arena."""


@dataclass
class _SizeClass:
    """Pages of one size.

    open  slabs of the class with a free page, in rising order
    """

    page_bytes: int
    pages_per_slab: int
    num_slabs: int = 0
    num_out: int = 0
    open: list[int] = field(default_factory=list)

    @property
    def num_free(self) -> int:
        return self.num_slabs * self.pages_per_slab - self.num_out

    def slabs_for(self, need: int) -> int:
        """Slabs that hold its pages out and so many more, packed as densely as can be."""
        return -(-(self.num_out + need) // self.pages_per_slab)


class PagePool:
    """One allocation of bytes, taken and given back in pages. Invariant, proved by `check`: of every slab of a size,
    free pages + pages out = all its pages, and some are out.

    A page may have several holders: it is free when the last of them has given it back, and counts once.

    num_bytes   size of the arena; rounded down to whole slabs
    device      where the arena lives
    slab_bytes  bytes of a slab; by default a 64th of the arena, between 256 KiB and 4 MiB
    bytes_out   of all pages that are not free
    Raises ConfigError if not even one slab fits.
    """

    def __init__(self, num_bytes: int, device: str | torch.device = "cpu", slab_bytes: int | None = None) -> None:
        if slab_bytes is None:
            slab_bytes = min(max(num_bytes // 64, 256 << 10), 4 << 20, num_bytes)
        self.slab_bytes = slab_bytes // UNIT * UNIT
        self.num_slabs = num_bytes // self.slab_bytes if self.slab_bytes else 0
        if self.num_slabs < 1:
            raise ConfigError(f"a cache of {num_bytes} bytes holds no slab of {slab_bytes} bytes; raise cache.memory")
        self.num_bytes = self.num_slabs * self.slab_bytes
        if self.num_bytes > MAX_ARENA_BYTES:
            raise ConfigError(f"a cache holds at most 256 GiB, not {num_bytes} bytes; lower cache.memory")
        self.device = torch.device(device)
        self.arena = _allocate(self.num_bytes, self.device)
        self.bytes_out = 0
        self._classes: dict[int, _SizeClass] = {}
        self._free_slabs = list(range(self.num_slabs))  # a heap
        self._page_bytes = np.zeros(self.num_slabs, np.int32)  # of the slab's pages, 0 in the common stock
        self._out = np.zeros(self.num_slabs, np.int32)  # pages taken and not given back
        self._is_free = np.zeros((self.num_slabs, 0), bool)  # by slab, and page in the slab
        self._more = np.zeros((self.num_slabs, 0), np.uint16)  # holders of a page besides the first

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

    def give(self, ids: NDArray[np.int32], page_bytes: int) -> None:
        """Takes back pages that came from `take` with the same size, from one holder each."""
        if not len(ids):
            return
        pages = self._classes[page_bytes]
        ids = np.sort(ids)
        slabs, places = self._places(ids, page_bytes)
        assert not self._is_free[slabs, places].any() and (ids[1:] > ids[:-1]).all(), "a page was given back twice"
        is_held = self._more[slabs, places] > 0
        if is_held.any():
            self._more[slabs[is_held], places[is_held]] -= 1
            ids, slabs, places = ids[~is_held], slabs[~is_held], places[~is_held]
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

    def out(self, page_bytes: int) -> int:
        """Pages of a size taken and not given back."""
        return self._size_class(page_bytes).num_out

    def ids_out(self, page_bytes: int) -> NDArray[np.int32]:
        """The ids of these pages, int32 [out] in rising order."""
        return self._ids_out(page_bytes, np.flatnonzero(self._page_bytes == page_bytes))

    @property
    def page_sizes(self) -> list[int]:
        """The sizes pages have had so far."""
        return list(self._classes)

    def fits(self, needs: Mapping[int, int]) -> bool:
        """Whether so many pages more of each size, by bytes of a page, fit if pages lie as densely as they can: what
        `take` can give after `make_room`.
        """
        for page_bytes in needs:
            self._size_class(page_bytes)
        num_slabs = sum(pages.slabs_for(needs.get(page_bytes, 0)) for page_bytes, pages in self._classes.items())
        return num_slabs <= self.num_slabs

    def make_room(self, needs: Mapping[int, int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Moves pages out of sparsely used slabs, which become free, until `take` can give all of the needs, which fit.

        returns  ids of the moved pages before and after, int32 [n] each; who holds them has to follow
        """
        assert self.fits(needs), f"{needs} pages by size do not fit, however they lie"
        more = {
            page_bytes: pages.slabs_for(needs.get(page_bytes, 0)) - pages.num_slabs
            for page_bytes, pages in self._classes.items()
        }
        wanted = sum(max(0, count) for count in more.values()) - len(self._free_slabs)
        moved = [(np.empty(0, np.int32), np.empty(0, np.int32))]
        if wanted > 0:
            # If slabs are wanted and yet all fits, some sizes have more slabs than their pages and needs take when
            # packed. So many of each can be emptied into its others, and together they are enough.
            spare = {page_bytes: -count for page_bytes, count in more.items() if count < 0}
            emptied = self._sparsest(spare, max(wanted, self.num_slabs // _MOVED_SHARE))
            moved += [self._empty(self._classes[page_bytes], np.array(slabs)) for page_bytes, slabs in emptied.items()]
        return np.concatenate([before for before, _ in moved]), np.concatenate([after for _, after in moved])

    def slabs_of(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The slabs that pages lie in, in the shape of the ids."""
        return ids // np.int32(self.slab_bytes // UNIT)

    def rows(self, page_bytes: int) -> torch.Tensor:
        """The arena as overlapping pages, uint8 [units, page_bytes]: row i is the page with id i, whatever its slab is
        used for.
        """
        return self.arena.as_strided((self._num_rows(page_bytes), page_bytes), (UNIT, 1))

    def load(self, ids: NDArray[np.int32], page_bytes: int) -> torch.Tensor:
        """A copy of page images, uint8 [n, page_bytes] on the arena's device."""
        return self.rows(page_bytes).index_select(0, self._index(ids))

    def store(self, ids: NDArray[np.int32], page_bytes: int, pages: torch.Tensor) -> None:
        """Overwrites page images; pages is uint8 [n, page_bytes]."""
        assert pages.shape == (len(ids), page_bytes), f"{tuple(pages.shape)} for {len(ids)} pages of {page_bytes} bytes"
        # torch copies rows element by element: eight bytes at once take a fifth of the time.
        words = self.arena.view(torch.int64).as_strided((self._num_rows(page_bytes), page_bytes // 8), (UNIT // 8, 1))
        words.index_copy_(0, self._index(ids), pages.to(self.device).contiguous().view(torch.int64))

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
            total = is_free.sum(1) + out
            assert (total == pages.pages_per_slab).all(), (
                f"leak: {total} != {pages.pages_per_slab} pages of {page_bytes} bytes a slab"
            )
            assert (out > 0).all(), f"an empty slab was kept for pages of {page_bytes} bytes"
            assert slabs[is_free.any(1)].tolist() == pages.open, "slabs with free pages are not those listed"
            assert (len(slabs), out.sum()) == (pages.num_slabs, pages.num_out), "pages or slabs are counted wrongly"
        bytes_out = sum(pages.num_out * page_bytes for page_bytes, pages in self._classes.items())
        assert bytes_out == self.bytes_out, f"{bytes_out} != {self.bytes_out} bytes out"

    def _places(self, ids: NDArray[np.int32], page_bytes: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The slabs of pages of a size, and where they lie in them."""
        slabs = self.slabs_of(ids)
        assert (self._page_bytes[slabs] == page_bytes).all(), f"a page of another size was named as one of {page_bytes}"
        return slabs, (ids - slabs * np.int32(self.slab_bytes // UNIT)) // np.int32(page_bytes // UNIT)

    def _size_class(self, page_bytes: int) -> _SizeClass:
        pages = self._classes.get(page_bytes)
        if pages is None:
            if page_bytes < UNIT or page_bytes % UNIT or page_bytes > self.slab_bytes:
                raise ConfigError(
                    f"a page of {page_bytes} bytes must be a multiple of {UNIT} and fit a slab of {self.slab_bytes};"
                    " raise cache.memory"
                )
            pages = self._classes[page_bytes] = _SizeClass(page_bytes, self.slab_bytes // page_bytes)
            wider = pages.pages_per_slab - self._is_free.shape[1]
            if wider > 0:
                self._is_free = np.pad(self._is_free, ((0, 0), (0, wider)))
                self._more = np.pad(self._more, ((0, 0), (0, wider)))
        return pages

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
            slabs = np.flatnonzero(self._page_bytes == page_bytes)[::-1]
            slabs = slabs[np.argsort(self._out[slabs], kind="stable")[: min(most, count)]]
            found += [(out * page_bytes, page_bytes, slab) for slab, out in zip(slabs, self._out[slabs], strict=True)]
        chosen: dict[int, list[int]] = {}
        for _, page_bytes, slab in sorted(found)[:count]:
            chosen.setdefault(page_bytes, []).append(int(slab))
        return chosen

    def _empty(self, pages: _SizeClass, slabs: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Moves what lies in some slabs into the others of the class: ids before and after."""
        page_bytes = pages.page_bytes
        before = self._ids_out(page_bytes, slabs)
        # Off the list while the others are filled, and on it again to be found empty.
        pages.open = sorted(set(pages.open).difference(slabs.tolist()))
        after = self._pop(pages, len(before))
        pages.open = sorted([*pages.open, *slabs.tolist()])
        step = max(1, _COPY_BYTES // page_bytes)
        for first in range(0, len(before), step):
            part = slice(first, first + step)
            self.store(after[part], page_bytes, self.load(before[part], page_bytes))
        self._more[self._places(after, page_bytes)] = self._more[self._places(before, page_bytes)]
        self._more[self._places(before, page_bytes)] = 0
        self.give(before, page_bytes)
        return before, after

    def _ids_out(self, page_bytes: int, slabs: NDArray[np.int64]) -> NDArray[np.int32]:
        at, places = np.nonzero(~self._is_free[slabs, : self.slab_bytes // page_bytes])
        return self._ids(slabs[at], places, page_bytes)

    def _ids(self, slabs: NDArray[Any], places: NDArray[Any], page_bytes: int) -> NDArray[np.int32]:
        """Ids of the pages at some places in slabs."""
        return np.asarray(slabs * (self.slab_bytes // UNIT) + places * (page_bytes // UNIT), np.int32)

    def _num_rows(self, page_bytes: int) -> int:
        return (self.num_bytes - page_bytes) // UNIT + 1

    def _index(self, ids: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return huge_pages(num_bytes)
