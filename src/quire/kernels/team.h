// Loops whose items several threads share.
//
// No OpenMP is linked: the process already holds torch's pool of threads, and a second pool would fight it for the cores. The loader passes
// torch's own GOMP_parallel in as a function pointer.
//
// A loop ends when all its items are done, so a thread whose core another program holds makes the others wait, a few milliseconds at a time, where
// a whole decode step takes no longer. After a wait like that there is one thread fewer for a while: a long wait, and one of the threads lost its
// core meanwhile, as the system counts (Linux). Two threads that share a core wait for each other in turns, for shorter times but always.
//
// A caller that is left alone then has a helper, a thread of ours that is asleep otherwise. It works in short turns on what the other program leaves
// of its core: who sleeps in between and takes less than its share is hardly ever interrupted, so its items come in time. It comes into a loop under
// way, and leaves when there are no more items or its turn is over; only that loop waits for it, and the end of the region while it is inside.
#pragma once
#include <cstddef>
#include <cstdint>
#if !defined(__x86_64__)
#include <ctime>
#endif

namespace quire {

// GOMP_parallel of the runtime torch uses, or null: then every loop runs on the calling thread.
extern void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned);
extern int (*omp_team_size)();

// Time that passes alike on all cores, a few of these a nanosecond.
inline int64_t ticks() {
#if defined(__x86_64__)
    return static_cast<int64_t>(__builtin_ia32_rdtsc());
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

// Whether the caller is alone because all others were late; asked after crew_size().
bool crew_is_short();

// Whether the calling thread lost its core to another one since it was last asked.
bool was_preempted();

// Threads that run the same code side by side and share its loops: a whole stack of layers in one parallel region. Entering and leaving one
// costs a microsecond or two, and a decode step has more than two hundred loops.
struct Team {
    int base;                        // members from the beginning to the end
    bool helped;                     // whether one more may come
    int64_t late;                    // ticks of all longer waits
    alignas(64) uint64_t state;      // the loop under way, and in the low 16 bits how many of its members have not come to its end
    alignas(64) int64_t over;        // loops that are: what members who wait look at, beside what those who come write
    alignas(64) int64_t taken[64];   // items of each loop handed out beyond the first of each base member; used in turn

    // To be called by every base member, with the same number.
    void open(int members) {
        uint64_t none = 0;
        __atomic_store_n(&base, members, __ATOMIC_RELAXED);
        __atomic_compare_exchange_n(&state, &none, static_cast<uint64_t>(members), false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    }

    // The calling thread has come to the end of its loop. Whoever comes last clears the counter that is two loops ahead: no one can be there yet,
    // and no one is where it was. Returns the loop, or -1 if it is over.
    int64_t arrive() {
        const uint64_t left = __atomic_sub_fetch(&state, 1, __ATOMIC_ACQ_REL);
        const int64_t now = static_cast<int64_t>(left >> 16);
        if ((left & 0xffff) != 0) return now;
        taken[(now + 2) % 64] = 0;
        __atomic_store_n(&state, static_cast<uint64_t>(now + 1) << 16 | static_cast<uint64_t>(base), __ATOMIC_RELEASE);
        __atomic_store_n(&over, now + 1, __ATOMIC_RELEASE);
        return -1;
    }

    // The same, and until all have come.
    void wait() {
        const int64_t now = arrive();
        if (now < 0) return;
        const int64_t came = ticks();
        for (int spins = 0; __atomic_load_n(&over, __ATOMIC_ACQUIRE) <= now; spins++) rest(spins);
        const int64_t waited = ticks() - came;
        if (waited > USUAL) __atomic_fetch_add(&late, waited, __ATOMIC_RELAXED);
    }
    static void rest(int spins);
};

// A helper comes into one loop after the other until its turn is over, and then passes the others by.
enum class Role : char { BASE, HELPER, DONE };

// The calling thread's place in a team, if it is in one, how many loops it has begun there, and when it was done in its last parallel region. A
// helper's turn lasts until then.
struct Member {
    Team* team;
    int id;
    Role role;
    int64_t loop, done, until;
};
extern thread_local Member member;

// Whether the calling helper takes part in a loop: not if the loop or its own turn is over.
bool helper_enters(int64_t loop);

// Lends the helper to the calling thread until it says that its last loop is over: run(data) is called on it any number of times meanwhile. False if
// there is none, as when another thread has it.
bool ask_for_help(void (*run)(void*), void* data);
void end_help(void* data);

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
    member = {nullptr, 0, Role::BASE, 0, ticks(), 0};
}

// Runs work() on every thread of a team; loops inside it are shared. A helper may call it again and again from its beginning: between loops it
// computes from what the region does not change.
template <class Work>
inline void run_team(const Work& work) {
    struct Task {
        const Work* work;
        Team team;
        int joined, preempted;
        static void join(void* p) {
            Task& t = *static_cast<Task*>(p);
            member = {&t.team, __atomic_fetch_add(&t.joined, 1, __ATOMIC_RELAXED), Role::BASE, 0, 0, 0};
            (*t.work)();
            leave_region(t.preempted);
        }
        static void join_others(void* p) {
            // Every member finds the same size; the runtime may have given fewer threads than were asked for.
            static_cast<Task*>(p)->team.open(omp_team_size());
            join(p);
        }
        static void help(void* p) {
            Task& t = *static_cast<Task*>(p);
            member = {&t.team, t.team.base, Role::HELPER, 0, 0, member.until};
            (*t.work)();
            member.team = nullptr;
        }
    } task{&work, {}, 0, 0};
    Team& team = task.team;
    const int threads = crew_size();
    if (threads > 1) return run_parallel(Task::join_others, &task, threads, team.late, task.preempted);
    team.open(1);
    team.helped = crew_is_short();
    const bool lent = team.helped && ask_for_help(Task::help, &task);
    Task::join(&task);
    if (lent) end_help(&task);
}

// Hands out the items 0, ..., count - 1 of one loop to the calling thread and those beside it: next() gives one, or a number past the end.
struct Items {
    int64_t* taken;
    int64_t first, step;   // an item that is the calling thread's own, or -1, and how many of them there are
    int64_t until;         // if not 0, there are no more after that
    int64_t next() {
        const int64_t own = first;
        first = -1;
        if (own >= 0) return own;
        if (until && ticks() > until) return INT64_MAX;
        return step + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
    }
};

// Threads that share the loops of the calling thread, a helper among them: its team's, or as many as the pool may give.
inline int sharing_threads() {
    if (member.team) return member.team->base + member.team->helped;
    const int threads = crew_size();
    return threads + (threads == 1 && crew_is_short());
}

// Runs share(items) on the pool, or on the team the thread is in; each takes items until there are no more.
// In a team every member must come here with the same count: it may depend on the data and on sharing_threads(), never on what another engine may
// change meanwhile, nor on what the region's loops compute.
template <class Share>
inline void share_items(int64_t count, const Share& share) {
    if (count <= 0) return;
    if (Team* team = member.team) {
        const int64_t loop = member.loop++;
        if (member.role == Role::BASE) {
            share(Items{&team->taken[loop % 64], member.id, team->base, 0});
            return team->wait();
        }
        if (!helper_enters(loop)) return;
        share(Items{&team->taken[loop % 64], -1, team->base, member.until});
        team->arrive();
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
    const int threads = count < 2 ? 1 : crew_size();
    if (threads > 1) run_parallel(run, &task, count < threads ? static_cast<int>(count) : threads, 0, task.preempted);
    else if (count > 1 && crew_is_short()) run_team([&] { share_items(count, share); });
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
