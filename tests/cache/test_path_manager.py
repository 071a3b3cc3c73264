"""How paths take chunks where full chunks have another codec than the open one."""

from __future__ import annotations

from quire.cache.arena import Arena
from quire.cache.codecs.nuq import NuqCodec
from quire.cache.ledger import PageLedger
from quire.cache.manager import CacheManager
from quire.cache.table import ChunkTable
from quire.cache.tree import PrefixTree
from tests.cache.test_tree import CODEC, H, Holder, L, chunk

from ..nuq_tables import random_tables


def test_the_step_that_fills_an_open_chunk_has_it_beside_the_sealed_one_that_takes_its_place() -> None:
    encoded, num_bytes = NuqCodec("nuq3", random_tables(L, H, 16, 0)), 20 * CODEC.page_bytes
    ledger, arena = PageLedger(num_bytes, CODEC.page_bytes), Arena(num_bytes)
    manager = CacheManager(ChunkTable(ledger, L, H, CODEC, encoded, arena=arena), PrefixTree((L, H)))
    holder = Holder(chunk(1) + chunk(2, 10))
    assert manager.admit(holder) and manager.paths.extend(holder, 10)
    path, table = holder.path, manager.table
    (begun,) = path.chunks.tolist()
    manager.paths.commit(holder, 10)
    assert manager.paths.extend(holder, 74)
    assert path.reservation.filled == begun and begun not in path.chunks
    assert len(path.chunks) == 2 and table.num_taken == 3
    manager.check()
    manager.paths.commit(holder, 74)
    assert path.reservation.filled == -1 and table.num_taken == 2
    manager.check()
