// Products of a few rows with weights that are read once: y = x @ weight.T + bias.
//
// A weight is held in panels of 32 columns (its outputs). A panel is a list of steps along k, and
// a step is 4 bytes of each column: two bfloat16 or four int8. Rows are packed likewise, in groups.
// The sum of a row and a column is one chain over the steps in their order, whatever the group, the
// panel and the thread. So a row's bits depend on that row and the weight alone.
#pragma once

#include <stdint.h>

namespace outrider {

constexpr int64_t kPanelColumns = 32;
constexpr int64_t kStepBytes = 4;
constexpr int64_t kPanelStepBytes = kPanelColumns * kStepBytes;
// A block of a panel, 16 KiB, stays in the level-1 cache while group after group is multiplied
// with it, and the block that follows is fetched meanwhile.
constexpr int64_t kBlockSteps = 128;
// Rows whose sums are kept between the blocks of a panel.
constexpr int64_t kChunkRows = 64;

enum Kind : int32_t { kBfloat16 = 0, kInt8 = 1 };

// Rows in groups of equal size, but for the last ones, which have one row less.
struct Groups {
    Groups(int64_t rows, int64_t most) : count((rows + most - 1) / most), rows(rows) {}
    int64_t start(int64_t group) const { return group * rows / count; }
    int64_t size(int64_t group) const { return start(group + 1) - start(group); }
    const int64_t count, rows;
};

// A weight as callers describe it; structs.py declares the same fields in this order.
struct Product {
    int64_t out_features;
    int64_t in_features;
    const char* panels;     // [panels][steps][32 columns][4 bytes]
    const float* bias;      // [out_features] or null
    const float* scales;    // int8: of each column, [out_features]
    const int32_t* totals;  // int8: over k, of each column, [panels * 32]
    int32_t kind;
    int32_t instruction_set;
};

// A group of rows and a block of a panel, which a kernel multiplies and adds to `sums`.
struct Block {
    const char* weights;      // [steps][32 columns][4 bytes]
    const char* rows;         // [steps][rows of the group][4 bytes]
    const char* prefetch;     // the block that follows
    int64_t prefetch_stride;  // bytes of it for each step
    int64_t steps;
    void* sums;  // [rows of the group][32 columns], float or int32
};

// The outputs of a panel that are ready to be scaled, rounded and written.
struct Outputs {
    const void* sums;         // [rows][32 columns]
    int64_t rows, columns;    // what there is of the panel
    const float* bias;        // [columns] or null
    const float* scales;      // int8: [columns]
    const float* row_scales;  // int8: [rows]
    const int32_t* totals;    // int8: [columns]
    uint16_t* y;              // bfloat16
    int64_t y_stride;         // elements
};

// Keys that are multiplied together: a panel of them, counted from position 0.
constexpr int64_t kChunkKeys = kPanelColumns;

// Rows and the keys that each sees; structs.py declares the same fields in this order. A tile is
// rows of one sequence. A row sees the positions from `begins` to `ends`: those below `own_begins`
// are in slots that its tile shares, the others, a tree's, in slots of its own.
struct Attention {
    int64_t num_query_heads, num_kv_heads, head_dim;
    int64_t num_tiles, max_tile_rows;  // rows of the largest tile
    const uint16_t* query;   // bfloat16 [rows, num_query_heads, head_dim]
    const uint16_t* keys;    // bfloat16 [slots, num_kv_heads, head_dim]
    const uint16_t* values;  // likewise
    uint16_t* output;        // as the query
    const float* sinks;      // [num_query_heads] or null
    const int32_t* tiles;    // [num_tiles][2], first row and end
    const int64_t* tile_slots;  // [num_tiles], where its sequence begins in `slots`
    const int32_t* slots;       // by position, sequence after sequence
    const int32_t *begins, *ends, *own_begins;  // [rows]
    const int64_t* own_starts;                  // [rows], places in `own_slots`
    const int32_t* own_slots;                   // by position, from `own_begins` on
    float scale, softcap;                       // softcap: 0 for none
};

// A tile's rows and the query heads of some key-value heads, and memory to work in.
struct AttendedTile {
    int64_t tile, first_head, end_head;
    char* memory;
};

// Query heads of rows that share a key-value head, at most.
inline int64_t tile_lines(const Attention& call) {
    return call.max_tile_rows * (call.num_query_heads / call.num_kv_heads);
}

// Bytes that attend_tile keeps for a key-value head from chunk to chunk.
inline int64_t head_memory(const Attention& call) {
    return tile_lines(call) * (8 * call.head_dim + 128) + 63;
}

// Bytes that attend_tile works in, for so many key-value heads.
inline int64_t tile_memory(const Attention& call, int64_t heads) {
    const int64_t chunk_bytes = (tile_lines(call) * 4 + 8 * call.head_dim) * kChunkKeys;
    return heads * head_memory(call) + chunk_bytes;
}

// All that an instruction set brings for one kind of weights.
struct Kernels {
    int64_t max_group_rows;
    void (*const* multiply)(const Block&);  // [max_group_rows], for 1, 2, ... rows
    void (*finish)(const Outputs&);
    // int8: x, bfloat16 [in_features] -> what the kernels multiply; returns the row's scale.
    float (*quantise)(const uint16_t* x, int64_t in_features, uint8_t* quantised);
    // bfloat16: a tile's rows and some heads.
    void (*attend)(const Attention&, const AttendedTile&);
};

// Null where it is not known.
const Kernels* kernels_of(int32_t kind, int32_t instruction_set);

// Packs all rows, group by group of at most so many, chunk after chunk: [steps][rows][4 bytes] each.
void pack_rows(const char* x, int64_t row_bytes, int64_t num_rows, int64_t steps,
               int64_t max_group_rows, char* packed);

}  // namespace outrider
