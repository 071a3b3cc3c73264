// All layers of a decoder in one call, for weights in panels and bf16 rows. models/decoder.py does the same layer by layer from Python.
//
//     residual += norm(mixer(norm(residual)));  residual += norm(ffn(norm(residual)))
//
// The record of a layer says which of these norms it has, and its kinds of mixer and feed-forward part.
//
// A decode step has seven operations per layer, of 5 to 40 us each. A call from Python costs 3 to 5 us, a parallel region 1 to 2 us. So all threads
// run this code in one region, and share the loops inside the kernels.
#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace quire {

// A norm of the residual stream, [E] each. weight is null if the layer has no such norm, bias if the norm has none.
QUIRE_STRUCT(StackNorm,
    (const void*, weight) (const void*, bias)
)

QUIRE_STRUCT(StackLayer,
    (Matrix, qkv) (Matrix, o)
    (Matrix, up)                                      // gates and ups if the part is gated
    (Matrix, down)
    (StackNorm, attn) (StackNorm, attn_out) (StackNorm, mlp) (StackNorm, mlp_out)
    (StackNorm, next)                                 // of the next layer's input, or the model's last, fused with the sum before it
    (const void*, q_norm) (const void*, k_norm)       // [D], or [H * G * D] and [H * D] if norms_rows; or null
    (const void*, channel_scales)                     // [D], factors of the channels of queries; or null
    (int64_t, kv_heads) (int64_t, group) (int64_t, head_dim)
    (int64_t, norms_rows) (int64_t, parallel) (int64_t, sums)   // see models/shape.py
    (int64_t, gate)                                   // a Gate; 0: the part is plain
    (int64_t, activation)                             // of a plain part: an Activation
    (double, residual_scale)
    (double, position_share) (int64_t, position_step) // queries are multiplied by 1 + share * log(1 + position / step); 0: they are not
)

// Buffers of R bf16 rows: residual and x [R, E] are updated, the others are scratch, for the widest layer.
QUIRE_STRUCT(StackRows,
    (void*, residual) (void*, x)
    (void*, qkv)            // [R, (H * G + 2 H) * D]
    (void*, q) (void*, k)   // [R, H * G, D], [R, H, D]: only if they are normalised or scaled
    (void*, attended)       // [R, H * G * D]
    (void*, wide)           // [R, 2 F]: only if gates and ups are stored differently
    (void*, inner)          // [R, F]
    (void*, out)            // [R, E]
    (void*, beside)         // [R, E]: the feed-forward part's output where both parts are parallel
    (void*, integers)       // rows of a packed product: quire_quantized_bytes of the largest number of inputs
)

// is_layer: norms subtract the mean. is_fused: x is the first layer's normalised input, and each layer leaves that of the next one there.
QUIRE_STRUCT(StackKind,
    (double, eps) (int64_t, is_layer) (int64_t, is_fused)
)

namespace {

// The steps of a layer over the rows of a step.
struct LayerRun {
    const StackKind& kind;
    const StackLayer& layer;
    const StackRows& r;
    Plan& plan;
    int64_t rows;

    int64_t width() const { return layer.o.outputs; }

    void product(const Matrix& m, const void* x, void* out, const Matrix* next) const {
        multiply(m, {DENSE_BF16, x, m.inputs, rows, r.integers}, DENSE_BF16, out, next);
    }

    void norm(const StackNorm& of, const void* x, void* out) const {
        const float eps = static_cast<float>(kind.eps);
        if (kind.is_layer) quire_layer_norm(DENSE_BF16, x, of.weight, of.bias, eps, rows, width(), out);
        else quire_add_norm(DENSE_BF16, x, width(), nullptr, of.weight, eps, rows, 1, width(), out);
    }

