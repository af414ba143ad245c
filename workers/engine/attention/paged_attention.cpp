// One layer's paged attention as a call of its own, for models whose other layers run elsewhere: see paged_attention.h.
#include <atomic>
#include <memory>
#include <new>
#include <thread>

#include "paged_attention.h"

namespace kernels {
namespace {

template <class S>
int run(const Call& call) try {
    const std::vector<Task> tasks = plan(call);
    const int64_t rows = tile_rows(call);
    const int threads = std::max(1, call.threads);
    const int64_t size = Tile::floats(call, rows);
    const std::unique_ptr<float[]> scratch(new float[size * threads + LINE]);
    float* const aligned = scratch.get() + (64 - reinterpret_cast<uintptr_t>(scratch.get()) % 64) % 64 / sizeof(float);
    // Threads take chunks of rows to write, then wait until all are written, then take tasks. Nobody waits for a thread
    // that has not been scheduled yet, as a barrier would: on a busy machine the others do its share.
    const int chunk_rows = std::clamp(call.rows / (4 * threads), 1, LANES);
    const int chunks = (call.rows + chunk_rows - 1) / chunk_rows;
    std::atomic<int> next_chunk{0}, written{0};
    std::atomic<size_t> next_task{0};
#pragma omp parallel num_threads(threads)
    {
        for (int chunk; (chunk = next_chunk.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
            const int end = std::min((chunk + 1) * chunk_rows, call.rows);
            for (int row = chunk * chunk_rows; row < end; ++row) write<S, S>(call, row);
            written.fetch_add(1, std::memory_order_release);
        }
        while (written.load(std::memory_order_acquire) < chunks) std::this_thread::yield();
        Tile tile(call, rows, aligned + size * thread_number());
        for (size_t i; (i = next_task.fetch_add(1, std::memory_order_relaxed)) < tasks.size();)
            attend<S, S>(call, tasks[i], tile);
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

} // namespace
} // namespace kernels

extern "C" {
// 0, or 1 when memory ran out before anything was written.
int batchjobs_attend_float32(const kernels::Call* call) { return kernels::run<float>(*call); }
int batchjobs_attend_bfloat16(const kernels::Call* call) { return kernels::run<kernels::bfloat16>(*call); }
int64_t batchjobs_call_size() { return sizeof(kernels::Call); } // guards the mirror in cpu.py
}
