// The feed-forward part of a mixture of experts in one call.
//
// Rows are sorted by expert, and all experts' first products run in one parallel region, then all
// second ones: experts are small, and waking threads for each would take as long as half of them.
// The bits of a row are those of its experts' products, gates and weighted sum one by one.
#pragma once

#include <stdint.h>

namespace outrider {

// What stays; expert_products.py declares the fields of both structures in this order.
struct Experts {
    int64_t num_experts, width, inner;
    const void* const* gate_up;  // [num_experts], each a product [2 * inner, width]
    const void* const* down;     // [num_experts], each a product [width, inner]
    int64_t gate_up_threads, down_threads;  // that a product is worth
    int32_t gate_up_kind, down_kind;
    int32_t activation;
};

struct ExpertsCall {
    int64_t num_rows, num_chosen;
    const uint16_t* x;       // bfloat16 [num_rows, width]
    const int64_t* experts;  // [num_rows, num_chosen]
    const float* weights;    // likewise
    uint16_t* y;             // bfloat16 [num_rows, width]
};

}  // namespace outrider
