// Products of 4 and 8 bits for AVX2 with AVX-VNNI.
#include "instruction_sets.h"

#if defined(__AVXVNNI__)
namespace {
constexpr int kMaxGroupedRows = 2;  // of 16 registers
}

#include "vnni_256.h"

const outrider::Kernels* outrider::vnni_vex_int8_kernels() { return &kDottedInt8Kernels; }
const outrider::GroupedKernels* outrider::vnni_vex_grouped_kernels() {
    return &kVnniGroupedKernels;
}
#else
const outrider::Kernels* outrider::vnni_vex_int8_kernels() { return nullptr; }
const outrider::GroupedKernels* outrider::vnni_vex_grouped_kernels() { return nullptr; }
#endif
