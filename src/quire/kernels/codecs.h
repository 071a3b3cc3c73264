// What attention asks of the codecs of sealed pages. A codec is one case in each function here, a Kind in common.h, and a row of SOURCE_FLAGS in
// build.py. Non-uniform codes have products of their own besides (encoded_panels.h, encoded_rows.h).
#pragma once
#include <type_traits>
#include "attention.h"
#include "group.h"

namespace quire {

constexpr int P = PAGE;           // page tokens
constexpr int UNIT = 128;         // bytes a page id counts by

// A page that a thread will read: its image, its format, how many of its first slots are written, and which are seen; the position of its first
// slot, or the positions of all slots if they are not consecutive, else null. For an encoded page also the tables of its head's codec, and the exact
// rows T [2, sinks, D] of its first slots or null.
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

// The tables of one head's codec: its part of what the codec's case in attention/ has built, or null for a codec without tables.
inline const void* tables_of(const Plan& plan, int kind, int layer, int head) {
    const int64_t index = static_cast<int64_t>(layer) * plan.H + head;
    switch (kind) {
    case NUQ: return static_cast<const NuqHead*>(plan.codec) + index;
    case GROUP: return plan.codec ? static_cast<const float*>(plan.codec) + index * plan.D : nullptr;
    default: return nullptr;
    }
}

// Where the values of an encoded page begin and where it ends, in bytes from its start; keys come first.
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

// Encodes keys and values T [64, D] of a type of dense pages; the first `zeros` rows as if they were zero: nuq's alone,
// which is the only codec with sinks.
inline void encode(int kind, const void* tables, int D, Kind type, const void* k, const void* v, int zeros, uint8_t* image) {
    switch (kind) {
    case NUQ: return encode_page(*static_cast<const NuqHead*>(tables), D, type, k, v, D, zeros, image);
    case GROUP: return encode_groups(D, type, k, v, D, static_cast<const float*>(tables), image);
    default: __builtin_trap();
    }
}

// Keys and values of an encoded page, T [64, D] each, or null for those that are not wanted. T is float, or bf16 for codecs without products of
// their own.
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
