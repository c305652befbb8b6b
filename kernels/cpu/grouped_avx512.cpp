// Kernels of grouped products for AVX-512 with VNNI dot products.
#include "grouped.h"

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")
#include <immintrin.h>

#include "grouped_kernels.h"

namespace {

inline __m512i spread(const char* four_bytes) {
    int32_t value;
    memcpy(&value, four_bytes, sizeof value);
    return _mm512_set1_epi32(value);
}

struct Vectors {
    using Floats = __m512;
    using Ints = __m512i;
    static constexpr int kLanes = 16, kVectors = 2;

    static Floats floats(float value) { return _mm512_set1_ps(value); }
    static Ints ints(int32_t value) { return _mm512_set1_epi32(value); }
    static Ints halves(const char* place, int vector) {
        return _mm512_cvtepi16_epi32(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place + 32 * vector)));
    }
    static Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
    static Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
    static Floats converted(Ints value) { return _mm512_cvtepi32_ps(value); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats fused_less(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static void store(float* place, Floats value) { _mm512_storeu_ps(place, value); }
    static Floats scales(const char* place, int vector, int32_t type) {
        if (type == outrider::kScaleFloat32) return _mm512_loadu_ps(place + 64 * vector);
        const __m256i halves =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place + 32 * vector));
        if (type == outrider::kScaleFloat16) return _mm512_cvtph_ps(halves);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
};

struct Sums {
    using Part = __m512i;
    static constexpr int64_t kUnits = 0;  // any number can be added
    static constexpr int32_t kOffset = 0;
};

struct Four : Sums {
    static constexpr int kUnitK = 8;
    struct Codes {
        explicit Codes(const char* weights) {
            const __m512i both = _mm512_loadu_si512(weights), mask = _mm512_set1_epi8(15);
            low = _mm512_and_si512(both, mask);
            high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        }
        Part add(Part part, const char* rows, int64_t next) const {
            part = _mm512_dpbusd_epi32(part, low, spread(rows));
            return _mm512_dpbusd_epi32(part, high, spread(rows + next));
        }
        __m512i low, high;
    };
};

struct Eight : Sums {
    static constexpr int kUnitK = 4;
    struct Codes {
        explicit Codes(const char* weights) : codes(_mm512_loadu_si512(weights)) {}
        Part add(Part part, const char* rows, int64_t) const {
            return _mm512_dpbusd_epi32(part, codes, spread(rows));
        }
        __m512i codes;
    };
};

// 2 * 7 sums of whole numbers, 2 * 7 of floats, 2 vectors of weights and a mask: 31 registers.
constexpr int kMaxRows = 7;

using Multiply = void (*)(const GroupedBlock&);
template <class Number, bool kHasRowGroups>
constexpr Multiply kMultiply[kMaxRows] = {
    multiply_rows<Vectors, Number, kHasRowGroups, 1>,
    multiply_rows<Vectors, Number, kHasRowGroups, 2>,
    multiply_rows<Vectors, Number, kHasRowGroups, 3>,
    multiply_rows<Vectors, Number, kHasRowGroups, 4>,
    multiply_rows<Vectors, Number, kHasRowGroups, 5>,
    multiply_rows<Vectors, Number, kHasRowGroups, 6>,
    multiply_rows<Vectors, Number, kHasRowGroups, 7>};
constexpr outrider::GroupedKernels kKernels = {
    kMaxRows,
    {{kMultiply<Four, false>, kMultiply<Four, true>},
     {kMultiply<Eight, false>, kMultiply<Eight, true>}},
    quantise_row<0>,
    finish_grouped};

}  // namespace

const outrider::GroupedKernels* outrider::avx512_grouped_kernels() { return &kKernels; }
#else
const outrider::GroupedKernels* outrider::avx512_grouped_kernels() { return nullptr; }
#endif
