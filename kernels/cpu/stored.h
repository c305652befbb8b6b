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

struct StoredUnit {
    static constexpr int64_t kBytes = kUnitSize;
    static int64_t k(int32_t number) { return number == kNumber4 ? 4 : 2; }
};
using StoredProduct = InUnits<StoredUnit>;

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
    int64_t max_group_rows;  // of `multiply`
    // Up to max_group_rows rows: decodes a block, keeps it where that is wanted, multiplies. Null:
    // blocks are decoded first.
    void (*multiply)(const StoredBlock&, int64_t rows);
    void (*decode)(const StoredBlock&);
};

// Null where it is not known.
const StoredKernels* stored_kernels_of(int32_t instruction_set);

}  // namespace outrider
