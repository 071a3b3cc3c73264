"""Encodes full dense pages, bit for bit as `NuqCodec.encode` and `GroupCodec.encode` define it.

A program encodes one page, and a thread one token slot. Threads loop over the channels, because the definition sums
over them in order. They exchange only the bits of neighbouring slots that share a word. Products and sums must not be
fused: launch with enable_fp_fusion=False.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from quire.attention.kernels.encoded import (
    AT_KEY_SLOTS,
    AT_RANGES,
    AT_VALUE_SLOTS,
    AT_VALUES,
    END,
    HEAD_INTS,
    KEY_SLOTS,
    VALUE_BITS,
    VALUE_SLOTS,
)
from quire.attention.kernels.write import dense_page

LARGEST_HALF: tl.constexpr = tl.constexpr(65504.0)
REACH: tl.constexpr = tl.constexpr(1.0 / 256.0)
"""1 / RESIDUAL_REACH of the codec."""

FIT_ROUNDS: tl.constexpr = tl.constexpr(2)
STEP: tl.constexpr = tl.constexpr(1.0 / 15.0)
"""A code's step, as a fraction of its group's range."""


@triton.jit
def half_of(x):
    """The nearest finite float16, as float16."""
    return tl.minimum(tl.maximum(x, -LARGEST_HALF), LARGEST_HALF).to(tl.float16)


@triton.jit
def codes_of(x, edges, num_edges, s, z):
    """The number of edges * s + z that each x exceeds, i32 [P]. x, s and z are f32 [P], s >= 0, edges ascend."""
    code = tl.zeros_like(x).to(tl.int32)
    for power in tl.static_range(4, -1, -1):
        at = code + (1 << power) - 1
        is_edge = at < num_edges
        edge = tl.load(edges + at, mask=is_edge, other=0.0)
        code += tl.where(is_edge & (x > edge * s + z), 1 << power, 0)
    return code


@triton.jit
def source_of(
    arena, table, sidecars, seals, staged, lane, head,
    LANES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr,
    DP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The offset of a seal's dense page, in elements; the id of the page to write; and the number of exact tokens,
    which this copies into the sidecar.
    """
    seal = seals + tl.program_id(1) * 2
    source, sealed = tl.load(seal).to(tl.int64), tl.load(seal + 1).to(tl.int64)
    entry = table + lane
    dense = dense_page(entry, source, head, staged, source == source, LANES, H, PAGE) * UNIT
    page = tl.load(entry + sealed * LANES).to(tl.int64)
    num_exact = 0
    if SINKS:
        side = tl.load(sidecars + sealed).to(tl.int64)
        num_exact = tl.where(side >= 0, SINKS, 0)
        SP: tl.constexpr = triton.next_power_of_2(SINKS)
        sink, d = tl.arange(0, SP), tl.arange(0, DP)
        mask = (sink < num_exact)[:, None] & (d < D)[None, :]
        rows = sink[:, None] * D + d[None, :]
        to = arena + side * UNIT + lane * (2 * SINKS * D) + rows
        tl.store(to, tl.load(arena + dense + rows, mask=mask), mask=mask)
        tl.store(to + SINKS * D, tl.load(arena + dense + P * D + rows, mask=mask), mask=mask)
    return dense, page, num_exact


