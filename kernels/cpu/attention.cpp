// Attention of bfloat16 rows over a paged cache, every row's keys in the order of their positions.
#include "parallel.h"
#include "products.h"

namespace outrider {
namespace {

// Units for each thread, where a tile's heads are given to several.
constexpr int64_t kUnitsPerThread = 4;
// What a unit's heads keep stays in the level-2 cache.
constexpr int64_t kUnitBytes = 256 << 10;

struct Call {
    const Attention& attention;
    const Kernels& kernels;
    const Groups heads;  // of a tile
    char* memory;
    int64_t unit_bytes;
    Tickets threads, units;
};

// A tile's heads together read the cache from front to back: they are parted where there are more
// threads than tiles, and where they keep much.
Groups parted_heads(const Attention& attention, int64_t threads) {
    const int64_t tiles = attention.num_tiles, heads = attention.num_kv_heads;
    const int64_t parts = threads > 1 ? (threads * kUnitsPerThread + tiles - 1) / tiles : 1;
    const int64_t most = kUnitBytes / head_memory(attention);
    const int64_t together = (heads + parts - 1) / parts;
    return Groups(heads, together < most ? together : most > 1 ? most : 1);
}

void attend_units(void* data) {
    Call& call = *static_cast<Call*>(data);
    char* memory = call.memory + call.threads.take() * call.unit_bytes;
    for (int64_t unit; (unit = call.units.take()) < call.units.count;) {
        const int64_t part = unit % call.heads.count, first = call.heads.start(part);
        call.kernels.attend(call.attention, {unit / call.heads.count, first,
                                             first + call.heads.size(part), memory});
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
    const Groups heads = parted_heads(*attention, threads);
    const int64_t most = (attention->num_kv_heads + heads.count - 1) / heads.count;
    const int64_t unit_bytes = aligned(tile_memory(*attention, most));
    Scratch scratch(unit_bytes * threads);
    if (!scratch.data()) return -1;
    Call call{*attention,     *kernels,   heads,
              scratch.data(), unit_bytes, Tickets(threads),
              Tickets(attention->num_tiles * heads.count)};
    run_parallel(attend_units, &call, threads);
    return 0;
}
