// Products with a weight that is packed once: y = x W^T + b, sums in float32. Outputs have the format of the rows, except for an output head, which
// gives float32: bf16 logits between 16 and 32 have steps of 0.125, and the smaller id would win the many ties.
//
//     packed[panel, k, n] = (W[32 panel + n, 2k], W[32 panel + n, 2k + 1])        32 columns of pairs, zeros past N
//
// is the layout of panels of 16-bit numbers; packed.h has panels of fewer bits. In a gated matrix, half of a panel is 16 gates, the other half their
// ups; y = act(gate) * up is computed in registers.
//
// A decode step is bound by the bytes of the weights and by the overhead of calls. So a panel is contiguous in memory, and a call is one loop over
// the panels of all parts. Many rows reuse a part of a panel from the cache, SHORT_STEPS or TALL_STEPS pairs at a time. Defined by
// models.layers.TorchOps; tests/kernels/test_elementwise.py and test_packed.py compare the two.
#include "linear.h"

namespace quire {
namespace {

constexpr int MR = block_rows<PANEL / VL>();
constexpr int SHORT_STEPS = 144;   // pairs of a panel that are computed while the next as many are fetched: 2 x 18 KiB in the first-level cache
constexpr int TALL_STEPS = 384;    // pairs of a panel for many rows: more than the first-level cache holds, because rereading sums would cost more
constexpr int BLOCK_ROWS = 192;    // rows whose inputs stay in the second-level cache
constexpr int WIDE_STEPS = 96;     // pairs of a panel that are widened to float32 for many rows: 24 KiB
constexpr int WIDE_ROWS = 4 * MR;  // with more rows than this, widening pays off

#if defined(__AVX512BF16__)
using MathOfBf16 = MathBf16;
#else
using MathOfBf16 = MathPairs<bf16>;
#endif

// X: format of the rows and the bias; T: format of the output.
template <class X, class T>
struct Product {
    const X* x;
    int lda;                       // numbers from row to row
    PackedRows packed;             // the same rows for packed parts
    int64_t rows, inputs, outputs;
    const X* bias;
    int64_t gated;                 // a Gate
    T* out;
    int64_t width() const { return gated ? PANEL / 2 : PANEL; }   // outputs of a panel
};

// One panel, its first output, and its number of outputs. The last panel of a part may have fewer outputs than its width.
struct Panel {
    int64_t kind;
    const uint8_t* at;
    int64_t first, outputs;
};

// Stores the valid columns of a panel's sums [height, 32].
template <class X, class T>
void put_part(const Product<X, T>& p, const Panel& panel, int64_t at, int height, const float* sums) {
    for (int r = 0; r < height; r++)
        for (int64_t i = 0; i < panel.outputs; i++) {
            const int64_t n = panel.first + i;
            const float* row = sums + r * PANEL + i;
            const float x = row[0] + (p.bias ? widen(p.bias[n]) : 0.0f);
            const float up = p.gated ? row[PANEL / 2] + (p.bias ? widen(p.bias[p.outputs + n]) : 0.0f) : 0.0f;
            narrow(p.out + (at + r) * p.outputs + n, p.gated ? activate(p.gated, x) * up : x);
        }
}

template <class To>
void put_rows(const float* sums, int height, const To& to) {
    for (int r = 0; r < height; r++) {
        vf row[PANEL / VL];
        for (int n = 0; n < PANEL / VL; n++) row[n] = load(sums + r * PANEL + n * VL);
        to.put(r, row);
    }
}

// The destination of a panel's finished rows.
template <class X, class T>
Outputs<X, T> outputs_of(const Product<X, T>& p, const Panel& panel, int64_t at) {
    return {p.out + at * p.outputs + panel.first, p.outputs, p.bias ? p.bias + panel.first : nullptr};
}
template <class X, class T>
Gated<X, T> gated_of(const Product<X, T>& p, const Panel& panel, int64_t at) {
    const X* bias = p.bias ? p.bias + panel.first : nullptr;
    return {p.out + at * p.outputs + panel.first, p.outputs, bias, bias ? bias + p.outputs : nullptr, p.gated};
}

template <class X, class T>
void put_sums(const Product<X, T>& p, const Panel& panel, int64_t at, int height, const float* sums) {
    if (panel.outputs < p.width()) put_part(p, panel, at, height, sums);
    else if (p.gated) put_rows(sums, height, gated_of(p, panel, at));
    else put_rows(sums, height, outputs_of(p, panel, at));
}

// Many rows of one panel, on CPUs without dot products of pairs: each number is widened to float32 once, and all rows use it.
template <class Math, class X, class T>
void wide_rows(const Product<X, T>& p, const Panel& panel, int64_t at, int height) {
    const int steps = static_cast<int>(p.inputs / 2);
    const auto* pairs = reinterpret_cast<const uint32_t*>(panel.at);
    auto* scratch = static_cast<float*>(thread_scratch((BLOCK_ROWS * PANEL + BLOCK_ROWS + 2 * WIDE_STEPS * (BLOCK_ROWS + PANEL)) * 4));
    float *ones = scratch + BLOCK_ROWS * PANEL, *rows = ones + BLOCK_ROWS, *columns = rows + 2 * WIDE_STEPS * BLOCK_ROWS;
    const Sums sums{scratch, PANEL};
    for (int i = 0; i < height; i++) ones[i] = 1.0f;
    for (int k = 0; k < steps; k += WIDE_STEPS) {
        const int deep = steps - k < WIDE_STEPS ? steps - k : WIDE_STEPS;
        for (int r = 0; r < height; r++) {
            const X* from = p.x + (at + r) * p.lda + 2 * k;
            float* to = rows + r * 2 * deep;
            int i = 0;
            for (; i + VL <= 2 * deep; i += VL) store(to + i, load(from + i));
            for (; i < 2 * deep; i++) to[i] = widen(from[i]);
        }
        for (int i = 0; i < deep; i++)
            for (int n = 0; n < PANEL; n += VL) {
                const vu pair = *reinterpret_cast<const vu_loose*>(pairs + (k + i) * PANEL + n);
                store(columns + 2 * i * PANEL + n, Math::low(pair));
                store(columns + (2 * i + 1) * PANEL + n, Math::high(pair));
            }
        Prefetcher none{nullptr, nullptr};   // everything is in the cache
        product_rows<MathF32, PANEL / VL>(reinterpret_cast<const uint32_t*>(rows), 2 * deep, reinterpret_cast<const uint32_t*>(columns), PANEL, sums,
                                          2 * deep, height, k ? ones : nullptr, sums, none);
    }
    put_sums(p, panel, at, height, scratch);
}

// Computes rows [at, at + height) of one panel of pairs. next: the panel that this thread reads afterwards.
template <class Math, class X, class T>
void pair_rows(const Product<X, T>& p, const Panel& panel, int64_t at, int height, const uint8_t* next) {
    if constexpr (Math::WIDENS)
        if (height > WIDE_ROWS) return wide_rows<Math>(p, panel, at, height);
    const int steps = static_cast<int>(p.inputs / 2), lda = p.lda / 2;
    const auto* columns = reinterpret_cast<const uint32_t*>(panel.at);
    const bool whole = panel.outputs == p.width();
    auto* scratch = static_cast<float*>(thread_scratch((BLOCK_ROWS * PANEL + BLOCK_ROWS) * 4));
    const Sums sums{scratch, PANEL};
    float* ones = scratch + BLOCK_ROWS * PANEL;
    for (int i = 0; i < height; i++) ones[i] = 1.0f;
    const int most = height <= MR ? steps : height <= 4 * MR ? SHORT_STEPS : TALL_STEPS;
    const int blocks = (steps + most - 1) / most, block = (steps + blocks - 1) / blocks;
    for (int k = 0; k < steps; k += block) {
        const int deep = steps - k < block ? steps - k : block;
        // With one pass over the panel, prefetch the panel itself, LEAD bytes ahead. With several, prefetch the next block while this one is reused.
        const auto* here = reinterpret_cast<const uint8_t*>(columns + k * PANEL);
        const auto* after = k + deep < steps ? here + static_cast<int64_t>(deep) * PANEL * 4 : next;
        Prefetcher ahead{after, after ? after + block * PANEL * 4 : after, height <= 2 * MR ? 2 : 1, nullptr, height > 4 * MR};
        if (height <= MR) ahead = {here + Prefetcher::LEAD, here + static_cast<int64_t>(deep) * PANEL * 4, 2, after};
        const uint32_t *a = reinterpret_cast<const uint32_t*>(p.x) + at * lda + k, *b = columns + k * PANEL;
        const float* alpha = k ? ones : nullptr;
        const bool last = k + deep == steps && whole;
        if constexpr (std::is_same_v<X, T>)
            if (last && p.gated) {
                product_rows<Math, PANEL / VL>(a, lda, b, PANEL, sums, deep, height, alpha, gated_of(p, panel, at), ahead);
                continue;
            }
        if (last) product_rows<Math, PANEL / VL>(a, lda, b, PANEL, sums, deep, height, alpha, outputs_of(p, panel, at), ahead);
        else product_rows<Math, PANEL / VL>(a, lda, b, PANEL, sums, deep, height, alpha, sums, ahead);
    }
    if (!whole) put_part(p, panel, at, height, scratch);
}

// Computes rows [at, at + height) of one packed panel.
template <class X, class T>
void packed_rows(const Product<X, T>& p, const Panel& panel, int64_t at, int height, const uint8_t* next) {
    const int planes = p.packed.planes, most = (BLOCK_ROWS + SPARE_ROWS) * planes;
    auto* sums = static_cast<float*>(thread_scratch(static_cast<size_t>(most) * PANEL * 4 + PACKED_SCRATCH));
    packed_sums(static_cast<int>(panel.kind), panel.at, p.inputs, p.packed, at, height, sums, sums + most * PANEL, next);
    if (planes == 2)
        for (int r = 0; r < height; r++)
            for (int n = 0; n < PANEL; n += VL) store(sums + r * PANEL + n, load(sums + 2 * r * PANEL + n) + load(sums + (2 * r + 1) * PANEL + n));
    put_sums(p, panel, at, height, sums);
}

template <class X, class T>
void linear(const Matrix& m, const Rows& rows, T* out, const Matrix* next) {
    const int kind = static_cast<int>(rows.kind);
    Product<X, T> p{static_cast<const X*>(rows.x), static_cast<int>(rows.stride), {}, rows.count, m.inputs, m.outputs, static_cast<const X*>(m.bias),
                    m.gated, out};
    if (p.rows == 0) return;
    // With few rows, a panel takes about a microsecond, so the data of parts is prepared once.
    struct {
        int64_t panels, bytes;
    } runs[MOST_PARTS];
    int64_t panels = 0;
    bool packed = false, minima = false;
    for (int64_t i = 0; i < m.num_parts; i++) {
        runs[i] = {(m.parts[i].outputs + p.width() - 1) / p.width(), panel_bytes(static_cast<int>(m.parts[i].kind), p.inputs)};
        panels += runs[i].panels;
        packed = packed || is_packed(static_cast<int>(m.parts[i].kind));
        minima = minima || has_minima(static_cast<int>(m.parts[i].kind));
    }
    if (packed) p.packed = quantize_rows(kind, rows.x, rows.stride, p.rows, p.inputs, minima, rows.scratch);
    const auto panel_at = [&](int64_t i) {
        int64_t first = 0, part = 0;
        for (; i >= runs[part].panels; part++) i -= runs[part].panels, first += m.parts[part].outputs;
        const int64_t before = i * p.width(), left = m.parts[part].outputs - before;
        return Panel{m.parts[part].kind, m.parts[part].panels + i * runs[part].bytes, first + before, left < p.width() ? left : p.width()};
    };
    const uint8_t* following = next ? next->parts->panels + member.id * panel_bytes(static_cast<int>(next->parts->kind), next->inputs) : nullptr;
    const int64_t chunks = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS, height = ((p.rows + chunks - 1) / chunks + MR - 1) / MR * MR;
    const int64_t items_in_all = panels * chunks;
    share_items(items_in_all, [&](Items items) {
        const auto of = [&](int64_t i) { return panel_at(chunks == 1 ? i : i % panels); };
        int64_t i = items.next();
        Panel panel{};
        if (i < items_in_all) panel = of(i);
        while (i < items_in_all) {
            const int64_t then = items.next(), at = (chunks == 1 ? 0 : i / panels) * height;
            Panel after{0, following, 0, 0};
            if (then < items_in_all) after = of(then);
            const int count = static_cast<int>(p.rows - at < height ? p.rows - at : height);
            if (count > 0) {
                if (is_packed(static_cast<int>(panel.kind))) packed_rows(p, panel, at, count, after.at);
                else if constexpr (std::is_same_v<X, bf16>) pair_rows<MathOfBf16>(p, panel, at, count, after.at);
                else if constexpr (std::is_same_v<X, f16>) pair_rows<MathPairs<f16>>(p, panel, at, count, after.at);
            }
            i = then, panel = after;
        }
    });
}

}  // namespace

void multiply(const Matrix& m, const Rows& rows, int out_kind, void* out, const Matrix* next) {
    if (rows.kind == DENSE_F32) linear<float>(m, rows, static_cast<float*>(out), next);
    else if (rows.kind == DENSE_BF16 && out_kind == DENSE_BF16) linear<bf16>(m, rows, static_cast<bf16*>(out), next);
    else if (rows.kind == DENSE_BF16) linear<bf16>(m, rows, static_cast<float*>(out), next);
    else if (out_kind == DENSE_F16) linear<f16>(m, rows, static_cast<f16*>(out), next);
    else linear<f16>(m, rows, static_cast<float*>(out), next);
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

// out_kind: the format of the rows, or float32. For panels of pairs, x_stride must be even.
QUIRE_API void quire_multiply(const Matrix* matrix, const Rows* rows, int out_kind, void* out) { multiply(*matrix, *rows, out_kind, out); }

QUIRE_EXPORT_FIELDS(Part)
QUIRE_EXPORT_FIELDS(Matrix)
QUIRE_EXPORT_FIELDS(Rows)
