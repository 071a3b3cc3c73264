// A step's plan as the attention kernels read it. attention/cpu.py builds it.
#pragma once
#include "common.h"
#include "nuq.h"

namespace quire {

struct Piece {
    int32_t first_row, num_rows;  // query rows of the step
    int32_t first_index;          // index of its first chunk id in LayoutRecord.indices
    int32_t num_chunks;
    int32_t start;                // position of the first slot of the first chunk, unless the chunk has a base
    int32_t partial;              // first row of its partials, or -1: writes the output itself
};

// A chunk that is full once the step's rows are written, and the chunk it is encoded into.
struct Seal {
    int32_t source, chunk;
};

struct Merge {
    int32_t row;                  // query row
    int32_t first, count;         // its entries in LayoutRecord.merge_parts
};

// A prompt row that adds to column sums. kept: its index among the rows with kept queries, or -1.
struct ProfiledRow {
    int32_t row, kept;
};

// A row. Attention may keep its scores, [num_columns, 64] per query head, so that the profile need not compute them again. first: the number of
// scores of earlier rows per query head, or -1: the row's scores are not kept. start: position of the first slot of the first column.
struct ScoredRow {
    int64_t first, start, num_columns;
};

// A row that adds up only some values. first: the number of scores of earlier rows per query head. start: position of the first slot of the first
// column. num_columns: capacity in columns. reads_all: not 0 if the row adds up all values nevertheless.
struct SparseRow {
    int64_t first, start, num_columns, reads_all;
};

// A slice of a prompt: consecutive rows. The queries of its last num_kept rows are kept, with indices from first_kept on.
struct Profile {
    int32_t first_row, num_rows;
    int32_t first_column, num_columns;   // its chunks in LayoutRecord.columns, in order of position
    int32_t start;                       // position of the first slot of the first chunk
    int32_t first_kept, num_kept;
    int32_t num_peaks;                   // 0: sums the attention of all rows; n: records the largest attention of the last n rows
};

// A chunk of a profiled path.
struct Column {
    int32_t profile;
    int32_t stored, computed;     // the chunk that later rows read, and the chunk that its own rows read
    int32_t sums;                 // row of the chunk table with its column sums
    int32_t kept;                 // index of the computed keys among the kept keys, or -1: they are not copied
    int32_t far;                  // a row counts for a slot's peak only from this distance in tokens on
};

// One layer of the model. A chunk has a page in each lane; the layer has the lanes first_lane, ..., first_lane + H - 1.
QUIRE_STRUCT(LayerRecord,
    (const float*, cos)                  // [positions, D/2], or null: no rotation
    (const float*, sin)
    (const uint32_t*, turns)             // bf16 pairs [D/2, 2, 64] for each pair of channels and slot: (cos, -sin), then (sin, cos);
                                         // null: sealed chunks stay dense, and stored keys are rotated
    (const uint32_t*, angles)            // bf16 pairs (cos, sin) [positions, D/2] if bf16 keys are rotated on read, else null
    (double, scale)                      // factor of q . k, in base 2: so the exponentials are powers of two
    (double, soft_cap)                   // c in base 2: a score s becomes c * tanh(s / c); 0: it stays as it is
    (int64_t, heads_before)              // H * G of the earlier layers together
    (int64_t, queries_before)            // H * G * steps of these, see query_steps
    (int64_t, key_bytes_before)          // bytes of the keys [H, 64, D] of a dense chunk in these
    (int32_t, first_lane)
    (int32_t, H) (int32_t, G) (int32_t, D)
    (int32_t, window)                    // 0: none
    (int32_t, dense_page)                // bytes of a dense page
    (int32_t, layout)                    // index in Plan.layouts
)

// A step as the layers of one reach (a window, or none) read and write it.
QUIRE_STRUCT(LayoutRecord,
    (const int32_t*, write_chunk)        // [R] chunk that the row's key and value are written to
    (const int32_t*, indices)            // chunk ids of all pieces
    (const Piece*, pieces)
    (const Merge*, merges)
    (const int32_t*, merge_parts)        // partial rows
    (const Seal*, seals)
    (const ScoredRow*, scored_rows)      // [R]; null: nothing is profiled
    (const ProfiledRow*, profiled_rows)  // the profiled rows without kept scores
    (const Profile*, profiles)
    (const Column*, columns)
    (const int32_t*, kept_chunks)        // [kept pages] chunks whose computed keys are kept
    (const SparseRow*, sparse_rows)      // [num_sparse_rows]; null: all rows add up all values
    (int32_t, num_pieces) (int32_t, num_merges) (int32_t, num_seals)
    (int32_t, num_profiled_rows) (int32_t, num_columns)
    (int32_t, decode)                    // one row per sequence, nothing to encode: a piece writes its row's key and value, because no other piece
                                         // reads them
)

QUIRE_STRUCT(Plan,
    (uint8_t*, arena)                    // a page starts at id * 128
    (const int32_t*, table)              // [C, lanes] page ids
    (const uint8_t*, kinds)              // [C] format of a chunk's pages, a Kind
    (const uint64_t*, masks)             // [C, lanes] bit t: slot t of a page is visible; 0: there is no page. Null: all slots are visible
    (const int32_t*, positions)          // [R]
    (const LayerRecord*, layers)
    (const LayoutRecord*, layouts)
    (float*, partial_o)                  // [partials, H * G, D] of the current layer
    (float*, partial_lse)                // [partials, H * G] of the current layer
    (const void*, k)                     // [R, H, D] of the current layer, with row strides in elements
    (const void*, v)
    (int32_t*, reads)                    // [C, most_heads], or null: every layer adds 1 for each page it reads
    (const void*, codec)                 // tables of the sealed codec (codecs.h), or null: NuqHead [lanes] of non-uniform codes, or
                                         // float [lanes, D] of group codes, subtracted from keys before they are stored
    (const int32_t*, sidecars)           // [C] ids of sidecars, exact first tokens T [lanes, 2, sinks, D], or -1
    (const int32_t*, slot_positions)     // [C, lanes] ids of pages int32 [64], the positions of a page's slots, or -1: consecutive
    (const int32_t*, bases)              // [C] position of a chunk's first slot, or -1: given by its index in the piece
    (const int32_t*, ready)              // [layers], or null: a layer's pages may be read once its entry is not 0; another thread sets it meanwhile
    (float*, lse)                        // [R, H * G] of the current layer, natural log; or null: nothing is profiled
    (float*, scores)                     // [H * G, num_columns, 64] of each scored row, of the current layer, base 2; undefined without a page
    (uint32_t*, queries)                 // [H, R * G, steps], see query_steps: profiled rows of the current layer; padding is zero
    (float*, limits)                     // [H, R * G] their lse in base 2
    (uint32_t*, kept_queries)            // of each layer [H, kept rows * G, steps]
    (float*, kept_limits)                // of each layer [H, kept rows * G]
    (uint8_t*, kept_keys)                // of each layer [H, kept pages, 64, D] as in dense pages
    (uint8_t*, staged)                   // dense pages [staged chunks, H] of the current layer; chunk id ~i is staged chunk i
    (float*, sparse_scores)              // [H * G, num_columns, 64] of each sparse row, of the current layer, base 2; then weights
    (uint64_t*, sparse_slots)            // [H * G, num_columns] of each sparse row: bit t is slot t; first the visible slots, then the selected ones
    (int32_t*, value_reads)              // [C, most_heads, 2], or null: for each page whose values sparse rows read, they add 1 to the first number,
                                         // and the number of selected slots of all query heads to the second
    (double, sparse_values)              // share of the values that a sparse row adds up
    (int64_t, k_stride) (int64_t, v_stride)
    (int32_t, num_rows)
    (int32_t, num_kept_rows) (int32_t, num_kept_pages)
    (int32_t, num_sparse_rows)           // the sparse rows are the first rows of the step; each is a slice of one row
    (int32_t, lanes)
    (int32_t, most_heads)                // largest H of a layer
    (int32_t, sinks)                     // exact first tokens of a sequence
    (int32_t, kind)                      // format of q, k, v and the output
)

// A step's plan for one layer.
struct LayerPlan : Plan, LayerRecord, LayoutRecord {
    LayerPlan(const Plan& plan, int layer) : Plan(plan), LayerRecord(plan.layers[layer]), LayoutRecord(plan.layouts[LayerRecord::layout]) {}
};

// The scores of a row in query head g of G, for one column.
inline float* scores_of(const LayerPlan& plan, const ScoredRow& row, int head, int g, int64_t column) {
    const int64_t heads = static_cast<int64_t>(plan.H) * plan.G;
    return plan.scores + row.first * heads + ((head * plan.G + g) * row.num_columns + column) * PAGE;
}

// Adds the attention of a layer's profiled rows to the column sums. Runs after the layer's attention. Keeps queries, limits and keys for
// quire_recover. q, q_stride: as in quire_attend.
void profile_columns(const LayerPlan& plan, const void* q, int64_t q_stride);

// Attention of the plan's sparse rows. If plan.decode is set, it also writes their keys and values; else the caller has written them. q and out: as
// in quire_attend.
void attend_sparsely(const LayerPlan& plan, const void* q, int64_t q_stride, void* out);

}  // namespace quire

// Writes the plan's keys and values, then computes attention. q: [R, H * G, D] with a row stride in elements; out: [R, H * G, D], dense.
QUIRE_API void quire_attend(const quire::Plan* plan, int layer, const void* q, int64_t q_stride, void* out);

// The attention of a profile's kept rows to the tokens that a policy keeps, averaged over these rows: out [lanes]. Runs after all layers.
// kept [lanes, words]: bit t of word c is position c * 64 + t. local [lanes]: number of last tokens that each row also keeps, including its own.
QUIRE_API void quire_recover(const quire::Plan* plan, int profile, const uint64_t* kept, int64_t words, const int64_t* local, double* out);
