// Products with packed panels, and the conversion of rows; see packed.h. Defined by models/quants.py; tests/kernels/test_packed.py compares the two.
#include "packed.h"

namespace quire {
namespace {

// Arithmetic for rows of integers.
struct MathIntegers {
    using Sum = vi;
    static constexpr bool EXACT = true;
    static constexpr int FEW = 4;                        // with at most FEW rows, codes are decoded in registers
    static constexpr int FEW_BLOCK = 4;                  // rows at a time then
    template <class P>
    static constexpr int BLOCK = VL == 16 ? 12 : 3;      // with more rows: rows per block that reads decoded codes
    template <class P>
    struct Codes {
        vu pair(const typename P::Word& word, int w, int j) const { return P::pair(word, w, j); }
    };
    static vi dot(vi acc, vu a, vu b) { return dot_pairs(acc, a, b); }
};

// Arithmetic for rows of bfloat16.
#if defined(__AVX512BF16__)
struct MathBfloats {
    using Sum = vf;
    static constexpr bool EXACT = false;
    static constexpr int FEW = 48, FEW_BLOCK = 12;
    template <class P>
    static constexpr int BLOCK = P::MINS ? 12 : 8;
    template <class P>
    struct Codes {
        typename P::Table table = P::table();
        vu pair(const typename P::Word& word, int w, int j) const { return P::pair(word, w, j, table); }
    };
    static vf dot(vf acc, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
};
#endif

// Of a row's group: the scale, and the scaled sum of its numbers.
struct Weighing {
    float scale, sum;
    int32_t whole;          // the sum of integers
};
template <class Math, class P>
inline Weighing weighing(const PackedRows& x, int64_t row, int64_t k) {
    if constexpr (Math::EXACT) {
        const int64_t at = row * (x.inputs / SUMMED) + k / SUMMED;
        const float scale = x.scales[row * (x.inputs / SCALED) + k / SCALED];
        const int32_t whole = x.sums[at] + (P::GROUP > SUMMED ? x.sums[at + 1] : 0);
        return {scale, scale * static_cast<float>(whole), whole};
    } else {
        static_assert(!P::MINS || P::GROUP == SCALED);
        return {1, P::MINS ? reinterpret_cast<const float*>(x.sums)[row * (x.inputs / SCALED) + k / SCALED] : 0, 0};
    }
}

// y + s * (sum of a group's products) + m * (sum of its inputs)
template <class Math, class P>
inline vf weighed(vf y, typename Math::Sum acc, vf s, vf m, const Weighing& by) {
    if constexpr (Math::EXACT) y += __builtin_convertvector(acc, vf) * (s * by.scale);
    else y += acc * s;
    if constexpr (P::MINS) y += m * by.sum;
    return y;
}

template <class Math, class P>
inline typename Math::Sum nothing(const Weighing& by) {
    if constexpr (Math::EXACT) return vi{} - P::OFFSET * by.whole;
    else return vf{};
}

// Few rows: codes are decoded into registers, where all rows use them.
template <class Math, class P, int M>
void few_rows(const uint8_t* block, int64_t blocks, const PackedRows& x, int64_t at, float* out, const uint8_t* next) {
    constexpr int VECTORS = PANEL / VL;
    // Vectors of outputs at a time: registers must also hold words, codes and a pair of a row.
    constexpr int WIDE = VL == 16 || M == 1 ? (VECTORS < 4 ? VECTORS : 4) : 2;
    constexpr int64_t LEAD = 8192;
    constexpr int LINES = (P::BLOCK_BYTES / P::GROUPS + 63) / 64;   // cache lines of a group, with its share of the block's header
    const typename Math::template Codes<P> codes_of{};
    const uint8_t* end = block + blocks * P::BLOCK_BYTES;
    const int64_t jump = next ? next - end : 0;
    const uint32_t* pairs = x.pairs + at * x.lda;
    vf y[M][VECTORS];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < VECTORS; n++) y[m][n] = vf{};
    for (int64_t k = 0; blocks > 0; blocks--, block += P::BLOCK_BYTES)
        for (int g = 0; g < P::GROUPS; g++, k += P::GROUP) {
            const uint32_t* group = P::codes(block, g);
            const uint8_t* ahead = block + g * (P::BLOCK_BYTES / P::GROUPS) + LEAD;
            if (ahead >= end) ahead += jump;
            Weighing by[M];
            for (int m = 0; m < M; m++) by[m] = weighing<Math, P>(x, at + m, k);
            for (int first = 0; first < VECTORS; first += WIDE) {
                if constexpr (WIDE < VECTORS) asm("" : "+r"(first));   // otherwise the compiler spills pairs of rows for the next vectors
                typename Math::Sum acc[M][WIDE];
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < WIDE; n++) acc[m][n] = nothing<Math, P>(by[m]);
#pragma GCC unroll 8
                for (int w = 0; w < P::WORDS; w++) {
                    if (first == 0)   // prefetches come evenly, because a burst would stall
                        for (int i = w * LINES / P::WORDS; i < (w + 1) * LINES / P::WORDS; i++) __builtin_prefetch(ahead + 64 * i, 0, 3);
                    const uint32_t* a = pairs + k / 2 + w * P::PER_WORD;
                    typename P::Word word[WIDE];
                    for (int n = 0; n < WIDE; n++) word[n] = P::word(group, w, (first + n) * VL);
#pragma GCC unroll 4
                    for (int j = 0; j < P::PER_WORD; j++) {
                        vu codes[WIDE];
                        for (int n = 0; n < WIDE; n++) codes[n] = codes_of.pair(word[n], w, j);
                        for (int m = 0; m < M; m++) {
                            const vu row = splat(a[m * x.lda + j]);
                            for (int n = 0; n < WIDE; n++) acc[m][n] = Math::dot(acc[m][n], row, codes[n]);
                        }
                    }
                }
                for (int n = 0; n < WIDE; n++) {
                    const int lane = (first + n) * VL;
                    const vf s = P::scale(block, g, lane), minimum = P::MINS ? P::minimum(block, g, lane) : vf{};
                    for (int m = 0; m < M; m++) y[m][first + n] = weighed<Math, P>(y[m][first + n], acc[m][n], s, minimum, by[m]);
                }
            }
        }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < VECTORS; n++) store(out + m * PANEL + n * VL, y[m][n]);
}

