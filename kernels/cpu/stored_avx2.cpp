// Decoding of stored weights for AVX2.
#include "instruction_sets.h"

#if defined(__AVX2__)
#include "decode_kernels.h"

namespace {

constexpr outrider::StoredKernels kKernels = {0, nullptr, decode};

}  // namespace

const outrider::StoredKernels* outrider::avx2_stored_kernels() { return &kKernels; }
#else
const outrider::StoredKernels* outrider::avx2_stored_kernels() { return nullptr; }
#endif
