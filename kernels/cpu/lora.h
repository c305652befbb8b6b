// Low-rank products that are added to rows of projections, each row by its own adapter.
//
// A row and a rank, or a row and a column, are summed in an order that only the adapter decides, so
// a row's bits depend neither on its company nor on threads (as in rows.h).
#pragma once

#include <stdint.h>

namespace outrider {

// y[:, start to start + size] += scale * (x @ a.T) @ b; structs.py declares the fields of
// these structures in this order.
struct LoraPart {
    const uint16_t* a;  // bfloat16 [rank, width of x]
    const uint16_t* b;  // bfloat16 [rank, size]
    int64_t start, size, rank;
    float scale;
};

// The parts that an adapter adds to one projection.
struct LoraSite {
    const LoraPart* parts;
    int64_t num_parts;
};

// The rows of a pass that have an adapter, adapter after adapter.
struct LoraRows {
    int64_t num_adapters;
    const LoraSite* const* adapters;  // [num_adapters], the sites of each
    const int64_t* starts;            // [num_adapters + 1], places in `rows`
    const int32_t* rows;              // numbers of rows in the pass
};

// One part and the rows of its adapter, as a kernel gets them.
struct LoraTile {
    const LoraPart& part;
    const int32_t* rows;  // [num_rows]
    int64_t num_rows;
    const uint16_t* x;  // of the pass, [., width]
    int64_t width;
    uint16_t* y;  // of the pass, [., y_stride]
    int64_t y_stride;
    float* inner;  // [num_rows, inner_stride]: scale * (x @ a.T)
    int64_t inner_stride;
};

}  // namespace outrider
