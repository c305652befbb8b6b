// Int4 kernels for AVX-512 with VNNI dot products.
#include "int4.h"

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")
#include <immintrin.h>

#include "int4_finish.h"

namespace {

using outrider::Int4Block;

// 2 * 7 sums of whole numbers, 2 * 7 of floats, 2 vectors of weights and a mask: 31 registers.
constexpr int kMaxRows = 7;

inline __m512 scales_of(const char* place) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m512i spread(const char* four_bytes) {
    int32_t value;
    memcpy(&value, four_bytes, sizeof value);
    return _mm512_set1_epi32(value);
}

template <int kRows>
void multiply(const Int4Block& block) {
    __m512 sums[kRows][2];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = _mm512_setzero_ps();
    const __m512i mask = _mm512_set1_epi8(15);
    const char *weights = block.panel, *rows = block.rows, *ahead = block.prefetch;
    const int64_t ahead_step = ahead ? outrider::kUnitBytes : 0;
    if (!ahead) ahead = weights;
    for (int64_t group = 0; group < block.groups; ++group) {
        const char* scales = weights;
        weights += outrider::kScaleBytes;
        __m512i parts[kRows][2];
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            parts[row][0] = parts[row][1] =
                _mm512_set1_epi32(block.offsets[group * kRows + row]);
        }
        for (int64_t unit = 0; unit < block.units; ++unit) {
            if (kRows > 1) {
                _mm_prefetch(ahead, _MM_HINT_T1);
                _mm_prefetch(ahead + 64, _MM_HINT_T1);
                ahead += ahead_step;
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const __m512i both = _mm512_loadu_si512(weights + 64 * half);
                const __m512i low = _mm512_and_si512(both, mask);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
#pragma GCC unroll 8
                for (int row = 0; row < kRows; ++row) {
                    parts[row][half] = _mm512_dpbusd_epi32(parts[row][half], low,
                                                           spread(rows + 4 * row));
                    parts[row][half] = _mm512_dpbusd_epi32(parts[row][half], high,
                                                           spread(rows + 4 * (kRows + row)));
                }
            }
            weights += outrider::kUnitBytes;
            rows += 8 * kRows;
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m512 scale = scales_of(scales + 32 * half);
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
                const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(parts[row][half]), scale);
                sums[row][half] = _mm512_add_ps(sums[row][half], part);
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
        _mm512_storeu_ps(block.sums + 32 * row, sums[row][0]);
        _mm512_storeu_ps(block.sums + 32 * row + 16, sums[row][1]);
    }
}

constexpr void (*kMultiply[kMaxRows])(const Int4Block&) = {
    multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>, multiply<6>, multiply<7>};
constexpr outrider::Int4Kernels kKernels = {kMaxRows, kMultiply, quantise_row<0>, finish_int4};

}  // namespace

const outrider::Int4Kernels* outrider::avx512_int4_kernels() { return &kKernels; }
#else
const outrider::Int4Kernels* outrider::avx512_int4_kernels() { return nullptr; }
#endif
