"""Pages of non-uniform codes: the kernels write the bytes of the definition, and decode the same numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.attention.nuq import NuqHeads
from quire.cache.codecs.nuq import NuqCodec
from quire.cache.ledger import PAGE_TOKENS
from quire.kernels import runtime
from tests.effort import combine, examples

from ..nuq_tables import random_tables
from .pages import DTYPES, KINDS, LEVELS, use_level, vectors

DIMS = [16, 32, 48, 64, 80, 96, 128, 256]


def encoded(codec: NuqCodec, k: torch.Tensor, v: torch.Tensor, layer: int = 0, head: int = 0) -> torch.Tensor:
    """What the kernels make of keys and values [n, P, D], in pages that held 0xFF before."""
    pages = torch.full((len(k), int(codec.page_bytes[layer, head])), 0xFF, dtype=torch.uint8)
    heads, k, v = NuqHeads(codec), k.contiguous(), v.contiguous()
    runtime.kernels().quire_nuq_encode(
        heads.at(layer, head),
        codec.head_dim,
        runtime.DTYPE_IDS[k.dtype],
        k.data_ptr(),
        v.data_ptr(),
        len(k),
        pages.data_ptr(),
    )
    return pages


def decoded(codec: NuqCodec, pages: torch.Tensor, layer: int = 0, head: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    heads, (k, v) = NuqHeads(codec), torch.full((2, len(pages), PAGE_TOKENS, codec.head_dim), torch.nan)
    runtime.kernels().quire_nuq_decode(
        heads.at(layer, head), codec.head_dim, pages.data_ptr(), len(pages), k.data_ptr(), v.data_ptr()
    )
    return k, v


def check(codec: NuqCodec, k: torch.Tensor, v: torch.Tensor, layer: int = 0, head: int = 0) -> None:
    expected = codec.encode(layer, head, k, v)
    actual = encoded(codec, k, v, layer, head)
    layout = codec.heads[layer][head].layout
    bounds = {
        "key codes": 0,
        **{name: getattr(layout, name) for name in ("key_slots", "values", "ranges", "value_slots", "end")},
    }
    differ = (actual != expected).any(0).nonzero()[:, 0].tolist()
    assert not differ, f"bytes {differ[:8]} of a page differ; its parts begin at {bounds}"
    for fast, plain in zip(decoded(codec, actual, layer, head), codec.decode(layer, head, expected), strict=True):
        assert plain.isfinite().all()
        assert torch.equal(fast, plain)


@combine(dtype=DTYPES, dim=DIMS, kind=KINDS)
def test_kernels_write_the_bytes_of_the_definition(kind: str, dim: int, dtype: torch.dtype, seed: int) -> None:
    codec = NuqCodec("nuq3", random_tables(2, 2, dim, seed))
    for layer, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        k, v = vectors(kind, (2, 2, PAGE_TOKENS, dim), dtype, seed + 2 * layer + head)
        check(codec, k, v, layer, head)


@examples(150)
@given(
    dim=st.sampled_from(DIMS[:6]),
    dtype=st.sampled_from(DTYPES),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    key_bits=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    value_bits=st.integers(1, 5),
    slots=st.integers(0, 2),
    log_scale=st.integers(-6, 6),
    seed=st.integers(0, 2**20),
)
def test_any_tables_and_numbers(dim, dtype, kinds, key_bits, value_bits, slots, log_scale, seed) -> None:  # type: ignore[no-untyped-def]
    tables = random_tables(1, 1, dim, seed, key_bits=key_bits, value_bits=[value_bits], slots=[slots])
    largest = min(torch.finfo(dtype).max, 1e6)
    numbers = (
        vectors(kind, (1, PAGE_TOKENS, dim), dtype, seed + i).float() * 2.0**log_scale for i, kind in enumerate(kinds)
    )
    k, v = (x.clamp(-largest, largest).to(dtype) for x in numbers)
    check(NuqCodec("nuq3", tables), k, v)


@combine(level=LEVELS, dtype=DTYPES)
def test_every_cpu_level_writes_the_same_bytes(
    level: str, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_level(level, monkeypatch)
    codec = NuqCodec("nuq3", random_tables(1, 1, 80, seed, slots=[2]))
    for kind in KINDS:
        check(codec, *vectors(kind, (2, 1, PAGE_TOKENS, 80), dtype, seed))


def test_the_kernels_differ_where_the_numbers_do(seed: int) -> None:
    """What the tests above compare is not all zeros: each channel, each slot and both tensors reach the bytes."""
    codec = NuqCodec("nuq3", random_tables(1, 1, 16, seed, key_bits=[5], value_bits=[5], slots=[2], reach=1.0))
    k, v = vectors("normal", (2, 1, PAGE_TOKENS, 16), torch.float32, seed)
    page = encoded(codec, k, v)
    for channel, slot in ((0, 0), (15, 63), (8, 31)):
        for which in (0, 1):
            changed = [k.clone(), v.clone()]
            changed[which][0, slot, channel] += 3.0
            assert not torch.equal(encoded(codec, *changed), page)
