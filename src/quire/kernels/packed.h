// Weights in the block formats of GGUF, repacked into panels of 32 outputs; and the rows that are multiplied with them.
//
//     y[n] = sum over groups g of  s[g, n] * (sum over k in g of x[k] c[k, n])  +  m[g, n] * (sum over k in g of x[k])
//
// Codes are small integers. On CPUs with bfloat16 dot products, bfloat16 rows are multiplied directly; a table in a register turns codes into
// bfloat16. Otherwise, rows are converted to 16-bit integers with one power of two per 32 inputs, so that the inner sums are exact. Every x86 CPU
// multiplies and adds pairs of 16-bit integers in one instruction, twice as many as float multiply-adds. A number with 8 significant bits (bfloat16)
// is exact if it is at least 2^-7 times the largest of its 32 inputs. Smaller numbers are rounded to 2^-15 of the largest.
//
// A panel is one contiguous sequence of blocks. Each block has all 32 outputs, and these parts:
//
//     d of the outputs, float16 [32] | m, if the type has minima | of superblocks the scale bytes [groups][32] | minima's bytes | codes
//
// The codes of a group are vectors of 32-bit words, one word per output. A word has eight codes: the code of input 2p + h begins at bit
// 16 h + 4 (p % 4) of word p / 4. Codes of 5 and 6 bits have their upper e = 1 or 2 bits in further words, which follow: the bits of input 2p + h
// begin at bit 16 h + e (p % (16 / e)) of word p / (16 / e). 8-bit codes take a byte each.
#pragma once
#include "product.h"

