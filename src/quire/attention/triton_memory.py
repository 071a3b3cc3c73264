"""What the Triton backend keeps in GPU memory from step to step, at addresses that never change: graphs hold them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from quire.attention.kernels.layout import MAX_PARTIALS
from quire.attention.plan import AttentionSpec
from quire.cache.segment import ChunkTable


class TableMirror:
    """`ChunkTable.pages` and `sidecars` on the device, at one address.

    pages     int32 [C, L, H] on the device; rows of chunks that no plan has named yet are undefined
    sidecars  int32 [C] likewise
    copies    from the host so far
    """

    def __init__(self, table: ChunkTable) -> None:
        self.copies = 0
        self._table = table
        self._seen = np.zeros(table.capacity, np.int64)
        self.pages = torch.zeros(table.pages.shape, dtype=torch.int32, device=table.pool.device)
        self.sidecars = torch.zeros(len(table.sidecars), dtype=torch.int32, device=table.pool.device)

    def refresh(self, chunks: NDArray[np.int32]) -> int:
        """Uploads the rows of those chunks that changed since they were last uploaded; returns how many."""
        ids = chunks[self._seen[chunks] != self._table.takes[chunks]]
        count = len(ids)
        if count == 0:
            return 0
        self._seen[ids] = self._table.takes[ids]
        row_ints = self._table.pages_per_chunk
        host = torch.empty(count * (3 + row_ints), dtype=torch.int32, pin_memory=self.pages.device.type == "cuda")
        host[: 2 * count].view(torch.int64).numpy()[:] = ids
        host[2 * count : 3 * count].numpy()[:] = self._table.sidecars[ids]
        host[3 * count :].numpy()[:] = self._table.pages[ids].reshape(-1)
        sent = host.to(self.pages.device, non_blocking=True)
        self.copies += 1
        # A chunk that several sequences share is named several times, with the same row.
        index = sent[: 2 * count].view(torch.int64)
        self.sidecars.index_copy_(0, index, sent[2 * count : 3 * count])
        self.pages.view(-1, row_ints).index_copy_(0, index, sent[3 * count :].view(count, row_ints))
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
