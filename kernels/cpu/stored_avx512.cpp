// Kernels of stored weights for AVX-512 with its bfloat16 dot products.
#include "instruction_sets.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#include <string.h>

namespace {

using outrider::kFieldVectors;
using outrider::StoredBlock;
using outrider::StoredProduct;

// 2 * 8 sums; what is left of 32 registers decodes.
constexpr int kMaxGroupRows = 8;
// Bytes of codes that are fetched ahead of their use, where arithmetic takes the time.
constexpr int64_t kAhead = 2048;
constexpr int kFewRows = 4;  // see products_avx512.cpp

inline __m512 widened16(const char* place, int32_t scale_type) {
    if (scale_type == outrider::kScaleFloat32) return _mm512_loadu_ps(place);
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place));
    if (scale_type == outrider::kScaleFloat16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// For each field vector: lane l is of column 8 * vector + l / 2.
inline void spread(__m512 left, __m512 right, __m512* vectors) {
    const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    vectors[0] = _mm512_permutexvar_ps(first, left);
    vectors[1] = _mm512_permutexvar_ps(second, left);
    vectors[2] = _mm512_permutexvar_ps(first, right);
    vectors[3] = _mm512_permutexvar_ps(second, right);
}

// How codes become numbers: as stored.h says (kExact), or with one rounding where that is the same.
enum Way { kExact, kShort, kMinimums, kShortMinimums };

// A field's bits are moved to where they are digits of a float: kDigit is the place of the lowest.
template <int kNumber, int kField>
struct Field {
    static constexpr int kBits = kNumber == outrider::kNumber4 ? 4 : 8;
    static constexpr int kTurn = kNumber == outrider::kNumber4 ? outrider::kTurn4 : outrider::kTurn8;
    static constexpr int kPlace = (kTurn + kBits * kField) % 32;
    static constexpr int kTop = 23 - kBits;
    // Three of four fields of 4 bits stay where they are, in words that are turned by 16 for the
    // second step.
    static constexpr int kVector = kField % int(kFieldVectors);
    static constexpr int kDigit =
        kNumber == outrider::kNumber4 && kVector < 3 ? outrider::kTurn4 + 4 * kVector : kTop;
    static constexpr int kShift = (kPlace - kDigit + 32) % 32;  // of the word, to the right
};

template <int kNumber, Way kWay>
struct Decoder {
    static constexpr int kSteps = kNumber == outrider::kNumber4 ? 2 : 1;
    static constexpr bool kHasMinimums = kWay == kMinimums || kWay == kShortMinimums;
    // A word with the digits of u at kDigit is 1 + u * 2 ^ (kDigit - 23), or 2^23 + u * 2^kDigit.
    static constexpr int32_t kMagic = kWay == kShort ? 0x3f800000 : 0x4b000000;

    void read(const char* header, const StoredProduct& product) {
        const int64_t half = product.scale_bytes() / 2;
        const int32_t type = product.scale_type;
        spread(widened16(header, type), widened16(header + half, type), scales);
        header += 2 * half;
        if (kNumber == outrider::kFloat8) return;
        if (product.has_zeros) {
            spread(zeros16(header), zeros16(header + 32), zeros);
            header += 64;
        } else {
            const __m512 zero = _mm512_set1_ps(float(product.zero));
            for (__m512& each : zeros) each = zero;
        }
        if (kHasMinimums) {
            spread(widened16(header, type), widened16(header + half, type), minimums);
        }
        place<0>();
        place<1>();
        place<2>();
        place<3>();
    }

    static __m512 zeros16(const char* place) {
        const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place));
        return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(values));
    }

    // Makes scales and zeros fit to where the digits are; all of this is exact.
    template <int kVector>
    void place() {
        constexpr int kDigit = Field<kNumber, kVector>::kDigit;
        __m512 &scale = scales[kVector], &zero = zeros[kVector];
        if (kWay == kShort) {
            constexpr float kOne = float(1 << (23 - kDigit));
            zero = _mm512_mul_ps(_mm512_add_ps(zero, _mm512_set1_ps(kOne)), scale);
            scale = _mm512_mul_ps(scale, _mm512_set1_ps(kOne));
        } else {
            constexpr float kUnit = float(1 << kDigit);
            zero = _mm512_add_ps(_mm512_mul_ps(zero, _mm512_set1_ps(kUnit)),
                                 _mm512_set1_ps(8388608.0f));
            scale = _mm512_mul_ps(scale, _mm512_set1_ps(1.0f / kUnit));
        }
    }

    template <int kField>
    __m512 field(__m512i unit, __m512i turned) const {
        constexpr int kVector = kField % int(kFieldVectors);
        if constexpr (kNumber == outrider::kFloat8) {
            // The exponent's and the fraction's places in float32; scales make up for its bias.
            const __m512i high = _mm512_slli_epi32(unit, 24 - 8 * kField);
            const __m512i bits = _mm512_and_si512(_mm512_srai_epi32(high, 4),
                                                  _mm512_set1_epi32(int32_t(0x87f00000)));
            return _mm512_mul_ps(_mm512_castsi512_ps(bits), scales[kVector]);
        } else {
            using Place = Field<kNumber, kField>;
            constexpr int kShift = Place::kShift;
            const __m512i word = kShift == 0    ? unit
                                 : kShift == 16 ? turned
                                 : kShift > 16  ? _mm512_ror_epi32(turned, kShift - 16)
                                                : _mm512_ror_epi32(unit, kShift);
            const __m512i bits = _mm512_ternarylogic_epi32(
                word, _mm512_set1_epi32(((1 << Place::kBits) - 1) << Place::kDigit),
                _mm512_set1_epi32(kMagic), 0xea);
            const __m512 value = _mm512_castsi512_ps(bits);
            const __m512 scale = scales[kVector], zero = zeros[kVector];
            if constexpr (kWay == kShort) return _mm512_fmsub_ps(value, scale, zero);
            const __m512 number = _mm512_sub_ps(value, zero);
            if constexpr (kWay == kShortMinimums) {
                return _mm512_fmsub_ps(number, scale, minimums[kVector]);
            }
            const __m512 scaled = _mm512_mul_ps(number, scale);
            return kWay == kMinimums ? _mm512_sub_ps(scaled, minimums[kVector]) : scaled;
        }
    }

    template <int kStep>
    void step(__m512i unit, __m512i turned, __m512i& left, __m512i& right) const {
        constexpr int kFirst = kStep * int(kFieldVectors);
        left = (__m512i)_mm512_cvtne2ps_pbh(field<kFirst + 1>(unit, turned),
                                            field<kFirst>(unit, turned));
        right = (__m512i)_mm512_cvtne2ps_pbh(field<kFirst + 3>(unit, turned),
                                             field<kFirst + 2>(unit, turned));
    }

    __m512 scales[kFieldVectors], zeros[kFieldVectors], minimums[kFieldVectors];
};

