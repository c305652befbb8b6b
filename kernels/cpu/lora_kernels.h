// The products of lora.h, for the instruction set of the file that includes this.
#pragma once

#include "lora.h"
#include "row_kernels.h"
#include "sampling_kernels.h"

namespace {

// Ranks `first` to `first` + kRanks of kRows rows.
template <int kRows, int kRanks>
INLINE void shrink_block(const outrider::LoraTile& tile, int64_t row, int64_t first) {
    const uint16_t *x[kRows], *a[kRanks];
    for (int i = 0; i < kRows; ++i) x[i] = tile.x + tile.rows[row + i] * tile.width;
    for (int j = 0; j < kRanks; ++j) a[j] = tile.part.a + (first + j) * tile.width;
    Lanes sums[kRows][kRanks] = {};
    for (int64_t d = 0; d < tile.width; d += kLanes) {
        Lanes left[kRows];
        for (int i = 0; i < kRows; ++i) left[i] = part_of(x[i], d, tile.width);
        for (int j = 0; j < kRanks; ++j) {
            const Lanes right = part_of(a[j], d, tile.width);
            for (int i = 0; i < kRows; ++i) sums[i][j] += left[i] * right;
        }
    }
    for (int i = 0; i < kRows; ++i) {
        float* inner = tile.inner + (row + i) * tile.inner_stride + first;
        for (int j = 0; j < kRanks; ++j) inner[j] = total_of(sums[i][j]) * tile.part.scale;
    }
}

template <int kRows>
void shrink_rows(const outrider::LoraTile& tile, int64_t row, int64_t first, int64_t last) {
    int64_t rank = first;
    for (; rank + 4 <= last; rank += 4) shrink_block<kRows, 4>(tile, row, rank);
    for (; rank < last; ++rank) shrink_block<kRows, 1>(tile, row, rank);
}

void lora_shrink(const outrider::LoraTile& tile, int64_t first, int64_t last) {
    int64_t row = 0;
    for (; row + 2 <= tile.num_rows; row += 2) shrink_rows<2>(tile, row, first, last);
    if (row < tile.num_rows) shrink_rows<1>(tile, row, first, last);
}

// Columns `column` to `column` + kVectors * 16 (or `last`, where the part ends before) of kRows rows.
template <int kRows, int kVectors>
INLINE void expand_block(const outrider::LoraTile& tile, int64_t row, int64_t column) {
    const outrider::LoraPart& part = tile.part;
    Lanes sums[kRows][kVectors] = {};
    for (int64_t rank = 0; rank < part.rank; ++rank) {
        const uint16_t* b = part.b + rank * part.size;
        for (int v = 0; v < kVectors; ++v) {
            const Lanes right = part_of(b, column + v * kLanes, part.size);
            for (int i = 0; i < kRows; ++i) {
                sums[i][v] += right * tile.inner[(row + i) * tile.inner_stride + rank];
            }
        }
    }
    for (int i = 0; i < kRows; ++i) {
        uint16_t* y = tile.y + tile.rows[row + i] * tile.y_stride + part.start;
        for (int v = 0; v < kVectors; ++v) {
            const int64_t d = column + v * kLanes;
            keep_part(y, d, part.size, part_of(y, d, part.size) + sums[i][v]);
        }
    }
}

template <int kRows>
void expand_rows(const outrider::LoraTile& tile, int64_t row, int64_t first, int64_t last) {
    int64_t column = first;
    for (; column + 4 * kLanes <= last; column += 4 * kLanes) {
        expand_block<kRows, 4>(tile, row, column);
    }
    for (; column < last; column += kLanes) expand_block<kRows, 1>(tile, row, column);
}

void lora_expand(const outrider::LoraTile& tile, int64_t first, int64_t last) {
    int64_t row = 0;
    for (; row + 2 <= tile.num_rows; row += 2) expand_rows<2>(tile, row, first, last);
    if (row < tile.num_rows) expand_rows<1>(tile, row, first, last);
}

constexpr outrider::RowOps kRowOps = {
    normalise,  gate,        place,  rank,        combine,
    draw_noise, find_floors, choose, lora_shrink, lora_expand,
};

}  // namespace
