"""Non-uniform codes: keys per channel before rotation, values per token, the worst of each vector apart.

    key    of channel d:  codebook_d[code]                           plus, in the vector's slots, what that misses
    value  of a token:    s * codebook[code] + z, s and z its own    likewise

A page (P = 64 slots, D channels, all little-endian; docs/reference/page-format.md has it byte by byte):

    key codes | key slots | value codes | value ranges s, z | value slots | zeros to a multiple of 128

Source: KVQuant, arXiv 2401.18079, sections 3.1 to 3.5. What differs: widths are chosen per four pairs of key channels,
and per head for values; codebooks may be per channel; a slot holds what is missing, largest weighted error first, so
none stays empty; a value's s and z are fitted by least squares after its range gave the codes. quire.calibrate makes
the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch

from quire.cache.arrays import Int32s
from quire.cache.codecs import CodecInputs
from quire.cache.codecs.packing import LINE_BYTES, MAX_BITS, Lines, from_half, parts, to_half
from quire.cache.codecs.slots import KEY_LINES, RUN, VALUE_LINES, PagePart, SlottedPages
from quire.cache.ledger import PAGE_TOKENS, UNIT

BLOCK_PAIRS = 4
"""Pairs of key channels of one width: 512 codes, a line for each bit."""

MAX_SLOTS = 2
CODEBOOK_SIZE = 1 << MAX_BITS
SLOT_BYTES = 3 * PAGE_TOKENS
"""Of one slot of every vector of a page: a channel in 8 bits and a float16."""

FIT_ROUNDS = 2
"""How often the range of a value is fitted to its codes."""

RESIDUAL_REACH = 256.0
"""How much larger than its vector's scale what is missing in a slot may be: kernels add it in units of the scale."""

_VALUE_COLUMNS = 16


@dataclass(frozen=True)
class NuqTables:
    """What each head of each layer is quantized with. L layers, H kv heads, D channels; channel j < D / 2 and channel
    j + D / 2, which rotation mixes, are pair j. Fields have the names of the tensors in a calibration file.

    key_order     uint8 [L, H, D / 2]: the pairs in the order their codes are stored in
    key_bits      uint8 [L, H, D / 8]: width of each block of four pairs, 0 to 5
    key_edges     float32 [L, H, D, 31]: a key's code is how many of its channel's edges it exceeds; +inf past the width
    key_books     float32 [L, H, D, 32]: what the codes of a channel stand for
    key_weight    float32 [L, H, D]: what a squared error in a channel costs; slots go to the largest cost
    key_slots     uint8 [L, H], 0 to 2
    value_bits    uint8 [L, H], 1 to 5
    value_edges   float32 [L, H, 31], in units of a value's own range
    value_books   float32 [L, H, 32]
    value_slots   uint8 [L, H], 0 to 2
    """

    key_order: torch.Tensor
    key_bits: torch.Tensor
    key_edges: torch.Tensor
    key_books: torch.Tensor
    key_weight: torch.Tensor
    key_slots: torch.Tensor
    value_bits: torch.Tensor
    value_edges: torch.Tensor
    value_books: torch.Tensor
    value_slots: torch.Tensor


