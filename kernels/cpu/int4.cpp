// Packing, threads and the C functions of int4 products.
#include "int4.h"

#include <string.h>

#include <new>

#include "calls.h"
#include "parallel.h"

namespace outrider {
namespace {

const Int4Kernels* int4_kernels_of(int32_t instruction_set) {
    if (instruction_set == kAvx512) return avx512_int4_kernels();
    if (instruction_set == kAvx2) return avx2_int4_kernels();
    return nullptr;
}

int64_t group_bytes(int64_t group_size) {
    return kScaleBytes + group_size / kUnitK * kUnitBytes;
}

int64_t panel_bytes(int64_t in_features, int64_t group_size) {
    return in_features / group_size * group_bytes(group_size);
}

// ---- packing --------------------------------------------------------------------------------

struct Packing {
    const int8_t* codes;     // [out_features, in_features], -8 to 7
    const uint16_t* scales;  // bfloat16 [out_features, groups]
    int64_t out_features, in_features, group_size;
    char* panels;
    Tickets tickets;
};

// The byte of a unit in which a column's codes k and k + 4 are, k from 0 to 3.
int64_t place_of(int64_t column, int64_t k) { return column / 16 * 64 + column % 16 * 4 + k; }

void pack_column(const Packing& packing, int64_t row, int64_t column, char* panel) {
    const int64_t groups = packing.in_features / packing.group_size;
    const int8_t* codes = packing.codes + row * packing.in_features;
    for (int64_t group = 0; group < groups; ++group, panel += group_bytes(packing.group_size)) {
        memcpy(panel + 2 * column, packing.scales + row * groups + group, 2);
        char* unit = panel + kScaleBytes;
        for (int64_t k = 0; k < packing.group_size; k += kUnitK, codes += kUnitK) {
            for (int64_t each = 0; each < 4; ++each) {
                const int32_t low = codes[each] + kCodeOffset, high = codes[each + 4] + kCodeOffset;
                unit[place_of(column, each)] = char((low & 15) | (high & 15) << 4);
            }
            unit += kUnitBytes;
        }
    }
}

void pack_panels(void* data) {
    Packing& packing = *static_cast<Packing*>(data);
    const int64_t bytes = panel_bytes(packing.in_features, packing.group_size);
    for (int64_t panel; (panel = packing.tickets.take()) < packing.tickets.count;) {
        char* place = packing.panels + panel * bytes;
        memset(place, 0, size_t(bytes));
        const int64_t first = panel * kInt4Columns;
        for (int64_t column = 0; column < kInt4Columns; ++column) {
            if (first + column < packing.out_features) {
                pack_column(packing, first + column, column, place);
            }
        }
    }
}

// ---- the product ----------------------------------------------------------------------------

struct Call {
    const Int4Product& product;
    const Int4Kernels& kernels;
    int64_t num_rows;
    const uint16_t* x;
    char* rows;          // groups of rows, each int8 [in_features / 4][rows][4 bytes]
    int32_t* offsets;    // likewise, each [groups along k][rows]
    uint8_t* quantised;  // [rows, in_features]
    float* row_scales;
    uint16_t* y;
    Tickets parts, panels;
};

void multiply_panel(const Call& call, int64_t panel, const char* next) {
    const Int4Product& product = call.product;
    const int64_t groups = product.in_features / product.group_size;
    const int64_t first = panel * kInt4Columns, left = product.out_features - first;
    const Groups rows(call.num_rows, call.kernels.max_rows);
    alignas(kAlignment) float sums[8 * kInt4Columns];
    for (int64_t each = 0; each < rows.count; ++each) {
        const int64_t start = rows.start(each), size = rows.size(each);
        Int4Block block;
        block.panel =
            product.panels + panel * panel_bytes(product.in_features, product.group_size);
        block.rows = call.rows + start * product.in_features;
        block.offsets = call.offsets + start * groups;
        block.prefetch = each == 0 ? next : nullptr;
        block.groups = groups;
        block.units = product.group_size / kUnitK;
        block.sums = sums;
        call.kernels.multiply[size - 1](block);
        call.kernels.finish(sums, size, left < kInt4Columns ? left : kInt4Columns,
                            call.row_scales + start,
                            product.bias ? product.bias + first : nullptr,
                            call.y + start * product.out_features + first, product.out_features);
    }
}

void multiply_panels(void* data) {
    Call& call = *static_cast<Call*>(data);
    const int64_t bytes = panel_bytes(call.product.in_features, call.product.group_size);
    int64_t panel = call.panels.take();
    while (panel < call.panels.count) {
        const int64_t next = call.panels.take();
        multiply_panel(call, panel,
                       next < call.panels.count ? call.product.panels + next * bytes : nullptr);
        panel = next;
    }
}

// Puts rows into the order of their group, and sums up each part that shares scales.
void order_rows(const int8_t* quantised, int64_t in_features, int64_t group_size, int64_t size,
                char* rows, int32_t* offsets) {
    for (int64_t row = 0; row < size; ++row, quantised += in_features) {
        for (int64_t step = 0; step < in_features / 4; ++step) {
            memcpy(rows + (step * size + row) * 4, quantised + 4 * step, 4);
        }
        for (int64_t group = 0; group < in_features / group_size; ++group) {
            int32_t total = 0;
            for (int64_t k = 0; k < group_size; ++k) total += quantised[group * group_size + k];
            offsets[group * size + row] = -kCodeOffset * total;
        }
    }
}

void pack_parts(void* data) {
    Call& call = *static_cast<Call*>(data);
    const int64_t width = call.product.in_features, size = call.product.group_size;
    const Groups parts(call.num_rows, call.kernels.max_rows);
    for (int64_t part; (part = call.parts.take()) < call.parts.count;) {
        const int64_t start = parts.start(part), rows = parts.size(part);
        for (int64_t row = start; row < start + rows; ++row) {
            call.row_scales[row] =
                call.kernels.quantise(call.x + row * width, width, call.quantised + row * width);
        }
        order_rows(reinterpret_cast<int8_t*>(call.quantised) + start * width, width, size, rows,
                   call.rows + start * width, call.offsets + start * (width / size));
    }
}

// What a call lays into its memory, piece after piece, in bytes.
struct Pieces {
    Pieces(const Int4Product& product, int64_t rows)
        : rows(aligned(rows * product.in_features)),
          offsets(aligned(rows * (product.in_features / product.group_size) * 4)),
          scales(aligned(rows * 4)) {}
    const int64_t rows, offsets, scales;
};

}  // namespace

int64_t call_bytes(const Int4Product& product, int64_t rows) {
    if (!int4_kernels_of(product.instruction_set)) return -1;
    const Pieces pieces(product, rows);
    return aligned(sizeof(Call)) + 2 * pieces.rows + pieces.offsets + pieces.scales;
}

ProductCall prepare(const Int4Product& product, const uint16_t* x, int64_t rows, uint16_t* y,
                    char* memory) {
    const Int4Kernels& kernels = *int4_kernels_of(product.instruction_set);
    const Pieces pieces(product, rows);
    char* packed = memory + aligned(sizeof(Call));
    char* quantised = packed + pieces.rows;
    char* offsets = quantised + pieces.rows;
    Call* call = new (memory) Call{product,
                                   kernels,
                                   rows,
                                   x,
                                   packed,
                                   reinterpret_cast<int32_t*>(offsets),
                                   reinterpret_cast<uint8_t*>(quantised),
                                   reinterpret_cast<float*>(offsets + pieces.offsets),
                                   y,
                                   Tickets(Groups(rows, kernels.max_rows).count),
                                   Tickets(ceil_div(product.out_features, kInt4Columns))};
    return {pack_parts, multiply_panels, call, pieces.rows};
}

}  // namespace outrider

using namespace outrider;

EXPORT int64_t outrider_int4_bytes(int64_t out_features, int64_t in_features, int64_t group_size) {
    return ceil_div(out_features, kInt4Columns) * panel_bytes(in_features, group_size);
}

// codes: int8 [out_features, in_features], -8 to 7; scales: bfloat16 [out_features, groups];
// panels: outrider_int4_bytes.
EXPORT void outrider_int4_pack(const int8_t* codes, const uint16_t* scales, int64_t out_features,
                               int64_t in_features, int64_t group_size, char* panels,
                               int32_t threads) {
    Packing packing{codes,      scales, out_features, in_features,
                    group_size, panels, Tickets(ceil_div(out_features, kInt4Columns))};
    run_parallel(pack_panels, &packing, threads);
}
