// From logits to tokens on a CPU: for each row the most likely token, the log of its normaliser, and what sampling asks
// for. Plain pointers in and out: no header of torch or Python.
//
// What holds here:
// - A row is one task, and its result one fixed series of operations on that row alone. How many rows there are and
//   which thread takes them changes nothing, not one bit.
// - A row that is not finite keeps to itself: it gets a token of the vocabulary that means nothing.
#include "ranking.h"

#include <atomic>
#include <memory>
#include <new>
#include <utility>

// One step's rows. Mirrored by `_Call` in logits.py.
struct LogitsCall {
    const float* logits;      // [R, V]
    const int64_t* given;     // [R] tokens to score, or null: the chosen ones
    int64_t* tokens;          // [R] the most likely or the chosen token
    double* normalisers;      // [R] log of the sum of e^x; not finite where a logit is NaN or infinite
    float* logprobs;          // [R] of the model's own distribution; NaN where the normaliser is not finite
    uint8_t* allowed;         // [R] whether some token was left to choose
    int32_t* top_tokens;      // [R, top] the most likely ones, best first
    float* top_logprobs;      // [R, top]
    // How rows are processed, null where none is: cells by row, from starts[r] to starts[r + 1].
    struct Cells {
        const int32_t *starts, *tokens; // [R + 1], [starts[R]]
        const float* values;            // [starts[R]]
    } repeated, added, banned;
    const int32_t* mask_of;   // [R] index of a row's mask, -1 for none
    const uint32_t* masks;    // [M, mask_words] a set bit allows its token
    // How rows are drawn, null where none is.
    const double *temperature, *top_p, *min_p, *point; // [R]; temperature 0 takes the most likely token
    const int32_t* top_k;                              // [R]
    int64_t row;              // floats from one row of logits to the next
    int32_t rows, vocabulary, mask_words, top, threads;
};

namespace {

using namespace logits;

constexpr int LOGITS_PER_THREAD = 1 << 17; // at least: a thread that comes late is waited for

inline bool is_changed(const LogitsCall& call, int r) {
    const auto has = [r](const LogitsCall::Cells& c) { return c.starts && c.starts[r] < c.starts[r + 1]; };
    return has(call.repeated) || has(call.added) || has(call.banned) || (call.mask_of && call.mask_of[r] >= 0);
}

template <class F>
inline void for_cells(const LogitsCall::Cells& cells, int r, float* x, F change) {
    if (!cells.starts) return;
    for (int i = cells.starts[r]; i < cells.starts[r + 1]; ++i) x[cells.tokens[i]] = change(x[cells.tokens[i]], i);
}

// The row as it is to be chosen from: penalties, bias, bans and grammar, in this order.
void process(const LogitsCall& call, int r, float* x) {
    std::copy_n(call.logits + r * call.row, call.vocabulary, x);
    for_cells(call.repeated, r, x, [&](float value, int i) {
        return value > 0 ? value / call.repeated.values[i] : value * call.repeated.values[i];
    });
    for_cells(call.added, r, x, [&](float value, int i) { return value + call.added.values[i]; });
    for_cells(call.banned, r, x, [](float, int) { return -INFINITE; });
    if (!call.mask_of || call.mask_of[r] < 0) return;
    const uint32_t* mask = call.masks + int64_t(call.mask_of[r]) * call.mask_words;
    for (int i = 0; i < call.vocabulary; i += 32)
        for (int bit = 0, end = std::min(32, call.vocabulary - i); bit < end; ++bit)
            x[i + bit] = mask[i / 32] >> bit & 1 ? x[i + bit] : -INFINITE;
}

// What one thread works with.
struct Scratch {
    uint64_t* list;
    double* masses;
    float *copy, *weights, *tail, *peaks;

    static int64_t bytes(const LogitsCall& call) { return carve(call, nullptr).second; }
    Scratch(const LogitsCall& call, char* at) { *this = carve(call, at).first; }

private:
    Scratch() = default;

