"""What the Triton backend keeps in GPU memory from step to step, at addresses that never change: graphs hold them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.kernels.layout import MAX_PARTIALS
from quire.attention.plan import AttentionSpec
from quire.cache.segment import ALL_SLOTS, ChunkTable


class TableMirror:
    """`ChunkTable.pages`, `sidecars` and `masks` on the device, at one address.

    pages     int32 [C, L, H] on the device; rows of chunks that no plan has named yet are undefined
    sidecars  int32 [C] likewise
    masks     int64 [C, L, H] likewise, of the same bits; None where the table has none
    is_whole  bool [C] on the host, likewise: a row holds all pages, and every slot is seen
    copies    from the host so far
    """

    def __init__(self, table: ChunkTable) -> None:
        self.copies = 0
        self._table = table
        self._seen = np.zeros(table.capacity, np.int64)
        self.pages = torch.zeros(table.pages.shape, dtype=torch.int32, device=table.pool.device)
        self.sidecars = torch.zeros(len(table.sidecars), dtype=torch.int32, device=table.pool.device)
        self.masks: Tensor | None = None
        if table.masks is not None:
            self.masks = torch.zeros(table.masks.shape, dtype=torch.int64, device=table.pool.device)
        self.is_whole = np.ones(table.capacity, bool)

    def refresh(self, chunks: NDArray[np.int32]) -> int:
        """Uploads the rows of those chunks that changed since they were last uploaded; returns how many."""
        ids = chunks[self._seen[chunks] != self._table.takes[chunks]]
        count = len(ids)
        if count == 0:
            return 0
        self._seen[ids] = self._table.takes[ids]
        row_ints = self._table.pages_per_chunk
        # Of each row its id, int64, its sidecar, its pages, and its masks, int64, if there are any: long ones first.
        longs = count * (1 if self.masks is None else 1 + row_ints)
        host = torch.empty(
            2 * longs + count * (1 + row_ints), dtype=torch.int32, pin_memory=self.pages.device.type == "cuda"
        )
        numbers = host[: 2 * longs].view(torch.int64).numpy()
        numbers[:count] = ids
        if self._table.masks is not None:
            masks = self._table.masks[ids].reshape(count, row_ints)
            numbers[count:] = masks.view(np.int64).reshape(-1)
            self.is_whole[ids] = (masks == ALL_SLOTS).all(1)
        host[2 * longs : 2 * longs + count].numpy()[:] = self._table.sidecars[ids]
        host[2 * longs + count :].numpy()[:] = self._table.pages[ids].reshape(-1)
        sent = host.to(self.pages.device, non_blocking=True)
        self.copies += 1
        # A chunk that several sequences share is named several times, with the same row.
        index = sent[: 2 * count].view(torch.int64)
        self.sidecars.index_copy_(0, index, sent[2 * longs : 2 * longs + count])
        self.pages.view(-1, row_ints).index_copy_(0, index, sent[2 * longs + count :].view(count, row_ints))
        if self.masks is not None:
            found = sent[2 * count : 2 * longs].view(torch.int64).view(count, row_ints)
            self.masks.view(-1, row_ints).index_copy_(0, index, found)
        return count


class Partials:
    """Where pieces leave their partials, one slot a query row; allocated once, because graphs hold the addresses.

    o         f32 [MAX_PARTIALS, H, G, D]
    lse       f32 [MAX_PARTIALS, H, G], base 2
    arrivals  int32 [MAX_PARTIALS, H], zero between launches
    """

    def __init__(self, spec: AttentionSpec) -> None:
        heads, device = (MAX_PARTIALS, spec.num_kv_heads), spec.table.pool.device
        self.o = torch.empty(*heads, spec.group_size, spec.head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(*heads, spec.group_size, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(heads, dtype=torch.int32, device=device)
