// Kernels for AVX-512 with its bfloat16 and VNNI dot products.
#include "instruction_sets.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define LANES_FIT_A_REGISTER
#include "vnni.h"

namespace {

// 2 * 14 sums, 2 vectors of weights and one of a row: 31 of 32 registers.
constexpr int kMaxGroupRows = 14;
constexpr int kFewRows = 5;  // measured on Zen 4
constexpr bool kHoldsStep = true;

}  // namespace

#include "int8_dots.h"

namespace {

struct Bfloat16 {
    using Sums = LanePart;
    using Pair = IntPart;
    static INLINE Pair ready(IntPart pairs) { return pairs; }
    static INLINE Sums add(Sums sums, Pair row, Pair weights) {
        return Sums(_mm512_dpbf16_ps(__m512(sums), (__m512bh)row, (__m512bh)weights));
    }
};

struct ForAttention : InPairs<Bfloat16> {
    static constexpr int kValueLines = 4, kValueWidth = 4;
};

}  // namespace

const outrider::Kernels* outrider::avx512_kernels(Kind kind) {
    return kind == kInt8 ? &kDottedInt8Kernels : &kBfloat16Kernels<Bfloat16, ForAttention>;
}
#else
const outrider::Kernels* outrider::avx512_kernels(Kind) { return nullptr; }
#endif