// A block of decoded groups: pairs of codes [pairs, 32], and the scale and the addend of each group.
struct Decoded {
    uint32_t* pairs;
    float *scales, *minima;
};

// Multiplies M rows with `groups` decoded groups, and adds to sums [M, 32].
template <class Math, class P, int M>
void decoded_rows(const Decoded& b, int groups, const PackedRows& rows, int64_t at, int64_t k, float* sums) {
    constexpr int VECTORS = PANEL / VL, STEPS = P::GROUP / 2;
    const PackedRows x = rows;   // a copy: the compiler must assume that a store to sums changes the caller's `rows`
    const int64_t lda = x.lda;
    const uint32_t *a = x.pairs + at * lda + k / 2, *columns = b.pairs;
    const float *scales = b.scales, *minima = b.minima;
    for (int g = 0; g < groups; g++, k += P::GROUP, scales += PANEL, minima += PANEL) {
        typename Math::Sum acc[M][VECTORS];
        for (int m = 0; m < M; m++)
            for (int n = 0; n < VECTORS; n++) acc[m][n] = nothing<Math, P>(weighing<Math, P>(x, at + m, k));
        for (int i = 0; i < STEPS; i++, a++, columns += PANEL) {
            if constexpr (VL < 16) {   // sixteen registers hold the sums, a pair of a row, and a column
                for (int n = 0; n < VECTORS; n++) {
                    const vu column = *reinterpret_cast<const vu_loose*>(columns + n * VL);
                    for (int m = 0; m < M; m++) acc[m][n] = Math::dot(acc[m][n], splat(a[m * lda]), column);
                }
            } else {
                vu column[VECTORS];
                for (int n = 0; n < VECTORS; n++) column[n] = *reinterpret_cast<const vu_loose*>(columns + n * VL);
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < VECTORS; n++) acc[m][n] = Math::dot(acc[m][n], splat(a[m * lda]), column[n]);
            }
        }
        vf s[VECTORS], minimum[VECTORS];
        for (int n = 0; n < VECTORS; n++) s[n] = load(scales + n * VL), minimum[n] = P::MINS ? load(minima + n * VL) : vf{};
        for (int m = 0; m < M; m++) {
            const Weighing by = weighing<Math, P>(x, at + m, k);
            for (int n = 0; n < VECTORS; n++) {
                float* to = sums + m * PANEL + n * VL;
                store(to, weighed<Math, P>(load(to), acc[m][n], s[n], minimum[n], by));
            }
        }
    }
}

