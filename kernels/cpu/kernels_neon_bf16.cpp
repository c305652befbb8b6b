// Products for NEON with dot products of bytes and of bfloat16.
#include "instruction_sets.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "neon_kernels.h"

const outrider::Kernels* outrider::neon_bf16_kernels(Kind kind) { return kernels_for(kind); }
const outrider::GroupedKernels* outrider::neon_bf16_grouped_kernels() {
    return &kNeonGroupedKernels;
}
#else
const outrider::Kernels* outrider::neon_bf16_kernels(Kind) { return nullptr; }
const outrider::GroupedKernels* outrider::neon_bf16_grouped_kernels() { return nullptr; }
#endif
