// Products for NEON that every 64-bit ARM processor has.
#include "instruction_sets.h"

#if defined(__aarch64__)
#include "neon_kernels.h"

const outrider::Kernels* outrider::neon_kernels(Kind kind) { return kernels_for(kind); }
const outrider::GroupedKernels* outrider::neon_grouped_kernels() {
    return &kNeonGroupedKernels;
}
#else
const outrider::Kernels* outrider::neon_kernels(Kind) { return nullptr; }
const outrider::GroupedKernels* outrider::neon_grouped_kernels() { return nullptr; }
#endif
