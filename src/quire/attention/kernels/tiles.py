"""Decodes pages into tiles of keys and values in registers. docs/reference/page-format.md describes the pages.

A codebook of 32 centroids is one register of a warp, and a lookup is one shuffle. Pages are read as 32-bit words where
possible, because the compiler lays out the operands of products by their narrowest load.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

NUQ: tl.constexpr = tl.constexpr(3)
GROUP: tl.constexpr = tl.constexpr(4)
"""Kernel ids of codecs, as in kernels/common.h. tests/cache/test_codecs.py compares them."""


@triton.jit
def codebook_indices(
    fours, twos, ones,    # i32, words of a line. Each half holds parts of four codes: fours in all bits, twos in the
                          # lower eight, ones in the lower four
    PARTS: tl.constexpr,  # which of the three exist: a sum of 4, 2 and 1
):  # fmt: skip
    """The codes 1 and 3 of the four, in the lower and the upper byte of each half. For codes 2 and 4, the caller shifts
    every word by one code. A code is an index of a codebook.
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
    page,                             # i64
    at4, at2, at1,                    # i32 [HP]: offsets of a pair's upper 4 bits, 2 bits, lowest bit; -1: none
    order,                            # i32 [HP]: the pair
    first_codebook, second_codebook,  # f32 [HP, 32]: of a pair's two channels
    num_slots, at_slots,
    HALF: tl.constexpr, HP: tl.constexpr, P: tl.constexpr,
    PARTS: tl.constexpr,     # the powers of two in the widths of the model's keys: a sum of 4, 2 and 1
    SLOTS: tl.constexpr,     # most slots of a vector
):  # fmt: skip
    """The two channels of every pair, before rotation, f32 [HP, P] each."""
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
    # A thread has two of the page's four quarters, the even or the odd ones.
    odd = tl.arange(0, 2)[None, :, None]
    at = codebook_indices(fours[:, None, :] >> odd * 4, twos[:, None, :] >> odd * 2, ones[:, None, :] >> odd, PARTS)
    at = tl.reshape(at[:, None, :, :] >> (tl.arange(0, 2) * 8)[None, :, None, None], (HP, P))
    first = tl.gather(first_codebook, at & 31, 1)
    second = tl.gather(second_codebook, at >> 16 & 31, 1)
    for i in tl.static_range(SLOTS):
        at = page * 32 + (at_slots + i * (3 * P)) // 4
        channel, missing = slots_of(words, at, tl.arange(0, P), num_slots > i, P)
        here = order[:, None] == (channel % HALF)[None, :]
        first += tl.where(here, tl.where(channel < HALF, missing, 0.0)[None, :], 0.0)
        second += tl.where(here, tl.where(channel < HALF, 0.0, missing)[None, :], 0.0)
    return first, second


