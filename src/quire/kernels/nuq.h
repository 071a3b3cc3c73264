// Pages of the codec nuq (non-uniform codes). cache/codecs/nuq.py defines the layout and the arithmetic.
#pragma once
#include "common.h"

namespace quire {

constexpr int PAGE = 64;            // slots
constexpr int CODEBOOK_SIZE = 32;   // centroids of a codebook; a narrower code uses only the first ones
constexpr int BLOCK_PAIRS = 4;
constexpr int SLOT_BYTES = 3 * PAGE;
constexpr int LINE = 64;            // bytes

// The tables for the pages of one layer and head. attention/nuq.py builds them and has a mirror of the struct.
QUIRE_STRUCT(NuqHead,
    (const uint8_t*, order)          // [D/2] pairs of channels in the order of their codes
    (const uint8_t*, bits)           // [D/8] width of each block of four pairs
    (const float*, key_edges)        // [D, 31]
    (const float*, key_codebooks)    // [D, 32]
    (const float*, key_weight)       // [D]
    (const float*, value_edges)      // [31]
    (const float*, value_codebooks)  // [32]
    (const uint16_t*, key_lookup)    // bf16 [D, 32]: each channel's codebook, repeated to fill the register
    (const uint16_t*, value_lookup)  // bf16 [32]
    (int32_t, key_slots) (int32_t, value_bits) (int32_t, value_slots)  // counts
    (int32_t, at_key_slots) (int32_t, at_values) (int32_t, at_ranges) (int32_t, at_value_slots)  // bytes from the page's start
    (int32_t, page_bytes)
)

// Calls body(width, place) for the parts of a code, widest first. A part holds the `width` bits of the code from bit `place` on.
template <class Body>
inline void for_parts(int bits, const Body& body) {
    for (int width = 4; width; width /= 2)
        if (bits & width) bits -= width, body(width, bits);
}

// Encodes keys and values [64, D] of a number format, rows `stride` elements apart. Rows below `zeros` are encoded as zero.
void encode_page(const NuqHead& head, int D, Kind kind, const void* k, const void* v, int64_t stride, int zeros, uint8_t* page);

// Decodes to float32 [64, D] each; null for an output that is not needed.
void decode_page(const NuqHead& head, int D, const uint8_t* page, float* k, float* v);

}  // namespace quire
