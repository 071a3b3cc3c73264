// Attention of decode rows with cache.sparse_values: a row reads all keys, but only the values with the largest weights.
//
//     p_ij = exp(s_ij) / sum_j exp(s_ij)      over all n slots that row i sees
//     o_i  = sum_{j in T_i} p_ij v_j          T_i: the row's own slot, and of the others the int(share * (n - 1)) with the largest scores
//
// Defined by attention.reference; tests/kernels/test_sparse_values.py compares the two. Among slots with equal scores, the first one in the sequence
// is selected.
//
// A row is divided into pieces, and its selection depends on the scores of all of them. So there are three parallel loops, one after the other:
// - for each piece and kv head, compute the scores and store them in a buffer;
// - for each row and query head, select slots and turn scores into weights;
// - for each piece and kv head, add up the selected values. Pages without a selected slot are skipped.
// The weights are already normalised, so the partial outputs of a row are added, not merged by their lse.
#include <algorithm>

#include "items.h"

namespace quire {
namespace {

constexpr int32_t NEVER = INT32_MIN;   // order of a slot that must not be selected

inline int64_t heads_of(const LayerPlan& plan) { return static_cast<int64_t>(plan.H) * plan.G; }

// Index of the first score in Plan.sparse_scores of a row, query head and column. The index in Plan.sparse_slots is this, divided by P.
inline int64_t place_of(const LayerPlan& plan, const SparseRow& row, int64_t query_head, int64_t column) {
    return row.first * heads_of(plan) + (query_head * row.num_columns + column) * P;
}

inline int64_t column_of(const Piece& piece, const SparseRow& row, int c) { return (piece.start - row.start) / P + c; }

// The slots of a page that are visible to a row at `position`, as bits.
inline uint64_t seen_by(const LayerPlan& plan, const Page& page, int position) {
    if (page.positions) return page.mask;
    const auto below = [](int count) { return count >= P ? ALL_SLOTS : count <= 0 ? 0 : (1ull << count) - 1; };
    uint64_t seen = page.mask & below(position + 1 - page.base);
    if (plan.window) seen &= ~below(position + 1 - plan.window - page.base);
    return seen;
}

// ---- scores ---------------------------------------------------------------------------------------------------------------------------

// Stores the scores of a piece's rows in base 2, and the slots that are visible to them.
template <class Math, class T>
void score_item(const LayerPlan& plan, const Piece& piece, int head, const T* q, int64_t q_stride) {
    if (plan.decode && plan.positions[piece.first_row] < piece.start + piece.num_chunks * P) write_row<T>(plan, piece.first_row, head);
    const int G = plan.G, D = plan.D, rows = piece.num_rows * G, steps = query_steps<Math>(plan);
    const int buffer = plan.turns ? panel_buffer<Math>(D) : 0, own = plan.turns && Math::PAIR == 2 ? P * D : 0;
    const bool turns_rows = plan.turns && rows <= TURNED_ROWS;
    ScratchArena arena{static_cast<uint8_t*>(thread_scratch(
        (static_cast<size_t>(rows) * (steps + P) + static_cast<size_t>(steps) * P + buffer + own + D) * 4 + 64 * 6))};
    Item item{rows, steps, 0};
    item.query = arena.take<uint32_t>(static_cast<size_t>(rows) * steps);
    item.scores = arena.take<float>(static_cast<size_t>(rows) * P);
    item.keys = arena.take<uint32_t>(static_cast<size_t>(steps) * P);
    item.buffer = arena.take<float>(buffer);
    item.own = arena.take<uint32_t>(own);
    auto* rotated = arena.take<float>(D);
    if (steps * Math::PAIR > D) std::memset(item.query, 0, static_cast<size_t>(rows) * steps * 4);
    if (!turns_rows) place_queries<Math>(plan, piece, head, q, q_stride, 0, rotated, item);

    const auto leave = [&](int m, int c, uint64_t seen, const float* scores) {
        const SparseRow& row = plan.sparse_rows[piece.first_row + m / G];
        const int64_t at = place_of(plan, row, head * G + m % G, column_of(piece, row, c));
        plan.sparse_slots[at / P] = seen;
        if (scores) std::memcpy(plan.sparse_scores + at, scores, P * sizeof(float));
        else std::fill_n(plan.sparse_scores + at, P, -INFINITY);
    };
    Page after = page_of(plan, head, piece, 0);
    for (int c = 0; c < piece.num_chunks; c++) {
        const Page page = after;
        if (c + 1 < piece.num_chunks) after = page_of(plan, head, piece, c + 1);
        if (!page.mask) {
            for (int m = 0; m < rows; m++) leave(m, c, 0, nullptr);
            continue;
        }
        Prefetcher ahead{nullptr, nullptr};
        if (c + 1 < piece.num_chunks) ahead = prefetch(after, D, 0), prefetch_positions(after);
        count_read(plan, head, plan.indices[piece.first_index + c]);
        if (plan.turns) {
            if (turns_rows) place_queries<Math>(plan, piece, head, q, q_stride, origin_of(page), rotated, item);
            turned_keys<Math, T>(plan, page, turns_rows ? 0 : page.base, item.keys, P, item.buffer, item.own, ahead);
        } else {
            load_keys<Math>(page, D, item.keys, P, ahead);
        }
        product<Math>(item.query, steps, item.keys, P, item.scores, P, steps, rows, P, nullptr, ahead);
        cap_scores(plan, rows * P, item.scores);
        hide_unseen(plan, piece, page, 0, rows, item.scores, P);
        store_scores(plan, piece, head, c, 0, rows, item.scores, P);
        for (int m = 0; m < rows; m++) leave(m, c, seen_by(plan, page, plan.positions[piece.first_row + m / G]), item.scores + m * P);
    }
}

// ---- selection ------------------------------------------------------------------------------------------------------------------------

inline vi load_order(const int32_t* order) {
    vi found;
    std::memcpy(&found, order, sizeof found);
    return found;
}

// Counts the elements of order [count] that are at least `least`. count: a multiple of P.
inline int64_t at_least(const int32_t* order, int64_t count, int32_t least) {
    vi found{};
    for (int64_t i = 0; i < count; i += VL) found -= load_order(order + i) >= least;
    int64_t total = 0;
    for (int lane = 0; lane < VL; lane++) total += found[lane];
    return total;
}

// Selects the `wanted` largest elements of order [columns, P]; among equal ones, the first. slots [columns]: the selected slots, as bits. `wanted` is
// smaller than the number of visible slots.
void choose(const int32_t* order, int64_t columns, int64_t wanted, uint64_t* slots) {
    // Bisection finds the largest `low` with at least `wanted` elements >= low. It ends early if there are exactly `wanted`.
    int32_t least = INT32_MAX, most = NEVER;
    for (int64_t c = 0; c < columns; c++)
        for (int t = 0; t < P; t++) {
            const int32_t x = order[c * P + t];
            if (x != NEVER && x < least) least = x;
            if (x > most) most = x;
        }
    int64_t low = least, high = static_cast<int64_t>(most) + 1;
    while (wanted && high - low > 1) {
        const int64_t middle = low + (high - low) / 2, count = at_least(order, columns * P, static_cast<int32_t>(middle));
        if (count >= wanted) low = middle;
        else high = middle;
        if (count == wanted) break;
    }
    int64_t left = wanted;   // number of elements equal to `low` that are selected
    if (wanted && low < INT32_MAX) left -= at_least(order, columns * P, static_cast<int32_t>(low) + 1);
    for (int64_t c = 0; c < columns; c++) {
        uint64_t above = 0, equal = 0;
        for (int t = 0; t < P; t++) {
            above |= static_cast<uint64_t>(order[c * P + t] > low) << t;
            equal |= static_cast<uint64_t>(order[c * P + t] == low) << t;
        }
        for (; wanted && left && equal; left--, equal &= equal - 1) above |= equal & -equal;
        slots[c] = wanted ? above : 0;
    }
}

// Selects the slots of one row and query head, and replaces its scores by weights.
void choose_slots(const LayerPlan& plan, int index, int query_head) {
    const SparseRow& row = plan.sparse_rows[index];
    const int position = plan.positions[index], slot = position % P;
    const int64_t at = place_of(plan, row, query_head, 0), last = (position - row.start) / P, columns = last + 1;
    float* scores = plan.sparse_scores + at;
    uint64_t* slots = plan.sparse_slots + at / P;
    int64_t seen = 0;
    vf peak = splat(-INFINITY);
    for (int64_t c = 0; c < columns; c++) {
        seen += __builtin_popcountll(slots[c]);
        for (int t = 0; t < P; t += VL) peak = max(peak, load(scores + c * P + t));
    }
    const float highest = largest(peak), top = highest == -INFINITY ? 0.0f : highest;
    vf added{};
    for (int64_t i = 0; i < columns * P; i += VL) added += exp2(load(scores + i) - top);
    const float lse = top + std::log2(sum(added));
    if (plan.lse) plan.lse[index * heads_of(plan) + query_head] = lse * LN2;

    const int64_t wanted = row.reads_all ? seen - 1 : static_cast<int64_t>(plan.sparse_values * static_cast<double>(seen - 1));
    if (wanted < seen - 1) {
        // Maps floats to integers of the same order. Adding 0 turns -0 into +0.
        auto* order = static_cast<int32_t*>(thread_scratch(columns * P * 4));
        for (int64_t c = 0; c < columns; c++)
            for (int t = 0; t < P; t++) {
                const float score = scores[c * P + t] + 0.0f;
                int32_t bits;
                std::memcpy(&bits, &score, 4);
                bits ^= (bits >> 31) & INT32_MAX;
                order[c * P + t] = slots[c] >> t & 1 ? (bits == NEVER ? NEVER + 1 : bits) : NEVER;
            }
        order[last * P + slot] = NEVER;
        choose(order, columns, wanted, slots);
        slots[last] |= 1ull << slot;
    }
    for (int64_t c = 0; c < columns; c++)
        for (int t = 0; slots[c] && t < P; t += VL) store(scores + c * P + t, exp2(load(scores + c * P + t) - lse));
}

// ---- values ---------------------------------------------------------------------------------------------------------------------------

// Values T [P, D] of a dense page. whole: D rounded down to VL; later columns are read one by one.
template <class T>
struct StoredValues {
    const T* v;
    int D, whole;
    vf part(int t, int d) const { return load(v + t * D + d); }
    float one(int t, int d) const { return widen(v[t * D + d]); }
};

// A value panel.
template <class Math>
struct PanelValues {
    const uint32_t* panel;
    int columns, whole;
    vf part(int t, int d) const {
        if constexpr (Math::PAIR == 1) return load(reinterpret_cast<const float*>(panel) + t * columns + d);
        const vu pair = *reinterpret_cast<const vu_loose*>(panel + t / 2 * columns + d);
        return as_float(t % 2 ? pair & 0xffff0000u : pair << 16);
    }
    float one(int, int) const { return 0; }
};

template <int N, class Values>
inline void add_parts(const Values& values, int d, uint64_t slots, const float* weights, float* sums) {
    vf acc[N];
    for (int n = 0; n < N; n++) acc[n] = load(sums + d + n * VL);
    for (; slots; slots &= slots - 1) {
        const int t = __builtin_ctzll(slots);
        for (int n = 0; n < N; n++) acc[n] += values.part(t, d + n * VL) * weights[t];
    }
    for (int n = 0; n < N; n++) store(sums + d + n * VL, acc[n]);
}

// sums [D] += weights[t] * values[t] for the given slots t of a page. weights [P].
template <class Values>
void add_values(const Values& values, int D, uint64_t slots, const float* weights, float* sums) {
    int d = 0;
    for (; d + 4 * VL <= values.whole; d += 4 * VL) add_parts<4>(values, d, slots, weights, sums);
    for (; d + VL <= values.whole; d += VL) add_parts<1>(values, d, slots, weights, sums);
    for (; d < D; d++)
        for (uint64_t left = slots; left; left &= left - 1) sums[d] += values.one(__builtin_ctzll(left), d) * weights[__builtin_ctzll(left)];
}

inline void count_values(const LayerPlan& plan, int head, int32_t chunk, int64_t slots) {
    if (!plan.value_reads || chunk < 0) return;
    int32_t* at = plan.value_reads + (static_cast<int64_t>(chunk) * plan.most_heads + head) * 2;
    __atomic_fetch_add(at, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(at + 1, static_cast<int32_t>(slots), __ATOMIC_RELAXED);
}

// Adds up the selected values of a piece's rows. Writes the output, or a partial output if the row has several pieces.
template <class Math, class T>
void value_item(const LayerPlan& plan, const Piece& piece, int head, T* out) {
    const int G = plan.G, D = plan.D, rows = piece.num_rows * G, columns = (D + VL - 1) / VL * VL;
    const int buffer = plan.turns ? panel_buffer<Math>(D) : 0, panel = plan.turns ? P / Math::PAIR * columns : 0;
    ScratchArena arena{static_cast<uint8_t*>(thread_scratch((static_cast<size_t>(rows) * (columns + 1) + buffer + panel + 3 * P) * 4 + 64 * 7))};
    auto* sums = arena.take<float>(static_cast<size_t>(rows) * columns);
    auto* shift = arena.take<float>(rows);
    auto* decoded = arena.take<float>(buffer);
    auto* values = arena.take<uint32_t>(panel);
    auto *scale = arena.take<float>(P), *offset = arena.take<float>(P), *scaled_weights = arena.take<float>(P);
    std::memset(sums, 0, static_cast<size_t>(rows) * columns * 4);
    std::memset(shift, 0, static_cast<size_t>(rows) * 4);
    const auto place = [&](int m, int c) {
        const SparseRow& row = plan.sparse_rows[piece.first_row + m / G];
        return place_of(plan, row, head * G + m % G, column_of(piece, row, c));
    };
    for (int c = 0; c < piece.num_chunks; c++) {
        int64_t taken = 0;
        for (int m = 0; m < rows; m++) taken += __builtin_popcountll(plan.sparse_slots[place(m, c) / P]);
        if (!taken) continue;
        const int32_t chunk = plan.indices[piece.first_index + c];
        const Page page = page_of(plan, head, piece, c);
        count_values(plan, head, chunk, taken);
        const auto add = [&](const auto& from, bool is_scaled) {
            for (int m = 0; m < rows; m++) {
                const int64_t at = place(m, c);
                const uint64_t slots = plan.sparse_slots[at / P];
                const float* weights = plan.sparse_scores + at;
                if (is_scaled && slots) {
                    for (uint64_t left = slots; left; left &= left - 1) {
                        const int t = __builtin_ctzll(left);
                        scaled_weights[t] = weights[t] * scale[t];
                        shift[m] += weights[t] * offset[t];
                    }
                    weights = scaled_weights;
                }
                add_values(from, D, slots, weights, sums + m * columns);
            }
        };
        if (is_encoded(page.kind)) {
            Prefetcher ahead{nullptr, nullptr};
            const bool is_scaled = encoded_values<Math, T>(plan, page, columns, values, scale, offset, decoded, ahead);
            add(PanelValues<Math>{values, columns, columns}, is_scaled);
        } else {
            add(StoredValues<T>{reinterpret_cast<const T*>(page.image) + P * D, D, D / VL * VL}, false);
        }
    }
    for (int m = 0; m < rows; m++) {
        const int64_t index = (static_cast<int64_t>(piece.first_row + m / G) * plan.H + head) * G + m % G;
        float* o = sums + m * columns;
        for (int d = 0; d < D; d++) o[d] += shift[m];
        if (piece.partial >= 0) {
            const int64_t part = (static_cast<int64_t>(piece.partial + m / G) * plan.H + head) * G + m % G;
            std::memcpy(plan.partial_o + part * D, o, D * sizeof(float));
            continue;
        }
        for (int d = 0; d < D; d++) narrow(out + index * D + d, o[d]);
    }
}

template <class T>
void add_parts_of(const LayerPlan& plan, const Merge& merge, int query_head, T* out) {
    const int D = plan.D;
    const int64_t heads = heads_of(plan);
    auto* sums = static_cast<float*>(thread_scratch(D * 4));
    std::memset(sums, 0, D * 4);
    for (int i = 0; i < merge.count; i++) {
        const float* part = plan.partial_o + (plan.merge_parts[merge.first + i] * heads + query_head) * D;
        for (int d = 0; d < D; d++) sums[d] += part[d];
    }
    for (int d = 0; d < D; d++) narrow(out + (merge.row * heads + query_head) * D + d, sums[d]);
}

}  // namespace

void attend_sparsely(const LayerPlan& plan, const void* q, int64_t q_stride, void* out) {
    const int H = plan.H, heads = H * plan.G;
    const int64_t items = static_cast<int64_t>(plan.num_pieces) * H;
    by_kind(plan.kind, [&](auto math, auto number) {
        using Math = decltype(math);
        using T = decltype(number);
        parallel_for(items, 1, [&](int64_t i) {
            const Piece& piece = plan.pieces[i / H];
            if (piece.first_row < plan.num_sparse_rows)
                score_item<Math>(plan, piece, static_cast<int>(i % H), static_cast<const T*>(q), q_stride);
        });
        parallel_for(static_cast<int64_t>(plan.num_sparse_rows) * heads, 1,
                     [&](int64_t i) { choose_slots(plan, static_cast<int>(i / heads), static_cast<int>(i % heads)); });
        parallel_for(items, 1, [&](int64_t i) {
            const Piece& piece = plan.pieces[i / H];
            if (piece.first_row < plan.num_sparse_rows) value_item<Math>(plan, piece, static_cast<int>(i % H), static_cast<T*>(out));
        });
        if (plan.num_merges)
            parallel_for(static_cast<int64_t>(plan.num_merges) * heads, heads, [&](int64_t i) {
                const Merge& merge = plan.merges[i / heads];
                if (merge.row < plan.num_sparse_rows) add_parts_of(plan, merge, static_cast<int>(i % heads), static_cast<T*>(out));
            });
    });
}

}  // namespace quire
