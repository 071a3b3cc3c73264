// Small matrix products with 32-bit elements: floats, or, on CPUs with bf16 dot products, pairs of bf16 along the summed index. So one kernel
// computes both. Attention uses it for scores and weighted sums, linear layers for their products.
#pragma once
#include <type_traits>
#include <utility>

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
    static constexpr bool WIDENS = false;                 // whether many rows are faster in float32
    static vf fma(vf acc, uint32_t a, vu b) {
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
    }
};
#endif

// Two 16-bit numbers in 32 bits; products and sums in float32, for every CPU.
template <class T>
struct MathPairs {
    using Number = T;
    static constexpr int PAIR = 2;
    static constexpr bool WIDENS = true;
    static vf low(vu pair) {
        if constexpr (std::is_same_v<T, bf16>) return as_float(pair << 16);
        else return widened(pair);
    }
    static vf high(vu pair) {
        if constexpr (std::is_same_v<T, bf16>) return as_float(pair & 0xffff0000u);
        else return widened(pair >> 16);
    }
    static vf fma(vf acc, uint32_t a, vu b) {
        T pair[2];
        std::memcpy(pair, &a, 4);
        return acc + widen(pair[0]) * low(b) + widen(pair[1]) * high(b);
    }

  private:
    static vf widened(vu bits) {
        typedef _Float16 v16 __attribute__((vector_size(VL * 2)));
        return __builtin_convertvector((v16)__builtin_convertvector(bits, vh), vf);
    }
};

constexpr int NV = VL == 16 ? 4 : 2;                      // vectors of a column block
constexpr int ACCUMULATORS = VL == 16 ? 24 : 12;          // of a register block: all registers except those for a row of columns

// Rows of a register block of N vectors: at most 12, because a core's prefetcher cannot follow more than about a dozen rows.
template <int N>
constexpr int block_rows() {
    return ACCUMULATORS / N < 12 ? ACCUMULATORS / N : 12;
}

// Prefetches the next page while the current one is computed: a few cache lines at each step of loads and products. A core keeps about two dozen
// lines in flight, so prefetches help only if they are spread evenly. Measured for a layer of 32 sequences of 192 tokens: 289 us without prefetches,
// 162 us with prefetches only while panels are made, and 113 us with prefetches at all steps. Reading the bytes takes 114 us, the arithmetic on
// cached pages 65 us.
struct Prefetcher {
    const uint8_t* at;
    const uint8_t* end;
    int pace = 2;                 // cache lines per step of a product
    const uint8_t* then = nullptr;  // the data to read afterwards; its first LEAD bytes are prefetched too
    bool rows = false;            // also prefetch rows of the next register block, because the hardware cannot follow a dozen rows
    static constexpr int LEAD = 4096;
    bool done() const { return at >= end && !then; }
    void step(int lines) {
        for (int i = 0; i < lines && at < end; i++, at += 64) __builtin_prefetch(at, 0, 3);
        if (at >= end && then) at = then, end = then + LEAD, then = nullptr;
    }
};

// A product's rows go to one of three destinations. Sums: back to the float32 sums that they started from.
struct Sums {
    float* c;
    int ldc;
    Sums from(int m) const { return {c + m * ldc, ldc}; }
    template <int N>
    void put(int m, const vf (&row)[N]) const {
        for (int n = 0; n < N; n++) store(c + m * ldc + n * VL, row[n]);
    }
};

// Outputs: to numbers T of 16 or 32 bits, plus a bias of type X, or null.
template <class X, class T>
struct Outputs {
    T* y;
    int64_t ldy;
    const X* bias;
    Outputs from(int m) const { return {y + m * ldy, ldy, bias}; }
    template <int N>
    void put(int m, const vf (&row)[N]) const {
        for (int n = 0; n < N; n++) store(y + m * ldy + n * VL, bias ? row[n] + load(bias + n * VL) : row[n]);
    }
};

// Gated: act(gate) * up. The first half of a row has gates, the second half ups.
template <class X, class T>
struct Gated {
    T* y;
    int64_t ldy;
    const X* gate_bias;
    const X* up_bias;
    int64_t gate;   // a Gate
    Gated from(int m) const { return {y + m * ldy, ldy, gate_bias, up_bias, gate}; }
    template <int N>
    void put(int m, const vf (&row)[N]) const {
        for (int n = 0; n < N / 2; n++) {
            const vf x = row[n], up = row[N / 2 + n];
            const int at = n * VL;
            store(y + m * ldy + at, gate_bias ? activate(gate, x + load(gate_bias + at)) * (up + load(up_bias + at)) : activate(gate, x) * up);
        }
    }
};

