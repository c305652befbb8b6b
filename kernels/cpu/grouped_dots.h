// Products of 4 or 8 bits and rows by dot products of four bytes, for sets that have them.
//
// Included behind a `dot_part(sum, codes, rows)` of the set's, which adds four products of bytes to
// each sum. kDotsSignedCodes: it takes codes from -128 to 127; else from 0 to 255.
#pragma once

#include "grouped_kernels.h"

namespace {

struct DotSums {
    using Part = IntPart;
    static constexpr int64_t kUnits = 0;  // any number can be added
};

struct Four : DotSums {
    static constexpr int32_t kOffset = 0;
    static constexpr int kUnitK = 8;
    struct Codes {
        explicit Codes(const char* weights)
            : low(loaded<IntPart>(weights) & 0x0f0f0f0f),
              high((loaded<IntPart>(weights) >> 4) & 0x0f0f0f0f) {}
        Part add(Part part, const char* rows, int64_t next) const {
            return dot_part(dot_part(part, low, spread_part(rows)), high, spread_part(rows + next));
        }
        IntPart low, high;
    };
};

struct Eight : DotSums {
    static constexpr int32_t kOffset = kDotsSignedCodes ? 128 : 0;
    static constexpr int kUnitK = 4;
    struct Codes {
        explicit Codes(const char* weights) : codes(loaded<IntPart>(weights)) {
            if (kDotsSignedCodes) codes ^= int32_t(0x80808080);
        }
        Part add(Part part, const char* rows, int64_t) const {
            return dot_part(part, codes, spread_part(rows));
        }
        IntPart codes;
    };
};

}  // namespace
