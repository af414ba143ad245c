// What a matrix product reads: rows of float32, turned in memory, and weights in float32 or bfloat16.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace native {

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

} // namespace native