// to[m, n] = alpha[m] * c[m, n] + sum_k a[m, k] b[k, n] for M rows and N vectors of columns. If alpha is null, the first term is zero.
template <class Math, int M, int N, class To>
__attribute__((always_inline)) inline void product_block(const uint32_t* a, int lda, const uint32_t* b, int ldb, const Sums& c, int steps, const float* alpha, const To& to,
                          Prefetcher& ahead, const uint32_t* next_rows = nullptr) {
    constexpr int LINE = 16;      // elements of a cache line
    vf acc[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) acc[m][n] = alpha ? load(c.c + m * c.ldc + n * VL) * alpha[m] : vf{};
    const auto step = [&](int k) {
        if constexpr (VL < 16 && M < N) {   // sixteen registers must hold the sums, a number of a row, and a column
            for (int n = 0; n < N; n++) {
                const vu col = *reinterpret_cast<const vu_loose*>(b + k * ldb + n * VL);
                for (int m = 0; m < M; m++) acc[m][n] = Math::fma(acc[m][n], a[m * lda + k], col);
            }
            return;
        }
        vu col[N];
        for (int n = 0; n < N; n++) col[n] = *reinterpret_cast<const vu_loose*>(b + k * ldb + n * VL);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) acc[m][n] = Math::fma(acc[m][n], a[m * lda + k], col[n]);
    };
    if (ahead.done() && !next_rows) {
        for (int k = 0; k < steps; k++) step(k);
    } else {
        for (int k = 0; k < steps; k++) {
            ahead.step(ahead.pace);
            if (next_rows && k % LINE < M) __builtin_prefetch(next_rows + k % LINE * lda + k / LINE * LINE, 0, 3);
            step(k);
        }
    }
#pragma GCC unroll 16   // otherwise a long `put` keeps acc in memory
    for (int m = 0; m < M; m++) to.put(m, acc[m]);
}

// The last rows, fewer than a register block. Selects the inlined product_block for their number.
template <class Math, int N, class To, int... M>
void product_rest(std::integer_sequence<int, M...>, const uint32_t* a, int lda, const uint32_t* b, int ldb, const Sums& c, int steps, int rows,
                  const float* alpha, const To& to, Prefetcher& ahead) {
    (void)((rows == M + 1 && (product_block<Math, M + 1, N>(a, lda, b, ldb, c, steps, alpha, to, ahead), true)) || ...);
}

template <class Math, int N, class To>
void product_rows(const uint32_t* a, int lda, const uint32_t* b, int ldb, const Sums& c, int steps, int rows, const float* alpha, const To& to,
                  Prefetcher& ahead) {
    constexpr int M = block_rows<N>();
    int m = 0;
    for (; m + M <= rows; m += M) {
        const uint32_t* next_rows = ahead.rows && m + 2 * M <= rows ? a + (m + M) * lda : nullptr;
        product_block<Math, M, N>(a + m * lda, lda, b, ldb, c.from(m), steps, alpha ? alpha + m : nullptr, to.from(m), ahead, next_rows);
    }
    product_rest<Math, N>(std::make_integer_sequence<int, M - 1>{}, a + m * lda, lda, b, ldb, c.from(m), steps, rows - m, alpha ? alpha + m : nullptr,
                          to.from(m), ahead);
}

// c = alpha c + a b. columns is a multiple of VL.
template <class Math>
void product(const uint32_t* a, int lda, const uint32_t* b, int ldb, float* c, int ldc, int steps, int rows, int columns, const float* alpha, Prefetcher& ahead) {
    int n = 0;
    for (; n + NV * VL <= columns; n += NV * VL) {
        const Sums sums{c + n, ldc};
        product_rows<Math, NV>(a, lda, b + n, ldb, sums, steps, rows, alpha, sums, ahead);
    }
    for (; n < columns; n += VL) {
        const Sums sums{c + n, ldc};
        product_rows<Math, 1>(a, lda, b + n, ldb, sums, steps, rows, alpha, sums, ahead);
    }
}

}  // namespace quire