// Blocks of rows have one of a few heights. This is the smallest one that holds `rows` rows.
constexpr int enough(int rows) { return rows <= 4 ? rows : rows <= 6 ? 6 : rows <= 8 ? 8 : 12; }

// Calls use(enough(rows)) with a compile-time constant of at most MOST.
template <int MOST, class Use>
void with_rows(int rows, const Use& use) {
    const auto height = [&](auto count) {
        if constexpr (count <= MOST) use(count);
    };
    switch (enough(rows)) {
        case 1: return height(std::integral_constant<int, 1>{});
        case 2: return height(std::integral_constant<int, 2>{});
        case 3: return height(std::integral_constant<int, 3>{});
        case 4: return height(std::integral_constant<int, 4>{});
        case 6: return height(std::integral_constant<int, 6>{});
        case 8: return height(std::integral_constant<int, 8>{});
        default: return height(std::integral_constant<int, 12>{});
    }
}

// Many rows: a few groups at a time are decoded once, and all rows read them from the first-level cache.
template <class Math, class P>
void many_rows(const uint8_t* block, int64_t blocks, const PackedRows& x, int64_t at, int rows, float* sums, void* scratch) {
    constexpr int M = Math::template BLOCK<P>, VECTORS = PANEL / VL;
    constexpr int DEEP = 256 / P::BLOCK;    // blocks decoded at a time
    constexpr int GROUPS = DEEP * P::GROUPS;
    const typename Math::template Codes<P> codes_of{};
    auto* pairs = static_cast<uint32_t*>(scratch);
    auto* scales = reinterpret_cast<float*>(pairs + GROUPS * P::GROUP / 2 * PANEL);
    const Decoded decoded{pairs, scales, scales + GROUPS * PANEL};
    std::memset(sums, 0, static_cast<size_t>(rows) * PANEL * 4);
    for (int64_t k = 0; blocks > 0; k += DEEP * P::BLOCK, blocks -= DEEP) {
        int groups = 0;
        for (int b = 0; b < DEEP && b < blocks; b++, block += P::BLOCK_BYTES)
            for (int g = 0; g < P::GROUPS; g++, groups++)
                for (int n = 0; n < VECTORS; n++) {
                    uint32_t* to = pairs + groups * (P::GROUP / 2) * PANEL + n * VL;
#pragma GCC unroll 8
                    for (int w = 0; w < P::WORDS; w++) {
                        const typename P::Word word = P::word(P::codes(block, g), w, n * VL);
                        for (int j = 0; j < P::PER_WORD; j++)
                            *reinterpret_cast<vu_loose*>(to + (w * P::PER_WORD + j) * PANEL) = codes_of.pair(word, w, j);
                    }
                    store(decoded.scales + groups * PANEL + n * VL, P::scale(block, g, n * VL));
                    if constexpr (P::MINS) store(decoded.minima + groups * PANEL + n * VL, P::minimum(block, g, n * VL));
                }
        for (int m = 0; m < rows; m += M)
            with_rows<M>(rows - m < M ? rows - m : M,
                         [&](auto count) { decoded_rows<Math, P, count>(decoded, groups, x, at + m, k, sums + m * PANEL); });
    }
}

template <class Math, class P>
void panel_sums(const uint8_t* panel, int64_t inputs, const PackedRows& x, int64_t at, int rows, float* sums, void* scratch, const uint8_t* next) {
    const int64_t blocks = (inputs + P::BLOCK - 1) / P::BLOCK;
    if (rows > Math::FEW) return many_rows<Math, P>(panel, blocks, x, at, rows, sums, scratch);
    for (int m = 0; m < rows; m += Math::FEW_BLOCK)
        with_rows<Math::FEW_BLOCK>(rows - m < Math::FEW_BLOCK ? rows - m : Math::FEW_BLOCK,
                                   [&](auto count) { few_rows<Math, P, count>(panel, blocks, x, at + m, sums + m * PANEL, next); });
}

