"""Pages of group codes: the kernels write the bytes of the definition, and decode the same numbers."""

from __future__ import annotations

import pytest
import torch

from quire.cache.codecs.group import GroupCodec
from quire.cache.ledger import PAGE_TOKENS
from quire.kernels import runtime
from tests.effort import combine

from .pages import DTYPES, KINDS, LEVELS, use_level, vectors


def check(dim: int, k: torch.Tensor, v: torch.Tensor, key_bias: torch.Tensor | None = None) -> None:
    """key_bias: [D], or None."""
    codec = GroupCodec(dim, None if key_bias is None else key_bias[None, None])
    expected = codec.encode(0, 0, k, v)
    bias = None if key_bias is None else key_bias.data_ptr()
    pages = torch.full_like(expected, 0xFF)
    kernels = runtime.kernels()
    kind = runtime.DTYPE_IDS[k.dtype]
    kernels.quire_group_encode(dim, kind, k.data_ptr(), v.data_ptr(), bias, len(k), pages.data_ptr())
    differ = (pages != expected).any(0).nonzero()[:, 0].tolist()
    assert not differ, f"bytes {differ[:8]} of {codec.page_bytes} differ; ranges begin at {PAGE_TOKENS * dim}"
    decoded = torch.full((2, len(k), PAGE_TOKENS, dim), torch.nan)
    kernels.quire_group_decode(dim, pages.data_ptr(), bias, len(k), decoded[0].data_ptr(), decoded[1].data_ptr())
    for fast, plain in zip(decoded, codec.decode(0, 0, expected), strict=True):
        assert plain.isfinite().all()
        assert torch.equal(fast, plain)


@combine(dtype=DTYPES, dim=[2, 8, 16, 62, 64, 66, 72, 80, 96, 128, 130, 256, 320, 512], kind=KINDS)
def test_kernels_write_the_bytes_of_the_definition(kind: str, dim: int, dtype: torch.dtype, seed: int) -> None:
    check(dim, *vectors(kind, (2, 3, PAGE_TOKENS, dim), dtype, seed))


@combine(dtype=DTYPES, dim=[2, 62, 64, 66, 128])
def test_kernels_store_keys_less_their_bias(dim: int, dtype: torch.dtype, seed: int) -> None:
    bias = torch.randn(dim) * torch.where(torch.arange(dim) % 29 == 3, 300.0, 1.0)
    k, v = vectors("normal", (2, 3, PAGE_TOKENS, dim), dtype, seed)
    check(dim, (k.float() + bias).to(dtype), v, bias)


@combine(level=LEVELS, dtype=DTYPES)
def test_every_cpu_level_writes_the_same_bytes(
    level: str, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    for dim in (66, 80):
        for kind in KINDS:
            check(dim, *vectors(kind, (2, 1, PAGE_TOKENS, dim), dtype, seed))
