// Decoding of stored weights for AVX2; the products of decoded blocks are products_avx2.cpp's.
#include "stored.h"

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace {

using outrider::kFieldVectors;
using outrider::StoredBlock;
using outrider::StoredProduct;

constexpr int kMaxGroupRows = 3;
constexpr int kEights = 2 * int(kFieldVectors);  // vectors of 8 lanes, 4 columns each

inline __m256 widened8(const char* place, int32_t scale_type) {
    if (scale_type == outrider::kScaleFloat32) {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(place));
    }
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(place));
    if (scale_type == outrider::kScaleFloat16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

inline void spread(__m256 eight, __m256* vectors) {
    const __m256i first = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    vectors[0] = _mm256_permutevar8x32_ps(eight, first);
    vectors[1] = _mm256_permutevar8x32_ps(eight, _mm256_add_epi32(first, _mm256_set1_epi32(4)));
}

// To bfloat16, ties to even: eight numbers, none of them NaN, in 16 bytes.
inline __m128i rounded8(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(nearest), _mm256_extracti128_si256(nearest, 1));
}

struct Header {
    Header(const char* header, const StoredProduct& product) {
        const int64_t eight = product.scale_bytes() / kFieldVectors;
        for (int each = 0; each < kFieldVectors; ++each, header += eight) {
            spread(widened8(header, product.scale_type), scales + 2 * each);
        }
        const __m256 magic = _mm256_set1_ps(8388608.0f);
        const __m256 zero = _mm256_add_ps(magic, _mm256_set1_ps(float(product.zero)));
        for (__m256& each : zeros) each = zero;
        if (product.has_zeros) {
            for (int each = 0; each < kFieldVectors; ++each, header += 16) {
                const __m128i eight16 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(header));
                const __m256 wide = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(eight16));
                spread(_mm256_add_ps(wide, magic), zeros + 2 * each);
            }
        }
        if (product.has_minimums) {
            for (int each = 0; each < kFieldVectors; ++each, header += eight) {
                spread(widened8(header, product.scale_type), minimums + 2 * each);
            }
        }
    }
    __m256 scales[kEights], zeros[kEights], minimums[kEights];
};

// The place of each field's bits, as in stored_avx512.cpp.
template <int kNumber, bool kHasMinimums>
void decode_block(const StoredBlock& block) {
    constexpr int kBits = kNumber == outrider::kNumber4 ? 4 : 8;
    constexpr int kTurn = kNumber == outrider::kNumber4 ? outrider::kTurn4 : outrider::kTurn8;
    const StoredProduct& product = *block.product;
    const char* header = block.group;
    const int64_t first_byte = product.header_bytes() + block.first_unit * outrider::kUnitSize;
    const __m256i mask = _mm256_set1_epi32((1 << kBits) - 1), magic = _mm256_set1_epi32(0x4b000000);
    const __m256i float_mask = _mm256_set1_epi32(int32_t(0x87f00000));
    char* decoded = block.decoded;
    for (int64_t group = 0; group < block.groups; ++group, header += product.group_bytes()) {
        const Header parts(header, product);
        const char* codes = header + first_byte;
        for (int64_t unit = 0; unit < block.units; ++unit, codes += outrider::kUnitSize) {
            for (int half = 0; half < 2; ++half) {
                const __m256i words =
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * half));
                for (int field = 0; field < 32 / kBits; ++field) {
                    const int vector = 2 * (field % int(kFieldVectors)) + half;
                    __m256 value;
                    if (kNumber == outrider::kFloat8) {
                        const __m256i high = _mm256_slli_epi32(words, 24 - 8 * field);
                        value = _mm256_castsi256_ps(
                            _mm256_and_si256(_mm256_srai_epi32(high, 4), float_mask));
                    } else {
                        const int place = (kBits * field + kTurn) % 32;
                        const __m256i turned = _mm256_or_si256(
                            _mm256_srli_epi32(words, place), _mm256_slli_epi32(words, 32 - place));
                        const __m256i bits =
                            _mm256_or_si256(_mm256_and_si256(turned, mask), magic);
                        value = _mm256_sub_ps(_mm256_castsi256_ps(bits), parts.zeros[vector]);
                    }
                    value = _mm256_mul_ps(value, parts.scales[vector]);
                    if (kHasMinimums) value = _mm256_sub_ps(value, parts.minimums[vector]);
                    char* place = decoded + field / int(kFieldVectors) * outrider::kPanelStepBytes +
                                  16 * vector;
                    _mm_storeu_si128(reinterpret_cast<__m128i*>(place), rounded8(value));
                }
            }
            decoded += product.unit_k() / 2 * outrider::kPanelStepBytes;
        }
    }
}

template <int kNumber>
void decode_number(const StoredBlock& block) {
    block.product->has_minimums ? decode_block<kNumber, true>(block)
                                : decode_block<kNumber, false>(block);
}

void decode(const StoredBlock& block) {
    switch (block.product->number) {
        case outrider::kNumber4: return decode_number<outrider::kNumber4>(block);
        case outrider::kNumber8: return decode_number<outrider::kNumber8>(block);
        default: return decode_block<outrider::kFloat8, false>(block);
    }
}

constexpr outrider::StoredKernels kKernels = {kMaxGroupRows, nullptr, decode};

}  // namespace

const outrider::StoredKernels* outrider::avx2_stored_kernels() { return &kKernels; }
#else
const outrider::StoredKernels* outrider::avx2_stored_kernels() { return nullptr; }
#endif
