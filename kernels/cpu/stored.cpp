// Packing, threads and the C functions of products with stored weights.
#include "stored.h"

#include <string.h>

#include "packing.h"

namespace outrider {
namespace {

// ---- packing --------------------------------------------------------------------------------

uint32_t turned(uint32_t word, int bits) {
    bits %= 32;
    return bits ? word << bits | word >> (32 - bits) : word;
}

void pack_group(const StoredProduct& product, const uint8_t* codes, int64_t column, char* units) {
    const int64_t bits = product.number == kNumber4 ? 4 : 8, unit_k = product.unit_k();
    const int turn = product.number == kNumber4 ? kTurn4 : product.number == kNumber8 ? kTurn8 : 0;
    for (int64_t at = 0; at < product.units(); ++at, units += kUnitSize, codes += unit_k) {
        for (int64_t k = 0; k < unit_k; ++k) {
            const int64_t word = column % 8 * 2 + k % 2;
            const int64_t field = k / 2 * kFieldVectors + column / 8;
            uint32_t place;
            memcpy(&place, units + word * 4, sizeof place);
            place |= turned(codes[k], int(field * bits) + turn);
            memcpy(units + word * 4, &place, sizeof place);
        }
    }
}

// ---- the product ----------------------------------------------------------------------------

struct Call {
    const StoredProduct& product;
    const StoredKernels& kernels;
    const Kernels& bfloat16;
    int64_t num_rows, steps, max_group_rows;
    const char* rows;  // as in products.cpp
    uint16_t* y;
    char* decoded;  // [threads][steps][32 columns][4 bytes], or null
    Tickets panels, threads;
};

// A panel in parts of at most kBlockSteps steps; `next` is false after the last one.
class Parts {
   public:
    Parts(const StoredProduct& product, const char* panel) : product_(product) {
        const int64_t unit_steps = product.unit_k() / 2;
        const int64_t most = kBlockSteps / unit_steps;
        block.product = &product;
        block.group = panel;
        block.first_unit = 0;
        block.units = product.units() < most ? product.units() : most;
        block.groups = most / block.units;
        if (product.units() > most) block.groups = 1;
        left_ = product.groups();
        if (block.groups > left_) block.groups = left_;
    }
    int64_t steps() const { return block.groups * block.units * product_.unit_k() / 2; }
    bool next() {
        if (product_.units() > block.first_unit + block.units) {  // the rest of a long group
            block.first_unit += block.units;
            const int64_t rest = product_.units() - block.first_unit;
            if (rest < block.units) block.units = rest;
            return true;
        }
        block.group += block.groups * product_.group_bytes();
        left_ -= block.groups;
        if (!left_) return false;
        if (block.first_unit) {
            const int64_t most = kBlockSteps / (product_.unit_k() / 2);
            block.first_unit = 0;
            block.units = product_.units() < most ? product_.units() : most;
        }
        if (block.groups > left_) block.groups = left_;
        return true;
    }
    StoredBlock block;

