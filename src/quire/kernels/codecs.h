// The interface between attention and the codecs of sealed pages. A codec is a case in each function here, a Kind in common.h, and a row of
// SOURCE_FLAGS in build.py. The codec nuq also has its own matrix products (encoded_panels.h, encoded_rows.h).
#pragma once
#include <type_traits>
#include "attention.h"
#include "group.h"

namespace quire {

constexpr int P = PAGE;           // page tokens
constexpr int UNIT = 128;         // bytes a page id counts by

// A page that a thread will read.
// kind: its format. valid: slots from this one on need not be read. mask: the visible slots, as bits. base: position of the first slot.
// positions: of all slots if they are not consecutive, else null. Only for encoded pages: the tables of the head's codec, and the exact keys and
// values T [2, sinks, D] of the first slots, or null.
struct Page {
    const uint8_t* image;
    int kind, valid;
    uint64_t mask;
    int base;
    const int32_t* positions;
    const void* tables;
    const uint8_t* sinks;
};

inline bool is_encoded(int kind) { return kind >= NUQ; }   // column sums are no keys and values

inline const NuqHead& nuq_head(const Page& page) { return *static_cast<const NuqHead*>(page.tables); }

// The tables of a codec for one head of a layer, or null if the codec has none. attention/ builds them.
inline const void* tables_of(const LayerPlan& plan, int kind, int head) {
    const int64_t lane = plan.first_lane + head;
    switch (kind) {
    case NUQ: return static_cast<const NuqHead*>(plan.codec) + lane;
    case GROUP: return plan.codec ? static_cast<const float*>(plan.codec) + lane * plan.D : nullptr;
    default: return nullptr;
    }
}

// Offset of the values of an encoded page, and the size of the page, in bytes. Keys are at offset 0.
struct Extent {
    int values, end;
};
inline Extent extent_of(const Page& page, int D) {
    switch (page.kind) {
    case NUQ: return {nuq_head(page).at_values, nuq_head(page).page_bytes};
    case GROUP: return {group_layout(D).values, group_layout(D).page_bytes};
    default: __builtin_trap();
    }
}

// Encodes keys and values [64, D] of a number format of dense pages. Rows below `zeros` are encoded as zero. Only nuq has sinks, so other codecs
// ignore `zeros`.
inline void encode(int kind, const void* tables, int D, Kind type, const void* k, const void* v, int zeros, uint8_t* image) {
    switch (kind) {
    case NUQ: return encode_page(*static_cast<const NuqHead*>(tables), D, type, k, v, D, zeros, image);
    case GROUP: return encode_groups(D, type, k, v, D, static_cast<const float*>(tables), image);
    default: __builtin_trap();
    }
}

// Decodes an encoded page to keys and values T [64, D]; null for an output that is not needed. T is float, or bf16 for every codec but nuq.
template <class T>
inline void decode(const Page& page, int D, T* k, T* v) {
    switch (page.kind) {
    case NUQ:
        if constexpr (std::is_same_v<T, float>) return decode_page(nuq_head(page), D, page.image, k, v);
        else __builtin_trap();
    case GROUP: return decode_groups(D, page.image, static_cast<const float*>(page.tables), k, v);
    default: __builtin_trap();
    }
}

}  // namespace quire
