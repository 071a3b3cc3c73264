// Products with weights packed in panels; see linear.cpp and packed.h.
#pragma once
#include "packed.h"

namespace quire {

// Outputs that are stored in the same way: panels of 16-bit pairs or of packed blocks.
QUIRE_STRUCT(Part,
    (const uint8_t*, panels)
    (int64_t, kind)     // of Weights
    (int64_t, outputs)  // gated: the number of gates
)

constexpr int MOST_PARTS = 4;

// At most MOST_PARTS parts with the same inputs; their outputs are concatenated. A gated matrix has one part.
QUIRE_STRUCT(Matrix,
    (const Part*, parts)
    (int64_t, num_parts)
    (const void*, bias)  // in the rows' number format; gated: of gates, then of ups; or null
    (int64_t, outputs) (int64_t, inputs) (int64_t, gated)  // gated: a Gate
)

// x [rows, inputs] of one number format, rows x_stride apart -> out [rows, outputs] of out_kind: the format of x, or float32. Scratch holds the rows
// as integers; it is used only if a part is packed. next: the matrix of the following product, or null; threads that have no more panels begin to
// prefetch it. In a region, every member must make this call.
QUIRE_STRUCT(Rows,
    (int64_t, kind)  // format of x: DENSE_BF16, DENSE_F16 or DENSE_F32
    (const void*, x)
    (int64_t, stride) (int64_t, count)
    (void*, scratch)
)
void multiply(const Matrix& matrix, const Rows& rows, int out_kind, void* out, const Matrix* next = nullptr);

}  // namespace quire
