"""Poison: bytes that no page holds become NaN in every format, so that reading them cannot pass."""

from __future__ import annotations

import numpy as np

from quire.cache.ledger import UNIT
from quire.cache.table import ChunkTable


def poison_free(table: ChunkTable) -> int:
    """Fills what no page of the table holds with 0xFF, also where pages lay before: NaN in every format. Returns the
    bytes.
    """
    ledger = table.ledger
    is_free = np.ones(ledger.num_bytes // UNIT, bool)
    ids = ledger.allocated_ids()
    if len(ids):
        sizes = ledger.page_bytes(ids)
        for size in np.unique(sizes).tolist():
            is_free[ids[sizes == size][:, None] + np.arange(size // UNIT)] = False
    table.arena.data.numpy()[: ledger.num_bytes].reshape(-1, UNIT)[is_free] = 0xFF
    return int(is_free.sum()) * UNIT