@triton.jit
def nuq_values(
    words, page, codebook, bits, at_values, at_ranges, num_slots, at_slots,
    D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The values of the even and of the odd token slots, f32 [P / 2, DP] each, in the order of `in_value_order`.
    Columns from D on are undefined. codebook is f32 [P / 2, 32].
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
    evens, odds = codebook_indices(fours, twos, ones, PARTS), codebook_indices(fours >> 4, twos >> 2, ones >> 1, PARTS)
    at = tl.where(m % 2 == 0, evens[None, :, :], odds[None, :, :]) >> m // 2 * 8
    at = tl.reshape(at, (P // 2, DP))
    even = tl.gather(codebook, at & 31, 1)
    odd = tl.gather(codebook, at >> 16 & 31, 1)
    field = tl.arange(0, P // 2) % (P // 8) * 4 + tl.arange(0, P // 2) // (P // 8)
    ranges = words + page * 32 + at_ranges // 4 + field
    s, z = tl.load(ranges), tl.load(ranges + P // 2)
    even_shift = half_in(z, 0)[:, None]
    odd_shift = half_in(z, 1)[:, None]
    for i in tl.static_range(SLOTS):
        # No channel is in two slots, so each residual may be added to the shift alone.
        at = page * 32 + (at_slots + i * (3 * P)) // 4
        channel, missing = slots_of(words, at, 2 * field, num_slots > i, P)
        even_shift = tl.where(channel[:, None] == d[None, :], (half_in(z, 0) + missing)[:, None], even_shift)
        channel, missing = slots_of(words, at, 2 * field + 1, num_slots > i, P)
        odd_shift = tl.where(channel[:, None] == d[None, :], (half_in(z, 1) + missing)[:, None], odd_shift)
    return even * half_in(s, 0)[:, None] + even_shift, odd * half_in(s, 1)[:, None] + odd_shift


@triton.jit
def interleaved(x, ROWS: tl.constexpr, NUM_RUNS: tl.constexpr):
    """Interleaves runs of C columns, [ROWS, NUM_RUNS * C]: the first column of each run, the second of each, ...

    A thread that looks up columns has every 32nd of them. Interleaving makes these neighbours, to be stored at once.
    """
    C: tl.constexpr = x.shape[1] // NUM_RUNS
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, NUM_RUNS, C)), (0, 2, 1)), (ROWS, NUM_RUNS * C))


@triton.jit
def deinterleaved(x, ROWS: tl.constexpr, NUM_RUNS: tl.constexpr):
    """The inverse of `interleaved`."""
    C: tl.constexpr = x.shape[1] // NUM_RUNS
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, C, NUM_RUNS)), (0, 2, 1)), (ROWS, NUM_RUNS * C))


