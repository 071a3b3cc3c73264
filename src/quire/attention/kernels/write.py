"""Keys and values of a step's rows into their slots, keys rotated; one launch for all rows and heads.

    page(row)[slot] = rotate(k, position),   page(row)[P + slot] = v,      slot = position mod P

Decode steps do this inside `attend`. Defined by attention.reference.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from quire.attention.kernels.attend import load_rotated


@triton.jit(do_not_specialize=["layer", "num_rows"])
def write(
    k, v,          # [R, H, D], rows k_stride and v_stride apart
    arena,         # the arena as page elements; a page starts at id * UNIT
    table,         # i32 [C, L, H] page ids
    cos, sin,      # f32 [positions, D / 2]; ROTATE only
    positions,     # i32 [R]
    write_chunk,   # i32 [R]
    num_rows, layer, k_stride, v_stride,
    L: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    DP: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Grid [H, ceil(R / ROWS)]."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < num_rows
    position = tl.load(positions + row, mask=valid, other=0)
    chunk = tl.load(write_chunk + row, mask=valid, other=0).to(tl.int64)
    page = tl.load(table + (chunk * L + layer) * H + head, mask=valid, other=0).to(tl.int64)
    d = tl.arange(0, DP)
    slot = arena + (page * UNIT + (position % P) * D)[:, None] + d[None, :]
    mask = valid[:, None] & (d < D)[None, :]
    key = load_rotated(k, row * k_stride + head * D, valid, cos, sin, position, D, DP, ROTATE)
    tl.store(slot, key.to(k.dtype.element_ty), mask=mask)
    value = tl.load(v + (row * v_stride + head * D)[:, None] + d[None, :], mask=mask, other=0.0)
    tl.store(slot + P * D, value, mask=mask)
