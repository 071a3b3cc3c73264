// Attention of at most FEW_ROWS query rows over a nuq page, without panels. Scores and sums are computed from the codes. The residuals of outlier
// slots are added to scores and sums, not to keys and values.
#pragma once
#include "encoded_panels.h"

#if defined(__AVX512BF16__)
namespace quire {

constexpr int FEW_ROWS = 4;

// Looks up elements `at` of a table of `count` floats. Tables of up to 32 are read into registers, which is faster than a gather.
inline vf picked(const float* table, int count, lanes at) {
    if (count <= 32) return (vf)_mm512_permutex2var_ps(_mm512_loadu_ps(table), at, _mm512_loadu_ps(table + VL));
    return (vf)_mm512_i32gather_ps(at, table, 4);
}

// Calls f(0), ..., f(COUNT - 1) with compile-time constants, so that arrays indexed by them stay in registers.
template <int COUNT, class F>
__attribute__((always_inline)) inline void each(F&& f) {
    if constexpr (COUNT > 0) {
        each<COUNT - 1>(f);
        f(std::integral_constant<int, COUNT - 1>{});
    }
}

// Adds the products of one block of pairs to acc: for each row, the scores of all slots, sixteen in a vector.
template <int BITS, Turn BY, int ROWS>
__attribute__((always_inline)) inline void block_scores(const NuqHead& head, int half, const uint8_t* lines, const uint8_t* order, const uint32_t* turns,
                                                        const uint32_t* query, int steps, vf (&acc)[ROWS][P / VL]) {
    each<BLOCK_PAIRS>([&](auto p) __attribute__((always_inline)) {
        const int j = order[p];
        const PairCodebook<BITS> codebook(head.key_lookup + j * CODEBOOK_SIZE, head.key_lookup + (j + half) * CODEBOOK_SIZE);
        __m512bh row[ROWS];
        each<ROWS>([&](auto r) __attribute__((always_inline)) { row[r] = (__m512bh)_mm512_set1_epi32(static_cast<int>(query[r * steps + j])); });
        each<P / VL>([&](auto quarter) __attribute__((always_inline)) {
            asm volatile("" ::: "memory");   // otherwise the compiler loads all angles first, and spills them
            const lanes pairs = codebook(joined<BITS>(lines, 4 * BLOCK_PAIRS, 4 * p + quarter));
            const __m512bh key = (__m512bh)turned<BY>(pairs, turns + j * TURNS<BY>, quarter * VL, 1.0f, 0.0f);
            each<ROWS>([&](auto r) __attribute__((always_inline)) { acc[r][quarter] = (vf)_mm512_dpbf16_ps((__m512)acc[r][quarter], row[r], key); });
        });
    });
}

// Scores [ROWS, P] of queries with the keys of a nuq page, without the residuals of outlier slots. query [ROWS, steps]: bf16 pairs, rotated relative
// to the position that the table `turns` counts from.
template <int ROWS, Turn BY>
void nuq_scores(const LayerPlan& plan, const Page& page, const uint32_t* turns, const uint32_t* query, int steps, float* scores, Prefetcher& ahead) {
    const NuqHead& head = nuq_head(page);
    const int half = plan.D / 2;
    const uint8_t* lines = page.image;
    vf acc[ROWS][P / VL];
    each<ROWS>([&](auto r) { each<P / VL>([&](auto quarter) { acc[r][quarter] = vf{}; }); });
    for (int block = 0; block < half / BLOCK_PAIRS; block++) {
        ahead.step(ahead.pace);
        const uint8_t* order = head.order + block * BLOCK_PAIRS;
        switch (head.bits[block]) {
            case 0: block_scores<0, BY>(head, half, lines, order, turns, query, steps, acc); break;
            case 1: block_scores<1, BY>(head, half, lines, order, turns, query, steps, acc); break;
            case 2: block_scores<2, BY>(head, half, lines, order, turns, query, steps, acc); break;
            case 3: block_scores<3, BY>(head, half, lines, order, turns, query, steps, acc); break;
            case 4: block_scores<4, BY>(head, half, lines, order, turns, query, steps, acc); break;
            default: block_scores<5, BY>(head, half, lines, order, turns, query, steps, acc);
        }
        lines += LINE * head.bits[block];
    }
    each<ROWS>([&](auto r) { each<P / VL>([&](auto quarter) { store(scores + r * P + quarter * VL, acc[r][quarter]); }); });
}

// Adds to scores [ROWS, P] the products with the residuals of one outlier slot. query: float32 [ROWS, D]; up to 2 VL floats after it are read, but
// not used.
template <int ROWS, Turn BY>
inline void score_key_slot(const uint8_t* slot, const uint32_t* turns, int D, const float* query, float* scores) {
    constexpr int SHIFT = TURNS<BY> == P ? 6 : 7;
    static_assert(TURNS<BY> == 1 << SHIFT, "elements of a pair's turns");
    const int half = D / 2;
    const lanes count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
    for (int quarter = 0; quarter < P / VL; quarter++) {
        const lanes channel = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(slot + quarter * VL)));
        const __mmask16 is_second = _mm512_cmpge_epi32_mask(channel, _mm512_set1_epi32(half));
        const lanes pair = _mm512_mask_sub_epi32(channel, is_second, channel, _mm512_set1_epi32(half));
        const lanes at = _mm512_add_epi32(_mm512_slli_epi32(pair, SHIFT), _mm512_add_epi32(count, _mm512_set1_epi32(quarter * VL)));
        const lanes turn = _mm512_i32gather_epi32(at, turns, 4);
        const vf missing = halves(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(slot + P + 2 * quarter * VL)));
        const vf along = missing * lower(turn), across = missing * upper(turn);   // times cos, times -sin
        const vf x = (vf)_mm512_mask_blend_ps(is_second, (__m512)along, (__m512)across);
        const vf y = (vf)_mm512_mask_blend_ps(is_second, (__m512)-across, (__m512)along);
        for (int r = 0; r < ROWS; r++) {
            float* s = scores + r * P + quarter * VL;
            store(s, load(s) + picked(query + r * D, half, pair) * x + picked(query + r * D + half, half, pair) * y);
        }
    }
}

