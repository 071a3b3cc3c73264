// What the product kernels need of the rest of the library: one thread.
#include "common.h"
#include <cstdlib>

namespace quire {

thread_local Member member;
void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned);
int (*omp_num_threads)();

void Region::rest(int) {}
int pool_threads() { return 1; }
void report_loop(int, bool) {}
bool is_alone() { return false; }
bool was_preempted() { return false; }
bool helper_joins_loop(int64_t) { return false; }
bool acquire_helper(void (*)(void*), void*) { return false; }
void release_helper(void*) {}

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
