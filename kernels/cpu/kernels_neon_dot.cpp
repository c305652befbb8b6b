// Products for NEON with dot products of bytes.
#include "instruction_sets.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "neon_kernels.h"

const outrider::Kernels* outrider::neon_dot_kernels(Kind kind) { return kernels_for(kind); }
const outrider::GroupedKernels* outrider::neon_dot_grouped_kernels() {
    return &kNeonGroupedKernels;
}
#else
const outrider::Kernels* outrider::neon_dot_kernels(Kind) { return nullptr; }
const outrider::GroupedKernels* outrider::neon_dot_grouped_kernels() { return nullptr; }
#endif
