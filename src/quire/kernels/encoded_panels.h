// Scratch panels of pages that store keys before rotation. If sealed chunks are encoded, these are all pages: encoded and dense.
//
// With bf16 dot products, an element of a key panel holds a pair of bf16: the two channels that rotation mixes, j and j + D/2. Query rows have the
// same format. The value panel of a nuq page holds centroids: value = scale[slot] * centroid + offset[slot]. The softmax multiplies probabilities
// by the scales, and adds up probability * offset in one sum per row.
#pragma once
#include "panels.h"

namespace quire {

#if defined(__AVX512BF16__)
typedef __m512i lanes;

inline lanes load_lanes(const void* at) { return _mm512_loadu_si512(at); }

// The codes of field f, in the low bits of each 16-bit lane. The bits above a code are undefined. BITS: 0, 1, 2 or 4.
template <int BITS>
inline lanes field(const uint8_t* lines, int f) {
    const auto line = [&](int i) { return load_lanes(lines + LINE * i); };
    if constexpr (BITS == 0) return _mm512_setzero_si512();
    if constexpr (BITS == 1) return _mm512_srli_epi16(line(f / 16), f % 16);
    if constexpr (BITS == 2) return _mm512_srli_epi16(line(f / 8), f % 8 * 2);
    if constexpr (BITS == 4) return _mm512_srli_epi16(line(f / 4), f % 4 * 4);
    return _mm512_setzero_si512();
}

// The same for any width. A code of 3 or 5 bits is stored in two parts: its upper 2 or 4 bits, and its lowest bit.
template <int BITS>
inline lanes joined(const uint8_t* lines, int fields, int f) {
    if constexpr (BITS == 3 || BITS == 5) {
        constexpr int WIDTH = BITS - 1, PER_LINE = 16 / WIDTH;
        const lanes upper = load_lanes(lines + LINE * (f / PER_LINE)), lower = load_lanes(lines + LINE * (fields / PER_LINE + f / 16));
        const int shift = f % PER_LINE * WIDTH - 1;
        const lanes high = shift < 0 ? _mm512_slli_epi16(upper, 1) : _mm512_srli_epi16(upper, shift);
        const lanes low = _mm512_srli_epi16(lower, f % 16);
        const lanes mask = _mm512_set1_epi16(((1 << WIDTH) - 1) << 1);
        return _mm512_ternarylogic_epi32(mask, high, low, 0xca);   // mask ? high : low
    } else {
        return field<BITS>(lines, f);
    }
}

// Looks up codes of a pair of channels: even lanes are codes of the first channel, odd lanes of the second. Up to 4 bits, both codebooks share one
// register. Bits above a code are ignored.
template <int BITS>
struct PairCodebook {
    lanes first, second;
    PairCodebook(const uint16_t* a, const uint16_t* b) {
        if constexpr (BITS > 4) {
            first = load_lanes(a), second = load_lanes(b);
        } else {
            const auto of = [](const uint16_t* codebook) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codebook)); };
            first = second = _mm512_inserti64x4(_mm512_castsi256_si512(of(a)), of(b), 1);
        }
    }
    lanes operator()(lanes code) const {
        if constexpr (BITS > 4) return _mm512_mask_permutexvar_epi16(_mm512_permutexvar_epi16(code, first), 0xaaaaaaaa, code, second);
        const lanes mask = _mm512_set1_epi16(15), odd = _mm512_set1_epi32(16 << 16);
        return _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(code, mask, odd, 0xea), first);   // code & mask | odd
    }
};

// bf16 pairs (first[i], second[i]).
inline lanes pairs_of(vf first, vf second) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const lanes both = (lanes)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), both);
}

// How the keys of a page are rotated. BY_SLOT: by the index of the slot. BY_PAGE: by the slot, then by one angle for the whole page. BY_POSITION:
// each slot by a position of its own.
enum Turn { BY_SLOT, BY_PAGE, BY_POSITION };

// The tables for a rotation. pairs: LayerRecord.turns [D/2, 2, P], or with BY_POSITION only the pairs (cos, -sin) [D/2, P]. cos, sin [D/2]: the page's
// angle, with BY_PAGE.
struct Turns {
    Turn by;
    const uint32_t* pairs;
    const float *cos, *sin;
};

// Elements of Turns.pairs per pair of channels.
template <Turn BY>
constexpr int TURNS = BY == BY_POSITION ? P : 2 * P;

