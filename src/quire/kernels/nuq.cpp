// Encodes full pages, and decodes whole pages for CPUs without bf16 dot products. Compiled without fused multiply-adds, so that results have the
// same bits as those of cache/codecs/nuq.py.
//
// Both work on the transposed page [D, 64]: a vector holds one channel of several slots, so no sum runs across the lanes of a vector.
#include <type_traits>
#include "nuq.h"

namespace quire {
namespace {

constexpr int VECTORS = PAGE / VL;
constexpr int MOST_CHANNELS = 256;   // of a head; their number is a multiple of 16

// One number per slot of a page.
struct Slots {
    vf at[VECTORS];
    float* floats() { return reinterpret_cast<float*>(at); }
    const float* floats() const { return reinterpret_cast<const float*>(at); }
};

inline Slots all(float x) {
    Slots s;
    for (int i = 0; i < VECTORS; i++) s.at[i] = splat(x);
    return s;
}

template <class T>
void transpose_page(const T* x, int64_t stride, int D, int zeros, Slots* out) {
    for (int t = 0; t < PAGE; t++)
        for (int d = 0; d < D; d++) out[d].floats()[t] = t < zeros ? 0.0f : widen(x[t * stride + d]);
}

void transpose_any(Kind kind, const void* x, int64_t stride, int D, int zeros, Slots* out) {
    if (kind == DENSE_BF16) transpose_page(static_cast<const bf16*>(x), stride, D, zeros, out);
    else if (kind == DENSE_F16) transpose_page(static_cast<const f16*>(x), stride, D, zeros, out);
    else transpose_page(static_cast<const float*>(x), stride, D, zeros, out);
}

inline vf blend(vi mask, vf yes, vf no) { return mask ? yes : no; }
inline vf magnitude(vf x) { return as_float((vu)x & 0x7fffffffu); }

// The two channels with the largest costs, for each slot. Among equal costs, the first channel.
struct Largest {
    Slots cost[2], channel[2];
    explicit Largest() : cost{all(-1), all(-1)}, channel{all(0), all(0)} {}
    void offer(int i, vf found, int d) {
        const vf which = splat(static_cast<float>(d));
        const vi first = found > cost[0].at[i], second = found > cost[1].at[i];
        cost[1].at[i] = blend(first, cost[0].at[i], blend(second, found, cost[1].at[i]));
        channel[1].at[i] = blend(first, channel[0].at[i], blend(second, which, channel[1].at[i]));
        cost[0].at[i] = blend(first, found, cost[0].at[i]);
        channel[0].at[i] = blend(first, which, channel[0].at[i]);
    }
};

// Writes one outlier slot for every token: its channel [64], then its residual float16 [64]. missing[d]: the residuals of channel d.
void write_slot(const Slots& channel, const Slots* missing, uint8_t* out) {
    for (int t = 0; t < PAGE; t++) {
        const int d = static_cast<int>(channel.floats()[t]);
        out[t] = static_cast<uint8_t>(d);
        const uint16_t bits = half_bits(missing[d].floats()[t]);
        std::memcpy(out + PAGE + 2 * t, &bits, 2);
    }
}

typedef uint8_t bytes __attribute__((vector_size(VL), aligned(1), may_alias));
typedef uint8_t bytes16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t bytes32 __attribute__((vector_size(32)));
typedef uint16_t words __attribute__((vector_size(64)));

// Stores the codes of VL slots, one byte each.
inline void put_codes(vi code, uint8_t* at) {
    const bytes narrow = __builtin_convertvector(code, bytes);
    std::memcpy(at, &narrow, VL);
}

// Packs fields of 32 codes into lines; code(field) returns them, one byte each.
template <class Code>
void pack(int fields, int bits, const Code& code, uint8_t*& out) {
    for_parts(bits, [&](int width, int place) {
        const int per_line = 16 / width;
        const words mask = static_cast<uint16_t>((1 << width) - 1) + words{};
        for (int first = 0; first < fields; first += per_line, out += LINE) {
            words line{};
            for (int f = 0; f < per_line; f++) line |= (__builtin_convertvector(code(first + f), words) >> place & mask) << (width * f);
            std::memcpy(out, &line, LINE);
        }
    });
}

// Looks up VL codes in a codebook of 32 floats. Only the first 2^BITS are used.
template <int BITS>
inline vf looked_up(const float* codebook, vu code) {
#if defined(__AVX512F__)
    return (vf)_mm512_permutex2var_ps(_mm512_loadu_ps(codebook), (__m512i)code, _mm512_loadu_ps(codebook + VL));
#elif defined(__AVX2__)
    const auto eight = [&](int first) { return _mm256_permutevar8x32_ps(_mm256_loadu_ps(codebook + first), (__m256i)code); };
    const auto choose = [&](__m256 low, __m256 high, int bit) {   // the sign of a lane chooses
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)code, 31 - bit)));
    };
    if constexpr (BITS <= 3) return (vf)eight(0);
    else if constexpr (BITS == 4) return (vf)choose(eight(0), eight(8), 3);
    else return (vf)choose(choose(eight(0), eight(8), 3), choose(eight(16), eight(24), 3), 4);
