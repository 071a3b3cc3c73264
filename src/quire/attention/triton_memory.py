"""GPU memory that the Triton backend keeps from step to step. Its addresses never change, because graphs hold them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.kernels.layout import MAX_PARTIALS
from quire.attention.pages import PageTable
from quire.attention.triton_layers import Layers
from quire.cache.table import ALL_SLOTS


class TableMirror:
    """`ChunkTable.pages`, `sidecars`, `masks`, `positions` and `bases` on the device, at one address.

    pages      int32, a row for each chunk with its pages by lane, on the device; rows of chunks that no plan has named
               yet are undefined
    sidecars   int32 [C], likewise
    masks      int64, as `pages`, with the same bits; None if no path has gaps
    positions  int32, as `pages`; None if no path has gaps, or if pages hold rotated keys
    bases      int32 [C], likewise
    is_whole   bool [C] on the host, likewise: no slot of the chunk is masked, and their positions are consecutive and
               follow from the chunk's index in its path
    copies     number of copies from the host so far
    """

    def __init__(self, table: PageTable) -> None:
        self.copies = 0
        self._table = table
        self._seen = np.zeros(table.capacity, np.int64)
        device = table.arena.device
        self.pages = torch.zeros(table.pages.shape, dtype=torch.int32, device=device)
        self.sidecars = torch.zeros(len(table.sidecars), dtype=torch.int32, device=device)
        self.masks = self.positions = self.bases = None
        if table.has_gaps:
            self.masks = torch.zeros(table.masks.shape, dtype=torch.int64, device=device)
            if table.encodes:
                self.positions, self.bases = torch.zeros_like(self.pages), torch.zeros_like(self.sidecars)
        self.is_whole = np.ones(table.capacity, bool)
        # 64-bit arrays first, for alignment.
        pairs = (
            (self.masks, table.masks),
            (self.pages, table.pages),
            (self.positions, table.positions),
            (self.sidecars, table.sidecars),
            (self.bases, table.bases),
        )
        self._arrays = [(there, here) for there, here in pairs if there is not None and here is not None]

    def refresh(self, chunks: NDArray[np.int32]) -> int:
        """Uploads the rows of `chunks` that changed since their last upload. Returns their number."""
        table = self._table
        ids = chunks[self._seen[chunks] != table.takes[chunks]]
        count = len(ids)
        if count == 0:
            return 0
        self._seen[ids] = table.takes[ids]
        if table.has_gaps:
            is_plain = (table.positions[ids] < 0).reshape(count, -1).all(1) & (table.bases[ids] < 0)
            self.is_whole[ids] = (table.masks[ids] == ALL_SLOTS).reshape(count, -1).all(1) & is_plain
        # The ids as int64, then the rows of each array.
        sizes = [count * here.nbytes // len(here) for _, here in self._arrays]
        host = torch.empty(8 * count + sum(sizes), dtype=torch.uint8, pin_memory=self.pages.device.type == "cuda")
        host[: 8 * count].view(torch.int64).numpy()[:] = ids
        ends = np.cumsum([8 * count, *sizes]).tolist()
        for (_, here), first, end in zip(self._arrays, ends, ends[1:], strict=False):
            host[first:end].numpy()[:] = here[ids].view(np.uint8).reshape(-1)
        sent = host.to(self.pages.device, non_blocking=True)
        self.copies += 1
        # A chunk that sequences share occurs several times, each time with the same row.
        index = sent[: 8 * count].view(torch.int64)
        for (there, _), first, end in zip(self._arrays, ends, ends[1:], strict=False):
            there.index_copy_(0, index, sent[first:end].view(there.dtype).view(count, *there.shape[1:]))
        return count


class Partials:
    """Buffers for the partials of pieces, one slot per query row. Allocated once, because graphs hold the addresses.
    Every layer uses the beginning of each, in its own shape.

    o         f32 [MAX_PARTIALS, H, G, D]
    lse       f32 [MAX_PARTIALS, H, G], base 2
    arrivals  int32 [MAX_PARTIALS, H], zero between launches
    """

    def __init__(self, layers: Layers, device: torch.device) -> None:
        num_kv_heads = max(kind.num_kv_heads for kind in layers.kinds)
        self.o = torch.empty(MAX_PARTIALS * layers.widest, dtype=torch.float32, device=device)
        self.lse = torch.empty(MAX_PARTIALS * layers.most_heads, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(MAX_PARTIALS * num_kv_heads, dtype=torch.int32, device=device)
