// The operations of rows.h, for the instruction set of the file that includes this.
#pragma once

#include <math.h>

#include "lanes.h"
#include "rows.h"

namespace {

// The elements of a row from `d` on, zeros behind its end.
INLINE Lanes part_of(const uint16_t* row, int64_t d, int64_t width) {
    if (d + kLanes <= width) return widened_lanes(row + d);
    uint16_t rest[kLanes] = {};
    memcpy(rest, row + d, size_t(width - d) * sizeof *row);
    return widened_lanes(rest);
}

INLINE Lanes part_of(const float* row, int64_t d, int64_t width) {
    if (d + kLanes <= width) return load(row + d);
    float rest[kLanes] = {};
    memcpy(rest, row + d, size_t(width - d) * sizeof *row);
    return load(rest);
}

INLINE void keep_part(uint16_t* row, int64_t d, int64_t width, const Lanes& lanes) {
    if (d + kLanes <= width) return store_rounded(row + d, lanes);
    uint16_t rest[kLanes];
    store_rounded(rest, lanes);
    memcpy(row + d, rest, size_t(width - d) * sizeof *row);
}

constexpr int64_t kSums = 4;  // chains of additions that run side by side

INLINE float inverse_length(const Lanes (&sums)[kSums], float offset) {
    return 1.0f / sqrtf(total_of((sums[0] + sums[1]) + (sums[2] + sums[3])) + offset);
}

// Adds x to the residual stream, if there is one; returns the row that is normalised.
INLINE const uint16_t* stream_of(const outrider::Norm& norm, int64_t row) {
    const uint16_t* x = norm.x + row * norm.x_stride;
    if (!norm.residual) return x;
    uint16_t* stream = norm.residual + row * norm.residual_stride;
    for (int64_t d = 0; d < norm.width; d += kLanes) {
        const Lanes sum = part_of(stream, d, norm.width) + part_of(x, d, norm.width);
        keep_part(stream, d, norm.width, sum);
    }
    return stream;
}

void normalise(const outrider::Norm& norm, int64_t first, int64_t last) {
    const int64_t width = norm.width;
    for (int64_t row = first; row < last; ++row) {
        const uint16_t* x = stream_of(norm, row);
        Lanes sums[kSums] = {};
        for (int64_t d = 0, part = 0; d < width; d += kLanes, part = (part + 1) % kSums) {
            const Lanes values = part_of(x, d, width);
            sums[part] += values * values;
        }
        const float inverse = inverse_length(sums, norm.offset);
        const float* weight = norm.weight + row % norm.weight_rows * width;
        uint16_t* y = norm.y + row * width;
        for (int64_t d = 0; d < width; d += kLanes) {
            const Lanes normed = part_of(x, d, width) * inverse * part_of(weight, d, width);
            keep_part(y, d, width, normed);
        }
    }
}

// The gate times the sigmoid of z, which is z = gate, or for GELU's tanh form
// (1 + tanh(z / 2)) / 2 = sigmoid(z), z = sqrt(8 / pi) * (gate + 0.044715 gate^3).
template <int32_t kActivation>
INLINE Lanes activated(const Lanes& gate) {
    Lanes z = gate;
    if (kActivation == outrider::kGeluTanh) {
        z = (gate * gate * gate * 0.044715f + gate) * 1.5957691216057308f;
    }
    const Lanes open = gate / (exponential(-z) + 1.0f);
    // Beyond, the exponential is bounded and the quotient would not be nothing.
    return where_greater(filled(-87.0f), z, Lanes{}, open);
}

template <int32_t kActivation>
void gate_rows(const outrider::Gate& gate, int64_t first, int64_t last) {
    const int64_t width = gate.width;
    for (int64_t row = first; row < last; ++row) {
        const uint16_t* x = gate.x + row * gate.stride;
        uint16_t* y = gate.y + row * width;
        for (int64_t d = 0; d < width; d += kLanes) {
            const Lanes open = activated<kActivation>(part_of(x, d, width));
            keep_part(y, d, width, open * part_of(x + width, d, width));
        }
    }
}

void gate(const outrider::Gate& call, int64_t first, int64_t last) {
    if (call.activation == outrider::kSilu) return gate_rows<outrider::kSilu>(call, first, last);
    gate_rows<outrider::kGeluTanh>(call, first, last);
}

// Normalises and turns a head. turn: cosines and signed sines, or null; weight: or null.
INLINE void turn_head(const outrider::Heads& heads, const uint16_t* x, const uint16_t* turn,
                      const float* weight, uint16_t* y) {
    const int64_t dim = heads.head_dim, half = dim / 2;
    float inverse = 1.0f;
    if (weight) {
        Lanes sums[kSums] = {};
        for (int64_t d = 0; d < half; d += kLanes) {
            const Lanes left = widened_lanes(x + d), right = widened_lanes(x + half + d);
            sums[0] += left * left;
            sums[1] += right * right;
        }
        inverse = inverse_length(sums, heads.offset);
    }
    for (int64_t d = 0; d < half; d += kLanes) {
        Lanes left = widened_lanes(x + d), right = widened_lanes(x + half + d);
        if (weight) {
            left = left * inverse * load(weight + d);
            right = right * inverse * load(weight + half + d);
        }
        if (!turn) {
            store_rounded(y + d, left);
            store_rounded(y + half + d, right);
            continue;
        }
        const uint16_t* sines = turn + dim;
        store_rounded(y + d, left * widened_lanes(turn + d) + right * widened_lanes(sines + d));
        store_rounded(y + half + d, right * widened_lanes(turn + half + d) +
                                        left * widened_lanes(sines + half + d));
    }
}

void place(const outrider::Heads& heads, int64_t first, int64_t last) {
    const int64_t dim = heads.head_dim, queries = heads.num_query_heads;
    const int64_t kept = heads.num_kv_heads;
    for (int64_t row = first; row < last; ++row) {
        const uint16_t* x = heads.x + row * heads.stride;
        const uint16_t* turn =
            heads.table ? heads.table + heads.positions[row] * 2 * dim : nullptr;
        const int64_t slot = heads.slots[row];
        for (int64_t head = 0; head < queries + kept; ++head) {
            if (head >= queries && slot < 0) break;
            uint16_t* y = head < queries
                              ? heads.query + (row * queries + head) * dim
                              : heads.keys + (slot * kept + head - queries) * dim;
            const float* weight = heads.weight ? heads.weight + head * dim : nullptr;
            turn_head(heads, x + head * dim, turn, weight, y);
        }
        if (slot < 0) continue;
        memcpy(heads.values + slot * kept * dim, x + (queries + kept) * dim,
               size_t(kept * dim) * sizeof *x);
    }
}

// The greatest scores so far, the greatest first.
struct Ranking {
    explicit Ranking(int64_t count) : count(count) {
        for (int64_t each = 0; each < count; ++each) scores[each] = -INFINITY, tokens[each] = -1;
    }

