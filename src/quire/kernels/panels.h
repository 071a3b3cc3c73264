// Where a page lies, and the two scratch panels that a work item makes from it: keys transposed, and values, in the layout of the matrix product.
#pragma once
#include "codecs.h"
#include "product.h"

namespace quire {

constexpr uint64_t ALL_SLOTS = ~0ull;

// Index of a chunk's page in Plan.table, for one head of the layer.
inline int64_t lane_of(const LayerPlan& plan, int head, int32_t chunk) {
    return static_cast<int64_t>(chunk) * plan.lanes + plan.first_lane + head;
}

// The visible slots of a chunk's page; 0 if the chunk has no page for this head.
inline uint64_t mask_of(const LayerPlan& plan, int head, int32_t chunk) {
    return plan.masks && chunk >= 0 ? plan.masks[lane_of(plan, head, chunk)] : ALL_SLOTS;
}

// The address of a chunk's page for one head of the layer. Staged chunks have negative ids.
inline uint8_t* image_of(const LayerPlan& plan, int head, int32_t chunk) {
    if (chunk < 0) return plan.staged + (static_cast<int64_t>(~chunk) * plan.H + head) * plan.dense_page;
    return plan.arena + static_cast<int64_t>(plan.table[lane_of(plan, head, chunk)]) * UNIT;
}

// The exact keys and values of a chunk's first tokens, or null. All layers have heads of one size then.
inline uint8_t* sinks_of(const LayerPlan& plan, int head, int32_t chunk) {
    if (!plan.sinks || plan.sidecars[chunk] < 0) return nullptr;
    const int64_t bytes = static_cast<int64_t>(2) * plan.sinks * plan.D * (plan.kind == DENSE_F32 ? 4 : 2);
    return plan.arena + static_cast<int64_t>(plan.sidecars[chunk]) * UNIT + (plan.first_lane + head) * bytes;
}

// A chunk's page for one head of the layer. written: the number of its written slots; it may exceed the page.
inline Page page_at(const LayerPlan& plan, int head, int32_t chunk, int written) {
    const uint64_t mask = mask_of(plan, head, chunk);
    const int used = mask ? P - __builtin_clzll(mask) : 0;
    Page page{image_of(plan, head, chunk), chunk < 0 ? plan.kind : plan.kinds[chunk], written < used ? written : used, mask};
    if (is_encoded(page.kind)) page.tables = tables_of(plan, page.kind, head), page.sinks = sinks_of(plan, head, chunk);
    return page;
}

// A chunk's page with its positions: those of its slots, or consecutive ones from the chunk's own base, or else from `base` on. Slots at consecutive
// positions are written below position `end`; slots with their own positions are all written.
inline Page placed_page(const LayerPlan& plan, int head, int32_t chunk, int base, int end) {
    const int32_t* positions = nullptr;
    if (chunk >= 0) {
        if (plan.bases[chunk] >= 0) base = plan.bases[chunk];
        const int32_t found = plan.slot_positions[lane_of(plan, head, chunk)];
        if (found >= 0) positions = reinterpret_cast<const int32_t*>(plan.arena + static_cast<int64_t>(found) * UNIT);
    }
    Page page = page_at(plan, head, chunk, positions ? P : end - base);
    page.base = base, page.positions = positions;
    return page;
}

inline void count_read(const LayerPlan& plan, int head, int32_t chunk) {
    if (plan.reads && chunk >= 0) __atomic_fetch_add(plan.reads + static_cast<int64_t>(chunk) * plan.most_heads + head, 1, __ATOMIC_RELAXED);
}

// Prefetches the written keys (which = 0) or values (1) of a page.
inline Prefetcher prefetch(const Page& page, int D, int which) {
    if (is_encoded(page.kind)) {
        const Extent at = extent_of(page, D);
        return which ? Prefetcher{page.image + at.values, page.image + at.end, 2} : Prefetcher{page.image, page.image + at.values, 2};
    }
    const int row = D * (page.kind == DENSE_F32 ? 4 : 2);
    const uint8_t* at = page.image + which * P * row;
    return {at, at + page.valid * row, 2};
}

// y = rotated x, times `scale`, both [D]: halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). If the tables are null, y = x * scale.
template <class T>
inline void rotate(const T* x, const float* cos, const float* sin, int D, float scale, float* y) {
    const int half = D / 2;
    if (cos == nullptr) {
        for (int i = 0; i < D; i++) y[i] = widen(x[i]) * scale;
        return;
    }
    int i = 0;
    for (; i + VL <= half; i += VL) {
        const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(y + i, (a * c - b * s) * scale);
        store(y + half + i, (b * c + a * s) * scale);
    }
    for (; i < half; i++) {
        const float a = widen(x[i]), b = widen(x[half + i]);
        y[i] = (a * cos[i] - b * sin[i]) * scale;
        y[half + i] = (b * cos[i] + a * sin[i]) * scale;
    }
}

// ---- scratch panels of a page ----------------------------------------------------------------------------------------------------------

// VL floats, or VL pairs of bf16, of a key from column d on. Columns from D on are zero.
template <class Math, class T>
inline vu key_part(const T* row, int d, int D) {
    constexpr int WIDTH = VL * Math::PAIR;
    T tail[WIDTH] = {};
    const T* source = row + d;
    if (d + WIDTH > D) {
        std::memcpy(tail, row + d, (D - d) * sizeof(T));
        source = tail;
    }
    if constexpr (Math::PAIR == 2) return *reinterpret_cast<const vu_loose*>(source);
    else return (vu)load(source);
}

// Keys [P, D] -> out [steps, P], rows `ld` apart. A step is PAIR columns; steps are padded with zeros to a multiple of VL. Slots from `valid` on are
// undefined, because their scores are hidden.
template <class Math, class T>
void keys_from(const T* k, int D, int valid, uint32_t* out, int ld, Prefetcher& ahead) {
    for (int t = 0; t < valid; t += VL) {
        for (int d = 0; d < D; d += VL * Math::PAIR) {
            ahead.step(VL * VL * Math::PAIR * static_cast<int>(sizeof(T)) / 128);
            vu block[VL];
            for (int i = 0; i < VL; i++) block[i] = key_part<Math>(k + (t + i) * D, d, D);
            transpose(block);
            for (int i = 0; i < VL; i++) *reinterpret_cast<vu_loose*>(out + (d / Math::PAIR + i) * ld + t) = block[i];
        }
    }
}

// Values [P, D] -> out [P / PAIR, columns]; columns: D rounded up to VL. Rows from `valid` on are zero, because unwritten slots may hold NaN.
template <class T>
void values_f32(const T* v, int D, int columns, int valid, uint32_t* out, Prefetcher& ahead) {
    for (int t = 0; t < P; t++) {
        ahead.step((D * static_cast<int>(sizeof(T)) + 63) / 64);
        float* row = reinterpret_cast<float*>(out + t * columns);
        if (t >= valid) {
            std::memset(row, 0, columns * 4);
            continue;
        }
        int d = 0;
        for (; d + VL <= D; d += VL) store(row + d, load(v + t * D + d));
        for (; d < columns; d++) row[d] = d < D ? widen(v[t * D + d]) : 0.0f;
    }
}

#if defined(__AVX512BF16__)
inline void values_bf16(const bf16* v, int D, int columns, int valid, uint32_t* out, Prefetcher& ahead) {
    typedef uint16_t v32h __attribute__((vector_size(64)));
    typedef uint16_t v32h_loose __attribute__((vector_size(64), aligned(2), may_alias));
    for (int t = 0; t < P; t += 2) {
        ahead.step((D + 31) / 32);
        uint32_t* row = out + t / 2 * columns;
        if (t >= valid) {
            std::memset(row, 0, columns * 4);
            continue;
        }
        const bf16* first = v + t * D;
        const bf16* second = first + D;
        int d = 0;
        if (t + 1 < valid) {
            for (; d + 32 <= D; d += 32) {
                const v32h a = *reinterpret_cast<const v32h_loose*>(first + d), b = *reinterpret_cast<const v32h_loose*>(second + d);
                const v32h lo = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12,
                                                        44, 13, 45, 14, 46, 15, 47);
                const v32h hi = __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27,
                                                        59, 28, 60, 29, 61, 30, 62, 31, 63);
                std::memcpy(row + d, &lo, 64);
                std::memcpy(row + d + 16, &hi, 64);
            }
        }
        for (; d < columns; d++) {
            const uint32_t a = d < D ? first[d].bits : 0, b = d < D && t + 1 < valid ? second[d].bits : 0;
            row[d] = a | b << 16;
        }
    }
}
#endif

