// Operations on rows for NEON.
#include "instruction_sets.h"

#if defined(__aarch64__)
#include "lora_kernels.h"

const outrider::RowOps* outrider::neon_row_ops() { return &kRowOps; }
#else
const outrider::RowOps* outrider::neon_row_ops() { return nullptr; }
#endif
