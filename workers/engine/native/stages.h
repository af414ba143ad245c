// A step's operations as stages: sets of tasks that any thread may do, in any order. An operation is one or two of them.
// How rows are cut into tasks changes no result, not one bit: each operation sees to that.
#pragma once
#include <memory>
#include <vector>

#include "linear.h"
#include "rows.h"

namespace kernels {
namespace {

struct Bound;
typedef void (*Work)(const Bound&, int64_t task, float* scratch);

// An operation with all that it needs of this step.
struct Bound {
    const Operation* op;
    const Step* step;
    int32_t rows, chunk; // rows, and how many of them are a task where rows are cut
    float *input, *output;
    const float* residual;
    Linear linear;
    Call call;
    const std::vector<Task>* tasks; // of the attention
};

struct Stage {
    Work work;
    const Bound* bound;
    int64_t tasks;
    int32_t operation;
};

template <class F>
inline void for_rows(const Bound& bound, int64_t task, F visit) {
    const int first = int(task) * bound.chunk, end = std::min(first + bound.chunk, bound.rows);
    for (int row = first; row < end; ++row) visit(row);
}

template <class W>
void embed_rows(const Bound& bound, int64_t task, float*) {
    const Operation& op = *bound.op;
    for_rows(bound, task, [&](int row) { embed<W>(op, bound.step->ids[row], bound.output + int64_t(row) * op.width); });
}

template <class W>
void norm_rows(const Bound& bound, int64_t task, float*) {
    const Operation& op = *bound.op;
    for_rows(bound, task, [&](int row) {
        const int64_t at = int64_t(row) * op.width;
        const float* residual = bound.residual ? bound.residual + at : nullptr;
        const W* weight = static_cast<const W*>(op.part[0].weight);
        norm(bound.input + at, weight, op.width, op.epsilon, op.shift, residual, bound.output + at);
    });
}

void pack_inputs(const Bound& bound, int64_t task, float*) { linear_pack(bound.linear, task); }

void multiply(const Bound& bound, int64_t task, float* scratch) { linear_task(bound.linear, task, scratch); }

template <class W>
void turn_rows(const Bound& bound, int64_t task, float*) {
    for_rows(bound, task, [&](int row) { turn<W>(*bound.op, *bound.step, bound.call, row); });
}

template <class W>
void attend_tile(const Bound& bound, int64_t task, float* scratch) {
    Tile tile(bound.call, tile_rows(bound.call), scratch);
    attend<W, float>(bound.call, (*bound.tasks)[task], tile);
}

void gather_rows(const Bound& bound, int64_t task, float*) {
    const int64_t width = bound.op->width;
    for_rows(bound, task, [&](int row) {
        std::memcpy(bound.output + row * width, bound.input + bound.step->wanted[row] * width, width * sizeof(float));
    });
}

void cap_rows(const Bound& bound, int64_t task, float*) {
    const Operation& op = *bound.op;
    for_rows(bound, task, [&](int row) { cap(bound.input + int64_t(row) * op.width, op.width, op.softcap); });
}

// A step's stages, and the space that they need.
class Plan {
  public:
    std::vector<Stage> stages;
    int64_t scratch = 0; // floats of a thread
    int64_t packed = 0;  // floats that all threads share

    Plan(const Program& program, const Step& step) : program_(program), step_(step), bound_(program.count) {
        stages.reserve(2 * program.count);
        for (int i = 0; i < program.count; ++i) add(i);
    }

    void place(float* packed) {
        for (Bound& bound : bound_) bound.linear.packed = packed;
    }

  private:
    struct Tasks {
        int32_t group, heads, kv_heads;
        std::unique_ptr<std::vector<Task>> tasks;
    };

    const Program& program_;
    const Step& step_;
    std::vector<Bound> bound_;
    std::vector<Tasks> plans_;

    float* buffer(int32_t number) const { return number < 0 ? nullptr : step_.buffers[number]; }

    void stage(Work work, int32_t operation, int64_t tasks) {
        if (tasks) stages.push_back({work, &bound_[operation], tasks, operation});
    }

    Work of_dtype(Work single, Work half) const { return program_.dtype ? half : single; }

