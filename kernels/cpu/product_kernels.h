// Kernels of products.h over the vectors of lanes.h, one source for all instruction sets.
//
// Included behind constants of the set:
// kMaxGroupRows: rows whose sums fit into the registers. kFewRows: up to this many, memory is all
// that takes time, and the processor's own prefetching does best. kHoldsStep: a step's weights stay
// in registers for row after row; else rows do, for vector after vector of weights.
#pragma once

#include <utility>

#include "attend_tile.h"
#include "lanes.h"
#include "products.h"
#include "rounding.h"

namespace {

using outrider::Block;

// What `Dot` says: `Sums`, a vector of them; `Pair`, four bytes of each lane made ready by `ready`;
// `add`, which adds a row's products with weights.

// Two bfloat16, multiplied and added one after the other.
struct WidenedBfloat16 {
    using Sums = LanePart;
    struct Pair {
        LanePart even, odd;
    };
    static INLINE Pair ready(IntPart pairs) {
        return {LanePart(pairs << 16), LanePart(pairs & int32_t(0xffff0000))};
    }
    static INLINE Sums add(Sums sums, const Pair& row, const Pair& weights) {
        return fused_part(row.odd, weights.odd, fused_part(row.even, weights.even, sums));
    }
};

// Widened once: attention multiplies a panel of keys with many rows.
struct WidenedOnce {
    using Sums = LanePart;
    using Pair = LanePart;
    static INLINE Pair ready(IntPart bits) { return LanePart(bits); }
    static INLINE Sums add(Sums sums, Pair row, Pair weights) {
        return fused_part(row, weights, sums);
    }
};

template <class Dot, int kRows>
void multiply(const Block& block) {
    constexpr int kVectors = outrider::kPanelColumns / kPartLanes, kVectorBytes = 4 * kPartLanes;
    typename Dot::Sums sums[kRows][kVectors];
    char* place = static_cast<char*>(block.sums);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
        for (int part = 0; part < kVectors; ++part) {
            sums[row][part] =
                loaded<typename Dot::Sums>(place + 128 * row + kVectorBytes * part);
        }
    }
    const char *weights = block.weights, *rows = block.rows, *ahead = block.prefetch;
    const auto row_at = [&](int row) {
        return Dot::ready(spread_part(rows + 4 * row));
    };
    const auto weights_at = [&](int part) {
        return Dot::ready(loaded<IntPart>(weights + kVectorBytes * part));
    };
    for (int64_t step = 0; step < block.steps; ++step) {
        if (kRows > kFewRows) {
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(ahead + 64, 0, 2);
            ahead += block.prefetch_stride;
        }
        if constexpr (kHoldsStep) {
            typename Dot::Pair held[kVectors];
#pragma GCC unroll 8
            for (int part = 0; part < kVectors; ++part) held[part] = weights_at(part);
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) {
                const auto spread = row_at(row);
#pragma GCC unroll 8
                for (int part = 0; part < kVectors; ++part) {
                    sums[row][part] = Dot::add(sums[row][part], spread, held[part]);
                }
            }
        } else {
            typename Dot::Pair held[kRows];
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) held[row] = row_at(row);
#pragma GCC unroll 8
            for (int part = 0; part < kVectors; ++part) {
                const auto ready = weights_at(part);
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
                    sums[row][part] = Dot::add(sums[row][part], held[row], ready);
                }
            }
        }
        weights += outrider::kPanelStepBytes;
        rows += outrider::kStepBytes * kRows;
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
        for (int part = 0; part < kVectors; ++part) {
            memcpy(place + 128 * row + kVectorBytes * part, &sums[row][part], kVectorBytes);
        }
    }
}

template <class Dot, class Less>
struct RowTable;

template <class Dot, size_t... kLess>
struct RowTable<Dot, std::index_sequence<kLess...>> {
    static constexpr int64_t kMost = sizeof...(kLess);
    static constexpr void (*kKernels[])(const Block&) = {multiply<Dot, int(kLess) + 1>...};
};

// For 1 to kMaxGroupRows rows.
template <class Dot>
using ByRows = RowTable<Dot, std::make_index_sequence<kMaxGroupRows>>;

// How attention lays pairs of a query and of kPartLanes keys: with kPairSteps steps for a pair.
template <class Dot>
struct InPairs : ByRows<Dot> {
    static constexpr int kPairSteps = 1;

    static void pack_pair(char* to, int64_t, const uint16_t* pair) { memcpy(to, pair, 4); }

    static void transpose(const float* const* keys, int64_t pair, char* to) {
        LanePart pairs[4];
        transpose_pairs(keys, pair, pairs);
        for (const LanePart& each : pairs) {
            memcpy(to, &each, sizeof each);
            to += outrider::kPanelStepBytes;
        }
    }
};

struct Widened : ByRows<WidenedOnce> {
    static constexpr int kPairSteps = 2;

    static void pack_pair(char* to, int64_t step_bytes, const uint16_t* pair) {
        const float even = widened(pair[0]), odd = widened(pair[1]);
        memcpy(to, &even, sizeof even);
        memcpy(to + step_bytes, &odd, sizeof odd);
    }

    static void transpose(const float* const* keys, int64_t pair, char* to) {
        LanePart pairs[4];
        transpose_pairs(keys, pair, pairs);
        for (const LanePart& each : pairs) {
            const WidenedBfloat16::Pair ready = WidenedBfloat16::ready(IntPart(each));
            memcpy(to, &ready.even, sizeof ready.even);
            memcpy(to + outrider::kPanelStepBytes, &ready.odd, sizeof ready.odd);
            to += 2 * outrider::kPanelStepBytes;
        }
    }
};

template <class Dot, class Attention>
constexpr outrider::Kernels kBfloat16Kernels = {kMaxGroupRows, ByRows<Dot>::kKernels,
                                                finish_bfloat16, nullptr, attend_tile<Attention>};

// kOffset: what is added to every element of the rows before they are multiplied.
template <class Dot, int32_t kOffset>
constexpr outrider::Kernels kInt8Kernels = {kMaxGroupRows, ByRows<Dot>::kKernels,
                                            finish_int8<kOffset>, quantise_row<kOffset>, nullptr};

}  // namespace
