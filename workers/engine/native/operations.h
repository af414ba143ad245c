// A model's forward as a list of operations over buffers, and what one packed step brings along. Plain data, mirrored by
// the structures in operations.py.
#pragma once
#include <cstdint>

#include "../attention/paged_attention.h"

namespace kernels {

enum Kind : int32_t { EMBED, NORM, LINEAR, ROTATE, ATTEND, GATHER, CAP };

// Buffers are named by number: [rows, width] float32 each. -1 is none.
struct Operation {
    struct Part {
        const void* weight;
        int64_t weight_row; // elements from one row of the weight to the next
        const void* bias;
        int32_t output, outputs; // a buffer, and numbers in a row of it that are made
    } part[3];
    void *keys, *values; // a layer's pages
    const float* sinks;
    int32_t kind;
    int32_t wanted; // 1: its rows are those whose logits are wanted; 0: all rows of the step
    int32_t input, residual, output;
    int32_t width; // numbers in a row of the input
    int32_t parts, gated, activation; // as in linear_plan.h
    int32_t heads, kv_heads, head_dim, value_dim, value_width, window;
    int32_t group;  // whose page tables
    int32_t rotary; // which cosines and sines; -1: positions are not looked at
    float epsilon, shift, scale, softcap;
};
// EMBED   output = scale * part[0].weight[id]
// NORM    output = input / sqrt(mean(input^2) + epsilon) * (part[0].weight + shift) (+ residual)
// LINEAR  see linear.h; part[i].output are its outputs
// ROTATE  part[0..2].output are queries, keys and values. Each head of the first two is normed where part[i] has a
//         weight, and rotated; then keys and values go to their pages.
// ATTEND  output = attention of the queries in `input`; scale is that of the scores
// GATHER  output = the wanted rows of input; nothing where both are the same memory
// CAP     input = softcap * tanh(input / softcap)

struct Program {
    const Operation* operations;
    const int32_t* widths; // of the buffers
    int32_t count, buffers;
    int32_t dtype;      // of weights and pages: 0 float32, 1 bfloat16
    int32_t vocabulary; // rows of the embedding
};

constexpr int ROTARIES = 2;

struct Step {
    float* const* buffers;
    const int64_t* ids;              // [rows]
    const int64_t* wanted;           // [wanted_rows], indices of rows
    const float* cosines[ROTARIES];  // [rows, head_dim]
    const float* sines[ROTARIES];
    const Call* const* groups; // the rows as the attention sees them; all that belongs to a layer is filled in here
    double* seconds;           // null, or the processor time of each operation in the calling thread is added here
    int32_t rows, wanted_rows, threads;
};

} // namespace kernels