namespace quire {

constexpr int PANEL = 32;          // outputs of a panel: two vectors of 16 with a dozen rows in registers, or four of 8 with three rows
constexpr int SUMMED = 16;         // inputs whose sum a quantized row keeps
constexpr int SCALED = 32;         // inputs that share a power of two

// The format of a part of a matrix. models/cpu_panels.py has the same numbers.
enum Weights : int32_t { PAIRS_BF16 = 0, PAIRS_F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, G4, NUM_WEIGHTS };

// acc + a.low b.low + a.high b.high for pairs of int16. The empty asm statement keeps the sum in its register: without it, the compiler would compute
// all products of a group first.
inline vi dot_pairs(vi acc, vu a, vu b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    acc += (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
    asm("" : "+v"(acc));
    return acc;
#elif defined(__AVX2__)
    acc += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    asm("" : "+x"(acc));
    return acc;
#elif defined(__SSE2__)
    acc += (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
    asm("" : "+x"(acc));
    return acc;
#else
    const vi x = (vi)a, y = (vi)b;
    return acc + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

typedef uint16_t vpair __attribute__((vector_size(VL * 4)));
typedef int16_t vpair_signed __attribute__((vector_size(VL * 4)));

inline vu splat(uint32_t x) { return x - vu{}; }

// One type. BITS: bits of a code; GROUP: inputs that share a scale; OFFSET: subtracted from codes; MINS: whether a group adds a minimum; BLOCK:
// inputs that share float16s; BYTES: whether groups have their own scale bytes (superblocks).
template <int BITS_, int GROUP_, int OFFSET_, bool MINS_, int BLOCK_, bool BYTES_>
struct Packed {
    static constexpr int BITS = BITS_, GROUP = GROUP_, OFFSET = OFFSET_, BLOCK = BLOCK_;
    static constexpr bool MINS = MINS_, BYTES = BYTES_;
    static constexpr int GROUPS = BLOCK / GROUP;
    static constexpr int EXTRA = BITS == 8 ? 0 : BITS - 4;
    static constexpr int PER_WORD = BITS == 8 ? 2 : 4;                    // pairs of inputs in a word
    static constexpr int WORDS = GROUP / 2 / PER_WORD;                    // words of a group, without the high bits
    static constexpr int ALL_WORDS = WORDS + EXTRA * GROUP / 32;
    static constexpr int HALVES = PANEL * 2 * (MINS ? 2 : 1);             // bytes of the float16s
    static constexpr int HEADER = HALVES + (BYTES ? GROUPS * PANEL * (MINS ? 2 : 1) : 0);
    static constexpr int64_t BLOCK_BYTES = HEADER + GROUPS * ALL_WORDS * PANEL * 4;

    static const uint32_t* codes(const uint8_t* block, int group) {
        return reinterpret_cast<const uint32_t*>(block + HEADER) + group * ALL_WORDS * PANEL;
    }

    // Scale bytes of VL outputs: with minima they are unsigned.
    static vf byte_values(const uint8_t* at) {
        const vi found = bytes(at);
        return __builtin_convertvector(MINS ? found : (found << 24) >> 24, vf);
    }

    // Scales and minima of the VL outputs from `lane`.
    static vf scale(const uint8_t* block, int group, int lane) {
        const vf d = load(reinterpret_cast<const f16*>(block) + lane);
        if constexpr (!BYTES) return d;
        else return d * byte_values(block + HALVES + group * PANEL + lane);
    }
    static vf minimum(const uint8_t* block, int group, int lane) {
        const vf d = load(reinterpret_cast<const f16*>(block + 2 * PANEL) + lane);
        if constexpr (!BYTES) return d;
        else return -d * byte_values(block + HALVES + (GROUPS + group) * PANEL + lane);
    }

    // One word of VL outputs, and the word with the upper bits of its 5- or 6-bit codes.
    struct Word {
        vu low, high;
    };
    static Word word(const uint32_t* group, int w, int lane) {
        const auto at = [&](int i) { return *reinterpret_cast<const vu_loose*>(group + i * PANEL + lane); };
        if constexpr (EXTRA) return {at(w), at(WORDS + 4 * w / (16 / EXTRA))};
        else return {at(w), vu{}};
    }

    // Pair j of word w, as int16.
    static vu pair(const Word& word, int w, int j) {
        const vpair halves = (vpair)word.low;
        if constexpr (BITS == 8) return j ? (vu)((vpair_signed)word.low >> 8) : (vu)((vpair_signed)(halves << 8) >> 8);
        const vu codes = j == 3 ? (vu)(halves >> 12) : (j ? (vu)(halves >> 4 * j) : word.low) & splat(0x000f000fu);
        if constexpr (EXTRA == 0) return codes;
        constexpr int PAIRS = 16 / (EXTRA ? EXTRA : 1);
        const int at = EXTRA * ((4 * w + j) % PAIRS);
        const vpair high = (vpair)word.high;
        return codes | ((at < 4 ? (vu)(high << (4 - at)) : (vu)(high >> (at - 4))) & splat(EXTRA == 1 ? 0x00100010u : 0x00300030u));
    }

#if defined(__AVX512BF16__)
    // The bfloat16 value of each code, 32 in a vector. 4-bit codes need no mask: the lookup reads five bits, and each code has two equal entries.
    static constexpr int TABLE = BITS == 6 ? 64 : 32;
    struct Table {
        vu at[TABLE / 32];
    };
    static Table table() {
        Table found{};
        if constexpr (BITS < 8) {
            alignas(64) uint16_t values[TABLE];
            for (int i = 0; i < TABLE; i++) values[i] = round_bf16(static_cast<float>((BITS == 4 ? i % 16 : i) - OFFSET));
            for (int i = 0; i < TABLE / 32; i++) std::memcpy(&found.at[i], values + 32 * i, 64);
        }
        return found;
    }

    // Pair j of word w, as bfloat16.
    static vu pair(const Word& word, int w, int j, const Table& table) {
        if constexpr (BITS == 8) {
            const vu codes = pair(word, w, j);
            const vf low = __builtin_convertvector((vi)(codes << 16) >> 16, vf), high = __builtin_convertvector((vi)codes >> 16, vf);
            return (vu)low >> 16 | ((vu)high & 0xffff0000u);
        }
        const __m512i code = (__m512i)(BITS == 4 ? (vu)((vpair)word.low >> 4 * j) : pair(word, w, j));
        if constexpr (TABLE == 32) return (vu)_mm512_permutexvar_epi16(code, (__m512i)table.at[0]);
        else return (vu)_mm512_permutex2var_epi16((__m512i)table.at[0], code, (__m512i)table.at[TABLE / 32 - 1]);
    }
#endif

    // The code of one input of a group for one output, minus the offset.
    static int code(const uint32_t* group, int input, int lane) {
        const int pair = input / 2, half = input % 2 * 16;
        if constexpr (BITS == 8) return static_cast<int8_t>(group[pair / 2 * PANEL + lane] >> (half + pair % 2 * 8));
        int found = group[pair / 4 * PANEL + lane] >> (half + pair % 4 * 4) & 15;
        if constexpr (EXTRA) {
            constexpr int PAIRS = 16 / EXTRA;
            found |= (group[(WORDS + pair / PAIRS) * PANEL + lane] >> (half + EXTRA * (pair % PAIRS)) & ((1 << EXTRA) - 1)) << 4;
        }
        return found - OFFSET;
    }
    // Writes the codes of a group for one output. codes: one byte each, before the offset is subtracted. One multiplication gathers the even, or the
    // odd, ones of eight bytes.
    static void put_codes(uint32_t* group, int lane, const uint8_t* codes) {
        constexpr uint64_t even = 0x00ff00ff00ff00ffu, four = 1ull << 48 | 1ull << 36 | 1ull << 24 | 1ull << 12;
        constexpr uint64_t beyond = EXTRA == 1 ? 1ull << 48 | 1ull << 33 | 1ull << 18 | 1ull << 3 : 1ull << 48 | 1ull << 34 | 1ull << 20 | 1ull << 6;
        uint32_t high[EXTRA ? EXTRA * GROUP / 32 : 1] = {};
        for (int w = 0; w < WORDS; w++) {
            uint64_t eight = 0;
            std::memcpy(&eight, codes + 2 * PER_WORD * w, 2 * PER_WORD);
            const uint64_t halves[2] = {eight & even, eight >> 8 & even};
            uint32_t word = 0;
            for (int h = 0; h < 2; h++) {
                if constexpr (BITS == 8) {
                    word |= static_cast<uint32_t>((halves[h] | halves[h] >> 8) & 0xffff) << 16 * h;
                } else {
                    word |= static_cast<uint32_t>((halves[h] & 0x000f000f000f000fu) * four >> 48) << 16 * h;
                    if constexpr (EXTRA) {
                        constexpr int PAIRS = 16 / EXTRA;
                        const uint64_t left = halves[h] >> 4 & (EXTRA == 1 ? 0x0001000100010001u : 0x0003000300030003u);
                        high[4 * w / PAIRS] |= static_cast<uint32_t>((left * beyond >> 48) & ((1 << 4 * EXTRA) - 1)) << (16 * h + EXTRA * (4 * w % PAIRS));
                    }
                }
            }
            group[w * PANEL + lane] = word;
        }
        for (int i = 0; i < ALL_WORDS - WORDS; i++) group[(WORDS + i) * PANEL + lane] = high[i];
    }
};

// Calls use(Packed<...>{}) for a packed type.
template <class Use>
void with_packed(int kind, const Use& use) {
    switch (kind) {
        case Q4_0: return use(Packed<4, 32, 8, false, 32, false>{});
        case Q4_1: return use(Packed<4, 32, 0, true, 32, false>{});
        case Q5_0: return use(Packed<5, 32, 16, false, 32, false>{});
        case Q5_1: return use(Packed<5, 32, 0, true, 32, false>{});
        case Q8_0: return use(Packed<8, 32, 0, false, 32, false>{});
        case Q4_K: return use(Packed<4, 32, 0, true, 256, true>{});
        case Q5_K: return use(Packed<5, 32, 0, true, 256, true>{});
        case Q6_K: return use(Packed<6, 16, 32, false, 256, true>{});
        case G4: return use(Packed<4, 32, 0, true, 64, false>{});
    }
}

inline bool is_packed(int kind) { return kind > PAIRS_F16; }

// Rows in the format for packed panels: bfloat16, or integers. A float32 row takes two consecutive rows of integers (planes = 2): the second has the
// rounding errors of the first.
struct PackedRows {
    const uint32_t* pairs;  // pairs of 16 bits [rows * planes, inputs / 2], inputs padded
    const float* scales;    // [rows * planes, inputs / SCALED]: NaN if an input is not finite; null for bfloat16
    const int32_t* sums;    // [rows * planes, inputs / SUMMED]; for bfloat16 floats [rows, inputs / SCALED]
    int64_t lda;            // pairs from row to row
    int64_t inputs;         // padded to whole groups
    int planes;
};

int64_t padded_inputs(int64_t inputs);
int64_t quantized_bytes(int kind, int64_t rows, int64_t inputs);                     // bytes of scratch for rows of this format
// Converts rows to this format in a shared loop. bfloat16 rows with a suitable layout are not copied. sums: whether the sums are needed.
PackedRows quantize_rows(int kind, const void* x, int64_t x_stride, int64_t rows, int64_t inputs, bool sums, void* scratch);

constexpr int SPARE_ROWS = 12;   // rows beyond the last that a block may read; their sums are written and ignored

// Sums [(height + SPARE_ROWS) * planes, 32] of one panel for the rows from `at` on. scratch: PACKED_SCRATCH bytes. next: the panel that this thread
// reads afterwards, or null.
constexpr int PACKED_SCRATCH = 256 * PANEL * 2 + 2 * 16 * PANEL * 4;
void packed_sums(int kind, const uint8_t* panel, int64_t inputs, const PackedRows& x, int64_t at, int height, float* sums, void* scratch,
                 const uint8_t* next);

bool has_minima(int kind);
int64_t panel_bytes(int kind, int64_t inputs);

}  // namespace quire
