// Products of 8-bit rows with weights in 4 bits: y = x @ weight.T + bias.
//
// A weight is held in panels of 32 columns (its outputs). A panel is a list of groups along k: 32
// scales in bfloat16, then the group's codes in units of 8 along k. A unit has 64 bytes for the
// first 16 columns and 64 for the others, 4 for each; the low nibbles are its first 4 codes, the
// high ones the others. Codes are held as 0 to 15 and mean -8 to 7. The sum of a group is exact;
// group after group is scaled and added in float32, so a row's bits depend on it and the weight
// alone.
#pragma once

#include <stdint.h>

namespace outrider {

constexpr int64_t kInt4Columns = 32;
constexpr int64_t kUnitK = 8;  // of k in a unit
constexpr int64_t kUnitBytes = kInt4Columns * kUnitK / 2;
constexpr int64_t kScaleBytes = kInt4Columns * 2;
constexpr int32_t kCodeOffset = 8;
constexpr int32_t kInt4 = 2;  // after enum Kind: the product is an Int4Product

// A weight as callers describe it; structs.py declares the same fields in this order.
struct Int4Product {
    int64_t out_features;
    int64_t in_features;
    int64_t group_size;  // a multiple of 8 that divides in_features
    const char* panels;  // [panels][groups][scales, units]
    const float* bias;   // [out_features] or null
    int32_t instruction_set;
};

// Rows that a kernel multiplies with a panel.
struct Int4Block {
    const char* panel;
    const char* rows;        // int8 [in_features / 4][rows][4 bytes]
    const int32_t* offsets;  // [groups][rows], -8 times the sum of the row's group
    const char* prefetch;    // a panel that is wanted later, or null
    int64_t groups, units;   // of the panel; of a group
    float* sums;             // [rows][32 columns]
};

struct Int4Kernels {
    int64_t max_rows;
    void (*const* multiply)(const Int4Block&);  // [max_rows], for 1, 2, ... rows
    // x, bfloat16 [in_features] -> int8; returns the row's scale.
    float (*quantise)(const uint16_t* x, int64_t in_features, uint8_t* quantised);
    // sums [rows][32] -> bfloat16 y of `columns` columns, y_stride elements from row to row
    void (*finish)(const float* sums, int64_t rows, int64_t columns, const float* row_scales,
                   const float* bias, uint16_t* y, int64_t y_stride);
};

// Null where it is not known.
const Int4Kernels* avx512_int4_kernels();
const Int4Kernels* avx2_int4_kernels();

}  // namespace outrider
