// Products with weights packed in panels; see linear.cpp and packed.h.
#pragma once
#include "packed.h"

namespace quire {

// Outputs that are stored alike: panels of 16-bit pairs or of packed blocks.
QUIRE_STRUCT(Part,
    (const uint8_t*, panels)
    (int64_t, kind)     // of Weights
    (int64_t, outputs)  // gated: as many as there are gates
)

constexpr int MOST_PARTS = 4;

// Parts one below the other, their inputs the same, MOST_PARTS of them at most; a gated one has one part.
QUIRE_STRUCT(Matrix,
    (const Part*, parts)
    (int64_t, num_parts)
    (const void*, bias)  // of the rows' kind of number, gated: gates' and ups'; or null
    (int64_t, outputs) (int64_t, inputs) (int64_t, gated)
)

// x [rows, inputs], numbers of one kind, rows x_stride apart -> out [rows, outputs] of out_kind: that of x, or float32. Scratch is for rows as
// integers, and read only where a part is packed. next, if not null, is what will be multiplied with afterwards: the threads begin to fetch it when
// they run out of panels. A call of every member where the calling thread is in a team.
QUIRE_STRUCT(Rows,
    (int64_t, kind)  // of x: DENSE_BF16, DENSE_F16 or DENSE_F32
    (const void*, x)
    (int64_t, stride) (int64_t, count)
    (void*, scratch)
)
void multiply(const Matrix& matrix, const Rows& rows, int out_kind, void* out, const Matrix* next = nullptr);

}  // namespace quire
