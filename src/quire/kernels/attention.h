// A step as the CPU's attention reads it; built by attention/cpu.py.
#pragma once
#include "common.h"
#include "nuq.h"

namespace quire {

struct Piece {
    int32_t first_row, num_rows;  // query rows of the step
    int32_t first_index;          // where its chunk ids start in Plan.indices
    int32_t num_chunks;
    int32_t start;                // position of the first slot of the first chunk, unless that has a base
    int32_t partial;              // first row of its partials, or -1: writes the output itself
};

// A chunk that is full once the step's rows are written, and the one it is encoded into.
struct Seal {
    int32_t source, chunk;
};

struct Merge {
    int32_t row;                  // query row
    int32_t first, count;         // its entries in Plan.merge_parts
};

// A row of a prompt whose attention is summed by column, and its place among those whose queries are kept, or -1.
struct ProfiledRow {
    int32_t row, kept;
};

// A row whose scores attention leaves, so that they need not be made again: where those of one query head, [num_columns, 64], would begin if rows had
// no others, or -1 if it leaves none; position of the first slot of the first column.
struct ScoredRow {
    int64_t first, start, num_columns;
};

// A slice of a prompt: consecutive rows, the last num_kept of them kept from place first_kept on.
struct Profile {
    int32_t first_row, num_rows;
    int32_t first_column, num_columns;   // its chunks in Plan.columns, in order of position
    int32_t start;                       // position of the first slot of the first of them
    int32_t first_kept, num_kept;
    int32_t num_peaks;                   // of the last rows the largest attention is noted; 0: that of all rows is summed
};

// A chunk of a profiled path.
struct Column {
    int32_t profile;
    int32_t stored, computed;     // the chunk as rows behind it see it, and as its own rows do
    int32_t sums;                 // row of the chunk table with its column sums
    int32_t kept;                 // place of the computed keys among those kept, or -1: they stay where they are
    int32_t far;                  // for the peak of a slot count rows so many tokens behind it, or more
};

QUIRE_STRUCT(Plan,
    (uint8_t*, arena)                    // a page starts at id * 128
    (const int32_t*, table)              // [C, L, H] page ids
    (const uint8_t*, kinds)              // [C] format of a chunk's pages
    (const uint64_t*, masks)             // [C, L, H] bit t: slot t of a page is seen; 0: there is no page. Null: all of every page
    (const float*, cos)                  // [positions, D/2], or null: no rotation
    (const float*, sin)
    (const int32_t*, positions)          // [R]
    (const int32_t*, write_chunk)        // [R] chunk that takes the row's key and value
    (const int32_t*, indices)            // chunk ids of all pieces
    (const Piece*, pieces)
    (const Merge*, merges)
    (const int32_t*, merge_parts)        // partial rows
    (float*, partial_o)                  // [partials, H * G, D]
    (float*, partial_lse)                // [partials, H * G]
    (const void*, k)                     // [R, H, D] of the layer at hand, with row strides in elements
    (const void*, v)
    (int32_t*, reads)                    // [C, H], or null: every layer adds one for each page it reads
    (const NuqHead*, heads)              // [L, H] of a sealed codec of non-uniform codes, or null
    (const float*, key_bias)             // [L, H, D], what keys of group codes are stored less, or null: nothing
    (const uint32_t*, turns)             // bf16 pairs [D/2, 2, 64] for each pair of channels and slot: (cos, -sin), then (sin, cos);
                                         // null: sealed chunks stay dense, and keys lie rotated
    (const uint32_t*, angles)            // bf16 pairs (cos, sin) [positions, D/2] where keys of bf16 are rotated on read, else null
    (const int32_t*, sidecars)           // [C] extents of exact first rows T [L, H, 2, sinks, D], or -1
    (const int32_t*, slot_positions)     // [C, L, H] pages of int32 [64], the positions of a page's slots where these are not consecutive, or -1
    (const int32_t*, bases)              // [C] position of a chunk's first slot, or -1: follows from its place in the piece
    (const Seal*, seals)
    (const int32_t*, ready)              // [L], or null: a layer's pages may be read once its number is not 0; others write it meanwhile
    (float*, lse)                        // [R, H * G] of the layer at hand, natural log; or null: nothing is profiled
    (const ScoredRow*, scored_rows)      // [R]; null: nothing is profiled
    (float*, scores)                     // [H * G, num_columns, 64] of each of them, of the layer at hand, base 2; undefined where a head has no page
    (const ProfiledRow*, profiled_rows)  // those that leave no scores
    (const Profile*, profiles)
    (const Column*, columns)
    (const int32_t*, kept_chunks)        // [kept pages] whose computed keys are kept
    (uint32_t*, queries)                 // [H, R * G, steps], see query_steps: profiled rows of the layer at hand; padding is zero
    (float*, limits)                     // [H, R * G] their lse in base 2
    (uint32_t*, kept_queries)            // [L, H, kept rows * G, steps]
    (float*, kept_limits)                // [L, H, kept rows * G]
    (uint8_t*, kept_keys)                // [L, H, kept pages, 64, D] as in dense pages
    (uint8_t*, staged)                   // dense pages [staged chunks, H] of the layer at hand; a chunk named ~i is staged chunk i
    (int64_t, k_stride) (int64_t, v_stride)
    (int32_t, num_pieces) (int32_t, num_merges) (int32_t, num_rows) (int32_t, num_seals)
    (int32_t, num_profiled_rows) (int32_t, num_columns) (int32_t, num_kept_rows) (int32_t, num_kept_pages)
    (int32_t, L) (int32_t, H) (int32_t, G) (int32_t, D)
    (int32_t, window)                    // 0: none
    (int32_t, sinks)                     // exact first tokens of a sequence
    (int32_t, kind)                      // format of q, k, v and the output
    (int32_t, dense_page)                // bytes of a dense page
    (int32_t, decode)                    // every sequence has one row: a piece writes its row's key and value, which no other reads; nothing is encoded
)

// The scores of a row, of one of G query heads, to a column.
inline float* scores_of(const Plan& plan, const ScoredRow& row, int head, int g, int64_t column) {
    const int64_t heads = static_cast<int64_t>(plan.H) * plan.G;
    return plan.scores + row.first * heads + ((head * plan.G + g) * row.num_columns + column) * PAGE;
}

// Adds the attention of a layer's profiled rows to the column sums, after it is done; keeps what quire_recover looks at. q as of quire_attend.
void profile_columns(const Plan& plan, int layer, const void* q, int64_t q_stride);

}  // namespace quire

// Writes the plan's keys and values, then attends. q: [R, H * G, D] with a row stride in elements; out: [R, H * G, D], dense.
QUIRE_API void quire_attend(const quire::Plan* plan, int layer, const void* q, int64_t q_stride, void* out);

// What the kept rows of a profile look at of columns that a policy keeps, after all layers: a mean over these rows, out [L, H].
// kept: [L, H, words] bits of positions, bit t of word c is c * 64 + t; local [L, H]: so many last tokens of each row, itself among them.
QUIRE_API void quire_recover(const quire::Plan* plan, int profile, const uint64_t* kept, int64_t words, const int64_t* local, double* out);