// Calls body(by) with `by` as a compile-time constant.
template <class Body>
inline void with_turn(Turn by, const Body& body) {
    if (by == BY_SLOT) body(std::integral_constant<Turn, BY_SLOT>{});
    else if (by == BY_PAGE) body(std::integral_constant<Turn, BY_PAGE>{});
    else body(std::integral_constant<Turn, BY_POSITION>{});
}

// The rotation that puts the page's first slot at position `start`, or its slots at their own positions, if it has some. own [D/2, P]: memory for
// the table of BY_POSITION.
inline Turns turns_of(const LayerPlan& plan, const Page& page, int start, uint32_t* own) {
    const int half = plan.D / 2;
    const int64_t angle = static_cast<int64_t>(start) * half;
    if (!plan.cos || (!page.positions && !start)) return {BY_SLOT, plan.turns};
    if (!page.positions) return {BY_PAGE, plan.turns, plan.cos + angle, plan.sin + angle};
    const lanes minus = _mm512_set1_epi32(static_cast<int>(0x80000000));
    for (int j = 0; j < half; j += VL) {
        const int count = half - j < VL ? half - j : VL;
        const __mmask16 some = static_cast<__mmask16>((1u << count) - 1);
        for (int t = 0; t < P; t += VL) {
            vu block[VL];
            for (int i = 0; i < VL; i++)
                block[i] = (vu)_mm512_maskz_loadu_epi32(some, plan.angles + static_cast<int64_t>(page.positions[t + i]) * half + j);
            transpose(block);
            for (int i = 0; i < count; i++) _mm512_storeu_si512(own + (j + i) * P + t, _mm512_xor_si512((lanes)block[i], minus));
        }
    }
    return {BY_POSITION, own};
}

// Rotates bf16 pairs (x1, x2) of the VL slots from slot t on. turns: the part of Turns.pairs for this pair of channels. c, s: cosine and sine of the
// page's angle, used with BY_PAGE.
template <Turn BY>
inline lanes turned(lanes pairs, const uint32_t* turns, int t, float c, float s) {
    const auto dot = [&](lanes turn) { return (vf)_mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)pairs, (__m512bh)turn); };
    const lanes first = load_lanes(turns + t);   // (cos, -sin)
    const vf x = dot(first);
    if constexpr (BY == BY_POSITION) return pairs_of(x, dot(_mm512_xor_si512(_mm512_rol_epi32(first, 16), _mm512_set1_epi32(0x8000))));
    const vf y = dot(load_lanes(turns + P + t));
    if constexpr (BY == BY_PAGE) return pairs_of(x * c - y * s, y * c + x * s);
    return pairs_of(x, y);
}

// Decodes and rotates one block of pairs of channels. lines: its codes. order: its pairs. out: rows `ld` apart, one per pair.
template <int BITS, Turn BY>
void block_keys(const NuqHead& head, int half, const uint8_t* lines, const uint8_t* order, const Turns& turns, uint32_t* out, int ld) {
#pragma GCC unroll 4
    for (int p = 0; p < BLOCK_PAIRS; p++) {
        const int j = order[p];
        const float c = BY == BY_PAGE ? turns.cos[j] : 1.0f, s = BY == BY_PAGE ? turns.sin[j] : 0.0f;
        const PairCodebook<BITS> codebook(head.key_lookup + j * CODEBOOK_SIZE, head.key_lookup + (j + half) * CODEBOOK_SIZE);
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; quarter++) {
            const lanes pairs = codebook(joined<BITS>(lines, 4 * BLOCK_PAIRS, 4 * p + quarter));
            _mm512_storeu_si512(out + j * ld + quarter * VL, turned<BY>(pairs, turns.pairs + j * TURNS<BY>, quarter * VL, c, s));
        }
    }
}

// Decodes sixteen columns of values: out [P / 2, columns] of pairs of slots.
template <int BITS>
void column_values(const uint8_t* lines, lanes lookup, uint32_t* out, int columns) {
#pragma GCC unroll 32
    for (int f = 0; f < P / 2; f++)
        _mm512_storeu_si512(out + f * columns, _mm512_permutexvar_epi16(joined<BITS>(lines, P / 2, f), lookup));
}

inline vf halves(__m256i x) { return (vf)_mm512_cvtph_ps(x); }

// The lower or the upper bf16 of every pair, as floats.
inline vf lower(lanes pairs) { return (vf)_mm512_slli_epi32(pairs, 16); }
inline vf upper(lanes pairs) { return (vf)_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))); }

