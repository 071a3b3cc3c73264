// The layers of a gated decoder in one call, for weights in bf16 panels: what models/decoder.py does layer by layer, without Python between.
//
//     q, k, v = qkv(x);  x = norm(residual += o(attend(q)));  x = norm(residual += down(gated(x)))
//
// A decode step has seven operations a layer of 5 to 40 us each; calls from Python cost 3 to 5 us apiece.
#include "attention.h"

QUIRE_API void quire_linear(const void* x, int64_t x_stride, int64_t rows, const void* packed, const void* bias, int64_t N, int64_t K, int gated,
                            void* out);
QUIRE_API void quire_add_norm(int kind, const void* x, int64_t x_stride, void* residual, const void* weight, float eps, int64_t rows,
                              int64_t heads, int64_t width, void* out);

namespace quire {

// A product: panels as quire_pack_linear makes them, and its bias or null.
struct Matrix {
    const void* packed;
    const void* bias;
    int64_t outputs, inputs;
};

struct StackLayer {
    Matrix qkv, o, gate_up, down;
    const void *q_norm, *k_norm;      // [D], or null
    const void *mlp_norm, *next_norm; // [E]
};

// Of R rows, bf16: residual and x [R, E] are updated, the others are scratch.
struct StackRows {
    void *residual, *x;
    void* qkv;                        // [R, (H * G + 2 H) * D]
    void *q, *k;                      // [R, H * G, D], [R, H, D]: only where they are normalised
    void* attended;                   // [R, H * G * D]
    void* inner;                      // [R, F]
    void* out;                        // [R, E]
};

}  // namespace quire

using namespace quire;

QUIRE_API void quire_stack(const StackLayer* layers, int64_t num_layers, float eps, Plan* plan, const StackRows* r, int64_t rows) {
    const int64_t H = plan->H, heads = H * plan->G, D = plan->D;
    const auto linear = [&](const Matrix& m, const void* x, void* out, bool gated = false) {
        quire_linear(x, m.inputs, rows, m.packed, m.bias, m.outputs, m.inputs, gated, out);
    };
    const auto add_norm = [&](const void* weight, int64_t width) {
        quire_add_norm(DENSE_BF16, r->out, width, r->residual, weight, eps, rows, 1, width, r->x);
    };
    for (int64_t l = 0; l < num_layers; l++) {
        const StackLayer& layer = layers[l];
        const int64_t width = layer.qkv.outputs;
        const bf16* q = static_cast<const bf16*>(r->qkv);
        const bf16* k = q + heads * D;
        int64_t q_stride = width;
        linear(layer.qkv, r->x, r->qkv);
        plan->v = k + H * D, plan->v_stride = width;
        plan->k = k, plan->k_stride = width;
        if (layer.q_norm) {
            quire_add_norm(DENSE_BF16, q, width, nullptr, layer.q_norm, eps, rows, heads, D, r->q);
            quire_add_norm(DENSE_BF16, k, width, nullptr, layer.k_norm, eps, rows, H, D, r->k);
            q = static_cast<const bf16*>(r->q), q_stride = heads * D;
            plan->k = r->k, plan->k_stride = H * D;
        }
        quire_attend(plan, static_cast<int>(l), q, q_stride, r->attended);
        linear(layer.o, r->attended, r->out);
        add_norm(layer.mlp_norm, layer.o.outputs);
        linear(layer.gate_up, r->x, r->inner, true);
        linear(layer.down, r->inner, r->out);
        add_norm(layer.next_norm, layer.o.outputs);
    }
}
