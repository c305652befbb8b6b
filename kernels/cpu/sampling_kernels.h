// What chooses tokens: Gumbel noise, the least score that a truncation leaves, and both in one.
#pragma once

#include <float.h>

#include <algorithm>
#include <functional>

#include "parallel.h"
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

// The fractions of 16 tokens of a row, from its key.
struct Fractions {
    explicit Fractions(const int32_t* key) : low(uint32_t(key[0])), high(uint32_t(key[1])) {
        for (int32_t lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
    }

    INLINE Lanes from(int64_t token) const {
        return of_parts([&](int64_t lane) {
            BitPart tokens;
            memcpy(&tokens, numbers + lane, sizeof tokens);
            const BitPart bits = mixed(mixed((tokens + uint32_t(token)) ^ low) ^ high);
            return (__builtin_convertvector(bits, LanePart) + 0.5f) * 0x1p-32f;
        });
    }

    uint32_t low, high;
    int32_t numbers[kLanes];
};

INLINE Lanes noise_of(const Lanes& fraction) {
    // No more than the greatest number below 1.
    return gumbel_of(-larger(-fraction, filled(-1.0f + 0x1p-24f)));
}

void draw_noise(const outrider::Noise& call, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const Fractions fractions(call.keys + 2 * row);
        float* noise = call.noise + row * call.width;
        for (int64_t token = 0; token < call.width; token += kLanes) {
            const int64_t left = call.width - token;
            float part[kLanes];
            store(part, noise_of(fractions.from(token)));
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

// The first block from `start` on that has a greater score, or the last one: the likeliest tokens
// are in few blocks.
INLINE int64_t next_block(const Row& row, int64_t start, float score) {
    while (start + kScanned < row.width && !has_greater(row.scores + start, score)) {
        start += kScanned;
    }
    return start;
}

// Takes what reaches each of the pivots.
void reach(const Row& row, const float (&pivots)[kPivots], Reached (&reached)[kPivots]) {
    Lanes masses[kPivots] = {}, counts[kPivots] = {};
    const Lanes one = filled(1.0f), none = {};
    const float beneath = nextafterf(pivots[kPivots - 1], -INFINITY);
    for (int64_t d = 0; d < row.width; d += kLanes) {
        if (d % kScanned == 0) d = next_block(row, d, beneath);
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
    const float beneath = nextafterf(low, -INFINITY);
    for (int64_t token = 0; token < row.width && is_whole; ++token) {
        if (token % kScanned == 0) token = next_block(row, token, beneath);
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
    float floor = min_p > 0.0f ? row.peak + first_of(logarithm(filled(min_p))) : -INFINITY;
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

// ---- a row's token ---------------------------------------------------------------------------

struct Peak {
    float logit;
    bool is_finite;  // nothing of the row is infinite, or no number; -inf may be
};

Peak sound_peak_of(const float* logits, int64_t width) {
    Lanes peaks = filled(-INFINITY), faults = {};
    int64_t token = 0;
    for (; token + kLanes <= width; token += kLanes) {
        const Lanes part = load(logits + token);
        peaks = larger(part, peaks);
        faults += where_greater(filled(INFINITY), part, Lanes{}, filled(1.0f));
    }
    Peak peak = {largest_of(peaks), !(largest_of(faults) > 0.0f)};
    for (; token < width; ++token) {
        if (logits[token] > peak.logit) peak.logit = logits[token];
        peak.is_finite &= logits[token] < INFINITY;
    }
    return peak;
}

// The first score that is no number, or else the first infinite one.
int64_t first_not_finite(const float* logits, int64_t width, float temperature) {
    int64_t infinite = width;
    for (int64_t token = 0; token < width; ++token) {
        const float score = logits[token] / temperature;
        if (score != score) return token;
        if (infinite == width && score > FLT_MAX) infinite = token;
    }
    return infinite;
}

int64_t place_of(const float* logits, float peak) {
    int64_t token = 0;
    while (logits[token] != peak) ++token;
    return token;
}

// Draws a row's token: the greatest sum of score and noise, of equal ones the first.
//
// Noise of w is at least b only where w is at most e^-b. So its two logarithms are computed for the
// few tokens whose w is small enough to pass the best one so far.
class Draw {
   public:
    // Scores, logit / temperature, below `floor` are cut. Nothing of the row is infinite.
    Draw(const float* logits, int64_t width, float temperature, float floor, const int32_t* key)
        : logits_(logits), width_(width), temperature_(temperature), floor_(floor),
          fractions_(key) {}

    // `place`: of a token that is not cut, best of the likeliest.
    int64_t run(int64_t place) {
        take(place - place % kLanes);
        for (int64_t start = 0; start < width_; start += kScanned) {
            const int64_t end = start + kScanned < width_ ? start + kScanned : width_;
            const float hopeless = (best_ - kMostNoise - slack()) * temperature_;
            if (end - start == kScanned && !has_greater(logits_ + start, hopeless)) continue;
            for (int64_t first = start; first < end; first += kLanes) take(first);
        }
        return token_;
    }

   private:
    static constexpr float kMostNoise = 22.9f;

    // What rounding, and the exponential, may be wrong by, and more.
    float slack() const { return 0.01f + 1e-6f * fabsf(best_); }

    // Takes the best of 16 tokens, if it is better.
    INLINE void take(int64_t first) {
        const int64_t left = width_ - first;
        float rest[kLanes];
        const float* from = logits_ + first;
        if (left < kLanes) {
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                rest[lane] = lane < left ? from[lane] : -INFINITY;
            }
            from = rest;
        }
        const Lanes scores = load(from) / filled(temperature_);
        const Lanes fractions = fractions_.from(first);
        const Lanes enough = exponential(scores - (best_ - slack()));
        const Lanes is_near = where_greater(enough, fractions, filled(1.0f), Lanes{});
        if (!(largest_of(is_near) > 0.0f)) return;
        float own[kLanes], sums[kLanes];
        store(own, scores);
        store(sums, scores + noise_of(fractions));
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            if (own[lane] < floor_ || sums[lane] < best_) continue;
            if (sums[lane] == best_ && first + lane >= token_) continue;
            best_ = sums[lane];
            token_ = first + lane;
        }
    }

    const float* logits_;
    const int64_t width_;
    const float temperature_, floor_;
    const Fractions fractions_;
    float best_ = -FLT_MAX;
    int64_t token_ = 0;
};

// The least score that stays; NaN where there is no memory for the scores.
float floor_of_row(const outrider::Choice& call, int64_t row, const float* logits, float peak) {
    const float temperature = call.temperature[row];
    const int64_t top_k = call.top_k[row];
    const bool cuts_k = top_k > 0 && top_k < call.width;
    if (!cuts_k && call.top_p[row] >= 1.0f && !(call.min_p[row] > 0.0f)) return -INFINITY;
    const outrider::Scratch memory(call.width * int64_t(sizeof(float)));
    float* scores = reinterpret_cast<float*>(memory.data());
    if (!scores) return NAN;
    for (int64_t token = 0; token < call.width; ++token) scores[token] = logits[token] / temperature;
    return floor_of({scores, call.width, peak / temperature}, cuts_k ? top_k : call.width,
                    call.top_p[row], call.min_p[row]);
}

constexpr int64_t kMaskBits = 32;

// Copies a row, with -inf where its mask has no bit.
void mask_row(const float* logits, const uint32_t* mask, int64_t width, float* masked) {
    for (int64_t start = 0; start < width; start += kMaskBits, ++mask) {
        const int64_t left = width - start, count = left < kMaskBits ? left : kMaskBits;
        if (*mask == 0) {
            std::fill(masked + start, masked + start + count, -INFINITY);
        } else if (*mask == ~0u) {
            memcpy(masked + start, logits + start, size_t(count) * sizeof *logits);
        } else {
            for (int64_t bit = 0; bit < count; ++bit) {
                masked[start + bit] = *mask >> bit & 1 ? logits[start + bit] : -INFINITY;
            }
        }
    }
}

int64_t token_of(const outrider::Choice& call, int64_t row, const float* logits) {
    const float temperature = call.temperature[row];
    const bool is_greedy = !(temperature > 0.0f);
    const Peak peak = sound_peak_of(logits, call.width);
    if (!peak.is_finite || (!is_greedy && peak.logit / temperature > FLT_MAX)) {
        return first_not_finite(logits, call.width, is_greedy ? 1.0f : temperature);
    }
    if (call.masks && peak.logit == -INFINITY) return outrider::kNothingAllowed;
    const int64_t place = place_of(logits, peak.logit);
    if (is_greedy || peak.logit == -INFINITY) return place;
    const float floor = floor_of_row(call, row, logits, peak.logit);
    if (floor != floor) return outrider::kNoMemory;
    return Draw(logits, call.width, temperature, floor, call.keys + 2 * row).run(place);
}

void choose(const outrider::Choice& call, int64_t first, int64_t last) {
    const outrider::Scratch memory(call.masks ? call.width * int64_t(sizeof(float)) : 0);
    float* masked = reinterpret_cast<float*>(memory.data());
    for (int64_t row = first; row < last; ++row) {
        const float* logits = call.logits + row * call.stride;
        if (call.masks && masked) {
            const int64_t num_words = (call.width + kMaskBits - 1) / kMaskBits;
            mask_row(logits, call.masks + row * num_words, call.width, masked);
            logits = masked;
        }
        call.tokens[row] = masked ? token_of(call, row, logits) : outrider::kNoMemory;
    }
}

}  // namespace
