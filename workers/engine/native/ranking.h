// The tokens of a row in the order of their logits: what top-k, top-p and min-p keep, and a draw from it.
//
// Tokens rank by value, equal ones by number. What is kept is always a beginning of this ranking. Nothing is sorted
// whole: to find a place, a range of values is narrowed by counting what lies above a few cuts, until few enough tokens
// are in it.
#pragma once
#include "logit_row.h"

#include <cstdint>

namespace logits {

constexpr int LIST = 256; // tokens that are cheap to sort
constexpr float SHARES[] = {1.0f / 12, 1.0f / 3}; // where a range of values is cut, from its top
constexpr int CUTS = sizeof SHARES / sizeof *SHARES;
constexpr float FAINTEST = 88; // e^-88 is counted as nothing

// Finds places in the ranking of a row's tokens.
struct Ranking {
    struct Tally {
        int64_t count;
        double mass;
    };
    struct Place {
        int token;
        float value;
        Tally through; // the tokens up to this one, itself too
    };

    const Row& row;
    float* weights; // [blocks * BLOCK]
    uint64_t* list; // [n]
    float floor;    // every token that can be drawn lies above it
    Tally all;      // of these

    Ranking(const Row& row, float sharpness, float* weights, uint64_t* list) : row(row), weights(weights), list(list) {
        floor = std::max(row.peak - FAINTEST / sharpness, std::numeric_limits<float>::lowest());
        all = {0, 0};
        for (int b = 0; b < row.blocks; ++b) {
            const float* x = row.block(b);
            float* to = weights + b * BLOCK;
            ints counts{};
            vec masses{};
            for (int i = 0; i < BLOCK; i += WIDTH) {
                const vec v = load(x + i), w = weight(v, row.peak, sharpness);
                store(to + i, w);
                counts -= v > floor;
                masses += w;
            }
            all.count += join(counts, added);
            all.mass += total(masses);
        }
    }

    // What lies above each of N cuts, the highest first.
    template <int N>
    void tally(const float (&cuts)[N], Tally (&above)[N]) const {
        for (int c = 0; c < N; ++c) above[c] = {0, 0};
        for (int b = 0; b < row.blocks; ++b) {
            if (!(row.peaks[b] > cuts[N - 1])) continue;
            const float *x = row.block(b), *w = weights + b * BLOCK;
            vec masses[N] = {};
            ints counts[N] = {};
            for (int i = 0; i < BLOCK; i += WIDTH) {
                const vec value = load(x + i), mass = load(w + i);
#pragma GCC unroll 4
                for (int c = 0; c < N; ++c) {
                    counts[c] -= value > cuts[c];
                    masses[c] += value > cuts[c] ? mass : vec{};
                }
            }
            for (int c = 0; c < N; ++c) {
                above[c].count += join(counts[c], added);
                above[c].mass += total(masses[c]);
            }
        }
    }

    Tally over(float cut) const {
        const float cuts[1] = {cut};
        Tally above[1];
        tally(cuts, above);
        return above[0];
    }

    // The first place at which `reached(what there is up to it)` holds, or the last one with a weight. It is looked for
    // above `low`; `through` is what lies there.
    template <class F>
    Place find(F reached, float low, Tally through) const {
        float high = row.peak;
        Tally above{0, 0};
        for (bool narrows = true; narrows && through.count - above.count > LIST;) {
            float cuts[CUTS];
            Tally over[CUTS];
            for (int c = 0; c < CUTS; ++c) cuts[c] = high - (high - low) * SHARES[c];
            tally(cuts, over);
            narrows = false; // where many tokens are equal
            for (int c = 0; c < CUTS; ++c) {
                if (!(cuts[c] < high && cuts[c] > low)) continue;
                narrows = true;
                if (reached(over[c])) {
                    low = cuts[c], through = over[c];
                    break;
                }
                high = cuts[c], above = over[c];
            }
        }
        const int found = gather(low, high);
        std::sort(list, list + found);
        Place place{row.most_likely(), row.peak, above};
        for (int i = 0; i < found; ++i) {
            const int token = int(uint32_t(list[i]));
            const double mass = weights[token];
            if (i && !(mass > 0)) break;
            place = {token, value(token), {place.through.count + 1, place.through.mass + mass}};
            if (reached(place.through)) break;
        }
        return place;
    }

