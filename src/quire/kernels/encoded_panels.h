// Scratch panels of pages whose keys are not rotated: the encoded ones, and the dense ones beside them.
//
// A key panel holds pairs of channels that rotation mixes, j and j + D/2, where two bf16 share an element; so do queries. An encoded page's value
// panel holds its centroids: each slot's scale goes into the probabilities, and its offset into one sum a row.
#pragma once
#include "panels.h"

namespace quire {

inline float half_at(const uint8_t* at, int i) {
    f16 h;
    std::memcpy(&h, at + 2 * i, 2);
    return static_cast<float>(h);
}

// Calls body(slot, channel, what is missing there) for every slot of every vector; `slots` as in a page.
template <class Body>
inline void for_slots(const uint8_t* slots, int count, const Body& body) {
    for (int s = 0; s < count; s++, slots += SLOT_BYTES)
        for (int t = 0; t < P; t++) body(t, slots[t], half_at(slots + P, t));
}

#if defined(__AVX512BF16__)
typedef __m512i lanes;

inline lanes load_lanes(const void* at) { return _mm512_loadu_si512(at); }

// Code of field f in the low bits of every lane; what lies above it is left.
template <int BITS>
inline lanes field(const uint8_t* lines, int f) {
    const auto line = [&](int i) { return load_lanes(lines + LINE * i); };
    if constexpr (BITS == 0) return _mm512_setzero_si512();
    if constexpr (BITS == 1) return _mm512_srli_epi16(line(f / 16), f % 16);
    if constexpr (BITS == 2) return _mm512_srli_epi16(line(f / 8), f % 8 * 2);
    if constexpr (BITS == 4) return _mm512_srli_epi16(line(f / 4), f % 4 * 4);
    return _mm512_setzero_si512();
}

// The same for widths of two parts: the upper one ends a bit above the lower one's.
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

// Two vectors of floats, elements side by side as bf16 pairs.
inline lanes pairs_of(vf first, vf second) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const lanes both = (lanes)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), both);
}

// bf16 pairs (x1, x2) of VL slots from slot t on -> rotated pairs; turns is that of their two channels.
inline lanes turned(lanes pairs, const uint32_t* turns, int t) {
    const auto dot = [&](const uint32_t* at) { return (vf)_mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)pairs, (__m512bh)load_lanes(at)); };
    return pairs_of(dot(turns + t), dot(turns + P + t));
}

template <int BITS>
void block_keys(const NuqHead& head, int half, const uint8_t* lines, const uint8_t* order, const uint32_t* turns, uint32_t* out, int ld) {
#pragma GCC unroll 4
    for (int p = 0; p < BLOCK_PAIRS; p++) {
        const int j = order[p];
        const lanes first = load_lanes(head.key_lookup + j * BOOK), second = load_lanes(head.key_lookup + (j + half) * BOOK);
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; quarter++) {
            const lanes code = joined<BITS>(lines, 4 * BLOCK_PAIRS, 4 * p + quarter);
            const lanes pairs = _mm512_mask_permutexvar_epi16(_mm512_permutexvar_epi16(code, first), 0xaaaaaaaa, code, second);
            _mm512_storeu_si512(out + j * ld + quarter * VL, turned(pairs, turns + j * 2 * P, quarter * VL));
        }
    }
}

template <int BITS>
void column_values(const uint8_t* lines, lanes lookup, uint32_t* out, int columns) {
#pragma GCC unroll 32
    for (int f = 0; f < P / 2; f++)
        _mm512_storeu_si512(out + f * columns, _mm512_permutexvar_epi16(joined<BITS>(lines, P / 2, f), lookup));
}

inline void add_bf16(uint32_t* at, int which, float x) {
    bf16* element = reinterpret_cast<bf16*>(at) + which;
    element->bits = round_bf16(widen(*element) + x);
}

// K of an encoded page -> out [D/2, P] of bf16 pairs, rotated by slot.
inline void nuq_keys(const Plan& plan, const Page& page, uint32_t* out, int ld, Prefetcher& ahead) {
    const NuqHead& head = *page.head;
    const int half = plan.D / 2;
    const uint8_t* lines = page.image;
    for (int block = 0; block < half / BLOCK_PAIRS; block++) {
        ahead.step(8);
        const auto run = [&](auto unpack) { unpack(head, half, lines, head.order + block * BLOCK_PAIRS, plan.turns, out, ld); };
        switch (head.bits[block]) {
            case 0: run(block_keys<0>); break;
            case 1: run(block_keys<1>); break;
            case 2: run(block_keys<2>); break;
            case 3: run(block_keys<3>); break;
            case 4: run(block_keys<4>); break;
            default: run(block_keys<5>);
        }
        lines += LINE * head.bits[block];
    }
    for_slots(page.image + head.at_key_slots, head.key_slots, [&](int t, int channel, float missing) {
        const bool upper = channel >= half;
        const int j = upper ? channel - half : channel;
        const float c = plan.cos ? plan.cos[t * half + j] : 1.0f, s = plan.cos ? plan.sin[t * half + j] : 0.0f;
        add_bf16(out + j * ld + t, 0, upper ? -missing * s : missing * c);
        add_bf16(out + j * ld + t, 1, upper ? missing * c : missing * s);
    });
}

