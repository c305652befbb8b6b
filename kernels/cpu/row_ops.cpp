// Operations on rows: threads, checks, and the C functions that Python calls.
#include "parallel.h"
#include "products.h"
#include "rows.h"

namespace outrider {
namespace {

constexpr int64_t kRowsAtOnce = 8;

template <class Operation>
struct Call {
    const Operation& operation;
    void (*run)(const Operation&, int64_t first, int64_t last);
    Tickets tickets;
};

template <class Operation>
void run_tickets(void* data) {
    Call<Operation>& call = *static_cast<Call<Operation>*>(data);
    for (int64_t ticket; (ticket = call.tickets.take()) < call.tickets.count;) {
        const int64_t first = ticket * kRowsAtOnce, end = first + kRowsAtOnce;
        const int64_t rows = call.operation.num_rows;
        call.run(call.operation, first, end < rows ? end : rows);
    }
}

template <class Operation>
int32_t run(const Operation& operation,
            void (*RowOps::*which)(const Operation&, int64_t, int64_t), int32_t instruction_set,
            int32_t threads) {
    const RowOps* ops = row_ops_of(instruction_set);
    if (!ops) return -1;
    Call<Operation> call{operation, ops->*which,
                         Tickets(ceil_div(operation.num_rows, kRowsAtOnce))};
    run_parallel(run_tickets<Operation>, &call, threads);
    return 0;
}

}  // namespace

int32_t combine_rows(const Combination& combination, int32_t instruction_set, int32_t threads) {
    return run(combination, &RowOps::combine, instruction_set, threads);
}

}  // namespace outrider

using namespace outrider;

// Each returns 0, or -1 where the instruction set is not known.
EXPORT int32_t outrider_normalise(const Norm* norm, int32_t instruction_set, int32_t threads) {
    return run(*norm, &RowOps::normalise, instruction_set, threads);
}

EXPORT int32_t outrider_gate(const Gate* gate, int32_t instruction_set, int32_t threads) {
    return run(*gate, &RowOps::gate, instruction_set, threads);
}

EXPORT int32_t outrider_rank(const Likeliest* likeliest, int32_t instruction_set,
                             int32_t threads) {
    return run(*likeliest, &RowOps::rank, instruction_set, threads);
}

EXPORT int32_t outrider_draw_noise(const Noise* noise, int32_t instruction_set, int32_t threads) {
    return run(*noise, &RowOps::draw_noise, instruction_set, threads);
}

EXPORT int32_t outrider_find_floors(const Floors* floors, int32_t instruction_set,
                                    int32_t threads) {
    return run(*floors, &RowOps::find_floors, instruction_set, threads);
}

EXPORT int32_t outrider_choose(const Choice* choice, int32_t instruction_set, int32_t threads) {
    return run(*choice, &RowOps::choose, instruction_set, threads);
}

// Returns -2, before anything is written, for a position or a slot that does not exist.
EXPORT int32_t outrider_place(const Heads* heads, int32_t instruction_set, int32_t threads) {
    for (int64_t row = 0; row < heads->num_rows; ++row) {
        if (heads->slots[row] < -1 || heads->slots[row] >= heads->num_slots) return -2;
        if (!heads->table) continue;
        if (heads->positions[row] < 0 || heads->positions[row] >= heads->num_positions) return -2;
    }
    return run(*heads, &RowOps::place, instruction_set, threads);
}
