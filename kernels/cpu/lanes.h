// Plain vectors of 16 lanes that every instruction set can hold.
//
// Included by each instruction set's file behind its `#pragma GCC target`; see rounding.h.
#pragma once

#include <stdint.h>
#include <string.h>

// Vectors are wider than AVX2's registers; no function that takes one is called from outside.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace {

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint16_t HalfLanes __attribute__((vector_size(32)));

constexpr int64_t kLanes = 16;

#define INLINE inline __attribute__((always_inline))

INLINE Lanes load(const float* from) {
    Lanes lanes;
    memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

INLINE void store(float* to, const Lanes& lanes) { memcpy(to, &lanes, sizeof lanes); }

INLINE Lanes widened_lanes(const uint16_t* from) {
    HalfLanes halves;
    memcpy(&halves, from, sizeof halves);
    const IntLanes bits = __builtin_convertvector(halves, IntLanes) << 16;
    Lanes lanes;
    memcpy(&lanes, &bits, sizeof lanes);
    return lanes;
}

// Compilers take comparisons of vectors that are wider than a register apart, number by number. So
// what compares does it in parts that are as wide. (GCC's target pragma need not define __AVX512F__.)
#ifdef LANES_FIT_A_REGISTER
constexpr int64_t kPartLanes = 16;
#else
constexpr int64_t kPartLanes = 8;
#endif

typedef float LanePart __attribute__((vector_size(4 * kPartLanes)));
typedef int32_t IntPart __attribute__((vector_size(4 * kPartLanes)));
typedef uint32_t BitPart __attribute__((vector_size(4 * kPartLanes)));
typedef uint16_t HalfPart __attribute__((vector_size(2 * kPartLanes)));

// first > second ? yes : no.
INLINE Lanes where_greater(const Lanes& first, const Lanes& second, const Lanes& yes,
                           const Lanes& no) {
#ifdef LANES_FIT_A_REGISTER
    return first > second ? yes : no;
#else
    Lanes result;
    for (int64_t lane = 0; lane < kLanes; lane += kPartLanes) {
        LanePart parts[4];
        memcpy(&parts[0], (const float*)&first + lane, sizeof parts[0]);
        memcpy(&parts[1], (const float*)&second + lane, sizeof parts[1]);
        memcpy(&parts[2], (const float*)&yes + lane, sizeof parts[2]);
        memcpy(&parts[3], (const float*)&no + lane, sizeof parts[3]);
        const LanePart part = parts[0] > parts[1] ? parts[2] : parts[3];
        memcpy((float*)&result + lane, &part, sizeof part);
    }
    return result;
#endif
}

// As `rounded`: to the nearest bfloat16, ties to even; a NaN stays one.
INLINE void store_rounded(uint16_t* to, const Lanes& lanes) {
    for (int64_t lane = 0; lane < kLanes; lane += kPartLanes) {
        BitPart bits;
        memcpy(&bits, (const float*)&lanes + lane, sizeof bits);
        const BitPart nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const BitPart nan = BitPart{} + 0x7fc0;
        // AVX2 compares signed numbers only, and these are none below 0.
        const BitPart result = (IntPart)(bits & 0x7fffffff) > 0x7f800000 ? nan : nearest;
        const HalfPart halves = __builtin_convertvector(result, HalfPart);
        memcpy(to + lane, &halves, sizeof halves);
    }
}

// e to the power of x, for x from -87 to 88 and clamped to that; exactly 1 at 0.
INLINE Lanes exponential(Lanes x) {
    const Lanes least = Lanes{} - 87.0f, most = Lanes{} + 88.0f;
    x = where_greater(least, x, least, x);
    x = where_greater(x, most, most, x);
    const Lanes magic = Lanes{} + 12582912.0f;  // its last digit is 1: adding it rounds
    const Lanes shifted = x * 1.44269504f + magic;
    const Lanes power = shifted - magic;
    const Lanes rest = x - power * 0.693359375f + power * 2.12194440e-4f;
    Lanes sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;  // the polynomial of Cephes' expf
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const IntLanes exponent = __builtin_convertvector(power, IntLanes) << 23;
    IntLanes bits;
    memcpy(&bits, &sum, sizeof bits);
    bits += exponent;
    memcpy(&sum, &bits, sizeof sum);
    return sum;
}

INLINE float exponential_of(float x) { return exponential(Lanes{} + x)[0]; }

INLINE float total_of(Lanes lanes) {
    float halves[kLanes];
    store(halves, lanes);
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
        for (int64_t each = 0; each < width; ++each) halves[each] += halves[each + width];
    }
    return halves[0];
}

}  // namespace