    float value(int token) const { return row.block(token / BLOCK)[token % BLOCK]; }

    // Keys of the tokens with low < x <= high, in no order: the key that sorts first ranks first.
    int gather(float low, float high) const {
        int found = 0;
        for (int b = 0; b < row.blocks; ++b) {
            if (!(row.peaks[b] > low)) continue;
            for (int first = 0; first < BLOCK; first += UNROLL * WIDTH) {
                const float* x = row.block(b) + first;
                ints any{};
                for (int i = 0; i < UNROLL * WIDTH; i += WIDTH) any |= (load(x + i) > low) & (load(x + i) <= high);
                if (!join(any, either)) continue;
                for (int i = 0; i < UNROLL * WIDTH; ++i)
                    if (x[i] > low && x[i] <= high) list[found++] = key(x[i], b * BLOCK + first + i);
            }
        }
        return found;
    }

    static uint64_t key(float x, int token) {
        uint32_t wide;
        x += 0.0f; // -0 ranks like 0
        std::memcpy(&wide, &x, sizeof wide);
        const uint32_t ascending = wide & 0x80000000u ? ~wide : wide | 0x80000000u;
        return uint64_t(~ascending) << 32 | uint32_t(token);
    }
};

// Draws among the tokens that top-k, top-p and min-p leave, best first; top-p counts the mass that top-k left.
inline int draw_filtered(
    const Ranking& ranking, float sharpness, double point, int64_t top_k, double top_p, double min_p
) {
    using Tally = Ranking::Tally;
    float low = ranking.floor;
    Tally kept = ranking.all;
    const auto keep_until = [&](auto reached) {
        const Ranking::Place last = ranking.find(reached, low, kept);
        if (last.through.count < kept.count) kept = last.through, low = below(last.value);
    };
    if (top_k < kept.count) keep_until([=](Tally t) { return t.count >= top_k; });
    if (top_p < 1) keep_until([wanted = top_p * kept.mass](Tally t) { return t.mass >= wanted; });
    if (min_p > 0) {
        const float peak = ranking.row.peak, least = peak + float(std::log(min_p) / sharpness);
        const float cut = below(std::min(least, peak));
        const Tally likely = cut > low ? ranking.over(cut) : kept;
        if (likely.count < kept.count) kept = likely, low = cut;
    }
    const auto reached = [=](Tally t) { return t.mass > point * kept.mass || t.count >= kept.count; };
    return ranking.find(reached, low, kept).token;
}

// The `top` most likely tokens of a row, best first.
inline void rank_top(const Row& row, double normaliser, int top, int32_t* tokens, float* logprobs) {
    float* const values = logprobs; // they become logprobs at the end
    int held = 0;
    float worst = -INFINITE;
    const auto offer = [&](float x, int token) {
        int at = std::min(held, top - 1);
        for (; at > 0 && x > values[at - 1]; --at) values[at] = values[at - 1], tokens[at] = tokens[at - 1];
        values[at] = x, tokens[at] = token;
        held = std::min(held + 1, top);
        if (held == top) worst = values[top - 1];
    };
    for (int b = 0; b < row.blocks; ++b) {
        if (held == top && !(row.peaks[b] > worst)) continue;
        const float* x = row.block(b);
        for (int i = 0, end = row.size(b); i < end; ++i) {
            if (held == top && i % WIDTH == 0 && !join(load(x + i) > worst, either)) {
                i += WIDTH - 1;
                continue;
            }
            if (held < top || x[i] > worst) offer(x[i], b * BLOCK + i);
        }
    }
    for (int i = 0; i < top; ++i) logprobs[i] = float(values[i] - normaliser);
}

} // namespace logits