// V of an encoded page -> centroids, out [P / 2, columns] of pairs of slots; scale and offset [P] of each slot.
inline void nuq_values(const Plan& plan, const Page& page, uint32_t* out, int columns, float* scale, float* offset, Prefetcher& ahead) {
    const NuqHead& head = *page.head;
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
    float inverse[P];
    for (int t = 0; t < P; t += VL) {
        const vf s = load(reinterpret_cast<const f16*>(ranges) + t);
        store(scale + t, s);
        store(offset + t, load(reinterpret_cast<const f16*>(ranges) + P + t));
        store(inverse + t, s > vf{} ? 1.0f / s : vf{});
    }
    for_slots(page.image + head.at_value_slots, head.value_slots, [&](int t, int channel, float missing) {
        add_bf16(out + t / 2 * columns + channel, t % 2, missing * inverse[t]);
    });
}

// K bf16 [P, D], not rotated -> out [D/2, P] of pairs, rotated by slot; slots at and past `valid` are garbage.
inline void plain_keys(const bf16* k, const Plan& plan, int valid, uint32_t* out, int ld, Prefetcher& ahead) {
    const int D = plan.D, half = D / 2;
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
            for (int i = 0; i < count; i++) _mm512_storeu_si512(out + (j + i) * ld + t, turned((lanes)block[i], plan.turns + (j + i) * 2 * P, t));
        }
}
#endif

// Rows of T, not rotated, at slots from 0 on -> float32, rotated by slot.
template <class T>
inline void turn_rows(const Plan& plan, const T* x, int rows, float* out) {
    const int D = plan.D, half = D / 2;
    for (int t = 0; t < rows; t++)
        for (int j = 0; j < half; j++) {
            const float a = widen(x[t * D + j]), b = widen(x[t * D + half + j]);
            const float c = plan.cos ? plan.cos[t * half + j] : 1.0f, s = plan.cos ? plan.sin[t * half + j] : 0.0f;
            out[t * D + j] = a * c - b * s;
            out[t * D + half + j] = b * c + a * s;
        }
}

// The panels of a page of either kind; T is the type of the step. buffer [3, P, D] is where 32-bit panels are made from. Returns whether scale
// and offset were set: else the value panel holds the values themselves.
template <class Math, class T>
bool load_turned(const Plan& plan, const Page& page, uint32_t* keys, int ld, int columns, uint32_t* values, float* scale, float* offset,
                 float* buffer, Prefetcher& keys_ahead, Prefetcher& values_ahead) {
    const int D = plan.D, half = D / 2;
    const T* sink_keys = reinterpret_cast<const T*>(page.sinks);
    const T* sink_values = sink_keys + plan.sinks * D;
#if defined(__AVX512BF16__)
    if constexpr (Math::PAIR == 2) {
        if (page.kind != NUQ) {
            const bf16* k = reinterpret_cast<const bf16*>(page.image);
            plain_keys(k, plan, page.valid, keys, ld, keys_ahead);
            values_bf16(k + P * D, D, columns, page.valid, values, values_ahead);
            return false;
        }
        nuq_keys(plan, page, keys, ld, keys_ahead);
        nuq_values(plan, page, values, columns, scale, offset, values_ahead);
        for (int t = 0; page.sinks && t < plan.sinks; t++) {
            for (int j = 0; j < half; j++) {
                const float a = widen(sink_keys[t * D + j]), b = widen(sink_keys[t * D + half + j]);
                const float c = plan.cos ? plan.cos[t * half + j] : 1.0f, s = plan.cos ? plan.sin[t * half + j] : 0.0f;
                keys[j * ld + t] = round_bf16(a * c - b * s) | static_cast<uint32_t>(round_bf16(b * c + a * s)) << 16;
            }
            for (int d = 0; d < D; d++) reinterpret_cast<bf16*>(values + t / 2 * columns + d)[t % 2] = sink_values[t * D + d];
            scale[t] = 1, offset[t] = 0;
        }
        return true;
    }
#endif
    if constexpr (Math::PAIR == 1) {
        float *k = buffer, *v = k + P * D, *turned_keys = v + P * D;
        if (page.kind == NUQ) {
            decode_page(*page.head, D, page.image, k, v);
            for (int i = 0; page.sinks && i < plan.sinks * D; i++) k[i] = widen(sink_keys[i]), v[i] = widen(sink_values[i]);
            turn_rows(plan, k, P, turned_keys);
            values_f32(v, D, columns, P, values, values_ahead);
        } else {
            const T* image = reinterpret_cast<const T*>(page.image);
            turn_rows(plan, image, page.valid, turned_keys);
            values_f32(image + P * D, D, columns, page.valid, values, values_ahead);
        }
        keys_from<Math>(turned_keys, D, page.valid, keys, ld, keys_ahead);
    }
    return false;
}

}  // namespace quire