// Adds the residuals of one outlier slot to rotated keys. `slot` has the channel and the residual of one element of each key. Rotation spreads this
// element over its pair of channels, so two elements change.
template <Turn BY>
void add_key_slot(const uint8_t* slot, const Turns& turns, int half, uint32_t* out, int ld) {
    const lanes count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int t = 0; t < P; t += VL) {
        const lanes channel = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(slot + t)));
        const __mmask16 second = _mm512_cmpge_epi32_mask(channel, _mm512_set1_epi32(half));
        const lanes pair = _mm512_mask_sub_epi32(channel, second, channel, _mm512_set1_epi32(half));
        const lanes at = _mm512_add_epi32(count, _mm512_set1_epi32(t));
        const lanes turn = _mm512_i32gather_epi32(_mm512_add_epi32(_mm512_mullo_epi32(pair, _mm512_set1_epi32(TURNS<BY>)), at), turns.pairs, 4);
        const lanes where = _mm512_add_epi32(_mm512_mullo_epi32(pair, _mm512_set1_epi32(ld)), at);
        const lanes old = _mm512_i32gather_epi32(where, out, 4);
        const vf missing = halves(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(slot + P + 2 * t)));
        const vf along = missing * lower(turn), across = missing * upper(turn);   // times cos, times -sin
        vf first = (vf)_mm512_mask_blend_ps(second, (__m512)along, (__m512)across);
        vf other = (vf)_mm512_mask_blend_ps(second, (__m512)-across, (__m512)along);
        if constexpr (BY == BY_PAGE) {
            const vf c = (vf)_mm512_i32gather_ps(pair, turns.cos, 4), s = (vf)_mm512_i32gather_ps(pair, turns.sin, 4);
            const vf x = first;
            first = x * c - other * s, other = other * c + x * s;
        }
        _mm512_i32scatter_epi32(out, where, pairs_of(lower(old) + first, upper(old) + other), 4);
    }
}

// Adds the residuals of one outlier slot to centroids, divided by the scale of the token's value. Two tokens share an element of the panel, so even
// tokens are added first, then odd ones.
inline void add_value_slot(const uint8_t* slot, const uint8_t* scales, uint32_t* out, int columns) {
    const lanes rows = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(columns));
    for (int f = 0; f < P / 2; f += VL) {
        const lanes channels = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(slot + 2 * f)));
        const lanes missing = load_lanes(slot + P + 4 * f), scale = load_lanes(scales + 4 * f);
        const lanes base = _mm512_add_epi32(rows, _mm512_set1_epi32(f * columns));
        for (int odd = 0; odd < 2; odd++) {
            const lanes channel = odd ? _mm512_srli_epi32(channels, 8) : _mm512_and_si512(channels, _mm512_set1_epi32(0xff));
            const auto half_of = [&](lanes x) { return halves(_mm512_cvtepi32_epi16(odd ? _mm512_srli_epi32(x, 16) : x)); };
            const vf s = half_of(scale);
            const vf step = s > vf{} ? half_of(missing) / s : vf{};
            const lanes where = _mm512_add_epi32(base, channel);
            const lanes old = _mm512_i32gather_epi32(where, out, 4);
            _mm512_i32scatter_epi32(out, where, pairs_of(lower(old) + (odd ? vf{} : step), upper(old) + (odd ? step : vf{})), 4);
        }
    }
}

// Keys of a nuq page -> out [D/2, P] of bf16 pairs, rotated. Without the residuals of its outlier slots.
template <Turn BY>
void nuq_keys(const LayerPlan& plan, const Page& page, const Turns& turns, uint32_t* out, int ld, Prefetcher& ahead) {
    const NuqHead& head = nuq_head(page);
    const int half = plan.D / 2;
    const uint8_t* lines = page.image;
    for (int block = 0; block < half / BLOCK_PAIRS; block++) {
        ahead.step(4);
        const auto run = [&](auto unpack) { unpack(head, half, lines, head.order + block * BLOCK_PAIRS, turns, out, ld); };
        switch (head.bits[block]) {
            case 0: run(block_keys<0, BY>); break;
            case 1: run(block_keys<1, BY>); break;
            case 2: run(block_keys<2, BY>); break;
            case 3: run(block_keys<3, BY>); break;
            case 4: run(block_keys<4, BY>); break;
            default: run(block_keys<5, BY>);
        }
        lines += LINE * head.bits[block];
    }
}

