// Operations on rows for AVX-512.
#include "rows.h"

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#define LANES_FIT_A_REGISTER
#include "lora_kernels.h"

const outrider::RowOps* outrider::avx512_row_ops() { return &kRowOps; }
#else
const outrider::RowOps* outrider::avx512_row_ops() { return nullptr; }
#endif
