// Packing, threads and the C functions of int4 products.
#include "int4.h"

#include <string.h>

#include "parallel.h"
#include "products.h"

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
    const char* rows;        // groups of rows, each int8 [in_features / 4][rows][4 bytes]
    const int32_t* offsets;  // likewise, each [groups along k][rows]
    const float* row_scales;
    uint16_t* y;
    Tickets panels;
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

}  // namespace
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

// y = x @ weight.T + bias; x: bfloat16 [rows, in_features], y: bfloat16 [rows, out_features], both
// contiguous. Returns 0, or -1 where memory is short or the instruction set is not known.
EXPORT int32_t outrider_int4_multiply(const Int4Product* product, const uint16_t* x, int64_t rows,
                                      uint16_t* y, int32_t threads) {
    const Int4Kernels* kernels = int4_kernels_of(product->instruction_set);
    if (!kernels) return -1;
    const int64_t width = product->in_features, groups = width / product->group_size;
    const int64_t row_bytes = aligned(rows * width), offset_bytes = aligned(rows * groups * 4);
    Scratch scratch(row_bytes + offset_bytes + aligned(rows * 4) + kernels->max_rows * width);
    if (!scratch.data()) return -1;
    char* packed = scratch.data();
    int32_t* offsets = reinterpret_cast<int32_t*>(packed + row_bytes);
    float* scales = reinterpret_cast<float*>(packed + row_bytes + offset_bytes);
    char* quantised = packed + row_bytes + offset_bytes + aligned(rows * 4);
    const Groups parts(rows, kernels->max_rows);
    for (int64_t part = 0; part < parts.count; ++part) {
        const int64_t start = parts.start(part), size = parts.size(part);
        for (int64_t row = 0; row < size; ++row) {
            scales[start + row] =
                kernels->quantise(x + (start + row) * width, width,
                                  reinterpret_cast<uint8_t*>(quantised) + row * width);
        }
        order_rows(reinterpret_cast<int8_t*>(quantised), width, product->group_size, size,
                   packed + start * width, offsets + start * groups);
    }
    Call call{*product, *kernels, rows,   packed,
              offsets,  scales,   y,      Tickets(ceil_div(product->out_features, kInt4Columns))};
    run_parallel(multiply_panels, &call, threads);
    return 0;
}
