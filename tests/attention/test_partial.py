"""The plainest codec and table, and partials: other implementations must pass the same tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attention.partial import Partial, merge
from quire.attention.reference import attend_dense
from quire.cache.arena import Arena
from quire.cache.codecs.dense import DenseCodec
from quire.cache.ledger import PageLedger
from quire.cache.segment import Segment
from quire.cache.table import ChunkTable
from quire.errors import CacheFullError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_kv(dim: int, dtype: torch.dtype, count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(dim)
    k, v = torch.randn(2, count, 64, dim, generator=generator).to(dtype)
    return k, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 12, 64, 80, 128])
def test_dense_pages_give_back_what_they_were_given(dim: int, dtype: torch.dtype) -> None:
    codec = DenseCodec(dim, dtype)
    k, v = random_kv(dim, dtype)
    pages = codec.encode(0, 0, k, v)
    assert pages.shape == (3, codec.page_bytes)
    assert codec.page_bytes % 128 == 0
    back = codec.decode(0, 0, pages)
    assert torch.equal(back[0], k.float())
    assert torch.equal(back[1], v.float())


def table_of(chunks: int = 4) -> ChunkTable:
    codec = DenseCodec(16, torch.float32)
    ledger = PageLedger(chunks * 6 * codec.page_bytes, codec.page_bytes)
    return ChunkTable(ledger, 2, 3, codec, arena=Arena(ledger.num_bytes))


def test_chunks_are_taken_whole_or_not_at_all() -> None:
    table = table_of(4)
    taken = table.take(3, table.open_codec)
    assert len(np.unique(table.pages[taken])) == 3 * 6
    with pytest.raises(CacheFullError):
        table.take(2, table.open_codec)
    table.check()
    assert table.fits(table.demand(1)) and not table.fits(table.demand(2))
    table.free(taken)
    table.check()
    assert table.ledger.allocated_bytes == 0


def test_a_segment_holds_whole_chunks() -> None:
    """It begins on a chunk boundary, because its place is counted in chunks."""
    for tokens in (63, 65):
        with pytest.raises(AssertionError):
            Segment(np.zeros(tokens, np.int32), [b"key"], np.array([1], np.int32), 0)
    assert Segment(np.zeros(64, np.int32), [b"key"], np.array([1], np.int32), 1).end == 2


def test_partials_merge_to_attention_over_the_union_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 2, 3, 16, generator=generator)
    k, v = torch.randn(2, 2, 90, 16, generator=generator)
    k[:, :30] *= 40  # scores of very different size
    rows, positions = torch.full((5,), 89), torch.arange(90)
    whole = attend_dense(q, k, v, rows, positions)
    cuts = [(0, 30), (30, 31), (31, 90)]
    parts = [attend_dense(q, k[:, a:b], v[:, a:b], rows, positions[a:b]) for a, b in cuts]
    nothing = attend_dense(q, k[:, :4], v[:, :4], rows, positions[:4] + 1000)
    assert (nothing.lse == -torch.inf).all()
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        merged = merge([nothing, *(parts[index] for index in order)])
        torch.testing.assert_close(merged.o, whole.o, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(merged.lse, whole.lse, atol=1e-5, rtol=1e-6)
    nested = merge([merge([parts[0], parts[1]]), parts[2]])
    torch.testing.assert_close(nested.o, whole.o, atol=2e-6, rtol=1e-5)
    assert (merge([nothing, nothing]).lse == -torch.inf).all()


def test_merging_is_not_averaging() -> None:
    """A worked merge: scores (1, 3) over (1,0), (0,1) and (2, 5) over (2,2), (4,0)."""

    def part(scores: list[float], values: list[list[float]]) -> Partial:
        s, v = torch.tensor(scores).float(), torch.tensor(values).float()
        return Partial((s.softmax(0) @ v).view(1, 1, 1, 2), s.logsumexp(0).view(1, 1, 1))

    merged = merge([part([1, 3], [[1, 0], [0, 1]]), part([2, 5], [[2, 2], [4, 0]])])
    torch.testing.assert_close(merged.o.view(2), torch.tensor([3.421771, 0.195199]), atol=1e-5, rtol=0)