// Scale and offset [P] of the values of a nuq page.
inline void load_ranges(const Page& page, float* scale, float* offset) {
    const auto* ranges = reinterpret_cast<const __m256i*>(page.image + nuq_head(page).at_ranges);
    for (int i = 0; i < P / VL; i++) store(scale + i * VL, halves(_mm256_loadu_si256(ranges + i)));
    for (int i = 0; i < P / VL; i++) store(offset + i * VL, halves(_mm256_loadu_si256(ranges + P / VL + i)));
}

// Values of a nuq page -> centroids, out [P / 2, columns] of pairs of slots, with the residuals of its outlier slots; scale and offset [P].
inline void nuq_values(const LayerPlan& plan, const Page& page, uint32_t* out, int columns, float* scale, float* offset, Prefetcher& ahead) {
    const NuqHead& head = nuq_head(page);
    const lanes lookup = load_lanes(head.value_lookup);
    const uint8_t* lines = page.image + head.at_values;
    const uint8_t* ranges = page.image + head.at_ranges;
    for (int d = 0; d < plan.D; d += 16, lines += 2 * LINE * head.value_bits) {
        ahead.step(16);
        switch (head.value_bits) {
            case 1: column_values<1>(lines, lookup, out + d, columns); break;
            case 2: column_values<2>(lines, lookup, out + d, columns); break;
            case 3: column_values<3>(lines, lookup, out + d, columns); break;
            case 4: column_values<4>(lines, lookup, out + d, columns); break;
            default: column_values<5>(lines, lookup, out + d, columns);
        }
    }
    load_ranges(page, scale, offset);
    for (int i = 0; i < head.value_slots; i++) add_value_slot(page.image + head.at_value_slots + i * SLOT_BYTES, ranges, out, columns);
}

// Keys bf16 [P, D] before rotation -> out [D/2, P] of bf16 pairs, rotated. Slots from `valid` on are undefined.
template <Turn BY>
void plain_keys(const bf16* k, int D, const Turns& turns, int valid, uint32_t* out, int ld, Prefetcher& ahead) {
    const int half = D / 2;
    for (int t = 0; t < valid; t += VL)
        for (int j = 0; j < half; j += VL) {
            ahead.step(VL / 2);
            const int count = half - j < VL ? half - j : VL;
            vu block[VL];
            for (int i = 0; i < VL; i++) {
                const bf16* row = k + (t + i) * D + j;
                const __mmask16 some = static_cast<__mmask16>((1u << count) - 1);
                const __m256i a = _mm256_maskz_loadu_epi16(some, row), b = _mm256_maskz_loadu_epi16(some, row + half);
                block[i] = (vu)_mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
            }
            transpose(block);
            for (int i = 0; i < count; i++) {
                const float c = BY == BY_PAGE ? turns.cos[j + i] : 1.0f, s = BY == BY_PAGE ? turns.sin[j + i] : 0.0f;
                _mm512_storeu_si512(out + (j + i) * ld + t, turned<BY>((lanes)block[i], turns.pairs + (j + i) * TURNS<BY>, t, c, s));
            }
        }
}
#endif

// Keys T [rows, D] before rotation -> float32 [rows, D], rotated. positions [rows], or null: consecutive from `start` on.
template <class T>
inline void turn_rows(const LayerPlan& plan, const T* x, const int32_t* positions, int start, int rows, float* out) {
    const int D = plan.D, half = D / 2;
    for (int t = 0; t < rows; t++) {
        const int64_t at = static_cast<int64_t>(positions ? positions[t] : start + t) * half;
        rotate(x + t * D, plan.cos ? plan.cos + at : nullptr, plan.cos ? plan.sin + at : nullptr, D, 1.0f, out + t * D);
    }
}

// Floats of the scratch buffer of turned_keys and encoded_values. Panels of floats need decoded and rotated float32 rows; panels of bf16 pairs need
// the decoded bf16 rows of a page of group codes.
template <class Math>
inline int panel_buffer(int D) { return Math::PAIR == 1 ? 2 * P * D : P * D / 2; }

