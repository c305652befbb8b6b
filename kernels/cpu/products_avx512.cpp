// Kernels for AVX-512 with its bfloat16 and VNNI dot products.
#include "products.h"

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")
#define LANES_FIT_A_REGISTER
#include <immintrin.h>

#include "attend_tile.h"
#include "rounding.h"

namespace {

using outrider::Block;

// vpdpbusd multiplies unsigned by signed bytes: rows are moved up by this much.
constexpr int32_t kOffset = 128;
// 2 * 14 sums, 2 vectors of weights and one of a row: 31 of 32 registers.
constexpr int kMaxGroupRows = 14;
// Up to this many rows memory is all that takes time, and the processor's own prefetching does
// best: hints would take its places in the queue. Measured on Zen 4.
constexpr int kFewRows = 5;

struct Bfloat16 {
    using Sums = __m512;
    static Sums load(const void* sums) { return _mm512_loadu_ps(sums); }
    static void store(void* sums, Sums values) { _mm512_storeu_ps(sums, values); }
    static Sums add(Sums sums, __m512i row, __m512i weights) {
        return _mm512_dpbf16_ps(sums, (__m512bh)row, (__m512bh)weights);
    }
};

struct Int8 {
    using Sums = __m512i;
    static Sums load(const void* sums) { return _mm512_loadu_si512(sums); }
    static void store(void* sums, Sums values) { _mm512_storeu_si512(sums, values); }
    static Sums add(Sums sums, __m512i row, __m512i weights) {
        return _mm512_dpbusd_epi32(sums, row, weights);
    }
};

template <class Dot, int kRows>
void multiply(const Block& block) {
    typename Dot::Sums left[kRows], right[kRows];
    char* sums = static_cast<char*>(block.sums);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
        left[row] = Dot::load(sums + 128 * row);
        right[row] = Dot::load(sums + 128 * row + 64);
    }
    const char *weights = block.weights, *rows = block.rows, *ahead = block.prefetch;
    for (int64_t step = 0; step < block.steps; ++step) {
        if (kRows > kFewRows) {
            _mm_prefetch(ahead, _MM_HINT_T1);
            _mm_prefetch(ahead + 64, _MM_HINT_T1);
            ahead += block.prefetch_stride;
        }
        const __m512i left_weights = _mm512_loadu_si512(weights);
        const __m512i right_weights = _mm512_loadu_si512(weights + 64);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
            int32_t four_bytes;
            memcpy(&four_bytes, rows + 4 * row, sizeof four_bytes);
            const __m512i spread = _mm512_set1_epi32(four_bytes);
            left[row] = Dot::add(left[row], spread, left_weights);
            right[row] = Dot::add(right[row], spread, right_weights);
        }
        weights += outrider::kPanelStepBytes;
        rows += outrider::kStepBytes * kRows;
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
        Dot::store(sums + 128 * row, left[row]);
        Dot::store(sums + 128 * row + 64, right[row]);
    }
}

template <class Dot>
struct ByRows {
    static constexpr int64_t kMost = kMaxGroupRows;
    static constexpr void (*kKernels[kMaxGroupRows])(const Block&) = {
        multiply<Dot, 1>,  multiply<Dot, 2>,  multiply<Dot, 3>,  multiply<Dot, 4>,
        multiply<Dot, 5>,  multiply<Dot, 6>,  multiply<Dot, 7>,  multiply<Dot, 8>,
        multiply<Dot, 9>,  multiply<Dot, 10>, multiply<Dot, 11>, multiply<Dot, 12>,
        multiply<Dot, 13>, multiply<Dot, 14>,
    };
};

// Four pairs of a key and of every fourth key behind it.
INLINE __m512 four_keys(const float* const* keys, int64_t pair) {
    __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(keys[0] + pair));
    four = _mm512_insertf32x4(four, _mm_loadu_ps(keys[4] + pair), 1);
    four = _mm512_insertf32x4(four, _mm_loadu_ps(keys[8] + pair), 2);
    return _mm512_insertf32x4(four, _mm_loadu_ps(keys[12] + pair), 3);
}

struct ForAttention : ByRows<Bfloat16> {
    static constexpr int kPairSteps = 1;  // steps that a pair of numbers takes
    static constexpr int kValueLines = 4, kValueWidth = 4;

    static void pack_pair(char* to, int64_t, const uint16_t* pair) { memcpy(to, pair, 4); }

    static void transpose(const float* const* keys, int64_t pair, char* to) {
        const __m512 a = four_keys(keys, pair), b = four_keys(keys + 1, pair);
        const __m512 c = four_keys(keys + 2, pair), d = four_keys(keys + 3, pair);
        const __m512 low_ab = _mm512_unpacklo_ps(a, b), high_ab = _mm512_unpackhi_ps(a, b);
        const __m512 low_cd = _mm512_unpacklo_ps(c, d), high_cd = _mm512_unpackhi_ps(c, d);
        _mm512_storeu_ps(to, _mm512_shuffle_ps(low_ab, low_cd, 0x44));
        _mm512_storeu_ps(to + outrider::kPanelStepBytes, _mm512_shuffle_ps(low_ab, low_cd, 0xee));
        _mm512_storeu_ps(to + 2 * outrider::kPanelStepBytes,
                         _mm512_shuffle_ps(high_ab, high_cd, 0x44));
        _mm512_storeu_ps(to + 3 * outrider::kPanelStepBytes,
                         _mm512_shuffle_ps(high_ab, high_cd, 0xee));
    }
};

constexpr outrider::Kernels kBfloat16Kernels = {
    kMaxGroupRows, ByRows<Bfloat16>::kKernels, finish_bfloat16, nullptr,
    attend_tile<ForAttention>};
constexpr outrider::Kernels kInt8Kernels = {kMaxGroupRows, ByRows<Int8>::kKernels,
                                            finish_int8<kOffset>, quantise_row<kOffset>, nullptr};

}  // namespace

const outrider::Kernels* outrider::avx512_kernels(Kind kind) {
    return kind == kInt8 ? &kInt8Kernels : &kBfloat16Kernels;
}
#else
const outrider::Kernels* outrider::avx512_kernels(Kind) { return nullptr; }
#endif
