// Kernels of grouped products over the vectors of lanes.h, one source for all instruction sets.
//
// A set brings the products of codes and rows: `Four` and `Eight`, as in grouped_dots.h. See
// rounding.h for why all is internal to a file.
#pragma once

#include <utility>

#include "grouped.h"
#include "lanes.h"
#include "rounding.h"

namespace {

constexpr int kVectors = outrider::kPanelColumns / kPartLanes;

using outrider::GroupedBlock;
using outrider::GroupedProduct;
using outrider::RowGroup;

// Scales, zero points and minimums of a group.
struct Header {
    Header(const GroupedProduct& product, const char* group)
        : type(product.scale_type),
          scales(group),
          zeros(product.has_zeros ? group + product.scale_bytes() : nullptr),
          minimums(product.has_minimums ? group + product.scale_bytes() + product.zero_bytes()
                                        : nullptr) {}
    int32_t type;
    const char *scales, *zeros, *minimums;
};

// Where the sum of a group begins, so that it is one of codes less their zero point. A kernel may
// multiply codes that are less by kOffset.
template <class Number, bool kHasRowGroups>
IntPart start(const GroupedProduct& product, const Header& header, int vector, int32_t total) {
    if (!kHasRowGroups || !header.zeros) {
        return IntPart{} + (Number::kOffset - product.zero) * total;
    }
    const auto zeros = loaded<ShortPart>(header.zeros + 2 * kPartLanes * vector);
    return (Number::kOffset - __builtin_convertvector(zeros, IntPart)) * total;
}

INLINE LanePart scales_of(const char* scales, int vector, int32_t type) {
    if (type == outrider::kScaleFloat32) {
        return loaded<LanePart>(scales + 4 * kPartLanes * vector);
    }
    const char* halves = scales + 2 * kPartLanes * vector;
    if (type == outrider::kScaleFloat16) return from_float16(loaded<ShortPart>(halves));
    return from_bfloat16(loaded<HalfPart>(halves));
}

INLINE LanePart filled_part(float value) { return LanePart{} + value; }

// Where a kernel is in its panel and its rows.
struct Place {
    const char *weights, *rows;
};

// Adds the products of units to sums.
template <class Number, int kRows>
inline void add_units(int64_t units, Place& place,
                      typename Number::Part (&sums)[kRows][kVectors]) {
    for (int64_t unit = 0; unit < units; ++unit) {
#pragma GCC unroll 4
        for (int vector = 0; vector < kVectors; ++vector) {
            const typename Number::Codes codes(place.weights + 4 * kPartLanes * vector);
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
                sums[row][vector] =
                    codes.add(sums[row][vector], place.rows + 4 * row, 4 * kRows);
            }
        }
        place.weights += outrider::kUnitBytes;
        place.rows += Number::kUnitK * kRows;
    }
}

// kHasRowGroups: rows have a scale for each group. If not, there is neither a zero point nor a
// minimum of a group's own.
template <class Number, bool kHasRowGroups, int kRows>
void multiply_rows(const GroupedBlock& block) {
    const GroupedProduct& product = *block.product;
    const int64_t header_bytes = product.header_bytes(), units = product.units();
    Place place{block.panel, block.rows};
    LanePart sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int vector = 0; vector < kVectors; ++vector) {
            sums[row][vector] = LanePart{};
        }
    }
    for (const RowGroup *group = block.row_groups, *end = group + kRows * product.groups();
         group < end; group += kRows) {
        const Header header(product, place.weights);
        IntPart parts[kRows][kVectors];
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int vector = 0; vector < kVectors; ++vector) {
                parts[row][vector] =
                    start<Number, kHasRowGroups>(product, header, vector, group[row].total);
            }
        }
        place.weights += header_bytes;
        if constexpr (Number::kUnits == 0) {
            add_units<Number, kRows>(units, place, parts);
        } else {
            for (int64_t left = units; left > 0; left -= Number::kUnits) {
                typename Number::Part now[kRows][kVectors] = {};
                add_units<Number, kRows>(left < Number::kUnits ? left : Number::kUnits, place,
                                              now);
#pragma GCC unroll 8
                for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
                    for (int vector = 0; vector < kVectors; ++vector) {
                        parts[row][vector] = Number::added(parts[row][vector], now[row][vector]);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int vector = 0; vector < kVectors; ++vector) {
            const LanePart scale = scales_of(header.scales, vector, header.type);
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
                const LanePart part = __builtin_convertvector(parts[row][vector], LanePart);
                LanePart& sum = sums[row][vector];
                sum = kHasRowGroups ? fused_part(part, scale * group[row].scale, sum)
                                    : sum + part * scale;
            }
            if (kHasRowGroups && header.minimums) {
                const LanePart minimum = scales_of(header.minimums, vector, header.type);
#pragma GCC unroll 8
                for (int row = 0; row < kRows; ++row) {
                    sums[row][vector] = fused_part(-minimum, filled_part(group[row].scaled_total),
                                                   sums[row][vector]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int vector = 0; vector < kVectors; ++vector) {
            memcpy(block.sums + outrider::kPanelColumns * row + kPartLanes * vector,
                   &sums[row][vector], sizeof(LanePart));
        }
    }
}

void finish_grouped(const float* sums, int64_t rows, int64_t columns, const float* row_scales,
                    const float* bias, uint16_t* y, int64_t y_stride) {
    for (int64_t row = 0; row < rows; ++row, sums += outrider::kPanelColumns, y += y_stride) {
        float values[outrider::kPanelColumns];
        const float scale = row_scales ? row_scales[row] : 1.0f;
        for (int64_t c = 0; c < columns; ++c) values[c] = sums[c] * scale;
        if (bias) {
            for (int64_t c = 0; c < columns; ++c) values[c] += bias[c];
        }
        for (int64_t c = 0; c < columns; ++c) y[c] = rounded(values[c]);
    }
}

template <class Number, bool kHasRowGroups, size_t... kLess>
constexpr auto kernels_by_rows(std::index_sequence<kLess...>) {
    struct Table {
        void (*kernels[sizeof...(kLess)])(const GroupedBlock&);
    };
    return Table{{multiply_rows<Number, kHasRowGroups, int(kLess) + 1>...}};
}

// For 1 to kMaxRows rows.
template <class Number, bool kHasRowGroups, int kMaxRows>
constexpr auto kGroupedByRows =
    kernels_by_rows<Number, kHasRowGroups>(std::make_index_sequence<kMaxRows>());

template <class Four, class Eight, int kMaxRows>
constexpr outrider::GroupedKernels kGroupedKernels = {
    kMaxRows,
    {{kGroupedByRows<Four, false, kMaxRows>.kernels, kGroupedByRows<Four, true, kMaxRows>.kernels},
     {kGroupedByRows<Eight, false, kMaxRows>.kernels,
      kGroupedByRows<Eight, true, kMaxRows>.kernels}},
    quantise_row<0>,
    finish_grouped};

}  // namespace
