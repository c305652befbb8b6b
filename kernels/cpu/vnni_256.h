// Kernels of AVX2 with VNNI, in the encoding of the file that includes this.
//
// Included behind kMaxGroupedRows: rows of a grouped product whose whole sums, 4 vectors each, fit
// into the registers with weights and some of the float sums.
#pragma once

#include "instruction_sets.h"
#include "vnni.h"

namespace {

constexpr int kMaxGroupRows = 3;  // as in products_avx2.cpp
constexpr int kFewRows = 1;
constexpr bool kHoldsStep = false;

}  // namespace

#include "grouped_dots.h"
#include "int8_dots.h"

namespace {

constexpr const outrider::GroupedKernels& kVnniGroupedKernels =
    kGroupedKernels<Four, Eight, kMaxGroupedRows>;

}  // namespace