#else
    vf found;
    for (int i = 0; i < VL; i++) found[i] = codebook[code[i]];
    return found;
#endif
}

// Reads the fields that `pack` has written, BITS wide. Calls put(field, i, codes) with the codes of 16-bit lanes 2 * VL * i, ...: each element of
// `codes` holds those of two neighbouring lanes.
template <int BITS, class Put>
void unpack(int fields, const uint8_t* in, const Put& put) {
    constexpr int PARTS = 16 / VL;   // vectors of a line
    for (int field = 0; field < fields; field++)
        for (int i = 0; i < PARTS; i++) {
            vu code{};
            const uint8_t* lines = in;
            for_parts(BITS, [&](int width, int place) {
                const int per_line = 16 / width;
                const vu line = *reinterpret_cast<const vu_loose*>(lines + field / per_line * LINE + i * VL * 4);
                const uint32_t mask = (1u << width) - 1;
                code |= (line >> field % per_line * width & (mask | mask << 16)) << place;
                lines += fields / per_line * LINE;
            });
            put(field, i, code);
        }
}

// Calls body(bits) with the width of a code as a compile-time constant.
template <class Body>
inline void with_bits(int bits, const Body& body) {
    switch (bits) {
    case 0: return body(std::integral_constant<int, 0>{});
    case 1: return body(std::integral_constant<int, 1>{});
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    case 4: return body(std::integral_constant<int, 4>{});
    default: return body(std::integral_constant<int, 5>{});
    }
}

void encode_keys(const NuqHead& head, int D, const Slots* x, Slots* missing, uint8_t* codes, uint8_t* page) {
    const int half = D / 2;
    Largest largest;
    int bits_of[MOST_CHANNELS / 2];
    for (int p = 0; p < half; p++) bits_of[head.order[p]] = head.bits[p / BLOCK_PAIRS];
    for (int d = 0; d < D; d++) {
        const float* edges = head.key_edges + d * (CODEBOOK_SIZE - 1);
        const float* codebook = head.key_codebooks + d * CODEBOOK_SIZE;
        const int last = (1 << bits_of[d < half ? d : d - half]) - 1;
        for (int i = 0; i < VECTORS; i++) {
            vi code{};
            vf found = splat(codebook[0]);
            for (int e = 0; e < last; e++) {
                const vi beyond = x[d].at[i] > splat(edges[e]);
                code -= beyond;
                found = blend(beyond, splat(codebook[e + 1]), found);
            }
            missing[d].at[i] = x[d].at[i] - found;
            largest.offer(i, missing[d].at[i] * missing[d].at[i] * splat(head.key_weight[d]), d);
            put_codes(code, codes + d * PAGE + i * VL);
        }
    }
    uint8_t* out = page;
    for (int block = 0; block < half / BLOCK_PAIRS; block++)
        pack(4 * BLOCK_PAIRS, head.bits[block], [&](int field) {
            const uint8_t* at = codes + head.order[block * BLOCK_PAIRS + field / 4] * PAGE + field % 4 * 16;
            const bytes16 a = *reinterpret_cast<const bytes16*>(at), b = *reinterpret_cast<const bytes16*>(at + half * PAGE);
            return (bytes32)__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12,
                                                    28, 13, 29, 14, 30, 15, 31);
        }, out);
    for (int s = 0; s < head.key_slots; s++) write_slot(largest.channel[s], missing, page + head.at_key_slots + s * SLOT_BYTES);
}

