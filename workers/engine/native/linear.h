// The matrix product of a model's forward on a CPU: y = act(x W^T + b) + residual, float32 in and out.
//
// What holds here:
// - Weights are read where they lie, row-major [outputs, inputs], float32 or bfloat16, and kept nowhere else. The rows
//   of x are turned instead: WIDTH rows side by side make a vector for each input, and a weight is one number that is
//   broadcast to it. The rows are few and turned once for all outputs, the weights are many.
// - A result is one fixed series of operations that depends only on its own row and weights: inputs in ascending order
//   in blocks of INPUTS, one sum a block, the blocks' sums added in order. Rows beside it, tiles, tasks and threads
//   change nothing, not one bit, and a NaN stays in its row.
//
// A caller sets `threads`, then runs all tasks of `linear_pack`, in any order and from any threads, then all of
// `linear_task`. Built without -ffast-math.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

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

// Few rows are worked on in half registers, of which two weights a cycle can be read and broadcast, not one.
constexpr int HALF = 8;
typedef float half __attribute__((vector_size(4 * HALF)));

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// An item is what 4 bytes of a turned row hold. Here it is one input in float32; bfloat16 weights are widened.
struct Singles {
    static constexpr int ITEM = 1; // inputs

    static vec take(const float* x) { return load(x); }
    static vec take(const float* x, int inputs) { // those past the last are zero
        vec items = {};
        std::memcpy(&items, x, std::min(inputs, WIDTH) * sizeof(float));
        return items;
    }

    // Where a tile reads weights of one output: float32 in place, bfloat16 from the thread's own space.
    static const float* reach(const float* weights, int, float*) { return weights; }
    static const float* reach(const bfloat16* weights, int inputs, float* staged) {
        int i = 0;
        for (; i + WIDTH <= inputs; i += WIDTH) store(staged + i, load(weights + i));
        for (; i < inputs; ++i) staged[i] = widen(weights[i]);
        return staged;
    }

    template <class V>
    static V broadcast(const float* weights, int item) {
        return weights[item] - V{};
    }
    template <class V>
    static V add(V sum, V x, V w) {
        return sum + x * w;
    }
};

template <int BYTES>
struct Bits {
    typedef uint32_t type __attribute__((vector_size(BYTES)));
};

// Two neighbouring inputs in bfloat16, for processors that multiply such pairs and add both products in one
// instruction (AVX512-BF16). Rows are rounded to bfloat16, weights are read in place. The portable form gives the same
// sums, rounded in another order perhaps; tests run it. The instruction itself has not run in any test yet.
struct Pairs {
    static constexpr int ITEM = 2;

    static vec take(const float* x) {
        ints even, odd;
        for (int i = 0; i < WIDTH; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
        const vec a = load(x), b = load(x + WIDTH);
        return (vec)(narrow(shuffle(a, b, even)) | narrow(shuffle(a, b, odd)) << 16);
    }
    static vec take(const float* x, int inputs) {
        float padded[2 * WIDTH] = {};
        std::memcpy(padded, x, std::min(inputs, 2 * WIDTH) * sizeof(float));
        return take(padded);
    }

    static const float* reach(const bfloat16* weights, int inputs, float* staged) {
        if (inputs % 2 == 0) return reinterpret_cast<const float*>(weights); // only ever read by memcpy
        std::memset(staged + inputs / 2, 0, sizeof(float));
        std::memcpy(staged, weights, inputs * sizeof(bfloat16));
        return staged;
    }

    template <class V>
    static V broadcast(const float* weights, int item) {
        uint32_t pair;
        std::memcpy(&pair, reinterpret_cast<const char*>(weights) + int64_t(item) * 4, sizeof pair);
        return (V)(pair - typename Bits<sizeof(V)>::type{});
    }
    template <class V>
    static V add(V sum, V x, V w) {
#ifdef __AVX512BF16__
        if constexpr (sizeof(V) == 64)
            return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
        else
            return (V)_mm256_dpbf16_ps((__m256)sum, (__m256bh)x, (__m256bh)w);
#else
        typedef typename Bits<sizeof(V)>::type type;
        sum += (V)((type)x & 0xffff0000u) * (V)((type)w & 0xffff0000u);
        return sum + (V)((type)x << 16) * (V)((type)w << 16);
#endif
    }
};

#if defined(__AVX512BF16__) || defined(BATCHJOBS_BFLOAT16_PAIRS) // the macro is for tests of the portable form
using Halves = Pairs;
#else
using Halves = Singles;
#endif

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

// Turns some items of one vector of rows; rows that do not exist are zero.
template <class Items>
void pack(const Linear& l, int vector, int first, int end) {
    const Rows rows(l);
    const int strip = rows.strip(vector), stride = rows.size(strip) * WIDTH;
    float* to = l.packed + int64_t(rows.first(strip)) * WIDTH * item_count<Items>(l);
    to += int64_t(first) * stride + (vector - rows.first(strip)) * WIDTH;
    const float* from = l.input + int64_t(vector) * WIDTH * l.input_row;
    const int count = std::min(WIDTH, l.rows - vector * WIDTH);
    for (int item = first; item < end; item += WIDTH, to += WIDTH * stride) {
        const int input = item * Items::ITEM, left = l.inputs - input;
        vec v[WIDTH];
        if (count == WIDTH && left >= WIDTH * Items::ITEM) {
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) v[i] = Items::take(from + i * l.input_row + input);
        } else {
            for (int i = 0; i < WIDTH; ++i) v[i] = i < count ? Items::take(from + i * l.input_row + input, left) : vec{};
        }
        transpose(v);
        if (end - item >= WIDTH) {
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) store(to + i * stride, v[i]);
        } else {
            for (int i = 0; i < end - item; ++i) store(to + i * stride, v[i]);
        }
    }
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