// The key panel of an encoded or dense page, rotated. The page's first slot is put at position `start`, unless its slots have their own positions.
// T: the type of the step's rows. own: see turns_of; used only if slots have their own positions.
template <class Math, class T>
void turned_keys(const LayerPlan& plan, const Page& page, int start, uint32_t* keys, int ld, float* buffer, uint32_t* own, Prefetcher& ahead) {
    const int D = plan.D, half = D / 2;
    const T* sinks = reinterpret_cast<const T*>(page.sinks);
#if defined(__AVX512BF16__)
    if constexpr (Math::PAIR == 2) {
        const Turns turns = turns_of(plan, page, start, own);
        if (page.kind != NUQ) {
            const bf16* k = reinterpret_cast<const bf16*>(page.image);
            if (is_encoded(page.kind)) {
                bf16* decoded = reinterpret_cast<bf16*>(buffer);
                decode<bf16>(page, D, decoded, nullptr);
                k = decoded;
            }
            with_turn(turns.by, [&](auto by) { plain_keys<decltype(by)::value>(k, D, turns, page.valid, keys, ld, ahead); });
            return;
        }
        with_turn(turns.by, [&](auto by) {
            constexpr Turn BY = decltype(by)::value;
            nuq_keys<BY>(plan, page, turns, keys, ld, ahead);
            const uint8_t* slots = page.image + nuq_head(page).at_key_slots;
            for (int i = 0; i < nuq_head(page).key_slots; i++) add_key_slot<BY>(slots + i * SLOT_BYTES, turns, half, keys, ld);
        });
        // Sinks are the first tokens of a sequence, so slot t is always rotated to position t.
        for (int t = 0; sinks && t < plan.sinks; t++)
            for (int j = 0; j < half; j++) {
                const float a = widen(sinks[t * D + j]), b = widen(sinks[t * D + half + j]);
                const float c = plan.cos ? plan.cos[t * half + j] : 1.0f, s = plan.cos ? plan.sin[t * half + j] : 0.0f;
                keys[j * ld + t] = round_bf16(a * c - b * s) | static_cast<uint32_t>(round_bf16(b * c + a * s)) << 16;
            }
    }
#endif
    if constexpr (Math::PAIR == 1) {
        float *turned_rows = buffer, *k = buffer + P * D;
        if (is_encoded(page.kind)) {
            decode<float>(page, D, k, nullptr);
            for (int i = 0; sinks && i < plan.sinks * D; i++) k[i] = widen(sinks[i]);
            turn_rows(plan, k, page.positions, start, P, turned_rows);
        } else {
            turn_rows(plan, reinterpret_cast<const T*>(page.image), page.positions, start, page.valid, turned_rows);
        }
        keys_from<Math>(turned_rows, D, page.valid, keys, ld, ahead);
    }
}

// The value panel of an encoded or dense page. Returns whether it holds centroids, with scale and offset [P] set; else it holds the values.
template <class Math, class T>
bool encoded_values(const LayerPlan& plan, const Page& page, int columns, uint32_t* values, float* scale, float* offset, float* buffer,
                    Prefetcher& ahead) {
    const int D = plan.D;
    const T* sinks = reinterpret_cast<const T*>(page.sinks) + plan.sinks * D;
#if defined(__AVX512BF16__)
    if constexpr (Math::PAIR == 2) {
        if (page.kind != NUQ) {
            const bf16* v = reinterpret_cast<const bf16*>(page.image) + P * D;
            if (is_encoded(page.kind)) {
                bf16* decoded = reinterpret_cast<bf16*>(buffer);
                decode<bf16>(page, D, nullptr, decoded);
                v = decoded;
            }
            values_bf16(v, D, columns, page.valid, values, ahead);
            return false;
        }
        nuq_values(plan, page, values, columns, scale, offset, ahead);
        for (int t = 0; page.sinks && t < plan.sinks; t++) {
            for (int d = 0; d < D; d++) reinterpret_cast<bf16*>(values + t / 2 * columns + d)[t % 2] = sinks[t * D + d];
            scale[t] = 1, offset[t] = 0;
        }
        return true;
    }
#endif
    if constexpr (Math::PAIR == 1) {
        if (is_encoded(page.kind)) {
            decode<float>(page, D, nullptr, buffer);
            for (int i = 0; page.sinks && i < plan.sinks * D; i++) buffer[i] = widen(sinks[i]);
            values_f32(buffer, D, columns, P, values, ahead);
        } else {
            values_f32(reinterpret_cast<const T*>(page.image) + P * D, D, columns, page.valid, values, ahead);
        }
    }
    return false;
}

}  // namespace quire
