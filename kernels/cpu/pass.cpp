// A whole pass in one call: the functions that callers could call, with the same bits.
#include "pass.h"

#include <string.h>

#include "parallel.h"
#include "rounding.h"

namespace outrider {
namespace {

constexpr int32_t kNoSuchPlace = -2;

class PassRun {
   public:
    PassRun(const Model& model, const Pass& pass, int32_t instruction_set, int32_t threads)
        : model_(model), pass_(pass), set_(instruction_set), threads_(threads) {}

    int32_t run() {
        if (!pass_.logits) return run_layers(pass_.residual, pass_.update);
        for (int64_t each = 0; pass_.wanted && each < pass_.num_wanted; ++each) {
            if (pass_.wanted[each] < 0 || pass_.wanted[each] >= pass_.num_rows) return kNoSuchPlace;
        }
        const int64_t rows_bytes = aligned(pass_.num_rows * model_.hidden * 2);
        Scratch scratch(3 * rows_bytes + pass_.num_wanted * model_.head_features * 2);
        if (!scratch.data()) return -1;
        uint16_t* residual = reinterpret_cast<uint16_t*>(scratch.data());
        uint16_t* update = reinterpret_cast<uint16_t*>(scratch.data() + rows_bytes);
        uint16_t* normed = reinterpret_cast<uint16_t*>(scratch.data() + 2 * rows_bytes);
        uint16_t* product = reinterpret_cast<uint16_t*>(scratch.data() + 3 * rows_bytes);
        int32_t failed = embed(residual);
        if (!failed) failed = run_layers(residual, update);
        uint16_t* last = pass_.wanted ? normed : pass_.last_hidden;
        if (!failed) failed = normalise(update, residual, last);
        if (failed) return failed;
        if (uint16_t* tap = tap_of(pass_.num_layers, model_.hidden)) {
            copy_rows(last, pass_.num_rows, model_.hidden, tap, pass_.num_taps * model_.hidden);
        }
        for (int64_t each = 0; pass_.wanted && each < pass_.num_wanted; ++each) {
            memcpy(pass_.last_hidden + each * model_.hidden,
                   normed + pass_.wanted[each] * model_.hidden, size_t(model_.hidden) * 2);
        }
        failed = multiply(product);
        if (failed) return failed;
        const int64_t count = pass_.num_wanted * model_.head_features;
        for (int64_t each = 0; each < count; ++each) pass_.logits[each] = widened(product[each]);
        return 0;
    }

   private:
    int32_t embed(uint16_t* residual) const {
        for (int64_t row = 0; row < pass_.num_rows; ++row, residual += model_.hidden) {
            const int64_t token = pass_.token_ids[row];
            if (token < 0 || token >= model_.vocab_size) return kNoSuchPlace;
            const uint16_t* from = model_.embedding + token * model_.hidden;
            if (model_.embedding_scale == 1.0f) {
                memcpy(residual, from, size_t(model_.hidden) * 2);
                continue;
            }
            for (int64_t d = 0; d < model_.hidden; ++d) {
                residual[d] = rounded(widened(from[d]) * model_.embedding_scale);
            }
        }
        return 0;
    }

    int32_t run_layers(uint16_t* residual, uint16_t* update) const {
        LayerCall call;
        call.num_rows = pass_.num_rows;
        call.update = update;
        call.residual = residual;
        call.positions = pass_.positions;
        call.lora = pass_.lora;
        for (int64_t index = 0; index < pass_.num_layers; ++index) {
            const LayerCache& cache = pass_.caches[index];
            call.slots = pass_.slots[cache.has_window];
            call.attention = pass_.attention[cache.has_window];
            call.table = cache.table;
            call.num_positions = cache.num_positions;
            call.num_slots = cache.num_slots;
            call.keys = cache.keys;
            call.values = cache.values;
            call.is_first = index == 0;
            call.tap = tap_of(index, model_.layers[index]->hidden);
            call.tap_stride = pass_.num_taps * model_.layers[index]->hidden;
            call.lora_site = index * kProjections;
            const int32_t failed = run_layer(model_.layers[index], &call, set_, threads_);
            if (failed) return failed;
        }
        return 0;
    }

    // Where the first row of a tap is to stand; null where it is not asked for.
    uint16_t* tap_of(int64_t layer, int64_t width) const {
        for (int64_t tap = 0; tap < pass_.num_taps; ++tap) {
            if (pass_.tap_layers[tap] == layer) return pass_.taps + tap * width;
        }
        return nullptr;
    }

    int32_t normalise(const uint16_t* update, uint16_t* residual, uint16_t* y) const {
        Norm norm;
        norm.num_rows = pass_.num_rows;
        norm.width = norm.x_stride = norm.residual_stride = model_.hidden;
        norm.weight_rows = 1;
        norm.x = update;
        norm.residual = residual;
        norm.weight = model_.norm;
        norm.y = y;
        norm.offset = model_.norm_offset;
        return outrider_normalise(&norm, set_, 1);
    }

    int32_t multiply(uint16_t* product) const {
        const int32_t threads =
            int32_t(model_.head_threads < threads_ ? model_.head_threads : threads_);
        return multiply_any(model_.head_kind, model_.head, pass_.last_hidden, pass_.num_wanted,
                            product, threads);
    }

    const Model& model_;
    const Pass& pass_;
    const int32_t set_, threads_;
};

}  // namespace
}  // namespace outrider

using namespace outrider;

// Returns 0; -1 where memory is short; -2 for a token, a row, a position or a slot that does not
// exist.
EXPORT int32_t outrider_pass(const Model* model, const Pass* pass, int32_t instruction_set,
                             int32_t threads) {
    return PassRun(*model, *pass, instruction_set, threads).run();
}
