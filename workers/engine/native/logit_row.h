// One row of logits by blocks: the largest ones, the sum of their weights, and a draw from all of them.
//
// Weights e^((x - peak) / temperature) are float32; sums over blocks are float64, so an unlikely token keeps its share.
#pragma once
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace logits {

using namespace native;

constexpr int BLOCK = 1024; // logits read together
constexpr int UNROLL = 4;   // registers in flight at once
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// The lanes of a register joined, halves first.
template <class V, class F>
inline auto join(V v, F pair) {
    constexpr int lanes = sizeof v / sizeof v[0];
    std::remove_reference_t<decltype(v[0])> at[lanes];
    std::memcpy(at, &v, sizeof v);
    for (int half = lanes / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) at[i] = pair(at[i], at[i + half]);
    return at[0];
}

constexpr auto larger = [](auto a, auto b) { return a > b ? a : b; };
constexpr auto smaller = [](auto a, auto b) { return a < b ? a : b; };
constexpr auto added = [](auto a, auto b) { return a + b; };
constexpr auto either = [](auto a, auto b) { return a | b; };

inline double total(vec v) {
    double sum = 0;
    float at[WIDTH];
    store(at, v);
    for (int i = 0; i < WIDTH; ++i) sum += at[i];
    return sum;
}

inline float below(float x) { return std::nextafterf(x, -INFINITE); }

// Calls visit(offset, sum) for each register of a block; the UNROLL sums are joined at the end.
template <class F>
inline vec fold(vec start, F visit, vec (*pair)(vec, vec)) {
    vec a = start, b = start, c = start, d = start;
    for (int i = 0; i < BLOCK; i += UNROLL * WIDTH) {
        a = visit(i, a);
        b = visit(i + WIDTH, b);
        c = visit(i + 2 * WIDTH, c);
        d = visit(i + 3 * WIDTH, d);
    }
    return pair(pair(a, b), pair(c, d));
}

inline vec weight(vec x, float base, float sharpness) { return exp((x - base) * sharpness); }

// A row by blocks: each block's largest logit, and its sum of weights with that one as the base.
struct Row {
    int n, blocks;
    float* tail;     // [BLOCK] the last block, filled up with -inf
    float* peaks;    // [blocks]
    double* masses;  // [blocks]
    const float* x = nullptr;
    float sharpness = 1; // one over the temperature
    float peak = 0;
    double mass = 0; // of the whole row

    void look_at(const float* logits);
    void weigh(float steepness);
    const float* block(int b) const { return b + 1 < blocks ? x + b * BLOCK : tail; }
    int size(int b) const { return std::min(BLOCK, n - b * BLOCK); }
    double scale(int b) const { // what a block's mass is in the row's
        return peaks[b] == -INFINITE ? 0 : std::exp((double(peaks[b]) - peak) * sharpness);
    }
    int most_likely() const;
};

inline void Row::look_at(const float* logits) { // finds the largest ones
    x = logits, peak = -INFINITE;
    std::copy(x + (blocks - 1) * BLOCK, x + n, tail);
    std::fill(tail + size(blocks - 1), tail + BLOCK, -INFINITE);
    for (int b = 0; b < blocks; ++b) {
        const float* at = block(b);
        const auto most = [](vec v, vec m) { return v > m ? v : m; }; // NaN is passed over
        const vec tops = fold(splat(-INFINITE), [&](int i, vec m) { return most(load(at + i), m); }, most);
        peaks[b] = join(tops, larger);
        peak = std::max(peak, peaks[b]);
    }
}

inline void Row::weigh(float steepness) { // after look_at
    sharpness = steepness, mass = 0;
    for (int b = 0; b < blocks; ++b) {
        const float *at = block(b), base = peaks[b] == -INFINITE ? 0 : peaks[b];
        const auto plus = [](vec a, vec b) { return a + b; };
        masses[b] = total(fold(vec{}, [&](int i, vec s) { return s + weight(load(at + i), base, steepness); }, plus));
        mass += masses[b] * scale(b); // NaN stays NaN
    }
}

inline int Row::most_likely() const {
    for (int b = 0; b < blocks; ++b)
        if (peaks[b] == peak)
            for (int i = 0; i < size(b); ++i)
                if (block(b)[i] == peak) return b * BLOCK + i;
    return 0;
}

// Draws from the whole row, tokens in the order of the vocabulary: first a block, then a token in it.
inline int draw_from_all(const Row& row, double point) {
    double before = 0, mass = 0;
    int block = -1;
    for (int b = 0; b < row.blocks; ++b) {
        const double more = row.masses[b] * row.scale(b);
        if (!(more > 0)) continue;
        before += mass, mass = more, block = b;
        if (before + mass > point * row.mass) break;
    }
    if (block < 0) return row.most_likely();
    float weights[BLOCK];
    double sum = 0;
    for (int i = 0; i < BLOCK; i += WIDTH)
        store(weights + i, weight(load(row.block(block) + i), row.peaks[block], row.sharpness));
    for (float w : weights) sum += w;
    const double target = std::min((point * row.mass - before) / mass, 1.0) * sum; // in the block's own sum
    int token = 0;
    sum = 0;
    for (int i = 0; i < BLOCK; ++i) {
        if (!(weights[i] > 0)) continue;
        token = block * BLOCK + i; // where rounding carries the target to the very end, the last one stays
        sum += weights[i];
        if (sum > target) break;
    }
    return token;
}

} // namespace logits
