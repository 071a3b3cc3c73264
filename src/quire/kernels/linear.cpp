// Products with a weight packed once: y = x W^T + b, sums in float32. bf16 -> bf16; of an output head 16 bits -> float32: logits in bf16 come in
// steps of 0.125 between 16 and 32, and ties are decided by the smaller id.
//
//     packed[panel, k, n] = (W[32 panel + n, 2k], W[32 panel + n, 2k + 1])        32 columns of pairs, zeros past N
//
// Gated: half of a panel is 16 gates, the other half what they let through; y = silu(gate) up leaves the registers.
//
// A decode step is bound by these bytes, and by what each call costs besides: a panel is one contiguous stream, and a call is one loop over
// panels. Many rows reuse a panel from the first-level cache, BLOCK_STEPS pairs at a time. Defined by models.layers.TorchOps;
// tests/kernels/test_elementwise.py holds the two together.
#include "linear.h"
#include "product.h"

namespace quire {
namespace {

constexpr int PANEL = 32;          // columns of a panel: two vectors of 16, and a dozen rows in the registers, or four of 8, and three
constexpr int MR = block_rows<PANEL / VL>();
constexpr int SHORT_STEPS = 144;   // pairs of a panel computed while as many of the next are fetched: 2 x 18 KiB in the first-level cache
constexpr int TALL_STEPS = 384;    // pairs of a panel that many rows pass, more than fit the first level: reading sums again costs more
constexpr int BLOCK_ROWS = 192;    // rows whose inputs stay in the second-level cache
constexpr int WIDE_STEPS = 96;     // pairs of a panel that are widened to float32 for many rows: 24 KiB
constexpr int WIDE_ROWS = 4 * MR;  // more rows than these are worth it

#if defined(__AVX512BF16__)
using MathOfBf16 = MathBf16;
#else
using MathOfBf16 = MathPairs<bf16>;
#endif

template <class T>
struct Product {
    const uint32_t* x;             // pairs
    int lda;                       // pairs from row to row
    const uint32_t* packed;
    const bf16* bias;
    int64_t rows, N, K;            // N: outputs, of a gated product as many as it has gates
    bool gated;                    // only where T is bf16
    T* out;
    const uint32_t* next;          // panels of the product after this one, or null, and the pairs in each
    int64_t next_panel;
    int64_t width() const { return gated ? PANEL / 2 : PANEL; }   // outputs of a panel
};

// The columns of a panel that the product has, of sums [height, 32].
template <class T>
void put_part(const Product<T>& p, int64_t at, int height, int64_t first, const float* sums) {
    for (int r = 0; r < height; r++)
        for (int64_t n = first; n < p.N; n++) {
            const float* row = sums + r * PANEL + n - first;
            const float x = row[0] + (p.bias ? widen(p.bias[n]) : 0.0f);
            const float up = p.gated ? row[PANEL / 2] + (p.bias ? widen(p.bias[p.N + n]) : 0.0f) : 0.0f;
            narrow(p.out + (at + r) * p.N + n, p.gated ? x / (1.0f + std::exp(-x)) * up : x);
        }
}

template <class To>
void put_rows(const Sums& sums, int height, const To& to) {
    for (int r = 0; r < height; r++) {
        vf row[PANEL / VL];
        for (int n = 0; n < PANEL / VL; n++) row[n] = load(sums.c + r * sums.ldc + n * VL);
        to.put(r, row);
    }
}

// Many rows of one panel without dot products of pairs: each number is widened once, which leaves nothing but multiply-adds.
template <class Math, class T>
void wide_rows(const Product<T>& p, int64_t at, int height, int64_t panel) {
    using Number = typename Math::Number;
    const int steps = static_cast<int>(p.K / 2);
    const int64_t first = panel * p.width();
    auto* scratch = static_cast<float*>(thread_scratch((BLOCK_ROWS * PANEL + BLOCK_ROWS + 2 * WIDE_STEPS * (BLOCK_ROWS + PANEL)) * 4));
    float *ones = scratch + BLOCK_ROWS * PANEL, *rows = ones + BLOCK_ROWS, *columns = rows + 2 * WIDE_STEPS * BLOCK_ROWS;
    const Sums sums{scratch, PANEL};
    for (int i = 0; i < height; i++) ones[i] = 1.0f;
    for (int k = 0; k < steps; k += WIDE_STEPS) {
        const int deep = steps - k < WIDE_STEPS ? steps - k : WIDE_STEPS;
        for (int r = 0; r < height; r++) {
            const auto* from = reinterpret_cast<const Number*>(p.x + (at + r) * p.lda + k);
            float* to = rows + r * 2 * deep;
            int i = 0;
            for (; i + VL <= 2 * deep; i += VL) store(to + i, load(from + i));
            for (; i < 2 * deep; i++) to[i] = widen(from[i]);
        }
        for (int i = 0; i < deep; i++)
            for (int n = 0; n < PANEL; n += VL) {
                const vu pair = *reinterpret_cast<const vu_loose*>(p.packed + (panel * steps + k + i) * PANEL + n);
                store(columns + 2 * i * PANEL + n, Math::low(pair));
                store(columns + (2 * i + 1) * PANEL + n, Math::high(pair));
            }
        Prefetcher none{nullptr, nullptr};   // all of it is near
        product_rows<MathF32, PANEL / VL>(reinterpret_cast<const uint32_t*>(rows), 2 * deep, reinterpret_cast<const uint32_t*>(columns), PANEL, sums,
                                          2 * deep, height, k ? ones : nullptr, sums, none);
    }
    T* y = p.out + at * p.N + first;
    const bf16 *bias = p.bias ? p.bias + first : nullptr, *up_bias = p.bias ? p.bias + p.N + first : nullptr;
    if (first + p.width() > p.N) return put_part(p, at, height, first, scratch);
    if constexpr (std::is_same_v<T, bf16>)
        if (p.gated) return put_rows(sums, height, Gated{y, p.N, bias, up_bias});
    put_rows(sums, height, Outputs<T>{y, p.N, bias});
}

// Rows [at, at + height) of one panel; next is the panel this thread reads afterwards.
template <class Math, class T>
void panel_rows(const Product<T>& p, int64_t at, int height, int64_t panel, const uint32_t* next) {
    if constexpr (Math::WIDENS)
        if (height > WIDE_ROWS) return wide_rows<Math>(p, at, height, panel);
    const int steps = static_cast<int>(p.K / 2);
    const uint32_t* columns = p.packed + panel * steps * PANEL;
    const int64_t first = panel * p.width();
    const bool whole = first + p.width() <= p.N;
    auto* scratch = static_cast<float*>(thread_scratch((BLOCK_ROWS * PANEL + BLOCK_ROWS) * 4));
    const Sums sums{scratch, PANEL};
    float* ones = scratch + BLOCK_ROWS * PANEL;
    for (int i = 0; i < height; i++) ones[i] = 1.0f;
    const int most = height <= MR ? steps : height <= 4 * MR ? SHORT_STEPS : TALL_STEPS;
    const int blocks = (steps + most - 1) / most, block = (steps + blocks - 1) / blocks;
    for (int k = 0; k < steps; k += block) {
        const int deep = steps - k < block ? steps - k : block;
        // One pass: the stream itself, a page ahead of its use. Several: the next block, while this one is reused.
        const auto* here = reinterpret_cast<const uint8_t*>(columns + k * PANEL);
        const auto* after = k + deep < steps ? here + static_cast<int64_t>(deep) * PANEL * 4 : reinterpret_cast<const uint8_t*>(next);
        Prefetcher ahead{after, after ? after + block * PANEL * 4 : after, height <= 2 * MR ? 2 : 1, nullptr, height > 4 * MR};
        if (height <= MR) ahead = {here + Prefetcher::LEAD, here + static_cast<int64_t>(deep) * PANEL * 4, 2, after};
        const uint32_t *a = p.x + at * p.lda + k, *b = columns + k * PANEL;
        const float* alpha = k ? ones : nullptr;
        const bool last = k + deep == steps && whole;
        T* y = p.out + at * p.N + first;
        if constexpr (std::is_same_v<T, bf16>)
            if (last && p.gated) {
                const Gated gated{y, p.N, p.bias ? p.bias + first : nullptr, p.bias ? p.bias + p.N + first : nullptr};
                product_rows<Math, PANEL / VL>(a, p.lda, b, PANEL, sums, deep, height, alpha, gated, ahead);
                continue;
            }
        if (last) {
            const Outputs<T> outputs{y, p.N, p.bias ? p.bias + first : nullptr};
            product_rows<Math, PANEL / VL>(a, p.lda, b, PANEL, sums, deep, height, alpha, outputs, ahead);
        } else {
            product_rows<Math, PANEL / VL>(a, p.lda, b, PANEL, sums, deep, height, alpha, sums, ahead);
        }
    }
    if (!whole) put_part(p, at, height, first, scratch);
}

template <class Math, class T>
void linear(const Product<T>& p) {
    const int64_t panels = (p.N + p.width() - 1) / p.width(), steps = p.K / 2;
    const int64_t chunks = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    if (chunks == 0) return;
    const int64_t height = ((p.rows + chunks - 1) / chunks + MR - 1) / MR * MR;
    parallel_pairs(panels * chunks, [&](int64_t i, int64_t then) {
        const int64_t at = i / panels * height;
        if (at >= p.rows) return;
        panel_rows<Math>(p, at, static_cast<int>(p.rows - at < height ? p.rows - at : height), i % panels,
                   then >= 0 ? p.packed + then % panels * steps * PANEL : p.next ? p.next + member.id * p.next_panel : nullptr);
    });
}

template <class Math>
void head(const void* x, int64_t x_stride, int64_t rows, const void* packed, int64_t N, int64_t K, float* out) {
    linear<Math>(Product<float>{static_cast<const uint32_t*>(x), static_cast<int>(x_stride / 2), static_cast<const uint32_t*>(packed), nullptr,
                                rows, N, K, false, out, nullptr, 0});
}

}  // namespace

void multiply(const Matrix& m, bool gated, const void* x, int64_t x_stride, int64_t rows, void* out, const Matrix* next) {
    linear<MathOfBf16>(Product<bf16>{static_cast<const uint32_t*>(x), static_cast<int>(x_stride / 2), static_cast<const uint32_t*>(m.packed),
                                   static_cast<const bf16*>(m.bias), rows, m.outputs, m.inputs, gated, static_cast<bf16*>(out),
                                   next ? static_cast<const uint32_t*>(next->packed) : nullptr, next ? next->inputs / 2 * PANEL : 0});
}

}  // namespace quire