// Adds to the sums of GROUPS groups of sixteen columns. With few sums, each has two accumulators: a core needs about a dozen independent products.
template <int BITS, int ROWS, int GROUPS>
__attribute__((always_inline)) inline void column_sums(const uint8_t* lines, lanes lookup, const uint32_t* probabilities, vf (&acc)[GROUPS][ROWS]) {
    constexpr bool TWO = GROUPS * ROWS <= 8;
    vf other[GROUPS][ROWS] = {};
#pragma GCC unroll 32
    for (int f = 0; f < P / 2; f++) {
        vu pairs[GROUPS];
        for (int g = 0; g < GROUPS; g++) pairs[g] = (vu)_mm512_permutexvar_epi16(joined<BITS>(lines + g * 2 * BITS * LINE, P / 2, f), lookup);
        for (int r = 0; r < ROWS; r++) {
            const __m512bh p = (__m512bh)_mm512_set1_epi32(static_cast<int>(probabilities[r * (P / 2) + f]));
            for (int g = 0; g < GROUPS; g++) {
                vf& sum = TWO && f % 2 ? other[g][r] : acc[g][r];
                sum = (vf)_mm512_dpbf16_ps((__m512)sum, p, (__m512bh)pairs[g]);
            }
        }
    }
    if constexpr (TWO)
        for (int g = 0; g < GROUPS; g++)
            for (int r = 0; r < ROWS; r++) acc[g][r] += other[g][r];
}

template <int ROWS, int GROUPS>
inline void scaled_sums(int bits, const uint8_t* lines, lanes lookup, const uint32_t* probabilities, float* sums, int columns, const float* factor) {
    asm("" : "+r"(probabilities));   // otherwise the compiler broadcasts all of them first, into memory
    vf acc[GROUPS][ROWS];
    for (int g = 0; g < GROUPS; g++)
        for (int r = 0; r < ROWS; r++) acc[g][r] = load(sums + r * columns + g * VL) * factor[r];
    switch (bits) {
        case 1: column_sums<1>(lines, lookup, probabilities, acc); break;
        case 2: column_sums<2>(lines, lookup, probabilities, acc); break;
        case 3: column_sums<3>(lines, lookup, probabilities, acc); break;
        case 4: column_sums<4>(lines, lookup, probabilities, acc); break;
        default: column_sums<5>(lines, lookup, probabilities, acc);
    }
    for (int g = 0; g < GROUPS; g++)
        for (int r = 0; r < ROWS; r++) store(sums + r * columns + g * VL, acc[g][r]);
}

