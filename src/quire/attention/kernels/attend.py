"""Partial attention of query rows over pages: prefill and decode, and both phases of ChunkAttention.

    o_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j        over the stored positions j with i - window < j <= i

A program computes one piece (see `layout`) for one kv head. The piece's rows x G queries are one tensor-core tile, and
each page of its chunks is read once for the whole tile. A step launches the tall pieces, then the short ones:

chunk-first     the rows of several sequences over a run of chunks that they share. The piece stores partials, (o, lse)
                of each row, and merges nothing.
sequence-first  the rows of one sequence over its own chunks. The piece adds the partials that the first phase stored
                for its row, if any, and writes the output. If a block of rows is split over several pieces, each stores
                partials, and the last one to finish merges them, so there is no third launch.

In a decode step on Hopper the second launch begins during the first one. Its programs wait for the end of the first
before they read partials.

In a decode step (APPEND) the program that reads a row's open chunk also rotates and stores the row's new key and value
and attends to them from registers. So there is no separate launch for the write, and the new token is not read back.

With retention, a head may lack pages or see only some slots of a page. A mask of 64 bits per page says which slots are
visible. Hidden slots are neither loaded nor attended to.

This kernel reads dense pages only. If sealed chunks are encoded, `kernels.encoded` takes its place.

Defined by attention.reference; tests/kernels/triton_interpreter and tests/gpu compare the two.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rotated(
    x,            # elements; each row of the tile starts at x + offset
    offset,       # i64 [ROWS]
    valid,        # i1 [ROWS]
    cos, sin,     # f32 [positions, D / 2]
    position,     # i32 [ROWS]
    D: tl.constexpr, DP: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Loads rows of D channels as f32 [ROWS, DP], rotated: halves (a, b) -> (a cos - b sin, b cos + a sin). Elements
    outside are zero.
    """
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, DP)
    mask = valid[:, None] & (d < D)[None, :]
    own = tl.load(x + offset[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTATE:
        first = d < HALF
        # The other half of the row comes through the cache: simpler and faster than a shuffle between threads.
        twin = tl.load(x + offset[:, None] + tl.where(first, d + HALF, d - HALF)[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        angle = position.to(tl.int64)[:, None] * HALF + tl.where(first, d, d - HALF)[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0)
        s = tl.load(sin + angle, mask=mask, other=0.0)
        own = own * c + tl.where(first[None, :], -twin, twin) * s
    return own


@triton.jit
def is_seen(
    mask,   # i64
    slots,  # i32, of any shape, below 64
):  # fmt: skip
    """Whether the slots are visible in a page's mask, i1. Computed in 32-bit words, like the tile's other numbers."""
    word = tl.where(slots < 32, mask.to(tl.int32), (mask >> 32).to(tl.int32))
    return (word >> (slots & 31) & 1) != 0


@triton.jit
def piece_of(pieces, indices, entries):
    """The fields of this program's piece, in the order of `attend`'s `pieces`; lists are pointers."""
    piece = pieces + tl.program_id(1).to(tl.int64) * 12
    first_row, num_rows = tl.load(piece), tl.load(piece + 1)
    chunk_ids, num_chunks, start = indices + tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
    slot = tl.load(piece + 5)
    seeds, num_seeds = entries + tl.load(piece + 6), tl.load(piece + 7)
    parts, num_parts = entries + tl.load(piece + 8), tl.load(piece + 9)
    own_ids, num_own = indices + tl.load(piece + 10), tl.load(piece + 11)
    return first_row, num_rows, chunk_ids, num_chunks, start, slot, seeds, num_seeds, parts, num_parts, own_ids, num_own


@triton.jit(do_not_specialize=["first_lane"])
def attend(
    q,              # [R, H * G, D], rows q_stride apart
    new_k, new_v,   # [R, H, D], rows k_stride and v_stride apart; APPEND only, else None
    out,            # [R, H * G, D], dense
    arena,          # the arena as page elements; a page starts at id * UNIT, so every row of it is 16-byte aligned
    table,          # i32 [C, LANES] page ids
    masks,          # i64 [C, LANES], visible slots of each page, 0 where there is no page; or None: all are visible
    cos, sin,       # f32 [positions, D / 2]; ROTATE only
    positions,      # i32 [R]
    indices,        # i32, chunk ids
    pieces,         # i32 [n, 12]: first row, rows, first index, chunks, position of the first slot; first partial slot
                    # (row i takes slot + i), or -1: writes the output; first entry and number of partials to add;
                    # first entry and number of the block's parts (0: not merged in this launch); two unused
    entries,        # i32, slots of partials: row i takes entry + i
    partial_o,      # f32 [slots, H, G, D]
    partial_lse,    # f32 [slots, H, G], base 2
    arrivals,       # i32 [slots, H], zero between launches
    lse,            # f32 [R, H, G], base 2, over all tokens that a row sees; or None: not needed
    reads,          # i32 [C, H], or None: every page read adds 1
    first_lane, q_stride, k_stride, v_stride,
    LANES: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    DP: tl.constexpr,      # D rounded up to a power of two
    ROWS: tl.constexpr,    # tile of query rows x G, a power of two, >= 16 for the tensor cores
    UNIT: tl.constexpr,    # page elements in 128 bytes
    SCALE: tl.constexpr,   # log2(e) times the factor of q . k
    WINDOW: tl.constexpr,  # number of positions that a row sees; 0: all
    SOFT_CAP: tl.constexpr,  # log2(e) times the bound of scores; 0: none
    ROTATE: tl.constexpr, APPEND: tl.constexpr,
    SEEDED: tl.constexpr,  # pieces may have partials from the launch before
    OVERLAPS: tl.constexpr,  # the second launch of a decode step begins during the first one
):  # fmt: skip
    """Grid [H, n]: heads vary fastest, so that the no-op pieces of a padded plan come last."""
    if OVERLAPS and not APPEND:
        gdc_launch_dependents()
    head = tl.program_id(0)
    first_row, num_rows, chunk_ids, num_chunks, start, slot, seeds, num_seeds, parts, num_parts, _, _ = piece_of(
        pieces, indices, entries
    )
    if num_rows == 0:
        return

    query, valid, position, _ = load_queries(
        q, positions, first_row, num_rows, q_stride, cos, sin, head, G, D, DP, ROWS, SCALE, ROTATE
    )
    entry = table + first_lane + head
    mask_entry = None
    if masks is not None:
        mask_entry = masks + first_lane + head
    if APPEND:
        # A piece has one row. Stored tokens precede its position. The program that reads the open chunk adds the new
        # token from registers.
        end = tl.load(positions + first_row)
        last_chunk = tl.load(chunk_ids + tl.maximum(num_chunks - 1, 0)).to(tl.int64)
        open_page = tl.load(entry + last_chunk * LANES).to(tl.int64)
        top, total, acc = append_token(
            query, new_k, new_v, arena + open_page * UNIT + (end % P) * D,
            tl.arange(0, 1) + start + num_chunks * P > end, valid & (start + num_chunks * P > position), end,
            first_row, k_stride, v_stride, cos, sin, head, D, DP, P, ROWS, ROTATE, SOFT_CAP, True,
        )  # fmt: skip
    else:
        end = tl.load(positions + first_row + num_rows - 1) + 1
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DP), tl.float32)
    top, total, acc = attend_pages(
        top, total, acc, query, position, end, arena, entry, mask_entry, reads, chunk_ids, num_chunks, start, head,
        LANES, H, D, P, DP, UNIT, WINDOW, SOFT_CAP, APPEND,
    )  # fmt: skip
    if SEEDED:
        if OVERLAPS and APPEND:
            gdc_wait()
        top, total, acc = add_partials(
            top, total, acc, seeds, num_seeds, partial_o, partial_lse, num_rows, head, H, G, D, DP, ROWS
        )
    leave(
        out, first_row, num_rows, slot, parts, num_parts, top, total, acc, partial_o, partial_lse, arrivals, lse,
        head, H, G, D, DP, ROWS,
    )  # fmt: skip


@triton.jit
def load_queries(
    q, positions, first_row, num_rows, q_stride, cos, sin,  # as in `attend`, and a piece's rows
    head,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, SCALE: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Returns the scaled queries of a piece, [ROWS, DP]; which rows of the tile are in use, i1 [ROWS]; their positions,
    -1 for unused rows; and their offsets in q, i64.
    """
    m = tl.arange(0, ROWS)
    valid = m < num_rows * G
    row = (first_row + m // G).to(tl.int64)
    position = tl.load(positions + row, mask=valid, other=-1)
    q_row = row * q_stride + (head * G + m % G) * D
    query = load_rotated(q, q_row, valid, cos, sin, tl.maximum(position, 0), D, DP, ROTATE)
    return (query * SCALE).to(q.dtype.element_ty), valid, position, q_row


@triton.jit
def append_token(
    query,                      # as in `load_queries`, of one row
    new_k, new_v,
    place,                      # address of the key's slot
    holds,                      # i1 [1], whether this program reads the row's own chunk
    opens,                      # i1 [ROWS], `holds` for each query
    end,                        # the row's position
    row, k_stride, v_stride, cos, sin, head,
    D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, ROTATE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KEEPS_ROTATED: tl.constexpr,  # whether pages hold rotated keys
):  # fmt: skip
    """Stores a row's new key and value. Returns maximum, sum and weighted sum over this token; -inf and zeros if this
    program does not read the row's own chunk.
    """
    TYPE: tl.constexpr = query.dtype
    d = tl.arange(0, DP)
    single = tl.arange(0, 1)
    here = (single + row).to(tl.int64)
    newest = single + end
    k = load_rotated(new_k, here * k_stride + head * D, holds, cos, sin, newest, D, DP, ROTATE and KEEPS_ROTATED).to(
        TYPE
    )
    v = load_rotated(new_v, here * v_stride + head * D, holds, cos, sin, newest, D, DP, False).to(TYPE)
    stored = holds[:, None] & (d < D)[None, :]
    tl.store(place + d[None, :], k, mask=stored)
    tl.store(place + P * D + d[None, :], v, mask=stored)
    if ROTATE and not KEEPS_ROTATED:
        k = load_rotated(new_k, here * k_stride + head * D, holds, cos, sin, newest, D, DP, True).to(TYPE)
    score = capped(tl.sum(query.to(tl.float32) * k.to(tl.float32), 1), SOFT_CAP)
    top = tl.where(opens, score, float("-inf"))
    return top, tl.where(opens, 1.0, 0.0), tl.zeros((ROWS, DP), tl.float32) + v.to(tl.float32)


@triton.jit
def attend_pages(
    top, total, acc, query, position,
    end,  # the first position that is not stored yet
    arena,
    entry, mask_entry,  # of chunk 0 in this lane, in the table and in masks; None: no masks
    reads, chunk_ids, num_chunks, start, head,  # as in `attend`, and a piece's chunks
    LANES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DP: tl.constexpr, UNIT: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, APPEND: tl.constexpr,
):  # fmt: skip
    """Extends the sums by the pages of a piece's chunks."""
    d = tl.arange(0, DP)
    slots = tl.arange(0, P)
    in_row = d < D
    last_chunk = tl.maximum(num_chunks - 1, 0)
    # Page ids are loaded one chunk ahead and chunk ids two, so that no load of keys waits for these two lookups.
    page = tl.load(entry + tl.load(chunk_ids).to(tl.int64) * LANES)
    if mask_entry is not None:
        mask = tl.load(mask_entry + tl.load(chunk_ids).to(tl.int64) * LANES)
    ahead = tl.load(chunk_ids + tl.minimum(1, last_chunk))
    for i in range(num_chunks):
        if reads is not None:
            is_read = mask != 0 if mask_entry is not None else True
            tl.atomic_add(reads + tl.load(chunk_ids + i).to(tl.int64) * H + head, 1, mask=is_read)
        base = arena + page.to(tl.int64) * UNIT + slots[:, None] * D + d[None, :]
        page = tl.load(entry + ahead.to(tl.int64) * LANES)
        if mask_entry is not None:
            seen = is_seen(mask, slots)
            mask = tl.load(mask_entry + ahead.to(tl.int64) * LANES)
        ahead = tl.load(chunk_ids + tl.minimum(i + 2, last_chunk))
        at = start + i * P + slots
        # Slots from `end` on are unwritten: loading them is wasted, and multiplying them by zero may give NaN.
        written = at < end
        if mask_entry is not None:
            written &= seen
        written = written[:, None] & in_row[None, :]
        keys = tl.load(base, mask=written, other=0.0)
        score = capped(tl.dot(query, keys.T, input_precision="ieee"), SOFT_CAP)
        visible = at[None, :] < position[:, None] if APPEND else at[None, :] <= position[:, None]
        if WINDOW:
            visible &= at[None, :] > position[:, None] - WINDOW
        if mask_entry is not None:
            visible &= seen[None, :]
        score = tl.where(visible, score, float("-inf"))
        top, total, weight, factor = weigh(top, total, score)
        values = tl.load(base + P * D, mask=written, other=0.0)
        acc = tl.dot(weight.to(values.dtype), values, acc * factor[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def capped(score, CAP: tl.constexpr):
    """CAP * tanh(score / CAP), or the score if CAP is 0. Holds in any base in which both are given."""
    if CAP > 0:
        x = score * (1.0 / CAP)
        square = x * x
        # Near 0 the difference from 1 has few digits, and the series has all of them.
        series = x + x * square * (square * (2.0 / 15.0) - 1.0 / 3.0)
        far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
        score = CAP * tl.where(square < 0.01, series, far)
    return score


@triton.jit
def weigh(top, total, score):
    """Extends maximum and sum by more tokens. Also returns their weights, and the factor for earlier sums."""
    peak = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(score - safe[:, None])
    factor = tl.exp2(top - safe)
    return peak, total * factor + tl.sum(weight, 1), weight, factor


@triton.jit
def leave(
    out, first_row, num_rows,
    slot,               # first partial slot, or -1: writes the output
    parts, num_parts,   # entries of the block's parts; 0: not merged in this launch
    top, total, acc,    # maximum f32 [ROWS], sum [ROWS] and weighted sum [ROWS, DP] over the tokens of the piece
    partial_o, partial_lse, arrivals,
    row_lse,            # f32 [R, H, G], or None
    head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stores a piece's result: its rows of the output, and of `row_lse` if given; or partials. The last part
    of a block to finish also merges all parts and stores the block's output.
    """
    m = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    in_row = d < D
    valid = m < num_rows * G
    saw = total > 0
    # A row that saw nothing has a zero sum.
    o = acc / tl.where(saw, total, 1.0)[:, None]
    # Offsets from the first row's first head, for the output and for partials.
    heads = m // G * (H * G) + m % G
    channels = heads[:, None] * D + d[None, :]
    mask = valid[:, None] & in_row[None, :]
    target = out + (first_row.to(tl.int64) * H + head) * (G * D) + channels
    if slot < 0:
        tl.store(target, o.to(out.dtype.element_ty), mask=mask)
        if row_lse is not None:
            tl.store(row_lse + (first_row.to(tl.int64) * H + head) * G + heads, lse_of(top, total), mask=valid)
    else:
        lse = lse_of(top, total)
        first_head = (slot.to(tl.int64) * H + head) * G
        tl.store(partial_o + first_head * D + channels, o, mask=mask)
        tl.store(partial_lse + first_head + heads, lse, mask=valid)
        if num_parts > 0:
            # The block's first slot counts arrivals. The barrier orders the stores of all threads before one thread's
            # release; its acquire covers the loads below.
            arrival = arrivals + tl.load(parts).to(tl.int64) * H + head
            tl.debug_barrier()
            arrived = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
            if arrived == num_parts - 1:
                tl.store(arrival, 0)
                top, total, acc = sum_partials(
                    parts, num_parts, partial_o, partial_lse, num_rows, head, H, G, D, DP, ROWS
                )
                o = acc / tl.where(total > 0, total, 1.0)[:, None]
                tl.store(target, o.to(out.dtype.element_ty), mask=mask)
                if row_lse is not None:
                    tl.store(row_lse + (first_row.to(tl.int64) * H + head) * G + heads, lse_of(top, total), mask=valid)


@triton.jit
def lse_of(top, total):
    """The log-sum-exp, base 2, from the maximum score and the sum relative to it; -inf over no tokens."""
    saw = total > 0
    return tl.where(saw, top + tl.log2(tl.where(saw, total, 1.0)), float("-inf"))


@triton.jit
def sum_partials(
    entries, count, partial_o, partial_lse, num_rows, head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile's maximum f32 [ROWS], sum [ROWS] and weighted sum [ROWS, DP] over partials, in the order of the entries;
    -inf and zeros over none. Bypasses the first-level cache, which may hold the data of an earlier launch.
    """
    m = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    valid = m < num_rows * G
    mask = valid[:, None] & (d < D)[None, :]
    heads = m // G * (H * G) + m % G
    channels = heads[:, None] * D + d[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)
    # A decode tile has registers to spare. Unrolled, the loads of four parts are in flight at once.
    UNROLL: tl.constexpr = 4 if ROWS * DP <= 2048 else 1
    for i in tl.range(0, count, loop_unroll_factor=UNROLL):
        first = (tl.load(entries + i, cache_modifier=".cg").to(tl.int64) * H + head) * G
        lse = tl.load(partial_lse + first + heads, mask=valid, other=float("-inf"), cache_modifier=".cg")
        o = tl.load(partial_o + first * D + channels, mask=mask, other=0.0, cache_modifier=".cg")
        top, total, acc = join(top, total, acc, lse, 1.0, o)
    return top, total, acc


@triton.jit
def add_partials(
    top, total, acc, entries, count, partial_o, partial_lse, num_rows, head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Extends the sums by partials: see `sum_partials`."""
    other_top, other_total, other_acc = sum_partials(
        entries, count, partial_o, partial_lse, num_rows, head, H, G, D, DP, ROWS
    )
    return join(top, total, acc, other_top, other_total, other_acc)


@triton.jit
def join(top, total, acc, other_top, other_total, other_acc):
    """Maximum, sum and weighted sum over the union of two sets of tokens, from those over each set."""
    peak = tl.maximum(top, other_top)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    factor = tl.exp2(top - safe)
    weight = tl.exp2(other_top - safe)
    return peak, total * factor + other_total * weight, acc * factor[:, None] + other_acc * weight[:, None]
