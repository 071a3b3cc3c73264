"""Writes keys and values of a step's rows to their slots of dense pages, in one launch for all rows and heads.

    page(row)[slot] = rotate(k, position),   page(row)[P + slot] = v,      slot = position mod P

If sealed chunks are encoded, keys are not rotated, and a chunk that the step fills from its first slot on is staged:
its pages are outside the arena. Staged chunks have the ids ~0, ~1 and so on.

Decode steps do this inside `attend`. Defined by attention.reference.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from quire.attention.kernels.attend import load_rotated


@triton.jit
def dense_page(
    entry,         # table entry of chunk 0
    chunk,         # i64, of any shape; mask has the same
    head, staged, mask,
    LANES: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The page ids of chunks, stored or staged, in one lane, i64."""
    stored = tl.load(entry + chunk * LANES, mask=mask & (chunk >= 0), other=0).to(tl.int64)
    return tl.where(chunk >= 0, stored, staged + ((-1 - chunk) * H + head) * PAGE)


@triton.jit(do_not_specialize=["first_lane", "num_rows", "staged"])
def write(
    k, v,          # [R, H, D], rows k_stride and v_stride apart
    arena,         # the arena as page elements; a page starts at id * UNIT
    table,         # i32 [C, LANES] page ids
    cos, sin,      # f32 [positions, D / 2]; ROTATE only
    positions,     # i32 [R]
    write_chunk,   # i32 [R]
    staged,        # page id of the first staged page
    num_rows, first_lane, k_stride, v_stride,
    LANES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    DP: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, ROTATE: tl.constexpr,
    PAGE: tl.constexpr,    # units of a dense page
):  # fmt: skip
    """Grid [H, ceil(R / ROWS)]."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < num_rows
    position = tl.load(positions + row, mask=valid, other=0)
    chunk = tl.load(write_chunk + row, mask=valid, other=0).to(tl.int64)
    page = dense_page(table + first_lane + head, chunk, head, staged, valid, LANES, H, PAGE)
    d = tl.arange(0, DP)
    slot = arena + (page * UNIT + (position % P) * D)[:, None] + d[None, :]
    mask = valid[:, None] & (d < D)[None, :]
    key = load_rotated(k, row * k_stride + head * D, valid, cos, sin, position, D, DP, ROTATE)
    tl.store(slot, key.to(k.dtype.element_ty), mask=mask)
    value = tl.load(v + (row * v_stride + head * D)[:, None] + d[None, :], mask=mask, other=0.0)
    tl.store(slot + P * D, value, mask=mask)
