// Kernels of grouped products for AVX2.
#include "instruction_sets.h"

#if defined(__AVX2__)
#include "grouped_kernels.h"

namespace {

INLINE __m256i spread(const char* four_bytes) { return __m256i(spread_part(four_bytes)); }

inline __m256i pairs_added(__m256i sum, __m256i pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// Sums of 16 bits hold 4 units: 16 products of at most 15 * 127 in each of them.
struct Four {
    using Part = __m256i;
    static constexpr int64_t kUnits = 4;
    static constexpr int32_t kOffset = 0;
    static constexpr int kUnitK = 8;
    static IntPart added(IntPart sum, Part part) {
        return IntPart(pairs_added(__m256i(sum), part));
    }
    struct Codes {
        explicit Codes(const char* weights) {
            const __m256i both = loaded<__m256i>(weights), mask = _mm256_set1_epi8(15);
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
    using Part = IntPart;
    static constexpr int64_t kUnits = 0;  // any number can be added
    static constexpr int32_t kOffset = 128;
    static constexpr int kUnitK = 4;
    struct Codes {
        explicit Codes(const char* weights)
            : codes(_mm256_xor_si256(loaded<__m256i>(weights), _mm256_set1_epi8(-128))),
              magnitudes(_mm256_abs_epi8(codes)) {}
        Part add(Part part, const char* rows, int64_t) const {
            const __m256i signed_rows = _mm256_sign_epi8(spread(rows), codes);
            const __m256i pairs = _mm256_maddubs_epi16(magnitudes, signed_rows);
            return IntPart(pairs_added(__m256i(part), pairs));
        }
        __m256i codes, magnitudes;
    };
};

}  // namespace

const outrider::GroupedKernels* outrider::avx2_grouped_kernels() {
    return &kGroupedKernels<Four, Eight, 2>;
}
#else
const outrider::GroupedKernels* outrider::avx2_grouped_kernels() { return nullptr; }
#endif
