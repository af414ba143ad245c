// The inner part of a matrix product: register tiles of rows times outputs, and how they sweep over the weights.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear_plan.h"

namespace native {

// Few rows are worked on in half registers, of which two weights a cycle can be read and broadcast, not one.
constexpr int HALF = 8;
typedef float half __attribute__((vector_size(4 * HALF)));

// What a thread keeps while it works on a task.
struct Space {
    float* staged; // [outputs of a tile][STAGED]: weights of one block of inputs
    float* sums;   // [outputs, both parts' where gated][vectors of the strip * WIDTH]
    static constexpr int64_t STAGE = OUTPUTS[1] * STAGED, SUMS = int64_t(CHUNK) * VECTORS * WIDTH;
};

// Weights that the thread needs next: fetched into the cache while others are worked on, in the order of their
// addresses, which the processor's own prefetcher then follows.
struct Ahead {
    const char* at;
    int64_t row, length; // bytes from row to row, and of a row
    int64_t left;        // bytes of this row

    void fetch(int lines) {
        for (int i = 0; i < lines; ++i) {
            __builtin_prefetch(at, 0, 2);
            at += 64;
            left -= 64;
            if (left > 0) continue;
            at += row - length;
            left = length;
        }
    }
};

// One block of items of a register tile: N vectors V of rows, `stride` floats apart from item to item, times M outputs.
template <class Items, class V, int N, int M>
inline void multiply(const float* x, int stride, const float* const (&w)[M], Ahead& ahead, int lines, int items,
                     bool first, float* sums) {
    constexpr int LANES = sizeof(V) / sizeof(float);
    V sum[M][N] = {};
    for (int begin = 0; begin < items; begin += LINE) {
        ahead.fetch(lines);
        for (int k = begin; k < std::min(begin + LINE, items); ++k, x += stride) {
            V rows[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) std::memcpy(&rows[n], x + n * LANES, sizeof(V));
#pragma GCC unroll 24
            for (int m = 0; m < M; ++m) {
                const V weight = Items::template broadcast<V>(w[m], k);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sum[m][n] = Items::add(sum[m][n], rows[n], weight);
            }
        }
    }
#pragma GCC unroll 24
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            float* to = sums + m * stride + n * LANES;
            V before = {};
            if (!first) std::memcpy(&before, to, sizeof(V));
            before += sum[m][n];
            std::memcpy(to, &before, sizeof(V));
        }
}

// All outputs of a task's part times one strip, for the items first .. first + count. `sums` are the strip's; `after`
// are the weights of whatever comes after this.
template <class Items, class W, int N>
void sweep(const Linear& l, const Task& task, int part, const float* x, int64_t first, int count, float* staged,
           float* sums, const W* after) {
    constexpr int M = OUTPUTS[N], ITEM = Items::ITEM, LINES = M * LINE * ITEM * sizeof(W) / 64;
    const Linear::Part& of = l.part[part];
    const W* const weights = static_cast<const W*>(of.weight) + first * ITEM;
    const int64_t row_bytes = of.weight_row * sizeof(W), length = ceil_div(count * ITEM * sizeof(W), 64) * 64;
    for (int output = 0; output < task.count; output += M, sums += M * N * WIDTH) {
        const W* rows[M];
        for (int m = 0; m < M; ++m) // past the last output it is repeated, and nobody reads the sums
            rows[m] = weights + std::min(task.first + output + m, of.outputs - 1) * of.weight_row;
        const W* next = output + M < task.count ? weights + (task.first + output + M) * of.weight_row : after;
        Ahead ahead{reinterpret_cast<const char*>(next), row_bytes, length, length};
        for (int begin = 0; begin < count; begin += INPUTS) {
            const int items = std::min(INPUTS, count - begin);
            const int inputs = std::min<int64_t>(items * ITEM, l.inputs - (first + begin) * ITEM);
            const float* w[M];
            for (int m = 0; m < M; ++m) w[m] = Items::reach(rows[m] + begin * ITEM, inputs, staged + m * STAGED);
            const float* turned = x + int64_t(begin) * N * WIDTH;
            const bool new_sums = first + begin == 0;
            if (N == 1 && WIDTH > HALF && l.rows <= HALF)
                multiply<Items, half, 1>(turned, WIDTH, w, ahead, LINES, items, new_sums, sums);
            else if (N == 1 && WIDTH > HALF)
                multiply<Items, half, WIDTH / HALF>(turned, WIDTH, w, ahead, LINES, items, new_sums, sums);
            else
                multiply<Items, vec, N>(turned, N * WIDTH, w, ahead, LINES, items, new_sums, sums);
        }
    }
}

template <class Items, class W, int N = VECTORS>
void sweep_parts(const Linear& l, const Task& task, int64_t first, int count, const Space& space) {
    const Rows rows(l);
    if (rows.size(task.strip) != N) {
        if constexpr (N > 1) sweep_parts<Items, W, N - 1>(l, task, first, count, space);
        return;
    }
    const float* x = l.packed + (int64_t(rows.first(task.strip)) * item_count<Items>(l) + first * N) * WIDTH;
    const auto place = [&](int part, int64_t row, int64_t item) {
        return static_cast<const W*>(l.part[part].weight) + row * l.part[part].weight_row + item * Items::ITEM;
    };
    const bool last = first + count == item_count<Items>(l);
    const int64_t far = task.first + l.threads * int64_t(task.count); // where this thread goes next, as a guess
    const W* next = last ? place(task.part, far, 0) : place(task.part, task.first, first + count);
    sweep<Items, W, N>(l, task, task.part, x, first, count, space.staged, space.sums,
                       l.gated ? place(1, task.first, first) : next);
    if (!l.gated) return;
    sweep<Items, W, N>(l, task, 1, x, first, count, space.staged, space.sums + CHUNK / 2 * N * WIDTH, next);
}

} // namespace native
