// Scaling and rounding of int4 products' sums; see rounding.h for why it is internal to a file.
#pragma once

#include "rounding.h"

namespace {

void finish_int4(const float* sums, int64_t rows, int64_t columns, const float* row_scales,
                 const float* bias, uint16_t* y, int64_t y_stride) {
    for (int64_t row = 0; row < rows; ++row, sums += outrider::kPanelColumns, y += y_stride) {
        float values[outrider::kPanelColumns];
        for (int64_t c = 0; c < columns; ++c) values[c] = sums[c] * row_scales[row];
        if (bias) {
            for (int64_t c = 0; c < columns; ++c) values[c] += bias[c];
        }
        for (int64_t c = 0; c < columns; ++c) y[c] = rounded(values[c]);
    }
}

}  // namespace
