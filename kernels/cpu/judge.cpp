// Follows, in every tree, the greatest logits: what a caller would choose row by row.
#include "judge.h"

#include <math.h>
#include <string.h>

#include "parallel.h"

namespace outrider {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kNotFinite = -2;  // NOT_FINITE in verifier/sampling.py

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Marks __attribute__((vector_size(kLanes * sizeof(int32_t))));

// Returns the place of the greatest score, of equal ones the first; kNotFinite where that is no
// number or infinite.
int64_t greatest(const float* scores, int64_t width) {
    float peak = -INFINITY;
    bool has_nan = false;
    Lanes peaks, lanes;
    Marks nans = {};
    memset(&nans, 0, sizeof nans);
    for (int64_t lane = 0; lane < kLanes; ++lane) peaks[lane] = -INFINITY;
    int64_t token = 0;
    for (; token + kLanes <= width; token += kLanes) {
        memcpy(&lanes, scores + token, sizeof lanes);
        nans |= lanes != lanes;
        peaks = lanes > peaks ? lanes : peaks;
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        has_nan |= nans[lane] != 0;
        peak = peaks[lane] > peak ? peaks[lane] : peak;
    }
    for (; token < width; ++token) {
        has_nan |= scores[token] != scores[token];
        peak = scores[token] > peak ? scores[token] : peak;
    }
    if (has_nan || isinf(peak)) return kNotFinite;
    for (token = 0; scores[token] != peak;) ++token;
    return token;
}

}  // namespace
}  // namespace outrider

using namespace outrider;

// Walks all trees. Of a row that no path reaches nothing is read.
EXPORT void outrider_judge(const JudgeCall* call) {
    int64_t first = 0;
    for (int64_t tree = 0; tree < call->num_trees; ++tree) {
        const int64_t count = call->counts[tree];
        const auto chosen = [&](int64_t node) {
            return greatest(call->logits + (first + node) * call->stride, call->width);
        };
        int64_t node = 0, wanted = chosen(0), length = 0;
        for (int64_t child = 1; child < count; ++child) {  // parents stand before children
            const int64_t place = first + child;
            if (call->parents[place] != node || call->token_ids[place] != wanted) continue;
            call->paths[first + length++] = node = child;
            wanted = chosen(child);
        }
        call->lengths[tree] = length;
        call->next_tokens[tree] = wanted;
        first += count;
    }
}
