"""What query rows look at: the sum of attention in each column once attention of a layer is done, and afterwards how
much of it the last rows of a prompt would recover of what a policy keeps.

    a_ij = mean of exp(s_ij - lse_i) over the query heads of a kv head
    sums_j += sum_i a_ij,      recovered = mean_i sum_j a_ij [j is kept]

or, in place of the sum, the largest exp(s_ij - lse_i) that any row and query head gives to a column well before it.

Attention leaves the lse of every row, so a probability follows from its score alone, which is made again. A column here
is a chunk of a path: one page of keys, before which all rows pass that see it, rotated once for all of them. Its page
of sums has one program, which adds its rows in order, so that sums do not depend on when programs run.

Reads dense pages only. Defined by attention/profile.py; tests/kernels/triton_interpreter and tests/gpu hold the two
together.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from quire.attention.kernels.attend import is_seen, load_rotated

COLUMN_INTS: tl.constexpr = tl.constexpr(6)
"""Columns of a column: first query row that counts, rows, chunk, row of the chunk table with its sums, position of its
first slot, tokens that a row must be behind a slot for its peak or -1 for sums."""


@triton.jit(do_not_specialize=["layer", "num_rows", "num_kept"])
def place_queries(
    q,             # [R, H * G, D], rows q_stride apart
    queries,       # [H, R, G, D]: as the scores of attention take them
    lse,           # f32 [R, H, G], base 2
    kept_places,   # i32 [R], a row's place among those that are kept, or -1; or None: none is
    kept_queries,  # [L, H, kept rows, G, D]; None likewise, as the next
    kept_lse,      # f32 [L, H, kept rows, G]
    cos, sin,      # f32 [positions, D / 2]; ROTATE only
    positions,     # i32 [R]
    num_rows, num_kept, layer, q_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr,   # tile of query rows x G
    SCALE: tl.constexpr,  # log2(e) / sqrt(D)
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
    if kept_places is not None:
        place = tl.load(kept_places + row, mask=valid, other=-1).to(tl.int64)
        kept = place >= 0
        to = ((layer.to(tl.int64) * H + head) * num_kept + place) * G + m % G
        tl.store(kept_queries + to[:, None] * D + d[None, :], query, mask=stored & kept[:, None])
        limit = tl.load(lse + (row * H + head) * G + m % G, mask=kept, other=0.0)
        tl.store(kept_lse + to, limit, mask=kept)


@triton.jit
def probabilities(
    query,     # [ROWS, DP], scaled
    keys,      # [P, DP]
    limits,    # f32; the lse of a row x G is at limits + its place
    place,     # i64 [ROWS]
    valid,     # i1 [ROWS]
    position,  # i32 [ROWS]
    at,        # i32 [P], positions of the keys
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of rows x G to a page of keys, f32 [ROWS, P], zero outside; of slots that nobody wrote, too.

    Also which of them its rows see.
    """
    limit = tl.load(limits + place, mask=valid, other=float("inf"))
    # A row that sees nothing has no probabilities.
    limit = tl.where(limit > float("-inf"), limit, float("inf"))
    score = tl.dot(query, keys.T, input_precision="ieee")
    visible = at[None, :] <= position[:, None]
    if WINDOW:
        visible &= at[None, :] > position[:, None] - WINDOW
    return tl.where(visible, tl.exp2(score - limit[:, None]), 0.0)


