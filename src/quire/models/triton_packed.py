"""Matrices in quantized blocks on a GPU: repacked once, and decoded inside the product.

    y[r, n] = sum over groups g of  s[n, g] * (sum over k in g of x[r, k] c[n, k])
                                  + m[n, g] * (sum over k in g of x[r, k])

Codes c are small integers, exact in bfloat16, and s and m are the file's, so no weight is ever rounded. Raw blocks of
18, 22, 34 or 210 bytes are not aligned. So numbers are repacked into planes, one per kind, which are read 16 bytes at a
time. A unit is 32 inputs, a panel 4 outputs, and input 8 p + 2 j + e of a unit is code 2 p + e of lane j:

    codes   int32 [N / 4, units, 4 outputs, 4 lanes]     code i of a lane in bits 4 i; the lower four of 5 and 6 bits
            int32 [N / 4, units, 2, 4 outputs, 4 lanes]  codes of 8 bits, four of a lane in the first word
    upper   uint8 or int16 [N / 4, units, 4 outputs, 4 lanes]   bit, or two, beyond the lower four
    d, m    float16 [groups, N]; of superblocks of 256 inputs [superblocks, N]
    scales, minima  int8, uint8 [groups, N]: of superblocks; s = d * scale, m = -m * minimum

A lane holds the part of 32 inputs that one thread of the tensor cores' 16-bit product needs. Planes with one value per
output store the outputs side by side, so that neighbouring threads read neighbouring bytes.

Defined by `layers.BlockLinear` and `quants.plain`; tests/kernels/triton_interpreter/test_packed.py compares them.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.models.quants import FORMATS, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.quants import BlockFormat, Blocks

UNIT, PANEL, SUPERBLOCK = 32, 4, 256

PADDED_OUTPUTS = 16
"""The number of outputs in planes is a multiple of this, the outputs of a program of the one-row product."""

PACKED_ROWS = 4096
"""Number of rows unpacked at once, to one byte per code."""

VECTOR_PANELS, VECTOR_UNITS, VECTOR_STAGES = 4, 32, 4
"""Tile of the one-row product, 16 outputs by 1,024 inputs, and the number in flight: 9 KiB each at 4.5 bits."""

ROWS_UNITS = 32
"""Units per program of `_rows`."""


@triton.jit
def _code(word, upper, i, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """Code i of the words of lanes, less the offset, as float32. Codes of 8 bits: byte i of the word."""
    if BITS == 8:
        return ((word << (24 - 8 * i)) >> 24).to(tl.float32)
    # Puts the code into the upper mantissa bits of 2^BITS + code: two integer operations and no conversion.
    bits = ((word >> (4 * i)) & 15) << (23 - BITS)
    if BITS > 4:
        EXTRA: tl.constexpr = BITS - 4
        bits |= ((upper >> (EXTRA * i)) & ((1 << EXTRA) - 1)) << (27 - BITS)
    power: tl.constexpr = (127 + BITS) << 23
    return (bits | power).to(tl.float32, bitcast=True) - ((1 << BITS) + OFFSET)


@triton.jit
def _codes(
    codes, upper, n, unit, mask, half, units,
    BITS: tl.constexpr, OFFSET: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Codes of the unit of each of a tile of outputs, or of one unit of many: n, unit, mask broadcast to [T].

    HALF     whether only inputs 16 half to 16 half + 15
    returns  float32 [T, 16 or 32]
    """
    j = tl.arange(0, 4)[None, :]
    block = n.to(tl.int64) // 4 * units + unit
    e = tl.arange(0, 2)
    PAIRS: tl.constexpr = 2 if HALF else 4
    if BITS == 8:
        words = tl.arange(0, 2)
        row = (block * 2)[:, None, None] * 16 + (n % 4 * 4)[:, None, None] + j[:, None, :]
        word = tl.load(codes + row + 16 * words[None, :, None], mask=mask[:, None, None], other=0)
        i = 2 * tl.arange(0, 2)[None, None, :, None, None] + e[None, None, None, None, :]
        found = _code(word[:, :, None, :, None], 0, i, BITS, OFFSET)
    else:
        at = (block * 16 + n % 4 * 4)[:, None] + j
        word = tl.load(codes + at, mask=mask[:, None], other=0)[:, None, :, None]
        high = 0
        if BITS > 4:
            high = tl.load(upper + at, mask=mask[:, None], other=0).to(tl.int32)[:, None, :, None]
        i = 2 * tl.arange(0, PAIRS)[None, :, None, None] + e[None, None, None, :]
        if HALF:
            i += 4 * half
        found = _code(word, high, i, BITS, OFFSET)
    return tl.reshape(found, (found.shape[0], 8 * PAIRS))


