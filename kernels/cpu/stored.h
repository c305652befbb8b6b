// Products with weights as a checkpoint stores them: y = x @ decoded(weight).T + bias.
//
// A weight is held in panels of 32 columns (its outputs). A panel is a list of groups along k: the
// group's scales, its zero points and its minimums, 32 of each, then its codes in units of 64 bytes.
// A unit is 16 words of 32 bits: two of each column's numbers by eight columns at a time, so that
// the lanes of field j are columns 8 * (j % 4) + lane / 2 and k = 2 * (j / 4) + lane % 2. Fields
// have 4 bits (8 of them, 4 of k) or 8 bits (4 of them, 2 of k). Words of whole numbers are turned
// to the left, by kTurn4 or kTurn8, so that fields lie among the upper digits of a float32.
//
// A code becomes (code - zero) * scale - minimum in float32, then bfloat16, as the decoded weight
// has it. What follows is products.h's order of sums, so the bits are the decoded weight's.
#pragma once

#include <stdint.h>

#include "grouped.h"

namespace outrider {

constexpr int64_t kUnitWords = 16;
constexpr int64_t kUnitSize = 64;
constexpr int64_t kFieldVectors = 4;  // of 16 lanes: 32 columns, two of k

constexpr int kTurn4 = 11, kTurn8 = 15;

// A weight as callers describe it; stored_library.py declares the same fields in this order.
struct StoredProduct {
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
    // Scales have so few digits that one rounding does: of code * scale - zero * scale, and with
    // minimums, of code * scale - minimum.
    int32_t is_short;
    int32_t instruction_set;

    int64_t groups() const { return in_features / group_size; }
    int64_t unit_k() const { return number == kNumber4 ? 4 : 2; }
    int64_t units() const { return group_size / unit_k(); }
    int64_t scale_bytes() const { return kPanelColumns * (scale_type == kScaleFloat32 ? 4 : 2); }
    int64_t header_bytes() const {
        return scale_bytes() * (1 + has_minimums) + kPanelColumns * 2 * has_zeros;
    }
    int64_t group_bytes() const { return header_bytes() + units() * kUnitSize; }
    int64_t panel_bytes() const { return groups() * group_bytes(); }
};

// Whole groups of a panel that follow each other, or a part of one.
struct StoredBlock {
    const StoredProduct* product;
    const char* group;               // where the first one begins
    int64_t groups, first_unit, units;  // of each group: which units
    char* decoded;     // bfloat16 [steps][32 columns][2], as in a panel of products.h, or null
    const char* rows;  // [steps][rows of the group][4 bytes]
    float* sums;       // [rows of the group][32 columns], added to
};

struct StoredKernels {
    int64_t max_group_rows;
    // Up to max_group_rows rows: decodes a block, keeps it where that is wanted, multiplies. Null:
    // blocks are decoded first.
    void (*multiply)(const StoredBlock&, int64_t rows);
    void (*decode)(const StoredBlock&);
};

// Null where it is not known.
const StoredKernels* avx512_stored_kernels();
const StoredKernels* avx2_stored_kernels();

}  // namespace outrider
