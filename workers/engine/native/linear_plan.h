// The call of a matrix product, and how its work is cut: rows into strips, outputs into tasks. See linear.h.
#pragma once
#include <algorithm>
#include <cstdint>

#include "vectors.h"

// Mirrored by `Linear` in linear.py. Strides are in elements; the last axis is contiguous.
struct Linear {
    struct Part {
        const void* weight; // [outputs, inputs]
        int64_t weight_row;
        const void* bias; // [outputs] or null
        float* output;    // [rows, outputs]
        int64_t output_row;
        int32_t outputs;
    };
    const float* input; // [rows, inputs]
    int64_t input_row;
    int32_t rows, inputs;
    Part part[3];           // weights over the same input: q, k, v
    int32_t parts;          // 1 to 3
    int32_t gated;          // 1: output of part 0 is act(part 0) * part 1, both of the same size
    int32_t activation;     // 0 none, 1 silu, 2 gelu, 3 gelu by tanh, 4 relu
    const float* residual;  // null or [rows, outputs of part 0], added to its result; may be the output itself
    int64_t residual_row;
    int32_t dtype;   // of weights and biases: 0 float32, 1 bfloat16
    int32_t threads; // the work is cut for so many
    float* packed;   // `linear_packed` floats, 64-byte aligned, shared by all threads; filled by `linear_pack`
};

namespace native {

#if defined(__AVX512F__) || defined(__aarch64__) // 32 registers
constexpr int VECTORS = 4;                              // most vectors of rows in a register tile
constexpr int OUTPUTS[VECTORS + 1] = {0, 12, 12, 8, 6}; // outputs of a tile of so many vectors
#else
constexpr int VECTORS = 3;
constexpr int OUTPUTS[VECTORS + 1] = {0, 12, 6, 4};
#endif
constexpr int CHUNK = 192;            // most outputs of a task, over both parts of a gated product
constexpr int INPUTS = 256;           // items of a block, which has a sum of its own
constexpr int SPAN = 8 * INPUTS;      // items that all outputs of a task sweep before the next: 64 rows of them fit L2
constexpr int PIECE = 512;            // most items that one task turns
constexpr int TASKS = 4;              // fewest for each thread, where there are outputs enough
constexpr int LINE = 16;              // floats in a cache line
constexpr int STAGED = INPUTS + LINE; // spreads a tile's rows of weights over the sets of the cache

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// The rows are cut into vectors of WIDTH rows and those into strips of nearly equal size, turned one after another:
// each [items][vectors of the strip * WIDTH].
struct Rows {
    int vectors, strips;
    explicit Rows(const Linear& l)
        : vectors(ceil_div(l.rows, WIDTH)), strips(ceil_div(vectors, VECTORS)) {}
    int first(int strip) const { return int64_t(strip) * vectors / strips; } // vector
    int size(int strip) const { return first(strip + 1) - first(strip); }
    int strip(int vector) const { return ((vector + 1) * int64_t(strips) - 1) / vectors; }
};

template <class Items>
inline int64_t item_count(const Linear& l) {
    return ceil_div(l.inputs, Items::ITEM);
}

// Neighbouring outputs of one part, for one strip of rows.
struct Task {
    int part, first, count, strip;
};

// Outputs of a task: fewer where there would be too few tasks for the threads, but whole tiles.
inline int chunk_outputs(const Linear& l) {
    const Rows rows(l);
    int64_t outputs = 0;
    for (int p = 0; p < l.parts; ++p) outputs += l.part[p].outputs;
    const int small = OUTPUTS[rows.vectors / rows.strips], large = OUTPUTS[ceil_div(rows.vectors, rows.strips)];
    int64_t chunk = l.gated ? CHUNK / 2 : CHUNK, tasks = outputs * rows.strips / CHUNK;
    for (; tasks < TASKS * l.threads && chunk % (2 * small) == 0 && chunk % (2 * large) == 0; tasks *= 2) chunk /= 2;
    return chunk;
}

// Tasks of one strip of rows.
inline int64_t strip_tasks(const Linear& l) {
    const int chunk = chunk_outputs(l);
    int64_t tasks = 0;
    for (int p = 0; p < (l.gated ? 1 : l.parts); ++p) tasks += ceil_div(l.part[p].outputs, chunk);
    return tasks;
}

// The outputs change first: a thread's strip stays in its cache, weights are fetched ahead.
inline Task find_task(const Linear& l, int64_t task) {
    const int chunk = chunk_outputs(l);
    const int64_t tasks = strip_tasks(l);
    int64_t at = task % tasks;
    int part = 0;
    for (int64_t n; part + 1 < l.parts && at >= (n = ceil_div(l.part[part].outputs, chunk)); ++part) at -= n;
    const int first = at * chunk;
    return {part, first, std::min(chunk, l.part[part].outputs - first), int(task / tasks)};
}

} // namespace native
