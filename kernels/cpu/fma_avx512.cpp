// Products of bfloat16 for AVX-512 in the order of AVX2's and NEON's sums: widened, then fused.
#include "instruction_sets.h"

#if defined(__AVX512F__)
#define LANES_FIT_A_REGISTER

namespace {

// 2 * 12 sums, 2 pairs of weights and one of a row: 30 of 32 registers.
constexpr int kMaxGroupRows = 12;
constexpr int kFewRows = 5;  // as in products_avx512.cpp
constexpr bool kHoldsStep = true;

}  // namespace

#include "product_kernels.h"

namespace {

struct ForAttention : Widened {
    static constexpr int kValueLines = 4, kValueWidth = 4;
};

}  // namespace

const outrider::Kernels* outrider::avx512_fma_kernels() {
    return &kBfloat16Kernels<WidenedBfloat16, ForAttention>;
}
#else
const outrider::Kernels* outrider::avx512_fma_kernels() { return nullptr; }
#endif
