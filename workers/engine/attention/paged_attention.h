// Paged attention on a CPU, over ragged packed rows, as tasks: rows are written to their pages first, then tiles of rows
// attend. Plain pointers in and out: no header of torch or Python.
//
// What holds here:
// - Keys of 16 neighbouring positions lie side by side, [D][16], so one vector register is one dimension of many keys
//   and a score is a running sum over the dimensions. Values lie as rows. Both products are the same broadcast-and-add.
// - A row's result is one fixed series of operations that depends only on the row, its position and its own pages:
//   blocks of 64 positions at multiples of 64, from the window's start to the row itself, positions in ascending order.
//   How rows are cut into tiles and tasks, which thread runs them and who else is in the batch change nothing, not one
//   bit.
// - A position that a row does not see is never added, not even with weight zero: stale pages may hold NaN.
//
// Built without -ffast-math.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace kernels {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int COLUMNS = 4; // registers across a register tile
#else
constexpr int COLUMNS = 2;
#endif
constexpr int ROWS = 6;                   // rows of a register tile: ROWS x COLUMNS sums stay in registers
constexpr int LANES = 16;                 // positions in a group of keys
constexpr int BLOCK = 64;                 // positions folded into the softmax at a time
constexpr int GROUPS = BLOCK / LANES;
constexpr int TILE_ROWS = 96;             // rows of a task that share each block of keys and values

} // namespace

// One layer's call. Mirrored by `Call` in cpu.py. Strides are in elements; the last axis of a tensor is contiguous.
struct Call {
    const void *query, *key, *value; // [Hq, T, D], [Hkv, T, D], [Hkv, T, Dv]
    void* out;                       // [T, Hq, Dv]
    void *keys, *values;             // the pages: [pages, Hkv, P / lanes, D, lanes], [pages, Hkv, P, value_width]
    const float* sinks;              // [Hq] or null
    const int32_t *starts, *cached, *tables; // [S + 1], [S], [S, table_width]
    const int32_t* order;                    // [S], the sequences with the most work first
    const int64_t* slots;                    // [T], page * P + place in the page
    int64_t query_head, query_row, key_head, key_row, value_head, value_row;
    int32_t sequences, rows, table_width, page_size;
    int32_t heads, kv_heads, head_dim, value_dim, value_width;
    int32_t lanes;   // LANES where whole groups fit a page, else the page size
    int32_t window;  // positions a row sees; INT32_MAX for all
    int32_t threads;
    float scaling, softcap; // softcap 0 for none
};

namespace {

// Here and below, S is what the pages hold and T what the tensors of the step hold.
template <class S, class T>
void write(const Call& call, int row) {
    const int64_t page = call.slots[row] / call.page_size, place = call.slots[row] % call.page_size;
    const int lanes = call.lanes;
    for (int h = 0; h < call.kv_heads; ++h) {
        const int64_t at = (page * call.kv_heads + h) * call.page_size + place; // slots before this one
        const T* key = static_cast<const T*>(call.key) + h * call.key_head + row * call.key_row;
        S* to = static_cast<S*>(call.keys) + (at - place % lanes) * call.head_dim + place % lanes;
        for (int d = 0; d < call.head_dim; ++d) narrow(key[d], to + int64_t(d) * lanes);
        const T* value = static_cast<const T*>(call.value) + h * call.value_head + row * call.value_row;
        S* into = static_cast<S*>(call.values) + at * call.value_width;
        for (int d = 0; d < call.value_dim; ++d) narrow(value[d], into + d);
    }
}

// The rows of one task: some neighbouring positions of one sequence, times the query heads of one key/value head.
struct Task {
    int32_t sequence, head, first, count; // first row of the sequence, how many of them
};

// Positions first .. first + BLOCK of one sequence; first is a multiple of BLOCK.
template <class K>
struct Block {
    int32_t first;
    const K* keys[GROUPS];        // each [D][LANES]
    const K* values[GROUPS];      // each [LANES][value_width]
    const K* next_keys[GROUPS];   // of the block after this one: fetched into the cache while this one is worked on,
    const K* next_values[GROUPS]; // because neighbouring pages are strangers to the processor's own prefetcher
};

// What a thread keeps while it works on a task. Rows are ordered by position, then by query head.
struct Tile {
    const int head_dim, value_width, window;
    const float softcap;
    int rows = 0, group = 1, position = 0; // position of the first row
    float *query;  // register tiles of n rows, each [D][n], scaled
    float *peak;   // [rows], highest score so far
    float *mass;   // [rows][WIDTH], sum of the weights so far, in one part a lane
    float *sum;    // [rows][value_width], weighted sum of the values so far
    float *packed; // a block's keys and values in float32, where they are not read in place

