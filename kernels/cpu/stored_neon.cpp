// Decoding of stored weights for NEON.
#include "instruction_sets.h"

#if defined(__aarch64__)
#include "decode_kernels.h"

namespace {

constexpr outrider::StoredKernels kKernels = {0, nullptr, decode};

}  // namespace

const outrider::StoredKernels* outrider::neon_stored_kernels() { return &kKernels; }
#else
const outrider::StoredKernels* outrider::neon_stored_kernels() { return nullptr; }
#endif
