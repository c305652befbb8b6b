// Kernels of grouped products in terms of an instruction set's vectors, one source for all.
//
// `Set` brings vectors of floats and whole numbers, `Set::Four` and `Set::Eight` the products of
// codes and rows. See rounding.h for why all is internal to a file.
#pragma once

#include "grouped.h"
#include "rounding.h"

namespace {

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
template <class Set, class Number, bool kHasRowGroups>
typename Set::Ints start(const GroupedProduct& product, const Header& header, int vector,
                         int32_t total) {
    if (!kHasRowGroups || !header.zeros) return Set::ints((Number::kOffset - product.zero) * total);
    const auto below = Set::subtract(Set::ints(Number::kOffset), Set::halves(header.zeros, vector));
    return Set::multiply(below, Set::ints(total));
}

// Where a kernel is in its panel and its rows.
struct Place {
    const char *weights, *rows;
};

// Adds the products of units to sums.
template <class Set, class Number, int kRows>
inline void add_units(int64_t units, Place& place,
                      typename Number::Part (&sums)[kRows][Set::kVectors]) {
    for (int64_t unit = 0; unit < units; ++unit) {
#pragma GCC unroll 4
        for (int vector = 0; vector < Set::kVectors; ++vector) {
            const typename Number::Codes codes(place.weights + 4 * Set::kLanes * vector);
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
template <class Set, class Number, bool kHasRowGroups, int kRows>
void multiply_rows(const GroupedBlock& block) {
    using Floats = typename Set::Floats;
    const GroupedProduct& product = *block.product;
    const int64_t header_bytes = product.header_bytes(), units = product.units();
    Place place{block.panel, block.rows};
    Floats sums[kRows][Set::kVectors];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int vector = 0; vector < Set::kVectors; ++vector) {
            sums[row][vector] = Set::floats(0.0f);
        }
    }
    for (const RowGroup *group = block.row_groups, *end = group + kRows * product.groups();
         group < end; group += kRows) {
        const Header header(product, place.weights);
        typename Set::Ints parts[kRows][Set::kVectors];
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int vector = 0; vector < Set::kVectors; ++vector) {
                parts[row][vector] =
                    start<Set, Number, kHasRowGroups>(product, header, vector, group[row].total);
            }
        }
        place.weights += header_bytes;
        if constexpr (Number::kUnits == 0) {
            add_units<Set, Number, kRows>(units, place, parts);
        } else {
            for (int64_t left = units; left > 0; left -= Number::kUnits) {
                typename Number::Part now[kRows][Set::kVectors] = {};
                add_units<Set, Number, kRows>(left < Number::kUnits ? left : Number::kUnits, place,
                                              now);
#pragma GCC unroll 8
                for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
                    for (int vector = 0; vector < Set::kVectors; ++vector) {
                        parts[row][vector] = Number::added(parts[row][vector], now[row][vector]);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int vector = 0; vector < Set::kVectors; ++vector) {
            const Floats scale = Set::scales(header.scales, vector, header.type);
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
                const Floats part = Set::converted(parts[row][vector]);
                Floats& sum = sums[row][vector];
                if (kHasRowGroups) {
                    sum = Set::fused(part, Set::multiply(scale, Set::floats(group[row].scale)), sum);
                } else {
                    sum = Set::add(sum, Set::multiply(part, scale));
                }
            }
            if (kHasRowGroups && header.minimums) {
                const Floats minimum = Set::scales(header.minimums, vector, header.type);
#pragma GCC unroll 8
                for (int row = 0; row < kRows; ++row) {
                    sums[row][vector] = Set::fused_less(
                        minimum, Set::floats(group[row].scaled_total), sums[row][vector]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int vector = 0; vector < Set::kVectors; ++vector) {
            Set::store(block.sums + outrider::kPanelColumns * row + Set::kLanes * vector,
                       sums[row][vector]);
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

}  // namespace
