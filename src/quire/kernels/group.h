// Pages of group codes; defined by cache/codecs/group.py, whose layout and arithmetic this repeats.
#pragma once
#include "common.h"

namespace quire {

// Where things lie in a page of heads of D channels, in bytes from its start; keys begin it.
struct GroupLayout {
    int values, key_ranges, value_ranges, page_bytes;
};
GroupLayout group_layout(int D);

// Encodes keys and values T [64, D], rows `stride` elements apart; keys less bias [D], or as they are if it is null.
void encode_groups(int D, Kind kind, const void* k, const void* v, int64_t stride, const float* bias, uint8_t* page);

// The other way round: T [64, D] each, or null for one that is not wanted; float or bf16.
template <class T>
void decode_groups(int D, const uint8_t* page, const float* bias, T* k, T* v);

}  // namespace quire
