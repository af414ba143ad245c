// Operations that look at one row at a time: a row's result depends on that row alone, whatever runs beside it.
#pragma once
#include <cmath>

#include "operations.h"

namespace kernels {
namespace {

template <class W>
void embed(const Operation& op, int64_t id, float* __restrict out) {
    const W* from = static_cast<const W*>(op.part[0].weight) + id * op.part[0].weight_row;
    for (int i = 0; i < op.width; ++i) out[i] = widen(from[i]) * op.scale;
}

// The sum of the squares of `count` numbers: four sums a lane, joined in a fixed order.
inline float squares(const float* x, int count) {
    vec sums[4] = {};
    int i = 0;
    for (; i + 4 * WIDTH <= count; i += 4 * WIDTH)
        for (int n = 0; n < 4; ++n) {
            const vec v = load(x + i + n * WIDTH);
            sums[n] = sums[n] + v * v;
        }
    for (; i + WIDTH <= count; i += WIDTH) {
        const vec v = load(x + i);
        sums[0] = sums[0] + v * v;
    }
    float rest = 0.0f;
    for (; i < count; ++i) rest += x[i] * x[i];
    return join<WIDTH>((sums[0] + sums[1]) + (sums[2] + sums[3]), added) + rest;
}

// `out` may be x, and the residual may be out; `residual` is null for none.
template <class W>
void norm(const float* x, const W* weight, int count, float epsilon, float shift, const float* residual, float* out) {
    const float factor = 1.0f / std::sqrt(squares(x, count) / count + epsilon);
    int i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        vec v = load(x + i) * factor * (load(weight + i) + shift);
        if (residual) v = v + load(residual + i);
        store(out + i, v);
    }
    for (; i < count; ++i) {
        float v = x[i] * factor * (widen(weight[i]) + shift);
        if (residual) v = v + residual[i];
        out[i] = v;
    }
}

// Turns pairs of numbers that lie half a head apart, in place.
inline void rotate(float* head, const float* __restrict cosine, const float* __restrict sine, int head_dim) {
    const int half = head_dim / 2;
    float *__restrict low = head, *__restrict high = head + half;
    for (int i = 0; i < half; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a * cosine[i] - b * sine[i];
        high[i] = b * cosine[half + i] + a * sine[half + i];
    }
}

// Queries and keys of one row, normed and rotated head by head; then its keys and values go to their pages.
template <class W>
void turn(const Operation& op, const Step& step, const Call& call, int row) {
    for (int p = 0; p < 2; ++p) {
        const int heads = p ? op.kv_heads : op.heads;
        float* head = step.buffers[op.part[p].output] + int64_t(row) * heads * op.head_dim;
        const W* weight = static_cast<const W*>(op.part[p].weight);
        for (int h = 0; h < heads; ++h, head += op.head_dim) {
            if (weight) norm(head, weight, op.head_dim, op.epsilon, op.shift, static_cast<float*>(nullptr), head);
            if (op.rotary < 0) continue;
            const int64_t at = int64_t(row) * op.head_dim;
            rotate(head, step.cosines[op.rotary] + at, step.sines[op.rotary] + at, op.head_dim);
        }
    }
    write<W, float>(call, row);
}

inline void cap(float* x, int count, float most) {
    int i = 0;
    for (; i + WIDTH <= count; i += WIDTH) store(x + i, tanh(load(x + i) / most) * most);
    for (; i < count; ++i) x[i] = (tanh(splat(x[i]) / most) * most)[0];
}

} // namespace
} // namespace kernels
