// Kernels of grouped products for AVX-512 with VNNI dot products.
#include "instruction_sets.h"

#if defined(__AVX512VNNI__)
#define LANES_FIT_A_REGISTER
#include "vnni.h"

#include "grouped_dots.h"

// 2 * 7 sums of whole numbers, 2 * 7 of floats, 2 vectors of weights and a mask: 31 registers.
const outrider::GroupedKernels* outrider::avx512_grouped_kernels() {
    return &kGroupedKernels<Four, Eight, 7>;
}
#else
const outrider::GroupedKernels* outrider::avx512_grouped_kernels() { return nullptr; }
#endif
