// Loops whose items several threads share.
//
// No OpenMP is linked: the process already holds torch's pool of threads, and a second pool would fight it for the cores. The loader passes
// torch's own GOMP_parallel in as a function pointer.
//
// A loop ends when all its items are done, so a thread whose core another program holds makes the others wait, a few milliseconds at a time, where
// a whole decode step takes no longer. After a wait like that there is one thread fewer for a while: a long wait, and one of the threads lost its core
// meanwhile, as the system counts (Linux). Two threads that share a core wait for each other in turns, for shorter times but always.
#pragma once
#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <ctime>
#endif

namespace quire {

// GOMP_parallel of the runtime torch uses, or null: then every loop runs on the calling thread.
extern void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned);
extern int (*omp_team_size)();

// Time that passes alike on all cores, a few of these a nanosecond.
inline int64_t ticks() {
#if defined(__x86_64__)
    return static_cast<int64_t>(__rdtsc());
#else
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 2 * (now.tv_sec * 1000000000LL + now.tv_nsec);
#endif
}

constexpr int64_t USUAL = 50000;   // ticks, 10 to 30 us, that a thread waits for others at the end of any loop

// Threads for the calling thread's next loop; then, how many there were, and whether one was late.
int crew_size();
void crew_went(int threads, bool late);

// Whether the calling thread lost its core to another one since it was last asked.
bool was_preempted();

// Threads that run the same code side by side and share its loops: a whole stack of layers in one parallel region. Entering and leaving one
// costs a microsecond or two, and a decode step has more than two hundred loops.
struct Team {
    int size;
    int64_t late;                    // ticks of all longer waits
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
        const int64_t came = ticks();
        for (int spins = 0; __atomic_load_n(&phase, __ATOMIC_ACQUIRE) == now; spins++) rest(spins);
        const int64_t waited = ticks() - came;
        if (waited > USUAL) __atomic_fetch_add(&late, waited, __ATOMIC_RELAXED);
    }
    static void rest(int spins);
};

// The calling thread's place in a team, if it is in one, how many loops it has begun there, and when it was done in its last parallel region.
struct Member {
    Team* team;
    int id;
    int64_t loop, done;
};
extern thread_local Member member;

// Runs run(data) on threads of the pool, the calling one among them. late, preempted: what these leave there, ticks of long waits inside, and
// whether one lost its core. What is waited for in a prompt of half a second is no reason for doing the next one alone.
inline void run_parallel(void (*run)(void*), void* data, int threads, const int64_t& late, const int& preempted) {
    const int64_t began = ticks();
    gomp_parallel(run, data, static_cast<unsigned>(threads), 0);
    const int64_t now = ticks(), last = now - member.done;
    crew_went(threads, preempted && late / threads + (last > USUAL ? last : 0) > (now - began) / 8);
}

// To be called by every thread at the end of a region.
inline void leave_region(int& preempted) {
    if (was_preempted()) __atomic_store_n(&preempted, 1, __ATOMIC_RELAXED);
    member = {nullptr, 0, 0, ticks()};
}

// Runs work() on every thread of a team; loops inside it are shared.
template <class Work>
inline void run_team(const Work& work) {
    struct Task {
        const Work* work;
        Team team;
        int joined, preempted;
        static void join(void* p) {
            Task& t = *static_cast<Task*>(p);
            member = {&t.team, __atomic_fetch_add(&t.joined, 1, __ATOMIC_RELAXED), 0, 0};
            (*t.work)();
            leave_region(t.preempted);
        }
        static void join_others(void* p) {
            // Every member finds the same size; the runtime may have given fewer threads than were asked for.
            __atomic_store_n(&static_cast<Task*>(p)->team.size, omp_team_size(), __ATOMIC_RELAXED);
            join(p);
        }
    } task{&work, {}, 0, 0};
    const int threads = crew_size();
    if (threads > 1) return run_parallel(Task::join_others, &task, threads, task.team.late, task.preempted);
    task.team.size = 1;
    Task::join(&task);
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
inline int sharing_threads() { return member.team ? member.team->size : crew_size(); }

// Runs share(items) on the pool, or on the team the thread is in; each takes items until there are no more.
// In a team every member must come here with the same count: it may depend on the data and on sharing_threads(), never on what another engine may
// change meanwhile.
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
        int preempted;
    } task{&share, 0, 0};
    const auto run = [](void* p) {
        Task& t = *static_cast<Task*>(p);
        (*t.share)(Items{&t.taken, 0, 0, false});
        leave_region(t.preempted);
    };
    const int threads = count < 2 ? 1 : crew_size();
    if (threads == 1) run(&task);
    else run_parallel(run, &task, count < threads ? static_cast<int>(count) : threads, 0, task.preempted);
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

}  // namespace quire
