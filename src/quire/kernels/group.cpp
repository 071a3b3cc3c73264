// Encodes full pages in group codes, and decodes them. Compiled without fused multiply-adds, so that results have the same bits as those of
// cache/codecs/group.py.
#include "group.h"

namespace quire {
namespace {

constexpr int SLOTS = 64;
constexpr int CHANNELS = 64;      // channels of a group
constexpr int MAX_D = 512;
constexpr int RANGES = 4 * SLOTS; // bytes of the minima and the steps of one group, float16 [64] each

template <class T>
void encode_rows(int D, const T* x, int64_t stride, const float* bias, uint8_t* out, uint8_t* ranges) {
    const int half = D / 2;
    float row[MAX_D + VL];
    float codes[MAX_D + VL];
    for (int t = 0; t < SLOTS; t++) {
        for (int d = 0; d < D; d++) row[d] = widen(x[t * stride + d]);
        for (int d = 0; bias && d < D; d++) row[d] -= bias[d];
        for (int start = 0; start < D; start += CHANNELS) {
            const int count = D - start < CHANNELS ? D - start : CHANNELS;
            const float* part = row + start;
            float lowest = part[0], highest = part[0];
            int d = 0;
            if (count >= VL) {
                vf low = load(part), high = low;
                for (d = VL; d + VL <= count; d += VL) low = min(low, load(part + d)), high = max(high, load(part + d));
                for (int lane = 0; lane < VL; lane++) lowest = low[lane] < lowest ? low[lane] : lowest, highest = high[lane] > highest ? high[lane] : highest;
            }
            for (; d < count; d++) lowest = part[d] < lowest ? part[d] : lowest, highest = part[d] > highest ? part[d] : highest;
            uint8_t* at = ranges + start / CHANNELS * RANGES + 2 * t;
            const uint16_t low_bits = half_bits(lowest + 0.0f);   // never minus zero
            std::memcpy(at, &low_bits, 2);
            const float low = half_value(at), span = highest - low;
            const uint16_t step_bits = half_bits((span > 0 ? span : 0.0f) * (1.0f / 15));
            std::memcpy(at + 2 * SLOTS, &step_bits, 2);
            const float step = half_value(at + 2 * SLOTS), divisor = step > 0 ? step : 1.0f;
            // Bytes past the group's end belong to the next group, or are not read.
            for (d = 0; d < count; d += VL) {
                const vf scaled = (load(part + d) - low) / divisor;
                // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
                store(codes + start + d, min(max(scaled, vf{}), splat(15.0f)) + 12582912.0f - 12582912.0f);
            }
        }
        for (int j = 0; j < half; j++) out[t * half + j] = static_cast<uint8_t>(static_cast<int>(codes[j]) | static_cast<int>(codes[half + j]) << 4);
    }
}

template <class T>
void decode_rows(int D, const uint8_t* pairs, const uint8_t* ranges, const float* bias, T* out) {
    const int half = D / 2;
    struct Range {
        float low[SLOTS], step[SLOTS];
    } range[MAX_D / CHANNELS];
    for (int start = 0; start < D; start += CHANNELS, ranges += RANGES)
        for (int t = 0; t < SLOTS; t += VL) {
            store(range[start / CHANNELS].low + t, load(reinterpret_cast<const f16*>(ranges) + t));
            store(range[start / CHANNELS].step + t, load(reinterpret_cast<const f16*>(ranges) + SLOTS + t));
        }
    for (int t = 0; t < SLOTS; t++) {
        const uint8_t* row = pairs + t * half;
        T *first = out + t * D, *second = first + half;
        int j = 0;
        // If both halves are whole vectors, no vector spans two groups, because a group is several vectors.
        for (; half % VL == 0 && j < half; j += VL) {
            const vu both = (vu)bytes(row + j);
            const Range &lower = range[j / CHANNELS], &upper = range[(half + j) / CHANNELS];
            vf a = lower.low[t] + __builtin_convertvector((vi)(both & 15), vf) * lower.step[t];
            vf b = upper.low[t] + __builtin_convertvector((vi)(both >> 4), vf) * upper.step[t];
            if (bias) a += load(bias + j), b += load(bias + half + j);
            store(first + j, a);
            store(second + j, b);
        }
        for (; j < half; j++) {
            const Range &lower = range[j / CHANNELS], &upper = range[(half + j) / CHANNELS];
            narrow(first + j, lower.low[t] + static_cast<float>(row[j] & 15) * lower.step[t] + (bias ? bias[j] : 0.0f));
            narrow(second + j, upper.low[t] + static_cast<float>(row[j] >> 4) * upper.step[t] + (bias ? bias[half + j] : 0.0f));
        }
    }
}

template <class T>
void encode_both(int D, const void* k, const void* v, int64_t stride, const float* bias, uint8_t* page) {
    const GroupLayout at = group_layout(D);
    encode_rows(D, static_cast<const T*>(k), stride, bias, page, page + at.key_ranges);
    encode_rows(D, static_cast<const T*>(v), stride, nullptr, page + at.values, page + at.value_ranges);
}

}  // namespace

GroupLayout group_layout(int D) {
    const int ranges = (D + CHANNELS - 1) / CHANNELS * RANGES;
    return {SLOTS * D / 2, SLOTS * D, SLOTS * D + ranges, SLOTS * D + 2 * ranges};
}

void encode_groups(int D, Kind kind, const void* k, const void* v, int64_t stride, const float* bias, uint8_t* page) {
    if (kind == DENSE_BF16) encode_both<bf16>(D, k, v, stride, bias, page);
    else if (kind == DENSE_F16) encode_both<f16>(D, k, v, stride, bias, page);
    else encode_both<float>(D, k, v, stride, bias, page);
}

template <class T>
void decode_groups(int D, const uint8_t* page, const float* bias, T* k, T* v) {
    const GroupLayout at = group_layout(D);
    if (k) decode_rows(D, page, page + at.key_ranges, bias, k);
    if (v) decode_rows(D, page + at.values, page + at.value_ranges, nullptr, v);
}

template void decode_groups(int, const uint8_t*, const float*, float*, float*);
template void decode_groups(int, const uint8_t*, const float*, bf16*, bf16*);

}  // namespace quire

using namespace quire;

// For tests, and for pages that are encoded outside a step: n pages of one head, keys and values T [n, 64, D]; bias [D] of the keys, or null.
QUIRE_API void quire_group_encode(int D, int kind, const void* k, const void* v, const float* bias, int64_t n, uint8_t* pages) {
    const int64_t step = static_cast<int64_t>(kind == DENSE_F32 ? 4 : 2) * 64 * D, page_bytes = group_layout(D).page_bytes;
    parallel_for(n, 1, [&](int64_t i) {
        encode_groups(D, static_cast<Kind>(kind), static_cast<const uint8_t*>(k) + i * step, static_cast<const uint8_t*>(v) + i * step, D, bias,
                      pages + i * page_bytes);
    });
}

// Decodes to float32 keys and values [n, 64, D].
QUIRE_API void quire_group_decode(int D, const uint8_t* pages, const float* bias, int64_t n, float* k, float* v) {
    const int64_t page_bytes = group_layout(D).page_bytes;
    parallel_for(n, 1, [&](int64_t i) { decode_groups(D, pages + i * page_bytes, bias, k + i * 64 * D, v + i * 64 * D); });
}