// Converts one row to integers, in one plane or two.
template <class T>
void quantize_row(const T* x, int64_t inputs, uint32_t* pairs, float* scales, int32_t* sums, int64_t padded, int planes) {
    typedef int16_t shorts __attribute__((vector_size(VL * 2), aligned(2), may_alias));
    const vf magic = splat(12582912.0f);   // 1.5 * 2^23: adding it rounds to an integer and leaves it in the low bits
    for (int64_t k = 0; k < padded; k += SCALED) {
        float row[SCALED];
        if (k + SCALED <= inputs) {
            for (int i = 0; i < SCALED; i += VL) store(row + i, load(x + k + i));
        } else {
            for (int i = 0; i < SCALED; i++) row[i] = k + i < inputs ? widen(x[k + i]) : 0.0f;
        }
        vi largest = {};
        for (int i = 0; i < SCALED; i += VL) {
            const vi bits = (vi)load(row + i) & 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
        int32_t top = 0;
        for (int i = 0; i < VL; i++) top = largest[i] > top ? largest[i] : top;
        int exponent = top >> 23;
        const bool finite = exponent < 255;
        // 16-bit inputs have at most 16 significant bits. Float32 could be rounded up to 2^15.
        exponent = (exponent < 32 ? 32 : exponent) - (sizeof(T) == 4 ? 13 : 14);
        for (int plane = 0; plane < planes; plane++, exponent -= 15) {
            const int32_t up_bits = (254 - exponent) << 23, down_bits = exponent << 23;
            float up, down;
            std::memcpy(&up, &up_bits, 4);
            std::memcpy(&down, &down_bits, 4);
            auto* to = reinterpret_cast<int16_t*>(pairs + plane * padded / 2) + k;
            for (int half = 0; half < SCALED; half += SUMMED) {
                vi sum = {};
                for (int i = half; i < half + SUMMED; i += VL) {
                    const vf value = load(row + i);
                    const vf shifted = finite ? value * up + magic : magic;
                    const vi code = (vi)shifted - (vi)magic;
                    sum += code;
                    *reinterpret_cast<shorts*>(to + i) = __builtin_convertvector(code, shorts);
                    store(row + i, value - (shifted - magic) * down);
                }
                int32_t total = 0;
                for (int i = 0; i < VL; i++) total += sum[i];
                sums[plane * (padded / SUMMED) + (k + half) / SUMMED] = total;
            }
            scales[plane * (padded / SCALED) + k / SCALED] = finite ? down : NAN;
        }
    }
}

// One row of bfloat16: a copy padded with zeros, unless pairs is null, and the sums of each 32 numbers.
void take_row(const bf16* x, int64_t inputs, uint32_t* pairs, float* sums, int64_t padded) {
    for (int64_t k = 0; k < padded; k += SCALED) {
        bf16 row[SCALED] = {};
        const bf16* from = x + k;
        if (inputs - k < SCALED) {
            if (inputs > k) std::memcpy(row, from, static_cast<size_t>(inputs - k) * sizeof(bf16));
            from = row;
        }
        vf total{};
        for (int i = 0; i < SCALED; i += VL) total += load(from + i);
        sums[k / SCALED] = sum(total);
        if (pairs) std::memcpy(pairs + k / 2, from, SCALED * sizeof(bf16));
    }
}


int planes_of(int kind) { return kind == DENSE_F32 ? 2 : 1; }

template <class P, class T>
void panel_row(const uint8_t* block, int lane, int64_t inputs, T* out) {
    for (int64_t k = 0; k < inputs; block += P::BLOCK_BYTES)
        for (int g = 0; g < P::GROUPS && k < inputs; g++) {
            float scale = half_value(block + 2 * lane), minimum = P::MINS ? half_value(block + 2 * PANEL + 2 * lane) : 0.0f;
            if constexpr (P::BYTES) {
                const uint8_t byte = block[P::HALVES + g * PANEL + lane];
                scale *= P::MINS ? static_cast<float>(byte) : static_cast<float>(static_cast<int8_t>(byte));
                minimum *= -static_cast<float>(block[P::HALVES + (P::GROUPS + g) * PANEL * P::MINS + lane]);
            }
            for (int i = 0; i < P::GROUP && k < inputs; i++, k++) {
                const float value = static_cast<float>(P::code(P::codes(block, g), i, lane)) * scale;
                narrow(out + k, P::MINS ? value + minimum : value);
            }
        }
}

}  // namespace

int64_t padded_inputs(int64_t inputs) { return (inputs + 63) / 64 * 64; }

int64_t panel_bytes(int kind, int64_t inputs) {
    if (!is_packed(kind)) return inputs / 2 * PANEL * 4;
    int64_t bytes = 0;
    with_packed(kind, [&](auto packed) { bytes = (inputs + packed.BLOCK - 1) / packed.BLOCK * packed.BLOCK_BYTES; });
    return bytes;
}

bool has_minima(int kind) {
    bool found = false;
    with_packed(kind, [&](auto packed) { found = packed.MINS; });
    return found;
}

