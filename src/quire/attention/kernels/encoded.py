"""Attention where sealed chunks are encoded: codes become tiles of keys and values in registers, one page at a time.

A piece (see `layout`) reads a run of encoded chunks, then the chunks that its rows write themselves, which are dense:
the rows' own chunk, and with non-strict prefill those of their slice before it. Everything else is as in `attend`: the
same pieces, partials and phases.

No page holds rotated keys. Key j = p0 + t, in slot t of a page that starts at position p0, meets query i as

    <R(i) q, R(j) k> = <R(i - p0) q, R(t) k>

so the angles that keys turn by are the same 64 for every page and stay in registers, and what changes from page to
page turns the few query rows. A book of 32 centroids is one register of a warp, and a lookup one shuffle. Sinks lie
apart and are one small dense tile.

Defined by attention.reference; tests/kernels/triton_interpreter and tests/gpu hold the two together.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from quire.attention.kernels.attend import join, leave, load_rotated, sum_partials
from quire.attention.kernels.write import dense_page

NUQ: tl.constexpr = tl.constexpr(3)
"""Kernel id of the non-uniform codec; other encoded pages are group codes."""

KEY_SLOTS, AT_KEY_SLOTS, AT_VALUES, AT_RANGES, VALUE_SLOTS, AT_VALUE_SLOTS, VALUE_BITS, END = (
    tl.constexpr(column) for column in range(8)
)
"""Columns of `heads`: how many slots there are, and where parts of a page begin and the last ends, in bytes."""

HEAD_INTS: tl.constexpr = tl.constexpr(8)


@triton.jit
def places(
    fours, twos, ones,    # i32, words of a line: of each half all of fours, the lower eight bits of twos and the lower
                          # four of ones hold a part of four codes
    PARTS: tl.constexpr,  # which of the three there are: a sum of 4, 2 and 1
):  # fmt: skip
    """The places in their books of the first and the third of these codes, in the lower and the upper byte of each
    half. Of the second and the fourth, if every word is shifted by one code.
    """
    found = fours & 0x0F0F0F0F
    if PARTS & 2:
        found |= (twos & 0x00030003) | (twos << 4 & 0x03000300)
    if PARTS & 1:
        found |= (ones << 4 & 0x00100010) | (ones << 10 & 0x10001000)
    return found


@triton.jit
def nuq_keys(
    words,                   # the arena as i32
    page,                    # i64
    at4, at2, at1,           # i32 [HP]: where a pair's upper 4 bits, 2 bits and lowest bit begin, in words; -1: nowhere
    order,                   # i32 [HP]: the pair
    first_book, second_book, # f32 [HP, 32]: of a pair's two channels
    num_slots, at_slots,
    HALF: tl.constexpr, HP: tl.constexpr, P: tl.constexpr,
    PARTS: tl.constexpr,     # of the widths that keys of the model have, the powers of two: 4, 2, 1, or several of them
    SLOTS: tl.constexpr,     # of a vector at most
):  # fmt: skip
    """The two channels of every pair, not rotated, f32 [HP, P] each."""
    base = words + page * 32
    lanes = tl.arange(0, P // 4)
    pair = tl.arange(0, HP)
    fours = tl.zeros((HP, P // 4), tl.int32)
    twos = fours
    ones = fours
    if PARTS & 4:
        fours = tl.load(base + at4[:, None] + lanes[None, :], mask=(at4 >= 0)[:, None], other=0)
    if PARTS & 2:
        twos = tl.load(base + at2[:, None] + lanes[None, :], mask=(at2 >= 0)[:, None], other=0)
        twos = twos >> (pair % 2 * 8)[:, None]
    if PARTS & 1:
        ones = tl.load(base + at1[:, None] + lanes[None, :], mask=(at1 >= 0)[:, None], other=0)
        ones = ones >> (pair % 4 * 4)[:, None]
    # A thread has two of the four quarters of the page, the even or the odd ones.
    odd = tl.arange(0, 2)[None, :, None]
    at = places(fours[:, None, :] >> odd * 4, twos[:, None, :] >> odd * 2, ones[:, None, :] >> odd, PARTS)
    at = tl.reshape(at[:, None, :, :] >> (tl.arange(0, 2) * 8)[None, :, None, None], (HP, P))
    first = tl.gather(first_book, at & 31, 1)
    second = tl.gather(second_book, at >> 16 & 31, 1)
    for i in tl.static_range(SLOTS):
        at = page * 32 + (at_slots + i * (3 * P)) // 4
        channel, missing = slots_of(words, at, tl.arange(0, P), num_slots > i, P)
        here = order[:, None] == (channel % HALF)[None, :]
        first += tl.where(here, tl.where(channel < HALF, missing, 0.0)[None, :], 0.0)
        second += tl.where(here, tl.where(channel < HALF, 0.0, missing)[None, :], 0.0)
    return first, second


@triton.jit
def nuq_values(
    words, page, book, bits, at_values, at_ranges, num_slots, at_slots,
    D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The values of the even and of the odd token slots, f32 [P / 2, DP] each, in the order of `in_value_order`;
    without a meaning past D. book is f32 [P / 2, 32].
    """
    base = words + page * 32 + at_values // 4
    eighth = tl.arange(0, P // 8)
    d = tl.arange(0, DP)
    has4, has2, has1 = bits // 4, bits // 2 % 2, bits % 2
    column = d // 16 * (8 * has4 + 4 * has2 + 2 * has1) * 16 + d % 16
    inside = (d < D)[None, :]
    fours = tl.zeros((P // 8, DP), tl.int32)
    twos = fours
    ones = fours
    if PARTS & 4:
        fours = tl.load(base + (eighth * 16)[:, None] + column[None, :], mask=inside & (has4 > 0), other=0)
    if PARTS & 2:
        row = (8 * has4 + eighth // 2) * 16
        twos = tl.load(base + row[:, None] + column[None, :], mask=inside & (has2 > 0), other=0)
        twos = twos >> (eighth % 2 * 8)[:, None]
    if PARTS & 1:
        row = (8 * has4 + 4 * has2 + eighth // 4) * 16
        ones = tl.load(base + row[:, None] + column[None, :], mask=inside & (has1 > 0), other=0)
        ones = ones >> (eighth % 4 * 4)[:, None]
    # Slots 8 e + 2 m and the next: m before e, so that a thread has all codes of a word.
    m = tl.arange(0, 4)[:, None, None]
    evens, odds = places(fours, twos, ones, PARTS), places(fours >> 4, twos >> 2, ones >> 1, PARTS)
    at = tl.where(m % 2 == 0, evens[None, :, :], odds[None, :, :]) >> m // 2 * 8
    at = tl.reshape(at, (P // 2, DP))
    even = tl.gather(book, at & 31, 1)
    odd = tl.gather(book, at >> 16 & 31, 1)
    field = tl.arange(0, P // 2) % (P // 8) * 4 + tl.arange(0, P // 2) // (P // 8)
    ranges = words + page * 32 + at_ranges // 4 + field
    s, z = tl.load(ranges), tl.load(ranges + P // 2)
    even_shift = half_in(z, 0)[:, None]
    odd_shift = half_in(z, 1)[:, None]
    for i in tl.static_range(SLOTS):
        # No channel is in two slots, so what is missing there may join the shift by itself.
        at = page * 32 + (at_slots + i * (3 * P)) // 4
        channel, missing = slots_of(words, at, 2 * field, num_slots > i, P)
        even_shift = tl.where(channel[:, None] == d[None, :], (half_in(z, 0) + missing)[:, None], even_shift)
        channel, missing = slots_of(words, at, 2 * field + 1, num_slots > i, P)
        odd_shift = tl.where(channel[:, None] == d[None, :], (half_in(z, 1) + missing)[:, None], odd_shift)
    return even * half_in(s, 0)[:, None] + even_shift, odd * half_in(s, 1)[:, None] + odd_shift


@triton.jit
def dealt(x, ROWS: tl.constexpr, HANDS: tl.constexpr):
    """Columns of [ROWS, HANDS * C] in turns: the first of each of so many equal runs, the second of each, and so on.

    A thread that looks up columns has every 32nd of them; so what it has stands side by side, to be stored at once.
    """
    C: tl.constexpr = x.shape[1] // HANDS
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, HANDS, C)), (0, 2, 1)), (ROWS, HANDS * C))


@triton.jit
def gathered(x, ROWS: tl.constexpr, HANDS: tl.constexpr):
    """The inverse of `dealt`."""
    C: tl.constexpr = x.shape[1] // HANDS
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, C, HANDS)), (0, 2, 1)), (ROWS, HANDS * C))


@triton.jit
def in_value_order(x, ROWS: tl.constexpr, P: tl.constexpr):
    """Columns [ROWS, P] of token slots in two turns (see `dealt`) -> those of the even and of the odd slots, [ROWS,
    P / 2] each, in the order that `nuq_values` has the tokens in.
    """
    # From slots 8 e + 2 m + i, the upper half of the page beside the lower, into m, e, i.
    x = tl.permute(tl.reshape(x, (ROWS, P // 16, 4, 2, 2)), (0, 2, 4, 1, 3))
    return tl.split(tl.reshape(x, (ROWS, P // 2, 2)))


@triton.jit
def half_in(words, side):
    """The float16 in the lower or the upper half of words, f32.

    Pages are read in words alone: the compiler lays out operands of products by the narrowest load behind them.
    """
    return (words >> side * 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def slots_of(words, at, slot, used, P: tl.constexpr):
    """Which channel of the vectors in some token slots has something missing, and what, i32 and f32; -1 and 0 where the
    slot is not used. at is in words.
    """
    used = (slot < P) & used
    four = tl.load(words + at + slot // 4, mask=used, other=0)
    two = tl.load(words + at + P // 4 + slot // 2, mask=used, other=0)
    return tl.where(used, four >> slot % 4 * 8 & 255, -1), half_in(two, slot % 2)


@triton.jit
def group_keys(halves, octets, page, D: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, P: tl.constexpr):
    """As `nuq_keys`, of a page of group codes."""
    pair = tl.arange(0, HP)[:, None]
    slot = tl.arange(0, P)[None, :]
    inside = pair < HALF
    both = tl.load(octets + page * 128 + slot * HALF + pair, mask=inside, other=0).to(tl.int32)
    ranges = halves + page * 64 + P * D // 2 + slot
    low = tl.load(ranges + pair // 64 * (2 * P), mask=inside, other=0.0).to(tl.float32)
    step = tl.load(ranges + pair // 64 * (2 * P) + P, mask=inside, other=0.0).to(tl.float32)
    first = low + (both & 15).to(tl.float32) * step
    group = (pair + HALF) // 64
    low = tl.load(ranges + group * (2 * P), mask=inside, other=0.0).to(tl.float32)
    step = tl.load(ranges + group * (2 * P) + P, mask=inside, other=0.0).to(tl.float32)
    return first, low + (both >> 4).to(tl.float32) * step


@triton.jit
def group_values(halves, octets, page, D: tl.constexpr, HALF: tl.constexpr, DP: tl.constexpr, P: tl.constexpr):
    """The values of a page of group codes, f32 [P, DP]."""
    d = tl.arange(0, DP)[None, :]
    slot = tl.arange(0, P)[:, None]
    inside = d < D
    both = tl.load(octets + page * 128 + P * HALF + slot * HALF + d % HALF, mask=inside, other=0).to(tl.int32)
    GROUPS: tl.constexpr = (D + 63) // 64
    ranges = halves + page * 64 + P * D // 2 + GROUPS * (2 * P) + d // 64 * (2 * P) + slot
    low = tl.load(ranges, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(ranges + P, mask=inside, other=0.0).to(tl.float32)
    return low + (both >> d // HALF * 4 & 15).to(tl.float32) * step


@triton.jit
def turned(first, second, cos, sin):
    """A rotation of pairs, f32."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def weigh(top, total, score):
    """The maximum and the sum over some tokens more, their weights, and the factor of what was summed before."""
    peak = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(score - safe[:, None])
    factor = tl.exp2(top - safe)
    return peak, total * factor + tl.sum(weight, 1), weight, factor


@triton.jit
def attend_dense(top, total, acc, query, keys, values, visible):
    """The sums over a tile of rotated keys [T, DP] and its values more."""
    score = tl.where(visible, tl.dot(query, keys.T, input_precision="ieee"), float("-inf"))
    top, total, weight, factor = weigh(top, total, score)
    acc = tl.dot(weight.to(values.dtype), values, acc * factor[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def attend_sinks(
    top, total, acc, query, position,
    rows,       # a head's rows of a sidecar
    num_exact,  # of them that count
    cos, sin, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """The sums over the first tokens of a sequence more, from their sidecar."""
    SP: tl.constexpr = triton.next_power_of_2(max(16, SINKS))
    sink = tl.arange(0, SP)
    exact = sink < num_exact
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
    words, halves, octets,  # the same as i32, f16, u8
    table,          # i32 [C, L, H] page ids
    sidecars,       # i32 [C] page ids; SINKS only
    cos, sin,       # f32 [positions, D / 2]; ROTATE only
    turns,          # f32 [2, D / 2, P]: cosines and sines of the first P positions; ROTATE only
    heads,          # i32 [L, H, HEAD_INTS], where and how many parts a page has; NUQ only, as the next three
    pairs,          # i32 [L, H, 4, HP]: pair, and where its parts begin
    key_books,      # f32 [L, H, 2, HP, 32]
    value_books,    # f32 [L, H, 32]
    positions,      # i32 [R]
    indices,        # i32, chunk ids
    pieces,         # i32 [n, 12]: as of `attend`; the chunks are encoded ones, and the last two say where the ids of
                    # dense chunks stand that follow, and how many there are
    entries, partial_o, partial_lse, arrivals,  # as of `attend`
    reads,          # i32 [C, H], or None: one is added for every page read
    staged,         # page id of the first staged page
    layer, q_stride, k_stride, v_stride,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    DP: tl.constexpr,      # D rounded up to a power of two
    HP: tl.constexpr,      # D / 2 rounded up to one, >= 16
    ROWS: tl.constexpr,    # tile of query rows x G, a power of two, >= 16 for the tensor cores
    UNIT: tl.constexpr,    # elements in 128 bytes
    PAGE: tl.constexpr,    # units of a dense page
    SCALE: tl.constexpr,   # log2(e) / sqrt(D)
    WINDOW: tl.constexpr,  # positions a row sees; 0 sees all
    SINKS: tl.constexpr,   # tokens that are exact
    KIND: tl.constexpr,    # kernel id of the codec
    KEY_PARTS: tl.constexpr, VALUE_PARTS: tl.constexpr,  # see `nuq_keys`
    MOST_KEY_SLOTS: tl.constexpr, MOST_VALUE_SLOTS: tl.constexpr,
    ROTATE: tl.constexpr, APPEND: tl.constexpr, SEEDED: tl.constexpr,
):  # fmt: skip
    """Grid [H, n]."""
    HALF: tl.constexpr = D // 2
    DEALT: tl.constexpr = max(1, DP // 32)
    TYPE: tl.constexpr = q.dtype.element_ty
    head = tl.program_id(0)
    piece = pieces + tl.program_id(1).to(tl.int64) * 12
    first_row = tl.load(piece)
    num_rows = tl.load(piece + 1)
    chunk_ids = indices + tl.load(piece + 2)
    num_chunks = tl.load(piece + 3)
    start = tl.load(piece + 4)
    slot = tl.load(piece + 5)
    seeds = entries + tl.load(piece + 6)
    num_seeds = tl.load(piece + 7)
    parts = entries + tl.load(piece + 8)
    num_parts = tl.load(piece + 9)
    own_ids = indices + tl.load(piece + 10)
    num_own = tl.load(piece + 11)
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

    # Where nothing is written yet. A row to append has none of the tokens from its own on.
    end = tl.load(positions + first_row) if APPEND else tl.load(positions + first_row + num_rows - 1) + 1
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)

    # What is the same for all encoded pages.
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
    mask = valid[:, None] & is_pair[None, :]
    first_query = tl.load(q + q_row[:, None] + order[None, :], mask=mask, other=0.0).to(tl.float32) * SCALE
    second_query = tl.load(q + q_row[:, None] + order[None, :] + HALF, mask=mask, other=0.0).to(tl.float32) * SCALE
    if ROTATE:
        turn = turns + order[:, None] * P + slots[None, :]

    last_chunk = tl.maximum(num_chunks - 1, 0)
    page = tl.load(entry + tl.load(chunk_ids).to(tl.int64) * (L * H))
    ahead = tl.load(chunk_ids + tl.minimum(1, last_chunk))
    for i in range(num_chunks):
        if reads is not None:
            tl.atomic_add(reads + tl.load(chunk_ids + i).to(tl.int64) * H + head, 1)
        current = page.to(tl.int64)
        page = tl.load(entry + ahead.to(tl.int64) * (L * H))
        ahead = tl.load(chunk_ids + tl.minimum(i + 2, last_chunk))
        page_start = start + i * P
        if KIND == NUQ:
            first, second = nuq_keys(
                words, current, at4, at2, at1, order, first_book, second_book, num_key_slots,
                at_key_slots, HALF, HP, P, KEY_PARTS, MOST_KEY_SLOTS,
            )  # fmt: skip
        else:
            first, second = group_keys(halves, octets, current, D, HALF, HP, P)
        first_q, second_q = first_query, second_query
        if ROTATE:
            slot_cos = tl.load(turn, mask=is_pair[:, None], other=0.0)
            slot_sin = tl.load(turn + HALF * P, mask=is_pair[:, None], other=0.0)
            first, second = turned(first, second, slot_cos, slot_sin)
            # All rows of a decode piece are at one position.
            past = (tl.full((1,), 0, tl.int32) + end if APPEND else position) - page_start
            angle = tl.maximum(past, 0).to(tl.int64)[:, None] * HALF + order[None, :]
            query_cos = tl.load(cos + angle, mask=is_pair[None, :], other=0.0)
            query_sin = tl.load(sin + angle, mask=is_pair[None, :], other=0.0)
            first_q, second_q = turned(first_query, second_query, query_cos, query_sin)
        first, second, at = first.to(TYPE), second.to(TYPE), page_start + slots
        if KIND == NUQ:
            first, second = dealt(first, HP, 2), dealt(second, HP, 2)
            at = page_start + slots % 2 * (P // 2) + slots // 2
        score = tl.dot(first_q.to(TYPE), first, input_precision="ieee")
        score = tl.dot(second_q.to(TYPE), second, score, input_precision="ieee")
        if SINKS:
            score = tl.where(at[None, :] >= SINKS, score, float("-inf"))
        if WINDOW:
            score = tl.where(at[None, :] > position[:, None] - WINDOW, score, float("-inf"))
        top, total, weight, factor = weigh(top, total, score)
        weight, acc = weight.to(TYPE), acc * factor[:, None]
        if KIND == NUQ:
            even, odd = nuq_values(
                words, current, value_book, value_bits, at_values, at_ranges, num_value_slots, at_value_slots,
                D, DP, P, VALUE_PARTS, MOST_VALUE_SLOTS,
            )  # fmt: skip
            even_weight, odd_weight = in_value_order(weight, ROWS, P)
            acc = tl.dot(even_weight, dealt(even.to(TYPE), P // 2, DEALT), acc, input_precision="ieee")
            acc = tl.dot(odd_weight, dealt(odd.to(TYPE), P // 2, DEALT), acc, input_precision="ieee")
        else:
            values = group_values(halves, octets, current, D, HALF, DP, P)
            acc = tl.dot(weight, values.to(TYPE), acc, input_precision="ieee")
    if KIND == NUQ:
        acc = gathered(acc, ROWS, DEALT)

    if APPEND:
        # The piece that has its row's own chunk has the new token.
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
        # The first tokens of all, which only a piece that begins there has.
        num_exact = tl.where((start == 0) & (num_chunks > 0), SINKS, 0)
        side = tl.load(sidecars + tl.load(chunk_ids, mask=num_exact > 0, other=0).to(tl.int64)).to(tl.int64)
        top, total, acc = attend_sinks(
            top, total, acc, query, position, arena + side * UNIT + layer_head * (2 * SINKS * D), num_exact, cos, sin,
            D, DP, SINKS, WINDOW, ROTATE,
        )  # fmt: skip

    own_start = start + num_chunks * P
    for i in tl.range(num_own, num_stages=1):
        chunk = tl.load(own_ids + i).to(tl.int64)
        if reads is not None:
            tl.atomic_add(reads + tl.maximum(chunk, 0) * H + head, 1, mask=chunk >= 0)
        source = dense_page(entry, chunk, head, staged, chunk == chunk, L * H, H, PAGE) * UNIT + slots * D
        at = own_start + i * P + slots
        # Slots at `end` and beyond are unwritten: neither worth their bytes nor safe to multiply by zero.
        written = at < end
        own_keys = load_rotated(arena, source, written, cos, sin, at, D, DP, ROTATE).to(TYPE)
        own_values = load_rotated(arena, source + P * D, written, cos, sin, at, D, DP, False).to(TYPE)
        visible = at[None, :] < position[:, None] if APPEND else at[None, :] <= position[:, None]
        if WINDOW:
            visible &= at[None, :] > position[:, None] - WINDOW
        top, total, acc = attend_dense(top, total, acc, query, own_keys, own_values, visible)

    leave(
        out, first_row, num_rows, slot, parts, num_parts, top, total, acc, partial_o, partial_lse, arrivals, head,
        H, G, D, DP, ROWS,
    )  # fmt: skip
