// Products of a few rows with a weight packed once: y = x W^T + b, bf16 with float32 sums, on CPUs with bf16 dot products.
//
//     packed[panel, k, n] = (W[64 panel + n, 2k], W[64 panel + n, 2k + 1])        64 columns of pairs, zeros past N
//
// A decode step is bound by these bytes, and by what each call costs besides: a panel is one contiguous stream, and a call is one loop over
// panels. Many rows reuse a panel from the first-level cache, BLOCK_STEPS pairs at a time. Defined by models.layers.TorchOps;
// tests/kernels/test_elementwise.py holds the two together.
#include "common.h"
#include "product.h"

namespace quire {
namespace {

constexpr int PANEL = 64;         // columns of a panel: four vectors
constexpr int BLOCK_STEPS = 128;  // pairs of a panel that stay in the first-level cache: 32 KiB
constexpr int BLOCK_ROWS = 192;   // rows whose float32 sums stay in the second

#if defined(__AVX512BF16__)
void linear(const bf16* x, int64_t x_stride, int64_t rows, const uint32_t* packed, const bf16* bias, int64_t N, int64_t K, bf16* out) {
    const int steps = static_cast<int>(K / 2), lda = static_cast<int>(x_stride / 2);
    const auto* pairs = reinterpret_cast<const uint32_t*>(x);
    parallel_for((N + PANEL - 1) / PANEL, 1, [&](int64_t panel) {
        const uint32_t* columns = packed + panel * steps * PANEL;
        const int64_t first = panel * PANEL, count = N - first < PANEL ? N - first : PANEL;
        auto* sums = static_cast<float*>(thread_scratch((BLOCK_ROWS * PANEL + BLOCK_ROWS) * 4));
        float* ones = sums + BLOCK_ROWS * PANEL;
        for (int i = 0; i < BLOCK_ROWS; i++) ones[i] = 1.0f;
        for (int64_t at = 0; at < rows; at += BLOCK_ROWS) {
            const int height = static_cast<int>(rows - at < BLOCK_ROWS ? rows - at : BLOCK_ROWS);
            // Up to a register block of rows reads the panel once anyway.
            const int block = height <= MR ? steps : BLOCK_STEPS;
            for (int k = 0; k < steps; k += block) {
                const int deep = steps - k < block ? steps - k : block;
                // One pass: the stream itself, a page ahead of its use. Several: the next block, while this one is reused.
                const auto* here = reinterpret_cast<const uint8_t*>(columns + k * PANEL);
                const auto* after = here + static_cast<int64_t>(deep) * PANEL * 4;
                Prefetcher ahead{after, at ? after : after + BLOCK_STEPS * PANEL * 4, 2};
                if (height <= MR) ahead = {here + 4096, after + 4096, 4};
                product_rows<MathBf16, PANEL / VL>(pairs + at * lda + k, lda, columns + k * PANEL, PANEL, sums, PANEL, deep, height,
                                                   k ? ones : nullptr, ahead);
            }
            for (int r = 0; r < height; r++) {
                bf16* y = out + (at + r) * N + first;
                int n = 0;
                for (; n + VL <= count; n += VL) {
                    vf sum = load(sums + r * PANEL + n);
                    if (bias) sum += load(bias + first + n);
                    store(y + n, sum);
                }
                for (; n < count; n++) narrow(y + n, sums[r * PANEL + n] + (bias ? widen(bias[first + n]) : 0.0f));
            }
        }
    });
}
#endif

}  // namespace
}  // namespace quire

using namespace quire;

// Whether this library has the products below: bf16 dot products.
QUIRE_API int64_t quire_has_linear() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// weight bf16 [N, K], K even -> packed, uint32 [ceil(N / 64), K / 2, 64]
QUIRE_API void quire_pack_linear(const void* weight, int64_t N, int64_t K, void* packed) {
    const auto* pairs = static_cast<const uint32_t*>(weight);
    auto* out = static_cast<uint32_t*>(packed);
    const int64_t steps = K / 2;
    parallel_for((N + PANEL - 1) / PANEL, 1, [&](int64_t panel) {
        for (int64_t k = 0; k < steps; k++)
            for (int64_t n = 0; n < PANEL; n++) {
                const int64_t row = panel * PANEL + n;
                out[(panel * steps + k) * PANEL + n] = row < N ? pairs[row * steps + k] : 0;
            }
    });
}

// x bf16 [rows, K], rows x_stride elements apart, an even number; bias bf16 [N] or null; out bf16 [rows, N]
QUIRE_API void quire_linear(const void* x, int64_t x_stride, int64_t rows, const void* packed, const void* bias, int64_t N, int64_t K, void* out) {
#if defined(__AVX512BF16__)
    linear(static_cast<const bf16*>(x), x_stride, rows, static_cast<const uint32_t*>(packed), static_cast<const bf16*>(bias), N, K,
           static_cast<bf16*>(out));
#else
    (void)x, (void)x_stride, (void)rows, (void)packed, (void)bias, (void)N, (void)K, (void)out;
    __builtin_trap();
#endif
}
