// Loops with items that several threads share.
//
// No OpenMP is linked: the process already has torch's thread pool, and a second pool would compete with it for the cores. The loader passes torch's
// own GOMP_parallel in as a function pointer.
//
// A loop ends when all its items are done. If another program takes the core of one thread, the other threads wait for this thread, several
// milliseconds at a time: as long as a whole decode step. So after a long wait during which a thread lost its core (counted by Linux), loops use one
// thread fewer for a while. Two threads that share a core wait for each other in turns: for shorter times, but always.
//
// If the calling thread is then alone, it gets a helper: a thread of our own that otherwise sleeps. The helper works in short turns, in the time that
// the other program leaves on the helper's core. A thread that sleeps between turns, and takes less than its share of the core, is rarely
// interrupted, so its items are done in time. The helper joins a running loop. It leaves the loop when there are no more items or its turn is over.
// The loop waits for the helper, and so does the end of the region if the helper is still inside.
#pragma once
#include <cstddef>
#include <cstdint>
#if !defined(__x86_64__)
#include <ctime>
#endif

namespace quire {

// GOMP_parallel of torch's runtime. If null, every loop runs on the calling thread.
extern void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned);
extern int (*omp_num_threads)();

// A clock that all cores share; a few ticks per nanosecond.
inline int64_t ticks() {
#if defined(__x86_64__)
    return static_cast<int64_t>(__builtin_ia32_rdtsc());
#else
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 2 * (now.tv_sec * 1000000000LL + now.tv_nsec);
#endif
}

constexpr int64_t USUAL_WAIT = 50000;   // ticks, 10 to 30 us, that a thread ordinarily waits for others at the end of a loop

// pool_threads: the number of threads for the calling thread's next loop.
// report_loop: to be called after the loop, with the number of threads used and whether a thread was late.
int pool_threads();
void report_loop(int threads, bool late);

// Whether the caller is alone because all other threads were late. To be called after pool_threads().
bool is_alone();

// Whether the calling thread lost its core to another thread since the last call.
bool was_preempted();

// A parallel region: its threads all run the same code, such as a stack of layers, and share the loops in this code. Entering and leaving a region
// costs 1 to 2 us, and a decode step has more than two hundred loops, so the whole stack is one region.
struct Region {
    int base;                        // number of base members: threads that are in the region from its beginning to its end
    bool helped;                     // whether a helper may join
    int64_t late;                    // ticks of all long waits
    alignas(64) uint64_t state;      // high bits: number of the current loop; low 16 bits: number of its members that have not reached its end
    alignas(64) int64_t over;        // number of ended loops. Waiting members read it; it is separate from what arriving members write
    alignas(64) int64_t taken[64];   // ring, per loop: number of items handed out, without the first item of each base member

