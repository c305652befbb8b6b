// Operations on rows for AVX2.
#include "instruction_sets.h"

#if defined(__AVX2__)
#include "lora_kernels.h"

const outrider::RowOps* outrider::avx2_row_ops() { return &kRowOps; }
#else
const outrider::RowOps* outrider::avx2_row_ops() { return nullptr; }
#endif