@triton.jit
def rows_that_see(
    first_position, num_rows, start,
    P: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Of rows at consecutive positions, the first one and the end of those that see something of a page."""
    low = tl.minimum(tl.maximum(start - first_position, 0), num_rows)
    high = num_rows
    if WINDOW:
        high = tl.maximum(tl.minimum(num_rows, start + P - 1 + WINDOW - first_position), low)
    return low, high


@triton.jit
def put_sums(
    sums,   # f32, of a page
    found,  # f32 [ROWS, P]: of each column several sums, or peaks
    kept,   # i1 [P]
    peaks,  # whether they are these
    G: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Adds a mean over query heads to a page of sums, or notes what is larger."""
    slots = tl.arange(0, P)
    old = tl.load(sums + slots, mask=kept, other=0.0)
    new = tl.where(peaks, tl.maximum(old, tl.max(found, 0)), old + tl.sum(found, 0) * (1.0 / G))
    tl.store(sums + slots, new, mask=kept)


@triton.jit(do_not_specialize=["layer", "num_rows"])
def sum_columns(
    queries,    # [H, R, G, D]
    lse,        # f32 [R, H, G], base 2
    arena,      # the arena as page elements; a page starts at id * UNIT
    sums,       # the same as f32; a page starts at id * 32
    table,      # i32 [C, L, H] page ids
    masks,      # i64 [C, L, H]
    positions,  # i32 [R]
    columns,    # i32 [n, COLUMN_INTS]
    layer, num_rows,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The columns of slices of many rows. Grid [H, n]: a program has one column of one head."""
    head = tl.program_id(0).to(tl.int64)
    column = columns + tl.program_id(1).to(tl.int64) * COLUMN_INTS
    first_row, count = tl.load(column).to(tl.int64), tl.load(column + 1)
    chunk, into = tl.load(column + 2).to(tl.int64), tl.load(column + 3).to(tl.int64)
    start, far = tl.load(column + 4), tl.load(column + 5)
    peaks = far >= 0
    far = tl.maximum(far, 0)
    layer_head = layer.to(tl.int64) * H + head
    mask = tl.load(masks + chunk * (L * H) + layer_head)
    # A head that retention needs no sums of, or that keeps nothing of the chunk.
    if (mask == 0) | (tl.load(masks + into * (L * H) + layer_head) == 0):
        return

    page = tl.load(table + chunk * (L * H) + layer_head).to(tl.int64)
    first_position = tl.load(positions + first_row)
    slots = tl.arange(0, P)
    d = tl.arange(0, DP)
    at = start + slots
    kept = is_seen(mask, slots) & (at < first_position + count)
    in_row = d < D
    keys = tl.load(
        arena + page * UNIT + slots[:, None] * D + d[None, :], mask=kept[:, None] & in_row[None, :], other=0.0
    )
    low, high = rows_that_see(first_position, count, start, P, WINDOW)
    low = tl.minimum(tl.maximum(low, start + far - first_position), high)
    total = tl.zeros((ROWS, P), tl.float32)
    first_query = queries + (head * num_rows + first_row) * (G * D)
    for first in tl.range(low * G, high * G, ROWS):
        m = first + tl.arange(0, ROWS)
        valid = m < high * G
        query = tl.load(
            first_query + m.to(tl.int64)[:, None] * D + d[None, :], mask=valid[:, None] & in_row[None, :], other=0.0
        )
        place = (first_row + m // G) * (H * G) + head * G + m % G
        position = first_position + m // G
        found = probabilities(query, keys, lse, place, valid, position, at, WINDOW)
        found = tl.where(at[None, :] + far <= position[:, None], found, 0.0)
        total = tl.where(peaks, tl.maximum(total, found), total + found)
    page = tl.load(table + into * (L * H) + layer_head).to(tl.int64)
    put_sums(sums + page * 32, total, kept, peaks, G, P)


@triton.jit(do_not_specialize=["layer", "num_rows"])
def sum_single_columns(
    queries, lse, arena, sums, table, masks, positions,  # as of `sum_columns`
    num_columns,  # i32 [1]: how many of the columns count
    columns,      # i32 [n, COLUMN_INTS], each of a slice of one row
    layer, num_rows,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr,  # G rounded up to a tile
    UNIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The same for slices of one row. Grid [H, any]: programs take columns in turns, so that a graph may have more or
    fewer of them each time.
    """
    head = tl.program_id(0).to(tl.int64)
    layer_head = layer.to(tl.int64) * H + head
    slots = tl.arange(0, P)
    d = tl.arange(0, DP)
    m = tl.arange(0, ROWS)
    valid = m < G
    in_row = d < D
    for index in tl.range(tl.program_id(1), tl.load(num_columns), tl.num_programs(1)):
        column = columns + index * COLUMN_INTS
        row = tl.load(column).to(tl.int64)
        chunk, into = tl.load(column + 2).to(tl.int64), tl.load(column + 3).to(tl.int64)
        at = tl.load(column + 4) + slots
        far = tl.load(column + 5)
        position = tl.load(positions + row)
        mask = tl.load(masks + chunk * (L * H) + layer_head)
        is_wanted = (mask != 0) & (tl.load(masks + into * (L * H) + layer_head) != 0)
        # Ids of pages that are not there may be anything.
        page = tl.load(table + chunk * (L * H) + layer_head, mask=is_wanted, other=0).to(tl.int64)
        sums_page = tl.load(table + into * (L * H) + layer_head, mask=is_wanted, other=0).to(tl.int64)
        kept = is_seen(mask, slots) & (at <= position) & is_wanted
        keys = tl.load(
            arena + page * UNIT + slots[:, None] * D + d[None, :], mask=kept[:, None] & in_row[None, :], other=0.0
        )
        query = tl.load(
            queries + ((head * num_rows + row) * G + m)[:, None] * D + d[None, :],
            mask=valid[:, None] & in_row[None, :],
            other=0.0,
        )
        place = (row * H + head) * G + m.to(tl.int64)
        found = probabilities(query, keys, lse, place, valid, position + m * 0, at, WINDOW)
        found = tl.where((at + tl.maximum(far, 0) <= position)[None, :], found, 0.0)
        put_sums(sums + sums_page * 32, found, kept, far >= 0, G, P)


@triton.jit(do_not_specialize=["num_kept", "first_kept", "count", "first_position", "first_start", "num_words"])
def recover(
    kept_queries,  # [L, H, kept rows, G, D]
    kept_lse,      # f32 [L, H, kept rows, G], base 2
    arena,         # the arena as page elements; a page starts at id * UNIT
    table,         # i32 [C, L, H] page ids
    masks,         # i64 [C, L, H]
    chunks,        # i32 [n], of a path, in order of position
    kept,          # i64 [L, H, words]: columns kept whichever row looks, by position
    local,         # i64 [L, H]: each row also keeps so many of the last tokens, itself among them
    out,           # f32 [L, H, n]: of all rows x G to what is kept of each chunk
    num_kept, first_kept, count,  # kept rows of the step, and of the slice the first and how many
    first_position,               # of the slice's first kept row
    first_start,                  # position of the first slot of the first chunk
    num_words,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid [L * H, n]."""
    layer_head = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1).to(tl.int64)
    chunk = tl.load(chunks + index).to(tl.int64)
    start = first_start + tl.program_id(1) * P
    mask = tl.load(masks + chunk * (L * H) + layer_head)
    word = start // P
    bits = tl.load(kept + layer_head * num_words + word, mask=word < num_words, other=0)
    nearest = tl.load(local + layer_head)
    target = out + layer_head * tl.num_programs(1) + index
    # Local tokens of the first row begin before those of others.
    if (mask == 0) | ((bits == 0) & (start + P <= first_position - nearest + 1)):
        tl.store(target, 0.0)
        return

    page = tl.load(table + chunk * (L * H) + layer_head).to(tl.int64)
    slots = tl.arange(0, P)
    d = tl.arange(0, DP)
    at = start + slots
    counts = is_seen(mask, slots) & (at < first_position + count)
    always = is_seen(bits, slots)
    in_row = d < D
    keys = tl.load(
        arena + page * UNIT + slots[:, None] * D + d[None, :], mask=counts[:, None] & in_row[None, :], other=0.0
    )
    low, high = rows_that_see(first_position, count, start, P, WINDOW)
    total = tl.zeros((ROWS, P), tl.float32)
    first_query = (layer_head * num_kept + first_kept) * G
    for first in tl.range(low * G, high * G, ROWS):
        m = first + tl.arange(0, ROWS)
        valid = m < high * G
        place = first_query + m
        query = tl.load(
            kept_queries + place[:, None] * D + d[None, :], mask=valid[:, None] & in_row[None, :], other=0.0
        )
        position = first_position + m // G
        found = probabilities(query, keys, kept_lse, place, valid, position, at, WINDOW)
        near = (position[:, None] - at[None, :]).to(tl.int64) < nearest
        total += tl.where(near | always[None, :], found, 0.0)
    tl.store(target, tl.sum(tl.where(counts, tl.sum(total, 0), 0.0)))
