"""Attention over encoded sealed chunks: codes are decoded into tiles in registers, one page at a time (see `tiles`).

A piece (see `layout`) reads a run of encoded chunks. Then it reads the chunks that its rows write, which are dense: the
rows' own chunk and, with non-strict prefill, earlier chunks of their slice. Pieces, partials and phases are those of
`attend`.

No page holds rotated keys. Key j = p0 + t, in slot t of a page that starts at position p0, meets query i as

    <R(i) q, R(j) k> = <R(i - p0) q, R(t) k>

So keys rotate by the same 64 angles in every page, which stay in registers. Only the few query rows rotate by an angle
that depends on the page. Sinks are in a sidecar and make one small dense tile.

With retention, a head may lack pages or see only some slots of a page, and a page's tokens may come from anywhere in
the sequence. Such a page has a position for each slot; then p0 is 0, and every key has its own angle. Steps that read
through masks load angles for every page.

Defined by attention.reference; tests/kernels/triton_interpreter and tests/gpu hold the two together.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from quire.attention.kernels.attend import is_seen, join, leave, load_rotated, piece_of, sum_partials
from quire.attention.kernels.tiles import (
    NUQ,
    decoded_keys,
    decoded_values,
    deinterleaved,
    in_value_order,
    interleaved,
    nuq_keys,
    nuq_values,
)
from quire.attention.kernels.write import dense_page

KEY_SLOTS, AT_KEY_SLOTS, AT_VALUES, AT_RANGES, VALUE_SLOTS, AT_VALUE_SLOTS, VALUE_BITS, END = (
    tl.constexpr(column) for column in range(8)
)
"""Columns of `heads`: numbers of slots, offsets of a page's parts and its end in bytes, and the bits of a value."""

HEAD_INTS: tl.constexpr = tl.constexpr(8)


@triton.jit
def turned(first, second, cos, sin):
    """A rotation of pairs, f32."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def turns_of(
    words,  # the arena as i32
    slot_positions, bases,  # as of `attend_encoded`
    chunk,  # i64
    layer_head,
    start,  # first position of the chunk by its index in the path
    ROW: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The base position of a page's keys, i32, and the slots' offsets from it, i32 [P]. Their sum is the position."""
    slots = tl.arange(0, P)
    base = tl.load(bases + chunk)
    own = tl.load(slot_positions + chunk * ROW + layer_head).to(tl.int64)
    has_own = own >= 0
    base = tl.where(has_own, 0, tl.where(base >= 0, base, start))
    return base, tl.where(has_own, tl.load(words + tl.maximum(own, 0) * 32 + slots, mask=has_own, other=0), slots)


@triton.jit
def weigh(top, total, score):
    """Extends maximum and sum by more tokens. Also returns their weights, and the factor for earlier sums."""
    peak = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(score - safe[:, None])
    factor = tl.exp2(top - safe)
    return peak, total * factor + tl.sum(weight, 1), weight, factor


