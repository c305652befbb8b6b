// A mixture's experts in one call.
#include "experts.h"

#include <string.h>

#include "calls.h"
#include "layer.h"
#include "parallel.h"

namespace outrider {
namespace {

// A thread more for so many elements, as in compiled_rows.py.
constexpr int64_t kElementsPerThread = 32 << 10;
constexpr int64_t kRowsAtOnce = 8;

// Pairs of a row and an expert, sorted by expert, and within one by row.
struct Gathering {
    const ExpertsCall& call;
    int64_t width;
    const int64_t* places;  // [pairs], where each pair's row goes
    uint16_t* sorted;       // [pairs, width]
    Tickets tickets;
};

void gather(void* data) {
    Gathering& gathering = *static_cast<Gathering*>(data);
    const ExpertsCall& call = gathering.call;
    const int64_t pairs = call.num_rows * call.num_chosen, width = gathering.width;
    for (int64_t ticket; (ticket = gathering.tickets.take()) < gathering.tickets.count;) {
        const int64_t first = ticket * kRowsAtOnce, end = first + kRowsAtOnce;
        for (int64_t pair = first; pair < (end < pairs ? end : pairs); ++pair) {
            memcpy(gathering.sorted + gathering.places[pair] * width,
                   call.x + pair / call.num_chosen * width, size_t(width) * sizeof *call.x);
        }
    }
}

class ExpertsRun {
   public:
    ExpertsRun(const Experts& experts, const ExpertsCall& call, int32_t instruction_set,
               int32_t threads)
        : experts_(experts), call_(call), set_(instruction_set), threads_(threads) {}

    int64_t memory_bytes() const {
        return words(pairs()) + 4 * words(experts_.num_experts) + 2 * rows(experts_.width) +
               rows(2 * experts_.inner) + rows(experts_.inner);
    }

    int32_t run(char* memory) {
        int64_t* places = take<int64_t>(memory, words(pairs()));
        starts_ = take<int64_t>(memory, words(experts_.num_experts));
        sizes_ = take<int64_t>(memory, words(experts_.num_experts));
        gate_up_ = take<const void*>(memory, words(experts_.num_experts));
        down_ = take<const void*>(memory, words(experts_.num_experts));
        uint16_t* sorted = take<uint16_t>(memory, rows(experts_.width));
        uint16_t* results = take<uint16_t>(memory, rows(experts_.width));
        uint16_t* gate_up = take<uint16_t>(memory, rows(2 * experts_.inner));
        uint16_t* gated = take<uint16_t>(memory, rows(experts_.inner));
        if (!sort(places)) return -2;
        Gathering gathering{call_, experts_.width, places, sorted,
                            Tickets(ceil_div(pairs(), kRowsAtOnce))};
        run_parallel(gather, &gathering, threads_for(pairs() * experts_.width));
        int32_t failed = multiply_each(experts_.gate_up_kind, gate_up_, sizes_, num_used_, sorted,
                                       gate_up, product_threads(experts_.gate_up_threads));
        if (!failed) failed = gate(gate_up, gated);
        if (!failed) {
            failed = multiply_each(experts_.down_kind, down_, sizes_, num_used_, gated, results,
                                   product_threads(experts_.down_threads));
        }
        if (!failed) failed = combine(results, places);
        return failed;
    }

   private:
    int64_t pairs() const { return call_.num_rows * call_.num_chosen; }
    int64_t words(int64_t count) const { return aligned(count * 8); }
    int64_t rows(int64_t width) const { return aligned(pairs() * width * 2); }

    template <class Item>
    static Item* take(char*& memory, int64_t num_bytes) {
        Item* piece = reinterpret_cast<Item*>(memory);
        memory += num_bytes;
        return piece;
    }

    // Finds each pair's place, and the products of the experts that are used. False for an expert
    // that does not exist.
    bool sort(int64_t* places) {
        memset(sizes_, 0, size_t(experts_.num_experts) * sizeof *sizes_);
        for (int64_t pair = 0; pair < pairs(); ++pair) {
            const int64_t expert = call_.experts[pair];
            if (expert < 0 || expert >= experts_.num_experts) return false;
            ++sizes_[expert];
        }
        int64_t start = 0;
        for (int64_t expert = 0; expert < experts_.num_experts; ++expert) {
            starts_[expert] = start;
            start += sizes_[expert];
            if (!sizes_[expert]) continue;
            gate_up_[num_used_] = experts_.gate_up[expert];
            down_[num_used_] = experts_.down[expert];
            sizes_[num_used_++] = sizes_[expert];
        }
        for (int64_t pair = 0; pair < pairs(); ++pair) {
            places[pair] = starts_[call_.experts[pair]]++;
        }
        return true;
    }

    int32_t threads_for(int64_t elements) const {
        const int64_t wanted = 1 + elements / kElementsPerThread;
        return int32_t(wanted < threads_ ? wanted : threads_);
    }

    int64_t product_threads(int64_t each) const {
        const int64_t most = num_used_ * each;
        return most < threads_ ? most : threads_;
    }

    int32_t gate(const uint16_t* gate_up, uint16_t* gated) const {
        Gate gate;
        gate.num_rows = pairs();
        gate.width = experts_.inner;
        gate.stride = 2 * experts_.inner;
        gate.x = gate_up;
        gate.y = gated;
        gate.activation = experts_.activation;
        return outrider_gate(&gate, set_, threads_for(pairs() * experts_.inner));
    }

    int32_t combine(const uint16_t* results, const int64_t* places) const {
        Combination combination;
        combination.num_rows = call_.num_rows;
        combination.width = experts_.width;
        combination.num_chosen = call_.num_chosen;
        combination.results = results;
        combination.places = places;
        combination.weights = call_.weights;
        combination.y = call_.y;
        return combine_rows(combination, set_, threads_for(pairs() * experts_.width));
    }

    const Experts& experts_;
    const ExpertsCall& call_;
    const int32_t set_, threads_;
    int64_t *starts_ = nullptr, *sizes_ = nullptr, num_used_ = 0;
    const void **gate_up_ = nullptr, **down_ = nullptr;
};

}  // namespace
}  // namespace outrider

using namespace outrider;

// Returns 0; -1 where memory is short; -2 for an expert that does not exist.
EXPORT int32_t outrider_experts(const Experts* experts, const ExpertsCall* call,
                                int32_t instruction_set, int32_t threads) {
    ExpertsRun run(*experts, *call, instruction_set, threads);
    Scratch scratch(run.memory_bytes());
    return scratch.data() ? run.run(scratch.data()) : -1;
}
