// Products of 8-bit rows with weights of 4 or 8 bits in groups: y = x @ weight.T + bias.
//
// A weight is held in panels of 32 columns (its outputs). A panel is a list of groups along k: the
// group's scales, its zero points and its minimums, 32 of each, then its codes in units of 128
// bytes. A unit of 8-bit codes has 4 of k, 4 bytes for each column. One of 4-bit codes has 8: the
// low nibbles are a column's first 4 codes, the high ones the others. A code means
// (code - zero) * scale - minimum.
//
// Rows are rounded to 8 bits, with a scale for each group or one for all. The sum of a group is
// exact; group after group is scaled and added in float32, so a row's bits depend on it and the
// weight alone, and are the same by each instruction set.
#pragma once

#include <stdint.h>

#include "products.h"

namespace outrider {

constexpr int64_t kUnitBytes = 128;
constexpr int32_t kGrouped = 2;  // after enum Kind: the product is a GroupedProduct

enum Number : int32_t { kNumber4 = 0, kNumber8 = 1, kFloat8 = 2 };
enum ScaleType : int32_t { kScaleFloat32 = 0, kScaleFloat16 = 1, kScaleBfloat16 = 2 };

// A weight as callers describe it; structs.py declares the same fields in this order.
struct GroupedWeight {
    int64_t out_features;
    int64_t in_features;
    int64_t group_size;  // of whole units; divides in_features
    const char* panels;  // [panels][groups][header, units]
    const float* bias;   // [out_features] or null
    int32_t number;      // enum Number
    int32_t scale_type;  // of scales and minimums
    int32_t zero;        // the code of 0, where it is one for all
    int32_t has_zeros;   // int16, one for each group and column
    int32_t has_minimums;
    // GroupedProduct: rows have a scale for each group; if not, only `zero` is there.
    int32_t has_row_groups;
    // StoredProduct: scales have so few digits that one rounding does, of code * scale - zero *
    // scale, and with minimums of code * scale - minimum.
    int32_t is_short;
    int32_t instruction_set;

    int64_t groups() const { return in_features / group_size; }
    int64_t scale_bytes() const { return kPanelColumns * (scale_type == kScaleFloat32 ? 4 : 2); }
    int64_t zero_bytes() const { return kPanelColumns * 2 * has_zeros; }
    int64_t header_bytes() const { return scale_bytes() * (1 + has_minimums) + zero_bytes(); }
};

// A weight in units of `unit_bytes` with `unit_k` of k each.
template <class Unit>
struct InUnits : GroupedWeight {
    int64_t unit_k() const { return Unit::k(number); }
    int64_t units() const { return group_size / unit_k(); }
    int64_t group_bytes() const { return header_bytes() + units() * Unit::kBytes; }
    int64_t panel_bytes() const { return groups() * group_bytes(); }
};

struct GroupedUnit {
    static constexpr int64_t kBytes = kUnitBytes;
    static int64_t k(int32_t number) { return number == kNumber4 ? 8 : 4; }
};
using GroupedProduct = InUnits<GroupedUnit>;

// What a group of a row needs beside its codes.
struct RowGroup {
    int32_t total;  // of the codes
    float scale;
    float scaled_total;
};

// Rows that a kernel multiplies with a panel.
struct GroupedBlock {
    const GroupedProduct* product;
    const char* panel;
    const char* rows;            // int8 [in_features / 4][rows][4 bytes]
    const RowGroup* row_groups;  // [groups][rows]
    float* sums;                 // [rows][32 columns], set
};

struct GroupedKernels {
    int64_t max_rows;
    // By number, by has_row_groups, each for 1, 2, ... rows.
    void (*const* multiply[2][2])(const GroupedBlock&);
    // x, bfloat16 [size] -> int8; returns the scale.
    float (*quantise)(const uint16_t* x, int64_t size, uint8_t* quantised);
    // sums [rows][32] -> bfloat16 y of `columns` columns, y_stride elements from row to row;
    // row_scales: null where sums are scaled
    void (*finish)(const float* sums, int64_t rows, int64_t columns, const float* row_scales,
                   const float* bias, uint16_t* y, int64_t y_stride);
};

// Null where it is not known.
const GroupedKernels* grouped_kernels_of(int32_t instruction_set);

}  // namespace outrider