@triton.jit
def _scale(
    d, scales, n, group, mask, stride,
    GROUP: tl.constexpr, SUPER: tl.constexpr,
):  # fmt: skip
    """float32 scale of a group of an output: d, times the group's byte in a superblock. Also for minima."""
    n = n.to(tl.int64)
    if SUPER:
        found = tl.load(d + (group // (256 // GROUP)) * stride + n, mask=mask, other=0.0).to(tl.float32)
        return found * tl.load(scales + group * stride + n, mask=mask, other=0).to(tl.float32)
    return tl.load(d + group * stride + n, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _vector(
    x,              # [K]
    codes, upper, d, m, scales, minima,
    bias,           # [N] or None
    out,            # [N]
    N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMA: tl.constexpr, SUPER: tl.constexpr,
    PANELS: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(N / (4 PANELS))]
    ALL: tl.constexpr = (K + 31) // 32
    panel = tl.program_id(0) * PANELS + tl.arange(0, PANELS)
    o = tl.arange(0, 4)
    j = tl.arange(0, 4)
    e = tl.arange(0, 2)
    n = panel[:, None] * 4 + o[None, :]
    row = panel.to(tl.int64)[:, None, None, None] * ALL
    lane = 4 * o[None, None, :, None] + j[None, None, None, :]
    n_of_tile = n[:, None, :]
    acc = tl.zeros((PANELS, UNITS, 4, 4), tl.float32)
    for first in tl.range(0, ALL, UNITS, num_stages=STAGES):
        unit = first + tl.arange(0, UNITS)
        in_tile = (panel * 4 < STRIDE)[:, None, None] & (unit < ALL)[None, :, None]
        in_words = in_tile[:, :, :, None]
        block = row + unit[None, :, None, None]
        if BITS == 8:
            word = tl.load(codes + block * 32 + lane, mask=in_words, other=0, eviction_policy="evict_first")
            next_word = tl.load(codes + block * 32 + 16 + lane, mask=in_words, other=0, eviction_policy="evict_first")
        else:
            word = tl.load(codes + block * 16 + lane, mask=in_words, other=0, eviction_policy="evict_first")
            next_word = word
        high = 0
        if BITS == 5 or BITS == 6:
            high = tl.load(upper + block * 16 + lane, mask=in_words, other=0).to(tl.int32)
        partial = tl.zeros((PANELS, UNITS, 4, 4), tl.float32)
        sums = tl.zeros((UNITS, 4), tl.float32)
        for p in tl.static_range(4):
            k = unit[:, None, None] * 32 + 8 * p + 2 * j[None, :, None] + e[None, None, :]
            even, odd = tl.split(tl.load(x + k, mask=k < K, other=0.0, eviction_policy="evict_last").to(tl.float32))
            if BITS == 8:
                of = word if p < 2 else next_word
                partial += _code(of, 0, p % 2 * 2, BITS, OFFSET) * even[None, :, None, :]
                partial += _code(of, 0, p % 2 * 2 + 1, BITS, OFFSET) * odd[None, :, None, :]
            else:
                partial += _code(word, high, 2 * p, BITS, OFFSET) * even[None, :, None, :]
                partial += _code(word, high, 2 * p + 1, BITS, OFFSET) * odd[None, :, None, :]
            if MINIMA:
                sums += even + odd
            if GROUP == 16 and p % 2 == 1:
                group = unit[None, :, None] * 2 + p // 2
                acc += _scale(d, scales, n_of_tile, group, in_tile, STRIDE, GROUP, SUPER)[:, :, :, None] * partial
                partial = tl.zeros((PANELS, UNITS, 4, 4), tl.float32)
        if GROUP != 16:
            group = unit[None, :, None] // (GROUP // 32)
            acc += _scale(d, scales, n_of_tile, group, in_tile, STRIDE, GROUP, SUPER)[:, :, :, None] * partial
            if MINIMA:
                low = _scale(m, minima, n_of_tile, group, in_tile, STRIDE, GROUP, SUPER)[:, :, :, None]
                acc += (-low if SUPER else low) * sums[None, :, None, :]
    y = tl.sum(tl.sum(acc, 3), 1)
    if BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["num_rows"])
def _sums(
    x,              # [R, K], rows x_stride apart
    sums,           # f32 [units, R]
    num_rows, x_stride,
    K: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    # grid: [R, ceil(units / UNITS)]
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    k = unit[:, None] * 32 + tl.arange(0, 32)[None, :]
    found = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(sums + unit.to(tl.int64) * num_rows + row, tl.sum(found, 1), mask=unit * 32 < K)


@triton.jit(do_not_specialize=["num_rows"])
def _tiles(
    x,              # [R, K], rows x_stride apart
    codes, upper, d, m, scales, minima,
    sums,           # f32 [units, R] of x, or None
    bias,           # [N] or None
    out,            # [R, N], rows out_stride apart
    num_rows, x_stride, out_stride,
    N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMA: tl.constexpr, SUPER: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # grid: [ceil(R / ROWS), ceil(N / OUTPUTS)]: programs side by side read the same weights
    ALL: tl.constexpr = (K + 31) // 32
    STEP: tl.constexpr = 16 if GROUP == 16 else 32
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_r = r < num_rows
    in_n = n < STRIDE
    rows = x + r.to(tl.int64)[None, :] * x_stride
    # The outputs are the product's rows: its first operand may come from registers, where codes are decoded.
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in tl.range(0, ALL, UNITS, num_stages=STAGES):
        partial = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for index in tl.static_range(UNITS):
            unit = first + index
            in_unit = in_n & (unit < ALL)
            for half in tl.static_range(32 // STEP):
                c = _codes(codes, upper, n, unit, in_unit, half, ALL, BITS, OFFSET, STEP == 16)
                k = unit * 32 + half * STEP + tl.arange(0, STEP)
                values = tl.load(rows + k[:, None], mask=(k < K)[:, None] & in_r[None, :], other=0.0)
                c = c.to(values.dtype)
                if GROUP == 64:
                    partial = tl.dot(c, values, partial, input_precision="ieee")
                else:
                    product = tl.dot(c, values, input_precision="ieee")
                    group = unit * (32 // STEP) + half
                    acc += _scale(d, scales, n, group, in_unit, STRIDE, GROUP, SUPER)[:, None] * product
            if MINIMA:
                low = _scale(m, minima, n, unit * 32 // GROUP, in_unit, STRIDE, GROUP, SUPER)
                total = tl.load(sums + unit.to(tl.int64) * num_rows + r, mask=in_r & (unit < ALL), other=0.0)
                acc += (-low if SUPER else low)[:, None] * total[None, :]
            if GROUP == 64 and index % 2 == 1:
                in_group = in_n & (unit - 1 < ALL)
                acc += _scale(d, scales, n, unit // 2, in_group, STRIDE, GROUP, SUPER)[:, None] * partial
                partial = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    target = out + r.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & in_r[None, :])


@triton.jit
def _rows(
    index,          # i64 [R], below N
    codes, upper, d, m, scales, minima,
    out,            # [R, K], dense
    K: tl.constexpr, STRIDE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, MINIMA: tl.constexpr, SUPER: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    # grid: [R, ceil(units / UNITS)]
    ALL: tl.constexpr = (K + 31) // 32
    STEP: tl.constexpr = 16 if GROUP == 16 else 32
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(index + row)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    mask = unit < ALL
    for half in tl.static_range(32 // STEP):
        c = _codes(codes, upper, n + tl.zeros_like(unit), unit, mask, half, ALL, BITS, OFFSET, STEP == 16)
        group = unit // (GROUP // 32) if GROUP > 16 else unit * 2 + half
        value = c * _scale(d, scales, n, group, mask, STRIDE, GROUP, SUPER)[:, None]
        if MINIMA:
            low = _scale(m, minima, n, group, mask, STRIDE, GROUP, SUPER)[:, None]
            value += -low if SUPER else low
        k = unit[:, None] * 32 + half * STEP + tl.arange(0, STEP)[None, :]
        tl.store(out + row * K + k, value.to(out.dtype.element_ty), mask=k < K)


@dataclass(frozen=True)
class Tile:
    """Launch parameters of `_tiles`: outputs and rows of a program, units of a step, pipeline stages, warps."""

    outputs: int
    rows: int
    units: int
    stages: int
    warps: int


def tile_of(rows: int, dtype: torch.dtype) -> Tile:
    """The launch for a number of rows."""
    if dtype == torch.float32:
        return Tile(32, 16 if rows <= 16 else 32, 2, 2, 4)
    if rows <= 16:
        return Tile(32, 16, 4, 4, 2)
    if rows <= 64:
        return Tile(64, 32 if rows <= 32 else 64, 2, 4, 4)
    return Tile(128, 64, 2, 3, 8)


class PackedMatrix:
    """A matrix [N, K] in planes; see above. It is the only copy; the blocks may be dropped."""

    __slots__ = ("_constants", "_planes", "format", "shape")

    def __init__(self, blocks: Blocks) -> None:
        self.format = FORMATS[blocks.kind]
        self.shape = blocks.shape
        n, k = self.shape
        padded = -(-n // PADDED_OUTPUTS) * PADDED_OUTPUTS
        self._planes = _planes(blocks, self.format, padded)
        of = self.format
        self._constants = {
            "K": k, "STRIDE": padded,
            "BITS": of.bits, "GROUP": of.group, "OFFSET": of.offset, "MINIMA": of.minima, "SUPER": of.superblocks,
        }  # fmt: skip

    @property
    def tensors(self) -> list[Tensor]:
        """The planes."""
        return [plane for plane in self._planes if plane is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.tensors)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor | None) -> None:
        """Writes x @ W^T + bias.

        x     [R, K], rows dense
        out   [R, N], rows dense: may be a slice of columns of a larger tensor
        sums  `unit_sums` of x, needed for several rows and minima
        """
        (n, k), rows = self.shape, len(x)
        assert x.shape[1] == k and x.stride(1) == 1 and out.shape == (rows, n) and out.stride(1) == 1, (
            f"{tuple(x.shape)} to {tuple(out.shape)} for a matrix [{n}, {k}]"
        )
        if rows == 1:
            _vector[(triton.cdiv(n, PANEL * VECTOR_PANELS),)](
                x, *self._planes, bias, out,
                N=n, **self._constants, PANELS=VECTOR_PANELS, UNITS=VECTOR_UNITS, STAGES=VECTOR_STAGES,
                BIAS=bias is not None, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
            return
        tile = tile_of(rows, x.dtype)
        _tiles[(triton.cdiv(rows, tile.rows), triton.cdiv(n, tile.outputs))](
            x, *self._planes, sums if self.format.minima else None, bias, out, rows, x.stride(0), out.stride(0),
            N=n, **self._constants, OUTPUTS=tile.outputs, ROWS=tile.rows, UNITS=tile.units, STAGES=tile.stages,
            BIAS=bias is not None, num_warps=tile.warps, enable_fp_fusion=True,
        )  # fmt: skip

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix: index int64 [R], below N -> `dtype` [R, K], each element rounded once."""
        k = self.shape[1]
        assert index.dtype == torch.int64 and index.is_contiguous(), f"{index.dtype}, strides {index.stride()}"
        out = torch.empty(len(index), k, dtype=dtype, device=index.device)
        if len(index):
            _rows[(len(index), triton.cdiv(k, UNIT * ROWS_UNITS))](
                index, *self._planes, out, **self._constants, UNITS=ROWS_UNITS, num_warps=4, enable_fp_fusion=True
            )
        return out


def unit_sums(x: Tensor) -> Tensor:
    """Sums of the inputs of each unit: x [R, K] -> float32 [units, R]."""
    rows, k = x.shape
    units = triton.cdiv(k, UNIT)
    out = torch.empty(units, rows, dtype=torch.float32, device=x.device)
    _sums[(rows, triton.cdiv(units, ROWS_UNITS))](x, out, rows, x.stride(0), K=k, UNITS=ROWS_UNITS, num_warps=4)
    return out


def _planes(blocks: Blocks, of: BlockFormat, padded: int) -> tuple[Tensor | None, ...]:
    """codes, upper, d, m, scales, minima."""
    n, k = blocks.shape
    device, units = blocks.raw.device, -(-k // UNIT)
    words = 2 if of.bits == 8 else 1
    codes = torch.zeros(padded // PANEL, units, words, PANEL, 4, dtype=torch.int32, device=device)
    upper = None
    if of.bits in (5, 6):
        wide = torch.uint8 if of.bits == 5 else torch.int16
        upper = torch.zeros(padded // PANEL, units, PANEL, 4, dtype=wide, device=device)
    halves: list[list[Tensor | None]] = []
    small: list[list[Tensor | None]] = []
    for first in range(0, n, PACKED_ROWS):
        raw = blocks.raw[first : first + PACKED_ROWS]
        found, *numbers = unpack(raw, blocks.kind)
        halves.append(numbers[:2])
        small.append(numbers[2:])
        found = torch.nn.functional.pad(found[:, : units * UNIT], (0, 0, 0, -len(found) % PANEL))
        panels = slice(first // PANEL, (first + len(found)) // PANEL)
        lanes = found.view(-1, units, 4, 4, 2)  # [outputs, units, p, j, e]
        codes[panels] = _words(lanes, of.bits).view(-1, PANEL, units, words, 4).permute(0, 2, 3, 1, 4)
        if upper is not None:
            upper[panels] = _upper(lanes >> 4, of.bits - 4).view(-1, PANEL, units, 4).transpose(1, 2)
    groups, block = -(-k // of.group), SUPERBLOCK if of.superblocks else of.group
    d, m = (_by_output([each[i] for each in halves], -(-k // block), padded) for i in range(2))
    scales, minima = (_by_output([each[i] for each in small], groups, padded) for i in range(2))
    return codes, upper, d, m, scales, minima


def _words(lanes: Tensor, bits: int) -> Tensor:
    """uint8 [N, units, p, j, e] -> int32 [N, units, 4], of 8 bits [N, units, 8]."""
    if bits == 8:
        found: Tensor = lanes.unflatten(2, (2, 2)).transpose(3, 4)  # [N, units, half of p, j, rest of p, e]
    else:
        low = lanes & 15
        found = (low[..., 0] | (low[..., 1] << 4)).transpose(2, 3)  # [N, units, j, p]
    return found.contiguous().flatten(2).view(torch.int32)


def _upper(lanes: Tensor, bits: int) -> Tensor:
    """uint8 [N, units, p, j, e], below 2^bits -> [N, units, j], code 2 p + e in bits (2 p + e) * bits."""
    per_byte = 8 // bits
    codes = lanes.permute(0, 1, 3, 2, 4).flatten(3).unflatten(3, (-1, per_byte))
    packed: Tensor = codes[..., 0].clone()
    for place in range(1, per_byte):
        packed |= codes[..., place] << (bits * place)
    return packed.view(torch.uint8 if bits == 1 else torch.int16).squeeze(-1)


def _by_output(parts: list[Tensor | None], count: int, padded: int) -> Tensor | None:
    """Parts [n, at least count], stacked -> [count, N]."""
    found = [part[:, :count] for part in parts if part is not None]
    if not found:
        return None
    whole = torch.cat(found)
    out = torch.zeros(count, padded, dtype=whole.dtype, device=whole.device)
    out[:, : len(whole)] = whole.t()
    return out
