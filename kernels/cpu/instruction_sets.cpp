// Which instruction sets the processor has, and the kernels of each.
#include "instruction_sets.h"

#include "parallel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace outrider {
namespace {

#if defined(__x86_64__)
enum Register { kEax, kEbx, kEcx, kEdx };

bool has_bit(unsigned leaf, unsigned subleaf, Register which, int bit) {
    unsigned found[4];
    return __get_cpuid_count(leaf, subleaf, &found[0], &found[1], &found[2], &found[3]) &&
           (found[which] >> bit & 1);
}

// True if the system keeps registers: bits as in XCR0.
bool has_registers(uint32_t bits) {
    if (!has_bit(1, 0, kEcx, 27)) return false;
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & bits) == bits;
}

bool has_avx2() {  // with FMA and F16C
    return has_registers(0x06) && has_bit(1, 0, kEcx, 12) && has_bit(1, 0, kEcx, 29) &&
           has_bit(7, 0, kEbx, 5);
}

bool has_vnni_vex() { return has_avx2() && has_bit(7, 1, kEax, 4); }

bool has_vnni_evex() {  // with AVX-512's F, DQ, BW and VL
    return has_avx2() && has_registers(0xe6) && has_bit(7, 0, kEbx, 16) &&
           has_bit(7, 0, kEbx, 17) && has_bit(7, 0, kEbx, 30) && has_bit(7, 0, kEbx, 31) &&
           has_bit(7, 0, kEcx, 11);
}

bool has_avx512() { return has_vnni_evex() && has_bit(7, 1, kEax, 5); }

const bool kUsesVex = has_vnni_vex();
#elif defined(__aarch64__) && defined(__linux__)
// Bits as in Linux' asm/hwcap.h, which old systems do not name.
bool has_dot() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool has_bfloat16() { return getauxval(AT_HWCAP2) >> 14 & 1; }
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_feature(const char* name) {
    int32_t has = 0;
    size_t size = sizeof has;
    return !sysctlbyname(name, &has, &size, nullptr, 0) && has;
}

bool has_dot() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_bfloat16() { return has_feature("hw.optional.arm.FEAT_BF16"); }
#elif defined(__aarch64__)
bool has_dot() { return false; }
bool has_bfloat16() { return false; }
#endif

bool has_processor(int32_t instruction_set) {
    switch (instruction_set) {
#if defined(__x86_64__)
        case kAvx2: return has_avx2();
        case kAvxVnni: return has_vnni_vex() || has_vnni_evex();
        case kAvx512Fma:
        case kAvx512: return has_avx512();
#elif defined(__aarch64__)
        case kNeon: return true;
        case kNeonDot: return has_dot();
        case kNeonBf16: return has_dot() && has_bfloat16();
#endif
        default: return false;
    }
}

}  // namespace

const Kernels* kernels_of(int32_t kind, int32_t instruction_set) {
    switch (instruction_set) {
#if defined(__x86_64__)
        case kAvxVnni:
            if (kind == kInt8) return kUsesVex ? vnni_vex_int8_kernels() : vnni_evex_int8_kernels();
            return avx2_kernels(Kind(kind));
        case kAvx2: return avx2_kernels(Kind(kind));
        case kAvx512Fma:
            return kind == kBfloat16 ? avx512_fma_kernels() : avx512_kernels(Kind(kind));
        case kAvx512: return avx512_kernels(Kind(kind));
#elif defined(__aarch64__)
        case kNeon: return neon_kernels(Kind(kind));
        case kNeonDot: return neon_dot_kernels(Kind(kind));
        case kNeonBf16: return neon_bf16_kernels(Kind(kind));
#endif
        default: return nullptr;
    }
}

const GroupedKernels* grouped_kernels_of(int32_t instruction_set) {
    switch (instruction_set) {
#if defined(__x86_64__)
        case kAvx2: return avx2_grouped_kernels();
        case kAvxVnni: return kUsesVex ? vnni_vex_grouped_kernels() : vnni_evex_grouped_kernels();
        case kAvx512Fma:
        case kAvx512: return avx512_grouped_kernels();
#elif defined(__aarch64__)
        case kNeon: return neon_grouped_kernels();
        case kNeonDot: return neon_dot_grouped_kernels();
        case kNeonBf16: return neon_bf16_grouped_kernels();
#endif
        default: return nullptr;
    }
}

const StoredKernels* stored_kernels_of(int32_t instruction_set) {
    switch (instruction_set) {
#if defined(__x86_64__)
        case kAvx2:
        case kAvxVnni: return avx2_stored_kernels();
        case kAvx512Fma: return avx512_fma_stored_kernels();
        case kAvx512: return avx512_stored_kernels();
#elif defined(__aarch64__)
        case kNeon:
        case kNeonDot:
        case kNeonBf16: return neon_stored_kernels();
#endif
        default: return nullptr;
    }
}

const RowOps* row_ops_of(int32_t instruction_set) {
    switch (instruction_set) {
#if defined(__x86_64__)
        case kAvx2:
        case kAvxVnni: return avx2_row_ops();
        case kAvx512Fma:
        case kAvx512: return avx512_row_ops();
#elif defined(__aarch64__)
        case kNeon:
        case kNeonDot:
        case kNeonBf16: return neon_row_ops();
#endif
        default: return nullptr;
    }
}

}  // namespace outrider

using namespace outrider;

// 1 if this processor, its system and this build have an instruction set.
EXPORT int32_t outrider_has_instruction_set(int32_t instruction_set) {
    return has_processor(instruction_set) && kernels_of(kBfloat16, instruction_set) &&
           kernels_of(kInt8, instruction_set) && grouped_kernels_of(instruction_set) &&
           stored_kernels_of(instruction_set) && row_ops_of(instruction_set);
}

// 1 if the processor has tiles for bfloat16 (AMX), which oneDNN multiplies many rows with.
EXPORT int32_t outrider_has_matrix_tiles() {
#if defined(__x86_64__)
    return has_bit(7, 0, kEdx, 22);
#else
    return 0;
#endif
}
