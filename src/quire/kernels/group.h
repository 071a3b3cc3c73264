// Pages of group codes; defined by cache/codecs/group.py, whose layout and arithmetic this repeats.
#pragma once
#include "common.h"

namespace quire {

// The layout of a page for heads of D channels: offsets in bytes from its start, where the keys are.
struct GroupLayout {
    int values, key_ranges, value_ranges, page_bytes;
};
GroupLayout group_layout(int D);

// Encodes keys and values T [64, D], rows `stride` elements apart. The bias [D] is subtracted from keys unless it is null.
void encode_groups(int D, Kind kind, const void* k, const void* v, int64_t stride, const float* bias, uint8_t* page);

// Decodes to T [64, D] each, float or bf16; null for an output that is not needed.
template <class T>
void decode_groups(int D, const uint8_t* page, const float* bias, T* k, T* v);

}  // namespace quire
