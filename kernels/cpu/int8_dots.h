// Products of 8 bits by dot products of four bytes, for sets that have them: see grouped_dots.h.
#pragma once

#include "product_kernels.h"

namespace {

struct DottedInt8 {
    using Sums = IntPart;
    using Pair = IntPart;
    static INLINE Pair ready(IntPart bytes) { return bytes; }
    static INLINE Sums add(Sums sums, Pair row, Pair weights) {
        return dot_part(sums, row, weights);
    }
};

// Where only one side of a dot product has a sign, rows are moved up to have none.
constexpr const outrider::Kernels& kDottedInt8Kernels =
    kInt8Kernels<DottedInt8, kDotsSignedCodes ? 0 : 128>;

}  // namespace
