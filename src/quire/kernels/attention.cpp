// Attention of a step's query rows over pages, and the write that precedes it.
//
//     s_ij = q_i . k_j / sqrt(D)          over the positions j that row i may see: i - window < j <= i
//     o_i  = sum_j exp(s_ij) v_j / sum_j exp(s_ij),      lse_i = log sum_j exp(s_ij)
//
// Defined by attention.reference; tests/kernels/test_attention.py compares the two.
//
// A piece is a block of query rows of one sequence and a range of its chunks. A work item is a piece and a kv head, with num_rows * G query rows.
// The item makes two scratch panels of each page, keys transposed and values, once for all its rows. Scores and the weighted sum are then two matrix
// products. Their elements have 32 bits: floats, or, on CPUs with bf16 dot products, pairs of bf16 along the summed index. So both use one inner
// kernel. If the chunks of a row are divided among several pieces, each piece stores a partial result (o, lse). The partial results are merged at
// the end.
//
// If sealed chunks are encoded, all pages hold keys before rotation, dense pages too. Keys are rotated on read: by their slot, with one small table
// for all pages, and then by the page's own angle. With few rows, it is cheaper to rotate the queries back by the page's angle instead (TURNED_ROWS).
// With very few rows, it is cheaper to make no panels (encoded_rows.h). In packed pages, each slot has its own position; each packed page gets a
// table of its own.
//
// Rows that add up only some values (LayoutRecord.sparse_rows) are computed in sparse_values.cpp.
#include <time.h>

#include "encoded_rows.h"
#include "items.h"