@triton.jit
def attend_dense(top, total, acc, query, keys, values, visible):
    """Extends the sums by a tile of rotated keys [T, DP] and its values."""
    score = tl.where(visible, tl.dot(query, keys.T, input_precision="ieee"), float("-inf"))
    top, total, weight, factor = weigh(top, total, score)
    acc = tl.dot(weight.to(values.dtype), values, acc * factor[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def attend_sinks(
    top, total, acc, query, position,
    rows,       # one head's rows of a sidecar
    num_exact,  # number of rows in use
    mask,       # i64, visible slots of the sidecar's page
    cos, sin, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Extends the sums by the first tokens of a sequence, from their sidecar."""
    # Triton 3.6 compiles products of 64 rows and 16 columns by eight warps into code that reads beyond its operands.
    SP: tl.constexpr = triton.next_power_of_2(max(16 if query.shape[0] < 64 else 64, SINKS))
    sink = tl.arange(0, SP)
    exact = (sink < num_exact) & is_seen(mask, sink)
    place = (sink * D).to(tl.int64)
    keys = load_rotated(rows, place, exact, cos, sin, sink, D, DP, ROTATE).to(query.dtype)
    values = load_rotated(rows, place + SINKS * D, exact, cos, sin, sink, D, DP, False).to(query.dtype)
    visible = exact[None, :] & (position >= 0)[:, None]
    if WINDOW:
        visible &= sink[None, :] > position[:, None] - WINDOW
    return attend_dense(top, total, acc, query, keys, values, visible)


@triton.jit(do_not_specialize=["layer", "staged"])
def attend_encoded(
    q,              # [R, H * G, D], rows q_stride apart
    new_k, new_v,   # [R, H, D], rows k_stride and v_stride apart; APPEND only, else None
    out,            # [R, H * G, D], dense
    arena,          # the arena as elements of dense pages; a page starts at id * UNIT
    words,          # the same as i32
    table,          # i32 [C, L, H] page ids
    masks,          # i64 [C, L, H], visible slots of each page, 0 where there is no page; or None: all are visible
    slot_positions, # i32 [C, L, H] ids of pages i32 [P] with the positions of slots; -1: consecutive; None if masks are
    bases,          # i32 [C], position of a chunk's first slot if its index in the path does not give it, else -1; None
                    # likewise
    sidecars,       # i32 [C] page ids, -1 where there is none; SINKS only
    cos, sin,       # f32 [positions, D / 2]; ROTATE only
    turns,          # f32 [2, D / 2, P]: cosines and sines of the first P positions; ROTATE only
    heads,          # i32 [L, H, HEAD_INTS], the layout of a page; NUQ only, as the next three
    pairs,          # i32 [L, H, 4, HP]: pair, and offsets of its parts
    key_books,      # f32 [L, H, 2, HP, 32]; of group codes f32 [L, H, 2, HP], the bias subtracted from keys, or None
    value_books,    # f32 [L, H, 32]
    positions,      # i32 [R]
    indices,        # i32, chunk ids
    pieces,         # i32 [n, 12]: as of `attend`; its chunks are encoded, and the last two columns are first index and
                    # number of the dense chunks that follow them
    entries, partial_o, partial_lse, arrivals, lse,  # as of `attend`
    reads,          # i32 [C, H], or None: every page read adds 1
    staged,         # page id of the first staged page
    layer, q_stride, k_stride, v_stride,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    DP: tl.constexpr,      # D rounded up to a power of two
    HP: tl.constexpr,      # D / 2 rounded up to a power of two, >= 16
    ROWS: tl.constexpr,    # tile of query rows x G, a power of two, >= 16 for the tensor cores
    UNIT: tl.constexpr,    # elements in 128 bytes
    PAGE: tl.constexpr,    # units of a dense page
    SCALE: tl.constexpr,   # log2(e) / sqrt(D)
    WINDOW: tl.constexpr,  # positions a row sees; 0 sees all
    SINKS: tl.constexpr,   # number of exact tokens
    KIND: tl.constexpr,    # kernel id of the codec
    KEY_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr,  # see `nuq_keys`
    MOST_KEY_SLOTS: tl.constexpr, MOST_VALUE_SLOTS: tl.constexpr,
    ROTATE: tl.constexpr, APPEND: tl.constexpr, SEEDED: tl.constexpr,
):  # fmt: skip
    """Grid [H, n]."""
    HALF: tl.constexpr = D // 2
    NUM_RUNS: tl.constexpr = max(1, DP // 32)
    TYPE: tl.constexpr = q.dtype.element_ty
    head = tl.program_id(0)
    first_row, num_rows, chunk_ids, num_chunks, start, slot, seeds, num_seeds, parts, num_parts, own_ids, num_own = (
        piece_of(pieces, indices, entries)
    )
    if num_rows == 0:
        return

    m = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    pair = tl.arange(0, HP)
    slots = tl.arange(0, P)
    in_row = d < D
    is_pair = pair < HALF
    valid = m < num_rows * G
    row = (first_row + m // G).to(tl.int64)
    position = tl.load(positions + row, mask=valid, other=-1)
    q_row = row * q_stride + (head * G + m % G) * D
    query = load_rotated(q, q_row, valid, cos, sin, tl.maximum(position, 0), D, DP, ROTATE)
    query = (query * SCALE).to(TYPE)
    layer_head = layer.to(tl.int64) * H + head
    entry = table + layer_head

    # The first unwritten position. With APPEND that is the row's own.
    end = tl.load(positions + first_row) if APPEND else tl.load(positions + first_row + num_rows - 1) + 1
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)

    # Data that all encoded pages share.
    order = pair
    if KIND == NUQ:
        of_pair = pairs + layer_head * (4 * HP) + pair
        order = tl.load(of_pair)
        at4, at2, at1 = tl.load(of_pair + HP), tl.load(of_pair + 2 * HP), tl.load(of_pair + 3 * HP)
        centroid = tl.arange(0, 32)
        book = key_books + layer_head * (2 * HP * 32) + (pair * 32)[:, None] + centroid[None, :]
        first_book, second_book = tl.load(book), tl.load(book + HP * 32)
        value_book = tl.load(value_books + layer_head * 32 + (tl.arange(0, P // 2) * 0)[:, None] + centroid[None, :])
        of_head = heads + layer_head * HEAD_INTS
        num_key_slots, at_key_slots = tl.load(of_head + KEY_SLOTS), tl.load(of_head + AT_KEY_SLOTS)
        num_value_slots, at_value_slots = tl.load(of_head + VALUE_SLOTS), tl.load(of_head + AT_VALUE_SLOTS)
        at_values, at_ranges = tl.load(of_head + AT_VALUES), tl.load(of_head + AT_RANGES)
        value_bits = tl.load(of_head + VALUE_BITS)
    head_bias = None
    if KIND != NUQ and key_books is not None:
        head_bias = key_books + layer_head * (2 * HP)
    mask = valid[:, None] & is_pair[None, :]
    first_query = tl.load(q + q_row[:, None] + order[None, :], mask=mask, other=0.0).to(tl.float32) * SCALE
    second_query = tl.load(q + q_row[:, None] + order[None, :] + HALF, mask=mask, other=0.0).to(tl.float32) * SCALE
    if ROTATE:
        turn = turns + order[:, None] * P + slots[None, :]
    first_chunk = tl.load(chunk_ids, mask=num_chunks > 0, other=0).to(tl.int64)
    if SINKS:
        # Sinks: only the piece that begins with the sequence's first chunk has them.
        side = tl.load(sidecars + first_chunk, mask=num_chunks > 0, other=-1).to(tl.int64)
        num_exact = tl.where(side >= 0, SINKS, 0)

    last_chunk = tl.maximum(num_chunks - 1, 0)
    page = tl.load(entry + tl.load(chunk_ids).to(tl.int64) * (L * H))
    first_mask = tl.full((), -1, tl.int64)
    if masks is not None:
        first_mask = tl.load(masks + layer_head + first_chunk * (L * H))
        next_seen = first_mask
    ahead = tl.load(chunk_ids + tl.minimum(1, last_chunk))
    for i in range(num_chunks):
        if reads is not None:
            is_read = next_seen != 0 if masks is not None else True
            tl.atomic_add(reads + tl.load(chunk_ids + i).to(tl.int64) * H + head, 1, mask=is_read)
        current = page.to(tl.int64)
        page = tl.load(entry + ahead.to(tl.int64) * (L * H))
        if masks is not None:
            seen = next_seen
            next_seen = tl.load(masks + layer_head + ahead.to(tl.int64) * (L * H))
        ahead = tl.load(chunk_ids + tl.minimum(i + 2, last_chunk))
        # If the head has no page here, the mask is 0 and the page id is arbitrary.
        if seen != 0 if masks is not None else True:
            page_start = start + i * P
            if KIND == NUQ:
                first, second = nuq_keys(
                    words, current, at4, at2, at1, order, first_book, second_book, num_key_slots,
                    at_key_slots, HALF, HP, P, KEY_PARTS, MOST_KEY_SLOTS,
                )  # fmt: skip
            else:
                first, second = decoded_keys(KIND, words, current, head_bias, D, HALF, HP, P)
            first_q, second_q = first_query, second_query
            if ROTATE:
                base = page_start
                if masks is not None:
                    chunk = tl.load(chunk_ids + i).to(tl.int64)
                    base, turned_by = turns_of(words, slot_positions, bases, chunk, layer_head, base, L * H, P)
                    key_angle = turned_by[None, :] * HALF + order[:, None]
                    slot_cos = tl.load(cos + key_angle, mask=is_pair[:, None], other=0.0)
                    slot_sin = tl.load(sin + key_angle, mask=is_pair[:, None], other=0.0)
                else:
                    slot_cos = tl.load(turn, mask=is_pair[:, None], other=0.0)
                    slot_sin = tl.load(turn + HALF * P, mask=is_pair[:, None], other=0.0)
                first, second = turned(first, second, slot_cos, slot_sin)
                # All rows of a decode piece have the same position.
                past = (tl.full((1,), 0, tl.int32) + end if APPEND else position) - base
                angle = tl.maximum(past, 0)[:, None] * HALF + order[None, :]
                query_cos = tl.load(cos + angle, mask=is_pair[None, :], other=0.0)
                query_sin = tl.load(sin + angle, mask=is_pair[None, :], other=0.0)
                first_q, second_q = turned(first_query, second_query, query_cos, query_sin)
            token = slots
            if KIND == NUQ:
                # Rounded after this, not before: what a product reads must not itself be a reshape in Triton 3.6.
                first, second = interleaved(first, HP, 2), interleaved(second, HP, 2)
                token = slots % 2 * (P // 2) + slots // 2
            score = tl.dot(first_q.to(TYPE), first.to(TYPE), input_precision="ieee")
            score = tl.dot(second_q.to(TYPE), second.to(TYPE), score, input_precision="ieee")
            if SINKS:
                score = tl.where((i > 0) | (token >= num_exact)[None, :], score, float("-inf"))
            if masks is not None:
                score = tl.where(is_seen(seen, token)[None, :], score, float("-inf"))
            if WINDOW:
                score = tl.where((page_start + token)[None, :] > position[:, None] - WINDOW, score, float("-inf"))
            top, total, weight, factor = weigh(top, total, score)
            weight, acc = weight.to(TYPE), acc * factor[:, None]
            if KIND == NUQ:
                even, odd = nuq_values(
                    words, current, value_book, value_bits, at_values, at_ranges, num_value_slots, at_value_slots,
                    D, DP, P, VALUE_PARTS, MOST_VALUE_SLOTS,
                )  # fmt: skip
                even_weight, odd_weight = in_value_order(weight, ROWS, P)
                even, odd = interleaved(even, P // 2, NUM_RUNS), interleaved(odd, P // 2, NUM_RUNS)
                acc = tl.dot(even_weight, even.to(TYPE), acc, input_precision="ieee")
                acc = tl.dot(odd_weight, odd.to(TYPE), acc, input_precision="ieee")
            else:
                values = decoded_values(KIND, words, current, D, HALF, DP, P)
                acc = tl.dot(weight, values.to(TYPE), acc, input_precision="ieee")
    if KIND == NUQ:
        acc = deinterleaved(acc, ROWS, NUM_RUNS)

    if APPEND:
        # The piece with its row's own chunk adds the new token.
        single = tl.arange(0, 1)
        holds = single < num_own
        here = (single + first_row).to(tl.int64)
        k = load_rotated(new_k, here * k_stride + head * D, holds, cos, sin, single + end, D, DP, False)
        v = load_rotated(new_v, here * v_stride + head * D, holds, cos, sin, single + end, D, DP, False)
        open_chunk = tl.load(own_ids + single, mask=holds, other=0).to(tl.int64)
        target = dense_page(entry, open_chunk, head, staged, holds, L * H, H, PAGE) * UNIT + end % P * D
        stored = holds[:, None] & in_row[None, :]
        tl.store(arena + target[:, None] + d[None, :], k.to(TYPE), mask=stored)
        tl.store(arena + target[:, None] + P * D + d[None, :], v.to(TYPE), mask=stored)
        k = load_rotated(new_k, here * k_stride + head * D, holds, cos, sin, single + end, D, DP, ROTATE)
        new_score = tl.sum(query.to(tl.float32) * k.to(TYPE).to(tl.float32), 1)
        opens = valid & (num_own > 0)
        new_top = tl.where(opens, new_score, float("-inf"))
        top, total, acc = join(
            top, total, acc, new_top, tl.where(opens, 1.0, 0.0), tl.zeros((ROWS, DP), tl.float32) + v
        )

    if SEEDED:
        seed_top, seed_total, seed_acc = sum_partials(
            seeds, num_seeds, partial_o, partial_lse, num_rows, head, H, G, D, DP, ROWS
        )
        top, total, acc = join(top, total, acc, seed_top, seed_total, seed_acc)

    if SINKS:
        rows = arena + tl.maximum(side, 0) * UNIT + layer_head * (2 * SINKS * D)
        top, total, acc = attend_sinks(
            top, total, acc, query, position, rows, num_exact, first_mask, cos, sin, D, DP, SINKS, WINDOW, ROTATE
        )

    own_start = start + num_chunks * P
    for i in tl.range(num_own, num_stages=1):
        chunk = tl.load(own_ids + i).to(tl.int64)
        if reads is not None:
            tl.atomic_add(reads + tl.maximum(chunk, 0) * H + head, 1, mask=chunk >= 0)
        source = dense_page(entry, chunk, head, staged, chunk == chunk, L * H, H, PAGE) * UNIT + slots * D
        at = own_start + i * P + slots
        # Slots from `end` on are unwritten: loading them is wasted, and multiplying them by zero may give NaN.
        written = at < end
        own_keys = load_rotated(arena, source, written, cos, sin, at, D, DP, ROTATE).to(TYPE)
        own_values = load_rotated(arena, source + P * D, written, cos, sin, at, D, DP, False).to(TYPE)
        visible = at[None, :] < position[:, None] if APPEND else at[None, :] <= position[:, None]
        if WINDOW:
            visible &= at[None, :] > position[:, None] - WINDOW
        top, total, acc = attend_dense(top, total, acc, query, own_keys, own_values, visible)

    leave(
        out, first_row, num_rows, slot, parts, num_parts, top, total, acc, partial_o, partial_lse, arrivals, lse,
        head, H, G, D, DP, ROWS,
    )  # fmt: skip
