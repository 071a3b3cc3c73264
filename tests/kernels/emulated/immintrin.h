// AVX-512 for processors without it: the intrinsics that the product kernels use, lane by lane, for tests on any machine.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef long long __m128i __attribute__((vector_size(16), may_alias));
typedef short __m512bh __attribute__((vector_size(64), may_alias));
typedef unsigned short __m256bh __attribute__((vector_size(32), may_alias));

namespace emulated {

typedef short pairs __attribute__((vector_size(64), may_alias));
typedef int words __attribute__((vector_size(64), may_alias));

inline float widen(short bits) {
    const uint32_t wide = static_cast<uint32_t>(static_cast<uint16_t>(bits)) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

template <class To, class From>
To load(const From* from) {
    To found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

}  // namespace emulated

inline __m512i _mm512_set1_epi32(int x) { return (__m512i)(x - emulated::words{}); }

inline __m512i _mm512_dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
    auto found = (emulated::words)sums;
    const auto x = (emulated::pairs)a, y = (emulated::pairs)b;
    for (int i = 0; i < 16; i++) found[i] += int(x[2 * i]) * y[2 * i] + int(x[2 * i + 1]) * y[2 * i + 1];
    return (__m512i)found;
}

inline __m512i _mm512_permutexvar_epi16(__m512i index, __m512i table) {
    const auto at = (emulated::pairs)index, from = (emulated::pairs)table;
    emulated::pairs found;
    for (int i = 0; i < 32; i++) found[i] = from[at[i] & 31];
    return (__m512i)found;
}
inline __m512i _mm512_permutex2var_epi16(__m512i low, __m512i index, __m512i high) {
    const auto at = (emulated::pairs)index, first = (emulated::pairs)low, second = (emulated::pairs)high;
    emulated::pairs found;
    for (int i = 0; i < 32; i++) found[i] = at[i] & 32 ? second[at[i] & 31] : first[at[i] & 31];
    return (__m512i)found;
}
inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) { return _mm512_dpwssd_epi32(__m512i{}, a, b); }

inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    for (int i = 0; i < 16; i++)
        for (int half = 0; half < 2; half++) sums[i] += emulated::widen(a[2 * i + half]) * emulated::widen(b[2 * i + half]);
    return sums;
}

inline __m256bh _mm512_cvtneps_pbh(__m512 x) {
    __m256bh found;
    for (int i = 0; i < 16; i++) {
        const float lane = x[i];
        uint32_t bits;
        std::memcpy(&bits, &lane, 4);
        found[i] = (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    return found;
}

inline __m256i _mm256_loadu_si256(const __m256i* from) { return emulated::load<__m256i>(from); }
inline __m128i _mm_loadu_si128(const __m128i* from) { return emulated::load<__m128i>(from); }
inline void _mm256_storeu_si256(__m256i* to, __m256i x) { std::memcpy(to, &x, sizeof x); }

inline __m512i _mm512_cvtepu8_epi32(__m128i x) {
    uint8_t bytes[16];
    std::memcpy(bytes, &x, 16);
    emulated::words found;
    for (int i = 0; i < 16; i++) found[i] = bytes[i];
    return (__m512i)found;
}

inline __m512 _mm512_cvtph_ps(__m256i x) {
    _Float16 halves[16];
    std::memcpy(halves, &x, 32);
    __m512 found;
    for (int i = 0; i < 16; i++) found[i] = halves[i];
    return found;
}

#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_TO_NEG_INF 1
#define _MM_FROUND_NO_EXC 8

inline __m256i _mm512_cvtps_ph(__m512 x, int) {
    _Float16 halves[16];
    for (int i = 0; i < 16; i++) halves[i] = static_cast<_Float16>(x[i]);
    return emulated::load<__m256i>(halves);
}

inline float _mm512_reduce_add_ps(__m512 x) {
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += x[i];
    return sum;
}

inline float _mm512_reduce_max_ps(__m512 x) {
    float largest = x[0];
    for (int i = 1; i < 16; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

inline __m512 _mm512_reduce_ps(__m512 x, int) {
    for (int i = 0; i < 16; i++) x[i] = std::isinf(x[i]) ? 0.0f : x[i] - std::floor(x[i]);
    return x;
}

inline __m512 _mm512_scalef_ps(__m512 x, __m512 y) {
    for (int i = 0; i < 16; i++) x[i] *= std::exp2(std::floor(y[i]));
    return x;
}
