// Attention of bfloat16 rows over a paged cache, every row's keys in the order of their positions.
#include "parallel.h"
#include "products.h"

namespace outrider {
namespace {

struct Call {
    const Attention& attention;
    const Kernels& kernels;
    char* memory;
    int64_t tile_bytes;
    Tickets threads, units;
};

void attend_units(void* data) {
    Call& call = *static_cast<Call*>(data);
    char* memory = call.memory + call.threads.take() * call.tile_bytes;
    const int64_t heads = call.attention.num_kv_heads;
    for (int64_t unit; (unit = call.units.take()) < call.units.count;) {
        call.kernels.attend(call.attention, unit / heads, unit % heads, memory);
    }
}

}  // namespace
}  // namespace outrider

using namespace outrider;

// Returns 0, or -1 where memory is short or the instruction set is not known.
EXPORT int32_t outrider_attend(const Attention* attention, int32_t instruction_set,
                               int32_t threads) {
    const Kernels* kernels = kernels_of(kBfloat16, instruction_set);
    if (!kernels) return -1;
    const int64_t tile_bytes = aligned(tile_memory(*attention));
    Scratch scratch(tile_bytes * threads);
    if (!scratch.data()) return -1;
    Call call{*attention,       *kernels,
              scratch.data(),   tile_bytes,
              Tickets(threads), Tickets(attention->num_tiles * attention->num_kv_heads)};
    run_parallel(attend_units, &call, threads);
    return 0;
}
