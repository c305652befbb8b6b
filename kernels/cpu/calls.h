// Calls of products in two steps, of which several can share their parallel regions.
#pragma once

#include "grouped.h"
#include "products.h"

namespace outrider {

// A product with rows, laid out in memory that the caller gives and frees. First rows are packed,
// then panels are multiplied; any number of threads may join a step, and each takes what is left.
struct ProductCall {
    void (*pack)(void* data);
    void (*multiply)(void* data);
    void* data;
    int64_t pack_bytes;  // of the rows that are packed, 0 for none
};

// Bytes that a call takes, a multiple of kAlignment; -1 where the instruction set is not known.
int64_t call_bytes(const Product& product, int64_t rows);
int64_t call_bytes(const GroupedProduct& product, int64_t rows);

// x: bfloat16 [rows, in_features]; y: bfloat16 [rows, out_features], which is written.
ProductCall prepare(const Product& product, const uint16_t* x, int64_t rows, uint16_t* y,
                    char* memory);
ProductCall prepare(const GroupedProduct& product, const uint16_t* x, int64_t rows, uint16_t* y,
                    char* memory);

// y = each product's, with as many rows of x as `rows` says, one behind the other, in two parallel
// regions for all. products: of one kind, Product or (kGrouped) GroupedProduct. Returns 0, or -1 where
// memory is short or an instruction set is not known.
int32_t multiply_each(int32_t kind, const void* const* products, const int64_t* rows,
                      int64_t count, const uint16_t* x, uint16_t* y, int64_t threads);

}  // namespace outrider
