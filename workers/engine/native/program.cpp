// Runs a model's whole forward over one packed step, in one parallel region.
//
// What holds here:
// - A thread takes tasks from a stage's counter, then waits until all of them are *done*, and goes on to the next stage.
//   Nobody waits for a thread that has not been scheduled: on a busy machine the others do its share.
// - Every index that comes from outside (token ids, wanted rows) is checked before the first stage.
#include <atomic>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "stages.h"

namespace kernels {
namespace {

enum Outcome : int { DONE, NO_MEMORY, BAD_INDEX };

struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> done{0};
};

struct Freed {
    void operator()(void* memory) const { std::free(memory); }
};

// Working space that a calling thread keeps from step to step, 64-byte aligned.
struct Space {
    std::unique_ptr<float, Freed> memory;
    int64_t size = 0;

    float* at_least(int64_t floats) {
        if (floats > size) {
            memory.reset();
            size = 0;
            memory.reset(static_cast<float*>(std::aligned_alloc(64, lines(floats) * sizeof(float))));
            if (!memory) throw std::bad_alloc();
            size = floats;
        }
        return memory.get();
    }
};

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr int SPINS = 256; // looks at a counter before the processor is offered to others

void wait(const std::atomic<int64_t>& done, int64_t tasks) {
    for (int spins = 0; done.load(std::memory_order_acquire) < tasks; ++spins)
        if (spins < SPINS)
            relax();
        else
            std::this_thread::yield();
}

// The processor time of this thread, which a busy machine does not stretch. On a quiet one it is the time that passes,
// since a thread that waits looks all the while.
double now() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

// One thread's share of all stages. `seconds` is null for all threads but one.
void work(const std::vector<Stage>& stages, Counter* counters, float* scratch, double* seconds) {
    double began = seconds ? now() : 0.0;
    for (size_t i = 0; i < stages.size(); ++i) {
        const Stage& stage = stages[i];
        int64_t mine = 0;
        for (int64_t task; (task = counters[i].next.fetch_add(1, std::memory_order_relaxed)) < stage.tasks; ++mine)
            stage.work(*stage.bound, task, scratch);
        if (mine) counters[i].done.fetch_add(mine, std::memory_order_release);
        wait(counters[i].done, stage.tasks);
        if (seconds) {
            const double ended = now();
            seconds[stage.operation] += ended - began;
            began = ended;
        }
    }
}

bool fits(const Program& program, const Step& step) {
    bool good = true;
    for (int i = 0; i < step.rows; ++i) good &= step.ids[i] >= 0 && step.ids[i] < program.vocabulary;
    for (int i = 0; i < step.wanted_rows; ++i) good &= step.wanted[i] >= 0 && step.wanted[i] < step.rows;
    return good;
}

int run(const Program& program, const Step& step) try {
    if (!fits(program, step)) return BAD_INDEX;
    thread_local Space shared, own;
    Plan plan(program, step);
    const std::unique_ptr<Counter[]> counters(new Counter[plan.stages.size()]);
    plan.place(shared.at_least(plan.packed));
    const int64_t size = lines(plan.scratch);
    float* const scratch = own.at_least(size * step.threads);
#pragma omp parallel num_threads(step.threads)
    {
        const int thread = thread_number();
        work(plan.stages, counters.get(), scratch + size * thread, thread ? nullptr : step.seconds);
    }
    return DONE;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

} // namespace
} // namespace kernels

extern "C" {
int batchjobs_forward(const kernels::Program* program, const kernels::Step* step) {
    return kernels::run(*program, *step);
}
// Guard the mirrors in operations.py.
int64_t batchjobs_operation_size() { return sizeof(kernels::Operation); }
int64_t batchjobs_program_size() { return sizeof(kernels::Program); }
int64_t batchjobs_step_size() { return sizeof(kernels::Step); }
int64_t batchjobs_call_size() { return sizeof(kernels::Call); }
}
