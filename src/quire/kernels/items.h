// Shared by the work items of attention and sparse attention: pages of a piece, writing new keys and values, query rows, and visible slots.
#pragma once
#include "encoded_panels.h"
#include "queries.h"

namespace quire {

constexpr float LN2 = 0.6931471805599453f;

constexpr int TURNED_ROWS = 8;  // most query rows that are rotated for each page

// Cuts a thread's scratch into arrays that begin on cache lines.
struct ScratchArena {
    uint8_t* cursor;
    template <class T>
    T* take(size_t count) {
        uint8_t* at = cursor;
        cursor += (count * sizeof(T) + 63) / 64 * 64;
        return reinterpret_cast<T*>(at);
    }
};

// The page of chunk c of a piece, for one head of the layer.
inline Page page_of(const LayerPlan& plan, int head, const Piece& piece, int c) {
    return placed_page(plan, head, plan.indices[piece.first_index + c], piece.start + c * P,
                       plan.positions[piece.first_row + piece.num_rows - 1] + 1);
}

// Writes the key and value of one row and head into their slot. The key is rotated first, unless pages hold keys before rotation. Pages of open and
// staged chunks are dense, in the number format of the step.
template <class T>
inline void write_row(const LayerPlan& plan, int row, int head) {
    const int D = plan.D, position = plan.positions[row], slot = position % P;
    const int64_t angle = static_cast<int64_t>(position) * (D / 2);
    T* key = reinterpret_cast<T*>(image_of(plan, head, plan.write_chunk[row])) + slot * D;
    if (plan.turns) {
        std::memcpy(key, static_cast<const T*>(plan.k) + row * plan.k_stride + head * D, D * sizeof(T));
        std::memcpy(key + P * D, static_cast<const T*>(plan.v) + row * plan.v_stride + head * D, D * sizeof(T));
        return;
    }
    auto* rotated = static_cast<float*>(thread_scratch(D * 4));
    const T* k = static_cast<const T*>(plan.k) + row * plan.k_stride + head * D;
    const T* v = static_cast<const T*>(plan.v) + row * plan.v_stride + head * D;
    rotate(k, plan.cos ? plan.cos + angle : nullptr, plan.cos ? plan.sin + angle : nullptr, D, 1.0f, rotated);
    int d = 0;
    for (; d + VL <= D; d += VL) store(key + d, load(rotated + d));
    for (; d < D; d++) narrow(key + d, rotated[d]);
    std::memcpy(key + P * D, v, D * sizeof(T));
}

// The scratch of a work item; it fits into the first two cache levels. Rotated queries [rows, steps], scores and probabilities of a block of rows,
// running sums, and the panels of one or two pages.
struct Item {
    int rows, steps, columns;      // steps: 32-bit elements of a padded query row; columns: D rounded up to VL
    uint32_t* query;
    float* scores;
    uint32_t* probabilities;
    float *acc, *top, *total, *factor;
    uint32_t *keys, *values;
    float *shift, *scale, *offset, *buffer;   // if pages may be encoded: each row's running sum of probability * offset; scale and offset [P] of
                                              // a page's slots; see panel_buffer
    float *turned, *late;                     // for few rows, else null: rotated queries as float32 [rows, D]; see scale_late
    uint32_t* own;                            // see turns_of
};

// Writes the query rows of the piece in the format of the product, rotated by their distance from `origin`.
template <class Math, class T>
inline void place_queries(const LayerPlan& plan, const Piece& piece, int head, const T* q, int64_t q_stride, int origin, float* rotated, const Item& item) {
    const int G = plan.G, D = plan.D;
    const float scale = static_cast<float>(plan.scale);
    for (int r = 0; r < piece.num_rows; r++) {
        const int row = piece.first_row + r;
        const int64_t angle = static_cast<int64_t>(plan.positions[row] - origin) * (D / 2);
        const float* cos = plan.cos ? plan.cos + angle : nullptr;
        const float* sin = plan.cos ? plan.sin + angle : nullptr;
        for (int g = 0; g < G; g++) {
            uint32_t* out = item.query + (r * G + g) * item.steps;
            rotate(q + row * q_stride + (head * G + g) * D, cos, sin, D, scale, rotated);
            store_query<Math>(plan, rotated, out);
        }
    }
}

// The origin of a page: queries and keys are rotated by their distance from it.
inline int origin_of(const Page& page) { return page.positions ? 0 : page.base; }

// Hides the slots of a page that its mask hides, or that are invisible to rows at, ..., at + count - 1 of the item. Rows of scores are `ld` apart.
// Slots with their own positions are earlier than all rows, so only the mask hides them.
inline void hide_unseen(const LayerPlan& plan, const Piece& piece, const Page& page, int at, int count, float* scores, int ld) {
    if (!page.positions && (plan.positions[piece.first_row] < page.base + P - 1 || plan.window))
        for (int m = 0; m < count; m++) hide_unseen(plan, plan.positions[piece.first_row + (at + m) / plan.G], page.base, P, scores + m * ld);
    for (int m = 0; m < count && page.mask != ALL_SLOTS; m++) hide_masked(page.mask, scores + m * ld);
}

// Stores the scores of rows at, ..., at + count - 1 of the item for chunk c of its piece, if they are kept. Rows of scores are `ld` apart.
inline void store_scores(const LayerPlan& plan, const Piece& piece, int head, int c, int at, int count, const float* scores, int ld) {
    if (!plan.scored_rows) return;
    for (int m = 0; m < count; m++) {
        const ScoredRow& row = plan.scored_rows[piece.first_row + (at + m) / plan.G];
        if (row.first < 0) continue;
        const int64_t column = (piece.start - row.start) / P + c;
        std::memcpy(scores_of(plan, row, head, (at + m) % plan.G, column), scores + m * ld, P * sizeof(float));
    }
}

// Prefetches the positions of a page's slots, if the slots have their own.
inline void prefetch_positions(const Page& page) {
    for (int t = 0; page.positions && t < P; t += LINE / 4) __builtin_prefetch(page.positions + t, 0, 3);
}

// Prefetches the angles at these positions, once the positions are in the cache. The angles are scattered over the table, and take as many cache
// lines as the page's codes.
inline void prefetch_angles(const LayerPlan& plan, const Page& page) {
    if (!page.positions || !plan.angles) return;
    for (int t = 0; t < P; t++) {
        const uint32_t* row = plan.angles + static_cast<int64_t>(page.positions[t]) * (plan.D / 2);
        for (int j = 0; j < plan.D / 2; j += LINE / 4) __builtin_prefetch(row + j, 0, 3);
    }
}

}  // namespace quire
