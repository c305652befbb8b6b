// Operations on rows beside the products: norms, gates, what turns and keeps heads, and what chooses
// tokens.
//
// A row is computed by itself, in vectors of 16 float lanes whose order only its width decides. So
// its bits depend neither on its company nor on threads, and are the same on every instruction set:
// there is nothing but additions, products, quotients and square roots, each rounded once.
#pragma once

#include <stdint.h>

#include "lora.h"

namespace outrider {

// y = v * weight / sqrt(sum of v^2 + offset), where v is the row of `x`, or what a residual stream
// becomes when x is added to it. structs.py declares the fields of these structures in this order.
struct Norm {
    int64_t num_rows, width;
    int64_t x_stride, residual_stride;  // elements from row to row
    int64_t weight_rows;                // row i takes the weights of i % weight_rows
    const uint16_t* x;                  // bfloat16, as all of 16 bits
    uint16_t* residual;                 // or null
    const float* weight;                // [weight_rows, width], times sqrt(width)
    uint16_t* y;                        // [num_rows, width]
    float offset;                       // width * eps
};

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

// y = activation(gate) * up
struct Gate {
    int64_t num_rows, width;
    int64_t stride;     // elements from row to row
    const uint16_t* x;  // [num_rows, 2 * width], gates first
    uint16_t* y;        // [num_rows, width]
    int32_t activation;
};

// Query, key and value heads of rows: normalised, turned by position, and put where they belong.
struct Heads {
    int64_t num_rows, num_query_heads, num_kv_heads;
    int64_t head_dim;           // a multiple of 32
    int64_t stride;             // elements from row to row
    const uint16_t* x;          // [num_rows, query, key and value heads, head_dim]
    const int64_t* positions;   // [num_rows]
    int64_t num_positions;      // of the table
    const uint16_t* table;      // [num_positions, 2 * head_dim]: cosines, signed sines; or null
    const float* weight;        // of the norm, [query and key heads, head_dim], or null
    const int64_t* slots;       // [num_rows], -1: the row's key and value are not kept
    int64_t num_slots;          // of the caches
    uint16_t* query;            // [num_rows, num_query_heads, head_dim]
    uint16_t *keys, *values;    // [num_slots, num_kv_heads, head_dim]
    float offset;               // head_dim * eps
};

// The `count` greatest scores of rows, and their shares of the sum of exp(score).
struct Likeliest {
    int64_t num_rows, width;
    int64_t stride;       // elements from row to row
    int64_t count;        // at most kMostLikeliest, and at most the width
    const float* scores;
    int64_t* tokens;      // [num_rows, count], the greatest first, of equal ones the first
    float* shares;        // [num_rows, count]
};
constexpr int64_t kMostLikeliest = 16;

// Standard Gumbel noise, as gumbel_noise.py defines it by the two words that key a row.
struct Noise {
    int64_t num_rows, width;
    const int32_t* keys;  // [num_rows, 2]
    float* noise;         // [num_rows, width]
};

// The least score that top-k, top-p and min-p leave in rows, as truncation_floor.py defines it.
struct Floors {
    int64_t num_rows, width;
    int64_t stride;              // elements from row to row
    const float* scores;
    const int64_t* top_k;        // [num_rows]; off at the width and above
    const float *top_p, *min_p;  // [num_rows]; off at 1 and 0
    float* floors;               // [num_rows]
};

// The token of each row: the greatest sum of logit / temperature and noise, of equal ones the first,
// among those that the mask, top-k, top-p and min-p leave. The greatest logit where the temperature
// is 0.
struct Choice {
    int64_t num_rows, width;
    int64_t stride;  // elements from row to row
    const float* logits;
    const float* temperature;    // [num_rows]
    const int32_t* top_k;        // [num_rows]; off at 0
    const float *top_p, *min_p;  // [num_rows]; off at 1 and 0
    const int32_t* keys;         // [num_rows, 2], of the noise
    const uint32_t* masks;       // [num_rows, ceil(width / 32)], a bit for each token; or null
    int64_t* tokens;             // [num_rows]; kNoMemory or kNothingAllowed where there is none
};
constexpr int64_t kNoMemory = -1, kNothingAllowed = -2;  // the mask leaves nothing but -inf

// y = sum over a row's pairs, in order, of weight * result: each product and each sum is rounded.
struct Combination {
    int64_t num_rows, width, num_chosen;
    const uint16_t* results;  // bfloat16 [pairs, width]
    const int64_t* places;    // [num_rows, num_chosen]: where each pair's result is
    const float* weights;     // [num_rows, num_chosen]
    uint16_t* y;              // bfloat16 [num_rows, width]
};

// What an instruction set brings: each takes the rows from `first` to before `last`.
struct RowOps {
    void (*normalise)(const Norm&, int64_t first, int64_t last);
    void (*gate)(const Gate&, int64_t first, int64_t last);
    void (*place)(const Heads&, int64_t first, int64_t last);
    void (*rank)(const Likeliest&, int64_t first, int64_t last);
    void (*combine)(const Combination&, int64_t first, int64_t last);
    void (*draw_noise)(const Noise&, int64_t first, int64_t last);
    void (*find_floors)(const Floors&, int64_t first, int64_t last);
    void (*choose)(const Choice&, int64_t first, int64_t last);
    void (*lora_shrink)(const LoraTile&, int64_t first, int64_t last);  // ranks, into `inner`
    void (*lora_expand)(const LoraTile&, int64_t first, int64_t last);  // columns of the part
};

// Null where it is not known.
const RowOps* row_ops_of(int32_t instruction_set);
// Returns 0, or -1 where the instruction set is not known.
int32_t combine_rows(const Combination& combination, int32_t instruction_set, int32_t threads);

}  // namespace outrider
