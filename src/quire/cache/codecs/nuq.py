"""Non-uniform codes: keys per channel before rotation, values per token, the worst of each vector apart.

    key    of channel d:  book_d[code]                            plus, in the vector's slots, what that misses
    value  of a token:    s * book[code] + z, s and z its own     likewise

A page (P = 64 slots, D channels, all little-endian; docs/page-format.md has it byte by byte):

    key codes | key slots | value codes | value ranges s, z | value slots | zeros to a multiple of 128

Source: KVQuant, arXiv 2401.18079, sections 3.1 to 3.5. What differs: widths are chosen per four pairs of key channels,
and per head for values; books may be per channel; a slot holds what is missing, largest weighted error first, so none
stays empty; a value's s and z are fitted by least squares after its range gave the codes. quire.calibrate makes the
tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from quire.cache.codecs import Moves
from quire.cache.codecs.packing import LANES, LINE_BYTES, MAX_BITS, num_lines, pack, parts, to_half, unpack
from quire.cache.codecs.slots import KEY_LINE, RUN, VALUE_LINES, Part, SlotMap
from quire.cache.ledger import PAGE_TOKENS, UNIT
from quire.errors import ConfigError

KERNEL_ID = 3
"""NUQ in kernels/common.h."""

BLOCK_PAIRS = 4
"""Pairs of key channels of one width: 512 codes, a line for each bit."""

MAX_SLOTS = 2
NUM_BOOK = 1 << MAX_BITS
SLOT_BYTES = 3 * PAGE_TOKENS
"""Of one slot of every vector of a page: a channel in 8 bits and a float16."""

FIT_ROUNDS = 2
"""How often the range of a value is fitted to its codes."""

RESIDUAL_REACH = 256.0
"""How much larger than its vector's scale what is missing in a slot may be: kernels add it in units of the scale."""

_KEY_FIELDS = BLOCK_PAIRS * PAGE_TOKENS // 16
_VALUE_COLUMNS = 16
_VALUE_FIELDS = PAGE_TOKENS // 2


