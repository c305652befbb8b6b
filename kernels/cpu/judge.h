// Trees that are judged by the greatest logits.
#pragma once

#include <stdint.h>

namespace outrider {

// Nodes of trees, one tree behind the other; structs.py declares the same fields in this order.
struct JudgeCall {
    int64_t num_trees, width;
    int64_t stride;                      // elements from row to row
    const float* logits;                 // [nodes, width]
    const int64_t* counts;               // of nodes, [num_trees]
    const int64_t *token_ids, *parents;  // [nodes]; a parent is a node of its tree
    int64_t* paths;                      // [nodes]: accepted nodes, from where their tree begins
    int64_t *lengths, *next_tokens;      // [num_trees]
};

}  // namespace outrider
