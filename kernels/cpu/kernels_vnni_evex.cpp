// Products of 4 and 8 bits for AVX2 with the 256-bit VNNI of AVX-512.
#include "instruction_sets.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
namespace {
constexpr int kMaxGroupedRows = 4;  // of 32 registers
}

#include "vnni_256.h"

const outrider::Kernels* outrider::vnni_evex_int8_kernels() { return &kDottedInt8Kernels; }
const outrider::GroupedKernels* outrider::vnni_evex_grouped_kernels() {
    return &kVnniGroupedKernels;
}
#else
const outrider::Kernels* outrider::vnni_evex_int8_kernels() { return nullptr; }
const outrider::GroupedKernels* outrider::vnni_evex_grouped_kernels() { return nullptr; }
#endif