@dataclass(frozen=True)
class NuqTables:
    """What each head of each layer is quantized with. L layers, H kv heads, D channels; channel j < D / 2 and channel
    j + D / 2, which rotation mixes, are pair j.

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

    def check(self, num_layers: int, num_heads: int, head_dim: int) -> None:
        """Raises ConfigError unless the tables are those of a model of this shape, and sound."""
        lead = (num_layers, num_heads)
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "key_order": ((head_dim // 2,), torch.uint8),
            "key_bits": ((head_dim // (2 * BLOCK_PAIRS),), torch.uint8),
            "key_edges": ((head_dim, NUM_BOOK - 1), torch.float32),
            "key_books": ((head_dim, NUM_BOOK), torch.float32),
            "key_weight": ((head_dim,), torch.float32),
            "key_slots": ((), torch.uint8),
            "value_bits": ((), torch.uint8),
            "value_edges": ((NUM_BOOK - 1,), torch.float32),
            "value_books": ((NUM_BOOK,), torch.float32),
            "value_slots": ((), torch.uint8),
        }
        for name, (rest, dtype) in sizes.items():
            found = getattr(self, name)
            if found.shape != (*lead, *rest) or found.dtype != dtype:
                raise ConfigError(
                    f"the calibration's {name} is {found.dtype} {list(found.shape)}, and a model with {num_layers}"
                    f" layers, {num_heads} kv heads and head size {head_dim} needs {dtype} {[*lead, *rest]}"
                )
        pairs = torch.arange(head_dim // 2, dtype=torch.uint8)
        sound = {
            "key_order": bool((self.key_order.sort(-1).values == pairs).all()),
            "key_bits": bool((self.key_bits <= MAX_BITS).all()),
            "key_weight": bool((self.key_weight.isfinite() & (self.key_weight >= 0)).all()),
            "key_slots": bool((self.key_slots <= MAX_SLOTS).all()),
            "value_bits": bool(((self.value_bits >= 1) & (self.value_bits <= MAX_BITS)).all()),
            "value_slots": bool((self.value_slots <= MAX_SLOTS).all()),
            "key_books": bool(self.key_books.isfinite().all()),
            "value_books": bool(self.value_books.isfinite().all()),
            "key_edges": _ascends(self.key_edges),
            "value_edges": _ascends(self.value_edges),
        }
        for name, is_sound in sound.items():
            if not is_sound:
                raise ConfigError(f"the calibration's {name} holds what cannot be; calibrate again")


def _ascends(edges: torch.Tensor) -> bool:
    return bool((edges[..., 1:] >= edges[..., :-1]).all())


@dataclass(frozen=True)
class NuqLayout:
    """Where things lie in the pages of one head, in bytes from a page's start."""

    key_slots: int
    values: int
    ranges: int
    value_slots: int
    end: int

    @property
    def page_bytes(self) -> int:
        """The end, on the next multiple of 128."""
        return -(-self.end // UNIT) * UNIT


def layout_of(head_dim: int, key_bits: int, key_slots: int, value_bits: int, value_slots: int) -> NuqLayout:
    """The layout of a head; key_bits is the sum over its blocks."""
    at_slots = key_bits * LINE_BYTES
    values = at_slots + key_slots * SLOT_BYTES
    ranges = values + head_dim // _VALUE_COLUMNS * num_lines(_VALUE_FIELDS, value_bits) * LINE_BYTES
    at_value_slots = ranges + 4 * PAGE_TOKENS
    return NuqLayout(at_slots, values, ranges, at_value_slots, at_value_slots + value_slots * SLOT_BYTES)


def check_head_dim(name: str, head_dim: int) -> None:
    """Raises ConfigError for a head size that the codec called `name` cannot store."""
    if head_dim % 16 or head_dim > 256:
        raise ConfigError(
            f"{name} stores heads whose size is a multiple of 16 up to 256, not {head_dim}; use cache.codec dense"
        )


def nominal_page_bytes(head_dim: int, bits: int, slots: int) -> int:
    """Bytes of a page of which every key and value has so many bits and slots: what calibration spends on average."""
    return layout_of(head_dim, head_dim // (2 * BLOCK_PAIRS) * bits, slots, bits, slots).page_bytes


class NuqCodec:
    """The codec of one calibration.

    name        of the codec, as in `cache.codec`
    tables      see NuqTables; value books are rounded to bfloat16
    page_bytes  int32 [L, H]: heads may differ in bits and slots
    Raises ConfigError for a head size that is no multiple of 16.
    """

    kernel_id = KERNEL_ID

    def __init__(self, name: str, tables: NuqTables) -> None:
        num_layers, num_heads, self.head_dim = tables.key_weight.shape
        check_head_dim(name, self.head_dim)
        tables.check(num_layers, num_heads, self.head_dim)
        # As kernels look them up: a centroid rounded on read is off by the same for all its tokens, and a mean over
        # many keeps that, 1.7 % of attention over 500 random tokens at 2 bits against 0.4 %. Scores average it out, and
        # keys far from zero want the digits.
        tables = replace(tables, value_books=tables.value_books.bfloat16().float())
        self.name = name
        self.tables = tables
        bits = tables.key_bits.sum(-1, dtype=torch.int64)
        self.layouts = [
            [
                layout_of(
                    self.head_dim,
                    int(bits[layer, head]),
                    int(tables.key_slots[layer, head]),
                    int(tables.value_bits[layer, head]),
                    int(tables.value_slots[layer, head]),
                )
                for head in range(num_heads)
            ]
            for layer in range(num_layers)
        ]
        self.page_bytes: NDArray[np.int32] = np.array(
            [[layout.page_bytes for layout in heads] for heads in self.layouts], np.int32
        )
        self.slots = self._slot_map()

    def encode(self, layer: int, head: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keys, not rotated, and values, [n, P, D] each, as page images, uint8 [n, page_bytes[layer, head]].

        Computed where the tables are, on the CPU: the same bits for every device.
        """
        tables, n, device = self.tables, len(k), k.device
        layout = self.layouts[layer][head]
        k, v = k.float().cpu(), v.float().cpu()
        book = tables.key_books[layer, head]
        codes = _codes(k, tables.key_edges[layer, head])
        missing = k - book.expand(n, PAGE_TOKENS, -1, -1).gather(-1, codes[..., None])[..., 0]
        cost = missing * missing * tables.key_weight[layer, head]
        key_slots = _fill_slots(missing, cost, int(tables.key_slots[layer, head]))
        value_codes, s, z, value_slots = self._encode_values(layer, head, v)
        page = torch.zeros(n, layout.page_bytes, dtype=torch.uint8, device=k.device)
        page[:, : layout.key_slots] = self._pack_keys(layer, head, codes)
        page[:, layout.key_slots : layout.values] = key_slots
        page[:, layout.values : layout.ranges] = self._pack_values(layer, head, value_codes)
        page[:, layout.ranges : layout.value_slots] = torch.cat((s, z), 1).view(torch.uint8)
        page[:, layout.value_slots : layout.end] = value_slots
        return page.to(device)

    def decode(self, layer: int, head: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page images uint8 [n, page_bytes] as keys, not rotated, and values, float32 [n, P, D] each."""
        tables, n, device = self.tables, len(pages), pages.device
        layout = self.layouts[layer][head]
        pages = pages.cpu()
        codes = self._unpack_keys(layer, head, pages[:, : layout.key_slots])
        k = tables.key_books[layer, head].expand(n, PAGE_TOKENS, -1, -1).gather(-1, codes[..., None])[..., 0]
        k = _add_slots(k, pages[:, layout.key_slots : layout.values])
        codes = self._unpack_values(layer, head, pages[:, layout.values : layout.ranges])
        ranges = pages[:, layout.ranges : layout.value_slots].contiguous().view(torch.float16).float()
        s, z = ranges[:, :PAGE_TOKENS, None], ranges[:, PAGE_TOKENS:, None]
        v = tables.value_books[layer, head][codes] * s + z
        v = _add_slots(v, pages[:, layout.value_slots : layout.end])
        return k.to(device), v.to(device)

    def move(self, arena: torch.Tensor, moves: Moves) -> None:
        """Overwrites slots of pages with other ones; see Codec."""
        self.slots.move(arena, moves)

    def _slot_map(self) -> SlotMap:
        found: dict[tuple[Part, ...], int] = {}
        of = np.zeros(self.page_bytes.shape, np.int32)
        for layer, head in np.ndindex(*of.shape):
            of[layer, head] = found.setdefault(tuple(self._parts(layer, head)), len(found))
        return SlotMap(list(found), of)

    def _parts(self, layer: int, head: int) -> Iterator[Part]:
        """Where slots have their bits in the pages of a head."""
        layout, start = self.layouts[layer][head], 0
        for bits in self.tables.key_bits[layer, head].tolist():
            for width, _ in parts(bits):
                for _ in range(num_lines(_KEY_FIELDS, width)):
                    yield KEY_LINE, start, width
                    start += LINE_BYTES
        start = layout.values
        for _ in range(self.head_dim // _VALUE_COLUMNS):
            for width, _ in parts(int(self.tables.value_bits[layer, head])):
                yield VALUE_LINES, start, width
                start += num_lines(_VALUE_FIELDS, width) * LINE_BYTES
        for start in (layout.ranges, layout.ranges + 2 * PAGE_TOKENS):
            yield RUN, start, 2
        for first, end in ((layout.key_slots, layout.values), (layout.value_slots, layout.end)):
            for start in range(first, end, SLOT_BYTES):
                yield RUN, start, 1
                yield RUN, start + PAGE_TOKENS, 2

    def _encode_values(
        self, layer: int, head: int, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes [n, P, D], s and z float16 [n, P], and the slots' bytes. Sums run over the channels in order, so that
        kernels can give the same bits.
        """
        tables = self.tables
        count = int(tables.value_slots[layer, head])
        book, edges = tables.value_books[layer, head], tables.value_edges[layer, head]
        inner = torch.ones_like(v, dtype=torch.bool)
        mean = _ordered_sum(v) / v.shape[-1]
        for _ in range(count):
            farthest = ((v - mean[..., None]).abs().masked_fill(~inner, -1)).argmax(-1, keepdim=True)
            inner.scatter_(-1, farthest, False)
        high = v.masked_fill(~inner, -torch.inf).amax(-1)
        low = v.masked_fill(~inner, torch.inf).amin(-1)
        middle = (high + low) * 0.5
        s, z = (high - low) * 0.5, middle
        x = (v - middle[..., None]) * inner
        total = _ordered_sum(x)
        number = float(v.shape[-1] - count)
        for _ in range(FIT_ROUNDS):
            c = book[_codes(v, edges * s[..., None, None] + z[..., None, None])] * inner
            sum_c, sum_cc, sum_cx = _ordered_sum(c), _ordered_sum(c * c), _ordered_sum(c * x)
            spread = sum_cc - sum_c * sum_c / number
            slope = sum_cx - sum_c * total / number
            fits = (spread > 0) & (slope > 0)
            s = torch.where(fits, slope / torch.where(fits, spread, 1.0), s)
            z = torch.where(fits, middle + (total - s * sum_c) / number, z)
        beyond = ((v - z[..., None]).abs() * ~inner).amax(-1)
        s = torch.maximum(s, beyond * (1.0 / RESIDUAL_REACH))
        # Never minus zero: which of two zeros is the larger is nobody's promise.
        s, z = to_half(s + 0.0), to_half(z + 0.0)
        wide_s, wide_z = s.float()[..., None], z.float()[..., None]
        codes = _codes(v, edges * wide_s[..., None] + wide_z[..., None])
        missing = v - (book[codes] * wide_s + wide_z)
        slots = _fill_slots(missing, (v - mean[..., None]).abs(), count)
        return codes, s, z, slots

    def _pack_keys(self, layer: int, head: int, codes: torch.Tensor) -> torch.Tensor:
        """Codes [n, P, D] as lines. Lane 2t + i of a field: slot t of a quarter of the page, half i of the pair."""
        n, half = len(codes), self.head_dim // 2
        order = self.tables.key_order[layer, head].long()
        quarters = codes.view(n, 4, 16, 2, half)[..., order]  # quarter, t, i, pair
        fields = quarters.permute(0, 4, 1, 2, 3).reshape(n, half // BLOCK_PAIRS, _KEY_FIELDS, LANES)
        widths = self.tables.key_bits[layer, head].tolist()
        return torch.cat([pack(fields[:, block], bits) for block, bits in enumerate(widths)], 1)

    def _unpack_keys(self, layer: int, head: int, lines: torch.Tensor) -> torch.Tensor:
        n, half = len(lines), self.head_dim // 2
        order = self.tables.key_order[layer, head].long()
        blocks, start = [], 0
        for bits in self.tables.key_bits[layer, head].tolist():
            blocks.append(unpack(lines[:, start : start + bits * LINE_BYTES], _KEY_FIELDS, bits))
            start += bits * LINE_BYTES
        quarters = torch.stack(blocks, 1).view(n, half, 4, 16, 2).permute(0, 2, 3, 4, 1)
        codes = torch.empty_like(quarters)
        codes[..., order] = quarters
        return codes.reshape(n, PAGE_TOKENS, self.head_dim)

    def _pack_values(self, layer: int, head: int, codes: torch.Tensor) -> torch.Tensor:
        """Codes [n, P, D] as lines. Lane 2c + i of field f: column c of sixteen, slot 2f + i."""
        n, groups = len(codes), self.head_dim // _VALUE_COLUMNS
        fields = codes.view(n, _VALUE_FIELDS, 2, groups, _VALUE_COLUMNS).permute(0, 3, 1, 4, 2)
        bits = int(self.tables.value_bits[layer, head])
        return pack(fields.reshape(n * groups, _VALUE_FIELDS, LANES), bits).view(n, -1)

    def _unpack_values(self, layer: int, head: int, lines: torch.Tensor) -> torch.Tensor:
        n, groups = len(lines), self.head_dim // _VALUE_COLUMNS
        bits = int(self.tables.value_bits[layer, head])
        fields = unpack(lines.reshape(n * groups, -1), _VALUE_FIELDS, bits)
        codes = fields.view(n, groups, _VALUE_FIELDS, _VALUE_COLUMNS, 2).permute(0, 2, 4, 1, 3)
        return codes.reshape(n, PAGE_TOKENS, self.head_dim)


def _codes(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """How many edges each x exceeds, int64; edges [..., 31], of which +inf * 0 never counts."""
    return (x[..., None] > edges).sum(-1)


def _ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, term after term."""
    total = torch.zeros_like(x[..., 0])
    for index in range(x.shape[-1]):
        total = total + x[..., index]
    return total


def _fill_slots(missing: torch.Tensor, cost: torch.Tensor, count: int) -> torch.Tensor:
    """The bytes [n, count * 192] of the slots of vectors [n, P, D]: for each, all channels, then what is missing
    there. The channel with the largest cost comes first, of equals the first channel.
    """
    n = len(missing)
    taken = torch.zeros_like(missing, dtype=torch.bool)
    found = [missing.new_empty(n, 0, dtype=torch.uint8)]
    for _ in range(count):
        channel = cost.masked_fill(taken, -1).argmax(-1, keepdim=True)
        taken.scatter_(-1, channel, True)
        found.append(channel[..., 0].to(torch.uint8))
        found.append(to_half(missing.gather(-1, channel)[..., 0]).view(torch.uint8).view(n, -1))
    return torch.cat(found, 1)


def _add_slots(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Adds to vectors [n, P, D] what their slots hold."""
    for start in range(0, slots.shape[1], SLOT_BYTES):
        channel = slots[:, start : start + PAGE_TOKENS].long()
        missing = slots[:, start + PAGE_TOKENS : start + SLOT_BYTES].contiguous().view(torch.float16).float()
        x = x.scatter_add(-1, channel[..., None], missing[..., None])
    return x
