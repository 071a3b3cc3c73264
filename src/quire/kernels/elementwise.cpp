// Norms and activations, the steps between matrix products. Each makes one pass over its rows.
//
//     add_norm:  residual += x;  y = residual * rsqrt(mean(residual^2) + eps) * weight
//     layer_norm:  y = (x - mean(x)) * rsqrt(variance(x) + eps) * weight + bias
//     gated:     y = act(gate) * up
//
// Defined by models.layers.TorchOps; tests/kernels/test_elementwise.py compares the two.
#include "elementwise.h"

namespace quire {

namespace {

// With fewer elements, a second thread costs more than it saves: waking it takes about 5 us between two products of torch.
constexpr int64_t ELEMENTS_PER_THREAD = 8192;

int64_t grain_for(int64_t rows, int64_t width) {
    if (rows * width < 2 * ELEMENTS_PER_THREAD) return rows;
    const int64_t share = (rows + sharing_threads() - 1) / sharing_threads();
    return share > 0 ? share : 1;
}

template <class T>
void norm_row(const T* x, T* residual, const T* weight, float eps, int64_t width, T* out) {
    vf squares{};
    float tail = 0;
    int64_t i = 0;
    for (; i + VL <= width; i += VL) {
        vf v = load(x + i);
        if (residual) {
            v = v + load(residual + i);
            store(residual + i, v);
            // The norm is computed from the sum as it was stored, so that a 16-bit residual and its norm agree.
            v = load(residual + i);
        }
        squares += v * v;
    }
    for (; i < width; i++) {
        float v = widen(x[i]);
        if (residual) {
            narrow(residual + i, v + widen(residual[i]));
            v = widen(residual[i]);
        }
        tail += v * v;
    }
    const float scale = 1.0f / std::sqrt((sum(squares) + tail) / static_cast<float>(width) + eps);
    const T* source = residual ? residual : x;
    for (i = 0; i + VL <= width; i += VL) store(out + i, load(source + i) * scale * load(weight + i));
    for (; i < width; i++) narrow(out + i, widen(source[i]) * scale * widen(weight[i]));
}

template <class T>
void add_norm(const void* x, int64_t x_stride, void* residual, const void* weight, float eps, int64_t rows, int64_t heads, int64_t width,
              void* out) {
    parallel_for(rows * heads, grain_for(rows * heads, width), [&](int64_t i) {
        const T* source = static_cast<const T*>(x) + i / heads * x_stride + i % heads * width;
        T* res = residual ? static_cast<T*>(residual) + i * width : nullptr;
        norm_row(source, res, static_cast<const T*>(weight), eps, width, static_cast<T*>(out) + i * width);
    });
}

template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, float eps, int64_t width, T* out) {
    vf sums{};
    float tail = 0;
    int64_t i = 0;
    for (; i + VL <= width; i += VL) sums += load(x + i);
    for (; i < width; i++) tail += widen(x[i]);
    const float mean = (sum(sums) + tail) / static_cast<float>(width);
    vf squares{};
    tail = 0;
    for (i = 0; i + VL <= width; i += VL) {
        const vf v = load(x + i) - mean;
        squares += v * v;
    }
    for (; i < width; i++) tail += (widen(x[i]) - mean) * (widen(x[i]) - mean);
    const float scale = 1.0f / std::sqrt((sum(squares) + tail) / static_cast<float>(width) + eps);
    for (i = 0; i + VL <= width; i += VL) {
        const vf v = (load(x + i) - mean) * scale * load(weight + i);
        store(out + i, bias ? v + load(bias + i) : v);
    }
    for (; i < width; i++) narrow(out + i, (widen(x[i]) - mean) * scale * widen(weight[i]) + (bias ? widen(bias[i]) : 0.0f));
}

template <class T>
void layer_norm(const void* x, const void* weight, const void* bias, float eps, int64_t rows, int64_t width, void* out) {
    parallel_for(rows, grain_for(rows, width), [&](int64_t r) {
        const T* source = static_cast<const T*>(x) + r * width;
        layer_norm_row(source, static_cast<const T*>(weight), static_cast<const T*>(bias), eps, width, static_cast<T*>(out) + r * width);
    });
}

template <class T>
void gated(int64_t activation, const void* gate_up, int64_t rows, int64_t width, void* out) {
    parallel_for(rows, grain_for(rows, width), [&](int64_t r) {
        const T* gate = static_cast<const T*>(gate_up) + r * 2 * width;
        const T* up = gate + width;
        T* y = static_cast<T*>(out) + r * width;
        int64_t i = 0;
        for (; i + VL <= width; i += VL) store(y + i, activate(activation, load(gate + i)) * load(up + i));
        for (; i < width; i++) narrow(y + i, activate(activation, widen(gate[i])) * widen(up[i]));
    });
}

// The first index of the largest element of each row; -1 if this element is infinite or any element is NaN.
void argmax(const float* x, int64_t x_stride, int64_t rows, int64_t width, int64_t* out) {
    parallel_for(rows, 1, [&](int64_t r) {
        const float* row = x + r * x_stride;
        vf best = splat(-INFINITY);
        vi odd{};
        int64_t i = 0;
        for (; i + VL <= width; i += VL) {
            const vf v = load(row + i);
            best = max(best, v);
            odd |= v != v;
        }
        float top = largest(best);
        bool nan = false;
        for (int j = 0; j < VL; j++) nan |= odd[j] != 0;
        for (; i < width; i++) {
            const float v = row[i];
            nan |= v != v;
            top = v > top ? v : top;
        }
        out[r] = -1;
        if (nan || !(top < INFINITY) || !(top > -INFINITY)) return;
        for (i = 0; i + VL <= width; i += VL) {
            const vi equal = load(row + i) == splat(top);
            for (int j = 0; j < VL; j++)
                if (equal[j]) {
                    out[r] = i + j;
                    return;
                }
        }
        for (; i < width; i++)
            if (row[i] == top) {
                out[r] = i;
                return;
            }
    });
}

// Element i of row r becomes -infinity if bit i % 32 of words[r][i / 32] is clear. A row without words stays as it is.
void keep_allowed(float* x, int64_t x_stride, const uint32_t* const* words, int64_t rows, int64_t width) {
    parallel_for(rows, 1, [&](int64_t r) {
        if (!words[r]) return;
        float* row = x + r * x_stride;
        int64_t i = 0;
        for (; i + 32 <= width; i += 32) {
            const uint32_t allowed = words[r][i / 32];
            for (int j = 0; j < 32; j++) row[i + j] = allowed >> j & 1 ? row[i + j] : -INFINITY;
        }
        for (; i < width; i++)
            if (!(words[r][i / 32] >> i % 32 & 1)) row[i] = -INFINITY;
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

// x: `rows` rows x_stride apart, each with `heads` adjacent vectors of `width`, which are normalised separately. residual and out are dense. If
// residual is null, out is the norm of x alone.
QUIRE_API void quire_add_norm(int kind, const void* x, int64_t x_stride, void* residual, const void* weight, float eps, int64_t rows,
                              int64_t heads, int64_t width, void* out) {
    if (kind == DENSE_BF16) add_norm<bf16>(x, x_stride, residual, weight, eps, rows, heads, width, out);
    else if (kind == DENSE_F32) add_norm<float>(x, x_stride, residual, weight, eps, rows, heads, width, out);
    else add_norm<f16>(x, x_stride, residual, weight, eps, rows, heads, width, out);
}

// gate_up [rows, 2 * width] -> out [rows, width]. activation: a Gate
QUIRE_API void quire_gated(int kind, int activation, const void* gate_up, int64_t rows, int64_t width, void* out) {
    if (kind == DENSE_BF16) gated<bf16>(activation, gate_up, rows, width, out);
    else if (kind == DENSE_F32) gated<float>(activation, gate_up, rows, width, out);
    else gated<f16>(activation, gate_up, rows, width, out);
}

// x [rows, width] -> out [rows, width], which may be x. bias may be null.
QUIRE_API void quire_layer_norm(int kind, const void* x, const void* weight, const void* bias, float eps, int64_t rows, int64_t width, void* out) {
    if (kind == DENSE_BF16) layer_norm<bf16>(x, weight, bias, eps, rows, width, out);
    else if (kind == DENSE_F32) layer_norm<float>(x, weight, bias, eps, rows, width, out);
    else layer_norm<f16>(x, weight, bias, eps, rows, width, out);
}

// bf16 [rows, width]: sum += scale * x. The product is rounded before it is added, as a separate step would.
QUIRE_API void quire_add_scaled(const void* x, float scale, void* sum, int64_t rows, int64_t width) {
    parallel_for(rows, grain_for(rows, width), [&](int64_t r) {
        const bf16* source = static_cast<const bf16*>(x) + r * width;
        bf16* y = static_cast<bf16*>(sum) + r * width;
        int64_t i = 0;
        for (; i + VL <= width; i += VL) {
            bf16 scaled[VL];
            store(scaled, load(source + i) * scale);
            store(y + i, load(y + i) + load(scaled));
        }
        for (; i < width; i++) {
            bf16 scaled;
            narrow(&scaled, widen(source[i]) * scale);
            narrow(y + i, widen(y[i]) + widen(scaled));
        }
    });
}

// bf16 x [rows, width], in place. activation: an Activation. NaN stays NaN.
QUIRE_API void quire_activate(int activation, void* x, int64_t rows, int64_t width) {
    parallel_for(rows, grain_for(rows, width), [&](int64_t r) {
        bf16* y = static_cast<bf16*>(x) + r * width;
        int64_t i = 0;
        for (; i + VL <= width; i += VL) {
            const vf x = load(y + i), v = x < splat(0.0f) ? splat(0.0f) : x;
            store(y + i, activation == RELU_SQUARED ? v * v : v);
        }
        for (; i < width; i++) {
            const float v = widen(y[i]) < 0 ? 0.0f : widen(y[i]);
            narrow(y + i, activation == RELU_SQUARED ? v * v : v);
        }
    });
}

// bf16 q [rows, heads, width] with a row stride -> out, dense, which may be q. Multiplies by channel_scales [width], if there are any; then, if step
// is not 0, by 1 + share * log(1 + floor(position / step)). Each result is rounded.
QUIRE_API void quire_scale_queries(const void* q, int64_t q_stride, const void* channel_scales, const int32_t* positions, double share, int64_t step,
                                   int64_t rows, int64_t heads, int64_t width, void* out) {
    const bf16* scales = static_cast<const bf16*>(channel_scales);
    parallel_for(rows, grain_for(rows, heads * width), [&](int64_t r) {
        const bf16* source = static_cast<const bf16*>(q) + r * q_stride;
        bf16* y = static_cast<bf16*>(out) + r * heads * width;
        bf16 scaled[VL];
        bf16 factor;
        narrow(&factor, step ? 1.0f + static_cast<float>(share) * std::log1p(static_cast<float>(positions[r] / step)) : 1.0f);
        for (int64_t head = 0; head < heads; head++, source += width, y += width) {
            int64_t i = 0;
            for (; i + VL <= width; i += VL) {
                vf v = load(source + i);
                if (scales) store(scaled, v * load(scales + i)), v = load(scaled);
                store(y + i, v * widen(factor));
            }
            for (; i < width; i++) {
                scaled[0] = source[i];
                if (scales) narrow(scaled, widen(scaled[0]) * widen(scales[i]));
                narrow(y + i, widen(scaled[0]) * widen(factor));
            }
        }
    });
}

// x [rows, width] with a row stride -> int64 out [rows]
QUIRE_API void quire_argmax(const float* x, int64_t x_stride, int64_t rows, int64_t width, int64_t* out) {
    argmax(x, x_stride, rows, width, out);
}

// x [rows, width] with a row stride; words: an address for each row, or null
QUIRE_API void quire_keep_allowed(float* x, int64_t x_stride, const uint32_t* const* words, int64_t rows, int64_t width) {
    keep_allowed(x, x_stride, words, rows, width);
}
