// The thread pool: how many threads share a loop, and the helper; see thread_pool.h.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <time.h>

#include <cstdlib>
#include <new>

#include "common.h"

namespace quire {

void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
int (*omp_num_threads)() = nullptr;
thread_local Member member{};

namespace {

int num_threads = 1, setting = 1;

constexpr int64_t LEAST_PAUSE = 40000000, MOST_PAUSE = 16 * LEAST_PAUSE;   // ticks for which a thread is left out: 10 to 30 ms, up to half a second
constexpr int64_t TRIAL = MOST_PAUSE;   // ticks without lateness before a thread is used again: after sleep, a thread keeps its core for a few slices

// The threads of the calling thread's loops. setting: number of the call of quire_threads. threads: all. left_out: number of unused ones. retry_at:
// the time at which one more is tried. pause: ticks from a late loop to retry_at.
struct ThreadPool {
    int setting, threads, left_out;
    int64_t retry_at, pause;
};
thread_local ThreadPool pool{};

#if defined(__linux__)
constexpr int64_t TURN = 1500000;              // ticks of a helper's turn, about half a millisecond
constexpr int64_t IDLE = TURN / 4;             // ticks without a region after which a turn ends early
constexpr long NAP = 500000, LONG_NAP = 16 * NAP;   // nanoseconds of sleep after a turn; and the most, if the helper is interrupted nevertheless

struct Helper {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t asked = PTHREAD_COND_INITIALIZER;
    bool started = false;             // whether the thread exists
    void (*run)(void*) = nullptr;     // null: no caller needs help
    void *data = nullptr, *inside = nullptr;   // argument for run; argument of the call that the thread is in
    cpu_set_t cores{};                // the caller's cores, without the core that the caller runs on
} helper;

// Runs the current work once, if there is any.
void run_helper_once(int64_t until) {
    pthread_mutex_lock(&helper.lock);
    void (*const run)(void*) = helper.run;
    void* const data = run ? helper.data : nullptr;
    __atomic_store_n(&helper.inside, data, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&helper.lock);
    if (!run) return;
    member.until = until;
    run(data);
    __atomic_store_n(&helper.inside, static_cast<void*>(nullptr), __ATOMIC_RELEASE);
}

void* helper_main(void*) {
    cpu_set_t mine;
    CPU_ZERO(&mine);
    for (timespec nap{0, NAP};; nanosleep(&nap, nullptr)) {
        pthread_mutex_lock(&helper.lock);
        while (!helper.run) pthread_cond_wait(&helper.asked, &helper.lock);
        const cpu_set_t cores = helper.cores;
        pthread_mutex_unlock(&helper.lock);
        if (!CPU_EQUAL(&mine, &cores)) sched_setaffinity(0, sizeof(cores), &cores), mine = cores;
        const int64_t until = ticks() + TURN;
        for (int64_t now = ticks(), last = now; now < until && now < last + IDLE; now = ticks()) {
            if (!__atomic_load_n(&helper.run, __ATOMIC_RELAXED)) Region::rest(0);
            else run_helper_once(until), last = ticks();
        }
        // If the helper was interrupted, its caller waited for it. So it sleeps longer, to take less of the core. How
        // long it must sleep depends on the core's other users.
        if (was_preempted()) nap.tv_nsec = 2 * nap.tv_nsec < LONG_NAP ? 2 * nap.tv_nsec : LONG_NAP;
        else if (nap.tv_nsec > NAP) nap.tv_nsec -= nap.tv_nsec / 8;
    }
}

bool start_helper() {
    // A forked process lacks the helper thread. So it begins with a new Helper, whose lock is free.
    static bool has_fork_handler = false;
    if (!has_fork_handler && pthread_atfork(nullptr, nullptr, [] { new (&helper) Helper; }) != 0) return false;
    has_fork_handler = true;
    // The helper thread handles no signals of the process.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const bool started = pthread_create(&thread, nullptr, helper_main, nullptr) == 0;
    if (started) pthread_setname_np(thread, "quire-helper"), pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
}
#endif

}  // namespace

int pool_threads() {
    if (gomp_parallel == nullptr || omp_num_threads == nullptr) return 1;
    const int now = __atomic_load_n(&setting, __ATOMIC_ACQUIRE);
    if (pool.setting != now) pool = {now, __atomic_load_n(&num_threads, __ATOMIC_RELAXED), 0, 0, LEAST_PAUSE};
    return pool.threads - pool.left_out + (pool.left_out > 0 && ticks() >= pool.retry_at);
}

void report_loop(int threads, bool late) {
    const bool trial = threads > pool.threads - pool.left_out;
    if (late) {
        pool.pause = !trial ? LEAST_PAUSE : pool.pause < MOST_PAUSE ? 2 * pool.pause : MOST_PAUSE;
        if (!trial && pool.left_out < pool.threads - 1) pool.left_out++;
        pool.retry_at = ticks() + pool.pause;
    } else if (trial && ticks() > pool.retry_at + TRIAL) {
        pool.left_out--;
        pool.pause = LEAST_PAUSE;
        pool.retry_at = ticks();
    }
}

bool is_alone() { return pool.left_out > 0 && pool.left_out == pool.threads - 1; }

bool helper_joins_loop(int64_t loop) {
    Region& region = *member.region;
    while (member.role == Role::HELPER) {
        uint64_t state = __atomic_load_n(&region.state, __ATOMIC_ACQUIRE);
        const int64_t now = static_cast<int64_t>(state >> 16);
        if (now > loop) return false;
        if (ticks() > member.until) member.role = Role::DONE;
        // Joins as one more member that others wait for, unless all members have reached the loop's end, or no member has reached the loop.
        else if (now < loop || (state & 0xffff) == 0) Region::rest(0);
        else if (__atomic_compare_exchange_n(&region.state, &state, state + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return true;
    }
    return false;
}

#if defined(__linux__)
bool acquire_helper(void (*run)(void*), void* data) {
    cpu_set_t cores;
    const int core = sched_getcpu();
    if (core < 0 || sched_getaffinity(0, sizeof(cores), &cores) != 0) return false;
    CPU_CLR(core, &cores);
    if (CPU_COUNT(&cores) == 0) return false;
    pthread_mutex_lock(&helper.lock);
    const bool is_free = helper.run == nullptr && (helper.started || (helper.started = start_helper()));
    if (is_free) {
        helper.data = data, helper.cores = cores;
        __atomic_store_n(&helper.run, run, __ATOMIC_RELAXED);
        pthread_cond_signal(&helper.asked);
    }
    pthread_mutex_unlock(&helper.lock);
    return is_free;
}

void release_helper(void* data) {
    pthread_mutex_lock(&helper.lock);
    __atomic_store_n(&helper.run, nullptr, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&helper.lock);
    for (int spins = 0; __atomic_load_n(&helper.inside, __ATOMIC_ACQUIRE) == data; spins++) Region::rest(spins);
}
#else
bool acquire_helper(void (*)(void*), void*) { return false; }
void release_helper(void*) {}
#endif

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

void Region::rest(int spins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    // On a busy machine, the awaited thread may need this core. A helper does not yield, because it would lose the rest of its slice.
    if (spins >= 1000 && member.role == Role::BASE) sched_yield();
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

// Number of threads that the calling thread's loops currently do not use.
QUIRE_API int quire_left_out() { return pool.setting == __atomic_load_n(&setting, __ATOMIC_ACQUIRE) ? pool.left_out : 0; }

// parallel, count_threads: addresses of GOMP_parallel and omp_get_num_threads, or null for one thread.
QUIRE_API void quire_threads(void* parallel, void* count_threads, int count) {
    omp_num_threads = reinterpret_cast<int (*)()>(count_threads);
    gomp_parallel = reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(parallel);
    __atomic_store_n(&num_threads, count, __ATOMIC_RELAXED);
    __atomic_add_fetch(&setting, 1, __ATOMIC_RELEASE);
}
