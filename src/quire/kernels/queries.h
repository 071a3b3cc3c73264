// Query rows in the format of the product, and their visibility; shared by attention and the profile.
#pragma once
#include "encoded_panels.h"

namespace quire {

constexpr float LOG2E = 1.4426950408889634f;

// tanh of each element. Near 0 a polynomial, because the quotient would lose digits.
inline vf tanh(vf x) {
    const vf size = x < splat(0.0f) ? -x : x, square = x * x;
    const vf e = exp2(size * (-2 * LOG2E));
    const vf far = (1.0f - e) / (1.0f + e);
    vf near = splat(62.0f / 2835) * square - 17.0f / 315;
    near = near * square + 2.0f / 15;
    near = near * square - 1.0f / 3;
    near = x + x * square * near;
    return size < splat(0.25f) ? near : x < splat(0.0f) ? -far : far;
}

// Caps `count` scores, a multiple of VL, if the layer has a soft cap.
inline void cap_scores(const LayerPlan& plan, int count, float* scores) {
    if (plan.soft_cap == 0) return;
    const float cap = static_cast<float>(plan.soft_cap), inverse = 1 / cap;
    for (int t = 0; t < count; t += VL) store(scores + t, tanh(load(scores + t) * inverse) * cap);
}

// Writes x [D] as floats, or as pairs (x[2j], x[2j + 1]) of bf16.
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

// Writes x [D] as pairs (x[j], x[j + D/2]) of bf16.
inline void store_halves(const float* x, int D, uint32_t* out) {
    const int half = D / 2;
    int j = 0;
#if defined(__AVX512BF16__)
    for (; j + VL <= half; j += VL) _mm512_storeu_si512(out + j, pairs_of(load(x + j), load(x + half + j)));
#endif
    for (; j < half; j++) out[j] = round_bf16(x[j]) | static_cast<uint32_t>(round_bf16(x[half + j])) << 16;
}

// Number of 32-bit elements of a query row, with the padding of a key panel.
template <class Math>
inline int query_steps(const LayerRecord& layer) {
    constexpr int WIDTH = VL * Math::PAIR;
    return layer.turns && Math::PAIR == 2 ? layer.D / 2 : (layer.D + WIDTH - 1) / WIDTH * VL;
}

// Writes a rotated row x [D] in the format that matches the panels of the plan's pages. Does not write the padding.
template <class Math>
inline void store_query(const LayerPlan& plan, const float* x, uint32_t* out) {
    if (Math::PAIR == 2 && plan.turns) store_halves(x, plan.D, out);
    else store_operand<Math>(x, plan.D, out);
}

// Hides slots that are invisible to a row at `position`, and slots fewer than `far` tokens before it. scores [slots]: of the slots from position
// `start` on.
inline void hide_unseen(const LayerPlan& plan, int position, int start, int slots, float* scores, int far = 0) {
    int high = position + 1 - far - start;
    high = high < 0 ? 0 : high > slots ? slots : high;
    int low = plan.window ? position + 1 - plan.window - start : 0;
    low = low < 0 ? 0 : low > high ? high : low;
    for (int t = 0; t < low; t++) scores[t] = -INFINITY;
    for (int t = high; t < slots; t++) scores[t] = -INFINITY;
}

// Hides the slots of a page that its mask hides.
inline void hide_masked(uint64_t mask, float* scores) {
    if (mask == ALL_SLOTS) return;
#if defined(__AVX512F__)
    const __m512 hidden = _mm512_set1_ps(-INFINITY);
    for (int t = 0; t < P; t += 16) _mm512_mask_storeu_ps(scores + t, static_cast<__mmask16>(~mask >> t), hidden);
#else
    for (int t = 0; t < P; t++)
        if (!(mask >> t & 1)) scores[t] = -INFINITY;
#endif
}

// Calls body(math, number) with the arithmetic for rows in a format, and a value of its type.
template <class Body>
inline void by_kind(int kind, const Body& body) {
#if defined(__AVX512BF16__)
    if (kind == DENSE_BF16) return body(MathBf16{}, bf16{});
#endif
    if (kind == DENSE_BF16) body(MathF32{}, bf16{});
    else if (kind == DENSE_F32) body(MathF32{}, float{});
    else body(MathF32{}, f16{});
}

}  // namespace quire
