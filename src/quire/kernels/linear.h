// Products with weights packed in panels; see linear.cpp.
#pragma once
#include "common.h"

namespace quire {

// Panels as quire_pack_linear makes them, and the bias or null.
struct Matrix {
    const void* packed;
    const void* bias;
    int64_t outputs, inputs;
};

// x bf16 [rows, inputs], rows x_stride apart -> out [rows, outputs]. next, if not null, is what will be multiplied with afterwards: the threads
// begin to fetch it when they run out of panels. A call of every member where the calling thread is in a team.
void multiply(const Matrix& matrix, bool gated, const void* x, int64_t x_stride, int64_t rows, void* out, const Matrix* next = nullptr);

}  // namespace quire
