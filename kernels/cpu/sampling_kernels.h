// What chooses tokens: Gumbel noise, and the least score that a truncation leaves.
#pragma once

#include <float.h>

#include <algorithm>
#include <functional>

#include "row_kernels.h"

namespace {

// The 32-bit finaliser of gumbel_noise.py.
INLINE BitPart mixed(BitPart bits) {
    bits ^= bits >> 16;
    bits *= 0x7feb352du;
    bits ^= bits >> 15;
    bits *= 0x846ca68bu;
    return bits ^ bits >> 16;
}

// -log(-log(1 - w)) of tokens' fractions w, log(1 - w) by logarithms alone (W. Kahan): what rounding
// took from 1 - w is known exactly.
INLINE Lanes gumbel_of(const Lanes& fraction) {
    const Lanes rest = 1.0f - fraction;
    const Lanes taken = 1.0f - rest;
    const Lanes some = larger(taken, filled(FLT_MIN));
    const Lanes inner = -logarithm(rest) * (fraction / some);
    return -logarithm(where_greater(taken, filled(0.0f), inner, fraction));
}

void draw_noise(const outrider::Noise& call, int64_t first, int64_t last) {
    int32_t numbers[kLanes];
    for (int32_t lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
    for (int64_t row = first; row < last; ++row) {
        const uint32_t low = uint32_t(call.keys[2 * row]), high = uint32_t(call.keys[2 * row + 1]);
        float* noise = call.noise + row * call.width;
        for (int64_t token = 0; token < call.width; token += kLanes) {
            const Lanes fraction = of_parts([&](int64_t lane) {
                BitPart tokens;
                memcpy(&tokens, numbers + lane, sizeof tokens);
                const BitPart bits = mixed(mixed((tokens + uint32_t(token)) ^ low) ^ high);
                return (__builtin_convertvector(bits, LanePart) + 0.5f) * 0x1p-32f;
            });
            // No more than the greatest number below 1.
            const Lanes gumbel = gumbel_of(-larger(-fraction, filled(-1.0f + 0x1p-24f)));
            const int64_t left = call.width - token;
            float part[kLanes];
            store(part, gumbel);
            memcpy(noise + token, part, size_t(left < kLanes ? left : kLanes) * sizeof *part);
        }
    }
}

// How many of a row's tokens reach a score, and what they weigh: the sum of exp(score - peak).
struct Reached {
    int64_t count;
    double mass;
};

constexpr int64_t kPivots = 8;
constexpr int64_t kSorted = 512;  // so few scores are sorted rather than counted once more
constexpr int kMostPasses = 16;

struct Row {
    const float* scores;
    int64_t width;
    float peak;
};

// Takes what reaches each of the pivots.
void reach(const Row& row, const float (&pivots)[kPivots], Reached (&reached)[kPivots]) {
    Lanes masses[kPivots] = {}, counts[kPivots] = {};
    const Lanes one = filled(1.0f), none = {};
    for (int64_t d = 0; d < row.width; d += kLanes) {
        float rest[kLanes];
        const float* from = row.scores + d;
        if (d + kLanes > row.width) {
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                rest[lane] = d + lane < row.width ? from[lane] : -INFINITY;
            }
            from = rest;
        }
        const Lanes scores = load(from);
        const Lanes weights = exponential(scores - row.peak);
#pragma GCC unroll 8
        for (int64_t pivot = 0; pivot < kPivots; ++pivot) {
            const Lanes least = filled(pivots[pivot]);
            masses[pivot] += where_greater(least, scores, none, weights);
            counts[pivot] += where_greater(least, scores, none, one);
        }
    }
    for (int64_t pivot = 0; pivot < kPivots; ++pivot) {
        float lanes[kLanes];
        store(lanes, counts[pivot]);
        reached[pivot] = {0, double(total_of(masses[pivot]))};
        for (float count : lanes) reached[pivot].count += int64_t(count);
    }
}

// The greatest score that is reached by enough tokens, and what is greater than it.
struct Border {
    float score;
    Reached above;
};

// `low` reaches enough, which is `of_low`.
template <class IsEnough>
Border border_of(const Row& row, float low, Reached of_low, IsEnough is_enough) {
    float high = INFINITY;  // what it reaches is not enough
    Reached of_high = {0, 0.0};
    float top = row.peak;
    for (int pass = 0; pass < kMostPasses && of_low.count - of_high.count > kSorted; ++pass) {
        // The first pass has steps of three, down to e^-24 of the likeliest token.
        const float bottom = low > -INFINITY ? low : top - 3.0f * float(kPivots + 1 << pass);
        float pivots[kPivots];
        Reached reached[kPivots];
        for (int64_t pivot = 0; pivot < kPivots; ++pivot) {
            pivots[pivot] = top - (top - bottom) * float(pivot + 1) / float(kPivots + 1);
        }
        reach(row, pivots, reached);
        const float was_low = low, was_high = high;
        for (int64_t pivot = 0; pivot < kPivots; ++pivot) {
            if (is_enough(reached[pivot])) {
                if (pivots[pivot] > low) low = pivots[pivot], of_low = reached[pivot];
                break;
            }
            if (pivots[pivot] < high) high = pivots[pivot], of_high = reached[pivot];
        }
        if (low == was_low && high == was_high) break;  // equal scores
        top = high < row.peak ? high : row.peak;
    }
    float between[kSorted];
    int64_t count = 0;
    bool is_whole = true;
    for (int64_t token = 0; token < row.width && is_whole; ++token) {
        const float score = row.scores[token];
        if (!((score >= low) & (score < high))) continue;  // one branch, hardly ever taken
        is_whole = count < kSorted;
        if (is_whole) between[count++] = score;
    }
    if (!is_whole) return {low, of_high};
    std::sort(between, between + count, std::greater<float>());
    Reached above = of_high, reached = of_high;
    for (int64_t each = 0; each < count; ++each) {
        if (each && between[each] < between[each - 1]) above = reached;
        reached.count += 1;
        reached.mass += exponential_of(between[each] - row.peak);
        if (is_enough(reached)) return {between[each], above};
    }
    return {low, above};
}

float floor_of(const Row& row, int64_t top_k, float top_p, float min_p) {
    // The likeliest token always stays.
    float floor = min_p > 0.0f ? row.peak + logf(min_p) : -INFINITY;
    if (floor > row.peak) floor = row.peak;
    const bool cuts_k = top_k < row.width, cuts_p = top_p < 1.0f;
    Reached kept = {row.width, 0.0};
    float lowest = -INFINITY;
    if (cuts_k) {
        const Border border = border_of(row, lowest, kept, [=](const Reached& reached) {
            return reached.count >= top_k;
        });
        lowest = border.score;
        const double equal = double(top_k - border.above.count);
        kept = {top_k, border.above.mass + equal * exponential_of(lowest - row.peak)};
    } else if (cuts_p) {
        kept.mass = 1.0 / share_of_total(row.scores, row.width, row.peak);
    }
    if (cuts_p) {
        const double wanted = double(top_p) * kept.mass;
        lowest = border_of(row, lowest, kept, [=](const Reached& reached) {
                     return reached.mass >= wanted;
                 }).score;
    }
    return lowest > floor ? lowest : floor;
}

float peak_of(const float* scores, int64_t width) {
    Lanes peaks = filled(-INFINITY);
    int64_t token = 0;
    for (; token + kLanes <= width; token += kLanes) peaks = larger(load(scores + token), peaks);
    float peak = largest_of(peaks);
    for (; token < width; ++token) peak = scores[token] > peak ? scores[token] : peak;
    return peak;
}

void find_floors(const outrider::Floors& call, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const float* scores = call.scores + row * call.stride;
        const float peak = peak_of(scores, call.width);
        const bool is_finite = peak >= -FLT_MAX && peak <= FLT_MAX;
        call.floors[row] = is_finite ? floor_of({scores, call.width, peak}, call.top_k[row],
                                                call.top_p[row], call.min_p[row])
                                     : -INFINITY;
    }
}

}  // namespace