using namespace quire;

// weight of 16-bit numbers [N, K], K even -> packed, uint32 [ceil(N / 32), K / 2, 32]. Gated: N gates, then N ups -> [ceil(N / 16), K / 2, 32].
QUIRE_API void quire_pack_linear(const void* weight, int64_t N, int64_t K, int gated, void* packed) {
    const auto* pairs = static_cast<const uint32_t*>(weight);
    auto* out = static_cast<uint32_t*>(packed);
    const int64_t steps = K / 2, width = gated ? PANEL / 2 : PANEL;
    parallel_for((N + width - 1) / width, 1, [&](int64_t panel) {
        for (int64_t k = 0; k < steps; k++)
            for (int64_t n = 0; n < PANEL; n++) {
                const int64_t output = panel * width + n % width;
                out[(panel * steps + k) * PANEL + n] = output < N ? pairs[(n < width ? output : N + output) * steps + k] : 0;
            }
    });
}

// Rows of the packed weight: out[i] = W[tokens[i]], 16 bits [count, K]; what an embedding tied to the output head reads.
QUIRE_API void quire_packed_rows(const void* packed, int64_t K, const int64_t* tokens, int64_t count, void* out) {
    const int64_t steps = K / 2;
    parallel_for(count, count < 32 ? count : 16, [&](int64_t i) {
        const uint32_t* from = static_cast<const uint32_t*>(packed) + tokens[i] / PANEL * steps * PANEL + tokens[i] % PANEL;
        uint32_t* row = static_cast<uint32_t*>(out) + i * steps;
        for (int64_t k = 0; k < steps; k++) row[k] = from[k * PANEL];
    });
}

// x bf16 [rows, K], rows x_stride elements apart, an even number; bias bf16 [N], gated [2 N], or null; out bf16 [rows, N]
QUIRE_API void quire_linear(const void* x, int64_t x_stride, int64_t rows, const void* packed, const void* bias, int64_t N, int64_t K, int gated,
                            void* out) {
    multiply({packed, bias, N, K}, gated != 0, x, x_stride, rows, out);
}

// Logits: x [rows, K], rows x_stride elements apart, an even number, and the packed weight in bf16 or float16 as kind says; out float32 [rows, N].
QUIRE_API void quire_head(int kind, const void* x, int64_t x_stride, int64_t rows, const void* packed, int64_t N, int64_t K, float* out) {
    if (kind == DENSE_BF16) head<MathOfBf16>(x, x_stride, rows, packed, N, K, out);
    else head<MathPairs<f16>>(x, x_stride, rows, packed, N, K, out);
}