    void add(int32_t index) {
        const Operation& op = program_.operations[index];
        Bound& bound = bound_[index];
        bound.op = &op;
        bound.step = &step_;
        bound.rows = op.wanted ? step_.wanted_rows : step_.rows;
        if (!bound.rows) return; // a chunk of a prompt in which no row's logits are wanted
        bound.chunk = std::clamp(bound.rows / (4 * step_.threads), 1, 16);
        bound.input = buffer(op.input);
        bound.output = buffer(op.output);
        bound.residual = buffer(op.residual);
        const int64_t chunks = (bound.rows + bound.chunk - 1) / bound.chunk;
        switch (op.kind) {
            case EMBED: return stage(of_dtype(embed_rows<float>, embed_rows<bfloat16>), index, chunks);
            case NORM: return stage(of_dtype(norm_rows<float>, norm_rows<bfloat16>), index, chunks);
            case LINEAR: return add_linear(index);
            case ROTATE:
                fill(op, bound.call);
                return stage(of_dtype(turn_rows<float>, turn_rows<bfloat16>), index, chunks);
            case ATTEND: return add_attention(index);
            case GATHER: return stage(gather_rows, index, bound.input == bound.output ? 0 : chunks);
            case CAP: return stage(cap_rows, index, chunks);
        }
    }

    void add_linear(int32_t index) {
        const Operation& op = program_.operations[index];
        Bound& bound = bound_[index];
        Linear& linear = bound.linear;
        linear.input = bound.input;
        linear.input_row = op.width;
        linear.rows = bound.rows;
        linear.inputs = op.width;
        for (int p = 0; p < op.parts; ++p) {
            const Operation::Part& part = op.part[p];
            float* const output = buffer(part.output);
            const int64_t row = output ? program_.widths[part.output] : 0; // the "up" of a gated one has no output
            linear.part[p] = {part.weight, part.weight_row, part.bias, output, row, part.outputs};
        }
        linear.parts = op.parts;
        linear.gated = op.gated;
        linear.activation = op.activation;
        linear.residual = bound.residual;
        linear.residual_row = bound.residual ? program_.widths[op.residual] : 0;
        linear.dtype = program_.dtype;
        linear.threads = step_.threads;
        packed = std::max(packed, linear_packed(linear));
        scratch = std::max(scratch, linear_scratch());
        stage(pack_inputs, index, linear_pack_tasks(linear));
        stage(multiply, index, linear_tasks(linear));
    }

    void add_attention(int32_t index) {
        const Operation& op = program_.operations[index];
        Bound& bound = bound_[index];
        fill(op, bound.call);
        bound.tasks = &plan_of(op, bound.call);
        scratch = std::max(scratch, Tile::floats(bound.call, tile_rows(bound.call)));
        stage(of_dtype(attend_tile<float>, attend_tile<bfloat16>), index, bound.tasks->size());
    }

    // Layers of one group and shape share their tasks.
    const std::vector<Task>& plan_of(const Operation& op, const Call& call) {
        for (const Tasks& known : plans_)
            if (known.group == op.group && known.heads == op.heads && known.kv_heads == op.kv_heads) return *known.tasks;
        plans_.push_back({op.group, op.heads, op.kv_heads, std::make_unique<std::vector<Task>>(plan(call))});
        return *plans_.back().tasks;
    }

    // One layer's part of the attention's call. Queries, keys and values lie as [T, heads, head_dim].
    void fill(const Operation& op, Call& call) const {
        call = *step_.groups[op.group];
        call.query = buffer(op.kind == ATTEND ? op.input : op.part[0].output);
        call.key = buffer(op.part[1].output);
        call.value = buffer(op.part[2].output);
        call.out = buffer(op.output);
        call.keys = op.keys;
        call.values = op.values;
        call.sinks = op.sinks;
        call.query_head = call.key_head = op.head_dim;
        call.value_head = op.value_dim;
        call.query_row = int64_t(op.heads) * op.head_dim;
        call.key_row = int64_t(op.kv_heads) * op.head_dim;
        call.value_row = int64_t(op.kv_heads) * op.value_dim;
        call.heads = op.heads;
        call.kv_heads = op.kv_heads;
        call.head_dim = op.head_dim;
        call.value_dim = op.value_dim;
        call.value_width = op.value_width;
        call.window = op.window;
        call.scaling = op.scale;
        call.softcap = op.softcap;
    }
};

} // namespace
} // namespace kernels