    // To be called by every base member, with the same number.
    void open(int members) {
        uint64_t none = 0;
        __atomic_store_n(&base, members, __ATOMIC_RELAXED);
        __atomic_compare_exchange_n(&state, &none, static_cast<uint64_t>(members), false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    }

    // Reports that the calling thread has reached the end of its loop. The last thread clears the item counter of the loop after the next: no thread
    // can be in that loop yet, and none is still in the loop that used the counter before. Returns the number of the loop, or -1 if it is over.
    int64_t arrive() {
        const uint64_t left = __atomic_sub_fetch(&state, 1, __ATOMIC_ACQ_REL);
        const int64_t now = static_cast<int64_t>(left >> 16);
        if ((left & 0xffff) != 0) return now;
        taken[(now + 2) % 64] = 0;
        __atomic_store_n(&state, static_cast<uint64_t>(now + 1) << 16 | static_cast<uint64_t>(base), __ATOMIC_RELEASE);
        __atomic_store_n(&over, now + 1, __ATOMIC_RELEASE);
        return -1;
    }

    // Arrives, and waits until all have.
    void wait() {
        const int64_t now = arrive();
        if (now < 0) return;
        const int64_t came = ticks();
        for (int spins = 0; __atomic_load_n(&over, __ATOMIC_ACQUIRE) <= now; spins++) rest(spins);
        const int64_t waited = ticks() - came;
        if (waited > USUAL_WAIT) __atomic_fetch_add(&late, waited, __ATOMIC_RELAXED);
    }
    static void rest(int spins);
};

// BASE: in the region from beginning to end. HELPER: enters one loop after the other until its turn is over. DONE: a helper after its turn; it skips
// the remaining loops.
enum class Role : char { BASE, HELPER, DONE };

// The calling thread's place in a region. region: null outside of regions. id: its number there. loop: number of loops it has begun there. done: the
// time when its last region ended. until: the end of a helper's turn. Times are in ticks.
struct Member {
    Region* region;
    int id;
    Role role;
    int64_t loop, done, until;
};
extern thread_local Member member;

// Whether the calling helper takes part in a loop. It does not if the loop or its own turn is over.
bool helper_joins_loop(int64_t loop);

// Lends the helper to the calling thread until release_helper. Meanwhile the helper calls run(data) any number of times. Returns false if there is no
// helper, for example because another thread has it.
bool acquire_helper(void (*run)(void*), void* data);
void release_helper(void* data);

// Runs run(data) on threads of the pool, including the caller. The threads write `late`, the ticks of long waits inside, and `preempted`, whether a
// thread lost its core. Waits count only if they took more than an eighth of the time: after a short wait in a prompt of half a second, the next
// prompt should not be computed by fewer threads.
inline void run_parallel(void (*run)(void*), void* data, int threads, const int64_t& late, const int& preempted) {
    const int64_t began = ticks();
    gomp_parallel(run, data, static_cast<unsigned>(threads), 0);
    const int64_t now = ticks(), last = now - member.done;
    report_loop(threads, preempted && late / threads + (last > USUAL_WAIT ? last : 0) > (now - began) / 8);
}

// To be called by every thread at the end of a region.
inline void leave_region(int& preempted) {
    if (was_preempted()) __atomic_store_n(&preempted, 1, __ATOMIC_RELAXED);
    member = {nullptr, 0, Role::BASE, 0, ticks(), 0};
}

// Runs work() on every thread of a region; the threads share the loops in it. A helper may run work() several times from its start, so code between
// loops must only read data that the region does not change.
template <class Work>
inline void run_region(const Work& work) {
    struct Task {
        const Work* work;
        Region region;
        int joined, preempted;
        static void join(void* p) {
            Task& t = *static_cast<Task*>(p);
            member = {&t.region, __atomic_fetch_add(&t.joined, 1, __ATOMIC_RELAXED), Role::BASE, 0, 0, 0};
            (*t.work)();
            leave_region(t.preempted);
        }
        static void join_others(void* p) {
            // Every member finds the same size. The runtime may give fewer threads than requested.
            static_cast<Task*>(p)->region.open(omp_num_threads());
            join(p);
        }
        static void help(void* p) {
            Task& t = *static_cast<Task*>(p);
            member = {&t.region, t.region.base, Role::HELPER, 0, 0, member.until};
            (*t.work)();
            member.region = nullptr;
        }
    } task{&work, {}, 0, 0};
    Region& region = task.region;
    const int threads = pool_threads();
    if (threads > 1) return run_parallel(Task::join_others, &task, threads, region.late, task.preempted);
    region.open(1);
    region.helped = is_alone();
    const bool lent = region.helped && acquire_helper(Task::help, &task);
    Task::join(&task);
    if (lent) release_helper(&task);
}

// Hands out the items 0, ..., count - 1 of one loop to the threads that share it. next() returns an item, or a number past the end.
struct Items {
    int64_t* taken;
    int64_t first, step;   // first: the calling thread's own first item, or -1. step: the number of base members, which all have such an item
    int64_t until;         // if not 0, no more items are handed out after this time
    int64_t next() {
        const int64_t own = first;
        first = -1;
        if (own >= 0) return own;
        if (until && ticks() > until) return INT64_MAX;
        return step + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
    }
};

// The number of threads that share the calling thread's loops, helper included: its region's, or the most that the pool gives.
inline int sharing_threads() {
    if (member.region) return member.region->base + member.region->helped;
    const int threads = pool_threads();
    return threads + (threads == 1 && is_alone());
}

// Runs share(items) on the pool, or on the calling thread's region. Each thread takes items until there are no more.
// In a region, every member must call this with the same count. The count may depend on the data and on sharing_threads(), but not on anything that
// another engine may change meanwhile or that the region's loops compute.
template <class Share>
inline void share_items(int64_t count, const Share& share) {
    if (count <= 0) return;
    if (Region* region = member.region) {
        const int64_t loop = member.loop++;
        if (member.role == Role::BASE) {
            share(Items{&region->taken[loop % 64], member.id, region->base, 0});
            return region->wait();
        }
        if (!helper_joins_loop(loop)) return;
        share(Items{&region->taken[loop % 64], -1, region->base, member.until});
        region->arrive();
        return;
    }
    struct Task {
        const Share* share;
        int64_t taken;
        int preempted;
    } task{&share, 0, 0};
    const auto run = [](void* p) {
        Task& t = *static_cast<Task*>(p);
        (*t.share)(Items{&t.taken, -1, 0, 0});
        leave_region(t.preempted);
    };
    const int threads = count < 2 ? 1 : pool_threads();
    if (threads > 1) run_parallel(run, &task, count < threads ? static_cast<int>(count) : threads, 0, task.preempted);
    else if (count > 1 && is_alone()) run_region([&] { share_items(count, share); });
    else run(&task);
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

// Runs body(i, then) for every i in [0, count); `then` is the same thread's next item, or -1.
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

}  // namespace quire