void encode_values(const NuqHead& head, int D, const Slots* x, Slots* missing, uint8_t* codes, uint8_t* page) {
    const int last = (1 << head.value_bits) - 1;
    const float *edges = head.value_edges, *codebook = head.value_codebooks;
    const float number = static_cast<float>(D - head.value_slots);
    Largest largest;
    Slots s, z;
    for (int i = 0; i < VECTORS; i++) {
        vf sum{};
        for (int d = 0; d < D; d++) sum = sum + x[d].at[i];
        const vf mean = sum / static_cast<float>(D);
        for (int d = 0; d < D; d++) largest.offer(i, magnitude(x[d].at[i] - mean), d);
        const auto is_outer = [&](int d) {
            vi outer{};
            for (int k = 0; k < head.value_slots; k++) outer |= (vi)(largest.channel[k].at[i] == splat(static_cast<float>(d)));
            return outer;
        };
        vf high = splat(-INFINITY), low = splat(INFINITY);
        for (int d = 0; d < D; d++) {
            const vi outer = is_outer(d);
            high = max(high, blend(outer, splat(-INFINITY), x[d].at[i]));
            low = min(low, blend(outer, splat(INFINITY), x[d].at[i]));
        }
        const vf middle = (high + low) * 0.5f;
        vf scale = (high - low) * 0.5f, offset = middle, total{};
        for (int d = 0; d < D; d++) total = total + blend(is_outer(d), vf{}, x[d].at[i] - middle);
        for (int round = 0; round < 2; round++) {
            vf bounds[CODEBOOK_SIZE], sum_c{}, sum_cc{}, sum_cx{};
            for (int e = 0; e < last; e++) bounds[e] = splat(edges[e]) * scale + offset;
            for (int d = 0; d < D; d++) {
                const vi outer = is_outer(d);
                vf c = splat(codebook[0]);
                for (int e = 0; e < last; e++) c = blend(x[d].at[i] > bounds[e], splat(codebook[e + 1]), c);
                c = blend(outer, vf{}, c);
                sum_c = sum_c + c;
                sum_cc = sum_cc + c * c;
                sum_cx = sum_cx + c * blend(outer, vf{}, x[d].at[i] - middle);
            }
            const vf spread = sum_cc - sum_c * sum_c / number, slope = sum_cx - sum_c * total / number;
            const vi fits = (spread > vf{}) & (slope > vf{});
            scale = blend(fits, slope / blend(fits, spread, splat(1.0f)), scale);
            offset = blend(fits, middle + (total - scale * sum_c) / number, offset);
        }
        vf beyond{};
        for (int d = 0; d < D; d++) beyond = max(beyond, blend(is_outer(d), magnitude(x[d].at[i] - offset), vf{}));
        scale = max(scale, beyond * (1.0f / 256.0f));
        for (int lane = 0; lane < VL; lane++) {
            const int t = i * VL + lane;
            const uint16_t bits[2] = {half_bits(scale[lane] + 0.0f), half_bits(offset[lane] + 0.0f)};   // never minus zero
            std::memcpy(page + head.at_ranges + 2 * t, &bits[0], 2);
            std::memcpy(page + head.at_ranges + 2 * (PAGE + t), &bits[1], 2);
            s.floats()[t] = half_value(page + head.at_ranges + 2 * t);
            z.floats()[t] = half_value(page + head.at_ranges + 2 * (PAGE + t));
        }
        vf bounds[CODEBOOK_SIZE];
        for (int e = 0; e < last; e++) bounds[e] = splat(edges[e]) * s.at[i] + z.at[i];
        for (int d = 0; d < D; d++) {
            vi code{};
            vf c = splat(codebook[0]);
            for (int e = 0; e < last; e++) {
                const vi above = x[d].at[i] > bounds[e];
                code -= above;
                c = blend(above, splat(codebook[e + 1]), c);
            }
            missing[d].at[i] = x[d].at[i] - (c * s.at[i] + z.at[i]);
            put_codes(code, codes + d * PAGE + i * VL);
        }
    }
    uint8_t* out = page + head.at_values;
    for (int first = 0; first < D; first += 16)
        pack(PAGE / 2, head.value_bits, [&](int field) {
            bytes32 both;   // two neighbouring slots of each of sixteen channels
            for (int c = 0; c < 16; c++) std::memcpy(reinterpret_cast<uint8_t*>(&both) + 2 * c, codes + (first + c) * PAGE + 2 * field, 2);
            return both;
        }, out);
    for (int k = 0; k < head.value_slots; k++) write_slot(largest.channel[k], missing, page + head.at_value_slots + k * SLOT_BYTES);
}

void add_slots(const uint8_t* slots, int count, int D, float* x) {
    for (int s = 0; s < count; s++, slots += SLOT_BYTES)
        for (int t = 0; t < PAGE; t++) x[t * D + slots[t]] += half_value(slots + PAGE + 2 * t);
}

}  // namespace

