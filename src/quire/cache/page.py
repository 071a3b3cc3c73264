"""The page pool: one arena of bytes per tier, cut into pages. It knows sizes and ids, not tokens, heads or codecs'
insides.

A page id counts 128-byte units from the start of the arena, so every page starts on a 128-byte boundary and an int32 id
reaches 256 GiB.
The arena is divided into equal slabs; a slab holds pages of one size and goes back to the common stock when its last
page is given back and another size needs room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

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


class Sized(Protocol):
    """All the pool asks of a codec."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, a multiple of `UNIT`."""
        ...


@dataclass
class _SizeClass:
    """Pages of one size: a stack of free ids and, per slab it owns, how many of its pages are out."""

    page_bytes: int
    pages_per_slab: int
    free: NDArray[np.int32]
    num_free: int = 0
    slabs: set[int] = field(default_factory=set)

    def push(self, ids: NDArray[np.int32]) -> None:
        need = self.num_free + len(ids)
        if need > len(self.free):
            grown = np.empty(max(need, 2 * len(self.free)), np.int32)
            grown[: self.num_free] = self.free[: self.num_free]
            self.free = grown
        self.free[self.num_free : need] = ids
        self.num_free = need

    def pop(self, count: int) -> NDArray[np.int32]:
        self.num_free -= count
        return self.free[self.num_free : self.num_free + count][::-1].copy()


class PagePool:
    """One allocation of bytes, taken and given back in pages. Invariant, proved by `check`: free pages + pages out =
    pages of owned slabs.

    num_bytes   size of the arena; rounded down to whole slabs
    device      where the arena lives
    slab_bytes  bytes of a slab; by default a 64th of the arena, between 256 KiB and 4 MiB
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
            raise ConfigError(f"an arena holds at most 256 GiB, not {num_bytes} bytes; lower cache.memory")
        self.device = torch.device(device)
        self.arena = _allocate(self.num_bytes, self.device)
        self._classes: dict[int, _SizeClass] = {}
        self._free_slabs = list(range(self.num_slabs - 1, -1, -1))
        self._out = np.zeros(self.num_slabs, np.int32)  # pages taken and not given back, per slab

    def take(self, count: int, codec: Sized) -> NDArray[np.int32]:
        """`count` page ids of the codec's size, int32 [count], in no promised order. Raises CacheFullError and takes
        nothing if they do not fit.
        """
        pages = self._size_class(codec.page_bytes)
        while pages.num_free < count:
            if not self._free_slabs and not self._reclaim(pages):
                raise CacheFullError(
                    f"{count} pages of {codec.page_bytes} bytes do not fit: {pages.num_free} of that size are free in"
                    f" {self.num_bytes} bytes"
                )
            self._give_slab(pages, self._free_slabs.pop())
        ids = pages.pop(count)
        np.add.at(self._out, self._slab_of(ids), 1)
        return ids

    def give(self, ids: NDArray[np.int32], codec: Sized) -> None:
        """Takes pages back. The ids must have come from `take` with a codec of the same page size."""
        pages = self._classes[codec.page_bytes]
        np.subtract.at(self._out, self._slab_of(ids), 1)
        assert self._out.min() >= 0, "a page was given back twice"
        pages.push(ids)

    def available(self, codec: Sized) -> int:
        """How many pages of the codec's size `take` can give now."""
        pages = self._size_class(codec.page_bytes)
        idle = sum(
            int((self._out[list(other.slabs)] == 0).sum())
            for other in self._classes.values()
            if other is not pages and other.slabs
        )
        return pages.num_free + (len(self._free_slabs) + idle) * pages.pages_per_slab

    @property
    def bytes_out(self) -> int:
        """Bytes of all pages taken and not given back."""
        return sum((len(c.slabs) * c.pages_per_slab - c.num_free) * c.page_bytes for c in self._classes.values())

    def rows(self, codec: Sized) -> torch.Tensor:
        """The arena as overlapping pages, uint8 [units, page_bytes]: row i is the page with id i, whatever its slab is
        used for.
        """
        return self.arena.as_strided(
            (self.num_bytes // UNIT - codec.page_bytes // UNIT + 1, codec.page_bytes), (UNIT, 1)
        )

    def load(self, ids: NDArray[np.int32], codec: Sized) -> torch.Tensor:
        """A copy of page images, uint8 [n, page_bytes] on the arena's device."""
        return self.rows(codec)[torch.from_numpy(ids.astype(np.int64)).to(self.device)]

    def store(self, ids: NDArray[np.int32], codec: Sized, pages: torch.Tensor) -> None:
        """Overwrites page images; pages is uint8 [n, page_bytes]."""
        # Row by row: an indexed assignment into an overlapping view is refused.
        for page_id, image in zip(ids.tolist(), pages, strict=True):
            self.arena[page_id * UNIT : page_id * UNIT + codec.page_bytes].copy_(image)

    def check(self) -> None:
        """Proves the invariant: slabs are owned once, free ids are distinct and in owned slabs, free + out = owned."""
        owned = [slab for pages in self._classes.values() for slab in pages.slabs]
        assert sorted(owned + self._free_slabs) == list(range(self.num_slabs)), "slabs lost or owned twice"
        for pages in self._classes.values():
            free = pages.free[: pages.num_free]
            assert len(np.unique(free)) == len(free), f"a free page of {pages.page_bytes} bytes is listed twice"
            free_of_slab = np.bincount(self._slab_of(free), minlength=self.num_slabs)
            slabs = sorted(pages.slabs)
            assert set(np.flatnonzero(free_of_slab).tolist()) <= pages.slabs, "a free page lies in a foreign slab"
            total = free_of_slab[slabs] + self._out[slabs]
            assert (total == pages.pages_per_slab).all(), (
                f"leak: {total} != {pages.pages_per_slab} pages of {pages.page_bytes} bytes a slab"
            )
        assert (self._out[self._free_slabs] == 0).all(), "a free slab has pages out"

    def _slab_of(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        return ids.astype(np.int64) * UNIT // self.slab_bytes

    def _size_class(self, page_bytes: int) -> _SizeClass:
        pages = self._classes.get(page_bytes)
        if pages is None:
            if page_bytes % UNIT or page_bytes > self.slab_bytes:
                raise ConfigError(
                    f"a page of {page_bytes} bytes must be a multiple of {UNIT} and fit a slab of {self.slab_bytes};"
                    " raise cache.memory"
                )
            pages = _SizeClass(page_bytes, self.slab_bytes // page_bytes, np.empty(1024, np.int32))
            self._classes[page_bytes] = pages
        return pages

    def _give_slab(self, pages: _SizeClass, slab: int) -> None:
        pages.slabs.add(slab)
        first = slab * self.slab_bytes // UNIT
        step = pages.page_bytes // UNIT
        # Descending, so that pops walk upwards through memory.
        pages.push((first + step * np.arange(pages.pages_per_slab - 1, -1, -1)).astype(np.int32))

    def _reclaim(self, wanted_by: _SizeClass) -> bool:
        """Moves every wholly free slab of the other sizes to the common stock; says whether there was one."""
        found = False
        for pages in self._classes.values():
            if pages is wanted_by or not pages.slabs:
                continue
            idle = [slab for slab in pages.slabs if self._out[slab] == 0]
            if idle:
                found = True
                free = pages.free[: pages.num_free]
                kept = free[~np.isin(self._slab_of(free), idle)]
                pages.free[: len(kept)] = kept
                pages.num_free = len(kept)
                pages.slabs.difference_update(idle)
                self._free_slabs.extend(idle)
        return found


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return huge_pages(num_bytes)
