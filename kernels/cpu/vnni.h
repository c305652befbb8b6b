// Dot products of four bytes by VNNI, of either width and encoding.
#pragma once

#include "lanes.h"

namespace {

constexpr bool kDotsSignedCodes = false;

// Adds four products of unsigned codes and signed rows to each sum, exactly.
INLINE IntPart dot_part(IntPart sum, IntPart codes, IntPart rows) {
#if defined(LANES_FIT_A_REGISTER)
    return IntPart(_mm512_dpbusd_epi32(__m512i(sum), __m512i(codes), __m512i(rows)));
#elif defined(__AVXVNNI__)
    return IntPart(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(codes), __m256i(rows)));
#else
    return IntPart(_mm256_dpbusd_epi32(__m256i(sum), __m256i(codes), __m256i(rows)));
#endif
}

}  // namespace