// sums = sums * factor + probabilities * centroids. sums [ROWS, columns], factor [ROWS]. probabilities [ROWS, P / 2]: pairs of bf16, already
// multiplied by the scales of the values.
template <int ROWS>
void nuq_sums(const LayerPlan& plan, const Page& page, const uint32_t* probabilities, float* sums, int columns, const float* factor, Prefetcher& ahead) {
    const NuqHead& head = nuq_head(page);
    const lanes lookup = load_lanes(head.value_lookup);
    const uint8_t* lines = page.image + head.at_values;
    const int bits = head.value_bits, group = 2 * LINE * bits;
    int d = 0;
    for (; d + 4 * VL <= plan.D; d += 4 * VL, lines += 4 * group) {
        ahead.step(3 * ahead.pace);
        scaled_sums<ROWS, 4>(bits, lines, lookup, probabilities, sums + d, columns, factor);
    }
    for (; d + 2 * VL <= plan.D; d += 2 * VL, lines += 2 * group) {
        ahead.step(2 * ahead.pace);
        scaled_sums<ROWS, 2>(bits, lines, lookup, probabilities, sums + d, columns, factor);
    }
    if (d < plan.D) scaled_sums<ROWS, 1>(bits, lines, lookup, probabilities, sums + d, columns, factor);
}

// Multiplies the late sums by each row's factor. late [4 tables, columns, FEW_ROWS]: the residuals of values, weighted; fold_late adds them to the
// sums at the end of an item. Consecutive tokens often have their residuals in the same column, and loading a sum that was just stored is slow. So
// consecutive tokens use different tables.
inline void scale_late(float* late, int columns, const float* factor) {
    const __m128 by = _mm_loadu_ps(factor);
    if (_mm_movemask_ps(_mm_cmpneq_ps(by, _mm_set1_ps(1))) == 0) return;   // no row has a new maximum, as with most pages
    const vf all = (vf)_mm512_broadcast_f32x4(by);
    for (int i = 0; i < columns * FEW_ROWS * FEW_ROWS; i += VL) store(late + i, load(late + i) * all);
}

// Adds the four tables to sums [rows, columns].
inline void fold_late(const float* late, int columns, int rows, float* sums) {
    for (int d = 0; d < columns; d += FEW_ROWS) {
        __m128 of_row[FEW_ROWS];
        for (int i = 0; i < FEW_ROWS; i++) {
            const float* at = late + (d + i) * FEW_ROWS;
            const auto table = [&](int k) { return _mm_loadu_ps(at + k * columns * FEW_ROWS); };
            of_row[i] = (table(0) + table(1)) + (table(2) + table(3));
        }
        _MM_TRANSPOSE4_PS(of_row[0], of_row[1], of_row[2], of_row[3]);
        for (int r = 0; r < rows; r++) _mm_storeu_ps(sums + r * columns + d, _mm_loadu_ps(sums + r * columns + d) + of_row[r]);
    }
}

// Adds the residuals of one outlier slot of values to the late sums. weights [FEW_ROWS, P]: probabilities, not multiplied by the scales.
inline void add_late(const uint8_t* slot, const float* weights, int columns, float* late) {
    static_assert(FEW_ROWS == 4, "rows of a quarter of a register");
    for (int t = 0; t < P; t += VL) {
        const vf missing = halves(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(slot + P + 2 * t)));
        const auto row = [&](int r) { return (__m512)(missing * load(weights + r * P + t)); };
        const __m512 a = row(0), b = row(1), c = row(2), d = row(3);
        const __m512d low = (__m512d)_mm512_unpacklo_ps(a, b), high = (__m512d)_mm512_unpackhi_ps(a, b);
        const __m512d low2 = (__m512d)_mm512_unpacklo_ps(c, d), high2 = (__m512d)_mm512_unpackhi_ps(c, d);
        // slots[i]: all rows of tokens t + i, t + 4 + i, t + 8 + i and t + 12 + i.
        const __m512 slots[4] = {(__m512)_mm512_unpacklo_pd(low, low2), (__m512)_mm512_unpackhi_pd(low, low2),
                                 (__m512)_mm512_unpacklo_pd(high, high2), (__m512)_mm512_unpackhi_pd(high, high2)};
        each<4>([&](auto quarter) {
            each<4>([&](auto i) {
                float* at = late + (i * columns + slot[t + 4 * quarter + i]) * FEW_ROWS;
                _mm_storeu_ps(at, _mm_add_ps(_mm_loadu_ps(at), _mm512_extractf32x4_ps(slots[i], decltype(quarter)::value)));
            });
        });
    }
}

}  // namespace quire
#endif