class NuqLayout(NamedTuple):
    """Where the parts behind the key codes begin in the pages of one head, in bytes, and where the last ends."""

    key_slots: int
    values: int
    ranges: int
    value_slots: int
    end: int

    @property
    def page_bytes(self) -> int:
        """The end, on the next multiple of 128."""
        return -(-self.end // UNIT) * UNIT


def nuq_layout(head_dim: int, key_bits: int, key_slots: int, value_bits: int, value_slots: int) -> NuqLayout:
    """The layout of a head; key_bits is the sum over its blocks."""
    value_bytes = PAGE_TOKENS * head_dim * value_bits // 8
    sizes = key_bits * LINE_BYTES, key_slots * SLOT_BYTES, value_bytes, 4 * PAGE_TOKENS, value_slots * SLOT_BYTES
    return NuqLayout(*accumulate(sizes))


class NuqCodec(SlottedPages):
    """The codec of one calibration.

    name        of the codec, as in `cache.codec`
    tables      see NuqTables; value codebooks are rounded to bfloat16
    heads       [L][H] what encodes and decodes the pages of a head
    page_bytes  int32 [L, H]: heads may differ in bits and slots
    """

    kernel_id = 3  # NUQ in kernels/common.h

    def __init__(self, name: str, tables: NuqTables) -> None:
        self.head_dim = tables.key_weight.shape[-1]
        # As kernels look them up: a centroid rounded on read is off by the same for all its tokens, and a mean over
        # many keeps that, 1.7 % of attention over 500 random tokens at 2 bits against 0.4 %. Scores average it out, and
        # keys far from zero want the digits.
        tables = replace(tables, value_books=tables.value_books.bfloat16().float())
        self.name = name
        self.tables = tables
        of_layers = zip(*vars(tables).values(), strict=True)
        self.heads = [[HeadCodec(NuqTables(*head)) for head in zip(*layer, strict=True)] for layer in of_layers]
        self.page_bytes = np.array([[head.layout.page_bytes for head in heads] for heads in self.heads], np.int32)
        layouts = [[head.parts() for head in heads] for heads in self.heads]
        numbers = {parts: number for number, parts in enumerate({*chain(*layouts)})}
        super().__init__([*numbers], np.array([[numbers[parts] for parts in row] for row in layouts], np.int32))

    @classmethod
    def of(cls, inputs: CodecInputs) -> NuqCodec:
        """The codec of some tables."""
        return cls(inputs.codec, inputs.tables)

    @staticmethod
    def nominal_page_bytes(head_dim: int, bits: int, slots: int) -> int:
        """Bytes of a page whose keys and values all have so many bits and slots: what calibration spends on average."""
        return nuq_layout(head_dim, head_dim // (2 * BLOCK_PAIRS) * bits, slots, bits, slots).page_bytes

    def encode(self, layer: int, head: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys, not rotated, and values, [n, P, D] each, as page images, uint8 [n, page_bytes[layer, head]].

        Computed where the tables are, on the CPU: the same bits for every device.
        """
        return self.heads[layer][head].encode(k.float().cpu(), v.float().cpu()).to(k.device)

    def decode(self, layer: int, head: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page images uint8 [n, page_bytes] as keys, not rotated, and values, float32 [n, P, D] each."""
        k, v = self.heads[layer][head].decode(pages.cpu())
        return k.to(pages.device), v.to(pages.device)


class HeadCodec:
    """The codec of one head of one layer.

    tables  without [L, H]
    layout  of its pages
    """

    def __init__(self, tables: NuqTables) -> None:
        self.tables = tables
        self._key_widths = tables.key_bits.tolist()
        self._value_widths = [int(tables.value_bits)] * (len(tables.key_weight) // _VALUE_COLUMNS)
        counts = tables.key_bits.sum(), tables.key_slots, tables.value_bits, tables.value_slots
        self.layout = nuq_layout(len(tables.key_weight), *map(int, counts))

    @cached_property
    def key_lines(self) -> Lines:
        """Lane 2t + i of a field: slot t of a quarter of the page, half i of the pair."""
        keys = self._numbers().reshape(4, 16, 2, -1)[..., self.tables.key_order.numpy()].transpose(3, 0, 1, 2)
        return Lines(keys, self._key_widths)

    @cached_property
    def value_lines(self) -> Lines:
        """Lane 2c + i of field f: column c of sixteen, slot 2f + i."""
        values = self._numbers().reshape(PAGE_TOKENS // 2, 2, -1, _VALUE_COLUMNS).transpose(2, 0, 3, 1)
        return Lines(values, self._value_widths)

    def _numbers(self) -> Int32s:
        return np.arange(PAGE_TOKENS * len(self.tables.key_weight), dtype=np.int32)

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys and values, float32 [n, P, D] each, as page images."""
        codes = _codes(k, self.tables.key_edges)
        missing = k - self._centroids(codes)
        costliest = _ranked(missing * missing * self.tables.key_weight)[..., : int(self.tables.key_slots)]
        value_codes, ranges, value_slots = self._encode_values(v)
        page = torch.cat(
            (self.key_lines.pack(codes), _slots(missing, costliest),
             self.value_lines.pack(value_codes), ranges, value_slots), 1
        )  # fmt: skip
        return torch.nn.functional.pad(page, (0, self.layout.page_bytes - self.layout.end))

    def decode(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page images as keys and values, float32 [n, P, D] each."""
        lines, key_slots, value_lines, ranges, value_slots, _ = pages.tensor_split(self.layout, 1)
        keys = self._centroids(self.key_lines.unpack(lines).unflatten(1, (PAGE_TOKENS, -1)))
        codes = self.value_lines.unpack(value_lines).unflatten(1, (PAGE_TOKENS, -1))
        s, z = from_half(ranges).view(-1, 2, PAGE_TOKENS, 1).unbind(1)
        values = self.tables.value_books[codes] * s + z
        return _add_slots(keys, key_slots), _add_slots(values, value_slots)

    def parts(self) -> tuple[PagePart, ...]:
        """The parts of the pages, in their order."""
        channel, half = (RUN, 1), (RUN, 2)
        return (
            *((KEY_LINES, width) for bits in self._key_widths for width, _ in parts(bits)),
            *(channel, half) * int(self.tables.key_slots),
            *((VALUE_LINES, width) for bits in self._value_widths for width, _ in parts(bits)),
            half,
            half,
            *(channel, half) * int(self.tables.value_slots),
        )

    def _centroids(self, codes: torch.Tensor) -> torch.Tensor:
        """What codes [n, P, D] of keys stand for."""
        return self.tables.key_books[torch.arange(codes.shape[-1]), codes]

    def _encode_values(self, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes [n, P, D], and the bytes of ranges and slots. Sums run over the channels in order, so that kernels can
        give the same bits.
        """
        codebook, edges = self.tables.value_books, self.tables.value_edges
        distance = (v - _ordered_sum(v) / v.shape[-1]).abs()
        outliers, others = _ranked(distance).tensor_split((int(self.tables.value_slots),), -1)
        inner = torch.ones_like(v, dtype=torch.bool).scatter(-1, outliers, False)
        low, high = v.gather(-1, others).aminmax(dim=-1, keepdim=True)
        middle = (high + low) * 0.5
        s, z = (high - low) * 0.5, middle
        x = (v - middle) * inner
        total = _ordered_sum(x)
        number = others.shape[-1]
        for _ in range(FIT_ROUNDS):
            c = codebook[_codes(v, edges * s[..., None] + z[..., None])] * inner
            sum_c, sum_cc, sum_cx = map(_ordered_sum, (c, c * c, c * x))
            spread = sum_cc - sum_c * sum_c / number
            slope = sum_cx - sum_c * total / number
            fits = (spread > 0) & (slope > 0)
            s = torch.where(fits, slope / torch.where(fits, spread, 1.0), s)
            z = torch.where(fits, middle + (total - s * sum_c) / number, z)
        beyond = ((v - z).abs() * ~inner).amax(-1, keepdim=True)
        s = torch.maximum(s, beyond / RESIDUAL_REACH)
        # Never minus zero: which of two zeros is the larger is nobody's promise.
        ranges = to_half(torch.stack((s, z), 1) + 0.0)
        s, z = ranges.float().unbind(1)
        codes = _codes(v, edges * s[..., None] + z[..., None])
        slots = _slots(v - (codebook[codes] * s + z), outliers)
        return codes, ranges.flatten(1).view(torch.uint8), slots


def _codes(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """How many edges each x exceeds, int64; edges [..., 31], of which +inf * 0 never counts."""
    return (x[..., None] > edges).sum(-1)


def _ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, term after term, [..., 1]."""
    total: torch.Tensor = reduce(torch.add, x.split(1, -1))
    return total


def _ranked(x: torch.Tensor) -> torch.Tensor:
    """The channels of vectors [n, P, D], the largest number first; of equals the first."""
    return x.argsort(dim=-1, descending=True, stable=True)


def _slots(missing: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """The bytes [n, count * 192] of slots: of each the channels [n, P, count] of all vectors, then what they miss."""
    halves = to_half(missing.gather(-1, channels)).mT.contiguous()
    return torch.cat((channels.mT.to(torch.uint8), halves.view(torch.uint8)), 2).flatten(1)


def _add_slots(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Adds to vectors [n, P, D] what their slots hold."""
    channels, halves = slots.unflatten(1, (-1, SLOT_BYTES)).tensor_split((PAGE_TOKENS,), -1)
    return x.scatter_add(-1, channels.long().mT, from_half(halves).mT)