@triton.jit
def in_value_order(x, ROWS: tl.constexpr, P: tl.constexpr):
    """Splits columns [ROWS, P], token slots as `interleaved` orders two runs, into even and odd slots, [ROWS,
    P / 2] each, in the token order of `nuq_values`.
    """
    # From slots 8 e + 2 m + i, upper and lower half of the page interleaved, to the order m, e, i.
    x = tl.permute(tl.reshape(x, (ROWS, P // 16, 4, 2, 2)), (0, 2, 4, 1, 3))
    return tl.split(tl.reshape(x, (ROWS, P // 2, 2)))


@triton.jit
def half_in(words, side):
    """The float16 in the lower or the upper half of words, as f32. Pages are read only as words."""
    return (words >> side * 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def slots_of(words, at, slot, used, P: tl.constexpr):
    """The channel and the residual in one outlier slot of some tokens, i32 and f32; -1 and 0 if the slot is not used.
    at: offset of the slot in words.
    """
    used = (slot < P) & used
    four = tl.load(words + at + slot // 4, mask=used, other=0)
    two = tl.load(words + at + P // 4 + slot // 2, mask=used, other=0)
    return tl.where(used, four >> slot % 4 * 8 & 255, -1), half_in(two, slot % 2)


@triton.jit
def decoded_keys(
    KIND: tl.constexpr, words, page,
    bias,  # as in `group_keys`
    D: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The two channels of every pair, before rotation, f32 [HP, P] each, of a page of a codec without codebooks. Such a
    codec has a case here and one in `decoded_values`.
    """
    tl.static_assert(KIND == GROUP, "a codec without a case")
    return group_keys(words, page, bias, D, HALF, HP, P)


@triton.jit
def decoded_values(
    KIND: tl.constexpr, words, page, D: tl.constexpr, HALF: tl.constexpr, DP: tl.constexpr, P: tl.constexpr
):
    """The values of such a page, f32 [P, DP]. Columns from D on are undefined."""
    tl.static_assert(KIND == GROUP, "a codec without a case")
    return group_values(words, page, D, HALF, DP, P)


@triton.jit
def group_keys(
    words, page,
    bias,  # f32 [2, HP], what was subtracted from one head's keys; or None
    D: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """`nuq_keys` for a page of group codes. Computed with the slots as rows, as the page has them."""
    pair = tl.arange(0, HP)
    first, second = group_halves(words, page, 0, 0, D, HALF, HP, P)
    if bias is not None:
        first += tl.load(bias + pair)[None, :]
        second += tl.load(bias + HP + pair)[None, :]
    return tl.trans(first), tl.trans(second)


@triton.jit
def group_values(words, page, D: tl.constexpr, HALF: tl.constexpr, DP: tl.constexpr, P: tl.constexpr):
    """The values of a page of group codes, f32 [P, DP]. Columns from D on are undefined."""
    GROUPS: tl.constexpr = (D + 63) // 64
    if 2 * HALF == DP:
        low, high = group_halves(words, page, P * HALF // 4, GROUPS * P, D, HALF, HALF, P)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (P, DP))
    d = tl.arange(0, DP)[None, :]
    slot = tl.arange(0, P)[:, None]
    byte = slot * HALF + d % HALF
    four = tl.load(words + page * 32 + P * HALF // 4 + byte // 4, mask=d < D, other=0)
    code = four >> byte % 4 * 8 + d // HALF * 4 & 15
    return in_groups(code, words + page * 32 + P * D // 4 + GROUPS * P, tl.arange(0, DP), 0, (D - 1) // 64, P)


@triton.jit
def group_halves(
    words, page,
    at, at_ranges,  # the words before the codes, and before the ranges after all codes
    D: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The lower and the upper half of every slot's channels, f32 [P, HP] each; zero in columns from HALF on."""
    slot = tl.arange(0, P)[:, None]
    channel = tl.arange(0, HP)
    base = words + page * 32
    if HALF % 4:
        byte = slot * HALF + channel[None, :]
        both = tl.load(base + at + byte // 4, mask=(channel < HALF)[None, :], other=0) >> byte % 4 * 8
    else:
        word = tl.arange(0, HP // 4)[None, :]
        four = tl.load(base + at + slot * (HALF // 4) + word, mask=word < HALF // 4, other=0)
        both = tl.reshape(four[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :], (P, HP))
    ranges = base + P * D // 4 + at_ranges
    first = in_groups(both & 15, ranges, channel, 0, (HALF - 1) // 64, P)
    second = in_groups(both >> 4 & 15, ranges, channel + HALF, HALF // 64, (D - 1) // 64, P)
    if HALF < HP:
        inside = (channel < HALF)[None, :]
        first, second = tl.where(inside, first, 0.0), tl.where(inside, second, 0.0)
    return first, second


@triton.jit
def in_groups(
    code,     # i32 [P, C], below 16
    ranges,   # of the first group
    channel,  # i32 [C]
    FIRST: tl.constexpr, LAST: tl.constexpr,  # the groups that the channels are in
    P: tl.constexpr,
):  # fmt: skip
    """The values of codes in the ranges of their channels' groups, f32 [P, C]."""
    low, step = range_of(ranges + FIRST * P, P)
    low, step = low[:, None], step[:, None]
    for group in tl.static_range(FIRST + 1, LAST + 1):
        other_low, other_step = range_of(ranges + group * P, P)
        inside = (channel // 64 == group)[None, :]
        low, step = tl.where(inside, other_low[:, None], low), tl.where(inside, other_step[:, None], step)
    # With these bits above it a code is a float32, 2^23 more than it should be. A conversion takes four times as long.
    return low + ((code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0) * step


@triton.jit
def range_of(ranges, P: tl.constexpr):
    """Minimum and step of every slot's group, f32 [P] each. A word has those of two slots."""
    pair = tl.arange(0, P // 2)
    side = tl.arange(0, 2)[None, :]
    low, step = tl.load(ranges + pair), tl.load(ranges + P // 2 + pair)
    return tl.reshape(half_in(low[:, None], side), (P,)), tl.reshape(half_in(step[:, None], side), (P,))
