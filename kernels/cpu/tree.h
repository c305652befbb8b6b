// Draft trees that grow on the host: candidates in flat memory, and what is asked of many at once.
//
// draft/trees/growing_tree.py is the reference, whose every number these functions give bit for bit: all
// is double precision, and sums run in the reference's order.
#pragma once

#include <stdint.h>

namespace outrider {

constexpr int64_t kTreeSlots = 256;  // MAX_TREE_NODES (tree_bounds.py); the most of a ranking or a frontier
constexpr int64_t kMaskWords = kTreeSlots / 64;

// A guess; tree_library.py declares the same fields in this order, draft/trees/tree_candidate.py says what
// they are. A link is the number of a candidate, -1 for none. `offset`: -1 until it is computed.
struct Candidate {
    int64_t token_id, parent, depth, sources, evidence;
    int64_t is_expanded, is_forced, is_recalled, has_logits;
    int64_t offset;
    int64_t first_child, last_child, next_sibling;
    double model_confidence, text_confidence, confidence, edge_prob, path_prob, covered;
    uint64_t mask[kMaskWords];
};

// What is learnt of guesses: draft/budget/calibration.py. There is a curve for each kind of evidence, and
// behind these one for each kind, depth class, and way of sampling (0 for sampled, 1 for greedy).
struct CalibrationTable {
    const double* shifts;        // of confidences, [kinds, depth classes, 2, bins]
    const double* edges;         // [bins - 1]
    const int64_t* depth_class;  // [num_depths]
    double *num_right, *num_judged, *sum_confidence;  // [curves, bins]
    int64_t* num_unfitted;                            // [curves]: outcomes since the last fit
    int64_t num_edges, num_depths, num_classes, num_kinds, refit_every;
    double least, most, kept;
};

// A tree; tree_library.py declares the same fields in this order.
struct Tree {
    int64_t max_nodes, max_depth, root_token_id, root_slot, model_bit;
    bool keeps_logits, is_stepwise, is_greedy;
    int64_t num_candidates, num_slots, num_passes, num_frontier, num_ancestors;
    int64_t silent_bit, grammar_bit, recalled_bit;
    const CalibrationTable* calibration;  // null: sources are taken at their word
    double most_believed;
    Candidate* candidates;
    int64_t capacity;
    int64_t num_ranked;  // -1: the ranking is not that of the candidates
    int64_t frontier[kTreeSlots], ancestors[kTreeSlots], ranking[kTreeSlots];
};

}  // namespace outrider
