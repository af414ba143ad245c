// What the attention and the row kernels need beside native/vectors.h: numbers as pages hold them, and sums across the
// lanes of a register in a fixed order.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "../native/vectors.h"

namespace kernels {
namespace {

using native::bfloat16, native::ints, native::vec, native::WIDTH;
using native::exp, native::load, native::splat, native::store, native::tanh, native::widen;

constexpr int LINE = 16; // floats in a cache line
constexpr float INFINITE = std::numeric_limits<float>::infinity();

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, bfloat16* to) { *to = native::narrow(x); }
inline void narrow(bfloat16 x, bfloat16* to) { *to = x; }

// In float32, rounded to what an S holds.
template <class S, class T>
inline float rounded(T x) {
    S held;
    narrow(x, &held);
    return widen(held);
}

template <int N>
struct Lanes {
    typedef float type __attribute__((vector_size(4 * N)));
};

// The lanes of a register joined two by two, halves first: always the same order.
template <int N, class F>
inline float join(typename Lanes<N>::type v, F pair) {
    if constexpr (N == 1) {
        return v[0];
    } else {
        typename Lanes<N / 2>::type low, high;
        std::memcpy(&low, &v, sizeof low);
        std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
        return join<N / 2>(pair(low, high), pair);
    }
}

constexpr auto larger = [](auto a, auto b) { return a > b ? a : b; };
constexpr auto added = [](auto a, auto b) { return a + b; };

// Floats up to the next whole cache line.
inline int64_t lines(int64_t count) { return (count + LINE - 1) / LINE * LINE; }

inline int thread_number() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

} // namespace
} // namespace kernels
