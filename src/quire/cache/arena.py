"""The bytes of an arena: page images by id. Knows neither a page's holders nor its meaning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from quire.cache.arrays import Bytes, Int32s, Int64s
from quire.cache.ledger import UNIT
from quire.kernels.memory import memory_on


class Arena:
    """One allocation of bytes.

    num_bytes   a multiple of 128
    data        uint8 [num_bytes], on the device
    copy_bytes  size of the buffer for moving pages
    """

    copy_bytes = 16 << 20

    def __init__(self, num_bytes: int, device: str | torch.device = "cpu") -> None:
        self.num_bytes = num_bytes
        self.device = torch.device(device)
        self.data = memory_on(self.device, num_bytes)

    def rows(self, page_bytes: int) -> torch.Tensor:
        """The arena as overlapping pages, uint8 [units, page_bytes]. Row i is the page with id i, whatever its slab's
        page size.
        """
        return self.data.as_strided(((self.num_bytes - page_bytes) // UNIT + 1, page_bytes), (UNIT, 1))

    @contextlib.contextmanager
    def held(self, ids: Int32s, sizes: Int64s | int, *, changes: bool) -> Iterator[None]:
        """A context in which pages may be read in `data`, and with `changes` also written. This arena needs no
        preparation.

        ids    int32 [n]
        sizes  bytes of each
        """
        yield

    def load(self, ids: Int32s, page_bytes: int) -> torch.Tensor:
        """A copy of page images, uint8 [n, page_bytes] on the arena's device."""
        if self.device.type == "cpu":
            return torch.from_numpy(self.images(ids, page_bytes))
        return self.rows(page_bytes).index_select(0, self._index(ids))

    def images(self, ids: Int32s, page_bytes: int) -> Bytes:
        """A copy of page images in memory, uint8 [n, page_bytes]."""
        if self.device.type == "cpu":
            # numpy and not torch: torch starts a pool of threads in every thread that copies.
            found: Bytes = self._pages(page_bytes)[ids]
            return found
        return np.asarray(self.load(ids, page_bytes).cpu())

    def store(self, ids: Int32s, page_bytes: int, images: torch.Tensor | Bytes) -> None:
        """Overwrites page images with uint8 [n, page_bytes]."""
        assert images.shape == (len(ids), page_bytes), f"{tuple(images.shape)} for {len(ids)} pages of {page_bytes}"
        if self.device.type == "cpu":
            self._pages(page_bytes)[ids] = images
            return
        # torch copies rows element by element. With elements of eight bytes this takes a fifth of the time.
        given = torch.as_tensor(images).to(self.device).contiguous().view(torch.int64)
        self.rows(page_bytes).view(torch.int64).index_copy_(0, self._index(ids), given)

    def read(self, start: int, num_bytes: int) -> Bytes:
        """Bytes from an offset on; on a CPU a view."""
        return np.asarray(self.data[start : start + num_bytes].cpu())

    def write(self, start: int, given: Bytes) -> None:
        """Overwrites bytes from an offset on."""
        self.data[start : start + len(given)] = torch.tensor(given, device=self.device)

    def copy(self, before: Int32s, after: Int32s, page_bytes: int) -> None:
        """Copies pages to other ids. No target may be a source."""
        step = max(1, self.copy_bytes // page_bytes)
        for first in range(0, len(before), step):
            part = slice(first, first + step)
            self.store(after[part], page_bytes, self.load(before[part], page_bytes))

    def _pages(self, page_bytes: int) -> Bytes:
        """The same pages as `rows`, as a numpy array, of an arena on a CPU."""
        data = self.data.numpy()
        return np.ndarray(((len(data) - page_bytes) // UNIT + 1, page_bytes), np.uint8, data, 0, (UNIT, 1))

    def _index(self, ids: Int32s) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)
