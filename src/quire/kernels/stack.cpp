// All layers of a gated decoder in one call, for weights in panels and bf16 rows. models/decoder.py does the same layer by layer from Python.
//
//     q, k, v = qkv(x);  x = norm(residual += o(attend(q)));  x = norm(residual += down(gated(x)))
//
// A decode step has seven operations per layer, of 5 to 40 us each. A call from Python costs 3 to 5 us, a parallel region 1 to 2 us. So all threads
// run this code in one region, and share the loops inside the kernels.
#include "attention.h"
#include "linear.h"

QUIRE_API void quire_add_norm(int kind, const void* x, int64_t x_stride, void* residual, const void* weight, float eps, int64_t rows,
                              int64_t heads, int64_t width, void* out);
QUIRE_API void quire_gated(int kind, int activation, const void* gate_up, int64_t rows, int64_t width, void* out);

namespace quire {

QUIRE_STRUCT(StackLayer,
    (Matrix, qkv) (Matrix, o) (Matrix, gate_up) (Matrix, down)
    (const void*, q_norm) (const void*, k_norm)       // [D], or null
    (const void*, mlp_norm) (const void*, next_norm)  // [E]
)

// Buffers of R bf16 rows: residual and x [R, E] are updated, the others are scratch.
QUIRE_STRUCT(StackRows,
    (void*, residual) (void*, x)
    (void*, qkv)            // [R, (H * G + 2 H) * D]
    (void*, q) (void*, k)   // [R, H * G, D], [R, H, D]: only if they are normalised
    (void*, attended)       // [R, H * G * D]
    (void*, wide)           // [R, 2 F]: only if gates and ups are stored differently
    (void*, inner)          // [R, F]
    (void*, out)            // [R, E]
    (void*, integers)       // rows of a packed product: quire_quantized_bytes of the largest number of inputs
)

}  // namespace quire

using namespace quire;

QUIRE_EXPORT_FIELDS(StackLayer)
QUIRE_EXPORT_FIELDS(StackRows)

QUIRE_API void quire_stack(const StackLayer* layers, int64_t num_layers, float eps, const Plan* plan, const StackRows* r, int64_t rows) {
    const auto add_norm = [&](const void* weight, int64_t width) {
        quire_add_norm(DENSE_BF16, r->out, width, r->residual, weight, eps, rows, 1, width, r->x);
    };
    const bool normed = layers[0].q_norm != nullptr;
    const bf16* q = static_cast<const bf16*>(r->qkv);
    const auto product = [&](const Matrix& m, const void* x, void* out, const Matrix* next) {
        multiply(m, {DENSE_BF16, x, m.inputs, rows, r->integers}, DENSE_BF16, out, next);
    };
    run_region([&] {
      Plan own = *plan;   // every thread sets the keys and values of the layer that it is in
      for (int64_t l = 0; l < num_layers; l++) {
        const StackLayer& layer = layers[l];
        const int64_t H = plan->layers[l].H, heads = H * plan->layers[l].G, D = plan->layers[l].D, width = layer.qkv.outputs;
        const bf16* k = q + heads * D;
        own.k = normed ? r->k : k, own.k_stride = normed ? H * D : width;
        own.v = k + H * D, own.v_stride = width;
        product(layer.qkv, r->x, r->qkv, &layer.o);
        if (normed) {
            quire_add_norm(DENSE_BF16, q, width, nullptr, layer.q_norm, eps, rows, heads, D, r->q);
            quire_add_norm(DENSE_BF16, k, width, nullptr, layer.k_norm, eps, rows, H, D, r->k);
        }
        quire_attend(&own, static_cast<int>(l), normed ? r->q : q, normed ? heads * D : width, r->attended);
        product(layer.o, r->attended, r->out, &layer.gate_up);
        add_norm(layer.mlp_norm, layer.o.outputs);
        product(layer.gate_up, r->x, layer.gate_up.gated ? r->inner : r->wide, &layer.down);
        if (!layer.gate_up.gated) quire_gated(DENSE_BF16, SILU, r->wide, rows, layer.down.inputs, r->inner);
        product(layer.down, r->inner, r->out, l + 1 < num_layers ? &layers[l + 1].qkv : nullptr);
        add_norm(layer.next_norm, layer.o.outputs);
      }
    });
}
