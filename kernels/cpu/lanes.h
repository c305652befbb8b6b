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
typedef uint32_t BitLanes __attribute__((vector_size(64)));
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

// As `rounded`: to the nearest bfloat16, ties to even; a NaN stays one.
INLINE void store_rounded(uint16_t* to, const Lanes& lanes) {
    BitLanes bits;
    memcpy(&bits, &lanes, sizeof bits);
    const BitLanes nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const BitLanes nan = BitLanes{} + 0x7fc0;
    const BitLanes result = (bits & 0x7fffffff) > 0x7f800000 ? nan : nearest;
    const HalfLanes halves = __builtin_convertvector(result, HalfLanes);
    memcpy(to, &halves, sizeof halves);
}

// e to the power of x, for x from -87 to 88 and clamped to that; exactly 1 at 0.
INLINE Lanes exponential(Lanes x) {
    const Lanes least = Lanes{} - 87.0f, most = Lanes{} + 88.0f;
    x = x < least ? least : x;
    x = x > most ? most : x;
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
