// Low-rank products of rows with adapters: threads, memory, and the C function that Python calls.
#include "lora.h"

#include "parallel.h"
#include "rows.h"

namespace outrider {
namespace {

// What a thread takes at a time: ranks of a part, then columns, multiples of the kernels' blocks.
constexpr int64_t kRanksAtOnce = 8;
constexpr int64_t kColumnsAtOnce = 512;

struct LoraCall {
    const LoraRows& call;
    int64_t site;
    const uint16_t* x;
    int64_t width;
    uint16_t* y;
    int64_t y_stride;
    const RowOps* ops;
    float* inner;             // [rows, inner_stride], a part's ranks behind those of the part before
    int64_t inner_stride = 0;  // ranks of the site with most of them
    Tickets* tickets = nullptr;
    bool is_expanding = false;

    const LoraSite& site_of(int64_t adapter) const { return call.adapters[adapter][site]; }

    // Cuts an adapter's parts into pieces, and does the one that a ticket names, if it is there.
    int64_t run(int64_t adapter, int64_t ticket) const {
        const LoraSite& own = site_of(adapter);
        const int64_t start = call.starts[adapter];
        int64_t offset = 0;
        for (int64_t each = 0; each < own.num_parts; ++each) {
            const LoraPart& part = own.parts[each];
            const int64_t extent = is_expanding ? part.size : part.rank;
            const int64_t at_once = is_expanding ? kColumnsAtOnce : kRanksAtOnce;
            const int64_t pieces = ceil_div(extent, at_once);
            if (ticket < pieces) {
                const LoraTile tile{part,
                                    call.rows + start,
                                    call.starts[adapter + 1] - start,
                                    x,
                                    width,
                                    y,
                                    y_stride,
                                    inner + start * inner_stride + offset,
                                    inner_stride};
                const int64_t first = ticket * at_once, end = first + at_once;
                (is_expanding ? ops->lora_expand : ops->lora_shrink)(tile, first,
                                                                     end < extent ? end : extent);
                return -1;
            }
            ticket -= pieces;
            offset += part.rank;
        }
        return ticket;
    }

    int64_t num_pieces() const {
        int64_t count = 0;
        for (int64_t adapter = 0; adapter < call.num_adapters; ++adapter) {
            const LoraSite& own = site_of(adapter);
            for (int64_t each = 0; each < own.num_parts; ++each) {
                const LoraPart& part = own.parts[each];
                count += is_expanding ? ceil_div(part.size, kColumnsAtOnce)
                                      : ceil_div(part.rank, kRanksAtOnce);
            }
        }
        return count;
    }
};

void run_pieces(void* data) {
    const LoraCall& call = *static_cast<const LoraCall*>(data);
    for (int64_t ticket; (ticket = call.tickets->take()) < call.tickets->count;) {
        for (int64_t adapter = 0; ticket >= 0; ++adapter) ticket = call.run(adapter, ticket);
    }
}

void run_all(LoraCall& call, bool is_expanding, int32_t threads) {
    call.is_expanding = is_expanding;
    Tickets tickets(call.num_pieces());
    call.tickets = &tickets;
    run_parallel(run_pieces, &call, threads);
}

}  // namespace
}  // namespace outrider

using namespace outrider;

// Adds the adapters' products to y. site: which of each adapter's; x: bfloat16 [., width]; y:
// bfloat16 [., y_stride]. Returns 0; -1 where the instruction set is not known or memory is short.
EXPORT int32_t outrider_lora(const LoraRows* rows, int64_t site, const uint16_t* x, int64_t width,
                             uint16_t* y, int64_t y_stride, int32_t instruction_set,
                             int32_t threads) {
    const RowOps* ops = row_ops_of(instruction_set);
    if (!ops) return -1;
    LoraCall call{*rows, site, x, width, y, y_stride, ops, nullptr};
    for (int64_t adapter = 0; adapter < rows->num_adapters; ++adapter) {
        const LoraSite& own = call.site_of(adapter);
        int64_t ranks = 0;
        for (int64_t each = 0; each < own.num_parts; ++each) ranks += own.parts[each].rank;
        if (ranks > call.inner_stride) call.inner_stride = ranks;
    }
    if (!call.inner_stride) return 0;
    Scratch scratch(rows->starts[rows->num_adapters] * call.inner_stride * int64_t(sizeof(float)));
    if (!scratch.data()) return -1;
    call.inner = reinterpret_cast<float*>(scratch.data());
    run_all(call, false, threads);
    run_all(call, true, threads);
    return 0;
}
