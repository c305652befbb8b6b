// Plain vectors of 16 lanes that every instruction set can hold.
//
// Included by each instruction set's file, which is compiled for that set alone; see rounding.h.
// A file for AVX-512 whose lanes are to be one register defines LANES_FIT_A_REGISTER.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

// No function that takes a vector is called from outside.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace {

constexpr int64_t kLanes = 16;

#if defined(LANES_FIT_A_REGISTER)
constexpr int64_t kPartLanes = 16;
#elif defined(__aarch64__)
constexpr int64_t kPartLanes = 4;
#else
constexpr int64_t kPartLanes = 8;
#endif

typedef float LanePart __attribute__((vector_size(4 * kPartLanes)));
typedef int32_t IntPart __attribute__((vector_size(4 * kPartLanes)));
typedef uint32_t BitPart __attribute__((vector_size(4 * kPartLanes)));
typedef uint16_t HalfPart __attribute__((vector_size(2 * kPartLanes)));
typedef int16_t ShortPart __attribute__((vector_size(2 * kPartLanes)));

#define INLINE inline __attribute__((always_inline))

template <class Part>
INLINE Part loaded(const void* place) {
    typedef Part Unaligned __attribute__((aligned(1), may_alias));
    return *static_cast<const Unaligned*>(place);
}

// ---- what each instruction set has a name of its own for ------------------------------------

// fused_part: a * b + c, rounded once. larger_part: the second where one is no number.
// widened_part: with zeros above; narrowed_part: of numbers that fit. from_float16: exact,
// and of another type than bfloat16: GCC would move a load of both in front of a branch, and spill.
// spread_part: the same four bytes in each lane.
// doubled: each lane twice (for sets without stored kernels of their own). transpose_pairs: of four pairs of kPartLanes keys, each pair of all keys.
#if defined(LANES_FIT_A_REGISTER)
INLINE LanePart fused_part(LanePart a, LanePart b, LanePart c) {
    return LanePart(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
}

INLINE LanePart larger_part(LanePart a, LanePart b) {
    return LanePart(_mm512_max_ps(__m512(a), __m512(b)));
}

INLINE IntPart widened_part(HalfPart halves) {
    return IntPart(_mm512_cvtepu16_epi32(__m256i(halves)));
}

INLINE HalfPart narrowed_part(BitPart bits) {
    return HalfPart(_mm512_cvtepi32_epi16(__m512i(bits)));
}

INLINE LanePart from_float16(ShortPart halves) {
    return LanePart(_mm512_cvtph_ps(__m256i(halves)));
}

INLINE IntPart spread_part(const char* four_bytes) {
    return IntPart(_mm512_set1_epi32(loaded<int32_t>(four_bytes)));
}

INLINE float largest_of_part(LanePart part) { return _mm512_reduce_max_ps(__m512(part)); }

// Four pairs of a key and of every fourth key behind it.
INLINE __m512 four_keys(const float* const* keys, int64_t pair) {
    __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(keys[0] + pair));
    four = _mm512_insertf32x4(four, _mm_loadu_ps(keys[4] + pair), 1);
    four = _mm512_insertf32x4(four, _mm_loadu_ps(keys[8] + pair), 2);
    return _mm512_insertf32x4(four, _mm_loadu_ps(keys[12] + pair), 3);
}

