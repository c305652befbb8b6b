// A decoder layer in one call.
#include "layer.h"

#include <string.h>

#include "parallel.h"

namespace outrider {
namespace {

// A thread more for so many elements, as in compiled_rows.py.
constexpr int64_t kElementsPerThread = 32 << 10;

class LayerRun {
   public:
    LayerRun(const Layer& layer, const LayerCall& call, int32_t instruction_set, int32_t threads)
        : layer_(layer), call_(call), set_(instruction_set), threads_(threads) {}

    int64_t memory_bytes() const {
        return aligned(rows() * layer_.hidden * 2) * 2 + aligned(rows() * projected() * 2) +
               aligned(rows() * queries() * 2) * 2 + aligned(rows() * layer_.inner * 2) * 3;
    }

    int32_t run(char* memory) {
        uint16_t* normed = take(memory, layer_.hidden);
        uint16_t* attended_up = take(memory, layer_.hidden);
        uint16_t* projected_rows = take(memory, projected());
        uint16_t* query = take(memory, queries());
        uint16_t* attended = take(memory, queries());
        uint16_t* gate_up = take(memory, 2 * layer_.inner);
        uint16_t* gated = take(memory, layer_.inner);
        int32_t failed = normalise(call_.update, !call_.is_first, layer_.attention_norm,
                                   layer_.attention_offset, normed);
        if (!failed && call_.tap) {
            copy_rows(call_.residual, rows(), layer_.hidden, call_.tap, call_.tap_stride);
        }
        if (!failed) failed = project(kQkv, normed, layer_.hidden, projected_rows, projected());
        if (!failed) failed = place(projected_rows, query);
        if (!failed) failed = attend(query, attended);
        if (!failed) failed = project(kOutput, attended, queries(), attended_up, layer_.hidden);
        if (!failed) {
            failed = normalise(attended_up, true, layer_.mlp_norm, layer_.mlp_offset, normed);
        }
        if (!failed) failed = project(kGateUp, normed, layer_.hidden, gate_up, 2 * layer_.inner);
        if (!failed) failed = gate(gate_up, gated);
        if (!failed) failed = project(kDown, gated, layer_.inner, call_.update, layer_.hidden);
        return failed;
    }

   private:
    int64_t rows() const { return call_.num_rows; }
    int64_t queries() const { return layer_.num_query_heads * layer_.head_dim; }
    int64_t projected() const {
        return (layer_.num_query_heads + 2 * layer_.num_kv_heads) * layer_.head_dim;
    }

    uint16_t* take(char*& memory, int64_t width) const {
        uint16_t* piece = reinterpret_cast<uint16_t*>(memory);
        memory += aligned(rows() * width * 2);
        return piece;
    }

    int32_t threads_for(int64_t elements) const {
        const int64_t wanted = 1 + elements / kElementsPerThread;
        return int32_t(wanted < threads_ ? wanted : threads_);
    }

    int32_t normalise(const uint16_t* x, bool is_added, const float* weight, float offset,
                      uint16_t* y) const {
        Norm norm;
        norm.num_rows = rows();
        norm.width = norm.x_stride = norm.residual_stride = layer_.hidden;
        norm.weight_rows = 1;
        norm.x = is_added ? x : call_.residual;
        norm.residual = is_added ? call_.residual : nullptr;
        norm.weight = weight;
        norm.y = y;
        norm.offset = offset;
        return outrider_normalise(&norm, set_, threads_for(rows() * layer_.hidden));
    }

    // The product, and what the rows' adapters add to it. x: [rows, width], y: [rows, columns].
    int32_t project(Projection which, const uint16_t* x, int64_t width, uint16_t* y,
                    int64_t columns) const {
        const int32_t failed = multiply(which, x, y);
        if (failed || !call_.lora) return failed;
        return outrider_lora(call_.lora, call_.lora_site + which, x, width, y, columns, set_,
                             threads_);
    }

    int32_t multiply(Projection which, const uint16_t* x, uint16_t* y) const {
        const int64_t most = layer_.max_threads[which];
        const int32_t threads = int32_t(most < threads_ ? most : threads_);
        return multiply_any(layer_.kinds[which], layer_.products[which], x, rows(), y, threads);
    }

    int32_t place(const uint16_t* x, uint16_t* query) const {
        Heads heads;
        heads.num_rows = rows();
        heads.num_query_heads = layer_.num_query_heads;
        heads.num_kv_heads = layer_.num_kv_heads;
        heads.head_dim = layer_.head_dim;
        heads.stride = projected();
        heads.x = x;
        heads.positions = call_.positions;
        heads.num_positions = call_.num_positions;
        heads.table = call_.table;
        heads.weight = layer_.head_norm;
        heads.slots = call_.slots;
        heads.num_slots = call_.num_slots;
        heads.query = query;
        heads.keys = call_.keys;
        heads.values = call_.values;
        heads.offset = layer_.head_offset;
        return outrider_place(&heads, set_, threads_for(rows() * projected()));
    }

    int32_t attend(const uint16_t* query, uint16_t* output) const {
        Attention attention = *call_.attention;
        attention.num_query_heads = layer_.num_query_heads;
        attention.num_kv_heads = layer_.num_kv_heads;
        attention.head_dim = layer_.head_dim;
        attention.query = query;
        attention.keys = call_.keys;
        attention.values = call_.values;
        attention.output = output;
        attention.sinks = layer_.sinks;
        attention.scale = layer_.scale;
        attention.softcap = layer_.softcap;
        return attention.num_tiles ? outrider_attend(&attention, set_, threads_) : 0;
    }

    int32_t gate(const uint16_t* gate_up, uint16_t* gated) const {
        Gate gate;
        gate.num_rows = rows();
        gate.width = layer_.inner;
        gate.stride = 2 * layer_.inner;
        gate.x = gate_up;
        gate.y = gated;
        gate.activation = layer_.activation;
        return outrider_gate(&gate, set_, threads_for(rows() * layer_.inner));
    }

    const Layer& layer_;
    const LayerCall& call_;
    const int32_t set_, threads_;
};

}  // namespace
}  // namespace outrider

using namespace outrider;

void outrider::copy_rows(const uint16_t* from, int64_t rows, int64_t width, uint16_t* to,
                         int64_t stride) {
    for (int64_t row = 0; row < rows; ++row) {
        memcpy(to + row * stride, from + row * width, size_t(width) * 2);
    }
}

int32_t outrider::multiply_any(int32_t kind, const void* product, const uint16_t* x, int64_t rows,
                               uint16_t* y, int32_t threads) {
    if (kind == kGrouped) {
        return outrider_grouped_multiply(static_cast<const GroupedProduct*>(product), x, rows, y, threads);
    }
    if (kind == kStored) {
        return outrider_stored_multiply(static_cast<const StoredProduct*>(product), x, rows, y,
                                        threads);
    }
    return outrider_multiply(static_cast<const Product*>(product), x, rows, y, threads);
}

int32_t outrider::run_layer(const Layer* layer, const LayerCall* call, int32_t instruction_set,
                            int32_t threads) {
    LayerRun run(*layer, *call, instruction_set, threads);
    Scratch scratch(run.memory_bytes());
    return scratch.data() ? run.run(scratch.data()) : -1;
}
