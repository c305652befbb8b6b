// Kernels for AVX2: bfloat16 widened to float32, int8 multiplied in pairs that cannot overflow.
#include "products.h"

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx2,fma")
#include <immintrin.h>

#include "attend_tile.h"
#include "rounding.h"

namespace {

using outrider::Block;

constexpr int kMaxGroupRows = 3;  // 4 * 3 sums of 16 registers

struct Bfloat16 {
    using Sums = __m256;
    struct Pair {
        __m256 even, odd;
    };
    static Sums load(const void* sums) { return _mm256_loadu_ps(static_cast<const float*>(sums)); }
    static void store(void* sums, Sums values) {
        _mm256_storeu_ps(static_cast<float*>(sums), values);
    }
    static Pair ready(__m256i pairs) {
        const __m256i high = _mm256_set1_epi32(int32_t(0xffff0000));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
                _mm256_castsi256_ps(_mm256_and_si256(pairs, high))};
    }
    static Sums add(Sums sums, Pair row, Pair weights) {
        sums = _mm256_fmadd_ps(row.even, weights.even, sums);
        return _mm256_fmadd_ps(row.odd, weights.odd, sums);
    }
};

// Widened once: attention multiplies a panel of keys with many rows.
struct Float32 : Bfloat16 {
    using Pair = __m256;
    static Pair ready(__m256i bits) { return _mm256_castsi256_ps(bits); }
    static Sums add(Sums sums, Pair row, Pair weights) {
        return _mm256_fmadd_ps(row, weights, sums);
    }
};

struct Int8 {
    using Sums = __m256i;
    using Pair = __m256i;
    static Sums load(const void* sums) {
        return _mm256_loadu_si256(static_cast<const __m256i*>(sums));
    }
    static void store(void* sums, Sums values) {
        _mm256_storeu_si256(static_cast<__m256i*>(sums), values);
    }
    static Pair ready(__m256i bytes) { return bytes; }
    static Sums add(Sums sums, Pair row, Pair weights) {
        // |weight| * (row with the weight's sign): rows reach +-127, so a pair fits 16 bits.
        const __m256i pairs =
            _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(row, weights));
        return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
};

template <class Dot, int kRows>
void multiply(const Block& block) {
    typename Dot::Sums sums[kRows][4];
    char* place = static_cast<char*>(block.sums);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            sums[row][part] = Dot::load(place + 128 * row + 32 * part);
        }
    }
    const char *weights = block.weights, *rows = block.rows, *ahead = block.prefetch;
    for (int64_t step = 0; step < block.steps; ++step) {
        if (kRows > 1) {  // else the processor's own prefetching does best
            _mm_prefetch(ahead, _MM_HINT_T1);
            _mm_prefetch(ahead + 64, _MM_HINT_T1);
            ahead += block.prefetch_stride;
        }
        typename Dot::Pair spread[kRows];
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
            int32_t four_bytes;
            memcpy(&four_bytes, rows + 4 * row, sizeof four_bytes);
            spread[row] = Dot::ready(_mm256_set1_epi32(four_bytes));
        }
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            const auto ready = Dot::ready(
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 32 * part)));
#pragma GCC unroll 4
            for (int row = 0; row < kRows; ++row) {
                sums[row][part] = Dot::add(sums[row][part], spread[row], ready);
            }
        }
        weights += outrider::kPanelStepBytes;
        rows += outrider::kStepBytes * kRows;
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            Dot::store(place + 128 * row + 32 * part, sums[row][part]);
        }
    }
}

template <class Dot>
struct ByRows {
    static constexpr int64_t kMost = kMaxGroupRows;
    static constexpr void (*kKernels[kMaxGroupRows])(const Block&) = {
        multiply<Dot, 1>, multiply<Dot, 2>, multiply<Dot, 3>};
};

// Four pairs of a key and of the fourth key behind it.
INLINE __m256 two_keys(const float* const* keys, int64_t pair) {
    return _mm256_set_m128(_mm_loadu_ps(keys[4] + pair), _mm_loadu_ps(keys[0] + pair));
}

struct ForAttention : ByRows<Float32> {
    static constexpr int kPairSteps = 2;  // steps that a pair of numbers takes
    static constexpr int kValueLines = 3, kValueWidth = 2;  // lanes are two registers

    static void pack_pair(char* to, int64_t step_bytes, const uint16_t* pair) {
        const float even = widened(pair[0]), odd = widened(pair[1]);
        memcpy(to, &even, sizeof even);
        memcpy(to + step_bytes, &odd, sizeof odd);
    }

    static void transpose(const float* const* keys, int64_t pair, char* to) {
        const __m256 a = two_keys(keys, pair), b = two_keys(keys + 1, pair);
        const __m256 c = two_keys(keys + 2, pair), d = two_keys(keys + 3, pair);
        const __m256 low_ab = _mm256_unpacklo_ps(a, b), high_ab = _mm256_unpackhi_ps(a, b);
        const __m256 low_cd = _mm256_unpacklo_ps(c, d), high_cd = _mm256_unpackhi_ps(c, d);
        store_pair(to, _mm256_shuffle_ps(low_ab, low_cd, 0x44));
        store_pair(to + 2 * outrider::kPanelStepBytes, _mm256_shuffle_ps(low_ab, low_cd, 0xee));
        store_pair(to + 4 * outrider::kPanelStepBytes, _mm256_shuffle_ps(high_ab, high_cd, 0x44));
        store_pair(to + 6 * outrider::kPanelStepBytes, _mm256_shuffle_ps(high_ab, high_cd, 0xee));
    }

    static void store_pair(char* to, __m256 pairs) {
        const Bfloat16::Pair widened = Bfloat16::ready(_mm256_castps_si256(pairs));
        Float32::store(to, widened.even);
        Float32::store(to + outrider::kPanelStepBytes, widened.odd);
    }
};

constexpr outrider::Kernels kBfloat16Kernels = {
    kMaxGroupRows, ByRows<Bfloat16>::kKernels, finish_bfloat16, nullptr,
    attend_tile<ForAttention>};
constexpr outrider::Kernels kInt8Kernels = {kMaxGroupRows, ByRows<Int8>::kKernels,
                                            finish_int8<0>, quantise_row<0>, nullptr};

}  // namespace

const outrider::Kernels* outrider::avx2_kernels(Kind kind) {
    return kind == kInt8 ? &kInt8Kernels : &kBfloat16Kernels;
}
#else
const outrider::Kernels* outrider::avx2_kernels(Kind) { return nullptr; }
#endif
