// Scaling, rounding and quantising, in plain loops that compilers turn into vectors.
//
// Included by each instruction set's file, which is compiled with the flags of its set (setup.py).
// So everything is internal to that file: a copy that linkers share among files could hold
// instructions that another processor lacks.
#pragma once

#include <stdint.h>
#include <string.h>

#include "products.h"

namespace {

inline float widened(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

// To the nearest bfloat16, ties to even; a NaN stays one.
inline uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest);
}

void finish_bfloat16(const outrider::Outputs& outputs) {
    const float* sums = static_cast<const float*>(outputs.sums);
    for (int64_t row = 0; row < outputs.rows; ++row, sums += outrider::kPanelColumns) {
        uint16_t* y = outputs.y + row * outputs.y_stride;
        if (outputs.bias) {
            for (int64_t c = 0; c < outputs.columns; ++c) y[c] = rounded(sums[c] + outputs.bias[c]);
        } else {
            for (int64_t c = 0; c < outputs.columns; ++c) y[c] = rounded(sums[c]);
        }
    }
}

// `kOffset`: what was added to every element of the rows before they were multiplied.
template <int32_t kOffset>
void finish_int8(const outrider::Outputs& outputs) {
    const int32_t* sums = static_cast<const int32_t*>(outputs.sums);
    for (int64_t row = 0; row < outputs.rows; ++row, sums += outrider::kPanelColumns) {
        uint16_t* y = outputs.y + row * outputs.y_stride;
        const float row_scale = outputs.row_scales[row];
        float values[outrider::kPanelColumns];
        for (int64_t c = 0; c < outputs.columns; ++c) {
            // Unsigned: a sum may pass 2^31 on its way, what remains of it does not.
            const uint32_t sum = uint32_t(sums[c]) - uint32_t(outputs.totals[c]) * kOffset;
            values[c] = float(int32_t(sum)) * outputs.scales[c] * row_scale;
        }
        if (outputs.bias) {
            for (int64_t c = 0; c < outputs.columns; ++c) values[c] += outputs.bias[c];
        }
        for (int64_t c = 0; c < outputs.columns; ++c) y[c] = rounded(values[c]);
    }
}

// Symmetric: the largest magnitude becomes 127. A row with a NaN or an infinity gets the scale
// NaN, so that its outputs are NaN, all of them, and no other row's.
template <int32_t kOffset>
float quantise_row(const uint16_t* x, int64_t in_features, uint8_t* quantised) {
    uint16_t largest = 0;  // magnitudes of bfloat16 are ordered as their bits are
    for (int64_t k = 0; k < in_features; ++k) {
        const uint16_t magnitude = x[k] & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest == 0 || largest >= 0x7f80) {
        memset(quantised, kOffset, in_features > 0 ? size_t(in_features) : 0);
        return largest == 0 ? 0.0f : widened(0x7fc0);
    }
    const float scale = widened(largest) / 127.0f;
    for (int64_t k = 0; k < in_features; ++k) {
        quantised[k] = uint8_t(int32_t(__builtin_rintf(widened(x[k]) / scale)) + kOffset);
    }
    return scale;
}

}  // namespace