    static std::pair<Scratch, int64_t> carve(const LogitsCall& call, char* at) { // each part 64-byte aligned
        const int64_t blocks = (call.vocabulary + BLOCK - 1) / BLOCK, n = blocks * BLOCK;
        int64_t used = 0;
        const auto take = [&](auto*& part, int64_t count) {
            part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(reinterpret_cast<uintptr_t>(at) + used);
            used += (count * int64_t(sizeof *part) + 63) / 64 * 64;
        };
        Scratch s;
        take(s.list, n), take(s.masses, blocks), take(s.copy, n), take(s.weights, n), take(s.tail, BLOCK);
        take(s.peaks, blocks);
        return {s, used};
    }
};

// Chooses the token of a row that is processed or drawn, from the row as it was weighed.
void choose(const LogitsCall& call, int r, Row& row, const Scratch& scratch) {
    const double temperature = call.temperature ? call.temperature[r] : 0;
    const bool is_processed = is_changed(call, r);
    if (is_processed) {
        process(call, r, scratch.copy);
        row.look_at(scratch.copy);
        call.tokens[r] = row.most_likely();
        call.allowed[r] = row.peak > -INFINITE;
    }
    if (!(temperature > 0) || !std::isfinite(row.peak)) return;
    const float sharpness = float(std::clamp(1 / temperature, 1e-30, 1e30));
    const double top_p = call.top_p[r], min_p = call.min_p[r], point = call.point[r];
    if (call.top_k[r] < row.n || top_p < 1 || min_p > 0) {
        const Ranking ranking(row, sharpness, scratch.weights, scratch.list);
        call.tokens[r] = draw_filtered(ranking, sharpness, point, call.top_k[r], top_p, min_p);
    } else {
        if (is_processed || sharpness != row.sharpness) row.weigh(sharpness);
        call.tokens[r] = draw_from_all(row, point);
    }
}

void run_row(const LogitsCall& call, int r, const Scratch& scratch) {
    const float* x = call.logits + r * call.row;
    Row row{call.vocabulary, (call.vocabulary + BLOCK - 1) / BLOCK, scratch.tail, scratch.peaks, scratch.masses};
    row.look_at(x);
    row.weigh(1);
    const double normaliser = call.normalisers[r] = row.peak + std::log(row.mass);
    const bool is_finite = std::isfinite(normaliser);
    call.tokens[r] = row.most_likely();
    call.allowed[r] = 1;
    if (call.top) {
        const int64_t at = int64_t(r) * call.top;
        rank_top(row, normaliser, call.top, call.top_tokens + at, call.top_logprobs + at);
    }
    if (is_finite) choose(call, r, row, scratch);
    const int64_t token = call.given ? call.given[r] : call.tokens[r];
    call.logprobs[r] = is_finite ? float(x[token] - normaliser) : std::numeric_limits<float>::quiet_NaN();
}

int run(const LogitsCall& call) try {
    const int64_t useful = std::min<int64_t>(call.rows, int64_t(call.rows) * call.vocabulary / LOGITS_PER_THREAD);
    const int threads = int(std::clamp<int64_t>(useful, 1, std::max(1, call.threads)));
    const int64_t size = Scratch::bytes(call);
    const std::unique_ptr<char[]> memory(new char[size * threads + 64]);
    char* const aligned = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
    std::atomic<int> next_row{0}, next_scratch{0};
#pragma omp parallel num_threads(threads)
    {
        const Scratch scratch(call, aligned + size * next_scratch.fetch_add(1));
        for (int r; (r = next_row.fetch_add(1, std::memory_order_relaxed)) < call.rows;) run_row(call, r, scratch);
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

} // namespace

extern "C" {
// 0, or 1 when memory ran out before anything was written.
int batchjobs_logits(const LogitsCall* call) { return run(*call); }
int64_t batchjobs_logits_call_size() { return sizeof(LogitsCall); } // guards the mirror in logits.py
}
