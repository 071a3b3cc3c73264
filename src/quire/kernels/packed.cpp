// Products with packed panels, the rows they take, and packing; see packed.h. Defined by models/quants.py: tests/kernels/test_packed.py.
#include "packed.h"

namespace quire {
namespace {

// Few rows: codes go from the panel to the registers and are used there, by all rows.
template <class P, int M>
void few_rows(const uint8_t* block, int64_t blocks, const QuantizedRows& x, int64_t at, float* out) {
    constexpr int VECTORS = PANEL / VL;
    // Vectors of outputs at a time: as many sums as the registers hold beside words, codes and a pair of a row.
    constexpr int WIDE = VL == 16 || M == 1 ? (VECTORS < 4 ? VECTORS : 4) : 2;
    constexpr int LEAD = 4096;
    const int64_t lda = x.inputs / 2, groups = x.inputs / SCALED, summed = x.inputs / SUMMED;
    const uint32_t* pairs = x.pairs + at * lda;
    const float* scales = x.scales + at * groups;
    const int32_t* sums = x.sums + at * summed;
    vf y[M][VECTORS];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < VECTORS; n++) y[m][n] = vf{};
    for (int64_t k = 0; blocks > 0; blocks--, block += P::BLOCK_BYTES)
        for (int g = 0; g < P::GROUPS; g++, k += P::GROUP) {
            const uint32_t* group = P::codes(block, g);
            for (int i = 0; i < P::ALL_WORDS * PANEL; i += 16) __builtin_prefetch(group + LEAD / 4 + i, 0, 3);
            float scale[M];
            int32_t sum[M];
            for (int m = 0; m < M; m++) {
                scale[m] = scales[m * groups + k / SCALED];
                sum[m] = sums[m * summed + k / SUMMED];
                if constexpr (P::GROUP > SUMMED) sum[m] += sums[m * summed + k / SUMMED + 1];
            }
            for (int first = 0; first < VECTORS; first += WIDE) {
                if constexpr (WIDE < VECTORS) asm("" : "+r"(first));   // or pairs of rows are kept for the next vectors, in memory
                vi acc[M][WIDE];
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < WIDE; n++) acc[m][n] = vi{} - P::OFFSET * sum[m];
#pragma GCC unroll 8
                for (int w = 0; w < P::WORDS; w++) {
                    const uint32_t* a = pairs + k / 2 + w * P::PER_WORD;
                    typename P::Word word[WIDE];
                    for (int n = 0; n < WIDE; n++) word[n] = P::word(group, w, (first + n) * VL);
#pragma GCC unroll 4
                    for (int j = 0; j < P::PER_WORD; j++) {
                        vu codes[WIDE];
                        for (int n = 0; n < WIDE; n++) codes[n] = P::pair(word[n], w, j);
                        for (int m = 0; m < M; m++) {
                            const vu row = splat(a[m * lda + j]);
                            for (int n = 0; n < WIDE; n++) acc[m][n] = dot_pairs(acc[m][n], row, codes[n]);
                        }
                    }
                }
                for (int n = 0; n < WIDE; n++) {
                    const int lane = (first + n) * VL;
                    const vf s = P::scale(block, g, lane);
                    for (int m = 0; m < M; m++) {
                        vf& to = y[m][first + n];
                        to += __builtin_convertvector(acc[m][n], vf) * (s * scale[m]);
                        if constexpr (P::MINS) to += P::minimum(block, g, lane) * (scale[m] * static_cast<float>(sum[m]));
                    }
                }
            }
        }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < VECTORS; n++) store(out + m * PANEL + n * VL, y[m][n]);
}

template <class P, int M>
void few_rest(const uint8_t* panel, int64_t blocks, const QuantizedRows& x, int64_t at, int rows, float* out) {
    if constexpr (M > 0) {
        if (rows == M) few_rows<P, M>(panel, blocks, x, at, out);
        else few_rest<P, M - 1>(panel, blocks, x, at, rows, out);
    }
}

// A block of decoded groups: pairs of codes [pairs, 32], what each group is scaled with and what it adds.
struct Decoded {
    uint32_t* pairs;
    float *scales, *minima;
    int offset;             // what the codes are less
};

