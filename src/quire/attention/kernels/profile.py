"""Attention statistics: column sums, after the attention of each layer; and, after the step, the attention of a
prompt's last rows to the tokens that a policy keeps.

    a_ij = mean of exp(s_ij - lse_i) over the query heads of a kv head
    sums_j += sum_i a_ij,      recovered = mean_i sum_j a_ij [j is kept]

With a budget, peaks replace sums: for each token, the largest exp(s_ij - lse_i) of any query head and of any row that
follows the token by enough tokens.

Attention stores the lse of every row, so a probability needs only its score, which is computed again. A column here is
a chunk of a path: one page of keys, rotated once for all rows that see it. One program owns a page of sums and adds its
rows in order, so sums do not depend on the order in which programs run.

If sealed chunks are encoded, rows before some position read a chunk as it was computed, in a dense page of its own or
in a staged one. Later rows read it as stored; `encoded.turns_of` gives the positions of its slots. Here, queries and
keys are both rotated by their positions.

Defined by attention/profile.py; tests/kernels/triton_interpreter and tests/gpu compare the two.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from quire.attention.kernels.attend import capped, is_seen, load_rotated
from quire.attention.kernels.encoded import AT_KEY_SLOTS, HEAD_INTS, KEY_SLOTS, turned, turns_of
from quire.attention.kernels.tiles import NUQ, decoded_keys, nuq_keys
from quire.attention.kernels.write import dense_page

COLUMN_INTS: tl.constexpr = tl.constexpr(8)
"""Fields of a column: first query row that counts; number of rows; id of the chunk as computed, or ~i for staged chunk
i; id of the chunk as stored; row of the chunk table with its sums; position of its first slot; number of tokens by
which a row must follow a slot to count for its peak, or -1 for sums; first position whose row reads the chunk as
stored."""

KEPT_INTS: tl.constexpr = tl.constexpr(3)
"""Fields of a chunk that kept rows see: id of the chunk as computed, or ~i for page i of the kept keys; id of the chunk
as stored; first position whose row reads the chunk as stored."""

NO_CODES: tl.constexpr = tl.constexpr(0)
"""Kernel id if no page is encoded."""


@triton.jit(do_not_specialize=["num_rows", "num_kept"])
def place_queries(
    q,             # [R, H * G, D], rows q_stride apart
    queries,       # [H, R, G, D], out: rotated and scaled as for the scores of attention
    lse,           # f32 [R, H, G], base 2
    kept_indices,  # i32 [R], a row's index among the kept rows, or -1; or None: no row is kept
    kept_queries,  # [H, kept rows, G, D], out; or None likewise
    kept_lse,      # f32 [H, kept rows, G], out; or None likewise
    cos, sin,      # f32 [positions, D / 2]; ROTATE only
    positions,     # i32 [R]
    num_rows, num_kept, q_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr,   # tile of query rows x G
    SCALE: tl.constexpr,  # log2(e) times the factor of q . k
    ROTATE: tl.constexpr,
):  # fmt: skip
    """Grid [H, ceil(R * G / ROWS)]."""
    head = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    row = m // G
    valid = row < num_rows
    stored = valid[:, None] & (d < D)[None, :]
    position = tl.load(positions + row, mask=valid, other=0)
    query = load_rotated(q, row * q_stride + (head * G + m % G) * D, valid, cos, sin, position, D, DP, ROTATE)
    query = (query * SCALE).to(q.dtype.element_ty)
    tl.store(queries + (head * num_rows * G + m)[:, None] * D + d[None, :], query, mask=stored)
    if kept_indices is not None:
        index = tl.load(kept_indices + row, mask=valid, other=-1).to(tl.int64)
        kept = index >= 0
        to = (head * num_kept + index) * G + m % G
        tl.store(kept_queries + to[:, None] * D + d[None, :], query, mask=stored & kept[:, None])
        limit = tl.load(lse + (row * H + head) * G + m % G, mask=kept, other=0.0)
        tl.store(kept_lse + to, limit, mask=kept)


@triton.jit
def probabilities(
    queries,   # rows of D channels, G per query row
    limits,    # f32, their lse: G per query row, query rows STRIDE apart
    keys,      # [K, P], rotated
    channel,   # i32 [K], the channel of each row of keys
    is_channel,
    m,         # i32 [ROWS], indices into rows x G
    end,       # end of the valid indices
    position,  # i32 [ROWS]
    at,        # i32 [P], positions of the keys
    G: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of rows x G to a page of keys, f32 [ROWS, P]; zero outside. Unwritten slots count too."""
    valid = m < end
    row = m.to(tl.int64)
    query = tl.load(queries + row[:, None] * D + channel[None, :], mask=valid[:, None] & is_channel[None, :], other=0.0)
    limit = tl.load(limits + row // G * STRIDE + row % G, mask=valid, other=float("inf"))
    # A row that sees nothing gives probabilities of zero.
    limit = tl.where(limit > float("-inf"), limit, float("inf"))
    score = capped(tl.dot(query, keys, input_precision="ieee"), SOFT_CAP)
    visible = at[None, :] <= position[:, None]
    if WINDOW:
        visible &= at[None, :] > position[:, None] - WINDOW
    return tl.where(visible, tl.exp2(score - limit[:, None]), 0.0)


@triton.jit
def dense_keys(
    arena, page, written, cos, sin, at,
    D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """The keys of a dense page, [DP, P]; the channel of each of these DP rows; and whether this channel exists."""
    channel = tl.arange(0, DP)
    source = page * UNIT + tl.arange(0, P) * D
    if ROTATE:
        keys = load_rotated(arena, source, written, cos, sin, at, D, DP, True).to(arena.dtype.element_ty)
    else:
        in_page = written[:, None] & (channel < D)[None, :]
        keys = tl.load(arena + source[:, None] + channel[None, :], mask=in_page, other=0.0)
    return keys.T, channel, channel < D


@triton.jit
def encoded_keys(
    arena, words,  # the arena as page elements and as i32
    table, chunk, lane,
    slot_positions, bases, sidecars, cos, sin, heads, pairs, key_codebooks,  # as in `attend_encoded`
    start,  # first position of the chunk by its index in the path
    LANES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, HP: tl.constexpr, UNIT: tl.constexpr,
    SINKS: tl.constexpr, KIND: tl.constexpr, KEY_PARTS: tl.constexpr, MOST_KEY_SLOTS: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    """The keys of an encoded page and its sinks, [2 * HP, P]; the channel of each of their rows; whether it exists."""
    HALF: tl.constexpr = D // 2
    page = tl.load(table + chunk * LANES + lane).to(tl.int64)
    pair, both = tl.arange(0, HP), tl.arange(0, 2 * HP)
    order, channel = pair, both % HP
    if KIND == NUQ:
        of_pair = pairs + lane * (4 * HP) + pair
        order, channel = tl.load(of_pair), tl.load(pairs + lane * (4 * HP) + channel)
        at4, at2, at1 = tl.load(of_pair + HP), tl.load(of_pair + 2 * HP), tl.load(of_pair + 3 * HP)
        codebook = key_codebooks + lane * (2 * HP * 32) + (pair * 32)[:, None] + tl.arange(0, 32)[None, :]
        of_head = heads + lane * HEAD_INTS
        first, second = nuq_keys(
            words, page, at4, at2, at1, order, tl.load(codebook), tl.load(codebook + HP * 32),
            tl.load(of_head + KEY_SLOTS), tl.load(of_head + AT_KEY_SLOTS), HALF, HP, P, KEY_PARTS, MOST_KEY_SLOTS,
        )  # fmt: skip
    else:
        head_bias = None
        if key_codebooks is not None:
            head_bias = key_codebooks + lane * (2 * HP)
        first, second = decoded_keys(KIND, words, page, head_bias, D, HALF, HP, P)
    slots = tl.arange(0, P)
    is_pair = (pair < HALF)[:, None]
    if SINKS:
        side = tl.load(sidecars + chunk).to(tl.int64)
        exact = ((slots < SINKS) & (side >= 0))[None, :] & is_pair
        row = arena + tl.maximum(side, 0) * UNIT + lane * (2 * SINKS * D) + slots[None, :] * D + order[:, None]
        first = tl.where(exact, tl.load(row, mask=exact, other=0.0).to(tl.float32), first)
        second = tl.where(exact, tl.load(row + HALF, mask=exact, other=0.0).to(tl.float32), second)
    if ROTATE:
        base, turned_by = turns_of(words, slot_positions, bases, chunk, lane, start, LANES, P)
        angle = (base + turned_by).to(tl.int64)[None, :] * HALF + order[:, None]
        key_cos, key_sin = tl.load(cos + angle, mask=is_pair, other=0.0), tl.load(sin + angle, mask=is_pair, other=0.0)
        first, second = turned(first, second, key_cos, key_sin)
    TYPE: tl.constexpr = arena.dtype.element_ty
    keys = tl.reshape(tl.permute(tl.join(first.to(TYPE), second.to(TYPE)), (2, 0, 1)), (2 * HP, P))
    return keys, channel + both // HP * HALF, both % HP < HALF


@triton.jit
def rows_that_see(
    first_position, num_rows, start,
    P: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The range [first, end) of the rows, at consecutive positions, that see any slot of a page."""
    low = tl.minimum(tl.maximum(start - first_position, 0), num_rows)
    high = num_rows
    if WINDOW:
        high = tl.maximum(tl.minimum(num_rows, start + P - 1 + WINDOW - first_position), low)
    return low, high


@triton.jit
def put_sums(
    sums,   # f32, one page
    found,  # f32 [ROWS, P]: sums or peaks
    kept,   # i1 [P]
    peaks,  # whether `found` has peaks
    G: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Adds the mean over query heads to a page of sums; or raises a page of peaks to the largest values."""
    slots = tl.arange(0, P)
    old = tl.load(sums + slots, mask=kept, other=0.0)
    new = tl.where(peaks, tl.maximum(old, tl.max(found, 0)), old + tl.sum(found, 0) * (1.0 / G))
    tl.store(sums + slots, new, mask=kept)


@triton.jit
def add_rows(
    total,  # f32 [ROWS, P]
    keys, channel, is_channel, queries, limits,  # as in `probabilities`
    low, high,       # query rows that count
    first_position,  # position of row 0; the others follow
    at, far, peaks,
    ROWS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, H: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Extends sums, or peaks, by more rows."""
    for first in tl.range(low * G, high * G, ROWS):
        m = first + tl.arange(0, ROWS)
        position = first_position + m // G
        found = probabilities(
            queries, limits, keys, channel, is_channel, m, high * G, position, at, G, D, H * G, WINDOW, SOFT_CAP
        )
        found = tl.where(at[None, :] + far <= position[:, None], found, 0.0)
        total = tl.where(peaks, tl.maximum(total, found), total + found)
    return total


@triton.jit
def mask_of(
    masks, chunk, lane,
    wanted,  # i1: if not, the mask is zero
    ROW: tl.constexpr,
):  # fmt: skip
    """The visible slots of a chunk's page, i64: all slots of a staged chunk."""
    mask = tl.load(masks + tl.maximum(chunk, 0) * ROW + lane, mask=wanted, other=0)
    return tl.where(wanted & (chunk < 0), tl.full((), -1, tl.int64), mask)


@triton.jit(do_not_specialize=["first_lane", "num_rows", "staged"])
def sum_columns(
    queries,    # [H, R, G, D]
    lse,        # f32 [R, H, G], base 2
    arena, words,  # the arena as page elements and as i32
    sums,       # the arena as f32; a page starts at id * 32
    table,      # i32 [C, LANES] page ids
    masks,      # i64 [C, LANES]
    slot_positions, bases, sidecars, cos, sin, heads, pairs, key_codebooks,  # as in `attend_encoded`, or None
    positions,  # i32 [R]
    columns,    # i32 [n, COLUMN_INTS]
    staged,     # page id of the first staged page
    first_lane, num_rows,
    LANES: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DP: tl.constexpr,
    HP: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, KIND: tl.constexpr, KEY_PARTS: tl.constexpr,
    MOST_KEY_SLOTS: tl.constexpr, ROTATE: tl.constexpr,  # whether pages hold keys before their rotation
):  # fmt: skip
    """Adds to the columns of slices of many rows. Grid [H, n]: a program has one column of one head."""
    head = tl.program_id(0).to(tl.int64)
    column = columns + tl.program_id(1).to(tl.int64) * COLUMN_INTS
    first_row, count = tl.load(column).to(tl.int64), tl.load(column + 1)
    computed, stored = tl.load(column + 2).to(tl.int64), tl.load(column + 3).to(tl.int64)
    into = tl.load(column + 4).to(tl.int64)
    start, far, split = tl.load(column + 5), tl.load(column + 6), tl.load(column + 7)
    peaks = far >= 0
    far = tl.maximum(far, 0)
    lane = first_lane.to(tl.int64) + head
    first_position = tl.load(positions + first_row)
    low, high = rows_that_see(first_position, count, start, P, WINDOW)
    low = tl.minimum(tl.maximum(low, start + far - first_position), high)
    middle = tl.minimum(tl.maximum(split - first_position, low), high)
    # Zero if retention needs no sums of this head, or the head keeps nothing of the chunk.
    is_wanted = tl.load(masks + into * LANES + lane) != 0
    seen = mask_of(masks, computed, lane, is_wanted & (low < middle), LANES)
    stored_seen = tl.full((), 0, tl.int64)
    if KIND != NO_CODES:
        stored_seen = mask_of(masks, stored, lane, is_wanted & (middle < high), LANES)
    if (seen | stored_seen) == 0:
        return

    slots = tl.arange(0, P)
    at = start + slots
    written = at < first_position + count
    total = tl.zeros((ROWS, P), tl.float32)
    first_query = queries + (head * num_rows + first_row) * (G * D)
    limits = lse + (first_row * H + head) * G
    if seen != 0:
        page = dense_page(table + lane, computed, head, staged, computed == computed, LANES, H, PAGE)
        keys, channel, is_channel = dense_keys(
            arena, page, written & is_seen(seen, slots), cos, sin, at, D, DP, P, UNIT, ROTATE
        )
        total = add_rows(
            total, keys, channel, is_channel, first_query, limits, low, middle, first_position, at, far, peaks, ROWS,
            G, D, H, WINDOW, SOFT_CAP,
        )  # fmt: skip
    if KIND != NO_CODES:  # noqa: SIM102 - known when compiled
        if stored_seen != 0:
            keys, channel, is_channel = encoded_keys(
                arena, words, table, stored, lane, slot_positions, bases, sidecars, cos, sin,
                heads, pairs, key_codebooks, start, LANES, H, D, P, HP, UNIT, SINKS, KIND, KEY_PARTS, MOST_KEY_SLOTS,
                ROTATE,
            )  # fmt: skip
            total = add_rows(
                total, keys, channel, is_channel, first_query, limits, middle, high, first_position, at, far, peaks,
                ROWS, G, D, H, WINDOW, SOFT_CAP,
            )  # fmt: skip
    into_page = tl.load(table + into * LANES + lane).to(tl.int64)
    put_sums(sums + into_page * 32, total, written & is_seen(seen | stored_seen, slots), peaks, G, P)


@triton.jit(do_not_specialize=["first_lane", "num_rows", "staged"])
def sum_single_columns(
    queries, lse, arena, words, sums, table, masks,  # as in `sum_columns`
    slot_positions, bases, sidecars, cos, sin, heads, pairs, key_codebooks,
    positions,
    num_columns,  # i32 [1]: number of columns in use
    columns,      # i32 [n, COLUMN_INTS], each of a slice of one row
    staged, first_lane, num_rows,
    LANES: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DP: tl.constexpr,
    HP: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, KIND: tl.constexpr, KEY_PARTS: tl.constexpr,
    MOST_KEY_SLOTS: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """`sum_columns` for slices of one row. Grid [H, any]: programs take columns in turns, so that one graph serves any
    number of columns.
    """
    head = tl.program_id(0).to(tl.int64)
    lane = first_lane.to(tl.int64) + head
    slots = tl.arange(0, P)
    m = tl.arange(0, ROWS)
    for index in tl.range(tl.program_id(1), tl.load(num_columns), tl.num_programs(1)):
        column = columns + index * COLUMN_INTS
        row = tl.load(column).to(tl.int64)
        computed, stored = tl.load(column + 2).to(tl.int64), tl.load(column + 3).to(tl.int64)
        into = tl.load(column + 4).to(tl.int64)
        start, far, split = tl.load(column + 5), tl.load(column + 6), tl.load(column + 7)
        at = start + slots
        position = tl.load(positions + row)
        is_computed = position < split
        chunk = tl.where(is_computed, computed, stored)
        is_wanted = tl.load(masks + into * LANES + lane) != 0
        if WINDOW:
            is_wanted &= start + P > position - WINDOW + 1
        mask = mask_of(masks, chunk, lane, is_wanted, LANES)
        # Where the mask is 0 there may be no page, and the page id is arbitrary.
        is_wanted &= mask != 0
        into_page = tl.load(table + into * LANES + lane, mask=is_wanted, other=0).to(tl.int64)
        kept = is_seen(mask, slots) & (at <= position)
        first_query = queries + (head * num_rows + row) * (G * D)
        limits = lse + (row * H + head) * G
        if KIND == NO_CODES:
            page = dense_page(table + lane, chunk, head, staged, is_wanted, LANES, H, PAGE)
            keys, channel, is_channel = dense_keys(arena, page, kept, cos, sin, at, D, DP, P, UNIT, ROTATE)
            found = probabilities(
                first_query, limits, keys, channel, is_channel, m, G, position + m * 0, at, G, D, H * G, WINDOW,
                SOFT_CAP,
            )  # fmt: skip
        else:
            found = tl.zeros((ROWS, P), tl.float32)
            if is_wanted & is_computed:
                page = dense_page(table + lane, chunk, head, staged, is_wanted, LANES, H, PAGE)
                keys, channel, is_channel = dense_keys(arena, page, kept, cos, sin, at, D, DP, P, UNIT, ROTATE)
                found = probabilities(
                    first_query, limits, keys, channel, is_channel, m, G, position + m * 0, at, G, D, H * G, WINDOW,
                    SOFT_CAP,
                )  # fmt: skip
            elif is_wanted:
                keys, channel, is_channel = encoded_keys(
                    arena, words, table, chunk, lane, slot_positions, bases, sidecars, cos, sin,
                    heads, pairs, key_codebooks, start, LANES, H, D, P, HP, UNIT, SINKS, KIND, KEY_PARTS,
                    MOST_KEY_SLOTS, ROTATE,
                )  # fmt: skip
                found = probabilities(
                    first_query, limits, keys, channel, is_channel, m, G, position + m * 0, at, G, D, H * G, WINDOW,
                    SOFT_CAP,
                )  # fmt: skip
        found = tl.where((at + tl.maximum(far, 0) <= position)[None, :], found, 0.0)
        put_sums(sums + into_page * 32, found, kept, far >= 0, G, P)


@triton.jit(do_not_specialize=["first_lane", "first_source", "first_target"])
def keep_keys(
    arena,         # the arena as page elements
    table,         # i32 [C, LANES] page ids
    chunks,        # i32 [n], or ~ their numbers among staged chunks
    first_source,  # page id of the first staged page
    first_target,  # page id of the layer's first kept half page
    first_lane,
    LANES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DP: tl.constexpr, UNIT: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Copies the keys of dense pages of one layer, for `recover`. Grid [H, n]."""
    head = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1).to(tl.int64)
    chunk = tl.load(chunks + index).to(tl.int64)
    lane = first_lane.to(tl.int64) + head
    page = dense_page(table + lane, chunk, head, first_source, chunk == chunk, LANES, H, PAGE)
    target = first_target + (index * H + head) * (PAGE // 2)
    d = tl.arange(0, DP)
    place = (tl.arange(0, P) * D)[:, None] + d[None, :]
    in_row = (d < D)[None, :]
    tl.store(arena + target * UNIT + place, tl.load(arena + page * UNIT + place, mask=in_row), mask=in_row)


@triton.jit
def add_kept(
    total,  # f32 [ROWS, P]
    keys, channel, is_channel, queries, limits, low, high, first_position, at,  # as in `add_rows`
    always,   # i1 [P]: slots kept for every row
    nearest,  # i64: number of last tokens that each row also keeps
    ROWS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Extends the recovered attention by more rows."""
    for first in tl.range(low * G, high * G, ROWS):
        m = first + tl.arange(0, ROWS)
        position = first_position + m // G
        found = probabilities(
            queries, limits, keys, channel, is_channel, m, high * G, position, at, G, D, G, WINDOW, SOFT_CAP
        )
        near = (position[:, None] - at[None, :]).to(tl.int64) < nearest
        total += tl.where(near | always[None, :], found, 0.0)
    return total


_NUMBERS_OF_RECOVER = (
    "num_kept", "first_kept", "count", "first_position", "first_start", "num_words", "first_page", "num_pages",
    "first_lane",
)  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS_OF_RECOVER)
def recover(
    kept_queries,  # [layers, H, kept rows, G, D]
    kept_lse,      # f32 [layers, H, kept rows, G], base 2
    arena, words, table, masks,  # as in `sum_columns`
    slot_positions, bases, sidecars, cos, sin, heads, pairs, key_codebooks,
    chunks,        # i32 [n, KEPT_INTS], of a path, in order of position
    kept,          # i64 [layers, H, words]: columns kept for every row, by position
    local,         # i64 [layers, H]: number of last tokens that each row also keeps, its own included
    out,           # f32 [layers, H, n]: attention of all rows x G to the kept slots of each chunk
    first_page,    # page id of the first half page that `keep_keys` wrote
    num_pages,     # half pages per layer and head that it wrote
    num_kept, first_kept, count,  # kept rows of the step; first kept row and kept rows of the slice
    first_position,               # position of the slice's first kept row
    first_start,                  # position of the first slot of the first chunk
    num_words, first_lane,
    LANES: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DP: tl.constexpr,
    HP: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, KIND: tl.constexpr, KEY_PARTS: tl.constexpr,
    MOST_KEY_SLOTS: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Grid [layers * H, n], of layers with equal heads whose lanes follow each other."""
    layer_head = tl.program_id(0).to(tl.int64)
    lane = first_lane + layer_head
    index = tl.program_id(1).to(tl.int64)
    computed = tl.load(chunks + index * KEPT_INTS).to(tl.int64)
    stored, split = tl.load(chunks + index * KEPT_INTS + 1).to(tl.int64), tl.load(chunks + index * KEPT_INTS + 2)
    start = first_start + tl.program_id(1) * P
    word = start // P
    bits = tl.load(kept + layer_head * num_words + word, mask=word < num_words, other=0)
    nearest = tl.load(local + layer_head)
    low, high = rows_that_see(first_position, count, start, P, WINDOW)
    middle = tl.minimum(tl.maximum(split - first_position, low), high)
    # The local tokens of the first row begin earliest.
    is_wanted = (bits != 0) | (start + P > first_position - nearest + 1)
    seen = mask_of(masks, computed, lane, is_wanted & (low < middle), LANES)
    stored_seen = tl.full((), 0, tl.int64)
    if KIND != NO_CODES:
        stored_seen = mask_of(masks, stored, lane, is_wanted & (middle < high), LANES)

    slots = tl.arange(0, P)
    at = start + slots
    written = at < first_position + count
    always = is_seen(bits, slots)
    total = tl.zeros((ROWS, P), tl.float32)
    first_query = kept_queries + (layer_head * num_kept + first_kept) * (G * D)
    limits = kept_lse + (layer_head * num_kept + first_kept) * G
    if seen != 0:
        layer, head = layer_head // H, layer_head % H
        first = first_page + layer * num_pages * H * (PAGE // 2)
        page = dense_page(table + lane, computed, head, first, computed == computed, LANES, H, PAGE // 2)
        keys, channel, is_channel = dense_keys(
            arena, page, written & is_seen(seen, slots), cos, sin, at, D, DP, P, UNIT, ROTATE
        )
        total = add_kept(
            total, keys, channel, is_channel, first_query, limits, low, middle, first_position, at, always, nearest,
            ROWS, G, D, WINDOW, SOFT_CAP,
        )  # fmt: skip
    if KIND != NO_CODES:  # noqa: SIM102 - known when compiled
        if stored_seen != 0:
            keys, channel, is_channel = encoded_keys(
                arena, words, table, stored, lane, slot_positions, bases, sidecars, cos, sin,
                heads, pairs, key_codebooks, start, LANES, H, D, P, HP, UNIT, SINKS, KIND, KEY_PARTS, MOST_KEY_SLOTS,
                ROTATE,
            )  # fmt: skip
            total = add_kept(
                total, keys, channel, is_channel, first_query, limits, middle, high, first_position, at, always,
                nearest, ROWS, G, D, WINDOW, SOFT_CAP,
            )  # fmt: skip
    counts = written & is_seen(seen | stored_seen, slots)
    tl.store(out + layer_head * tl.num_programs(1) + index, tl.sum(tl.where(counts, tl.sum(total, 0), 0.0)))
