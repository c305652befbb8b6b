// Decoding of stored weights over the vectors of lanes.h; products of decoded blocks are those of
// product_kernels.h.
#pragma once

#include "lanes.h"
#include "stored.h"

namespace {

using outrider::kFieldVectors;
using outrider::StoredBlock;
using outrider::StoredProduct;

constexpr int kParts = int(outrider::kUnitWords / kPartLanes);  // of a field vector
constexpr int kVectors = int(kFieldVectors) * kParts;           // of kPartLanes / 2 columns each

// Twice each of a panel's 32 numbers, which `part_at` gives from a column on.
template <class PartAt>
INLINE void spread(PartAt part_at, LanePart (&vectors)[kVectors]) {
    for (int each = 0; each < kVectors / 2; ++each) {
        doubled(part_at(each * kPartLanes), vectors[2 * each], vectors[2 * each + 1]);
    }
}

struct Header {
    Header(const char* header, const StoredProduct& product) {
        const int64_t number_bytes = product.scale_bytes() / outrider::kPanelColumns;
        const auto widened_at = [&](int64_t column) {
            const char* place = header + column * number_bytes;
            if (product.scale_type == outrider::kScaleFloat32) return loaded<LanePart>(place);
            if (product.scale_type == outrider::kScaleFloat16) {
                return from_float16(loaded<ShortPart>(place));
            }
            return from_bfloat16(loaded<HalfPart>(place));
        };
        spread(widened_at, scales);
        header += product.scale_bytes();
        constexpr float kMagic = 8388608.0f;
        for (LanePart& each : zeros) each = LanePart{} + (kMagic + float(product.zero));
        if (product.has_zeros) {
            const auto zeros_at = [&](int64_t column) {
                const auto shorts = loaded<ShortPart>(header + 2 * column);
                const auto wide = __builtin_convertvector(shorts, IntPart);
                return __builtin_convertvector(wide, LanePart) + kMagic;
            };
            spread(zeros_at, zeros);
            header += product.zero_bytes();
        }
        if (product.has_minimums) spread(widened_at, minimums);
    }
    LanePart scales[kVectors], zeros[kVectors], minimums[kVectors];
};

// The place of each field's bits, as in stored_avx512.cpp.
template <int kNumber, bool kHasMinimums>
void decode_block(const StoredBlock& block) {
    constexpr int kBits = kNumber == outrider::kNumber4 ? 4 : 8;
    constexpr int kTurn = kNumber == outrider::kNumber4 ? outrider::kTurn4 : outrider::kTurn8;
    const StoredProduct& product = *block.product;
    const char* header = block.group;
    const int64_t first_byte = product.header_bytes() + block.first_unit * outrider::kUnitSize;
    char* decoded = block.decoded;
    for (int64_t group = 0; group < block.groups; ++group, header += product.group_bytes()) {
        const Header numbers(header, product);
        const char* codes = header + first_byte;
        for (int64_t unit = 0; unit < block.units; ++unit, codes += outrider::kUnitSize) {
            for (int part = 0; part < kParts; ++part) {
                const auto words = loaded<BitPart>(codes + 4 * kPartLanes * part);
                for (int field = 0; field < 32 / kBits; ++field) {
                    const int vector = kParts * (field % int(kFieldVectors)) + part;
                    LanePart value;
                    if (kNumber == outrider::kFloat8) {
                        const IntPart high = IntPart(words << (24 - 8 * field));
                        value = LanePart((high >> 4) & int32_t(0x87f00000));
                    } else {
                        const int place = (kBits * field + kTurn) % 32;
                        const BitPart turned =
                            place ? words >> place | words << (32 - place) : words;
                        const BitPart bits = (turned & ((1u << kBits) - 1)) | 0x4b000000u;
                        value = LanePart(bits) - numbers.zeros[vector];
                    }
                    value = value * numbers.scales[vector];
                    if (kHasMinimums) value = value - numbers.minimums[vector];
                    const HalfPart halves = narrowed_part(nearest_bfloat16(BitPart(value)));
                    memcpy(decoded + field / int(kFieldVectors) * outrider::kPanelStepBytes +
                               2 * kPartLanes * vector,
                           &halves, sizeof halves);
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

}  // namespace
