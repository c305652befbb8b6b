// The levels of draft trees: rows chosen, computed and ranked until another level is not worth it.
//
// The reference is draft/host_growth.py with draft/budget/budget.py, whose decisions these are.
#pragma once

#include "pass.h"
#include "tree.h"

namespace outrider {

// A tree that may grow; level_library.py declares the fields of these structures in this order.
struct LevelTree {
    Tree* tree;
    double chance, urgency;  // the weight of what a level gains is their product
    int64_t first_block;     // its block table begins at this place of `blocks`
    int64_t num_slots;       // logical slots that may be written to
    int64_t is_growing;      // its next rows are chosen, or on their way
    int64_t num_first;       // rows that take in the text up to the root
    int64_t num_rows;        // computed by this call
};

// A step's budget (StepBudget), and what it has spent.
struct LevelBudget {
    const double* target_s;  // of the large pass with 0, 1, ... guesses, as sizes are compared
    const double* draft_s;   // of draft passes with 0, 1, ... rows, as they are expected
    int64_t num_levels;
    double base_tokens, longest_s, step_host_s, part_host_s, passes_s;
};

// A pass that was made.
struct LevelPass {
    int64_t num_rows, num_logit_rows;
    double whole_s, work_s;  // with what makes it ready, and without
    double mean_context;
};

struct LevelsCall {
    int64_t num_growing, num_trees;
    LevelTree* growing;
    Tree* const* trees;     // all of the step
    const double* weights;  // of them
    LevelBudget* budget;    // null: every level is worth it
    const int64_t* blocks;  // block tables, one behind the other
    const int64_t* first_token_ids;  // of first rows, likewise; null where the roots are computed
    const Model* model;
    const LayerCache* caches;
    int64_t num_layers, block_size;
    int64_t window;    // keys that a row sees at most, 0 for all
    int64_t has_full;  // some layers have no window
    int64_t tile_rows, max_rows;
    int64_t max_frontier, num_children;
    double min_path_prob;
    int64_t is_ranked;   // children are a row's greatest logits
    int64_t is_chosen;   // the next rows were chosen before
    float* logits;       // [max_rows, head's features]
    LevelPass* passes;   // [kTreeSlots]
    int64_t num_passes;  // that were made
};

// Why a call ends.
enum LevelsEnd : int32_t {
    kLevelsOver = 0,      // no level is worth it
    kLevelsNoRoom = 1,    // the chosen rows have no slots yet
    kLevelsTooMany = 2,   // the chosen rows are more than a pass takes
    kLevelsUnranked = 3,  // the logits are there, and the caller's to rank
};

}  // namespace outrider