    Tile(const Call& call, int64_t most_rows, float* scratch)
        : head_dim(call.head_dim), value_width(call.value_width), window(call.window), softcap(call.softcap) {
        const auto take = [&](int64_t count) {
            float* taken = scratch;
            scratch += lines(count);
            return taken;
        };
        query = take(most_rows * head_dim);
        peak = take(most_rows);
        mass = take(most_rows * WIDTH);
        sum = take(most_rows * value_width);
        packed = take(int64_t(BLOCK) * (head_dim + value_width));
    }

    static int64_t floats(const Call& call, int64_t most_rows) { // how much scratch the constructor takes
        return lines(most_rows * call.head_dim) + lines(most_rows) + lines(most_rows * WIDTH) +
               lines(most_rows * call.value_width) + lines(int64_t(BLOCK) * (call.head_dim + call.value_width));
    }
};

// Products of R queries, [D][R], with all keys of a block -> scores [R][BLOCK].
template <class K, int R>
inline void score(const float* query, int head_dim, const Block<K>& block, float* scores) {
    for (int column = 0; column < BLOCK; column += COLUMNS * WIDTH) {
        const K *from[COLUMNS], *next[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) {
            const int at = column + c * WIDTH;
            from[c] = block.keys[at / LANES] + at % LANES;
            next[c] = block.next_keys[at / LANES] + at % LANES;
        }
        vec sums[R][COLUMNS] = {};
        for (int d = 0; d < head_dim; ++d) {
            vec key[COLUMNS];
            for (int c = 0; c < COLUMNS; ++c) key[c] = load(from[c] + d * LANES);
            for (int c = 0; c < COLUMNS; ++c) __builtin_prefetch(next[c] + d * LANES);
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < COLUMNS; ++c) sums[r][c] = sums[r][c] + key[c] * query[d * R + r];
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < COLUMNS; ++c) store(scores + r * BLOCK + column + c * WIDTH, sums[r][c]);
    }
}

