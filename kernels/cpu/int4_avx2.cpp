// Int4 kernels for AVX2.
#include "int4.h"

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx2,fma")
#include <immintrin.h>

#include "int4_finish.h"

namespace {

using outrider::Int4Block;

constexpr int kMaxRows = 2;
constexpr int kParts = 4;  // vectors of 8 columns in a panel

inline __m256 scales_of(const char* place) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(place));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

inline __m256i spread(const char* four_bytes) {
    int32_t value;
    memcpy(&value, four_bytes, sizeof value);
    return _mm256_set1_epi32(value);
}

template <int kRows>
void multiply(const Int4Block& block) {
    __m256 sums[kRows][kParts];
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) sums[row][part] = _mm256_setzero_ps();
    }
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const char *weights = block.panel, *rows = block.rows;
    for (int64_t group = 0; group < block.groups; ++group) {
        const char* scales = weights;
        weights += outrider::kScaleBytes;
        __m256i parts[kRows][kParts];
#pragma GCC unroll 2
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
                parts[row][part] = _mm256_set1_epi32(block.offsets[group * kRows + row]);
            }
        }
        for (int64_t unit = 0; unit < block.units; ++unit) {
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
                const __m256i both =
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 32 * part));
                const __m256i low = _mm256_and_si256(both, mask);
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
#pragma GCC unroll 2
                for (int row = 0; row < kRows; ++row) {
                    // 4 * 15 * 127 at most: 16 bits hold it.
                    const __m256i pairs = _mm256_add_epi16(
                        _mm256_maddubs_epi16(low, spread(rows + 4 * row)),
                        _mm256_maddubs_epi16(high, spread(rows + 4 * (kRows + row))));
                    parts[row][part] =
                        _mm256_add_epi32(parts[row][part], _mm256_madd_epi16(pairs, ones));
                }
            }
            weights += outrider::kUnitBytes;
            rows += 8 * kRows;
        }
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            const __m256 scale = scales_of(scales + 16 * part);
#pragma GCC unroll 2
            for (int row = 0; row < kRows; ++row) {
                const __m256 scaled =
                    _mm256_mul_ps(_mm256_cvtepi32_ps(parts[row][part]), scale);
                sums[row][part] = _mm256_add_ps(sums[row][part], scaled);
            }
        }
    }
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            _mm256_storeu_ps(block.sums + 32 * row + 8 * part, sums[row][part]);
        }
    }
}

constexpr void (*kMultiply[kMaxRows])(const Int4Block&) = {multiply<1>, multiply<2>};
constexpr outrider::Int4Kernels kKernels = {kMaxRows, kMultiply, quantise_row<0>, finish_int4};

}  // namespace

const outrider::Int4Kernels* outrider::avx2_int4_kernels() { return &kKernels; }
#else
const outrider::Int4Kernels* outrider::avx2_int4_kernels() { return nullptr; }
#endif
