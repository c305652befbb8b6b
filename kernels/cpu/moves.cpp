// Moves keys and values between the slots of a cache, as if all were read first.
#include <string.h>

#include "parallel.h"

using namespace outrider;

// cache: [num_planes][num_slots] slots of `slot_bytes`. A source of -1 moves nothing. Returns 0; -1
// where memory is short; -2, before anything is written, for a slot that does not exist.
EXPORT int32_t outrider_move_slots(char* cache, int64_t num_planes, int64_t num_slots,
                                   int64_t slot_bytes, const int64_t* sources,
                                   const int64_t* destinations, int64_t count) {
    for (int64_t each = 0; each < count; ++each) {
        if (sources[each] == -1) continue;
        if (sources[each] < 0 || sources[each] >= num_slots) return -2;
        if (destinations[each] < 0 || destinations[each] >= num_slots) return -2;
    }
    const Scratch contents(count * slot_bytes);
    if (!contents.data()) return -1;
    for (int64_t plane = 0; plane < num_planes; ++plane, cache += num_slots * slot_bytes) {
        for (int64_t each = 0; each < count; ++each) {
            if (sources[each] == -1) continue;
            memcpy(contents.data() + each * slot_bytes, cache + sources[each] * slot_bytes,
                   size_t(slot_bytes));
        }
        for (int64_t each = 0; each < count; ++each) {
            if (sources[each] == -1) continue;
            memcpy(cache + destinations[each] * slot_bytes, contents.data() + each * slot_bytes,
                   size_t(slot_bytes));
        }
    }
    return 0;
}
