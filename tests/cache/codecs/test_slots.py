"""Moving slots between pages gives the same bytes as encoding their tokens in the new slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.arena import Arena
from quire.cache.codecs import Codec
from quire.cache.codecs.dense import DenseCodec
from quire.cache.codecs.group import GroupCodec
from quire.cache.codecs.nuq import NuqCodec
from quire.cache.codecs.slots import SlotMoves
from quire.cache.codecs.sums import SumsCodec
from quire.cache.ledger import PAGE_TOKENS, UNIT, PageLedger
from tests.codecs import EVERY, build
from tests.effort import examples
from tests.kernels.pages import KINDS, LEVELS, use_level, vectors
from tests.nuq_tables import random_tables

L, H = 2, 2
CODECS: dict[str, Codec] = {
    **{f"dense {str(dtype)[6:]} {dim}": DenseCodec(dim, dtype)
       for dtype, dim in ((torch.bfloat16, 64), (torch.float32, 64), (torch.float16, 80), (torch.bfloat16, 3),
                          (torch.float32, 5))},
    **{f"g4 {dim}": GroupCodec(dim) for dim in (2, 62, 64, 66, 130)},
    **{f"nuq{bits} of {slots}": NuqCodec(
           f"nuq{bits}", random_tables(L, H, 64, bits, key_bits=[bits], value_bits=[bits], slots=[slots]))
       for bits, slots in ((4, 1), (3, 1), (2, 1), (3, 0), (2, 2))},
    **{f"mixed {dim}": NuqCodec("nuq3", random_tables(L, H, dim, dim)) for dim in (16, 48, 80, 128)},
    **{f"{name} of the registry": build(name, (L, H, 64)) for name in EVERY},
}  # fmt: skip


class Pages:
    """Pages of a codec for each layer and head, and the tokens they hold.

    ids     int32 [L, H, n]
    tokens  [L, H, 2, n, P, D], keys and values
    """

    def __init__(self, codec: Codec, num_pages: int, seed: int) -> None:
        self.codec = codec
        dtype = getattr(codec, "dtype", torch.float32)
        dim: int = codec.head_dim  # type: ignore[attr-defined]
        shape = (L, H, 2, num_pages, PAGE_TOKENS, dim)
        kinds = [vectors(kind, shape, dtype, seed) for kind in KINDS if kind not in ("zeros", "subnormal")]
        which = torch.randint(len(kinds), (*shape[:-1], 1), generator=torch.Generator().manual_seed(seed))
        self.tokens = torch.stack(kinds).gather(0, which.expand(shape)[None])[0]
        self.sizes = np.broadcast_to(codec.page_bytes, (L, H))
        slab = int(self.sizes.max()) * num_pages
        self.ledger = PageLedger(8 * slab, slab)
        self.arena = Arena(8 * slab)
        self.arena.data.fill_(0xFF)
        for size in self.sizes.flat:
            self.ledger.size_class(int(size))
        self.ids = np.stack([self.ledger.take(np.full(num_pages, size)) for size in self.sizes.flat]).reshape(L, H, -1)
        for layer, head in np.ndindex(L, H):
            self.store(self.arena, layer, head)

    def store(self, arena: Arena, layer: int, head: int) -> None:
        images = self.codec.encode(layer, head, *self.tokens[layer, head])
        arena.store(self.ids[layer, head], int(self.sizes[layer, head]), images)

    def moved(self, moves: SlotMoves) -> torch.Tensor:
        """The arena after encoding all tokens in their new places."""
        where = [torch.from_numpy(array.astype(np.int64)) for array in (moves.layers, moves.heads)]
        index = np.zeros(self.ledger.num_bytes // UNIT, np.int64)
        index[self.ids] = np.arange(self.ids.shape[-1])
        fro, to = (torch.from_numpy(index[pages]) for pages in moves.pages)
        tokens = self.tokens.permute(0, 1, 3, 4, 2, 5).clone()
        old, new = torch.from_numpy(moves.slots).long()
        tokens[*where, to, new] = tokens[*where, fro, old]
        self.tokens = tokens.permute(0, 1, 4, 2, 3, 5).contiguous()
        arena = Arena(self.ledger.num_bytes)
        arena.data.copy_(self.arena.data)
        for layer, head in np.ndindex(L, H):
            self.store(arena, layer, head)
        return arena.data


def random_moves(pages: Pages, seed: int, share: float) -> SlotMoves:
    """Of every head so many of its slots, overwritten with others, several of them with the same one."""
    random = np.random.default_rng(seed)
    found = []
    for layer, head in np.ndindex(L, H):
        order = random.permutation(pages.ids.shape[-1] * PAGE_TOKENS)
        count = max(1, int(share * len(order)))
        at, slots = np.divmod((random.choice(order[count:], count), order[:count]), PAGE_TOKENS)
        found.append([np.full(count, layer), np.full(count, head), pages.ids[layer, head][at], slots])
    order = random.permutation(sum(len(part[0]) for part in found))
    return SlotMoves(*(np.concatenate(column, -1)[..., order].astype(np.int32) for column in zip(*found, strict=True)))


def check(codec: Codec, num_pages: int, share: float, seed: int) -> None:
    pages = Pages(codec, num_pages, seed)
    moves = random_moves(pages, seed, share)
    before, plain = pages.arena.data.clone(), pages.arena.data.clone()
    expected = pages.moved(moves)
    codec.move(pages.arena.data, moves)
    codec.move_in_torch(plain, moves)  # type: ignore[attr-defined]
    assert not torch.equal(before, expected)
    for name, arena in (("torch", plain), ("C++", pages.arena.data)):
        differ = (arena != expected).nonzero()[:, 0].tolist()
        assert not differ, f"{name}: bytes {differ[:8]} of the arena differ; pages are at {(pages.ids * UNIT).tolist()}"


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_moved_tokens_are_those_encoded_in_their_new_slots(name: str, share: float, seed: int) -> None:
    check(CODECS[name], 3, share, seed)


@examples(25)
@given(
    name=st.sampled_from(sorted(CODECS)),
    num_pages=st.integers(1, 4),
    share=st.floats(0, 0.95),
    seed=st.integers(0, 2**20),
)
def test_any_moves(name: str, num_pages: int, share: float, seed: int) -> None:
    check(CODECS[name], num_pages, share, seed)


@examples(25)
@given(
    dim=st.sampled_from([16, 32, 48, 64]),
    key_bits=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    value_bits=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    slots=st.lists(st.integers(0, 2), min_size=1, max_size=2),
    seed=st.integers(0, 2**20),
)
def test_any_tables(dim: int, key_bits: list[int], value_bits: list[int], slots: list[int], seed: int) -> None:
    tables = random_tables(L, H, dim, seed, key_bits=key_bits, value_bits=value_bits, slots=slots)
    check(NuqCodec("nuq3", tables), 3, 0.4, seed)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["dense bfloat16 3", "g4 66", "mixed 80"])
def test_every_cpu_level_moves_the_same_bytes(level: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(level, monkeypatch)
    check(CODECS[name], 3, 0.4, 0)


@pytest.mark.parametrize("name", ["dense bfloat16 64", "g4 64", "mixed 16"])
def test_so_many_moves_that_threads_share_them(name: str) -> None:
    check(CODECS[name], 16, 0.5, 0)


@pytest.mark.parametrize("name", CODECS)
def test_every_bit_of_a_token_moves(name: str, seed: int) -> None:
    """A token moved into a page of other ones decodes as it did."""
    codec = CODECS[name]
    pages = Pages(codec, 2, seed)
    for fro, to in ((0, 63), (63, 0), (17, 34), (48, 15)):
        one, other = pages.ids[1, 0]
        codec.move(pages.arena.data, SlotMoves(*map(np.array, ([1], [0], [[one], [other]], [[fro], [to]]))))
        k, v = codec.decode(1, 0, pages.arena.load(pages.ids[1, 0], int(pages.sizes[1, 0])))
        assert torch.equal(k[0, fro], k[1, to]) and torch.equal(v[0, fro], v[1, to])


def test_sums_move_in_one_page_and_between_pages() -> None:
    arena, ids = Arena(4 * 256), np.array([2, 4, 0, 6], np.int32)
    sums = torch.arange(4 * PAGE_TOKENS, dtype=torch.float32)
    arena.store(ids, 256, sums.view(torch.uint8).view(4, 256))
    moves = [(0, 5, 0, 6), (0, 63, 3, 0), (1, 0, 2, 63)]
    fro, slots, to, others = np.array(moves, np.int32).T
    nothing = np.zeros(len(moves), np.int32)
    SumsCodec().move(arena.data, SlotMoves(nothing, nothing, np.stack((ids[fro], ids[to])), np.stack((slots, others))))
    expected = sums.view(4, PAGE_TOKENS).clone()
    for page, slot, target, other in moves:
        expected[target, other] = sums[page * PAGE_TOKENS + slot]
    assert torch.equal(arena.load(ids, 256).view(torch.float32), expected)


def test_no_moves_do_nothing() -> None:
    pages = Pages(CODECS["g4 64"], 2, 0)
    before = pages.arena.data.clone()
    pages.codec.move(pages.arena.data, SlotMoves(*np.zeros((2, 0), np.int32), *np.zeros((2, 2, 0), np.int32)))
    assert torch.equal(before, pages.arena.data)


@pytest.mark.parametrize("slot", [-1, 64])
def test_a_slot_past_the_page_is_a_mistake(slot: int) -> None:
    pages = Pages(CODECS["g4 64"], 2, 0)
    one, other = pages.ids[0, 0]
    with pytest.raises(AssertionError, match="slots past a page"):
        pages.codec.move(pages.arena.data, SlotMoves(*map(np.array, ([0], [0], [[one], [other]], [[3], [slot]]))))