// M rows through `groups` decoded groups, added to sums [M, 32].
template <int GROUP, bool MINS, int M>
void decoded_rows(const Decoded& b, int groups, const QuantizedRows& x, int64_t at, int64_t k, float* sums) {
    constexpr int VECTORS = PANEL / VL, STEPS = GROUP / 2;
    const int64_t lda = x.inputs / 2, ldg = x.inputs / SCALED, lds = x.inputs / SUMMED;
    for (int g = 0; g < groups; g++, k += GROUP) {
        const uint32_t *a = x.pairs + at * lda + k / 2, *columns = b.pairs + g * STEPS * PANEL;
        float scale[M];
        int32_t sum[M];
        for (int m = 0; m < M; m++) {
            scale[m] = x.scales[(at + m) * ldg + k / SCALED];
            sum[m] = x.sums[(at + m) * lds + k / SUMMED];
            if constexpr (GROUP > SUMMED) sum[m] += x.sums[(at + m) * lds + k / SUMMED + 1];
        }
        vi acc[M][VECTORS];
        for (int m = 0; m < M; m++)
            for (int n = 0; n < VECTORS; n++) acc[m][n] = vi{} - b.offset * sum[m];
        for (int i = 0; i < STEPS; i++) {
            if constexpr (VL < 16) {   // sixteen registers: the sums, a pair of a row, and a column
                for (int n = 0; n < VECTORS; n++) {
                    const vu column = *reinterpret_cast<const vu_loose*>(columns + i * PANEL + n * VL);
                    for (int m = 0; m < M; m++) acc[m][n] = dot_pairs(acc[m][n], splat(a[m * lda + i]), column);
                }
            } else {
                vu column[VECTORS];
                for (int n = 0; n < VECTORS; n++) column[n] = *reinterpret_cast<const vu_loose*>(columns + i * PANEL + n * VL);
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < VECTORS; n++) acc[m][n] = dot_pairs(acc[m][n], splat(a[m * lda + i]), column[n]);
            }
        }
        for (int n = 0; n < VECTORS; n++) {
            const vf s = load(b.scales + g * PANEL + n * VL);
            for (int m = 0; m < M; m++) {
                float* to = sums + m * PANEL + n * VL;
                vf y = load(to) + __builtin_convertvector(acc[m][n], vf) * (s * scale[m]);
                if constexpr (MINS) y += load(b.minima + g * PANEL + n * VL) * (scale[m] * static_cast<float>(sum[m]));
                store(to, y);
            }
        }
    }
}

template <int GROUP, bool MINS, int M>
void decoded_rest(const Decoded& b, int groups, const QuantizedRows& x, int64_t at, int64_t k, int rows, float* sums) {
    if constexpr (M > 0) {
        if (rows == M) decoded_rows<GROUP, MINS, M>(b, groups, x, at, k, sums);
        else decoded_rest<GROUP, MINS, M - 1>(b, groups, x, at, k, rows, sums);
    }
}

// Many rows: a few groups at a time are decoded once, and all rows pass them in the first-level cache.
template <class P>
void many_rows(const uint8_t* block, int64_t blocks, const QuantizedRows& x, int64_t at, int rows, float* sums, void* scratch) {
    constexpr int M = VL == 16 ? 12 : 3, VECTORS = PANEL / VL;
    constexpr int DEEP = 256 / P::BLOCK;    // blocks decoded at a time
    constexpr int GROUPS = DEEP * P::GROUPS;
    auto* pairs = static_cast<uint32_t*>(scratch);
    auto* scales = reinterpret_cast<float*>(pairs + GROUPS * P::GROUP / 2 * PANEL);
    const Decoded decoded{pairs, scales, scales + GROUPS * PANEL, P::OFFSET};
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
                        for (int j = 0; j < P::PER_WORD; j++) *reinterpret_cast<vu_loose*>(to + (w * P::PER_WORD + j) * PANEL) = P::pair(word, w, j);
                    }
                    store(decoded.scales + groups * PANEL + n * VL, P::scale(block, g, n * VL));
                    if constexpr (P::MINS) store(decoded.minima + groups * PANEL + n * VL, P::minimum(block, g, n * VL));
                }
        int m = 0;
        for (; m + M <= rows; m += M) decoded_rows<P::GROUP, P::MINS, M>(decoded, groups, x, at + m, k, sums + m * PANEL);
        decoded_rest<P::GROUP, P::MINS, M - 1>(decoded, groups, x, at + m, k, rows - m, sums + m * PANEL);
    }
}

