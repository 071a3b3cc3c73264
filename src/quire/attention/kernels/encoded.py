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

Defined by attention.reference; tests/kernels/triton_interpreter and tests/gpu compare the two.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from quire.attention.kernels.attend import (
    add_partials,
    append_token,
    capped,
    is_seen,
    join,
    leave,
    load_queries,
    load_rotated,
    piece_of,
    weigh,
)
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
    slot_positions, bases,  # as in `attend_encoded`
    chunk,  # i64
    lane,
    start,  # first position of the chunk by its index in the path
    ROW: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The base position of a page's keys, i32, and the slots' offsets from it, i32 [P]. Their sum is the position."""
    slots = tl.arange(0, P)
    base = tl.load(bases + chunk)
    own = tl.load(slot_positions + chunk * ROW + lane).to(tl.int64)
    has_own = own >= 0
    base = tl.where(has_own, 0, tl.where(base >= 0, base, start))
    return base, tl.where(has_own, tl.load(words + tl.maximum(own, 0) * 32 + slots, mask=has_own, other=0), slots)


@triton.jit
def attend_dense(top, total, acc, query, keys, values, visible, SOFT_CAP: tl.constexpr):
    """Extends the sums by a tile of rotated keys [T, DP] and its values."""
    score = capped(tl.dot(query, keys.T, input_precision="ieee"), SOFT_CAP)
    score = tl.where(visible, score, float("-inf"))
    top, total, weight, factor = weigh(top, total, score)
    acc = tl.dot(weight.to(values.dtype), values, acc * factor[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def attend_sinks(
    top, total, acc, query, position,
    rows,       # one head's rows of a sidecar
    num_exact,  # number of rows in use
    mask,       # i64, visible slots of the sidecar's page
    cos, sin, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    ROTATE: tl.constexpr,
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
    return attend_dense(top, total, acc, query, keys, values, visible, SOFT_CAP)


@triton.jit(do_not_specialize=["first_lane", "staged"])
def attend_encoded(
    q,              # [R, H * G, D], rows q_stride apart
    new_k, new_v,   # [R, H, D], rows k_stride and v_stride apart; APPEND only, else None
    out,            # [R, H * G, D], dense
    arena,          # the arena as elements of dense pages; a page starts at id * UNIT
    words,          # the same as i32
    table,          # i32 [C, LANES] page ids
    masks,          # i64 [C, LANES], visible slots of each page, 0 where there is no page; or None: all are visible
    slot_positions, # i32 [C, LANES] ids of pages i32 [P] with positions of slots; -1: consecutive. None if masks are
    bases,          # i32 [C], position of a chunk's first slot, -1 if its index in the path gives it. None likewise
    sidecars,       # i32 [C] page ids, -1 where there is none; SINKS only
    cos, sin,       # f32 [positions, D / 2]; ROTATE only
    turns,          # f32 [2, D / 2, P]: cosines and sines of the first P positions; ROTATE only
    heads,          # i32 [LANES, HEAD_INTS], the layout of a page; NUQ only, as the next three
    pairs,          # i32 [LANES, 4, HP]: pair, and offsets of its parts
    key_codebooks,  # f32 [LANES, 2, HP, 32]; of group codes f32 [LANES, 2, HP], the bias subtracted from keys, or None
    value_codebooks,  # f32 [LANES, 32]
    positions,      # i32 [R]
    indices,        # i32, chunk ids
    pieces,         # i32 [n, 12]: as in `attend`; its chunks are encoded, and the last two columns are first index and
                    # number of the dense chunks that follow them
    entries, partial_o, partial_lse, arrivals, lse,  # as in `attend`
    reads,          # i32 [C, H], or None: every page read adds 1
    staged,         # page id of the first staged page
    first_lane, q_stride, k_stride, v_stride,
    LANES: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    DP: tl.constexpr,      # D rounded up to a power of two
    HP: tl.constexpr,      # D / 2 rounded up to a power of two, >= 16
    ROWS: tl.constexpr,    # tile of query rows x G, a power of two, >= 16 for the tensor cores
    UNIT: tl.constexpr,    # elements in 128 bytes
    PAGE: tl.constexpr,    # units of a dense page
    SCALE: tl.constexpr,   # log2(e) times the factor of q . k
    WINDOW: tl.constexpr,  # positions a row sees; 0 sees all
    SOFT_CAP: tl.constexpr,  # log2(e) times the bound of scores; 0: none
    SINKS: tl.constexpr,   # number of exact tokens
    KIND: tl.constexpr,    # kernel id of the codec
    KEY_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr,  # see `nuq_keys`
    MOST_KEY_SLOTS: tl.constexpr, MOST_VALUE_SLOTS: tl.constexpr,
    ROTATE: tl.constexpr, APPEND: tl.constexpr, SEEDED: tl.constexpr,
):  # fmt: skip
    """Grid [H, n]."""
    head = tl.program_id(0)
    first_row, num_rows, chunk_ids, num_chunks, start, slot, seeds, num_seeds, parts, num_parts, own_ids, num_own = (
        piece_of(pieces, indices, entries)
    )
    if num_rows == 0:
        return
    query, valid, position, q_row = load_queries(
        q, positions, first_row, num_rows, q_stride, cos, sin, head, G, D, DP, ROWS, SCALE, ROTATE
    )
    lane = first_lane.to(tl.int64) + head
    # The first unwritten position. With APPEND that is the row's own.
    end = tl.load(positions + first_row) if APPEND else tl.load(positions + first_row + num_rows - 1) + 1
    first_mask, side, num_exact = first_chunk_of(chunk_ids, num_chunks, masks, sidecars, lane, LANES, SINKS)
    top, total, acc = attend_encoded_pages(
        q, q_row, valid, position, end, words, table, masks, slot_positions, bases, cos, sin, turns, heads, pairs,
        key_codebooks, value_codebooks, reads, chunk_ids, num_chunks, start, first_mask, num_exact, lane, head,
        LANES, H, D, P, DP, HP, ROWS, SCALE, WINDOW, SOFT_CAP, SINKS, KIND, KEY_PARTS, VALUE_PARTS, MOST_KEY_SLOTS,
        MOST_VALUE_SLOTS, ROTATE, APPEND,
    )  # fmt: skip
    if APPEND:
        # The piece with its row's own chunk adds the new token.
        top, total, acc = append_to_own(
            top, total, acc, query, valid, new_k, new_v, arena, table + lane, own_ids, num_own, end, first_row,
            k_stride, v_stride, cos, sin, head, staged, LANES, H, D, DP, P, UNIT, PAGE, ROWS, ROTATE, SOFT_CAP,
        )  # fmt: skip
    if SEEDED:
        top, total, acc = add_partials(
            top, total, acc, seeds, num_seeds, partial_o, partial_lse, num_rows, head, H, G, D, DP, ROWS
        )
    top, total, acc = attend_exact(
        top, total, acc, query, position, end, arena, table, reads, side, num_exact, first_mask, own_ids, num_own,
        start + num_chunks * P, cos, sin, lane, head, staged, LANES, H, D, DP, P, UNIT, PAGE, SINKS, WINDOW, SOFT_CAP,
        ROTATE, APPEND,
    )  # fmt: skip
    leave(
        out, first_row, num_rows, slot, parts, num_parts, top, total, acc, partial_o, partial_lse, arrivals, lse,
        head, H, G, D, DP, ROWS,
    )  # fmt: skip


@triton.jit
def first_chunk_of(chunk_ids, num_chunks, masks, sidecars, lane, ROW: tl.constexpr, SINKS: tl.constexpr):
    """For a piece's first chunk, returns the mask of its page, i64; its sidecar, i64, -1 without one; and the number of
    exact tokens there. Only a piece that begins with a sequence's first chunk has exact tokens.
    """
    chunk = tl.load(chunk_ids, mask=num_chunks > 0, other=0).to(tl.int64)
    mask = tl.full((), -1, tl.int64)
    if masks is not None:
        mask = tl.load(masks + lane + chunk * ROW)
    side = mask
    num_exact = 0
    if SINKS:
        side = tl.load(sidecars + chunk, mask=num_chunks > 0, other=-1).to(tl.int64)
        num_exact = tl.where(side >= 0, SINKS, 0)
    return mask, side, num_exact


@triton.jit
def shared_by_pages(
    heads, pairs, key_codebooks, value_codebooks, lane, KIND: tl.constexpr, HP: tl.constexpr, P: tl.constexpr
):
    """The data that all encoded pages of a head share: the order of its pairs, and the tables of keys and values."""
    order = tl.arange(0, HP)
    if KIND == NUQ:
        of_pair = pairs + lane * (4 * HP) + order
        centroid = tl.arange(0, 32)
        codebook = key_codebooks + lane * (2 * HP * 32) + (order * 32)[:, None] + centroid[None, :]
        value_codebook = value_codebooks + lane * 32 + (tl.arange(0, P // 2) * 0)[:, None] + centroid[None, :]
        order = tl.load(of_pair)
        of_head = heads + lane * HEAD_INTS
        of_keys = (
            tl.load(of_pair + HP), tl.load(of_pair + 2 * HP), tl.load(of_pair + 3 * HP), tl.load(codebook),
            tl.load(codebook + HP * 32), tl.load(of_head + KEY_SLOTS), tl.load(of_head + AT_KEY_SLOTS),
        )  # fmt: skip
        of_values = (
            tl.load(value_codebook), tl.load(of_head + VALUE_BITS), tl.load(of_head + AT_VALUES),
            tl.load(of_head + AT_RANGES), tl.load(of_head + VALUE_SLOTS), tl.load(of_head + AT_VALUE_SLOTS),
        )  # fmt: skip
    else:
        of_keys, of_values = None, None
        if key_codebooks is not None:
            of_keys = key_codebooks + lane * (2 * HP)
    return order, of_keys, of_values


@triton.jit
def attend_encoded_pages(
    q, q_row, valid, position, end,  # as in `load_queries`, and the first unwritten position
    words, table, masks, slot_positions, bases, cos, sin, turns, heads, pairs, key_codebooks, value_codebooks, reads,
    chunk_ids, num_chunks, start,    # a piece's chunks
    first_mask, num_exact,           # as in `first_chunk_of`
    lane, head,
    LANES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr,
    ROWS: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr,
    KIND: tl.constexpr, KEY_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr, MOST_KEY_SLOTS: tl.constexpr,
    MOST_VALUE_SLOTS: tl.constexpr, ROTATE: tl.constexpr, APPEND: tl.constexpr,
):  # fmt: skip
    """Maximum f32 [ROWS], sum [ROWS] and weighted sum [ROWS, DP] over the encoded pages of a piece."""
    HALF: tl.constexpr = D // 2
    order, of_keys, of_values = shared_by_pages(heads, pairs, key_codebooks, value_codebooks, lane, KIND, HP, P)
    in_pair = valid[:, None] & (tl.arange(0, HP) < HALF)[None, :]
    first_at = q + q_row[:, None] + order[None, :]
    first_query = tl.load(first_at, mask=in_pair, other=0.0).to(tl.float32) * SCALE
    second_query = tl.load(first_at + HALF, mask=in_pair, other=0.0).to(tl.float32) * SCALE
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)
    entry = table + lane
    last_chunk = tl.maximum(num_chunks - 1, 0)
    page = tl.load(entry + tl.load(chunk_ids).to(tl.int64) * LANES)
    next_seen = first_mask
    ahead = tl.load(chunk_ids + tl.minimum(1, last_chunk))
    for i in range(num_chunks):
        if reads is not None:
            is_read = next_seen != 0 if masks is not None else True
            tl.atomic_add(reads + tl.load(chunk_ids + i).to(tl.int64) * H + head, 1, mask=is_read)
        current = page.to(tl.int64)
        page = tl.load(entry + ahead.to(tl.int64) * LANES)
        seen = next_seen
        if masks is not None:
            next_seen = tl.load(masks + lane + ahead.to(tl.int64) * LANES)
        ahead = tl.load(chunk_ids + tl.minimum(i + 2, last_chunk))
        # If the head has no page here, the mask is 0 and the page id is arbitrary.
        if seen != 0 if masks is not None else True:
            top, total, acc = attend_page(
                top, total, acc, first_query, second_query, position, end, words, current, order, of_keys, of_values,
                masks, slot_positions, bases, cos, sin, turns, chunk_ids + i, i, start + i * P, seen, num_exact,
                lane, q.dtype.element_ty, LANES, D, P, DP, HP, ROWS, WINDOW, SOFT_CAP, SINKS, KIND, KEY_PARTS,
                VALUE_PARTS, MOST_KEY_SLOTS, MOST_VALUE_SLOTS, ROTATE, APPEND,
            )  # fmt: skip
    if KIND == NUQ:
        acc = deinterleaved(acc, ROWS, max(1, DP // 32))
    return top, total, acc


@triton.jit
def attend_page(
    top, total, acc, first_query, second_query, position, end,
    words, page,                # the arena as i32, and the page's id, i64
    order, of_keys, of_values,  # as in `shared_by_pages`
    masks, slot_positions, bases, cos, sin, turns,
    chunk_id,                   # where the page's chunk is named
    i, page_start,              # index in the piece, and position by the index in the path
    seen, num_exact, lane,
    TYPE: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, KIND: tl.constexpr,
    KEY_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr, MOST_KEY_SLOTS: tl.constexpr, MOST_VALUE_SLOTS: tl.constexpr,
    ROTATE: tl.constexpr, APPEND: tl.constexpr,
):  # fmt: skip
    """Extends the sums by an encoded page. Columns of acc are in the order of `interleaved` if KIND is NUQ."""
    HALF: tl.constexpr = D // 2
    slots = tl.arange(0, P)
    if KIND == NUQ:
        at4, at2, at1, first_codebook, second_codebook, num_key_slots, at_key_slots = of_keys
        first, second = nuq_keys(
            words, page, at4, at2, at1, order, first_codebook, second_codebook, num_key_slots, at_key_slots, HALF, HP,
            P, KEY_PARTS, MOST_KEY_SLOTS,
        )  # fmt: skip
    else:
        first, second = decoded_keys(KIND, words, page, of_keys, D, HALF, HP, P)
    first_q, second_q = first_query, second_query
    if ROTATE:
        base, slot_cos, slot_sin = slot_angles(
            words, masks, slot_positions, bases, cos, sin, turns, chunk_id, lane, page_start, order, ROW, HALF,
            HP, P,
        )  # fmt: skip
        first, second = turned(first, second, slot_cos, slot_sin)
        # All rows of a decode piece have the same position.
        past = (tl.full((1,), 0, tl.int32) + end if APPEND else position) - base
        angle = tl.maximum(past, 0)[:, None] * HALF + order[None, :]
        is_pair = (tl.arange(0, HP) < HALF)[None, :]
        query_cos = tl.load(cos + angle, mask=is_pair, other=0.0)
        query_sin = tl.load(sin + angle, mask=is_pair, other=0.0)
        first_q, second_q = turned(first_query, second_query, query_cos, query_sin)
    token = slots
    if KIND == NUQ:
        # Rounded after this, not before: what a product reads must not itself be a reshape in Triton 3.6.
        first, second = interleaved(first, HP, 2), interleaved(second, HP, 2)
        token = slots % 2 * (P // 2) + slots // 2
    score = tl.dot(first_q.to(TYPE), first.to(TYPE), input_precision="ieee")
    score = tl.dot(second_q.to(TYPE), second.to(TYPE), score, input_precision="ieee")
    score = capped(score, SOFT_CAP)
    if SINKS:
        score = tl.where((i > 0) | (token >= num_exact)[None, :], score, float("-inf"))
    if masks is not None:
        score = tl.where(is_seen(seen, token)[None, :], score, float("-inf"))
    if WINDOW:
        score = tl.where((page_start + token)[None, :] > position[:, None] - WINDOW, score, float("-inf"))
    top, total, weight, factor = weigh(top, total, score)
    acc = add_values(
        acc * factor[:, None], weight.to(TYPE), words, page, of_values, D, DP, P, ROWS, KIND, VALUE_PARTS,
        MOST_VALUE_SLOTS,
    )  # fmt: skip
    return top, total, acc


@triton.jit
def add_values(
    acc,
    weight,  # [ROWS, P], of slots in the order of `interleaved` if KIND is NUQ
    words, page, of_values,
    D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    KIND: tl.constexpr, VALUE_PARTS: tl.constexpr, MOST_VALUE_SLOTS: tl.constexpr,
):  # fmt: skip
    """Adds the weighted values of an encoded page."""
    TYPE: tl.constexpr = weight.dtype
    NUM_RUNS: tl.constexpr = max(1, DP // 32)
    if KIND == NUQ:
        codebook, bits, at_values, at_ranges, num_slots, at_slots = of_values
        even, odd = nuq_values(
            words, page, codebook, bits, at_values, at_ranges, num_slots, at_slots, D, DP, P, VALUE_PARTS,
            MOST_VALUE_SLOTS,
        )  # fmt: skip
        even_weight, odd_weight = in_value_order(weight, ROWS, P)
        even, odd = interleaved(even, P // 2, NUM_RUNS), interleaved(odd, P // 2, NUM_RUNS)
        acc = tl.dot(even_weight, even.to(TYPE), acc, input_precision="ieee")
        acc = tl.dot(odd_weight, odd.to(TYPE), acc, input_precision="ieee")
    else:
        values = decoded_values(KIND, words, page, D, D // 2, DP, P)
        acc = tl.dot(weight, values.to(TYPE), acc, input_precision="ieee")
    return acc


@triton.jit
def slot_angles(
    words, masks, slot_positions, bases, cos, sin, turns, chunk_id, lane, start, order,  # as in `attend_page`
    ROW: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The base position of a page's keys, i32, and cosines and sines of the slots' offsets from it, f32 [HP, P]."""
    is_pair = (tl.arange(0, HP) < HALF)[:, None]
    base = start
    if masks is not None:
        base, turned_by = turns_of(words, slot_positions, bases, tl.load(chunk_id).to(tl.int64), lane, start, ROW, P)
        angle = turned_by[None, :] * HALF + order[:, None]
        slot_cos = tl.load(cos + angle, mask=is_pair, other=0.0)
        slot_sin = tl.load(sin + angle, mask=is_pair, other=0.0)
    else:
        turn = turns + order[:, None] * P + tl.arange(0, P)[None, :]
        slot_cos = tl.load(turn, mask=is_pair, other=0.0)
        slot_sin = tl.load(turn + HALF * P, mask=is_pair, other=0.0)
    return base, slot_cos, slot_sin


