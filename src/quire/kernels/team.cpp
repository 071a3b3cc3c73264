// How many threads share a loop; see team.h.
#include <sched.h>
#include <sys/resource.h>

#include <cstdlib>

#include "common.h"

namespace quire {

void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
int (*omp_team_size)() = nullptr;
thread_local Member member{};

namespace {

int num_threads = 1, setting = 1;

constexpr int64_t LEAST_PAUSE = 40000000, MOST_PAUSE = 16 * LEAST_PAUSE;   // ticks without a thread: 10 to 30 ms, and up to half a second
constexpr int64_t TRIAL = MOST_PAUSE;   // ticks that it must not be late for then: one that slept has its core for a few slices on end

// Of the calling thread's loops: how many threads there are, how many are left out, when one more is tried, and how long the pause before that was.
struct Crew {
    int setting, threads, left_out;
    int64_t again, pause;
};
thread_local Crew crew{};

}  // namespace

int crew_size() {
    if (gomp_parallel == nullptr || omp_team_size == nullptr) return 1;
    const int now = __atomic_load_n(&setting, __ATOMIC_ACQUIRE);
    if (crew.setting != now) crew = {now, __atomic_load_n(&num_threads, __ATOMIC_RELAXED), 0, 0, LEAST_PAUSE};
    return crew.threads - crew.left_out + (crew.left_out > 0 && ticks() >= crew.again);
}

void crew_went(int threads, bool late) {
    const bool trial = threads > crew.threads - crew.left_out;
    if (late) {
        crew.pause = !trial ? LEAST_PAUSE : crew.pause < MOST_PAUSE ? 2 * crew.pause : MOST_PAUSE;
        if (!trial && crew.left_out < crew.threads - 1) crew.left_out++;
        crew.again = ticks() + crew.pause;
    } else if (trial && ticks() > crew.again + TRIAL) {
        crew.left_out--;
        crew.pause = LEAST_PAUSE;
        crew.again = ticks();
    }
}

bool was_preempted() {
#if defined(RUSAGE_THREAD)
    static thread_local int64_t before = -1;
    rusage used;
    if (getrusage(RUSAGE_THREAD, &used) != 0) return false;
    const bool more = before >= 0 && used.ru_nivcsw != before;
    before = used.ru_nivcsw;
    return more;
#else
    return false;
#endif
}

void Team::rest(int spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    // On a busy machine the thread waited for may need this core.
    if (spins >= 1000) sched_yield();
}

void* thread_scratch(size_t bytes) {
    struct Owner {
        void* data = nullptr;
        size_t size = 0;
        ~Owner() { std::free(data); }
    };
    static thread_local Owner owner;
    if (bytes > owner.size) {
        std::free(owner.data);
        owner.size = (bytes + 4095) / 4096 * 4096;
        owner.data = std::aligned_alloc(64, owner.size);
    }
    return owner.data;
}

}  // namespace quire

using namespace quire;

// parallel, team_size: addresses of GOMP_parallel and omp_get_num_threads, or null for one thread.
QUIRE_API void quire_threads(void* parallel, void* team_size, int count) {
    omp_team_size = reinterpret_cast<int (*)()>(team_size);
    gomp_parallel = reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(parallel);
    __atomic_store_n(&num_threads, count, __ATOMIC_RELAXED);
    __atomic_add_fetch(&setting, 1, __ATOMIC_RELEASE);
}