void encode_page(const NuqHead& head, int D, Kind kind, const void* k, const void* v, int64_t stride, int zeros, uint8_t* page) {
    auto* x = static_cast<Slots*>(thread_scratch((2 * sizeof(Slots) + PAGE) * D));
    Slots* missing = x + D;
    auto* codes = reinterpret_cast<uint8_t*>(missing + D);
    std::memset(page, 0, head.page_bytes);
    transpose_any(kind, k, stride, D, zeros, x);
    encode_keys(head, D, x, missing, codes, page);
    transpose_any(kind, v, stride, D, zeros, x);
    encode_values(head, D, x, missing, codes, page);
}

void decode_page(const NuqHead& head, int D, const uint8_t* page, float* k, float* v) {
    const int half = D / 2;
    if (k) {
        alignas(64) float channels[MOST_CHANNELS][PAGE];
        const uint8_t* in = page;
        for (int block = 0; block < half / BLOCK_PAIRS; block++) {
            const uint8_t* pairs = head.order + block * BLOCK_PAIRS;
            with_bits(head.bits[block], [&](auto bits) {
                constexpr int BITS = decltype(bits)::value;
                unpack<BITS>(4 * BLOCK_PAIRS, in, [&](int field, int i, vu code) {
                    const int d = pairs[field / 4], slot = field % 4 * 16 + i * VL;
                    store(channels[d] + slot, looked_up<BITS>(head.key_codebooks + d * CODEBOOK_SIZE, code & 0xffffu));
                    store(channels[d + half] + slot, looked_up<BITS>(head.key_codebooks + (d + half) * CODEBOOK_SIZE, code >> 16));
                });
            });
            in += LINE * head.bits[block];
        }
        for (int d = 0; d < D; d += VL)
            for (int t = 0; t < PAGE; t += VL) {
                vu square[VL];
                for (int i = 0; i < VL; i++) square[i] = *reinterpret_cast<const vu_loose*>(channels[d + i] + t);
                transpose(square);
                for (int i = 0; i < VL; i++) *reinterpret_cast<vu_loose*>(k + (t + i) * D + d) = square[i];
            }
        add_slots(page + head.at_key_slots, head.key_slots, D, k);
    }
    if (v) {
        float scale[PAGE], offset[PAGE];
        for (int t = 0; t < PAGE; t++) {
            scale[t] = half_value(page + head.at_ranges + 2 * t);
            offset[t] = half_value(page + head.at_ranges + 2 * (PAGE + t));
        }
        with_bits(head.value_bits, [&](auto bits) {
            constexpr int BITS = decltype(bits)::value;
            const uint8_t* in = page + head.at_values;
            for (int first = 0; first < D; first += 16, in += 2 * LINE * BITS)
                unpack<BITS>(PAGE / 2, in, [&](int field, int i, vu code) {
                    float* row = v + 2 * field * D + first + i * VL;
                    store(row, looked_up<BITS>(head.value_codebooks, code & 0xffffu) * scale[2 * field] + offset[2 * field]);
                    store(row + D, looked_up<BITS>(head.value_codebooks, code >> 16) * scale[2 * field + 1] + offset[2 * field + 1]);
                });
        });
        add_slots(page + head.at_value_slots, head.value_slots, D, v);
    }
}

}  // namespace quire

using namespace quire;

// For tests, and for pages that are encoded outside a step: n pages of one head, keys and values T [n, 64, D].
QUIRE_API void quire_nuq_encode(const NuqHead* head, int D, int kind, const void* k, const void* v, int64_t n, uint8_t* pages) {
    const int64_t width = kind == DENSE_F32 ? 4 : 2, step = width * PAGE * D;
    parallel_for(n, 1, [&](int64_t i) {
        encode_page(*head, D, static_cast<Kind>(kind), static_cast<const uint8_t*>(k) + i * step, static_cast<const uint8_t*>(v) + i * step, D, 0,
                    pages + i * head->page_bytes);
    });
}

// Decodes to float32 keys and values [n, 64, D].
QUIRE_API void quire_nuq_decode(const NuqHead* head, int D, const uint8_t* pages, int64_t n, float* k, float* v) {
    parallel_for(n, 1, [&](int64_t i) { decode_page(*head, D, pages + i * head->page_bytes, k + i * PAGE * D, v + i * PAGE * D); });
}

QUIRE_EXPORT_FIELDS(NuqHead)