// The two scratch panels of a dense page whose keys are stored rotated. For other pages see encoded_panels.h.
template <class Math>
void load_keys(const Page& page, int D, uint32_t* out, int ld, Prefetcher& ahead) {
    if constexpr (Math::PAIR == 2) {
        keys_from<Math>(reinterpret_cast<const bf16*>(page.image), D, page.valid, out, ld, ahead);
    } else if (page.kind == DENSE_BF16) {
        keys_from<Math>(reinterpret_cast<const bf16*>(page.image), D, page.valid, out, ld, ahead);
    } else if (page.kind == DENSE_F32) {
        keys_from<Math>(reinterpret_cast<const float*>(page.image), D, page.valid, out, ld, ahead);
    } else {
        keys_from<Math>(reinterpret_cast<const f16*>(page.image), D, page.valid, out, ld, ahead);
    }
}

template <class Math>
void load_values(const Page& page, int D, int columns, uint32_t* out, Prefetcher& ahead) {
    const int valid = page.valid;
#if defined(__AVX512BF16__)
    if constexpr (Math::PAIR == 2) return values_bf16(reinterpret_cast<const bf16*>(page.image) + P * D, D, columns, valid, out, ahead);
#endif
    if (page.kind == DENSE_BF16) values_f32(reinterpret_cast<const bf16*>(page.image) + P * D, D, columns, valid, out, ahead);
    else if (page.kind == DENSE_F32) values_f32(reinterpret_cast<const float*>(page.image) + P * D, D, columns, valid, out, ahead);
    else values_f32(reinterpret_cast<const f16*>(page.image) + P * D, D, columns, valid, out, ahead);
}

}  // namespace quire
