// Packing, threads and the C functions of grouped products.
#include "grouped.h"

#include <string.h>

#include <new>

#include "calls.h"
#include "packing.h"

namespace outrider {
namespace {

// ---- packing --------------------------------------------------------------------------------

void pack_group(const GroupedProduct& product, const uint8_t* codes, int64_t column, char* units) {
    const bool has_four_bits = product.number == kNumber4;
    char* place = units + 4 * column;
    for (int64_t at = 0; at < product.units(); ++at, place += kUnitBytes) {
        for (int64_t each = 0; each < 4; ++each) {
            place[each] = char(has_four_bits ? codes[each] | codes[each + 4] << 4 : codes[each]);
        }
        codes += product.unit_k();
    }
}

// ---- the product ----------------------------------------------------------------------------

struct Call {
    const GroupedProduct& product;
    const GroupedKernels& kernels;
    int64_t num_rows;
    const uint16_t* x;
    char* rows;            // parts of rows, each int8 [in_features / 4][rows][4 bytes]
    RowGroup* row_groups;  // likewise, each [groups along k][rows]
    uint8_t* quantised;    // [rows, in_features]
    float* row_scales;     // [rows], where groups have none
    uint16_t* y;
    Tickets parts, panels;
};

void multiply_panel(const Call& call, int64_t panel) {
    const GroupedProduct& product = call.product;
    const int64_t first = panel * kPanelColumns, left = product.out_features - first;
    const Groups rows(call.num_rows, call.kernels.max_rows);
    alignas(kAlignment) float sums[8 * kPanelColumns];
    for (int64_t each = 0; each < rows.count; ++each) {
        const int64_t start = rows.start(each), size = rows.size(each);
        GroupedBlock block;
        block.product = &product;
        block.panel = product.panels + panel * product.panel_bytes();
        block.rows = call.rows + start * product.in_features;
        block.row_groups = call.row_groups + start * product.groups();
        block.sums = sums;
        call.kernels.multiply[product.number][product.has_row_groups][size - 1](block);
        call.kernels.finish(sums, size, left < kPanelColumns ? left : kPanelColumns,
                            product.has_row_groups ? nullptr : call.row_scales + start,
                            product.bias ? product.bias + first : nullptr,
                            call.y + start * product.out_features + first, product.out_features);
    }
}

void multiply_panels(void* data) {
    Call& call = *static_cast<Call*>(data);
    for (int64_t panel; (panel = call.panels.take()) < call.panels.count;) {
        multiply_panel(call, panel);
    }
}

// Rounds a row, with a scale for each group or one for all.
void quantise(const Call& call, int64_t row, RowGroup* groups, int64_t stride) {
    const GroupedProduct& product = call.product;
    const int64_t width = product.in_features, size = product.group_size;
    const uint16_t* x = call.x + row * width;
    uint8_t* codes = call.quantised + row * width;
    if (!product.has_row_groups) call.row_scales[row] = call.kernels.quantise(x, width, codes);
    for (int64_t k = 0; k < width; k += size, groups += stride) {
        groups->scale = product.has_row_groups ? call.kernels.quantise(x + k, size, codes + k) : 1;
        int32_t total = 0;
        for (int64_t each = k; each < k + size; ++each) total += int8_t(codes[each]);
        groups->total = total;
        groups->scaled_total = float(total) * groups->scale;
    }
}

// Puts rounded rows, in_features bytes each, into the order of their part.
void order_rows(const uint8_t* quantised, int64_t in_features, int64_t size, char* rows) {
    for (int64_t row = 0; row < size; ++row, quantised += in_features) {
        for (int64_t step = 0; step < in_features / 4; ++step) {
            memcpy(rows + (step * size + row) * 4, quantised + 4 * step, 4);
        }
    }
}

void pack_parts(void* data) {
    Call& call = *static_cast<Call*>(data);
    const int64_t width = call.product.in_features, groups = call.product.groups();
    const Groups parts(call.num_rows, call.kernels.max_rows);
    for (int64_t part; (part = call.parts.take()) < call.parts.count;) {
        const int64_t start = parts.start(part), rows = parts.size(part);
        for (int64_t row = 0; row < rows; ++row) {
            quantise(call, start + row, call.row_groups + start * groups + row, rows);
        }
        order_rows(call.quantised + start * width, width, rows, call.rows + start * width);
    }
}

// What a call lays into its memory, piece after piece, in bytes.
struct Pieces {
    Pieces(const GroupedProduct& product, int64_t rows)
        : rows(aligned(rows * product.in_features)),
          groups(aligned(rows * product.groups() * int64_t(sizeof(RowGroup)))),
          scales(aligned(rows * 4)) {}
    const int64_t rows, groups, scales;
};

}  // namespace

int64_t call_bytes(const GroupedProduct& product, int64_t rows) {
    if (!grouped_kernels_of(product.instruction_set)) return -1;
    const Pieces pieces(product, rows);
    return aligned(sizeof(Call)) + 2 * pieces.rows + pieces.groups + pieces.scales;
}

ProductCall prepare(const GroupedProduct& product, const uint16_t* x, int64_t rows, uint16_t* y,
                    char* memory) {
    const GroupedKernels& kernels = *grouped_kernels_of(product.instruction_set);
    const Pieces pieces(product, rows);
    char* packed = memory + aligned(sizeof(Call));
    char* quantised = packed + pieces.rows;
    char* groups = quantised + pieces.rows;
    Call* call = new (memory) Call{product,
                                   kernels,
                                   rows,
                                   x,
                                   packed,
                                   reinterpret_cast<RowGroup*>(groups),
                                   reinterpret_cast<uint8_t*>(quantised),
                                   reinterpret_cast<float*>(groups + pieces.groups),
                                   y,
                                   Tickets(Groups(rows, kernels.max_rows).count),
                                   Tickets(ceil_div(product.out_features, kPanelColumns))};
    return {pack_parts, multiply_panels, call, pieces.rows};
}

}  // namespace outrider

using namespace outrider;

// What a weight's panels take; of the product only the sizes and types are read.
EXPORT int64_t outrider_grouped_bytes(const GroupedProduct* product) {
    return ceil_div(product->out_features, kPanelColumns) * product->panel_bytes();
}

// codes: [out_features, in_features]; scales, zeros, minimums: [out_features, groups], of the types
// that the product names, null where it has none; panels: outrider_grouped_bytes, aligned to 64.
EXPORT void outrider_grouped_pack(const GroupedProduct* product, const uint8_t* codes,
                                  const char* scales, const int16_t* zeros, const char* minimums,
                                  char* panels, int32_t threads) {
    Packing<GroupedProduct> packing{
        *product,   codes,  scales, zeros, minimums,
        pack_group, panels, Tickets(ceil_div(product->out_features, kPanelColumns))};
    run_parallel(pack_panels<GroupedProduct>, &packing, threads);
}
