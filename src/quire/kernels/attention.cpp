// Attention of a step's query rows over pages, and the write that precedes it.
//
//     s_ij = q_i . k_j / sqrt(D)          over the positions j that row i may see: i - window < j <= i
//     o_i  = sum_j exp(s_ij) v_j / sum_j exp(s_ij),      lse_i = log sum_j exp(s_ij)
//
// Defined by attention.reference; tests/kernels/test_attend.py holds the two together.
//
// A piece is a block of query rows of one sequence and a run of its chunks; a work item is a piece and a kv head, with num_rows * G query rows.
// Of each page the item makes two scratch panels, K transposed and V, in the shape the inner product wants, once for all its rows; scores,
// softmax and the weighted sum are then two matrix products with 32-bit elements: float x float, or on CPUs with bf16 dot products a pair of
// bf16 along the summed index, which is why both share one inner kernel. Rows whose chunks are split over several pieces leave (o, lse)
// partials, merged at the end.
#include "attention.h"
#include "product.h"

namespace quire {
namespace {

constexpr int P = 64;             // page tokens
constexpr int UNIT = 128;         // bytes a page id counts by
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

// A page a thread will read: its image, its format, and how many of its slots are written.
struct Page {
    const uint8_t* image;
    int kind, valid;
};

// The written keys (which = 0) or values (1) of a page.
inline Prefetcher prefetch(const Page& page, int D, int which) {
    const int row = D * (page.kind == DENSE_F32 ? 4 : 2);
    const uint8_t* at = page.image + which * P * row;
    return {at, at + page.valid * row, 2};
}

// ---- scratch panels of a page ----------------------------------------------------------------------------------------------------------

// VL x VL transpose of 32-bit elements.
inline void transpose(vu (&x)[VL]) {
#if defined(__AVX512F__)
    // Within 128-bit lanes first, then lanes: such shuffles need no index registers and two issue per cycle, against one full permute.
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)x[i], (__m512i)x[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)x[i], (__m512i)x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        x[i] = (vu)_mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        x[i + 8] = (vu)_mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
        x[i + 4] = (vu)_mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
        x[i + 12] = (vu)_mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
    }
#else
    // log2(VL) perfect shuffles.
    for (int step = 1; step < VL; step *= 2) {
        vu y[VL];
        for (int i = 0; i < VL / 2; i++) {
            const vu a = x[i], b = x[i + VL / 2];
#if defined(__AVX2__)
            y[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
            y[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
            y[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            y[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
        }
        for (int i = 0; i < VL; i++) x[i] = y[i];
    }
#endif
}

// VL floats, or VL pairs of bf16, of a key row from column d on; columns at and past D are zero.
template <class Math, class T>
inline vu key_part(const T* row, int d, int D) {
    constexpr int WIDTH = VL * Math::PAIR;
    T tail[WIDTH] = {};
    const T* source = row + d;
    if (d + WIDTH > D) {
        std::memcpy(tail, row + d, (D - d) * sizeof(T));
        source = tail;
    }
    if constexpr (Math::PAIR == 2) return *reinterpret_cast<const vu_loose*>(source);
    else return (vu)load(source);
}

// K [P, D] -> out [steps, P], rows `ld` apart, steps of PAIR columns, padded with zeros to whole blocks of VL. Slots at and past `valid` are left
// as they are or garbage: their scores are hidden.
template <class Math, class T>
void keys_from(const T* k, int D, int valid, uint32_t* out, int ld, Prefetcher& ahead) {
    for (int t = 0; t < valid; t += VL) {
        for (int d = 0; d < D; d += VL * Math::PAIR) {
            ahead.step(VL * VL * Math::PAIR * static_cast<int>(sizeof(T)) / 128);
            vu block[VL];
            for (int i = 0; i < VL; i++) block[i] = key_part<Math>(k + (t + i) * D, d, D);
            transpose(block);
            for (int i = 0; i < VL; i++) *reinterpret_cast<vu_loose*>(out + (d / Math::PAIR + i) * ld + t) = block[i];
        }
    }
}

// V [P, D] -> out [P / PAIR, columns], columns = D rounded up to VL; rows at and past `valid` are zero, since unwritten slots may hold NaN.
template <class T>
void values_f32(const T* v, int D, int columns, int valid, uint32_t* out, Prefetcher& ahead) {
    for (int t = 0; t < P; t++) {
        ahead.step((D * static_cast<int>(sizeof(T)) + 63) / 64);
        float* row = reinterpret_cast<float*>(out + t * columns);
        if (t >= valid) {
            std::memset(row, 0, columns * 4);
            continue;
        }
        int d = 0;
        for (; d + VL <= D; d += VL) store(row + d, load(v + t * D + d));
        for (; d < columns; d++) row[d] = d < D ? widen(v[t * D + d]) : 0.0f;
    }
}

#if defined(__AVX512BF16__)
void values_bf16(const bf16* v, int D, int columns, int valid, uint32_t* out, Prefetcher& ahead) {
    typedef uint16_t v32h __attribute__((vector_size(64)));
    typedef uint16_t v32h_loose __attribute__((vector_size(64), aligned(2), may_alias));
    for (int t = 0; t < P; t += 2) {
        ahead.step((D + 31) / 32);
        uint32_t* row = out + t / 2 * columns;
        if (t >= valid) {
            std::memset(row, 0, columns * 4);
            continue;
        }
        const bf16* first = v + t * D;
        const bf16* second = first + D;
        int d = 0;
        if (t + 1 < valid) {
            for (; d + 32 <= D; d += 32) {
                const v32h a = *reinterpret_cast<const v32h_loose*>(first + d), b = *reinterpret_cast<const v32h_loose*>(second + d);
                const v32h lo = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12,
                                                        44, 13, 45, 14, 46, 15, 47);
                const v32h hi = __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27,
                                                        59, 28, 60, 29, 61, 30, 62, 31, 63);
                std::memcpy(row + d, &lo, 64);
                std::memcpy(row + d + 16, &hi, 64);
            }
        }
        for (; d < columns; d++) {
            const uint32_t a = d < D ? first[d].bits : 0, b = d < D && t + 1 < valid ? second[d].bits : 0;
            row[d] = a | b << 16;
        }
    }
}
#endif

// What a codec supplies: the two scratch panels of one page. A new codec is a case here.
template <class Math>
void load_keys(const Page& page, int D, uint32_t* out, int ld, Prefetcher& ahead) {
    if constexpr (Math::PAIR == 2) {
        keys_from<Math>(reinterpret_cast<const bf16*>(page.image), D, page.valid, out, ld, ahead);
    } else if (page.kind == DENSE_BF16) {
        keys_from<Math>(reinterpret_cast<const bf16*>(page.image), D, page.valid, out, ld, ahead);
    } else if (page.kind == DENSE_F32) {
        keys_from<Math>(reinterpret_cast<const float*>(page.image), D, page.valid, out, ld, ahead);
    } else {
        keys_from<Math>(reinterpret_cast<const f16*>(page.image), D, page.valid, out, ld, ahead);
    }
}

template <class Math>
void load_values(const Page& page, int D, int columns, uint32_t* out, Prefetcher& ahead) {
    const int valid = page.valid;
#if defined(__AVX512BF16__)
    if constexpr (Math::PAIR == 2) return values_bf16(reinterpret_cast<const bf16*>(page.image) + P * D, D, columns, valid, out, ahead);
#endif
    if (page.kind == DENSE_BF16) values_f32(reinterpret_cast<const bf16*>(page.image) + P * D, D, columns, valid, out, ahead);
    else if (page.kind == DENSE_F32) values_f32(reinterpret_cast<const float*>(page.image) + P * D, D, columns, valid, out, ahead);
    else values_f32(reinterpret_cast<const f16*>(page.image) + P * D, D, columns, valid, out, ahead);
}

// ---- one work item --------------------------------------------------------------------------------------------------------------------

// y = rotated x, both [D]: halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), times `scale`; without tables only the scale.
template <class T>
inline void rotate(const T* x, const float* cos, const float* sin, int D, float scale, float* y) {
    const int half = D / 2;
    if (cos == nullptr) {
        for (int i = 0; i < D; i++) y[i] = widen(x[i]) * scale;
        return;
    }
    int i = 0;
    for (; i + VL <= half; i += VL) {
        const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(y + i, (a * c - b * s) * scale);
        store(y + half + i, (b * c + a * s) * scale);
    }
    for (; i < half; i++) {
        const float a = widen(x[i]), b = widen(x[half + i]);
        y[i] = (a * cos[i] - b * sin[i]) * scale;
        y[half + i] = (b * cos[i] + a * sin[i]) * scale;
    }
}

template <class Math>
inline void store_operand(const float* x, int D, uint32_t* out) {
    if constexpr (Math::PAIR == 1) {
        std::memcpy(out, x, D * 4);
    } else {
        bf16* half = reinterpret_cast<bf16*>(out);
        int i = 0;
        for (; i + VL <= D; i += VL) store(half + i, load(x + i));
        for (; i < D; i++) half[i].bits = round_bf16(x[i]);
    }
}

constexpr int BLOCK = 48;         // rows whose scores are in the first-level cache together; a multiple of the register block and of ROWS
constexpr int ROWS = 4;           // rows softened together: their chains of dependent steps overlap
constexpr float UNSEEN = -1e30f;  // running maximum of a row that has seen nothing; finite, so that no difference is NaN

// Rows of scores in base 2 -> unnormalised probabilities, running maxima and sums; factor is what was accumulated before is to be multiplied with.
// An invisible slot has score -inf and gets probability 2^-126, which no sum notices.
template <class Math, int SLOTS>
void soften(const float* scores, uint32_t* probabilities, float* top, float* total, float* factor) {
    vf drop{};
    float highest[ROWS];
    for (int r = 0; r < ROWS; r++) {
        const float* s = scores + r * SLOTS;
        vf peak = load(s);
        for (int t = VL; t < SLOTS; t += VL) peak = max(peak, load(s + t));
        const float found = largest(peak);
        highest[r] = found > top[r] ? found : top[r];
        drop[r] = top[r] - highest[r];
        top[r] = highest[r];
    }
    const vf scale = exp2(drop);
    for (int r = 0; r < ROWS; r++) {
        const float* s = scores + r * SLOTS;
        uint32_t* out = probabilities + r * (SLOTS / Math::PAIR);
        vf added{};
        for (int t = 0; t < SLOTS; t += VL) {
            const vf p = exp2<Math::PAIR == 2>(load(s + t) - highest[r]);
            added += p;
            if constexpr (Math::PAIR == 1) store(reinterpret_cast<float*>(out) + t, p);
            else store(reinterpret_cast<bf16*>(out) + t, p);
        }
        factor[r] = scale[r];
        total[r] = total[r] * scale[r] + sum(added);
    }
}

// Hides slots outside [low, high) of a row of `slots` scores.
inline void hide(float* s, int low, int high, int slots) {
    for (int t = 0; t < low; t++) s[t] = -INFINITY;
    for (int t = high; t < slots; t++) s[t] = -INFINITY;
}

// Chunk c of a piece, for one layer and head.
inline Page page_of(const Plan& plan, int layer, int head, const Piece& piece, int c) {
    const int32_t chunk = plan.indices[piece.first_index + c];
    const int32_t id = plan.table[(static_cast<int64_t>(chunk) * plan.L + layer) * plan.H + head];
    const int written = plan.positions[piece.first_row + piece.num_rows - 1] + 1 - piece.start - c * P;
    return {plan.arena + static_cast<int64_t>(id) * UNIT, plan.kinds[chunk], written < P ? written : P};
}

// The key, rotated, and the value of one row and head into their slot. Pages of open chunks are dense in the step's own format.
template <class T>
void write_row(const Plan& plan, int layer, int row, int head) {
    const int D = plan.D, position = plan.positions[row], slot = position % P;
    const int64_t angle = static_cast<int64_t>(position) * (D / 2);
    const int32_t id = plan.table[(static_cast<int64_t>(plan.write_chunk[row]) * plan.L + layer) * plan.H + head];
    T* key = reinterpret_cast<T*>(plan.arena + static_cast<int64_t>(id) * UNIT) + slot * D;
    auto* rotated = static_cast<float*>(thread_scratch(D * 4));
    const T* k = static_cast<const T*>(plan.k) + row * plan.k_stride + head * D;
    const T* v = static_cast<const T*>(plan.v) + row * plan.v_stride + head * D;
    rotate(k, plan.cos ? plan.cos + angle : nullptr, plan.cos ? plan.sin + angle : nullptr, D, 1.0f, rotated);
    int d = 0;
    for (; d + VL <= D; d += VL) store(key + d, load(rotated + d));
    for (; d < D; d++) narrow(key + d, rotated[d]);
    std::memcpy(key + P * D, v, D * sizeof(T));
}

// What an item keeps in the first two cache levels: rotated queries [rows, steps], scores and probabilities of a block of rows, running sums, and
// the panels of one or two pages.
struct Item {
    int rows, steps, columns;      // steps: 32-bit elements of a padded query row; columns: D rounded up to VL
    uint32_t* query;
    float* scores;
    uint32_t* probabilities;
    float *acc, *top, *total, *factor;
    uint32_t *keys, *values;
};

// Takes chunks c, ..., c + PAGES - 1 of the piece into the running sums. Two pages at once halve what a page costs besides its products: the
// horizontal maxima and sums, and reading and writing acc.
template <class Math, int PAGES>
void attend_pages(const Plan& plan, int layer, const Piece& piece, int head, int c, const Page& next, const Item& item) {
    constexpr int SLOTS = PAGES * P, psteps = P / Math::PAIR;
    const int G = plan.G, D = plan.D, start = piece.start + c * P, first = plan.positions[piece.first_row];
    Prefetcher keys_ahead[PAGES], values_ahead[PAGES];
    for (int i = 0; i < PAGES; i++) {
        const int coming = c + PAGES + i;
        const Page after = coming < piece.num_chunks ? page_of(plan, layer, head, piece, coming) : i ? Page{plan.arena, DENSE_BF16, 0} : next;
        keys_ahead[i] = prefetch(after, D, 0), values_ahead[i] = prefetch(after, D, 1);
    }
    for (int i = 0; i < PAGES; i++) {
        const Page page = page_of(plan, layer, head, piece, c + i);
        if (plan.reads) __atomic_fetch_add(plan.reads + static_cast<int64_t>(plan.indices[piece.first_index + c + i]) * plan.H + head, 1, __ATOMIC_RELAXED);
        load_keys<Math>(page, D, item.keys + i * P, SLOTS, keys_ahead[i]);
        load_values<Math>(page, D, item.columns, item.values + i * psteps * item.columns, values_ahead[i]);
    }
    const bool partly_hidden = first < start + SLOTS - 1 || plan.window;
    for (int at = 0; at < item.rows; at += BLOCK) {
        const int count = item.rows - at < BLOCK ? item.rows - at : BLOCK;
        product<Math>(item.query + at * item.steps, item.steps, item.keys, SLOTS, item.scores, SLOTS, item.steps, count, SLOTS, nullptr,
                      keys_ahead[0]);
        for (int m = 0; partly_hidden && m < count; m++) {
            const int position = plan.positions[piece.first_row + (at + m) / G];
            int high = position + 1 - start;
            high = high < 0 ? 0 : high > SLOTS ? SLOTS : high;
            int low = plan.window ? position + 1 - plan.window - start : 0;
            low = low < 0 ? 0 : low > high ? high : low;
            hide(item.scores + m * SLOTS, low, high, SLOTS);
        }
        for (int m = 0; m < count; m += ROWS)
            soften<Math, SLOTS>(item.scores + m * SLOTS, item.probabilities + m * psteps * PAGES, item.top + at + m, item.total + at + m,
                                item.factor + m);
        product<Math>(item.probabilities, psteps * PAGES, item.values, item.columns, item.acc + at * item.columns, item.columns, psteps * PAGES,
                      count, item.columns, item.factor, values_ahead[0]);
    }
}

// next: the page this thread needs after this item; its `valid` is 0 if there is none.
template <class Math, class T>
void attend_item(const Plan& plan, int layer, const Piece& piece, int head, const T* q, int64_t q_stride, T* out, const Page& next) {
    if (plan.decode && plan.positions[piece.first_row] < piece.start + piece.num_chunks * P) write_row<T>(plan, layer, piece.first_row, head);
    const int G = plan.G, D = plan.D, H = plan.H, rows = piece.num_rows * G;
    const int padded = (rows + ROWS - 1) / ROWS * ROWS;   // what is softened past `rows` is ignored
    const int held = padded < BLOCK ? padded : BLOCK;     // rows whose scores are held at once
    const int pages = rows <= BLOCK ? 1 : 2;              // at once: two pages' panels and a block of scores leave the first-level cache
    const int slots = pages * P, width = slots / Math::PAIR;
    const int block = VL * Math::PAIR;
    const int steps = (D + block - 1) / block * VL, columns = (D + VL - 1) / VL * VL;

    auto* cursor = static_cast<uint8_t*>(thread_scratch(
        (static_cast<size_t>(padded) * (steps + columns + 2) + static_cast<size_t>(held) * (slots + width + 1) + static_cast<size_t>(steps) * slots + static_cast<size_t>(width) * columns + D) * 4 + 64 * 10));
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
    auto* rotated = reinterpret_cast<float*>(carve(D));

    const float scale = LOG2E / std::sqrt(static_cast<float>(D));
    if (steps * Math::PAIR > D) std::memset(item.query, 0, static_cast<size_t>(rows) * steps * 4);
    for (int r = 0; r < piece.num_rows; r++) {
        const int row = piece.first_row + r;
        const int64_t angle = static_cast<int64_t>(plan.positions[row]) * (D / 2);
        const float* cos = plan.cos ? plan.cos + angle : nullptr;
        const float* sin = plan.cos ? plan.sin + angle : nullptr;
        for (int g = 0; g < G; g++) {
            rotate(q + row * q_stride + (head * G + g) * D, cos, sin, D, scale, rotated);
            store_operand<Math>(rotated, D, item.query + (r * G + g) * steps);
        }
    }
    std::memset(item.acc, 0, static_cast<size_t>(rows) * columns * 4);
    for (int m = 0; m < padded; m++) item.top[m] = UNSEEN, item.total[m] = 0;
    std::memset(item.scores, 0, static_cast<size_t>(held) * slots * 4);

    int c = 0;
    for (; pages == 2 && c + 2 <= piece.num_chunks; c += 2) attend_pages<Math, 2>(plan, layer, piece, head, c, next, item);
    for (; c < piece.num_chunks; c++) attend_pages<Math, 1>(plan, layer, piece, head, c, next, item);

    for (int m = 0; m < rows; m++) {
        const int r = m / G, g = m % G;
        const bool seen = !(item.top[m] <= UNSEEN);
        const float inverse = seen ? 1.0f / item.total[m] : 0.0f;
        const float* o = item.acc + m * columns;
        if (piece.partial < 0) {
            T* y = out + (static_cast<int64_t>(piece.first_row + r) * H * G + head * G + g) * D;
            int d = 0;
            for (; d + VL <= D; d += VL) store(y + d, load(o + d) * inverse);
            for (; d < D; d++) narrow(y + d, o[d] * inverse);
        } else {
            const int64_t slot = static_cast<int64_t>(piece.partial + r) * H * G + head * G + g;
            for (int d = 0; d < D; d++) plan.partial_o[slot * D + d] = o[d] * inverse;
            plan.partial_lse[slot] = seen ? (item.top[m] + std::log2(item.total[m])) * LN2 : -INFINITY;
        }
    }
}

template <class T>
void merge_row(const Plan& plan, const Merge& merge, int head, T* out) {
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
}

template <class Math, class T>
void attend(const Plan& plan, int layer, const T* q, int64_t q_stride, T* out) {
    const int H = plan.H;
    if (!plan.decode) {
        const int64_t grain = plan.num_rows < 32 ? plan.num_rows : (plan.num_rows + sharing_threads() - 1) / sharing_threads();
        parallel_for(plan.num_rows, grain, [&](int64_t row) {
            for (int head = 0; head < H; head++) write_row<T>(plan, layer, static_cast<int>(row), head);
        });
    }
    parallel_pairs(static_cast<int64_t>(plan.num_pieces) * H, [&](int64_t i, int64_t then) {
        Page next{plan.arena, DENSE_BF16, 0};
        if (then >= 0) next = page_of(plan, layer, static_cast<int>(then % H), plan.pieces[then / H], 0);
        attend_item<Math>(plan, layer, plan.pieces[i / H], static_cast<int>(i % H), q, q_stride, out, next);
    });
    const int heads = H * plan.G;
    if (plan.num_merges)
        parallel_for(static_cast<int64_t>(plan.num_merges) * heads, heads,
                     [&](int64_t i) { merge_row(plan, plan.merges[i / heads], static_cast<int>(i % heads), out); });
}

}  // namespace
}  // namespace quire

using namespace quire;

QUIRE_API void quire_attend(const Plan* plan, int layer, const void* q, int64_t q_stride, void* out) {
    if (plan->kind == DENSE_BF16) {
#if defined(__AVX512BF16__)
        attend<MathBf16>(*plan, layer, static_cast<const bf16*>(q), q_stride, static_cast<bf16*>(out));
#else
        attend<MathF32>(*plan, layer, static_cast<const bf16*>(q), q_stride, static_cast<bf16*>(out));
#endif
    } else if (plan->kind == DENSE_F32) {
        attend<MathF32>(*plan, layer, static_cast<const float*>(q), q_stride, static_cast<float*>(out));
    } else {
        attend<MathF32>(*plan, layer, static_cast<const f16*>(q), q_stride, static_cast<f16*>(out));
    }
}

// Bytes of a Plan, so that the Python mirror of the struct can be checked against it.
QUIRE_API int64_t quire_plan_bytes() { return sizeof(Plan); }