// One row as integers, in one plane or two.
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
        // 16 significant bits at most of what is read in 16; float32 could be rounded up to 2^15.
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

int planes_of(int kind) { return kind == DENSE_F32 ? 2 : 1; }

// One output's block as the file has it: codes (less nothing), halves, scale and minimum bytes.
struct FileBlock {
    uint16_t d, m;
    uint8_t scales[16], minima[16];
    uint8_t codes[256];
};

void take_nibbles(const uint8_t* bytes, int count, uint8_t* codes) {
    for (int i = 0; i < count; i++) codes[i] = bytes[i] & 15, codes[count + i] = bytes[i] >> 4;
}

void read_block(int kind, const uint8_t* from, FileBlock& to) {
    const auto half = [&](int at) {
        uint16_t bits;
        std::memcpy(&bits, from + at, 2);
        return bits;
    };
    const auto fifth = [&](const uint8_t* bits) {
        for (int i = 0; i < 32; i++) to.codes[i] |= (bits[i / 8] >> i % 8 & 1) << 4;
    };
    const auto six_bits = [&](const uint8_t* packed) {   // eight scales and eight minima in 12 bytes
        for (int i = 0; i < 4; i++) {
            to.scales[i] = packed[i] & 63, to.minima[i] = packed[4 + i] & 63;
            to.scales[4 + i] = (packed[8 + i] & 15) | (packed[i] >> 2 & 48);
            to.minima[4 + i] = packed[8 + i] >> 4 | (packed[4 + i] >> 2 & 48);
        }
    };
    switch (kind) {
        case Q4_0: to.d = half(0), take_nibbles(from + 2, 16, to.codes); return;
        case Q4_1: to.d = half(0), to.m = half(2), take_nibbles(from + 4, 16, to.codes); return;
        case Q5_0: to.d = half(0), take_nibbles(from + 6, 16, to.codes), fifth(from + 2); return;
        case Q5_1: to.d = half(0), to.m = half(2), take_nibbles(from + 8, 16, to.codes), fifth(from + 4); return;
        case Q8_0: to.d = half(0), std::memcpy(to.codes, from + 2, 32); return;
        case G4: to.d = half(0), to.m = half(2), take_nibbles(from + 4, 32, to.codes); return;
        case Q4_K:
        case Q5_K:
            to.d = half(0), to.m = half(2), six_bits(from + 4);
            for (int i = 0; i < 4; i++) take_nibbles(from + (kind == Q4_K ? 16 : 48) + 32 * i, 32, to.codes + 64 * i);
            if (kind == Q5_K)
                for (int i = 0; i < 256; i++) to.codes[i] |= (from[16 + i % 32] >> i / 32 & 1) << 4;
            return;
        case Q6_K:
            for (int i = 0; i < 2; i++) take_nibbles(from + 64 * i, 64, to.codes + 128 * i);
            for (int i = 0; i < 256; i++) to.codes[i] |= (from[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << 4;
            std::memcpy(to.scales, from + 192, 16);
            to.d = half(208);
            return;
    }
}

// Bytes of a block in a file.
int file_bytes(int kind) {
    constexpr int bytes[NUM_WEIGHTS] = {0, 0, 18, 20, 22, 24, 34, 144, 176, 210, 36};
    return bytes[kind];
}

template <class P>
void put_block(const FileBlock& from, int lane, uint8_t* block) {
    std::memcpy(block + 2 * lane, &from.d, 2);
    if constexpr (P::MINS) std::memcpy(block + 2 * PANEL + 2 * lane, &from.m, 2);
    for (int g = 0; g < P::GROUPS; g++) {
        if constexpr (P::BYTES) block[P::HALVES + g * PANEL + lane] = from.scales[g];
        if constexpr (P::BYTES && P::MINS) block[P::HALVES + (P::GROUPS + g) * PANEL + lane] = from.minima[g];
        auto* group = const_cast<uint32_t*>(P::codes(block, g));
        P::put_codes(group, lane, from.codes + g * P::GROUP);
    }
}

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

int64_t quantized_bytes(int kind, int64_t rows, int64_t inputs) {
    const int64_t padded = padded_inputs(inputs);
    return rows * planes_of(kind) * (padded * 2 + padded / SCALED * 4 + padded / SUMMED * 4);
}

QuantizedRows quantized_rows(int kind, int64_t rows, int64_t inputs, void* scratch) {
    const int64_t padded = padded_inputs(inputs), count = rows * planes_of(kind);
    auto* pairs = static_cast<uint32_t*>(scratch);
    auto* scales = reinterpret_cast<float*>(pairs + count * padded / 2);
    return {pairs, scales, reinterpret_cast<int32_t*>(scales + count * padded / SCALED), padded, planes_of(kind)};
}

void quantize_rows(int kind, const void* x, int64_t x_stride, int64_t rows, int64_t inputs, const QuantizedRows& to) {
    const int64_t lda = to.inputs / 2, ldg = to.inputs / SCALED, lds = to.inputs / SUMMED;
    parallel_for(rows, 1, [&](int64_t r) {
        const int64_t row = r * to.planes;
        const auto all = [&](const auto* from) {
            quantize_row(from + r * x_stride, inputs, to.pairs + row * lda, to.scales + row * ldg, to.sums + row * lds, to.inputs, to.planes);
        };
        if (kind == DENSE_BF16) all(static_cast<const bf16*>(x));
        else if (kind == DENSE_F16) all(static_cast<const f16*>(x));
        else all(static_cast<const float*>(x));
    });
}

void packed_sums(int kind, const uint8_t* panel, int64_t inputs, const QuantizedRows& x, int64_t at, int height, float* sums, void* scratch) {
    constexpr int FEW = 4;
    with_packed(kind, [&](auto packed) {
        using P = decltype(packed);
        const int64_t blocks = (inputs + P::BLOCK - 1) / P::BLOCK;
        const int rows = height * x.planes;
        if (rows <= FEW) few_rest<P, FEW>(panel, blocks, x, at * x.planes, rows, sums);
        else many_rows<P>(panel, blocks, x, at * x.planes, rows, sums, scratch);
    });
}

}  // namespace quire

using namespace quire;

QUIRE_API int64_t quire_panel_bytes(int kind, int64_t inputs) { return panel_bytes(kind, inputs); }

QUIRE_API int64_t quire_quantized_bytes(int kind, int64_t rows, int64_t inputs) { return quantized_bytes(kind, rows, inputs); }

// blocks as a file has them, [N, blocks of a row] -> panels, zeroed before. Gated: N gates, then N ups, 16 of each in a panel.
QUIRE_API void quire_pack_blocks(int kind, const uint8_t* blocks, int64_t N, int64_t K, int gated, uint8_t* panels) {
    with_packed(kind, [&](auto packed) {
        using P = decltype(packed);
        const int64_t count = (K + P::BLOCK - 1) / P::BLOCK, row_bytes = count * file_bytes(kind), width = gated ? PANEL / 2 : PANEL;
        parallel_for((N + width - 1) / width, 1, [&](int64_t panel) {
            for (int lane = 0; lane < PANEL; lane++) {
                const int64_t output = panel * width + lane % width;
                if (output >= N) continue;
                const uint8_t* row = blocks + (lane < width ? output : N + output) * row_bytes;
                FileBlock block;
                for (int64_t b = 0; b < count; b++) {
                    read_block(kind, row + b * file_bytes(kind), block);
                    put_block<P>(block, lane, panels + (panel * count + b) * P::BLOCK_BYTES);
                }
            }
        });
    });
}

// Rows of a matrix in panels that is not gated: out[i] = W[index[i]], [count, K]; of pairs the number's own 16 bits, of packed blocks the kind of
// number that is asked for. What an embedding reads.
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