template <int kRows>
inline void add_step(__m512 (&left)[kRows], __m512 (&right)[kRows], const char* rows,
                     __m512i left_weights, __m512i right_weights) {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
        int32_t four_bytes;
        memcpy(&four_bytes, rows + 4 * row, sizeof four_bytes);
        const __m512i spread_row = _mm512_set1_epi32(four_bytes);
        left[row] = _mm512_dpbf16_ps(left[row], (__m512bh)spread_row, (__m512bh)left_weights);
        right[row] = _mm512_dpbf16_ps(right[row], (__m512bh)spread_row, (__m512bh)right_weights);
    }
}

inline void keep(char*& place, __m512i left, __m512i right) {
    _mm512_storeu_si512(place, left);
    _mm512_storeu_si512(place + 64, right);
    place += outrider::kPanelStepBytes;
}

template <int kNumber, Way kWay, int kRows, bool kKeeps>
void multiply(const StoredBlock& block) {
    using Decode = Decoder<kNumber, kWay>;
    __m512 left[kRows], right[kRows];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
        left[row] = _mm512_loadu_ps(block.sums + 32 * row);
        right[row] = _mm512_loadu_ps(block.sums + 32 * row + 16);
    }
    const StoredProduct& product = *block.product;
    const int64_t group_bytes = product.group_bytes();
    const int64_t first_byte = product.header_bytes() + block.first_unit * outrider::kUnitSize;
    const char *header = block.group, *rows = block.rows;
    char* decoded = block.decoded;
    for (int64_t group = 0; group < block.groups; ++group, header += group_bytes) {
        Decode decode;
        decode.read(header, product);
        const char* codes = header + first_byte;
        for (int64_t unit = 0; unit < block.units; ++unit, codes += outrider::kUnitSize) {
            if (kRows > kFewRows) _mm_prefetch(codes + kAhead, _MM_HINT_T0);
            const __m512i words = _mm512_loadu_si512(codes);
            const __m512i turned = _mm512_ror_epi32(words, 16);
            __m512i left_weights, right_weights;
            decode.template step<0>(words, turned, left_weights, right_weights);
            if (kKeeps) keep(decoded, left_weights, right_weights);
            add_step<kRows>(left, right, rows, left_weights, right_weights);
            rows += outrider::kStepBytes * kRows;
            if constexpr (Decode::kSteps == 2) {
                decode.template step<1>(words, turned, left_weights, right_weights);
                if (kKeeps) keep(decoded, left_weights, right_weights);
                add_step<kRows>(left, right, rows, left_weights, right_weights);
                rows += outrider::kStepBytes * kRows;
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
        _mm512_storeu_ps(block.sums + 32 * row, left[row]);
        _mm512_storeu_ps(block.sums + 32 * row + 16, right[row]);
    }
}

template <int kNumber, Way kWay>
void decode_block(const StoredBlock& block) {
    using Decode = Decoder<kNumber, kWay>;
    const StoredProduct& product = *block.product;
    const char* header = block.group;
    const int64_t first_byte = product.header_bytes() + block.first_unit * outrider::kUnitSize;
    char* decoded = block.decoded;
    for (int64_t group = 0; group < block.groups; ++group, header += product.group_bytes()) {
        Decode decode;
        decode.read(header, product);
        const char* codes = header + first_byte;
        for (int64_t unit = 0; unit < block.units; ++unit, codes += outrider::kUnitSize) {
            const __m512i words = _mm512_loadu_si512(codes);
            const __m512i turned = _mm512_ror_epi32(words, 16);
            __m512i left, right;
            decode.template step<0>(words, turned, left, right);
            keep(decoded, left, right);
            if constexpr (Decode::kSteps == 2) {
                decode.template step<1>(words, turned, left, right);
                keep(decoded, left, right);
            }
        }
    }
}

inline Way way_of(const StoredProduct& product) {
    if (product.has_minimums) return product.is_short ? kShortMinimums : kMinimums;
    return product.is_short ? kShort : kExact;
}

using Multiply = void (*)(const StoredBlock&);

template <int kNumber, Way kWay>
void multiply_rows(const StoredBlock& block, int64_t rows) {
    // Blocks are kept for the rows that follow a group, which then has at least half of the most.
    static constexpr Multiply kAlone[kMaxGroupRows] = {
        multiply<kNumber, kWay, 1, false>, multiply<kNumber, kWay, 2, false>,
        multiply<kNumber, kWay, 3, false>, multiply<kNumber, kWay, 4, false>,
        multiply<kNumber, kWay, 5, false>, multiply<kNumber, kWay, 6, false>,
        multiply<kNumber, kWay, 7, false>, multiply<kNumber, kWay, 8, false>};
    static constexpr Multiply kKeeping[kMaxGroupRows] = {
        nullptr,
        nullptr,
        nullptr,
        multiply<kNumber, kWay, 4, true>,
        multiply<kNumber, kWay, 5, true>,
        multiply<kNumber, kWay, 6, true>,
        multiply<kNumber, kWay, 7, true>,
        multiply<kNumber, kWay, 8, true>};
    (block.decoded ? kKeeping : kAlone)[rows - 1](block);
}

template <int kNumber>
void multiply_number(const StoredBlock& block, int64_t rows) {
    switch (way_of(*block.product)) {
        case kShort: return multiply_rows<kNumber, kShort>(block, rows);
        case kMinimums: return multiply_rows<kNumber, kMinimums>(block, rows);
        case kShortMinimums: return multiply_rows<kNumber, kShortMinimums>(block, rows);
        default: return multiply_rows<kNumber, kExact>(block, rows);
    }
}

void multiply_block(const StoredBlock& block, int64_t rows) {
    switch (block.product->number) {
        case outrider::kNumber4: return multiply_number<outrider::kNumber4>(block, rows);
        case outrider::kNumber8: return multiply_number<outrider::kNumber8>(block, rows);
        default: return multiply_rows<outrider::kFloat8, kExact>(block, rows);
    }
}

template <int kNumber>
void decode_number(const StoredBlock& block) {
    switch (way_of(*block.product)) {
        case kShort: return decode_block<kNumber, kShort>(block);
        case kMinimums: return decode_block<kNumber, kMinimums>(block);
        case kShortMinimums: return decode_block<kNumber, kShortMinimums>(block);
        default: return decode_block<kNumber, kExact>(block);
    }
}

void decode(const StoredBlock& block) {
    switch (block.product->number) {
        case outrider::kNumber4: return decode_number<outrider::kNumber4>(block);
        case outrider::kNumber8: return decode_number<outrider::kNumber8>(block);
        default: return decode_block<outrider::kFloat8, kExact>(block);
    }
}

constexpr outrider::StoredKernels kKernels = {kMaxGroupRows, multiply_block, decode};
constexpr outrider::StoredKernels kDecoding = {0, nullptr, decode};

}  // namespace

const outrider::StoredKernels* outrider::avx512_stored_kernels() { return &kKernels; }
const outrider::StoredKernels* outrider::avx512_fma_stored_kernels() { return &kDecoding; }
#else
const outrider::StoredKernels* outrider::avx512_stored_kernels() { return nullptr; }
const outrider::StoredKernels* outrider::avx512_fma_stored_kernels() { return nullptr; }
#endif