@triton.jit
def append_to_own(
    top, total, acc, query, valid, new_k, new_v, arena, entry, own_ids, num_own, end, row, k_stride, v_stride,
    cos, sin, head, staged,
    LANES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, ROTATE: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Stores a row's new token in its own chunk, if the piece has one, and extends the sums by it."""
    single = tl.arange(0, 1)
    holds = single < num_own
    chunk = tl.load(own_ids + single, mask=holds, other=0).to(tl.int64)
    target = dense_page(entry, chunk, head, staged, holds, LANES, H, PAGE) * UNIT + end % P * D
    new_top, new_total, new_acc = append_token(
        query, new_k, new_v, arena + target[:, None], holds, valid & (num_own > 0), end, row, k_stride, v_stride,
        cos, sin, head, D, DP, P, ROWS, ROTATE, SOFT_CAP, False,
    )  # fmt: skip
    return join(top, total, acc, new_top, new_total, new_acc)


@triton.jit
def attend_exact(
    top, total, acc, query, position, end, arena, table, reads,
    side, num_exact, first_mask,   # as in `first_chunk_of`
    own_ids, num_own, own_start,   # the dense chunks, and the position of the first one
    cos, sin, lane, head, staged,
    LANES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr,
    PAGE: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ROTATE: tl.constexpr,
    APPEND: tl.constexpr,
):  # fmt: skip
    """Extends the sums by the unencoded tokens: sinks, and the chunks that the rows write."""
    TYPE: tl.constexpr = query.dtype
    slots = tl.arange(0, P)
    if SINKS:
        rows = arena + tl.maximum(side, 0) * UNIT + lane * (2 * SINKS * D)
        top, total, acc = attend_sinks(
            top, total, acc, query, position, rows, num_exact, first_mask, cos, sin, D, DP, SINKS, WINDOW, SOFT_CAP,
            ROTATE,
        )  # fmt: skip
    for i in tl.range(num_own, num_stages=1):
        chunk = tl.load(own_ids + i).to(tl.int64)
        if reads is not None:
            tl.atomic_add(reads + tl.maximum(chunk, 0) * H + head, 1, mask=chunk >= 0)
        page = dense_page(table + lane, chunk, head, staged, chunk == chunk, LANES, H, PAGE)
        source = page * UNIT + slots * D
        at = own_start + i * P + slots
        # Slots from `end` on are unwritten: loading them is wasted, and multiplying them by zero may give NaN.
        written = at < end
        own_keys = load_rotated(arena, source, written, cos, sin, at, D, DP, ROTATE).to(TYPE)
        own_values = load_rotated(arena, source + P * D, written, cos, sin, at, D, DP, False).to(TYPE)
        visible = at[None, :] < position[:, None] if APPEND else at[None, :] <= position[:, None]
        if WINDOW:
            visible &= at[None, :] > position[:, None] - WINDOW
        top, total, acc = attend_dense(top, total, acc, query, own_keys, own_values, visible, SOFT_CAP)
    return top, total, acc
