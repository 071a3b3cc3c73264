// Small matrix products with 32-bit elements: float x float, or pairs of bf16 along the summed index on CPUs with bf16 dot products, which is why
// both share one kernel. Attention's scores and sums and the packed linear products are made of it.
#pragma once
#include "common.h"

namespace quire {

struct MathF32 {
    static constexpr int PAIR = 1;                        // summed indices per 32-bit element
    static vf fma(vf acc, uint32_t a, vu b) {
        float x;
        std::memcpy(&x, &a, 4);
        return acc + x * as_float(b);
    }
};

#if defined(__AVX512BF16__)
struct MathBf16 {
    static constexpr int PAIR = 2;
    static vf fma(vf acc, uint32_t a, vu b) {
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
    }
};
#endif

constexpr int NV = VL == 16 ? 4 : 2;                      // vectors of a column block: 24 or 12 accumulators fit the registers
constexpr int MR = 6;

// Brings the next page near while this one is computed, a few lines at every step of loads and products alike: a core keeps about two dozen lines
// under way, so prefetches pay only as long as they never come in a burst nor stop. Us a layer for 32 sequences of 192 tokens, of which 114 are the
// bytes at reading speed and 65 the arithmetic on cached pages: 289 without, 162 prefetching while panels are made, 113 like this.
struct Prefetcher {
    const uint8_t* at;
    const uint8_t* end;
    int pace = 2;                 // lines at every step of a product
    void step(int lines) {
        for (int i = 0; i < lines && at < end; i++, at += 64) __builtin_prefetch(at, 0, 3);
    }
};

// c[m, n] = alpha[m] * c[m, n] + sum_k a[m, k] b[k, n] for M rows and N vectors of columns; alpha null starts from zero.
template <class Math, int M, int N>
inline void product_block(const uint32_t* a, int lda, const uint32_t* b, int ldb, float* c, int ldc, int steps, const float* alpha, Prefetcher& ahead) {
    vf acc[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) acc[m][n] = alpha ? load(c + m * ldc + n * VL) * alpha[m] : vf{};
    for (int k = 0; k < steps; k++) {
        ahead.step(ahead.pace);
        vu col[N];
        for (int n = 0; n < N; n++) col[n] = *reinterpret_cast<const vu_loose*>(b + k * ldb + n * VL);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) acc[m][n] = Math::fma(acc[m][n], a[m * lda + k], col[n]);
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(c + m * ldc + n * VL, acc[m][n]);
}

template <class Math, int N>
void product_rows(const uint32_t* a, int lda, const uint32_t* b, int ldb, float* c, int ldc, int steps, int rows, const float* alpha, Prefetcher& ahead) {
    int m = 0;
    for (; m + MR <= rows; m += MR) product_block<Math, MR, N>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, steps, alpha ? alpha + m : nullptr, ahead);
    a += m * lda, c += m * ldc, alpha = alpha ? alpha + m : nullptr;
    switch (rows - m) {
        case 1: product_block<Math, 1, N>(a, lda, b, ldb, c, ldc, steps, alpha, ahead); break;
        case 2: product_block<Math, 2, N>(a, lda, b, ldb, c, ldc, steps, alpha, ahead); break;
        case 3: product_block<Math, 3, N>(a, lda, b, ldb, c, ldc, steps, alpha, ahead); break;
        case 4: product_block<Math, 4, N>(a, lda, b, ldb, c, ldc, steps, alpha, ahead); break;
        case 5: product_block<Math, 5, N>(a, lda, b, ldb, c, ldc, steps, alpha, ahead); break;
        default: break;
    }
}

// columns is a multiple of VL.
template <class Math>
void product(const uint32_t* a, int lda, const uint32_t* b, int ldb, float* c, int ldc, int steps, int rows, int columns, const float* alpha, Prefetcher& ahead) {
    int n = 0;
    for (; n + NV * VL <= columns; n += NV * VL) product_rows<Math, NV>(a, lda, b + n, ldb, c + n, ldc, steps, rows, alpha, ahead);
    for (; n < columns; n += VL) product_rows<Math, 1>(a, lda, b + n, ldb, c + n, ldc, steps, rows, alpha, ahead);
}

}  // namespace quire
