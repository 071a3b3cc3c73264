// Attention statistics of prompts. While a prompt is computed: column sums. Afterwards: the attention of its last rows to the tokens that a policy
// keeps.
//
//     a_ij = mean of exp(s_ij - lse_i) over the query heads of a kv head,      sums_j += sum_i a_ij,      recovered = mean_i sum_j a_ij [j is kept]
//
// Instead of sums, a profile may record peaks: for each column, the largest exp(s_ij - lse_i) of any query head and of any row at least
// Column.far tokens later.
//
// Defined by attention/profile.py; tests/kernels/test_profile.py compares the two.
//
// Attention stores the lse of every row, so a probability needs only its score. For slices of one row, attention stores the scores too; other scores
// are computed again. A work item is a chunk of a path and a kv head: one panel of keys for all query rows that see the chunk. Queries are rotated
// once for all chunks. Only one item writes a page of sums, and it adds rows in order, so sums do not depend on the number of threads.
#include "queries.h"

namespace quire {
namespace {

constexpr int BLOCK = 48;         // query rows whose probabilities are added up before they are added to the total; a multiple of the register block

// The destination of a product's rows that see all columns: turns the scores into probabilities and adds these to the column sums.
template <bool ROUGH>
struct ColumnSums {
    float* sums;
    const float* limits;          // lse of each row, base 2
    ColumnSums from(int m) const { return {sums, limits + m}; }
    template <int N>
    void put(int m, const vf (&row)[N]) const {
        for (int n = 0; n < N; n++) store(sums + n * VL, load(sums + n * VL) + exp2<ROUGH>(row[n] - limits[m]));
    }
};

// The scratch of an item: keys [steps, P], scores of a block of rows, sums [P] of the block and of all rows; for encoded pages also the scratch of
// turned_keys.
struct Scratch {
    uint32_t* keys;
    float *scores, *part, *sums, *buffer;
    uint32_t* own;
};

template <class Math>
Scratch scratch_of(const LayerPlan& plan) {
    const int keys = query_steps<Math>(plan) * P, buffer = plan.turns ? panel_buffer<Math>(plan.D) : 0;
    const int own = plan.turns && Math::PAIR == 2 ? plan.D / 2 * P : 0;
    auto* at = static_cast<float*>(thread_scratch(sizeof(float) * (keys + BLOCK * P + 2 * P + buffer + own)));
    float* scores = at + keys;
    float* part = scores + BLOCK * P;
    return {reinterpret_cast<uint32_t*>(at), scores, part, part + P, part + 2 * P, reinterpret_cast<uint32_t*>(part + 2 * P + buffer)};
}

// Makes the key panel of a page.
template <class Math, class T>
void make_panel(const LayerPlan& plan, const Page& page, const Scratch& item) {
    Prefetcher none{nullptr, nullptr};
    if (plan.turns) turned_keys<Math, T>(plan, page, page.base, item.keys, P, item.buffer, item.own, none);
    else load_keys<Math>(page, plan.D, item.keys, P, none);
}

// Query rows of one slice and head, in the format of the product.
struct Rows {
    const uint32_t* query;        // [rows * G, steps]
    const float* limits;          // [rows * G]
    int position;                 // position of the first row; rows are consecutive
};

// Adds the probabilities of rows [low, high), which see all of a panel, to item.sums.
template <class Math>
void add_seen(const LayerPlan& plan, const Rows& rows, int low, int high, const Scratch& item) {
    const int steps = query_steps<Math>(plan);
    Prefetcher none{nullptr, nullptr};
    for (int at = low * plan.G; at < high * plan.G; at += BLOCK) {
        const int count = high * plan.G - at < BLOCK ? high * plan.G - at : BLOCK;
        std::memset(item.part, 0, sizeof(float) * P);
        for (int n = 0; n < P; n += NV * VL) {
            const ColumnSums<Math::PAIR == 2> to{item.part + n, rows.limits + at};
            product_rows<Math, NV>(rows.query + static_cast<int64_t>(at) * steps, steps, item.keys + n, P, Sums{nullptr, 0}, steps, count, nullptr, to,
                                   none);
        }
        for (int t = 0; t < P; t += VL) store(item.sums + t, load(item.sums + t) + load(item.part + t));
    }
}

// Calls body(row, probabilities [P]) for the query rows of rows [low, high), in order. The panel begins at position `start`. Slots that are invisible
// to a row, or fewer than `far` tokens before it, have probability 0 or 2^-126.
template <class Math, class Body>
void each_row(const LayerPlan& plan, const Rows& rows, int low, int high, int start, const Scratch& item, const Body& body, int far = 0) {
    const int steps = query_steps<Math>(plan);
    Prefetcher none{nullptr, nullptr};
    for (int at = low * plan.G; at < high * plan.G; at += BLOCK) {
        const int count = high * plan.G - at < BLOCK ? high * plan.G - at : BLOCK;
        product<Math>(rows.query + static_cast<int64_t>(at) * steps, steps, item.keys, P, item.scores, P, steps, count, P, nullptr, none);
        cap_scores(plan, count * P, item.scores);
        for (int m = 0; m < count; m++) {
            float* s = item.scores + m * P;
            hide_unseen(plan, rows.position + (at + m) / plan.G, start, P, s, far);
            for (int t = 0; t < P; t += VL) store(s + t, exp2<Math::PAIR == 2>(load(s + t) - rows.limits[at + m]));
            body((at + m) / plan.G, s);
        }
    }
}

// Among `count` rows at consecutive positions from `first` on, the number of rows before `position`.
inline int rows_before(int first, int count, int position) { return position <= first ? 0 : position - first < count ? position - first : count; }

// Rows [own, later) of a profile are in the chunk at `start`. Rows [later, end) follow the chunk and see some of its slots.
struct SeeingRows {
    int own, later, end;
};

inline SeeingRows seeing_rows(const LayerPlan& plan, int position, int count, int start) {
    const int end = plan.window ? rows_before(position, count, start + P - 1 + plan.window) : count;
    return {rows_before(position, count, start), rows_before(position, count, start + P), end};
}

// Where the plan keeps the queries [G, steps] and the limits [G] of a row for one head.
struct Kept {
    uint32_t* queries;
    float* limits;
};

inline Kept kept_row(const LayerPlan& plan, int head, int row, int steps) {
    const int64_t at = (static_cast<int64_t>(head) * plan.num_kept_rows + row) * plan.G, before = plan.num_kept_rows;
    return {plan.kept_queries + plan.queries_before * before + at * steps, plan.kept_limits + plan.heads_before * before + at};
}

// Stores the rotated queries and the lse of a row. If the row's queries are kept, stores them there too.
template <class Math, class T>
void place_row(const LayerPlan& plan, const ProfiledRow& profiled, const T* q, int64_t q_stride) {
    const int G = plan.G, H = plan.H, D = plan.D, steps = query_steps<Math>(plan), row = profiled.row;
    const int64_t angle = static_cast<int64_t>(plan.positions[row]) * (D / 2);
    auto* rotated = static_cast<float*>(thread_scratch(sizeof(float) * D));
    for (int head = 0; head < H; head++) {
        const int64_t first = (static_cast<int64_t>(head) * plan.num_rows + row) * G;
        uint32_t* query = plan.queries + first * steps;
        float* limits = plan.limits + first;
        for (int g = 0; g < G; g++) {
            rotate(q + row * q_stride + (head * G + g) * D, plan.cos ? plan.cos + angle : nullptr, plan.cos ? plan.sin + angle : nullptr, D,
                   static_cast<float>(plan.scale), rotated);
            store_query<Math>(plan, rotated, query + g * steps);
            const float lse = plan.lse[static_cast<int64_t>(row) * H * G + head * G + g];
            limits[g] = lse > -INFINITY ? lse * LOG2E : INFINITY;   // a row that sees nothing gives probabilities of zero
        }
        if (profiled.kept < 0) continue;
        const Kept kept = kept_row(plan, head, profiled.kept, steps);
        std::memcpy(kept.queries, query, sizeof(uint32_t) * G * steps);
        std::memcpy(kept.limits, limits, sizeof(float) * G);
    }
}

// Where the plan keeps the computed keys [64, D] of one page.
inline uint8_t* kept_keys(const LayerPlan& plan, int head, int place) {
    const int64_t bytes = static_cast<int64_t>(P) * plan.D * (plan.kind == DENSE_F32 ? 4 : 2);
    return plan.kept_keys + plan.key_bytes_before * plan.num_kept_pages + (static_cast<int64_t>(head) * plan.num_kept_pages + place) * bytes;
}

// Records the largest attention of a profile's last rows to each slot of a chunk. All these rows follow the chunk.
template <class Math, class T>
void note_peaks(const LayerPlan& plan, const Profile& profile, const Rows& all, int head, const Column& column, int start) {
    const int skipped = profile.num_rows - profile.num_peaks;
    const int64_t first = static_cast<int64_t>(skipped) * plan.G;
    const Rows rows{all.query + first * query_steps<Math>(plan), all.limits + first, all.position + skipped};
    const int low = rows_before(rows.position, profile.num_peaks, start + column.far);
    const int high = seeing_rows(plan, rows.position, profile.num_peaks, start).end;
    if (low >= high) return;
    const Scratch item = scratch_of<Math>(plan);
    make_panel<Math, T>(plan, placed_page(plan, head, column.stored, start, rows.position + profile.num_peaks), item);
    count_read(plan, head, column.stored);
    float* page = reinterpret_cast<float*>(image_of(plan, head, column.sums));
    const auto note = [&](int, const float* p) {
        for (int t = 0; t < P; t += VL) store(page + t, max(load(p + t), load(page + t)));
    };
    each_row<Math>(plan, rows, low, high, start, item, note, column.far);
}

// Adds the attention of a slice of one row to a column, or records it as a peak. Reads the scores that attention stored.
template <bool ROUGH>
void add_scores(const LayerPlan& plan, const Profile& profile, const ScoredRow& row, int head, int index, const Column& column, float* page) {
    const int position = plan.positions[profile.first_row], start = profile.start + index * P;
    const int seen = rows_before(start, P, position - (profile.num_peaks ? column.far : 0) + 1);   // slots that are far enough
    alignas(64) float found[P] = {};
    for (int g = 0; g < plan.G; g++) {
        const float lse = plan.lse[(static_cast<int64_t>(profile.first_row) * plan.H + head) * plan.G + g];
        if (!(lse > -INFINITY)) continue;   // a row that sees nothing gives probabilities of zero
        const float limit = lse * LOG2E;
        const float* scores = scores_of(plan, row, head, g, index);
        for (int t = 0; t < P; t += VL) {
            const vf p = exp2<ROUGH>(load(scores + t) - limit);
            store(found + t, profile.num_peaks ? max(p, load(found + t)) : load(found + t) + p);
        }
    }
    const float share = 1.0f / static_cast<float>(plan.G);
    for (int t = 0; t < seen; t++) page[t] = profile.num_peaks ? (found[t] > page[t] ? found[t] : page[t]) : page[t] + found[t] * share;
}

template <class Math, class T>
void sum_column(const LayerPlan& plan, int index, int head) {
    const Column& column = plan.columns[index];
    const Profile& profile = plan.profiles[column.profile];
    const int start = profile.start + (index - profile.first_column) * P, steps = query_steps<Math>(plan);
    const int64_t first = (static_cast<int64_t>(head) * plan.num_rows + profile.first_row) * plan.G;
    const Rows rows{plan.queries + first * steps, plan.limits + first, plan.positions[profile.first_row]};
    // Nothing to do if retention needs no sums of this head, or the head keeps nothing of the chunk.
    if (!mask_of(plan, head, column.sums) || !mask_of(plan, head, column.stored)) return;
    if (const ScoredRow& row = plan.scored_rows[profile.first_row]; row.first >= 0) {
        float* page = reinterpret_cast<float*>(image_of(plan, head, column.sums));
        return add_scores<Math::PAIR == 2>(plan, profile, row, head, index - profile.first_column, column, page);
    }
    if (profile.num_peaks) return note_peaks<Math, T>(plan, profile, rows, head, column, start);
    const int written = rows.position + profile.num_rows;
    const SeeingRows who = seeing_rows(plan, rows.position, profile.num_rows, start);
    const Scratch item = scratch_of<Math>(plan);
    std::memset(item.sums, 0, sizeof(float) * P);
    const auto add = [&](int, const float* p) {
        for (int t = 0; t < P; t += VL) store(item.sums + t, load(item.sums + t) + load(p + t));
    };
    if (who.own < who.later) {
        make_panel<Math, T>(plan, placed_page(plan, head, column.computed, start, written), item);
        count_read(plan, head, column.computed);
        each_row<Math>(plan, rows, who.own, who.later, start, item, add);
    }
    if (who.later < who.end) {
        if (who.own == who.later || column.stored != column.computed) {
            make_panel<Math, T>(plan, placed_page(plan, head, column.stored, start, rows.position + profile.num_rows), item);
            count_read(plan, head, column.stored);
        }
        // With a window, later rows see only the last slots.
        const int whole = plan.window ? rows_before(rows.position, who.end, start + plan.window) : who.end;
        const int split = whole > who.later ? whole : who.later;
        const bool whole_sums = plan.soft_cap == 0;   // these are made within the product, where scores cannot be capped
        if (whole_sums) add_seen<Math>(plan, rows, who.later, split, item);
        each_row<Math>(plan, rows, whole_sums ? split : who.later, who.end, start, item, add);
    }
    float* page = reinterpret_cast<float*>(image_of(plan, head, column.sums));
    const float share = 1.0f / static_cast<float>(plan.G);
    for (int t = 0; t < P; t += VL) store(page + t, load(page + t) + load(item.sums + t) * share);
}

template <class Math, class T>
void profile_layer(const LayerPlan& plan, const T* q, int64_t q_stride) {
    const int H = plan.H;
    const int64_t grain = (plan.num_profiled_rows + sharing_threads() - 1) / sharing_threads();
    parallel_for(plan.num_profiled_rows, grain, [&](int64_t i) { place_row<Math>(plan, plan.profiled_rows[i], q, q_stride); });
    if (plan.num_kept_pages)
        parallel_for(static_cast<int64_t>(plan.num_kept_pages) * H, 1, [&](int64_t i) {
            const int place = static_cast<int>(i / H), head = static_cast<int>(i % H);
            std::memcpy(kept_keys(plan, head, place), image_of(plan, head, plan.kept_chunks[place]), sizeof(T) * P * plan.D);
        });
    // Items are in order of position: chunks that most rows see come first, so that no large item starts last.
    parallel_for(static_cast<int64_t>(plan.num_columns) * H, 1,
                 [&](int64_t i) { sum_column<Math, T>(plan, static_cast<int>(i / H), static_cast<int>(i % H)); });
}

// Recovered attention of one head (quire_recover). kept [words].
template <class Math, class T>
double recover(const LayerPlan& plan, const Profile& profile, int head, const uint64_t* kept, int64_t words, int64_t local) {
    const int steps = query_steps<Math>(plan), end = plan.positions[profile.first_row] + profile.num_rows;
    const Kept first = kept_row(plan, head, profile.first_kept, steps);
    const Rows rows{first.queries, first.limits, end - profile.num_kept};
    const Scratch item = scratch_of<Math>(plan);
    alignas(64) float columns[P], weights[P];   // columns: 1 for slots that every row keeps; weights: 1 for slots that one row keeps
    double total = 0;
    for (int c = 0; c < profile.num_columns; c++) {
        const Column& column = plan.columns[profile.first_column + c];
        const int start = profile.start + c * P;
        const uint64_t bits = start / P < words ? kept[start / P] : 0;
        const SeeingRows who = seeing_rows(plan, rows.position, profile.num_kept, start);
        // The first row's local tokens begin earliest: if they begin after this chunk, so do those of all rows.
        if (!bits && rows.position + who.own - local + 1 >= start + P) continue;
        for (int t = 0; t < P; t++) columns[t] = static_cast<float>(bits >> t & 1);
        std::memset(item.sums, 0, sizeof(float) * P);
        const auto add = [&](int row, const float* p) {
            const int64_t near = rows.position + row - local + 1 - start;   // the first slot that is local
            const float* by = columns;
            if (near < P) {
                for (int t = 0; t < P; t++) weights[t] = t >= near ? 1.0f : columns[t];
                by = weights;
            }
            for (int t = 0; t < P; t += VL) store(item.sums + t, load(item.sums + t) + load(p + t) * load(by + t));
        };
        const auto computed = [&] {
            Page page{nullptr, plan.kind, end - start < P ? end - start : P};
            page.base = start;
            if (column.kept < 0) return placed_page(plan, head, column.computed, start, end);
            page.image = kept_keys(plan, head, column.kept);
            return page;
        };
        if (who.own < who.later) {
            make_panel<Math, T>(plan, computed(), item);
            each_row<Math>(plan, rows, who.own, who.later, start, item, add);
        }
        if (who.later < who.end) {
            const bool same = column.stored == column.computed;
            if (who.own == who.later || !same)
                make_panel<Math, T>(plan, same ? computed() : placed_page(plan, head, column.stored, start, end), item);
            each_row<Math>(plan, rows, who.later, who.end, start, item, add);
        }
        for (int t = 0; t < P; t++) total += item.sums[t];
    }
    return total / plan.G / profile.num_kept;
}

}  // namespace

void profile_columns(const LayerPlan& plan, const void* q, int64_t q_stride) {
    by_kind(plan.kind, [&](auto math, auto number) {
        profile_layer<decltype(math)>(plan, static_cast<const decltype(number)*>(q), q_stride);
    });
}

}  // namespace quire

using namespace quire;

QUIRE_API void quire_recover(const Plan* plan, int profile, const uint64_t* kept, int64_t words, const int64_t* local, double* out) {
    by_kind(plan->kind, [&](auto math, auto number) {
        parallel_for(plan->lanes, 1, [&](int64_t lane) {
            int layer = 0;
            while (lane < plan->layers[layer].first_lane || lane >= plan->layers[layer].first_lane + plan->layers[layer].H) layer++;
            const LayerPlan of_layer(*plan, layer);
            out[lane] = recover<decltype(math), decltype(number)>(of_layer, of_layer.profiles[profile], static_cast<int>(lane - of_layer.first_lane),
                                                                  kept + lane * words, words, local[lane]);
        });
    });
}

// 32-bit elements of a layer's query row in Plan.queries.
QUIRE_API int64_t quire_query_steps(int kind, const LayerRecord* layer) {
    int64_t steps = 0;
    by_kind(kind, [&](auto math, auto) { steps = query_steps<decltype(math)>(*layer); });
    return steps;
}
