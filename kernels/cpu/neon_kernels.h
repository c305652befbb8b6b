// Products for NEON, with the dot products that the flags of the file that includes this allow.
#pragma once

#include "instruction_sets.h"
#include "lanes.h"

namespace {

constexpr int kMaxGroupRows = 3;  // 8 * 3 sums of 32 registers
constexpr int kFewRows = 1;
constexpr bool kHoldsStep = false;
constexpr bool kDotsSignedCodes = true;

// Adds four products of bytes with signs to each sum, exactly.
INLINE IntPart dot_part(IntPart sum, IntPart codes, IntPart rows) {
    const int8x16_t left = int8x16_t(codes), right = int8x16_t(rows);
#if defined(__ARM_FEATURE_DOTPROD)
    return IntPart(vdotq_s32(int32x4_t(sum), left, right));
#else
    // Rows reach +-127 and codes -128, so two products fit 16 bits.
    const int16x8_t low = vmull_s8(vget_low_s8(left), vget_low_s8(right));
    const int16x8_t high = vmull_high_s8(left, right);
    return IntPart(vpadalq_s16(int32x4_t(sum), vpaddq_s16(low, high)));
#endif
}

}  // namespace

#include "grouped_dots.h"
#include "int8_dots.h"

namespace {

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct Bfloat16 {
    using Sums = LanePart;
    using Pair = IntPart;
    static INLINE Pair ready(IntPart pairs) { return pairs; }
    static INLINE Sums add(Sums sums, Pair row, Pair weights) {
        return Sums(vbfdotq_f32(float32x4_t(sums), vreinterpretq_bf16_s32(int32x4_t(row)),
                                vreinterpretq_bf16_s32(int32x4_t(weights))));
    }
};
using KeysInPanels = InPairs<Bfloat16>;
#else
using Bfloat16 = WidenedBfloat16;
using KeysInPanels = Widened;
#endif

struct ForAttention : KeysInPanels {
    static constexpr int kValueLines = 3, kValueWidth = 2;  // lanes are four registers
};

const outrider::Kernels* kernels_for(outrider::Kind kind) {
    return kind == outrider::kInt8 ? &kDottedInt8Kernels : &kBfloat16Kernels<Bfloat16, ForAttention>;
}

// 8 * 2 sums of whole numbers, and half of the float sums.
constexpr const outrider::GroupedKernels& kNeonGroupedKernels = kGroupedKernels<Four, Eight, 2>;

}  // namespace