    // Takes a score that is greater than the last one's.
    void add(float score, int64_t token) {
        int64_t place = count - 1;
        for (; place > 0 && scores[place - 1] < score; --place) {
            scores[place] = scores[place - 1];
            tokens[place] = tokens[place - 1];
        }
        scores[place] = score;
        tokens[place] = token;
    }

    // Fills the places that no score is great enough for with the first tokens that have none.
    void fill() {
        int64_t first = count;
        while (first > 0 && tokens[first - 1] < 0) --first;
        for (int64_t place = first, token = 0; place < count; ++token) {
            bool is_there = false;
            for (int64_t each = 0; each < first; ++each) is_there |= tokens[each] == token;
            if (!is_there) tokens[place++] = token;
        }
    }

    const int64_t count;
    float scores[outrider::kMostLikeliest];
    int64_t tokens[outrider::kMostLikeliest];
};

constexpr int64_t kScanned = 8 * kLanes;

INLINE bool has_greater(const float* scores, float least) {
    IntPart found = {};
    for (int64_t d = 0; d < kScanned; d += kPartLanes) {
        LanePart part;
        memcpy(&part, scores + d, sizeof part);
        found |= part > LanePart{} + least;
    }
    int64_t words[kPartLanes / 2];
    memcpy(words, &found, sizeof found);
    int64_t any = 0;
    for (int64_t each = 0; each < kPartLanes / 2; ++each) any |= words[each];
    return any != 0;
}

INLINE float share_of_total(const float* scores, int64_t width, float highest) {
    Lanes sums[kSums] = {};
    int64_t d = 0;
    for (; d + kSums * kLanes <= width; d += kSums * kLanes) {
#pragma GCC unroll 4
        for (int64_t part = 0; part < kSums; ++part) {
            sums[part] += exponential(load(scores + d + part * kLanes) - highest);
        }
    }
    float total = total_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; d < width; ++d) total += exponential_of(scores[d] - highest);
    return 1.0f / total;
}

void rank(const outrider::Likeliest& likeliest, int64_t first, int64_t last) {
    const int64_t width = likeliest.width, count = likeliest.count;
    for (int64_t row = first; row < last; ++row) {
        const float* scores = likeliest.scores + row * likeliest.stride;
        Ranking best(count);
        for (int64_t start = 0; start < width; start += kScanned) {
            const int64_t end = start + kScanned < width ? start + kScanned : width;
            // Behind the first few, hardly a block has one.
            if (end - start == kScanned && !has_greater(scores + start, best.scores[count - 1])) {
                continue;
            }
            for (int64_t token = start; token < end; ++token) {
                if (scores[token] > best.scores[count - 1]) best.add(scores[token], token);
            }
        }
        best.fill();
        const float share = share_of_total(scores, width, best.scores[0]);
        for (int64_t each = 0; each < count; ++each) {
            const float distance = best.scores[each] - best.scores[0];
            likeliest.tokens[row * count + each] = best.tokens[each];
            likeliest.shares[row * count + each] =
                distance < -87.0f ? 0.0f : exponential_of(distance) * share;
        }
    }
}

void combine(const outrider::Combination& call, int64_t first, int64_t last) {
    const int64_t width = call.width, chosen = call.num_chosen;
    for (int64_t row = first; row < last; ++row) {
        const int64_t* places = call.places + row * chosen;
        const float* weights = call.weights + row * chosen;
        for (int64_t d = 0; d < width; d += kLanes) {
            Lanes sum = part_of(call.results + places[0] * width, d, width) * weights[0];
            for (int64_t rank = 1; rank < chosen; ++rank) {
                sum += part_of(call.results + places[rank] * width, d, width) * weights[rank];
            }
            keep_part(call.y + row * width, d, width, sum);
        }
    }
}

}  // namespace
