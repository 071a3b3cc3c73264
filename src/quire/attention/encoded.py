"""The tables of a codec as the GPU kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.cache.codecs import CODECS, Codec, load
from quire.cache.codecs.group import GroupCodec
from quire.cache.codecs.nuq import BLOCK_PAIRS, CODEBOOK_SIZE, NuqCodec
from quire.cache.codecs.packing import LINE_BYTES

_LINE_WORDS = LINE_BYTES // 4
_PARTS = (4, 2, 1)


@dataclass
class EncodedTables:
    """The description of the sealed codec for `kernels.encoded` and `kernels.encode`.

    kernel_id    the codec's kernel id
    pairs_padded HP, half of the head size rounded up to a power of two
    heads        int32 [L, H, HEAD_INTS]: slots, and the offsets of the parts of a page
    pairs        int32 [L, H, 4, HP]: for each pair in stored order, its number, and the offsets of its upper four bits,
                 its two bits and its lowest bit, in words from the page's start; -1 if its width has no such part
    read_keys    float32 [L, H, 2, HP, 32]: for each pair in stored order, the codebooks of its two channels, by place
    read_values  float32 [L, H, 32]: the codebook of values, by place
    edges, key_codebooks  float32 [L, H, D, 32] each: by code, to encode keys with
    weight       float32 [L, H, D], to encode keys with
    value_edges, value_codebooks  float32 [L, H, 32] each: by code, to encode values with
    key_parts, value_parts  the powers of two in the widths in use: a sum of 4, 2 and 1
    key_slots, value_slots  most slots of a vector

    The place of a code in a codebook of 32 is `lowest * 16 + upper`: its upper part has four or two bits, and its
    lowest bit is apart if the width is odd. So kernels need not combine shifted parts, and one codebook fits all
    widths. For group codes, which have no tables, all of this is None or 0. If a bias is subtracted from their keys,
    `key_codebooks` is this bias, float32 [L, H, D], and so is `read_keys`, float32 [L, H, 2, HP], with the two halves
    apart.
    """

    kernel_id: int
    pairs_padded: int
    heads: Tensor | None = None
    pairs: Tensor | None = None
    read_keys: Tensor | None = None
    read_values: Tensor | None = None
    edges: Tensor | None = None
    key_codebooks: Tensor | None = None
    weight: Tensor | None = None
    value_edges: Tensor | None = None
    value_codebooks: Tensor | None = None
    key_parts: int = 0
    value_parts: int = 0
    key_slots: int = 0
    value_slots: int = 0


def encoded_tables(codec: Codec, head_dim: int, device: torch.device) -> EncodedTables:
    """Builds the tables of a codec with the function that its row names; a codec without tables needs no function."""
    place = CODECS[codec.name].cases["triton"]
    if not place:
        return EncodedTables(codec.kernel_id, _padded(head_dim))
    tables: EncodedTables = load(place)(codec, device)
    return tables


def group_tables(codec: GroupCodec, device: torch.device) -> EncodedTables:
    """The tables of group codes."""
    found = EncodedTables(codec.kernel_id, _padded(codec.head_dim))
    if codec.key_bias is not None:
        halves = codec.key_bias.unflatten(-1, (2, -1))
        found.read_keys = pad(halves, (0, found.pairs_padded - halves.shape[-1])).contiguous().to(device)
        found.key_codebooks = codec.key_bias.to(device)
    return found


def nuq_tables(codec: NuqCodec, device: torch.device) -> EncodedTables:
    """The tables of non-uniform codes."""
    tables, half, pairs_padded = codec.tables, codec.head_dim // 2, _padded(codec.head_dim)
    layouts = torch.tensor([[head.layout for head in heads] for heads in codec.heads], dtype=torch.int32)
    at_key_slots, at_values, at_ranges, at_value_slots, end = layouts.unbind(-1)
    columns = (
        tables.key_slots, at_key_slots, at_values, at_ranges, tables.value_slots, at_value_slots, tables.value_bits,
        end,
    )  # fmt: skip
    order = tables.key_order.long()
    ordered = torch.cat((order, order + half), -1)
    # In stored order, with the two channels of every pair apart.
    codebooks = tables.key_books.gather(-2, ordered[..., None].expand(*ordered.shape, CODEBOOK_SIZE))
    bits = tables.key_bits.long().repeat_interleave(BLOCK_PAIRS, -1)
    by_place = _by_place(codebooks, torch.cat((bits, bits), -1)).unflatten(-2, (2, half))
    # No value exceeds an infinite edge. Stored as zeros, such edges make no NaN when they are scaled; the width says
    # which edges count.
    finite = tables.value_edges.masked_fill(tables.value_edges.isinf(), 0)
    return EncodedTables(
        codec.kernel_id,
        pairs_padded,
        heads=torch.stack([column.int() for column in columns], -1).to(device),
        pairs=_pairs(codec, pairs_padded).to(device),
        read_keys=pad(by_place, (0, 0, 0, pairs_padded - half)).contiguous().to(device),
        read_values=_by_place(tables.value_books, tables.value_bits.long()).to(device),
        edges=pad(tables.key_edges, (0, 1), value=torch.inf).contiguous().to(device),
        key_codebooks=tables.key_books.contiguous().to(device),
        weight=tables.key_weight.contiguous().to(device),
        value_edges=pad(finite, (0, 1)).contiguous().to(device),
        value_codebooks=tables.value_books.contiguous().to(device),
        key_parts=sum(part for part in _PARTS if (tables.key_bits & part).any()),
        value_parts=sum(part for part in _PARTS if (tables.value_bits & part).any()),
        key_slots=int(tables.key_slots.max()),
        value_slots=int(tables.value_slots.max()),
    )


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim // 2 - 1).bit_length())


def _pairs(codec: NuqCodec, pairs_padded: int) -> Tensor:
    tables = codec.tables
    num_layers, num_heads, half = tables.key_order.shape
    bits = tables.key_bits.long()
    first_line = bits.cumsum(-1) - bits  # of each block
    found = torch.full((num_layers, num_heads, 4, pairs_padded), -1, dtype=torch.int32)
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


def _by_place(codebooks: Tensor, bits: Tensor) -> Tensor:
    """Codebooks [..., 32] by code -> by place, for widths [...]; zero in places without a code."""
    place = torch.arange(CODEBOOK_SIZE)
    upper, lowest = place & 15, place >> 4
    odd = bits[..., None] & 1
    code = (upper << odd) | (lowest & odd)
    is_code = (code < (1 << bits[..., None])) & ((lowest == 0) | (odd == 1))
    return torch.where(is_code, codebooks.gather(-1, code.clamp(max=CODEBOOK_SIZE - 1)), 0).contiguous()
