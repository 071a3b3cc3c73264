// Pages of group codes. cache/codecs/group.py defines the layout and the arithmetic.
#pragma once
#include "common.h"

namespace quire {

// The layout of a page for heads of D channels: offsets in bytes. Keys are at offset 0.
struct GroupLayout {
    int values, key_ranges, value_ranges, page_bytes;
};
GroupLayout group_layout(int D);

// Encodes keys and values [64, D] of a number format, rows `stride` elements apart. The bias [D] is subtracted from keys unless it is null.
void encode_groups(int D, Kind kind, const void* k, const void* v, int64_t stride, const float* bias, uint8_t* page);

// Decodes to keys and values T [64, D]; T is float or bf16. Null for an output that is not needed. The bias is added to keys.
template <class T>
void decode_groups(int D, const uint8_t* page, const float* bias, T* k, T* v);

}  // namespace quire
