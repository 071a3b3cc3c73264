// Vectors, number formats and the parallel loop shared by the CPU kernels.
//
// The same source is compiled once per CPU level; VL follows from the instruction set, and everything else is written in vectors of VL lanes.
// No OpenMP is linked: the process already holds torch's pool of threads, and a second pool would fight it for the cores. The loader passes
// torch's own GOMP_parallel in as a function pointer.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cmath>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define QUIRE_API extern "C" __attribute__((visibility("default")))

namespace quire {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef float vf_loose __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t vu_loose __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh_loose __attribute__((vector_size(VL * 2), aligned(2), may_alias));

struct bf16 { uint16_t bits; };
typedef _Float16 f16;

// Numbers of the page formats; quire/cache/codecs has the same.
enum Kind : uint8_t { DENSE_BF16 = 0, DENSE_F32 = 1, DENSE_F16 = 2, NUQ = 3, GROUP = 4, SUMS = 5 };

inline vf splat(float x) { return x - vf{}; }
inline vf load(const float* p) { return *reinterpret_cast<const vf_loose*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_loose*>(p) = x; }
inline vf as_float(vu x) { return (vf)x; }

inline vf load(const bf16* p) {
    const vh half = *reinterpret_cast<const vh_loose*>(p);
    return as_float(__builtin_convertvector(half, vu) << 16);
}

inline vf load(const f16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)   // compilers convert one at a time
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
    typedef _Float16 v16 __attribute__((vector_size(VL * 2), aligned(2), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const v16*>(p), vf);
}

// VL bytes as numbers.
inline vi bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    typedef uint8_t loose __attribute__((vector_size(VL), aligned(1), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const loose*>(p), vi);
#endif
}

inline uint16_t round_bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Round to nearest even; NaN stays NaN.
inline void store(bf16* p, vf x) {
#if defined(__AVX512BF16__)
    const __m256bh h = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(p, &h, 32);
#else
    const vu u = (vu)x;
    const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const vu quiet = (u >> 16) | 0x40u;
    const vu nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
    *reinterpret_cast<vh_loose*>(p) = __builtin_convertvector((nan & quiet) | (~nan & rounded), vh);
#endif
}

inline void store(f16* p, vf x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return;
#elif defined(__AVX2__) && defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return;
#endif
    typedef _Float16 v16 __attribute__((vector_size(VL * 2), aligned(2), may_alias));
    *reinterpret_cast<v16*>(p) = __builtin_convertvector(x, v16);
}

inline float widen(float x) { return x; }
inline float widen(f16 x) { return static_cast<float>(x); }
inline float widen(bf16 x) {
    const uint32_t u = static_cast<uint32_t>(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
// The bits of the nearest finite float16, and the number that is stored as such bits.
inline uint16_t half_bits(float x) {
    const f16 h = static_cast<f16>(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x);
    uint16_t bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}

inline float half_value(const uint8_t* at) {
    f16 h;
    std::memcpy(&h, at, 2);
    return static_cast<float>(h);
}
inline void narrow(float* p, float x) { *p = x; }
inline void narrow(f16* p, float x) { *p = static_cast<f16>(x); }
inline void narrow(bf16* p, float x) { p->bits = round_bf16(x); }

inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }

#if defined(__AVX512F__)
inline float sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
inline float largest(vf x) { return _mm512_reduce_max_ps((__m512)x); }
#else
inline float sum(vf x) {
    float s = 0;
    for (int i = 0; i < VL; i++) s += x[i];
    return s;
}
inline float largest(vf x) {
    float s = x[0];
    for (int i = 1; i < VL; i++) s = x[i] > s ? x[i] : s;
    return s;
}
#endif

// 2^x for x up to 126, relative error below 2e-7, or 8e-5 where the result is kept in 16 bits; NaN gives NaN and -inf gives 2^-126 or 0.
template <bool ROUGH = false>
inline vf exp2(vf x) {
#if defined(__AVX512DQ__)
    // f = x - floor(x) in [0, 1), 0 for -inf; scalef takes the floor itself.
    const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vf p;
    if constexpr (ROUGH) {
        p = splat(0.07802452f) * f + 0.22606716f;
        p = p * f + 0.69583356f;
        p = p * f + 0.9999252f;
    } else {
        p = splat(1.8775767e-3f) * f + 8.9893397e-3f;
        p = p * f + 5.5826318e-2f;
        p = p * f + 2.4015361e-1f;
        p = p * f + 6.9315308e-1f;
        p = p * f + 9.9999994e-1f;
    }
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    x = x < splat(-126.0f) ? splat(-126.0f) : x;
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const vf magic = splat(12582912.0f);
    const vf shifted = x + magic;
    const vf f = x - (shifted - magic);
    vf p = splat(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    const vf result = (vf)((vi)p + (((vi)shifted - (vi)magic) << 23));
    return x == x ? result : x;
#endif
}

// x / (1 + exp(-x)), and 0 below -87, where it is less than 1.5e-36.
inline vf silu(vf x) {
    const vf y = x / (1.0f + exp2(x * -1.4426950408889634f));
    return x < splat(-87.0f) ? splat(0.0f) : y;
}

// GOMP_parallel of the runtime torch uses, or null: then every loop runs on the calling thread.
extern void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned);
extern int (*omp_team_size)();
extern int num_threads;

// Threads that run the same code side by side and share its loops: a whole stack of layers in one parallel region. Entering and leaving one
// costs a microsecond or two, and a decode step has more than two hundred loops.
struct Team {
    int size;
    alignas(64) int arrived;
    alignas(64) int phase;
    alignas(64) int64_t taken[64];   // items of each loop handed out beyond every member's first; used in turn

    // Until all have come. Whoever comes last clears the counter that is two loops ahead: no one can be there yet, and no one is where it was.
    void wait(int64_t loop) {
        const int now = __atomic_load_n(&phase, __ATOMIC_ACQUIRE);
        if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == size) {
            taken[(loop + 2) % 64] = 0;
            arrived = 0;
            __atomic_store_n(&phase, now + 1, __ATOMIC_RELEASE);
            return;
        }
        for (int spins = 0; __atomic_load_n(&phase, __ATOMIC_ACQUIRE) == now; spins++) rest(spins);
    }
    static void rest(int spins);
};

// The calling thread's place in a team, if it is in one, and how many loops it has begun there.
struct Member {
    Team* team;
    int id;
    int64_t loop;
};
extern thread_local Member member;

// Runs work() on every thread of a team; loops inside it are shared.
template <class Work>
inline void run_team(const Work& work) {
    struct Task {
        const Work* work;
        Team team;
        int joined;
    } task{&work, {}, 0};
    if (gomp_parallel == nullptr || omp_team_size == nullptr || num_threads == 1) return work();
    gomp_parallel([](void* p) {
        Task& t = *static_cast<Task*>(p);
        const int id = __atomic_fetch_add(&t.joined, 1, __ATOMIC_RELAXED);
        // Every member finds the same size; the runtime may have given fewer threads than were asked for.
        __atomic_store_n(&t.team.size, omp_team_size(), __ATOMIC_RELAXED);
        member = {&t.team, id, 0};
        (*t.work)();
        member = {};
    }, &task, static_cast<unsigned>(num_threads), 0);
}

// Hands out the items 0, ..., count - 1 of one loop to the calling thread and those beside it: next() gives one, or a number past the end.
struct Items {
    int64_t* taken;
    int64_t first, step;
    bool begun;
    int64_t next() {
        if (!begun) {
            begun = true;
            if (step) return first;
        }
        return step + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
    }
};

// Threads that share the loops of the calling thread: its team's, or as many as the pool may give.
inline int sharing_threads() { return member.team ? member.team->size : num_threads; }

// Runs share(items) on the pool, or on the team the thread is in; each takes items until there are no more.
// In a team every member must come here with the same count: it may depend on the data and on sharing_threads(), never on num_threads, which another
// engine may change meanwhile.
template <class Share>
inline void share_items(int64_t count, const Share& share) {
    if (count <= 0) return;
    if (Team* team = member.team) {
        const int64_t loop = member.loop++;
        share(Items{&team->taken[loop % 64], member.id, team->size, false});
        team->wait(loop);
        return;
    }
    struct Task {
        const Share* share;
        int64_t taken;
    } task{&share, 0};
    const auto run = [](void* p) {
        Task& t = *static_cast<Task*>(p);
        (*t.share)(Items{&t.taken, 0, 0, false});
    };
    if (gomp_parallel == nullptr || num_threads == 1 || count <= 1) run(&task);
    else gomp_parallel(run, &task, static_cast<unsigned>(count < num_threads ? count : num_threads), 0);
}

// Runs body(i) for every i in [0, count), handing out `grain` items at a time.
template <class Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
    const int64_t blocks = count > 0 ? (count + grain - 1) / grain : 0;
    share_items(blocks, [&](Items items) {
        for (int64_t block; (block = items.next()) < blocks;) {
            const int64_t end = (block + 1) * grain < count ? (block + 1) * grain : count;
            for (int64_t i = block * grain; i < end; i++) body(i);
        }
    });
}

// Runs body(i, then) for every i in [0, count); `then` is the item the same thread does next, or -1.
template <class Body>
inline void parallel_pairs(int64_t count, const Body& body) {
    share_items(count, [&](Items items) {
        for (int64_t i = items.next(); i < count;) {
            const int64_t then = items.next();
            body(i, then < count ? then : -1);
            i = then;
        }
    });
}

// A buffer of the calling thread that only grows, 64-byte aligned. Holds one kernel's scratch at a time.
void* thread_scratch(size_t bytes);

}  // namespace quire
