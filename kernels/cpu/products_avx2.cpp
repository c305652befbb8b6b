// Kernels for AVX2: bfloat16 widened to float32, int8 multiplied in pairs that cannot overflow.
#include "instruction_sets.h"

#if defined(__AVX2__)

namespace {

constexpr int kMaxGroupRows = 3;  // 4 * 3 sums of 16 registers
constexpr int kFewRows = 1;
constexpr bool kHoldsStep = false;

}  // namespace

#include "product_kernels.h"

namespace {

struct Int8 {
    using Sums = IntPart;
    using Pair = IntPart;
    static INLINE Pair ready(IntPart bytes) { return bytes; }
    static INLINE Sums add(Sums sums, Pair row, Pair weights) {
        // |weight| * (row with the weight's sign): rows reach +-127, so a pair fits 16 bits.
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(__m256i(weights)),
                                                   _mm256_sign_epi8(__m256i(row), __m256i(weights)));
        return sums + IntPart(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
};

struct ForAttention : Widened {
    static constexpr int kValueLines = 3, kValueWidth = 2;  // lanes are two registers
};

}  // namespace

const outrider::Kernels* outrider::avx2_kernels(Kind kind) {
    return kind == kInt8 ? &kInt8Kernels<Int8, 0> : &kBfloat16Kernels<WidenedBfloat16, ForAttention>;
}
#else
const outrider::Kernels* outrider::avx2_kernels(Kind) { return nullptr; }
#endif
