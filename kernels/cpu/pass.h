// Embedding, decoder layers, last norm and head in one call.
#pragma once

#include "layer.h"

namespace outrider {

// What stays of a model; compiled_pass.py declares the fields of these structures in this order.
struct Model {
    int64_t hidden, vocab_size;
    const uint16_t* embedding;  // bfloat16 [vocab_size, hidden]
    const float* norm;          // [hidden], as in Norm
    const void* head;           // a product
    int64_t head_features, head_threads;
    const Layer* const* layers;
    float embedding_scale, norm_offset;
    int32_t head_kind;
};

// Where a layer finds its rotation and its cache.
struct LayerCache {
    uint16_t *keys, *values;
    const uint16_t* table;  // as in Heads
    int64_t num_positions, num_slots;
    int64_t has_window;
};

// A pass over rows. A pair's second is for layers that have a window, the first for the others.
struct Pass {
    int64_t num_rows, num_layers;
    const int64_t *token_ids, *positions;
    const int64_t* slots[2];
    const Attention* attention[2];
    const LayerCache* caches;  // [num_layers]
    const LoraRows* lora;      // or null
    // Null: the layers run on `residual` only, and leave in `update` what the last of them adds.
    float* logits;           // [num_wanted, head_features]
    uint16_t* last_hidden;   // bfloat16 [num_wanted, hidden], after the last norm
    const int64_t* wanted;   // rows; null for all of them
    int64_t num_wanted;
    uint16_t *residual, *update;  // [num_rows, hidden]
    // Tap k is the residual stream in front of layer k; behind all layers, what the head reads.
    const int64_t* tap_layers;  // [num_taps], each once
    int64_t num_taps;
    uint16_t* taps;  // bfloat16 [num_rows, num_taps * hidden]
};

}  // namespace outrider
