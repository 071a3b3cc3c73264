// Vectors and number formats shared by the CPU kernels.
//
// The same source is compiled once per CPU level. VL follows from the instruction set; all other code uses vectors of VL lanes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cmath>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "fields.h"
#include "thread_pool.h"

#define QUIRE_API extern "C" __attribute__((visibility("default")))

namespace quire {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef float vf_loose __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t vu_loose __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh_loose __attribute__((vector_size(VL * 2), aligned(2), may_alias));

struct bf16 { uint16_t bits; };
typedef _Float16 f16;

// Numbers of the page formats; quire/cache/codecs has the same.
enum Kind : uint8_t { DENSE_BF16 = 0, DENSE_F32 = 1, DENSE_F16 = 2, NUQ = 3, GROUP = 4, SUMS = 5 };

inline vf splat(float x) { return x - vf{}; }
inline vf load(const float* p) { return *reinterpret_cast<const vf_loose*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_loose*>(p) = x; }
inline vf as_float(vu x) { return (vf)x; }

inline vf load(const bf16* p) {
    const vh half = *reinterpret_cast<const vh_loose*>(p);
    return as_float(__builtin_convertvector(half, vu) << 16);
}

inline vf load(const f16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)   // compilers convert one at a time
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
    typedef _Float16 v16 __attribute__((vector_size(VL * 2), aligned(2), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const v16*>(p), vf);
}

// Widens VL bytes to 32-bit integers.
inline vi bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    typedef uint8_t loose __attribute__((vector_size(VL), aligned(1), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const loose*>(p), vi);
#endif
}

inline uint16_t round_bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Rounds to nearest, ties to even. NaN stays NaN.
inline void store(bf16* p, vf x) {
#if defined(__AVX512BF16__)
    const __m256bh h = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(p, &h, 32);
#else
    const vu u = (vu)x;
    const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const vu quiet = (u >> 16) | 0x40u;
    const vu nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
    *reinterpret_cast<vh_loose*>(p) = __builtin_convertvector((nan & quiet) | (~nan & rounded), vh);
#endif
}

inline void store(f16* p, vf x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return;
#elif defined(__AVX2__) && defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return;
#endif
    typedef _Float16 v16 __attribute__((vector_size(VL * 2), aligned(2), may_alias));
    *reinterpret_cast<v16*>(p) = __builtin_convertvector(x, v16);
}

inline float widen(float x) { return x; }
inline float widen(f16 x) { return static_cast<float>(x); }
inline float widen(bf16 x) {
    const uint32_t u = static_cast<uint32_t>(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
// The bits of the nearest finite float16, and the number with these bits.
inline uint16_t half_bits(float x) {
    const f16 h = static_cast<f16>(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x);
    uint16_t bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}

inline float half_value(const uint8_t* at) {
    f16 h;
    std::memcpy(&h, at, 2);
    return static_cast<float>(h);
}
inline void narrow(float* p, float x) { *p = x; }
inline void narrow(f16* p, float x) { *p = static_cast<f16>(x); }
inline void narrow(bf16* p, float x) { p->bits = round_bf16(x); }

inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }

#if defined(__AVX512F__)
inline float sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
inline float largest(vf x) { return _mm512_reduce_max_ps((__m512)x); }
#else
inline float sum(vf x) {
    float s = 0;
    for (int i = 0; i < VL; i++) s += x[i];
    return s;
}
inline float largest(vf x) {
    float s = x[0];
    for (int i = 1; i < VL; i++) s = x[i] > s ? x[i] : s;
    return s;
}
#endif

// 2^x for x up to 126. The relative error is below 2e-7; with ROUGH, for results that are stored in 16 bits, it is below 8e-5. NaN gives NaN, -inf
// gives 2^-126 or 0.
template <bool ROUGH = false>
inline vf exp2(vf x) {
#if defined(__AVX512DQ__)
    // f = x - floor(x) in [0, 1), 0 for -inf; scalef computes the floor itself.
    const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vf p;
    if constexpr (ROUGH) {
        p = splat(0.07802452f) * f + 0.22606716f;
        p = p * f + 0.69583356f;
        p = p * f + 0.9999252f;
    } else {
        p = splat(1.8775767e-3f) * f + 8.9893397e-3f;
        p = p * f + 5.5826318e-2f;
        p = p * f + 2.4015361e-1f;
        p = p * f + 6.9315308e-1f;
        p = p * f + 9.9999994e-1f;
    }
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    x = x < splat(-126.0f) ? splat(-126.0f) : x;
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const vf magic = splat(12582912.0f);
    const vf shifted = x + magic;
    const vf f = x - (shifted - magic);
    vf p = splat(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    const vf result = (vf)((vi)p + (((vi)shifted - (vi)magic) << 23));
    return x == x ? result : x;
#endif
}

// Activations of gates. Numbers of a Matrix and of quire_gated; 0: there are no gates.
enum Gate { NO_GATE = 0, SILU = 1, GELU_TANH = 2 };

// silu: x / (1 + exp(-x)). gelu with tanh: the same with 2 sqrt(2 / pi) (x + 0.044715 x^3) in the exponent, because (1 + tanh(y)) / 2 =
// 1 / (1 + exp(-2 y)). 0 where the exponent is above 87, and the result less than 1.5e-36.
inline vf activate(int64_t gate, vf x) {
    const vf slope = gate == GELU_TANH ? 1.5957691216057308f * (x + 0.044715f * x * x * x) : x;
    const vf y = x / (1.0f + exp2(slope * -1.4426950408889634f));
    return slope < splat(-87.0f) ? splat(0.0f) : y;
}
inline float activate(int64_t gate, float x) {
    const float slope = gate == GELU_TANH ? 1.5957691216057308f * (x + 0.044715f * x * x * x) : x;
    return slope < -87.0f ? 0.0f : x / (1.0f + std::exp(-slope));
}

// VL x VL transpose of 32-bit elements.
inline void transpose(vu (&x)[VL]) {
#if defined(__AVX512F__)
    // First within 128-bit lanes, then whole lanes. Such shuffles need no index registers, and a core issues two per cycle; of full permutes, one.
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

// A 64-byte aligned buffer of the calling thread. The buffer only grows, and holds the scratch of one kernel at a time.
void* thread_scratch(size_t bytes);

}  // namespace quire