   private:
    const StoredProduct& product_;
    int64_t left_;
};

void multiply_decoded(const Call& call, const char* weights, int64_t steps, const char* rows,
                      int64_t size, float* sums) {
    Block block;
    block.weights = block.prefetch = weights;
    block.prefetch_stride = 0;
    block.rows = rows;
    block.steps = steps;
    block.sums = sums;
    call.bfloat16.multiply[size - 1](block);
}

// Multiplies a chunk of rows: each part is decoded once, for the first group of rows.
void multiply_chunk(const Call& call, int64_t rows, const char* panel, float* sums) {
    alignas(kAlignment) char decoded[kBlockSteps * kPanelStepBytes];
    const Groups groups(rows, call.max_group_rows);
    memset(sums, 0, size_t(rows * kPanelStepBytes));
    if (groups.count == 1 && call.kernels.multiply) {
        StoredBlock all{&call.product, panel,     call.product.groups(), 0, call.product.units(),
                        nullptr,       call.rows, sums};
        call.kernels.multiply(all, rows);
        return;
    }
    Parts parts(call.product, panel);
    int64_t step = 0;
    do {
        parts.block.decoded = decoded;
        const int64_t steps = parts.steps();
        int64_t group = 0;
        if (call.kernels.multiply) {
            const int64_t size = groups.size(0);
            parts.block.rows = call.rows + step * size * kStepBytes;
            parts.block.sums = sums;
            call.kernels.multiply(parts.block, size);
            group = 1;
        } else {
            call.kernels.decode(parts.block);
        }
        for (; group < groups.count; ++group) {
            const int64_t start = groups.start(group), size = groups.size(group);
            multiply_decoded(call, decoded, steps,
                             call.rows + (start * call.steps + step * size) * kStepBytes, size,
                             sums + start * kPanelColumns);
        }
        step += steps;
    } while (parts.next());
}

// Multiplies one of several chunks with a panel that is decoded already.
void multiply_decoded_chunk(const Call& call, int64_t first_row, int64_t rows,
                            const char* decoded, float* sums) {
    const Groups groups(rows, call.max_group_rows);
    const char* chunk = call.rows + first_row * call.steps * kStepBytes;
    memset(sums, 0, size_t(rows * kPanelStepBytes));
    for (int64_t step = 0; step < call.steps; step += kBlockSteps) {
        const int64_t left = call.steps - step;
        const int64_t steps = left < kBlockSteps ? left : kBlockSteps;
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t start = groups.start(group), size = groups.size(group);
            multiply_decoded(call, decoded + step * kPanelStepBytes, steps,
                             chunk + (start * call.steps + step * size) * kStepBytes, size,
                             sums + start * kPanelColumns);
        }
    }
}

void finish_chunk(const Call& call, int64_t first_row, int64_t rows, int64_t panel,
                  const float* sums) {
    const int64_t first = panel * kPanelColumns;
    const int64_t left = call.product.out_features - first;
    Outputs outputs{};
    outputs.sums = sums;
    outputs.rows = rows;
    outputs.columns = left < kPanelColumns ? left : kPanelColumns;
    outputs.bias = call.product.bias ? call.product.bias + first : nullptr;
    outputs.y = call.y + first_row * call.product.out_features + first;
    outputs.y_stride = call.product.out_features;
    call.bfloat16.finish(outputs);
}

void multiply_panels(void* data) {
    Call& call = *static_cast<Call*>(data);
    alignas(kAlignment) float sums[kChunkRows * kPanelColumns];
    char* decoded =
        call.decoded ? call.decoded + call.threads.take() * call.steps * kPanelStepBytes : nullptr;
    const int64_t bytes = call.product.panel_bytes();
    for (int64_t panel; (panel = call.panels.take()) < call.panels.count;) {
        const char* codes = call.product.panels + panel * bytes;
        if (!decoded) {
            multiply_chunk(call, call.num_rows, codes, sums);
            finish_chunk(call, 0, call.num_rows, panel, sums);
            continue;
        }
        StoredBlock all{&call.product, codes,   call.product.groups(), 0, call.product.units(),
                        decoded,       nullptr, nullptr};
        call.kernels.decode(all);
        for (int64_t row = 0; row < call.num_rows; row += kChunkRows) {
            const int64_t left = call.num_rows - row;
            const int64_t rows = left < kChunkRows ? left : kChunkRows;
            multiply_decoded_chunk(call, row, rows, decoded, sums);
            finish_chunk(call, row, rows, panel, sums);
        }
    }
}

}  // namespace
}  // namespace outrider

using namespace outrider;

// What a weight's panels take; of the product only the sizes and types are read.
EXPORT int64_t outrider_stored_bytes(const StoredProduct* product) {
    return ceil_div(product->out_features, kPanelColumns) * product->panel_bytes();
}

// codes: [out_features, in_features]; scales, zeros, minimums: [out_features, groups], of the types
// that the product names, null where it has none; panels: outrider_stored_bytes, aligned to 64.
EXPORT void outrider_stored_pack(const StoredProduct* product, const uint8_t* codes,
                                 const char* scales, const int16_t* zeros, const char* minimums,
                                 char* panels, int32_t threads) {
    Packing<StoredProduct> packing{
        *product,   codes,  scales, zeros, minimums,
        pack_group, panels, Tickets(ceil_div(product->out_features, kPanelColumns))};
    run_parallel(pack_panels<StoredProduct>, &packing, threads);
}

// As outrider_multiply.
EXPORT int32_t outrider_stored_multiply(const StoredProduct* product, const uint16_t* x,
                                        int64_t rows, uint16_t* y, int32_t threads) {
    const StoredKernels* kernels = stored_kernels_of(product->instruction_set);
    const Kernels* bfloat16 = kernels_of(kBfloat16, product->instruction_set);
    if (!kernels || !bfloat16) return -1;
    const int64_t row_bytes = 2 * product->in_features;
    const int64_t steps = row_bytes / kStepBytes;  // groups are whole units
    const bool has_chunks = rows > kChunkRows;
    const int64_t max_group_rows =
        has_chunks || !kernels->multiply ? bfloat16->max_group_rows : kernels->max_group_rows;
    const int64_t packed_bytes = rows == 1 ? 0 : aligned(rows * row_bytes);
    Scratch scratch(packed_bytes + (has_chunks ? threads * steps * kPanelStepBytes : 0));
    if (!scratch.data()) return -1;
    const char* from = reinterpret_cast<const char*>(x);
    if (rows > 1) pack_rows(from, row_bytes, rows, steps, max_group_rows, scratch.data());
    Call call{*product,
              *kernels,
              *bfloat16,
              rows,
              steps,
              max_group_rows,
              rows == 1 ? from : scratch.data(),
              y,
              has_chunks ? scratch.data() + packed_bytes : nullptr,
              Tickets(ceil_div(product->out_features, kPanelColumns)),
              Tickets(threads)};
    run_parallel(multiply_panels, &call, threads);
    return 0;
}