INLINE void transpose_pairs(const float* const* keys, int64_t pair, LanePart (&pairs)[4]) {
    const __m512 a = four_keys(keys, pair), b = four_keys(keys + 1, pair);
    const __m512 c = four_keys(keys + 2, pair), d = four_keys(keys + 3, pair);
    const __m512 low_ab = _mm512_unpacklo_ps(a, b), high_ab = _mm512_unpackhi_ps(a, b);
    const __m512 low_cd = _mm512_unpacklo_ps(c, d), high_cd = _mm512_unpackhi_ps(c, d);
    pairs[0] = LanePart(_mm512_shuffle_ps(low_ab, low_cd, 0x44));
    pairs[1] = LanePart(_mm512_shuffle_ps(low_ab, low_cd, 0xee));
    pairs[2] = LanePart(_mm512_shuffle_ps(high_ab, high_cd, 0x44));
    pairs[3] = LanePart(_mm512_shuffle_ps(high_ab, high_cd, 0xee));
}
#elif defined(__aarch64__)
INLINE LanePart fused_part(LanePart a, LanePart b, LanePart c) {
    return LanePart(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
}

INLINE LanePart larger_part(LanePart a, LanePart b) { return a > b ? a : b; }

INLINE IntPart widened_part(HalfPart halves) { return IntPart(vmovl_u16(uint16x4_t(halves))); }

INLINE HalfPart narrowed_part(BitPart bits) { return HalfPart(vmovn_u32(uint32x4_t(bits))); }

INLINE LanePart from_float16(ShortPart halves) {
    return LanePart(vcvt_f32_f16(vreinterpret_f16_s16(int16x4_t(halves))));
}

INLINE IntPart spread_part(const char* four_bytes) {
    int32x4_t spread = vdupq_n_s32(loaded<int32_t>(four_bytes));
    __asm__("" : "+w"(spread));  // else operations that follow are done to the number, and spread
    return IntPart(spread);
}

INLINE float largest_of_part(LanePart part) {
    const float even = part[0] > part[2] ? part[0] : part[2];
    const float odd = part[1] > part[3] ? part[1] : part[3];
    return even > odd ? even : odd;
}

INLINE void doubled(LanePart part, LanePart& low, LanePart& high) {
    low = LanePart(vzip1q_f32(float32x4_t(part), float32x4_t(part)));
    high = LanePart(vzip2q_f32(float32x4_t(part), float32x4_t(part)));
}

INLINE void transpose_pairs(const float* const* keys, int64_t pair, LanePart (&pairs)[4]) {
    const float32x4_t a = vld1q_f32(keys[0] + pair), b = vld1q_f32(keys[1] + pair);
    const float32x4_t c = vld1q_f32(keys[2] + pair), d = vld1q_f32(keys[3] + pair);
    const float64x2_t even_ab = vreinterpretq_f64_f32(vtrn1q_f32(a, b));
    const float64x2_t even_cd = vreinterpretq_f64_f32(vtrn1q_f32(c, d));
    const float64x2_t odd_ab = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    const float64x2_t odd_cd = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
    pairs[0] = LanePart(vtrn1q_f64(even_ab, even_cd));
    pairs[1] = LanePart(vtrn1q_f64(odd_ab, odd_cd));
    pairs[2] = LanePart(vtrn2q_f64(even_ab, even_cd));
    pairs[3] = LanePart(vtrn2q_f64(odd_ab, odd_cd));
}
#else
INLINE LanePart fused_part(LanePart a, LanePart b, LanePart c) {
    return LanePart(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
}

INLINE LanePart larger_part(LanePart a, LanePart b) {
    return LanePart(_mm256_max_ps(__m256(a), __m256(b)));
}

INLINE IntPart widened_part(HalfPart halves) {
    return IntPart(_mm256_cvtepu16_epi32(__m128i(halves)));
}

INLINE HalfPart narrowed_part(BitPart bits) {
    return HalfPart(_mm_packus_epi32(_mm256_castsi256_si128(__m256i(bits)),
                                     _mm256_extracti128_si256(__m256i(bits), 1)));
}

INLINE LanePart from_float16(ShortPart halves) {
    return LanePart(_mm256_cvtph_ps(__m128i(halves)));
}

// (Of a sum of a vector and a number, compilers take operations that follow to the number.)
INLINE IntPart spread_part(const char* four_bytes) {
    return IntPart(_mm256_broadcast_ss(reinterpret_cast<const float*>(four_bytes)));
}

INLINE float largest_of_part(LanePart part) {
    const __m256 eight = __m256(part);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE void doubled(LanePart part, LanePart& low, LanePart& high) {
    const __m256i first = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m256i second = _mm256_add_epi32(first, _mm256_set1_epi32(4));
    low = LanePart(_mm256_permutevar8x32_ps(__m256(part), first));
    high = LanePart(_mm256_permutevar8x32_ps(__m256(part), second));
}

// Four pairs of a key and of the fourth key behind it.
INLINE __m256 two_keys(const float* const* keys, int64_t pair) {
    return _mm256_set_m128(_mm_loadu_ps(keys[4] + pair), _mm_loadu_ps(keys[0] + pair));
}

INLINE void transpose_pairs(const float* const* keys, int64_t pair, LanePart (&pairs)[4]) {
    const __m256 a = two_keys(keys, pair), b = two_keys(keys + 1, pair);
    const __m256 c = two_keys(keys + 2, pair), d = two_keys(keys + 3, pair);
    const __m256 low_ab = _mm256_unpacklo_ps(a, b), high_ab = _mm256_unpackhi_ps(a, b);
    const __m256 low_cd = _mm256_unpacklo_ps(c, d), high_cd = _mm256_unpackhi_ps(c, d);
    pairs[0] = LanePart(_mm256_shuffle_ps(low_ab, low_cd, 0x44));
    pairs[1] = LanePart(_mm256_shuffle_ps(low_ab, low_cd, 0xee));
    pairs[2] = LanePart(_mm256_shuffle_ps(high_ab, high_cd, 0x44));
    pairs[3] = LanePart(_mm256_shuffle_ps(high_ab, high_cd, 0xee));
}
#endif

// ---- lanes ----------------------------------------------------------------------------------

// Compilers take vectors that are wider than a register apart through memory, number by number
// where they compare or spread one: AVX2's attention took three quarters of its time for that. So
// its lanes are two vectors, and NEON's four, with a name each: an array of them would stay in
// memory too.
#if defined(LANES_FIT_A_REGISTER)
typedef LanePart Lanes;

template <class Operation, class... Others>
INLINE Lanes by_part(Operation operation, const Others&... others) {
    return operation(others...);
}

// Lanes whose parts are `part_at` their first lane.
template <class PartAt>
INLINE Lanes of_parts(PartAt part_at) {
    return part_at(0);
}

template <class Take>
INLINE void take_parts(const Lanes& lanes, Take take) {
    take(lanes, 0);
}

INLINE float first_of(const Lanes& lanes) { return lanes[0]; }

INLINE float largest_of(const Lanes& lanes) { return largest_of_part(lanes); }
#elif defined(__aarch64__)
struct Lanes {
    LanePart first, second, third, fourth;
};

template <class Operation, class... Others>
INLINE Lanes by_part(Operation operation, const Others&... others) {
    return {operation(others.first...), operation(others.second...), operation(others.third...),
            operation(others.fourth...)};
}

template <class PartAt>
INLINE Lanes of_parts(PartAt part_at) {
    return {part_at(0), part_at(kPartLanes), part_at(2 * kPartLanes), part_at(3 * kPartLanes)};
}

template <class Take>
INLINE void take_parts(const Lanes& lanes, Take take) {
    take(lanes.first, 0);
    take(lanes.second, kPartLanes);
    take(lanes.third, 2 * kPartLanes);
    take(lanes.fourth, 3 * kPartLanes);
}

INLINE float first_of(const Lanes& lanes) { return lanes.first[0]; }

INLINE float largest_of(const Lanes& lanes) {
    return largest_of_part(larger_part(larger_part(lanes.first, lanes.third),
                                       larger_part(lanes.second, lanes.fourth)));
}
#else
struct Lanes {
    LanePart low, high;
};

template <class Operation, class... Others>
INLINE Lanes by_part(Operation operation, const Others&... others) {
    return {operation(others.low...), operation(others.high...)};
}

template <class PartAt>
INLINE Lanes of_parts(PartAt part_at) {
    return {part_at(0), part_at(kPartLanes)};
}

template <class Take>
INLINE void take_parts(const Lanes& lanes, Take take) {
    take(lanes.low, 0);
    take(lanes.high, kPartLanes);
}

INLINE float first_of(const Lanes& lanes) { return lanes.low[0]; }

INLINE float largest_of(const Lanes& lanes) {
    return largest_of_part(larger_part(lanes.low, lanes.high));
}
#endif

#if !defined(LANES_FIT_A_REGISTER)
INLINE Lanes operator+(const Lanes& a, const Lanes& b) {
    return by_part([](LanePart x, LanePart y) { return x + y; }, a, b);
}
INLINE Lanes operator-(const Lanes& a, const Lanes& b) {
    return by_part([](LanePart x, LanePart y) { return x - y; }, a, b);
}
INLINE Lanes operator*(const Lanes& a, const Lanes& b) {
    return by_part([](LanePart x, LanePart y) { return x * y; }, a, b);
}
INLINE Lanes operator/(const Lanes& a, const Lanes& b) {
    return by_part([](LanePart x, LanePart y) { return x / y; }, a, b);
}
INLINE Lanes operator+(const Lanes& a, float b) {
    return by_part([=](LanePart x) { return x + b; }, a);
}
INLINE Lanes operator-(const Lanes& a, float b) {
    return by_part([=](LanePart x) { return x - b; }, a);
}
INLINE Lanes operator*(const Lanes& a, float b) {
    return by_part([=](LanePart x) { return x * b; }, a);
}
INLINE Lanes operator-(float a, const Lanes& b) {
    return by_part([=](LanePart x) { return a - x; }, b);
}
INLINE Lanes operator/(float a, const Lanes& b) {
    return by_part([=](LanePart x) { return a / x; }, b);
}
INLINE Lanes operator-(const Lanes& a) {
    return by_part([](LanePart x) { return -x; }, a);
}
INLINE Lanes& operator+=(Lanes& a, const Lanes& b) { return a = a + b; }
#endif

INLINE Lanes filled(float value) {
    return of_parts([=](int64_t) { return LanePart{} + value; });
}

// a * b + c, rounded once.
INLINE Lanes fused(const Lanes& a, const Lanes& b, const Lanes& c) {
    return by_part(fused_part, a, b, c);
}

INLINE Lanes fused(const Lanes& a, float b, const Lanes& c) { return fused(a, filled(b), c); }
INLINE Lanes fused(const Lanes& a, const Lanes& b, float c) { return fused(a, b, filled(c)); }

// The larger of each pair; the second where one is no number.
INLINE Lanes larger(const Lanes& a, const Lanes& b) { return by_part(larger_part, a, b); }

INLINE Lanes load(const float* from) {
    return of_parts([=](int64_t lane) { return loaded<LanePart>(from + lane); });
}

INLINE void store(float* to, const Lanes& lanes) {
    take_parts(lanes, [=](LanePart part, int64_t lane) { memcpy(to + lane, &part, sizeof part); });
}

INLINE LanePart from_bfloat16(HalfPart halves) { return LanePart(widened_part(halves) << 16); }

INLINE Lanes widened_lanes(const uint16_t* from) {
    return of_parts([=](int64_t lane) { return from_bfloat16(loaded<HalfPart>(from + lane)); });
}

// first > second ? yes : no.
INLINE Lanes where_greater(const Lanes& first, const Lanes& second, const Lanes& yes,
                           const Lanes& no) {
    return by_part([](LanePart a, LanePart b, LanePart c, LanePart d) { return a > b ? c : d; },
                   first, second, yes, no);
}

// To the nearest bfloat16, ties to even, where there is no NaN.
INLINE BitPart nearest_bfloat16(BitPart bits) {
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// As `rounded`: to the nearest bfloat16, ties to even; a NaN stays one.
INLINE void store_rounded(uint16_t* to, const Lanes& lanes) {
    take_parts(lanes, [=](LanePart part, int64_t lane) {
        const BitPart bits = BitPart(part);
        const BitPart nearest = nearest_bfloat16(bits);
        const BitPart nan = BitPart{} + 0x7fc0;
        // AVX2 compares signed numbers only, and these are none below 0.
        const BitPart result = (IntPart)(bits & 0x7fffffff) > 0x7f800000 ? nan : nearest;
        const HalfPart halves = narrowed_part(result);
        memcpy(to + lane, &halves, sizeof halves);
    });
}

// e to the power of x, for x from -87 to 88 and clamped to that; exactly 1 at 0.
INLINE Lanes exponential(Lanes x) {
    x = larger(filled(-87.0f), x);
    x = -larger(filled(-88.0f), -x);
    const Lanes magic = filled(12582912.0f);  // its last digit is 1: adding it rounds
    const Lanes power = fused(x, 1.44269504f, magic) - magic;
    const Lanes rest = fused(power, 2.12194440e-4f, fused(power, -0.693359375f, x));
    // The polynomial of Cephes' expf.
    Lanes sum = fused(rest, 1.9875691500e-4f, filled(1.3981999507e-3f));
    sum = fused(sum, rest, 8.3334519073e-3f);
    sum = fused(sum, rest, 4.1665795894e-2f);
    sum = fused(sum, rest, 1.6666665459e-1f);
    sum = fused(sum, rest, 5.0000001201e-1f);
    sum = fused(sum, rest * rest, rest) + 1.0f;
    return by_part(
        [](LanePart mantissa, LanePart exponent) {
            return LanePart(IntPart(mantissa) + (__builtin_convertvector(exponent, IntPart) << 23));
        },
        sum, power);
}

// The natural logarithm of positive normal numbers.
INLINE Lanes logarithm(const Lanes& x) {
    // x = mantissa * 2^exponent, the mantissa from sqrt(1/2) to sqrt(2).
    const auto exponent_of = [](LanePart part) {
        return (IntPart(part) - 0x3f3504f3) >> 23;  // the bits of sqrt(1/2)
    };
    const Lanes exponent = by_part(
        [=](LanePart part) { return __builtin_convertvector(exponent_of(part), LanePart); }, x);
    const Lanes rest = by_part(
        [=](LanePart part) { return LanePart(IntPart(part) - (exponent_of(part) << 23)); }, x) - 1.0f;
    // The polynomial of Cephes' logf.
    Lanes sum = fused(rest, 7.0376836292e-2f, filled(-1.1514610310e-1f));
    sum = fused(sum, rest, 1.1676998740e-1f);
    sum = fused(sum, rest, -1.2420140846e-1f);
    sum = fused(sum, rest, 1.4249322787e-1f);
    sum = fused(sum, rest, -1.6668057665e-1f);
    sum = fused(sum, rest, 2.0000714765e-1f);
    sum = fused(sum, rest, -2.4999993993e-1f);
    sum = fused(sum, rest, 3.3333331174e-1f);
    const Lanes square = rest * rest;
    sum = fused(exponent, -2.12194440e-4f, sum * rest * square);
    sum = fused(square, -0.5f, sum);
    return fused(exponent, 0.693359375f, rest + sum);
}

INLINE float exponential_of(float x) { return first_of(exponential(filled(x))); }

INLINE float total_of(const Lanes& lanes) {
    float halves[kLanes];
    store(halves, lanes);
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
        for (int64_t each = 0; each < width; ++each) halves[each] += halves[each + width];
    }
    return halves[0];
}

}  // namespace