    // Adds the output of a part to the residual stream. Returns the next part's input.
    const void* add(const StackNorm& out_norm, const StackNorm& in_norm) const {
        if (out_norm.weight) norm(out_norm, r.out, r.out);
        const float scale = static_cast<float>(layer.residual_scale);
        if (in_norm.weight && !kind.is_layer && scale == 1) {
            quire_add_norm(DENSE_BF16, r.out, width(), r.residual, in_norm.weight, static_cast<float>(kind.eps), rows, 1, width(), r.x);
            return r.x;
        }
        quire_add_scaled(r.out, scale, r.residual, rows, width());
        if (!in_norm.weight) return r.residual;
        norm(in_norm, r.residual, r.x);
        return r.x;
    }

    void mixer(int index, const void* x) const {
        const int64_t H = layer.kv_heads, heads = H * layer.group, D = layer.head_dim, stride = layer.qkv.outputs;
        const float eps = static_cast<float>(kind.eps);
        product(layer.qkv, x, r.qkv, &layer.o);
        const bf16* q = static_cast<const bf16*>(r.qkv);
        const bf16* k = q + heads * D;
        plan.k = k, plan.k_stride = stride;
        plan.v = k + H * D, plan.v_stride = stride;
        int64_t q_stride = stride;
        if (layer.q_norm) {
            const int64_t parts = layer.norms_rows ? 1 : heads, k_parts = layer.norms_rows ? 1 : H;
            quire_add_norm(DENSE_BF16, q, stride, nullptr, layer.q_norm, eps, rows, parts, heads * D / parts, r.q);
            quire_add_norm(DENSE_BF16, k, stride, nullptr, layer.k_norm, eps, rows, k_parts, H * D / k_parts, r.k);
            q = static_cast<const bf16*>(r.q), q_stride = heads * D;
            plan.k = r.k, plan.k_stride = H * D;
        }
        if (layer.channel_scales || layer.position_step) {
            const double share = layer.position_share;
            quire_scale_queries(q, q_stride, layer.channel_scales, plan.positions, share, layer.position_step, rows, heads, D, r.q);
            q = static_cast<const bf16*>(r.q), q_stride = heads * D;
        }
        quire_attend(&plan, index, q, q_stride, r.attended);
        product(layer.o, r.attended, r.out, &layer.up);
    }

    void ffn(const void* x, void* out, const Matrix* next) const {
        const bool is_apart = layer.gate && !layer.up.gated;
        product(layer.up, x, is_apart ? r.wide : r.inner, &layer.down);
        if (is_apart) quire_gated(DENSE_BF16, static_cast<int>(layer.gate), r.wide, rows, layer.down.inputs, r.inner);
        if (!layer.gate) quire_activate(static_cast<int>(layer.activation), r.inner, rows, layer.down.inputs);
        product(layer.down, r.inner, out, next);
    }

    // x: the input of both parts, if is_fused.
    void run(int index, const Matrix* next) const {
        const void* x = kind.is_fused ? r.x : r.residual;
        if (layer.attn.weight && !layer.sums && !kind.is_fused) norm(layer.attn, r.residual, r.x), x = r.x;
        mixer(index, x);
        if (layer.parallel) {
            ffn(x, r.beside, next);
            quire_add_scaled(r.beside, 1, r.out, rows, width());
        } else {
            x = add(layer.attn_out, layer.sums ? StackNorm{} : layer.mlp);
            if (layer.sums) norm(layer.attn, r.residual, r.residual);
            ffn(x, r.out, next);
        }
        add(layer.mlp_out, layer.next);
        if (layer.sums) norm(layer.mlp, r.residual, r.residual);
    }
};

}  // namespace
}  // namespace quire

using namespace quire;

QUIRE_EXPORT_FIELDS(StackNorm)
QUIRE_EXPORT_FIELDS(StackLayer)
QUIRE_EXPORT_FIELDS(StackRows)
QUIRE_EXPORT_FIELDS(StackKind)

QUIRE_API void quire_stack(const StackKind* kind, const StackLayer* layers, int64_t num_layers, const Plan* plan, const StackRows* r, int64_t rows) {
    run_region([&] {
        Plan mine = *plan;   // its keys and values follow the layer
        for (int64_t l = 0; l < num_layers; l++)
            LayerRun{*kind, layers[l], *r, mine, rows}.run(static_cast<int>(l), l + 1 < num_layers ? &layers[l + 1].qkv : nullptr);
    });
}
