// Packs the blocks of a GGUF file into panels; see packed.h. If the format of panels changes, increase LAYOUT in models/cpu_panels.py.
#include "packed.h"

namespace quire {
namespace {

// One output's block, as in the file. d, m: bits of the float16s. scales, minima: bytes per group. codes: before the offset is subtracted.
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

}  // namespace
}  // namespace quire

using namespace quire;

// Packs blocks [N, blocks of a row], as in a file, into panels, which must be zero. Gated: N gates, then N ups; a panel has 16 of each.
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