inline void activate(vec (&v)[WIDTH], int activation) {
    switch (activation) {
    case 1:
        for (vec& x : v) x = silu(x);
        break;
    case 2:
        for (vec& x : v) x = gelu(x);
        break;
    case 3:
        for (vec& x : v) x = gelu_tanh(x);
        break;
    case 4:
        for (vec& x : v) x = relu(x);
        break;
    }
}

// Takes the sums of up to WIDTH outputs, plus their bias.
template <class W>
inline void take(const Linear::Part& part, int output, int count, int stride, const float* sums, vec (&v)[WIDTH]) {
    if (count == WIDTH) {
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; ++i) v[i] = load(sums + i * stride);
    } else {
        for (int i = 0; i < WIDTH; ++i) v[i] = i < count ? load(sums + i * stride) : vec{};
    }
    if (!part.bias) return;
    for (int i = 0; i < count; ++i) v[i] += widen(static_cast<const W*>(part.bias)[output + i]);
}

// Writes the results of one vector of rows: turns WIDTH outputs at a time back into rows.
template <class W>
void finish(const Linear& l, const Task& task, int vector, int stride, const float* sums) {
    const Linear::Part& part = l.part[task.part];
    const int64_t row = int64_t(vector) * WIDTH;
    const int rows = std::min<int64_t>(WIDTH, l.rows - row);
    for (int from = 0; from < task.count; from += WIDTH, sums += WIDTH * stride) {
        const int count = std::min(WIDTH, task.count - from), output = task.first + from;
        vec v[WIDTH];
        take<W>(part, output, count, stride, sums, v);
        activate(v, l.activation);
        if (l.gated) {
            vec up[WIDTH];
            take<W>(l.part[1], output, count, stride, sums + CHUNK / 2 * stride, up);
            for (int i = 0; i < WIDTH; ++i) v[i] *= up[i];
        }
        transpose(v);
        float* to = part.output + row * part.output_row + output;
        const float* residual = task.part == 0 && l.residual ? l.residual + row * l.residual_row + output : nullptr;
        for (int i = 0; i < rows; ++i, to += part.output_row) {
            if (count == WIDTH) {
                if (residual) v[i] += load(residual + i * l.residual_row);
                store(to, v[i]);
            } else {
                vec add = v[i];
                if (residual) {
                    std::memcpy(&add, residual + i * l.residual_row, count * sizeof(float));
                    add += v[i];
                }
                std::memcpy(to, &add, count * sizeof(float));
            }
        }
    }
}

template <class Items, class W>
void run_task(const Linear& l, int64_t number, float* scratch) {
    const Task task = find_task(l, number);
    const Rows rows(l);
    const Space space{scratch, scratch + Space::STAGE};
    const int64_t items = item_count<Items>(l);
    for (int64_t first = 0; first < items; first += SPAN)
        sweep_parts<Items, W>(l, task, first, std::min<int64_t>(SPAN, items - first), space);
    const int begin = rows.first(task.strip), stride = rows.size(task.strip) * WIDTH;
    for (int vector = begin; vector < rows.first(task.strip + 1); ++vector)
        finish<W>(l, task, vector, stride, space.sums + (vector - begin) * WIDTH);
}

// Items of a piece that is turned by one task.
template <class Items>
inline int64_t pieces(const Linear& l) {
    return ceil_div(item_count<Items>(l), PIECE);
}

template <class Items>
void run_pack(const Linear& l, int64_t task) {
    const int64_t count = pieces<Items>(l), first = task % count * PIECE;
    pack<Items>(l, task / count, first, std::min(first + PIECE, item_count<Items>(l)));
}

} // namespace native

// Floats of `packed`.
inline int64_t linear_packed(const Linear& l) {
    return native::Rows(l).vectors * int64_t(native::WIDTH) *
           (l.dtype ? native::item_count<native::Halves>(l) : native::item_count<native::Singles>(l));
}

inline int64_t linear_pack_tasks(const Linear& l) {
    return native::Rows(l).vectors * (l.dtype ? native::pieces<native::Halves>(l) : native::pieces<native::Singles>(l));
}

inline void linear_pack(const Linear& l, int64_t task) {
    l.dtype ? native::run_pack<native::Halves>(l, task) : native::run_pack<native::Singles>(l, task);
}

inline int64_t linear_tasks(const Linear& l) { return native::strip_tasks(l) * native::Rows(l).strips; }

// Floats that a thread needs for `linear_task`, 64-byte aligned; the same for every product.
inline int64_t linear_scratch() { return native::Space::STAGE + native::Space::SUMS; }

inline void linear_task(const Linear& l, int64_t task, float* scratch) {
    if (l.dtype)
        native::run_task<native::Halves, native::bfloat16>(l, task, scratch);
    else
        native::run_task<native::Singles, float>(l, task, scratch);
}
