// Operations on rows for AVX2.
#include "rows.h"

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx2,fma")
#include "lora_kernels.h"

const outrider::RowOps* outrider::avx2_row_ops() { return &kRowOps; }
#else
const outrider::RowOps* outrider::avx2_row_ops() { return nullptr; }
#endif
