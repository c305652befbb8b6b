// A decoder layer in one call: norm, projections, attention, norm, gated feed-forward.
//
// It calls the functions that callers could call one after the other, with the same bits; what it
// spares is the way back to Python between them.
#pragma once

#include "grouped.h"
#include "products.h"
#include "rows.h"
#include "stored.h"

namespace outrider {

constexpr int32_t kStored = 3;  // after kGrouped: the product is a StoredProduct
enum Projection : int32_t { kQkv = 0, kOutput = 1, kGateUp = 2, kDown = 3, kProjections = 4 };

// What stays of a layer; structs.py declares the fields in this order.
struct Layer {
    int64_t hidden, inner;
    int64_t num_query_heads, num_kv_heads, head_dim;
    const void* products[kProjections];
    int64_t max_threads[kProjections];
    int32_t kinds[kProjections];
    const float* attention_norm;  // [hidden], as in Norm
    const float* mlp_norm;
    const float* head_norm;  // or null, as in Heads
    const float* sinks;      // or null, as in Attention
    float attention_offset, mlp_offset, head_offset;
    float scale, softcap;  // of attention
    int32_t activation;
};

// What changes from layer to layer and from pass to pass.
struct LayerCall {
    int64_t num_rows;
    uint16_t* update;    // [rows, hidden]; in: what the layer before adds, out: what this one does
    uint16_t* residual;  // [rows, hidden]
    const int64_t *positions, *slots;
    const uint16_t* table;  // as in Heads
    int64_t num_positions, num_slots;
    uint16_t *keys, *values;
    const Attention* attention;  // with the fields that say what each row sees
    const LoraRows* lora;        // or null
    int64_t lora_site;           // of the first projection; the others follow
    uint16_t* tap;               // rows of the residual stream in front of the layer, or null
    int64_t tap_stride;
    int32_t is_first;  // nothing is added to the residual stream before
};

// Copies rows of `width` values that stand one behind the other to rows `stride` values apart.
void copy_rows(const uint16_t* from, int64_t rows, int64_t width, uint16_t* to, int64_t stride);

// y = x @ weight.T + bias by a product of any kind. Returns 0, or -1 where memory is short.
int32_t multiply_any(int32_t kind, const void* product, const uint16_t* x, int64_t rows,
                     uint16_t* y, int32_t threads);

// Returns 0; -1 where memory is short; -2, before anything is kept, for a position or a slot that
// does not exist.
int32_t run_layer(const Layer* layer, const LayerCall* call, int32_t instruction_set,
                  int32_t threads);

}  // namespace outrider

extern "C" {
int32_t outrider_multiply(const outrider::Product*, const uint16_t*, int64_t, uint16_t*, int32_t);
int32_t outrider_grouped_multiply(const outrider::GroupedProduct*, const uint16_t*, int64_t, uint16_t*,
                               int32_t);
int32_t outrider_stored_multiply(const outrider::StoredProduct*, const uint16_t*, int64_t,
                                 uint16_t*, int32_t);
int32_t outrider_normalise(const outrider::Norm*, int32_t, int32_t);
int32_t outrider_gate(const outrider::Gate*, int32_t, int32_t);
int32_t outrider_place(const outrider::Heads*, int32_t, int32_t);
int32_t outrider_attend(const outrider::Attention*, int32_t, int32_t);
int32_t outrider_lora(const outrider::LoraRows*, int64_t, const uint16_t*, int64_t, uint16_t*,
                      int64_t, int32_t, int32_t);
}