namespace quire {
namespace {

// ---- one work item --------------------------------------------------------------------------------------------------------------------

constexpr int BLOCK = 48;         // rows with scores in the first-level cache at once; a multiple of the register block and of ROWS
constexpr int ROWS = 4;           // rows of one softmax: their chains of dependent instructions overlap
constexpr float UNSEEN = -1e30f;  // running maximum of a row that has seen nothing; finite, so that no difference is NaN

// Turns COUNT rows of scores in base 2 into unnormalised probabilities, and updates running maxima and sums. factor: scales the earlier sums.
// An invisible slot has score -inf and gets probability 2^-126, which is too small to change a sum.
// SCALED: the value of slot t is scale[t] * panel + offset[t]. The written probabilities are then multiplied by the scales, and the running sum
// `shift` adds up probability * offset. KEEP: scores are replaced by the probabilities without the scales.
template <class Math, int SLOTS, bool SCALED, bool KEEP = false, int COUNT = ROWS>
void soften(float* scores, uint32_t* probabilities, float* top, float* total, float* factor, const float* scale = nullptr,
            const float* offset = nullptr, float* shift = nullptr) {
    vf drop{};
    float highest[COUNT];
    for (int r = 0; r < COUNT; r++) {
        const float* s = scores + r * SLOTS;
        vf peak = load(s);
        for (int t = VL; t < SLOTS; t += VL) peak = max(peak, load(s + t));
        const float found = largest(peak);
        highest[r] = found > top[r] ? found : top[r];
        drop[r] = top[r] - highest[r];
        top[r] = highest[r];
    }
    const vf kept = exp2(drop);
    for (int r = 0; r < COUNT; r++) {
        float* s = scores + r * SLOTS;
        uint32_t* out = probabilities + r * (SLOTS / Math::PAIR);
        vf added{}, shifted{};
        for (int t = 0; t < SLOTS; t += VL) {
            vf p = exp2<Math::PAIR == 2>(load(s + t) - highest[r]);
            added += p;
            if constexpr (KEEP) store(s + t, p);
            if constexpr (SCALED) shifted += p * load(offset + t), p = p * load(scale + t);
            if constexpr (Math::PAIR == 1) store(reinterpret_cast<float*>(out) + t, p);
            else store(reinterpret_cast<bf16*>(out) + t, p);
        }
        factor[r] = kept[r];
        total[r] = total[r] * kept[r] + sum(added);
        if (shift) shift[r] = shift[r] * kept[r] + (SCALED ? sum(shifted) : 0.0f);
    }
}

// Encodes one head of a full chunk. The first tokens of a sequence are also copied, unencoded, to the sidecar.
template <class T>
void seal_page(const LayerPlan& plan, const Seal& seal, int head) {
    const int D = plan.D;
    const T* k = reinterpret_cast<const T*>(image_of(plan, head, seal.source));
    const T* v = k + P * D;
    uint8_t* sinks = sinks_of(plan, head, seal.chunk);
    if (sinks) {
        const size_t bytes = static_cast<size_t>(plan.sinks) * D * sizeof(T);
        std::memcpy(sinks, k, bytes);
        std::memcpy(sinks + bytes, v, bytes);
    }
    uint8_t* image = image_of(plan, head, seal.chunk);
    const int kind = plan.kinds[seal.chunk];
    encode(kind, tables_of(plan, kind, head), D, static_cast<Kind>(plan.kind), k, v, sinks ? plan.sinks : 0, image);
}

// Query rows [rows, D] of the piece, rotated by their distance from `origin`.
template <class T>
void turn_queries(const LayerPlan& plan, const Piece& piece, int head, const T* q, int64_t q_stride, int origin, float* turned) {
    const int G = plan.G, D = plan.D;
    const float scale = static_cast<float>(plan.scale);
    for (int m = 0; m < piece.num_rows * G; m++) {
        const int row = piece.first_row + m / G;
        const int64_t angle = static_cast<int64_t>(plan.positions[row] - origin) * (D / 2);
        rotate(q + row * q_stride + (head * G + m % G) * D, plan.cos ? plan.cos + angle : nullptr, plan.cos ? plan.sin + angle : nullptr, D, scale,
               turned + m * D);
    }
}

#if defined(__AVX512BF16__)
// Adds chunk c, a nuq page without sinks, to the running sums of COUNT rows.
template <int COUNT>
void attend_codes(const LayerPlan& plan, const Piece& piece, int head, int c, const Page& page, const Page& after, const Item& item) {
    // Prefetches the next page evenly, because a burst would stall.
    Prefetcher ahead = prefetch(after, plan.D, 0);
    if (after.valid) ahead.end = prefetch(after, plan.D, 1).end;
    // A page has one prefetch step per block of keys, and some for its values.
    ahead.pace = 1 + static_cast<int>((ahead.end - ahead.at) / LINE) / (plan.D / (2 * BLOCK_PAIRS) + 2);
    count_read(plan, head, plan.indices[piece.first_index + c]);
    for (int r = 0; r < COUNT; r++) store_halves(item.turned + r * plan.D, plan.D, item.query + r * item.steps);
    prefetch_positions(after);
    const auto score = [&](const uint32_t* turns, auto by) {
        constexpr Turn BY = decltype(by)::value;
        nuq_scores<COUNT, BY>(plan, page, turns, item.query, item.steps, item.scores, ahead);
        const uint8_t* slots = page.image + nuq_head(page).at_key_slots;
        for (int i = 0; i < nuq_head(page).key_slots; i++)
            score_key_slot<COUNT, BY>(slots + i * SLOT_BYTES, turns, plan.D, item.turned, item.scores);
    };
    const Turns turns = turns_of(plan, page, 0, item.own);
    if (turns.by == BY_SLOT) score(plan.turns, std::integral_constant<Turn, BY_SLOT>{});
    else score(item.own, std::integral_constant<Turn, BY_POSITION>{});
    prefetch_angles(plan, after);
    cap_scores(plan, COUNT * P, item.scores);
    hide_unseen(plan, piece, page, 0, COUNT, item.scores, P);
    store_scores(plan, piece, head, c, 0, COUNT, item.scores, P);
    load_ranges(page, item.scale, item.offset);
    soften<MathBf16, P, true, true, COUNT>(item.scores, item.probabilities, item.top, item.total, item.factor, item.scale, item.offset, item.shift);
    nuq_sums<COUNT>(plan, page, item.probabilities, item.acc, item.columns, item.factor, ahead);
    scale_late(item.late, item.columns, item.factor);
    for (int i = 0; i < nuq_head(page).value_slots; i++)
        add_late(page.image + nuq_head(page).at_value_slots + i * SLOT_BYTES, item.scores, item.columns, item.late);
}
#endif

// Adds chunks c, ..., c + PAGES - 1 of the piece to the running sums. Two pages at once halve the cost of everything but the products: horizontal
// maxima and sums, and reading and writing acc.
template <class Math, class T, int PAGES>
void attend_pages(const LayerPlan& plan, const Piece& piece, int head, int c, const Page& next, const Item& item) {
    constexpr int SLOTS = PAGES * P, psteps = P / Math::PAIR;
    const int D = plan.D;
    Page after[PAGES];
    Prefetcher keys_ahead[PAGES], values_ahead[PAGES];
    for (int i = 0; i < PAGES; i++) {
        const int coming = c + PAGES + i;
        after[i] = coming < piece.num_chunks ? page_of(plan, head, piece, coming) : i ? Page{plan.arena, DENSE_BF16} : next;
        keys_ahead[i] = prefetch(after[i], D, 0), values_ahead[i] = prefetch(after[i], D, 1);
        prefetch_positions(after[i]);
    }
    bool scaled = false;
    Page pages[PAGES];
    for (int i = 0; i < PAGES; i++) {
        const Page& page = pages[i] = page_of(plan, head, piece, c + i);
        count_read(plan, head, plan.indices[piece.first_index + c + i]);
        if (plan.turns) {
            const int start = item.rows <= TURNED_ROWS ? 0 : page.base;
            turned_keys<Math, T>(plan, page, start, item.keys, SLOTS, item.buffer, item.own, keys_ahead[0]);
            scaled = encoded_values<Math, T>(plan, page, item.columns, item.values, item.scale, item.offset, item.buffer, values_ahead[0]);
            continue;
        }
        load_keys<Math>(page, D, item.keys + i * P, SLOTS, keys_ahead[i]);
        load_values<Math>(page, D, item.columns, item.values + i * psteps * item.columns, values_ahead[i]);
    }
    for (const Page& page : after) prefetch_angles(plan, page);
    for (int at = 0; at < item.rows; at += BLOCK) {
        const int count = item.rows - at < BLOCK ? item.rows - at : BLOCK;
        product<Math>(item.query + at * item.steps, item.steps, item.keys, SLOTS, item.scores, SLOTS, item.steps, count, SLOTS, nullptr,
                      keys_ahead[0]);
        cap_scores(plan, count * SLOTS, item.scores);
        for (int i = 0; i < PAGES; i++) {
            hide_unseen(plan, piece, pages[i], at, count, item.scores + i * P, SLOTS);
            store_scores(plan, piece, head, c + i, at, count, item.scores + i * P, SLOTS);
        }
        for (int m = 0; m < count; m += ROWS) {
            float* shift = plan.turns ? item.shift + at + m : nullptr;
            const auto soften_rows = scaled ? soften<Math, SLOTS, true> : soften<Math, SLOTS, false>;
            soften_rows(item.scores + m * SLOTS, item.probabilities + m * psteps * PAGES, item.top + at + m, item.total + at + m, item.factor + m,
                        item.scale, item.offset, shift);
        }
        product<Math>(item.probabilities, psteps * PAGES, item.values, item.columns, item.acc + at * item.columns, item.columns, psteps * PAGES,
                      count, item.columns, item.factor, values_ahead[0]);
    }
#if defined(__AVX512BF16__)
    if (item.late) scale_late(item.late, item.columns, item.factor);
#endif
}

// Computes one work item. next: the first page of this thread's next item, to be prefetched; its `valid` is 0 if there is none.
template <class Math, class T>
void attend_item(const LayerPlan& plan, const Piece& piece, int head, const T* q, int64_t q_stride, T* out, const Page& next) {
    if (plan.decode && plan.positions[piece.first_row] < piece.start + piece.num_chunks * P) write_row<T>(plan, piece.first_row, head);
    const int G = plan.G, D = plan.D, H = plan.H, rows = piece.num_rows * G;
    const int padded = (rows + ROWS - 1) / ROWS * ROWS;   // results past `rows` are ignored
    const int held = padded < BLOCK ? padded : BLOCK;     // rows whose scores are in memory at once
    // Pages per pass. With few rows one: the panels of two pages and a block of scores exceed the first-level cache. With encoded pages one: each has
    // its own scales.
    const int pages = rows <= BLOCK || plan.turns ? 1 : 2;
    const int slots = pages * P, width = slots / Math::PAIR;
    const int steps = query_steps<Math>(plan), columns = (D + VL - 1) / VL * VL;
    const int buffer = plan.turns ? panel_buffer<Math>(D) : 0;

    const bool turns_rows = plan.turns && rows <= TURNED_ROWS;
#if defined(__AVX512BF16__)
    const bool few = turns_rows && Math::PAIR == 2 && rows <= FEW_ROWS;
    const int turned = few ? rows * D + 2 * VL : 0, late = few ? FEW_ROWS * FEW_ROWS * columns : 0;
    const int own = plan.turns && Math::PAIR == 2 ? P * D : 0;
#else
    constexpr int turned = 0, late = 0, own = 0;
#endif

    auto* cursor = static_cast<uint8_t*>(thread_scratch(
        (static_cast<size_t>(padded) * (steps + columns + 3) + static_cast<size_t>(held) * (slots + width + 1) + static_cast<size_t>(steps) * slots + static_cast<size_t>(width) * columns + D + 2 * P + buffer + turned + late + own) * 4 + 64 * 17));
    auto carve = [&](size_t elements) {
        uint8_t* at = cursor;
        cursor += (elements * 4 + 63) / 64 * 64;
        return at;
    };
    Item item{rows, steps, columns};
    item.query = reinterpret_cast<uint32_t*>(carve(static_cast<size_t>(rows) * steps));
    item.scores = reinterpret_cast<float*>(carve(static_cast<size_t>(held) * slots));
    item.probabilities = reinterpret_cast<uint32_t*>(carve(static_cast<size_t>(held) * width));
    item.acc = reinterpret_cast<float*>(carve(static_cast<size_t>(rows) * columns));
    item.top = reinterpret_cast<float*>(carve(padded));
    item.total = reinterpret_cast<float*>(carve(padded));
    item.factor = reinterpret_cast<float*>(carve(held));
    item.keys = reinterpret_cast<uint32_t*>(carve(static_cast<size_t>(steps) * slots));
    item.values = reinterpret_cast<uint32_t*>(carve(static_cast<size_t>(width) * columns));
    item.shift = reinterpret_cast<float*>(carve(padded));
    item.scale = reinterpret_cast<float*>(carve(P));
    item.offset = reinterpret_cast<float*>(carve(P));
    item.buffer = reinterpret_cast<float*>(carve(buffer));
    item.turned = turned ? reinterpret_cast<float*>(carve(turned)) : nullptr;
    item.late = late ? reinterpret_cast<float*>(carve(late)) : nullptr;
    auto* rotated = reinterpret_cast<float*>(carve(D));
    item.own = own ? reinterpret_cast<uint32_t*>(carve(own)) : nullptr;

    if (steps * Math::PAIR > D) std::memset(item.query, 0, static_cast<size_t>(rows) * steps * 4);
    if (!turns_rows) place_queries<Math>(plan, piece, head, q, q_stride, 0, rotated, item);
    std::memset(item.acc, 0, static_cast<size_t>(rows) * columns * 4);
    for (int m = 0; m < padded; m++) item.top[m] = UNSEEN, item.total[m] = item.shift[m] = 0;
    for (int m = 0; m < held; m++) item.factor[m] = 1;
    std::memset(item.scores, 0, static_cast<size_t>(held) * slots * 4);
    if (late) std::memset(item.late, 0, static_cast<size_t>(late) * 4);

    int c = 0, turned_to = -1;
    for (; pages == 2 && c + 2 <= piece.num_chunks; c += 2) attend_pages<Math, T, 2>(plan, piece, head, c, next, item);
    Page after = c < piece.num_chunks ? page_of(plan, head, piece, c) : next;
    for (; c < piece.num_chunks; c++) {
        const Page page = after;
        after = c + 1 < piece.num_chunks ? page_of(plan, head, piece, c + 1) : next;
        if (!page.mask) continue;
#if defined(__AVX512BF16__)
        if constexpr (Math::PAIR == 2) {
            if (few && page.kind == NUQ && !page.sinks) {
                if (turned_to != origin_of(page)) turn_queries(plan, piece, head, q, q_stride, turned_to = origin_of(page), item.turned);
                switch (rows) {
                    case 1: attend_codes<1>(plan, piece, head, c, page, after, item); break;
                    case 2: attend_codes<2>(plan, piece, head, c, page, after, item); break;
                    case 3: attend_codes<3>(plan, piece, head, c, page, after, item); break;
                    default: attend_codes<4>(plan, piece, head, c, page, after, item);
                }
                continue;
            }
        }
#endif
        if (turns_rows) place_queries<Math>(plan, piece, head, q, q_stride, origin_of(page), rotated, item);
        attend_pages<Math, T, 1>(plan, piece, head, c, next, item);
    }

#if defined(__AVX512BF16__)
    if (late) fold_late(item.late, columns, rows, item.acc);
#endif
    for (int m = 0; m < rows; m++) {
        const int r = m / G, g = m % G;
        const bool seen = !(item.top[m] <= UNSEEN);
        const float inverse = seen ? 1.0f / item.total[m] : 0.0f;
        float* o = item.acc + m * columns;
        if (item.shift[m] != 0)
            for (int d = 0; d < D; d++) o[d] += item.shift[m];
        const float lse = piece.partial < 0 && !plan.lse ? 0.0f : seen ? (item.top[m] + std::log2(item.total[m])) * LN2 : -INFINITY;
        if (piece.partial < 0) {
            T* y = out + (static_cast<int64_t>(piece.first_row + r) * H * G + head * G + g) * D;
            int d = 0;
            for (; d + VL <= D; d += VL) store(y + d, load(o + d) * inverse);
            for (; d < D; d++) narrow(y + d, o[d] * inverse);
            if (plan.lse) plan.lse[static_cast<int64_t>(piece.first_row + r) * H * G + head * G + g] = lse;
        } else {
            const int64_t slot = static_cast<int64_t>(piece.partial + r) * H * G + head * G + g;
            for (int d = 0; d < D; d++) plan.partial_o[slot * D + d] = o[d] * inverse;
            plan.partial_lse[slot] = lse;
        }
    }
}

template <class T>
void merge_row(const LayerPlan& plan, const Merge& merge, int head, T* out) {
    const int D = plan.D, heads = plan.H * plan.G;
    const int32_t* parts = plan.merge_parts + merge.first;
    float top = -INFINITY;
    for (int i = 0; i < merge.count; i++) {
        const float lse = plan.partial_lse[static_cast<int64_t>(parts[i]) * heads + head];
        top = lse > top ? lse : top;
    }
    auto* acc = static_cast<float*>(thread_scratch(D * 4));
    std::memset(acc, 0, D * 4);
    float total = 0;
    for (int i = 0; i < merge.count; i++) {
        const int64_t slot = static_cast<int64_t>(parts[i]) * heads + head;
        if (plan.partial_lse[slot] == -INFINITY) continue;
        const float weight = std::exp(plan.partial_lse[slot] - top);
        total += weight;
        for (int d = 0; d < D; d++) acc[d] += weight * plan.partial_o[slot * D + d];
    }
    T* y = out + (static_cast<int64_t>(merge.row) * heads + head) * D;
    for (int d = 0; d < D; d++) narrow(y + d, total > 0 ? acc[d] / total : 0.0f);
    if (plan.lse) plan.lse[static_cast<int64_t>(merge.row) * heads + head] = total > 0 ? top + std::log(total) : -INFINITY;
}

template <class Math, class T>
void attend(const LayerPlan& plan, const T* q, int64_t q_stride, T* out) {
    const int H = plan.H;
    if (!plan.decode) {
        const int64_t grain = plan.num_rows < 32 ? plan.num_rows : (plan.num_rows + sharing_threads() - 1) / sharing_threads();
        parallel_for(plan.num_rows, grain, [&](int64_t row) {
            for (int head = 0; head < H; head++) write_row<T>(plan, static_cast<int>(row), head);
        });
    }
    if (plan.num_seals)
        parallel_for(static_cast<int64_t>(plan.num_seals) * H, 1,
                     [&](int64_t i) { seal_page<T>(plan, plan.seals[i / H], static_cast<int>(i % H)); });
    const int heads = H * plan.G, num_sparse = plan.num_sparse_rows;
    if (num_sparse) attend_sparsely(plan, q, q_stride, out);
    if (num_sparse < plan.num_rows) parallel_pairs(static_cast<int64_t>(plan.num_pieces) * H, [&](int64_t i, int64_t then) {
        if (plan.pieces[i / H].first_row < num_sparse) return;
        Page next{plan.arena, DENSE_BF16};
        if (then >= 0) next = page_of(plan, static_cast<int>(then % H), plan.pieces[then / H], 0);
        attend_item<Math>(plan, plan.pieces[i / H], static_cast<int>(i % H), q, q_stride, out, next);
    });
    if (plan.num_merges && num_sparse < plan.num_rows)
        parallel_for(static_cast<int64_t>(plan.num_merges) * heads, heads, [&](int64_t i) {
            if (plan.merges[i / heads].row >= num_sparse) merge_row(plan, plan.merges[i / heads], static_cast<int>(i % heads), out);
        });
    if (plan.num_columns) profile_columns(plan, q, q_stride);
}

}  // namespace
}  // namespace quire

using namespace quire;

QUIRE_API void quire_attend(const Plan* plan, int layer, const void* q, int64_t q_stride, void* out) {
    if (plan->ready) {
        const timespec pause{0, 50'000};  // a layer takes milliseconds to arrive
        while (!__atomic_load_n(plan->ready + layer, __ATOMIC_ACQUIRE)) nanosleep(&pause, nullptr);
    }
    by_kind(plan->kind, [&](auto math, auto number) {
        using T = decltype(number);
        attend<decltype(math)>(LayerPlan(*plan, layer), static_cast<const T*>(q), q_stride, static_cast<T*>(out));
    });
}

QUIRE_EXPORT_FIELDS(Plan)
QUIRE_EXPORT_FIELDS(LayerRecord)
QUIRE_EXPORT_FIELDS(LayoutRecord)
