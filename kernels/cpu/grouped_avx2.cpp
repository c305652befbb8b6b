// Kernels of grouped products for AVX2.
#include "grouped.h"

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

#include "grouped_kernels.h"

namespace {

inline __m256i spread(const char* four_bytes) {
    int32_t value;
    memcpy(&value, four_bytes, sizeof value);
    return _mm256_set1_epi32(value);
}

inline __m256i loaded(const char* place) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place));
}

struct Vectors {
    using Floats = __m256;
    using Ints = __m256i;
    static constexpr int kLanes = 8, kVectors = 4;

    static Floats floats(float value) { return _mm256_set1_ps(value); }
    static Ints ints(int32_t value) { return _mm256_set1_epi32(value); }
    static Ints halves(const char* place, int vector) {
        return _mm256_cvtepi16_epi32(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(place + 16 * vector)));
    }
    static Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
    static Ints multiply(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
    static Floats converted(Ints value) { return _mm256_cvtepi32_ps(value); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats fused_less(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
    static void store(float* place, Floats value) { _mm256_storeu_ps(place, value); }
    static Floats scales(const char* place, int vector, int32_t type) {
        if (type == outrider::kScaleFloat32) {
            return _mm256_loadu_ps(reinterpret_cast<const float*>(place + 32 * vector));
        }
        const __m128i halves =
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(place + 16 * vector));
        if (type == outrider::kScaleFloat16) return _mm256_cvtph_ps(halves);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
};

inline __m256i pairs_added(__m256i sum, __m256i pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// Sums of 16 bits hold 4 units: 16 products of at most 15 * 127 in each of them.
struct Four {
    using Part = __m256i;
    static constexpr int64_t kUnits = 4;
    static constexpr int32_t kOffset = 0;
    static constexpr int kUnitK = 8;
    static __m256i added(__m256i sum, Part part) { return pairs_added(sum, part); }
    struct Codes {
        explicit Codes(const char* weights) {
            const __m256i both = loaded(weights), mask = _mm256_set1_epi8(15);
            low = _mm256_and_si256(both, mask);
            high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        }
        Part add(Part part, const char* rows, int64_t next) const {
            part = _mm256_add_epi16(part, _mm256_maddubs_epi16(low, spread(rows)));
            return _mm256_add_epi16(part, _mm256_maddubs_epi16(high, spread(rows + next)));
        }
        __m256i low, high;
    };
};

// Codes are multiplied as -128 to 127, by their magnitudes: 2 * 128 * 127 fits in 16 bits.
struct Eight {
    using Part = __m256i;
    static constexpr int64_t kUnits = 0;  // any number can be added
    static constexpr int32_t kOffset = 128;
    static constexpr int kUnitK = 4;
    struct Codes {
        explicit Codes(const char* weights)
            : codes(_mm256_xor_si256(loaded(weights), _mm256_set1_epi8(-128))),
              magnitudes(_mm256_abs_epi8(codes)) {}
        Part add(Part part, const char* rows, int64_t) const {
            const __m256i signed_rows = _mm256_sign_epi8(spread(rows), codes);
            return pairs_added(part, _mm256_maddubs_epi16(magnitudes, signed_rows));
        }
        __m256i codes, magnitudes;
    };
};

constexpr int kMaxRows = 2;

using Multiply = void (*)(const GroupedBlock&);
template <class Number, bool kHasRowGroups>
constexpr Multiply kMultiply[kMaxRows] = {
    multiply_rows<Vectors, Number, kHasRowGroups, 1>,
    multiply_rows<Vectors, Number, kHasRowGroups, 2>};
constexpr outrider::GroupedKernels kKernels = {
    kMaxRows,
    {{kMultiply<Four, false>, kMultiply<Four, true>},
     {kMultiply<Eight, false>, kMultiply<Eight, true>}},
    quantise_row<0>,
    finish_grouped};

}  // namespace

const outrider::GroupedKernels* outrider::avx2_grouped_kernels() { return &kKernels; }
#else
const outrider::GroupedKernels* outrider::avx2_grouped_kernels() { return nullptr; }
#endif
