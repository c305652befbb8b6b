// Operations on rows for AVX-512.
#include "instruction_sets.h"

#if defined(__AVX512F__)
#define LANES_FIT_A_REGISTER
#include "lora_kernels.h"

const outrider::RowOps* outrider::avx512_row_ops() { return &kRowOps; }
#else
const outrider::RowOps* outrider::avx512_row_ops() { return nullptr; }
#endif
