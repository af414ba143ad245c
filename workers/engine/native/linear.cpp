// One matrix product as a call of its own, over plain pointers. The work itself is in linear.h.
#include <atomic>
#include <memory>
#include <new>
#include <thread>

#include "linear.h"

namespace {

// Working space that a calling thread keeps from call to call, 64-byte aligned.
float* working_space(int64_t floats) {
    thread_local std::unique_ptr<float[]> kept;
    thread_local int64_t size = 0;
    if (floats > size) {
        kept.reset();
        size = 0;
        kept.reset(new float[floats + native::LINE]);
        size = floats;
    }
    float* const at = kept.get();
    return at + (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64 / sizeof(float);
}

} // namespace

extern "C" {
// 0, or 1 when memory ran out before anything was written. `packed` may be null: then the call makes its own.
int batchjobs_linear(const Linear* call) try {
    Linear l = *call;
    if (l.rows < 1) return 0;
    const int threads = std::max(1, l.threads);
    const int64_t scratch = native::ceil_div(linear_scratch(), native::LINE) * native::LINE;
    const int64_t packed = native::ceil_div(linear_packed(l), native::LINE) * native::LINE;
    float* const space = working_space(packed + scratch * threads);
    float* const spaces = space + packed;
    if (!l.packed) l.packed = space;
    const int64_t packs = linear_pack_tasks(l), tasks = linear_tasks(l);
    std::atomic<int64_t> next_pack{0}, done{0}, next{0};
    std::atomic<int> thread{0};
    // Threads wait for turned rows, not for each other: on a busy machine the others do a late thread's share.
#pragma omp parallel num_threads(threads)
    {
        for (int64_t i; (i = next_pack.fetch_add(1, std::memory_order_relaxed)) < packs;) {
            linear_pack(l, i);
            done.fetch_add(1, std::memory_order_release);
        }
        while (done.load(std::memory_order_acquire) < packs) std::this_thread::yield();
        float* const own = spaces + scratch * thread.fetch_add(1, std::memory_order_relaxed);
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) linear_task(l, i, own);
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

int64_t batchjobs_linear_size() { return sizeof(Linear); } // guards the mirror in linear.py
}
