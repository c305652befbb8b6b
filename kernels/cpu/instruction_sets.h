// The instruction sets that kernels are compiled for, each in files of its own.
//
// setup.py compiles a file with the flags of its set, which are in its name. Where a compiler does
// not know them, or for another architecture, a file is compiled without, and its functions return
// null.
#pragma once

#include "grouped.h"
#include "products.h"
#include "rows.h"
#include "stored.h"

namespace outrider {

// Of one architecture, a larger one is faster; product_library.py names them likewise.
enum InstructionSet : int32_t {
    kNone = 0,
    kAvx2 = 1,
    kAvxVnni = 2,  // AVX2 with dot products of bytes, in either encoding
    kAvx512Fma = 3,  // with dot products of bytes; bfloat16 is widened, as in AVX2 and NEON
    kAvx512 = 4,     // with dot products of bytes and of bfloat16
    kNeon = 5,
    kNeonDot = 6,   // with dot products of bytes
    kNeonBf16 = 7,  // and of bfloat16
};

const Kernels* avx2_kernels(Kind kind);
const GroupedKernels* avx2_grouped_kernels();
const StoredKernels* avx2_stored_kernels();
const RowOps* avx2_row_ops();

// What differs from AVX2: with the encoding of AVX2 (VEX), and with that of AVX-512 (EVEX).
const Kernels* vnni_vex_int8_kernels();
const GroupedKernels* vnni_vex_grouped_kernels();
const Kernels* vnni_evex_int8_kernels();
const GroupedKernels* vnni_evex_grouped_kernels();

const Kernels* avx512_kernels(Kind kind);
const GroupedKernels* avx512_grouped_kernels();
const StoredKernels* avx512_stored_kernels();
const RowOps* avx512_row_ops();

// What differs from AVX-512, so that all sums are those of AVX2 and NEON.
const Kernels* avx512_fma_kernels();
const StoredKernels* avx512_fma_stored_kernels();

const Kernels* neon_kernels(Kind kind);
const GroupedKernels* neon_grouped_kernels();
const StoredKernels* neon_stored_kernels();
const RowOps* neon_row_ops();

// What differs from NEON.
const Kernels* neon_dot_kernels(Kind kind);
const GroupedKernels* neon_dot_grouped_kernels();
const Kernels* neon_bf16_kernels(Kind kind);
const GroupedKernels* neon_bf16_grouped_kernels();

}  // namespace outrider
