// What the product kernels need of the rest of the library: one thread.
#include "common.h"
#include <cstdlib>

namespace quire {

thread_local Member member;
void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned);
int (*omp_team_size)();

void Team::rest(int) {}
int crew_size() { return 1; }
void crew_went(int, bool) {}
bool crew_is_short() { return false; }
bool was_preempted() { return false; }
bool helper_enters(int64_t) { return false; }
bool ask_for_help(void (*)(void*), void*) { return false; }
void end_help(void*) {}

void* thread_scratch(size_t bytes) {
    static void* data = nullptr;
    static size_t size = 0;
    if (bytes > size) {
        std::free(data);
        size = (bytes + 63) / 64 * 64;
        data = std::aligned_alloc(64, size);
    }
    return data;
}

}  // namespace quire
