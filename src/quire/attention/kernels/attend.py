"""Partial attention of query rows over the pages of one sequence, for prefill and decode; splits merge inside the same
launch.

    o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j        over the stored positions j with i - window < j <= i

A program computes one piece (see `layout`) for one kv head: its rows x G queries are one tile of the tensor cores. A
split block's programs leave (o, lse) partials; whichever arrives last merges them all, so there is no second launch. In
a decode step (APPEND) the program that holds a row's open chunk also rotates and stores the row's new key and value and
takes them from registers, so there is no launch for the write either, and nothing is read back that was just written.

Defined by attention.reference; tests/kernels/triton_interpreter and tests/gpu hold the two together.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def load_rotated(
    x,            # elements; tile rows start at x + offset
    offset,       # i64 [ROWS]
    valid,        # i1 [ROWS]
    cos, sin,     # f32 [positions, D / 2]
    position,     # i32 [ROWS]
    D: tl.constexpr, DP: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Rows of D channels as f32 [ROWS, DP], rotated: halves (a, b) -> (a cos - b sin, b cos + a sin); zero outside."""
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, DP)
    mask = valid[:, None] & (d < D)[None, :]
    own = tl.load(x + offset[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTATE:
        first = d < HALF
        # The other half of the row comes through the cache: cheaper to say and to run than a shuffle between threads.
        twin = tl.load(x + offset[:, None] + tl.where(first, d + HALF, d - HALF)[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        angle = position.to(tl.int64)[:, None] * HALF + tl.where(first, d, d - HALF)[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0)
        s = tl.load(sin + angle, mask=mask, other=0.0)
        own = own * c + tl.where(first[None, :], -twin, twin) * s
    return own


@triton.jit(do_not_specialize=["layer"])
def attend(
    q,              # [R, H * G, D], rows q_stride apart
    new_k, new_v,   # [R, H, D], rows k_stride and v_stride apart; APPEND only, else None
    out,            # [R, H * G, D], dense
    arena,          # the arena as page elements; a page starts at id * UNIT, so every row of it is 16-byte aligned
    table,          # i32 [C, L, H] page ids
    cos, sin,       # f32 [positions, D / 2]; ROTATE only
    positions,      # i32 [R]
    indices,        # i32, chunk ids
    pieces,         # i32 [n, 8]: first row, rows, first index, chunks, position of the first slot, partial tile,
                    # first tile, parts
    partial_o,      # f32 [tiles, H, ROWS, D]
    partial_lse,    # f32 [tiles, H, ROWS], base 2
    arrivals,       # i32 [tiles, H], zero between launches
    layer, q_stride, k_stride, v_stride,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    DP: tl.constexpr,      # D rounded up to a power of two
    ROWS: tl.constexpr,    # tile of query rows x G, a power of two, >= 16 for the tensor cores
    UNIT: tl.constexpr,    # page elements in 128 bytes
    SCALE: tl.constexpr,   # log2(e) / sqrt(D)
    WINDOW: tl.constexpr,  # positions a row sees; 0 sees all
    ROTATE: tl.constexpr, APPEND: tl.constexpr,
):  # fmt: skip
    """Grid [H, n]: heads vary fastest, so that the no-op pieces of a padded plan come last."""
    head = tl.program_id(0)
    piece = pieces + tl.program_id(1).to(tl.int64) * 8
    first_row = tl.load(piece)
    num_rows = tl.load(piece + 1)
    first_index = tl.load(piece + 2)
    num_chunks = tl.load(piece + 3)
    start = tl.load(piece + 4)
    tile = tl.load(piece + 5)
    first_tile = tl.load(piece + 6)
    parts = tl.load(piece + 7)
    if num_rows == 0:
        return

    m = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    slots = tl.arange(0, P)
    in_row = d < D
    valid = m < num_rows * G
    row = (first_row + m // G).to(tl.int64)
    position = tl.load(positions + row, mask=valid, other=-1)
    query = load_rotated(
        q, row * q_stride + (head * G + m % G) * D, valid, cos, sin, tl.maximum(position, 0), D, DP, ROTATE
    )
    query = (query * SCALE).to(q.dtype.element_ty)

    entry = table + layer.to(tl.int64) * H + head
    chunk_ids = indices + first_index
    last_chunk = tl.maximum(num_chunks - 1, 0)

    if APPEND:
        # One row a piece. Stored tokens stand before its position; the new one joins from registers where the open
        # chunk is read.
        end = tl.load(positions + first_row)
        single = tl.arange(0, 1)
        holds = single + start + num_chunks * P > end
        here = (single + first_row).to(tl.int64)
        newest = single + end
        k = load_rotated(new_k, here * k_stride + head * D, holds, cos, sin, newest, D, DP, ROTATE).to(
            q.dtype.element_ty
        )
        v = load_rotated(new_v, here * v_stride + head * D, holds, cos, sin, newest, D, DP, False).to(
            q.dtype.element_ty
        )
        open_page = tl.load(entry + tl.load(chunk_ids + last_chunk).to(tl.int64) * (L * H)).to(tl.int64)
        slot = arena + open_page * UNIT + (end % P) * D + d[None, :]
        stored = holds[:, None] & in_row[None, :]
        tl.store(slot, k, mask=stored)
        tl.store(slot + P * D, v, mask=stored)
        new_score = tl.sum(query.to(tl.float32) * k.to(tl.float32), 1)
        opens = valid & (start + num_chunks * P > position)
        top = tl.where(opens, new_score, float("-inf"))
        total = tl.where(opens, 1.0, 0.0)
        acc = tl.zeros((ROWS, DP), tl.float32) + v.to(tl.float32)
    else:
        end = tl.load(positions + first_row + num_rows - 1) + 1
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DP), tl.float32)

    # Page ids run one chunk ahead and chunk ids two, so that no load of keys waits for the two lookups before it.
    page = tl.load(entry + tl.load(chunk_ids).to(tl.int64) * (L * H))
    ahead = tl.load(chunk_ids + tl.minimum(1, last_chunk))
    for i in range(num_chunks):
        base = arena + page.to(tl.int64) * UNIT + slots[:, None] * D + d[None, :]
        page = tl.load(entry + ahead.to(tl.int64) * (L * H))
        ahead = tl.load(chunk_ids + tl.minimum(i + 2, last_chunk))
        at = start + i * P + slots
        # Slots at `end` and beyond are unwritten: neither worth their bytes nor safe to multiply by zero.
        written = (at < end)[:, None] & in_row[None, :]
        keys = tl.load(base, mask=written, other=0.0)
        score = tl.dot(query, keys.T, input_precision="ieee")
        visible = at[None, :] < position[:, None] if APPEND else at[None, :] <= position[:, None]
        if WINDOW:
            visible &= at[None, :] > position[:, None] - WINDOW
        score = tl.where(visible, score, float("-inf"))
        peak = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(score - safe[:, None])
        factor = tl.exp2(top - safe)
        total = total * factor + tl.sum(weight, 1)
        values = tl.load(base + P * D, mask=written, other=0.0)
        acc = tl.dot(weight.to(values.dtype), values, acc * factor[:, None], input_precision="ieee")
        top = peak

    saw = total > 0
    # Where a row saw nothing, its sum stayed zero.
    o = acc / tl.where(saw, total, 1.0)[:, None]
    heads = (row * H + head) * G + m % G
    target = out + heads[:, None] * D + d[None, :]
    mask = valid[:, None] & in_row[None, :]
    if parts == 1:
        tl.store(target, o.to(out.dtype.element_ty), mask=mask)
    else:
        lse = tl.where(saw, top + tl.log2(tl.where(saw, total, 1.0)), float("-inf"))
        mine = tile.to(tl.int64) * H + head
        tl.store(partial_o + mine * (ROWS * D) + m[:, None] * D + d[None, :], o, mask=mask)
        tl.store(partial_lse + mine * ROWS + m, lse, mask=valid)
        # The barrier puts every thread's stores before the one thread's release; its acquire covers the loads below.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + first_tile.to(tl.int64) * H + head, 1, sem="acq_rel", scope="gpu")
        if arrived == parts - 1:
            tl.store(arrivals + first_tile.to(tl.int64) * H + head, 0)
            merge_parts(
                partial_o, partial_lse, first_tile.to(tl.int64) * H + head, parts, target, valid, H, D, DP, ROWS
            )


@triton.jit
def merge_parts(
    partial_o, partial_lse, first, parts, target, valid,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The attention over the union of a block's parts, into `target`. Reads past the first-level cache, which may hold
    an earlier launch.
    """
    m = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    mask = valid[:, None] & (d < D)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)
    # A decode tile has registers to spare: unrolled, the loads of four parts are under way at once.
    UNROLL: tl.constexpr = 4 if ROWS * DP <= 4096 else 1
    part = first
    for _ in tl.range(0, parts, loop_unroll_factor=UNROLL):
        lse = tl.load(partial_lse + part * ROWS + m, mask=valid, other=float("-inf"), cache_modifier=".cg")
        o = tl.load(
            partial_o + part * (ROWS * D) + m[:, None] * D + d[None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        peak = tl.maximum(top, lse)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        factor = tl.exp2(top - safe)
        weight = tl.exp2(lse - safe)
        total = total * factor + weight
        acc = acc * factor[:, None] + o * weight[:, None]
        top = peak
        part += H
    o = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(target, o.to(target.dtype.element_ty), mask=mask)
