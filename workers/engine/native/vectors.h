// Vectors as wide as the machine's registers, by the compiler's own extension (GCC and Clang), and what the kernels
// compute with them. Each lane's result depends on that lane alone. Built without -ffast-math: NaN stays NaN.
#pragma once
#include <cstdint>
#include <cstring>

namespace native {

#if defined(__AVX512F__)
constexpr int WIDTH = 16; // floats in a register
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));

struct bfloat16 {
    uint16_t bits;
};

inline vec load(const float* from) {
    vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline vec load(const bfloat16* from) {
    halves h;
    std::memcpy(&h, from, sizeof h);
    return (vec)(__builtin_convertvector(h, bits) << 16);
}

inline void store(float* to, vec v) { std::memcpy(to, &v, sizeof v); }

inline float widen(float x) { return x; }

inline float widen(bfloat16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &wide, sizeof f);
    return f;
}

inline bfloat16 narrow(float x) { // to nearest, ties to even; NaN stays NaN
    uint32_t wide;
    std::memcpy(&wide, &x, sizeof wide);
    return {x != x ? uint16_t(0x7fc0) : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
}

inline bits narrow(vec x) { // the same, in the low half of each lane
    const bits wide = (bits)x, rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    return x != x ? bits{} + 0x7fc0 : rounded;
}

inline vec splat(float x) { return x - vec{}; }

// e^x as scale * (1 + excess), scale a power of two: the excess alone is what tanh needs near zero.
struct Power {
    vec scale, excess;
};

inline Power power(vec x) {
    constexpr float round = 12582912.0f; // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    const vec shifted = x * 1.44269504f + round;
    const vec whole = shifted - round;
    vec r = x - whole * 0.693359375f; // ln 2 in two parts; the first has few bits, so this product is exact
    r = r + whole * 2.12194440e-4f;
    vec series = r * (1.0f / 5040) + 1.0f / 720; // |r| < 0.35
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    const vec square = r * r;
    return {(vec)(((bits)shifted << 23) + (127u << 23)), series * square + r};
}

inline vec exp(vec x) { // for x <= 0; 0 where the result would be subnormal; NaN stays NaN
    const Power p = power(x);
    return x < -87.0f ? vec{} : p.scale * p.excess + p.scale;
}

inline vec absolute(vec x) { return x < 0.0f ? -x : x; }

inline vec tanh(vec x) {
    const vec twice = absolute(x) * 2.0f;
    const Power p = power(twice > 40.0f ? splat(40.0f) : twice);
    const vec less_one = p.scale * p.excess + (p.scale - 1.0f); // e^2|x| - 1
    const vec result = less_one / (less_one + 2.0f);
    return x < 0.0f ? -result : result;
}

inline vec silu(vec x) { // x / (1 + e^-x), with an exponent that is never positive
    const vec e = exp(-absolute(x));
    return x * ((x < 0.0f ? e : splat(1.0f)) / (e + 1.0f));
}

// For x >= 0, to 1e-7 of the value: erfc(x) = t e^(f(t) - x^2) with t = 2 / (x + 2), f a Chebyshev fit over x <= 10.
inline vec erfc(vec x) {
    constexpr float fit[] = {-0.680827177f, 1.15673376f,  -0.696251898f, -0.0802804328f, 0.00126758667f,
                             0.0346027999f, 0.386640412f, 0.998632783f,  -1.265448f};
    const vec t = 2.0f / (x + 2.0f);
    vec series = splat(0.144930214f);
    for (float c : fit) series = series * t + c;
    return t * exp(series - x * x);
}

inline vec gelu(vec x) {
    const vec tail = erfc(absolute(x) * 0.70710678f);
    return x * 0.5f * (x < 0.0f ? tail : 2.0f - tail);
}

inline vec gelu_tanh(vec x) {
    const vec inner = x * 0.79788456f * (x * x * 0.044715f + 1.0f);
    return x * 0.5f * (tanh(inner) + 1.0f);
}

inline vec relu(vec x) { return x < 0.0f ? vec{} : x; }

// One of two registers' lanes for each lane of the result: 0 .. WIDTH - 1 are a's, the others b's.
inline vec shuffle(vec a, vec b, ints lanes) {
#ifdef __clang__
    vec result;
    for (int i = 0; i < WIDTH; ++i) result[i] = lanes[i] < WIDTH ? a[lanes[i]] : b[lanes[i] - WIDTH];
    return result;
#else
    return __builtin_shuffle(a, b, lanes);
#endif
}

// Rows become columns, in place. Blocks of 1, 2, 4 .. lanes change places across the diagonal.
template <int BLOCK = 1>
inline void transpose(vec (&v)[WIDTH]) {
    ints low, high;
    for (int i = 0; i < WIDTH; ++i) {
        low[i] = i & BLOCK ? WIDTH + i - BLOCK : i;
        high[i] = i & BLOCK ? WIDTH + i : i + BLOCK;
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) {
        if (i & BLOCK) continue;
        const vec a = v[i], b = v[i + BLOCK];
        v[i] = shuffle(a, b, low);
        v[i + BLOCK] = shuffle(a, b, high);
    }
    if constexpr (2 * BLOCK < WIDTH) transpose<2 * BLOCK>(v);
}

} // namespace native
