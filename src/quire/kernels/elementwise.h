// Norms and activations for other kernels; see elementwise.cpp.
#pragma once
#include "common.h"

namespace quire {

// Activations of plain feed-forward parts.
enum Activation { RELU = 0, RELU_SQUARED = 1 };

}  // namespace quire

QUIRE_API void quire_add_norm(int kind, const void* x, int64_t x_stride, void* residual, const void* weight, float eps, int64_t rows,
                              int64_t heads, int64_t width, void* out);
QUIRE_API void quire_layer_norm(int kind, const void* x, const void* weight, const void* bias, float eps, int64_t rows, int64_t width, void* out);
QUIRE_API void quire_gated(int kind, int activation, const void* gate_up, int64_t rows, int64_t width, void* out);
QUIRE_API void quire_activate(int activation, void* x, int64_t rows, int64_t width);
QUIRE_API void quire_add_scaled(const void* x, float scale, void* sum, int64_t rows, int64_t width);
QUIRE_API void quire_scale_queries(const void* q, int64_t q_stride, const void* channel_scales, const int32_t* positions, double share, int64_t step,
                                   int64_t rows, int64_t heads, int64_t width, void* out);