// Adds N registers of the values of columns from .. to, `offset` floats into each, to R rows' sums.
template <class K, int R, int N>
inline void add(const float* weights, const Block<K>& block, int width, int offset, int from, int to, float* sum) {
    vec sums[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) sums[r][n] = load(sum + r * width + offset + n * WIDTH);
    for (int j = from; j < to;) {
        const int stop = std::min(to, (j | (LANES - 1)) + 1);
        const K* row = block.values[j / LANES] + j % LANES * width + offset;
        const K* next = block.next_values[j / LANES] + j % LANES * width + offset;
        for (; j < stop; ++j, row += width, next += width) {
            vec value[N];
            for (int n = 0; n < N; ++n) value[n] = load(row + n * WIDTH);
            for (int n = 0; n < N; ++n) __builtin_prefetch(next + n * WIDTH);
            for (int r = 0; r < R; ++r)
                for (int n = 0; n < N; ++n) sums[r][n] = sums[r][n] + value[n] * weights[r * BLOCK + j];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(sum + r * width + offset + n * WIDTH, sums[r][n]);
}

// Adds the values of columns from .. to, which all R rows see.
template <class K, int R>
inline void add_values(const float* weights, const Block<K>& block, int width, int from, int to, float* sum) {
    if (from >= to) return;
    int offset = 0;
    for (; offset + COLUMNS * WIDTH <= width; offset += COLUMNS * WIDTH)
        add<K, R, COLUMNS>(weights, block, width, offset, from, to, sum);
    for (; offset < width; offset += WIDTH) add<K, R, 1>(weights, block, width, offset, from, to, sum);
}

// Caps one row's scores, hides the columns that it does not see (low .. high are seen) and returns its highest so far.
inline float settle(const Tile& tile, int row, float* scores, int low, int high) {
    vec top = splat(tile.peak[row]);
    for (int c = 0; c < BLOCK; c += WIDTH) {
        vec s = load(scores + c);
        if (tile.softcap != 0.0f) s = tanh(s / tile.softcap) * tile.softcap;
        if (low > c || high < c + WIDTH) {
            ints column;
            for (int i = 0; i < WIDTH; ++i) column[i] = c + i;
            s = ((column >= low) & (column < high)) ? s : splat(-INFINITE);
        }
        store(scores + c, s);
        top = larger(s, top); // a NaN is never the larger: it goes on to the weights and makes the whole row NaN
    }
    return join<WIDTH>(top, larger);
}

// Turns one row's scores into weights relative to its highest score so far.
inline void soften(Tile& tile, int row, float* scores, float peak) {
    const float base = peak == -INFINITE ? 0.0f : peak;
    float* mass = tile.mass + row * WIDTH;
    if (peak != tile.peak[row]) {
        const vec fade = exp(splat(tile.peak[row] - base));
        tile.peak[row] = peak;
        store(mass, load(mass) * fade);
        float* sum = tile.sum + int64_t(row) * tile.value_width;
        for (int d = 0; d < tile.value_width; d += WIDTH) store(sum + d, load(sum + d) * fade);
    }
    vec more = load(mass);
    for (int c = 0; c < BLOCK; c += WIDTH) {
        const vec weight = exp(load(scores + c) - base);
        store(scores + c, weight);
        more += weight;
    }
    store(mass, more);
}

// Folds one block into rows `row .. row + R` of a tile.
template <class K, int R>
void fold(Tile& tile, int row, const Block<K>& block) {
    int low[R], high[R]; // columns of the block that each row sees; both rise from row to row
    for (int r = 0; r < R; ++r) {
        const int column = tile.position + (row + r) / tile.group - block.first;
        high[r] = std::min(column + 1, BLOCK);
        low[r] = tile.window > column ? 0 : column + 1 - tile.window;
    }
    if (high[R - 1] <= 0 || low[0] >= BLOCK) return;
    alignas(64) float scores[R * BLOCK];
    score<K, R>(tile.query + row * tile.head_dim, tile.head_dim, block, scores);
    float peak[R];
    for (int r = 0; r < R; ++r) peak[r] = settle(tile, row + r, scores + r * BLOCK, low[r], high[r]);
    for (int r = 0; r < R; ++r) soften(tile, row + r, scores + r * BLOCK, peak[r]);
    const int width = tile.value_width;
    float* sum = tile.sum + int64_t(row) * width;
    // All rows see from .. to; what only some of them see, each adds alone before and after, still in ascending order.
    const int to = high[0], from = std::min(low[R - 1], to);
    const auto add_alone = [&](int r, int begin, int end) {
        add_values<K, 1>(scores + r * BLOCK, block, width, begin, end, sum + r * width);
    };
    for (int r = 0; r < R; ++r) add_alone(r, low[r], from);
    add_values<K, R>(scores, block, width, from, to, sum);
    for (int r = 0; r < R; ++r) add_alone(r, std::max(to, low[r]), high[r]);
}

// Rows of a tile in register tiles of nearly equal size, at most ROWS each: calls visit(first row, rows).
template <class F>
inline void for_register_tiles(int rows, F visit) {
    int left = (rows + ROWS - 1) / ROWS;
    for (int row = 0; row < rows; --left) {
        const int n = (rows - row + left - 1) / left;
        visit(row, n);
        row += n;
    }
}

template <class K>
void fold_all(Tile& tile, const Block<K>& block) {
    for_register_tiles(tile.rows, [&](int row, int n) {
        switch (n) {
            case 1: return fold<K, 1>(tile, row, block);
            case 2: return fold<K, 2>(tile, row, block);
            case 3: return fold<K, 3>(tile, row, block);
            case 4: return fold<K, 4>(tile, row, block);
            case 5: return fold<K, 5>(tile, row, block);
            default: return fold<K, 6>(tile, row, block);
        }
    });
}

// One sequence's pages as one key/value head sees them.
template <class S>
struct Pages {
    const Call& call;
    const int32_t* table;
    int head;

    int64_t slot(int position) const { // slots before the position's, over all pages and heads
        const int64_t page = table[position / call.page_size];
        return (page * call.kv_heads + head) * call.page_size + position % call.page_size;
    }
    const S* key(int position) const { // its dimensions are call.lanes apart
        const int64_t at = slot(position), lane = at % call.lanes;
        return static_cast<const S*>(call.keys) + (at - lane) * call.head_dim + lane;
    }
    const S* value(int position) const {
        return static_cast<const S*>(call.values) + slot(position) * call.value_width;
    }
};

// Points at the groups of a block in their pages. Only groups that overlap low .. high, the positions that some row
// sees, are sure to have a page; the others borrow the nearest of these, and nothing of what they hold is used.
template <class S>
Block<S> in_place(const Pages<S>& pages, int first, int low, int high, int end) {
    const auto group_of = [](int position) { return position / LANES * LANES; };
    Block<S> block{first, {}, {}, {}, {}};
    for (int g = 0; g < GROUPS; ++g) {
        const int position = std::clamp(first + g * LANES, group_of(low), group_of(high - 1));
        const int next = std::min(first + BLOCK + g * LANES, group_of(end - 1));
        block.keys[g] = pages.key(position);
        block.values[g] = pages.value(position);
        block.next_keys[g] = pages.key(next);
        block.next_values[g] = pages.value(next);
    }
    return block;
}

// Copies positions low .. high into the tile's own block, as float32. The rest of that block keeps what it held.
template <class S>
Block<float> pack(const Pages<S>& pages, Tile& tile, int first, int low, int high) {
    const int head_dim = tile.head_dim, width = tile.value_width, lanes = pages.call.lanes;
    float* const keys = tile.packed;
    float* const values = keys + int64_t(BLOCK) * head_dim;
    Block<float> block{first, {}, {}, {}, {}};
    for (int g = 0; g < GROUPS; ++g) {
        block.keys[g] = block.next_keys[g] = keys + int64_t(g) * LANES * head_dim;
        block.values[g] = block.next_values[g] = values + int64_t(g) * LANES * width;
    }
    for (int position = low; position < high; ++position) {
        const int column = position - first, lane = column % LANES;
        const S* value = pages.value(position);
        for (int d = 0; d < width; d += WIDTH) store(values + column * width + d, load(value + d));
        float* to = keys + int64_t(column - lane) * head_dim; // the group that the position is in
        const S* key = pages.key(position);
        if (lanes != LANES)
            for (int d = 0; d < head_dim; ++d) to[d * LANES + lane] = widen(key[int64_t(d) * lanes]);
        else if (lane == 0 || position == low)
            for (int i = 0; i < LANES * head_dim; i += WIDTH) store(to + i, load(key - lane + i));
    }
    return block;
}

template <class S, class T>
void fill(const Call& call, const Task& task, Tile& tile) {
    const int group = call.heads / call.kv_heads, start = call.starts[task.sequence] + task.first;
    tile.rows = task.count * group;
    tile.group = group;
    tile.position = call.cached[task.sequence] + task.first;
    for_register_tiles(tile.rows, [&](int row, int n) {
        for (int r = 0; r < n; ++r) {
            const int head = task.head * group + (row + r) % group;
            const int64_t at = head * call.query_head + (start + (row + r) / group) * call.query_row;
            const T* query = static_cast<const T*>(call.query) + at;
            float* to = tile.query + row * call.head_dim + r;
            for (int d = 0; d < call.head_dim; ++d) to[d * n] = rounded<S>(query[d]) * call.scaling;
            const float sink = call.sinks ? call.sinks[head] : -INFINITE; // like a first position without a value
            tile.peak[row + r] = sink;
            store(tile.mass + (row + r) * WIDTH, vec{call.sinks ? 1.0f : 0.0f});
        }
    });
    std::fill_n(tile.sum, int64_t(tile.rows) * tile.value_width, 0.0f);
}

template <class T>
void drain(const Call& call, const Task& task, const Tile& tile) {
    const int group = tile.group, start = call.starts[task.sequence] + task.first;
    for (int row = 0; row < tile.rows; ++row) {
        const int64_t head = task.head * group + row % group;
        T* out = static_cast<T*>(call.out) + ((start + row / group) * int64_t(call.heads) + head) * call.value_dim;
        const float mass = join<WIDTH>(load(tile.mass + row * WIDTH), added);
        const float* sum = tile.sum + int64_t(row) * tile.value_width;
        for (int d = 0; d < call.value_dim; ++d) narrow(sum[d] / mass, out + d);
    }
}

template <class S, class T>
void attend(const Call& call, const Task& task, Tile& tile) {
    fill<S, T>(call, task, tile);
    const Pages<S> pages{call, call.tables + int64_t(task.sequence) * call.table_width, task.head};
    const int end = tile.position + task.count;
    const int begin = tile.window > tile.position ? 0 : tile.position + 1 - tile.window;
    const bool readable = call.lanes == LANES && (sizeof(S) == sizeof(float) || tile.rows <= 2 * ROWS);
    for (int first = begin / BLOCK * BLOCK; first < end; first += BLOCK) {
        const int low = std::max(first, begin), high = std::min(first + BLOCK, end);
        if (readable)
            fold_all(tile, in_place(pages, first, low, high, end));
        else
            fold_all(tile, pack(pages, tile, first, low, high));
    }
    drain<T>(call, task, tile);
}

// Positions of a task at most: with the heads of a group they make about TILE_ROWS rows.
inline int tile_positions(const Call& call) { return std::max(1, TILE_ROWS / (call.heads / call.kv_heads)); }

// The rows of a task at most, which decide how much scratch its tile takes.
inline int64_t tile_rows(const Call& call) { return int64_t(tile_positions(call)) * (call.heads / call.kv_heads); }

// All tasks of a call, those with the most work first.
std::vector<Task> plan(const Call& call) {
    const int most = tile_positions(call);
    std::vector<Task> tasks;
    for (int i = 0; i < call.sequences; ++i) {
        const int s = call.order[i], rows = call.starts[s + 1] - call.starts[s];
        for (int end = rows; end > 0; end -= most) // later rows see more, so they go first
            for (int h = 0; h < call.kv_heads; ++h)
                tasks.push_back({s, h, std::max(end - most, 0), std::min(most, end)});
    }
    return tasks;
}

} // namespace
} // namespace kernels
