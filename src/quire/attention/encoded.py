"""The tables of a codec as the GPU kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.cache.codecs import Codec
from quire.cache.codecs.group import GroupCodec
from quire.cache.codecs.nuq import BLOCK_PAIRS, NUM_BOOK, NuqCodec
from quire.cache.codecs.packing import LINE_BYTES

_LINE_WORDS = LINE_BYTES // 4
_PARTS = (4, 2, 1)


class EncodedTables:
    """What `kernels.encoded` and `kernels.encode` know of the codec of sealed chunks.

    heads        int32 [L, H, HEAD_INTS]: slots, and where the parts of a page begin
    pairs        int32 [L, H, 4, HP]: of each pair in stored order, its number, and where its upper four bits, its two
                 bits and its lowest bit begin, in words from the page's start; -1 where its width has no such part
    read_keys    float32 [L, H, 2, HP, 32]: of each pair in stored order the two channels' books, by place
    read_values  float32 [L, H, 32]: the book of values, by place
    edges, books, weight, value_edges, value_books  float32 [L, H, D, 32], [L, H, D, 32], [L, H, D], [L, H, 32] twice:
                 by code, to encode with
    key_parts, value_parts  of all widths in use, the powers of two: a sum of 4, 2 and 1
    key_slots, value_slots  of a vector at most

    A code of b bits has its place in a book of 32 by its upper part, of four or two bits, and by its lowest bit where b
    is odd: `lowest * 16 + upper`. So kernels put no shifted parts together, and one book fits all widths.
    All of this is None, or 0, for group codes, which have no tables. Where their keys are stored less a bias, it is
    `books`, float32 [L, H, D], and `read_keys`, float32 [L, H, 2, HP], the two halves apart.
    """

    heads: Tensor | None = None
    pairs: Tensor | None = None
    read_keys: Tensor | None = None
    read_values: Tensor | None = None
    edges: Tensor | None = None
    books: Tensor | None = None
    weight: Tensor | None = None
    value_edges: Tensor | None = None
    value_books: Tensor | None = None
    key_parts = value_parts = key_slots = value_slots = 0

    def __init__(self, codec: Codec, head_dim: int, device: torch.device) -> None:
        self.kernel_id = codec.kernel_id
        self.pairs_padded = max(16, 1 << (head_dim // 2 - 1).bit_length())
        if isinstance(codec, GroupCodec):
            if codec.key_bias is not None:
                halves = codec.key_bias.unflatten(-1, (2, head_dim // 2))
                padding = (0, self.pairs_padded - head_dim // 2)
                self.read_keys = torch.nn.functional.pad(halves, padding).contiguous().to(device)
                self.books = codec.key_bias.to(device)
            return
        assert isinstance(codec, NuqCodec), f"the triton backend does not read {codec.name} pages"
        tables = codec.tables
        self.heads = torch.tensor(
            [
                [
                    [
                        int(tables.key_slots[layer, head]), layout.key_slots, layout.values, layout.ranges,
                        int(tables.value_slots[layer, head]), layout.value_slots, int(tables.value_bits[layer, head]),
                        layout.end,
                    ]
                    for head, layout in enumerate(heads)
                ]
                for layer, heads in enumerate(codec.layouts)
            ],
            dtype=torch.int32, device=device,
        )  # fmt: skip
        self.pairs = self._pairs(codec).to(device)
        order = tables.key_order.long()
        ordered = torch.cat((order, order + head_dim // 2), -1)
        # In stored order, the two channels of every pair apart.
        books = tables.key_books.gather(-2, ordered[..., None].expand(*ordered.shape, NUM_BOOK))
        bits = tables.key_bits.long().repeat_interleave(BLOCK_PAIRS, -1)
        by_place = _by_place(books, torch.cat((bits, bits), -1)).unflatten(-2, (2, head_dim // 2))
        padded = self.pairs_padded - head_dim // 2
        self.read_keys = torch.nn.functional.pad(by_place, (0, 0, 0, padded)).contiguous().to(device)
        self.read_values = _by_place(tables.value_books, tables.value_bits.long()).to(device)
        self.edges = torch.nn.functional.pad(tables.key_edges, (0, 1), value=torch.inf).contiguous().to(device)
        self.books, self.weight = tables.key_books.contiguous().to(device), tables.key_weight.contiguous().to(device)
        # An infinite edge counts for no value, whatever multiplies it: as zeros they make no NaN, and a width bounds
        # those that count.
        finite = tables.value_edges.masked_fill(tables.value_edges.isinf(), 0)
        self.value_edges = torch.nn.functional.pad(finite, (0, 1)).contiguous().to(device)
        self.value_books = tables.value_books.contiguous().to(device)
        self.key_parts = sum(part for part in _PARTS if (tables.key_bits & part).any())
        self.value_parts = sum(part for part in _PARTS if (tables.value_bits & part).any())
        self.key_slots, self.value_slots = int(tables.key_slots.max()), int(tables.value_slots.max())

    def _pairs(self, codec: NuqCodec) -> Tensor:
        tables = codec.tables
        num_layers, num_heads, half = tables.key_order.shape
        bits = tables.key_bits.long()
        first_line = bits.cumsum(-1) - bits  # of each block
        found = torch.full((num_layers, num_heads, 4, self.pairs_padded), -1, dtype=torch.int32)
        found[:, :, 0, half:] = 0
        found[:, :, 0, :half] = tables.key_order.int()
        place = torch.arange(half) % BLOCK_PAIRS
        block = torch.arange(half) // BLOCK_PAIRS
        line = first_line[..., block]
        for column, part in enumerate(_PARTS, 1):
            # Sixteen fields in `part` lines: a pair has four of them.
            at = (line + place * part // BLOCK_PAIRS) * _LINE_WORDS
            has = (bits[..., block] & part) > 0
            found[:, :, column, :half] = torch.where(has, at, -1).int()
            line = line + (bits[..., block] & part)
        return found.contiguous()


def _by_place(books: Tensor, bits: Tensor) -> Tensor:
    """Books [..., 32] by code -> by place, for widths [...]; zero where no code is."""
    place = torch.arange(NUM_BOOK)
    upper, lowest = place & 15, place >> 4
    odd = bits[..., None] & 1
    code = (upper << odd) | (lowest & odd)
    is_code = (code < (1 << bits[..., None])) & ((lowest == 0) | (odd == 1))
    return torch.where(is_code, books.gather(-1, code.clamp(max=NUM_BOOK - 1)), 0).contiguous()
