// Which keys every row of a pass sees, and where they lie.
#pragma once

#include <stdint.h>

namespace outrider {

// One sequence's rows; row_plan.py declares the same fields in this order.
struct PlannedSequence {
    int64_t first_row, end_row;
    int64_t num_keys;     // this pass's rows included
    int64_t tree_start;   // as many as keys where the rows are no tree
    int64_t first_block;  // its block table begins at this place of `blocks`
    int64_t is_tree;
};

// What is planned, and where the parts of struct Attention are written to.
struct RowPlanCall {
    int64_t num_sequences, block_size;
    int64_t window;      // keys that a row sees at most, 0 for all
    int64_t tile_rows;   // of one tile at most
    int64_t mask_words;  // of a row
    const PlannedSequence* sequences;
    const int64_t* blocks;   // block tables, one behind the other
    const uint64_t* masks;   // [rows of trees][mask_words]: a row's ancestors and itself
    int32_t* tiles;          // [tiles][2]
    int64_t* tile_slots;     // [tiles]
    int32_t* slots;          // [keys of all sequences]
    int32_t *begins, *ends, *own_begins;  // [rows]
    int64_t* own_starts;                  // [rows]
    int32_t* own_slots;
};

}  // namespace outrider