@triton.jit(do_not_specialize=["first_lane", "staged"])
def encode_nuq(
    arena, words, halves, octets,   # as in `attend_encoded`
    table, sidecars,                # i32 [C, LANES], [C]
    seals,                          # i32 [n, 2]: full chunk, chunk it is encoded into
    staged,                         # page id of the first staged page
    heads, pairs,                   # as in `attend_encoded`
    key_edges, key_codebooks,       # f32 [LANES, D, 32]; edges past a width are +inf
    key_weight,                     # f32 [LANES, D]
    value_edges, value_codebooks,   # f32 [LANES, 32]; edges past the width are 0
    first_lane,
    LANES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr,
    DP: tl.constexpr, HP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid [H, seals, layers], of layers with equal heads whose lanes follow each other."""
    head = tl.program_id(0)
    lane = first_lane.to(tl.int64) + tl.program_id(2) * H + head
    dense, page, num_exact = source_of(
        arena, table, sidecars, seals, staged, lane, head, LANES, H, D, P, UNIT, PAGE, DP, SINKS
    )
    encoded = tl.arange(0, P) >= num_exact
    of_head = heads + lane * HEAD_INTS
    channel_0, missing_0, channel_1, missing_1 = encode_keys(
        arena, dense, words, page, encoded, pairs + lane * (4 * HP), key_edges, key_codebooks, key_weight,
        lane, D, P, HP,
    )  # fmt: skip
    at_slots, num_slots = tl.load(of_head + AT_KEY_SLOTS), tl.load(of_head + KEY_SLOTS)
    store_slots(octets, halves, page, at_slots, num_slots, channel_0, missing_0, channel_1, missing_1, P)

    of_values = dense + P * D + tl.arange(0, P) * D
    count, bits = tl.load(of_head + VALUE_SLOTS), tl.load(of_head + VALUE_BITS)
    edges, codebook = value_edges + lane * 32, value_codebooks + lane * 32
    channel_0, channel_1 = value_outliers(arena, of_values, encoded, count, D, P)
    half_s, half_z = value_range(
        arena, of_values, encoded, channel_0, channel_1, count, edges, (1 << bits) - 1, codebook, D, P
    )
    ranges = halves + page * 64 + tl.load(of_head + AT_RANGES) // 2 + tl.arange(0, P)
    tl.store(ranges, half_s)
    tl.store(ranges + P, half_z)
    base = words + page * 32 + tl.load(of_head + AT_VALUES) // 4
    missing_0, missing_1 = encode_values(
        arena, of_values, encoded, channel_0, channel_1, half_s.to(tl.float32), half_z.to(tl.float32), edges, codebook,
        bits, base, D, P,
    )  # fmt: skip
    store_slots(
        octets, halves, page, tl.load(of_head + AT_VALUE_SLOTS), count, channel_0, missing_0, channel_1, missing_1, P
    )
    end = tl.load(of_head + END)
    padding = end + tl.arange(0, 128)
    tl.store(octets + page * 128 + padding, 0, mask=padding < (end + 127) // 128 * 128)


@triton.jit
def encode_keys(
    arena, dense,  # and the dense page's offset
    words, page,   # and the id of the page to write
    encoded,       # i1 [P], slots whose tokens are not exact beside the page
    of_pair,       # i32 [4, HP]
    key_edges, key_codebooks, key_weight, lane,
    D: tl.constexpr, P: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    """Stores the codes of a page's keys. Returns the two costliest channels of each slot with their residuals."""
    HALF: tl.constexpr = D // 2
    slot = tl.arange(0, P)
    quarter = tl.arange(0, 4)
    word = tl.arange(0, P // 4)
    # The two costliest channels so far: cost, channel, residual.
    cost_0 = tl.full((P,), -1.0, tl.float32)
    cost_1 = cost_0
    channel_0 = tl.zeros((P,), tl.int32)
    channel_1 = channel_0
    missing_0 = tl.zeros((P,), tl.float32)
    missing_1 = missing_0
    for block in range(D // 8):
        twos = tl.zeros((P // 4,), tl.int32)
        ones = twos
        for i in tl.static_range(4):
            p = block * 4 + i
            pair = tl.load(of_pair + p)
            at4, at2, at1 = tl.load(of_pair + HP + p), tl.load(of_pair + 2 * HP + p), tl.load(of_pair + 3 * HP + p)
            has_one = (at1 >= 0).to(tl.int32)
            fours = tl.zeros((P // 4,), tl.int32)
            for side in tl.static_range(2):
                channel = pair + side * HALF
                x = channel_of(arena, dense + slot * D, encoded, channel)
                at = (lane * D + channel) * 32
                code = codes_of(x, key_edges + at, 31, 1.0, 0.0)
                missing = x - tl.load(key_codebooks + at + code)
                cost = missing * missing * tl.load(key_weight + lane * D + channel)
                wins = (cost > cost_0) | ((cost == cost_0) & (channel < channel_0))
                second = ~wins & ((cost > cost_1) | ((cost == cost_1) & (channel < channel_1)))
                cost_1 = tl.where(wins, cost_0, tl.where(second, cost, cost_1))
                channel_1 = tl.where(wins, channel_0, tl.where(second, channel, channel_1))
                missing_1 = tl.where(wins, missing_0, tl.where(second, missing, missing_1))
                cost_0 = tl.where(wins, cost, cost_0)
                channel_0 = tl.where(wins, channel, channel_0)
                missing_0 = tl.where(wins, missing, missing_0)
                # Quarter r of the page goes to the bits from r * width of its lane.
                upper = tl.reshape(code >> has_one, (4, P // 4))
                lowest = tl.reshape(code & 1, (4, P // 4))
                fours |= tl.sum((upper & 15) << (quarter * 4)[:, None], 0) << 16 * side
                twos |= tl.sum((upper & 3) << (quarter * 2)[:, None], 0) << 16 * side + 8 * (i % 2)
                ones |= tl.sum(lowest << quarter[:, None], 0) << 16 * side + 4 * i
            tl.store(words + page * 32 + at4 + word, fours, mask=at4 >= 0)
            if i % 2:
                tl.store(words + page * 32 + at2 + word, twos, mask=at2 >= 0)
                twos = tl.zeros((P // 4,), tl.int32)
            if i == 3:
                tl.store(words + page * 32 + at1 + word, ones, mask=at1 >= 0)
    return channel_0, missing_0, channel_1, missing_1


@triton.jit
def channel_of(
    arena,
    vectors,  # i64 [P], where the slots' vectors start
    encoded, channel,
):  # fmt: skip
    """One channel of all slots, f32 [P]; zero in exact tokens."""
    return tl.where(encoded, tl.load(arena + vectors + channel).to(tl.float32), 0.0)


@triton.jit
def value_outliers(
    arena,
    of_values,  # i64 [P], where the slots' values start
    encoded,    # as in `encode_keys`
    count,      # number of slots for channels
    D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The two channels farthest from the mean of each vector, i32 [P]; -1 without a slot for it."""
    total = tl.zeros((P,), tl.float32)
    for c in range(D):
        total += channel_of(arena, of_values, encoded, c)
    mean = tl.div_rn(total, tl.zeros((P,), tl.float32) + D)
    cost_0 = tl.full((P,), -1.0, tl.float32)
    cost_1 = cost_0
    channel_0 = tl.zeros((P,), tl.int32) - 1
    channel_1 = channel_0
    for c in range(D):
        cost = tl.abs(channel_of(arena, of_values, encoded, c) - mean)
        wins = cost > cost_0
        second = ~wins & (cost > cost_1)
        channel_1 = tl.where(wins, channel_0, tl.where(second, c, channel_1))
        cost_1 = tl.where(wins, cost_0, tl.where(second, cost, cost_1))
        channel_0 = tl.where(wins, c, channel_0)
        cost_0 = tl.where(wins, cost, cost_0)
    return tl.where(count > 0, channel_0, -1), tl.where(count > 1, channel_1, -1)


@triton.jit
def value_range(
    arena, of_values, encoded, channel_0, channel_1, count,  # as in `value_outliers`, and its result
    edges, num_edges, codebook,                              # of one head
    D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The scale and the shift of each vector, f16 [P], fitted to the channels without a slot."""
    high = tl.full((P,), float("-inf"), tl.float32)
    low = tl.full((P,), float("inf"), tl.float32)
    for c in range(D):
        x = channel_of(arena, of_values, encoded, c)
        inner = (channel_0 != c) & (channel_1 != c)
        high = tl.where(inner, tl.maximum(high, x), high)
        low = tl.where(inner, tl.minimum(low, x), low)
    middle = (high + low) * 0.5
    s = (high - low) * 0.5
    z = middle
    total = tl.zeros((P,), tl.float32)
    for c in range(D):
        x = channel_of(arena, of_values, encoded, c)
        total += tl.where((channel_0 != c) & (channel_1 != c), x - middle, 0.0)
    number = tl.zeros((P,), tl.float32) + (D - count).to(tl.float32)
    for _ in range(FIT_ROUNDS):
        sum_c = tl.zeros((P,), tl.float32)
        sum_cc, sum_cx = sum_c, sum_c
        for c in range(D):
            x = channel_of(arena, of_values, encoded, c)
            inner = (channel_0 != c) & (channel_1 != c)
            centroid = tl.where(inner, tl.load(codebook + codes_of(x, edges, num_edges, s, z)), 0.0)
            sum_c += centroid
            sum_cc += centroid * centroid
            sum_cx += centroid * tl.where(inner, x - middle, 0.0)
        spread = sum_cc - tl.div_rn(sum_c * sum_c, number)
        slope = sum_cx - tl.div_rn(sum_c * total, number)
        fits = (spread > 0) & (slope > 0)
        s = tl.where(fits, tl.div_rn(slope, tl.where(fits, spread, 1.0)), s)
        z = tl.where(fits, middle + tl.div_rn(total - s * sum_c, number), z)
    beyond = tl.zeros((P,), tl.float32)
    for c in range(D):
        x = channel_of(arena, of_values, encoded, c)
        beyond = tl.where((channel_0 == c) | (channel_1 == c), tl.maximum(beyond, tl.abs(x - z)), beyond)
    s = tl.maximum(s, beyond * REACH)
    # Adding zero removes minus zero, whose order relative to zero is not defined.
    return half_of(s + 0.0), half_of(z + 0.0)


@triton.jit
def encode_values(
    arena, of_values, encoded, channel_0, channel_1,  # as in `value_outliers`, and its result
    s, z,         # f32 [P], scale and shift
    edges, codebook,  # of one head
    bits,
    base,         # the page's words of values
    D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Stores the codes of a page's values. Returns the residuals of the two channels that have slots, f32 [P]."""
    missing_0 = tl.zeros((P,), tl.float32)
    missing_1 = missing_0
    has4, has2, has1 = bits // 4, bits // 2 % 2, bits % 2
    for c in range(D):
        x = channel_of(arena, of_values, encoded, c)
        code = codes_of(x, edges, (1 << bits) - 1, s, z)
        missing = x - (tl.load(codebook + code) * s + z)
        missing_0 = tl.where(channel_0 == c, missing, missing_0)
        missing_1 = tl.where(channel_1 == c, missing, missing_1)
        at = c // 16 * (8 * has4 + 4 * has2 + 2 * has1) * 16 + c % 16
        store_values(base, at, code >> has1, 4, has4 > 0, P)
        store_values(base, at + 8 * has4 * 16, code >> has1, 2, has2 > 0, P)
        store_values(base, at + (8 * has4 + 4 * has2) * 16, code, 1, has1 > 0, P)
    return missing_0, missing_1


@triton.jit
def store_values(base, at, code, WIDTH: tl.constexpr, wanted, P: tl.constexpr):
    """Stores WIDTH bits of each of one channel's codes, i32 [P]. Slots 2f and 2f + 1 share a word. The fields f of one
    line are consecutive in it. Lines are 16 words apart.
    """
    FIELDS: tl.constexpr = 16 // WIDTH
    LINES: tl.constexpr = P // 2 // FIELDS
    part = tl.reshape(code & ((1 << WIDTH) - 1), (LINES, 2 * FIELDS))
    slot = tl.arange(0, 2 * FIELDS)
    word = tl.sum(part << (slot // 2 * WIDTH + slot % 2 * 16)[None, :], 1)
    line = tl.arange(0, LINES)
    tl.store(base + at + line * 16, word, mask=(line < LINES) & wanted)


@triton.jit
def store_slots(
    octets, halves, page, at_slots, count, channel_0, missing_0, channel_1, missing_1, P: tl.constexpr
):  # fmt: skip
    """Stores the first `count` of two slots of every vector: channel and residual."""
    slot = tl.arange(0, P)
    at = page * 128 + at_slots
    tl.store(octets + at + slot, channel_0.to(tl.uint8), mask=(slot < P) & (count > 0))
    tl.store(halves + at // 2 + P // 2 + slot, half_of(missing_0), mask=(slot < P) & (count > 0))
    at += 3 * P
    tl.store(octets + at + slot, channel_1.to(tl.uint8), mask=(slot < P) & (count > 1))
    tl.store(halves + at // 2 + P // 2 + slot, half_of(missing_1), mask=(slot < P) & (count > 1))


@triton.jit(do_not_specialize=["first_lane", "staged"])
def encode_groups(
    arena, halves, octets, table, seals, staged,
    key_bias,                       # f32 [LANES, D], subtracted from keys before they are stored; or None
    first_lane,
    LANES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Grid as of `encode_nuq`. A byte holds the codes of two channels D / 2 apart, whose groups may differ."""
    HALF: tl.constexpr = D // 2
    GROUPS: tl.constexpr = (D + 63) // 64
    head = tl.program_id(0)
    lane = first_lane.to(tl.int64) + tl.program_id(2) * H + head
    dense, page, _ = source_of(arena, table, None, seals, staged, lane, head, LANES, H, D, P, UNIT, PAGE, DP, 0)
    slot = tl.arange(0, P)
    for side in tl.static_range(2):
        bias = None
        if side == 0 and key_bias is not None:
            bias = key_bias + lane * D
        source = arena + dense + side * P * D + slot * D
        ranges = halves + page * 64 + P * D // 2 + side * (GROUPS * 2 * P) + slot
        for group in tl.static_range(GROUPS):
            low = tl.full((P,), float("inf"), tl.float32)
            high = tl.full((P,), float("-inf"), tl.float32)
            for c in range(group * 64, min(D, group * 64 + 64)):
                x = less_bias(source, bias, c)
                low, high = tl.minimum(low, x), tl.maximum(high, x)
            half_low = half_of(low + 0.0)
            half_step = half_of(tl.maximum(high - half_low.to(tl.float32), 0.0) * STEP + 0.0)
            tl.store(ranges + group * (2 * P), half_low)
            tl.store(ranges + group * (2 * P) + P, half_step)
        # The barrier makes the ranges visible to all threads of the program.
        tl.debug_barrier()
        to = octets + page * 128 + side * P * HALF + slot * HALF
        for c in range(HALF):
            lower = group_codes(less_bias(source, bias, c), ranges + c // 64 * (2 * P), P)
            upper = group_codes(less_bias(source, bias, c + HALF), ranges + (c + HALF) // 64 * (2 * P), P)
            tl.store(to + c, (lower | upper << 4).to(tl.uint8))


@triton.jit
def less_bias(source, bias, c):
    """One channel of all slots, f32 [P], minus its bias if there is one."""
    x = tl.load(source + c).to(tl.float32)
    if bias is not None:
        x -= tl.load(bias + c)
    return x


@triton.jit
def group_codes(x, ranges, P: tl.constexpr):
    """The codes of one channel in its group's range, i32 [P]: the nearest, ties to even."""
    low, step = tl.load(ranges).to(tl.float32), tl.load(ranges + P).to(tl.float32)
    scaled = tl.div_rn(x - low, tl.where(step > 0, step, 1.0))
    scaled = tl.minimum(tl.maximum(scaled, 0.0), 15.0)
    # Adding 2^23 leaves no bits for a fraction, so the sum rounds.
    return (scaled + 8388608.0).to(tl.int32) - 8388608
