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
//
// linear_plan.h has the call and how it is cut, items.h what is read, linear_tile.h the arithmetic.
#pragma once
#include "items.h"
#include "linear_plan.h"
#include "linear_tile.h"

namespace native {

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