int64_t quantized_bytes(int kind, int64_t rows, int64_t inputs) {
    const int64_t padded = padded_inputs(inputs);
    return (rows + SPARE_ROWS) * planes_of(kind) * (padded * 2 + padded / SCALED * 4 + padded / SUMMED * 4);
}

PackedRows quantize_rows(int kind, const void* x, int64_t x_stride, int64_t rows, int64_t inputs, bool sums, void* scratch) {
    const int64_t padded = padded_inputs(inputs), lda = padded / 2, ldg = padded / SCALED, lds = padded / SUMMED;
    const int planes = planes_of(kind);
    const int64_t count = (rows + SPARE_ROWS) * planes;
    auto* pairs = static_cast<uint32_t*>(scratch);
    auto* scales = reinterpret_cast<float*>(pairs + count * lda);
    auto* totals = reinterpret_cast<int32_t*>(scales + count * ldg);
#if defined(__AVX512BF16__)
    if (kind == DENSE_BF16) {
        const auto* from = static_cast<const bf16*>(x);
        // Rows are not copied if none beyond the last is read: if the last block has 4, 8 or 12 rows.
        const bool whole = padded == inputs && x_stride % 2 == 0 && (rows < 4 || rows % 4 == 0);
        if (sums || !whole)
            parallel_for(rows, 1, [&](int64_t r) {
                take_row(from + r * x_stride, inputs, whole ? nullptr : pairs + r * lda, reinterpret_cast<float*>(totals) + r * ldg, padded);
            });
        return {whole ? static_cast<const uint32_t*>(x) : pairs, nullptr, totals, whole ? x_stride / 2 : lda, padded, 1};
    }
#endif
    parallel_for(rows, 1, [&](int64_t r) {
        const int64_t row = r * planes;
        const auto all = [&](const auto* from) {
            quantize_row(from + r * x_stride, inputs, pairs + row * lda, scales + row * ldg, totals + row * lds, padded, planes);
        };
        if (kind == DENSE_BF16) all(static_cast<const bf16*>(x));
        else if (kind == DENSE_F16) all(static_cast<const f16*>(x));
        else all(static_cast<const float*>(x));
    });
    return {pairs, scales, totals, lda, padded, planes};
}

void packed_sums(int kind, const uint8_t* panel, int64_t inputs, const PackedRows& x, int64_t at, int height, float* sums, void* scratch,
                 const uint8_t* next) {
    with_packed(kind, [&](auto packed) {
        using P = decltype(packed);
#if defined(__AVX512BF16__)
        if (!x.scales) return panel_sums<MathBfloats, P>(panel, inputs, x, at, height, sums, scratch, next);
#endif
        panel_sums<MathIntegers, P>(panel, inputs, x, at * x.planes, height * x.planes, sums, scratch, next);
    });
}

}  // namespace quire

using namespace quire;

QUIRE_API int64_t quire_panel_bytes(int kind, int64_t inputs) { return panel_bytes(kind, inputs); }

QUIRE_API int64_t quire_quantized_bytes(int kind, int64_t rows, int64_t inputs) { return quantized_bytes(kind, rows, inputs); }

// Reads rows of an ungated matrix in panels, for embeddings: out[i] = W[index[i]], [count, K]. Panels of pairs: copies the 16-bit numbers. Packed
// panels: decodes to the format `number`.
QUIRE_API void quire_panel_rows(int kind, const uint8_t* panels, int64_t K, const int64_t* index, int64_t count, int number, void* out) {
    parallel_for(count, count < 32 ? count : 16, [&](int64_t i) {
        const uint8_t* panel = panels + index[i] / PANEL * panel_bytes(kind, K);
        const int lane = static_cast<int>(index[i] % PANEL);
        if (!is_packed(kind)) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(panel) + lane;
            uint32_t* row = static_cast<uint32_t*>(out) + i * K / 2;
            for (int64_t k = 0; k < K / 2; k++) row[k] = from[k * PANEL];
            return;
        }
        with_packed(kind, [&](auto packed) {
            using P = decltype(packed);
            if (number == DENSE_BF16) panel_row<P>(panel, lane, K, static_cast<bf16*>(out) + i * K);
            else if (number == DENSE_F16) panel_row<P>(panel, lane, K, static_cast<f16*>(out) + i * K);
            else panel_row<P>(panel, lane, K, static_cast<float*>(out) + i * K);
        });
    });
}
