// A step as the CPU's attention reads it; built by attention/cpu.py.
#pragma once
#include "common.h"
#include "nuq.h"

namespace quire {

struct Piece {
    int32_t first_row, num_rows;  // query rows of the step
    int32_t first_index;          // where its chunk ids start in Plan.indices
    int32_t num_chunks;
    int32_t start;                // position of the first slot of the first chunk
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

struct Plan {
    uint8_t* arena;               // a page starts at id * 128
    const int32_t* table;         // [C, L, H] page ids
    const uint8_t* kinds;         // [C] format of a chunk's pages
    const float* cos;             // [positions, D/2], or null: no rotation
    const float* sin;
    const int32_t* positions;     // [R]
    const int32_t* write_chunk;   // [R] chunk that takes the row's key and value
    const int32_t* indices;       // chunk ids of all pieces
    const Piece* pieces;
    const Merge* merges;
    const int32_t* merge_parts;   // partial rows
    float* partial_o;             // [partials, H * G, D]
    float* partial_lse;           // [partials, H * G]
    const void* k;                // [R, H, D] of the layer at hand, with row strides in elements
    const void* v;
    int32_t* reads;               // [C, H], or null: every layer adds one for each page it reads
    const NuqHead* heads;         // [L, H] of a sealed codec of non-uniform codes, or null
    const uint32_t* turns;        // bf16 pairs [D/2, 2, 64] for each pair of channels and slot: (cos, -sin), then (sin, cos);
                                  // null: sealed chunks stay dense, and keys lie rotated
    const int32_t* sidecars;      // [C] extents of exact first rows T [L, H, 2, sinks, D], or -1
    const Seal* seals;
    uint8_t* staged;              // dense pages [staged chunks, H] of the layer at hand; a chunk named ~i is staged chunk i
    int64_t k_stride, v_stride;
    int32_t num_pieces, num_merges, num_rows, num_seals;
    int32_t L, H, G, D;
    int32_t window;               // 0: none
    int32_t sinks;                // exact first tokens of a sequence
    int32_t kind;                 // format of q, k, v and the output
    int32_t dense_page;           // bytes of a dense page
    int32_t decode;               // every sequence has one row: its pieces read no other row's keys, so they write their own; nothing is encoded
};

}  // namespace quire

// Writes the plan's keys and values, then attends. q: [R, H * G, D] with a row stride in elements; out: [R, H * G, D], dense.
QUIRE_API void quire_attend(const quire::Plan* plan, int layer, const void* q, int64_t q_stride, void* out);
