// Lists the keys of every row, for attention whose rows read them in the order of their positions.
#include "row_plan.h"

#include "parallel.h"
#include "products.h"

namespace outrider {
namespace {

constexpr int32_t kNoTree = INT32_MAX;

class Planner {
   public:
    explicit Planner(const RowPlanCall& plan) : plan_(plan) {}

    int64_t run() {
        for (int64_t index = 0; index < plan_.num_sequences; ++index) {
            sequence_ = plan_.sequences[index];
            if (sequence_.first_row == sequence_.end_row) continue;
            blocks_ = plan_.blocks + sequence_.first_block;
            add_tiles();
            add_rows();
            add_slots();
        }
        return num_tiles_;
    }

   private:
    int32_t slot(int64_t logical) const {
        return int32_t(blocks_[logical / plan_.block_size] * plan_.block_size +
                       logical % plan_.block_size);
    }

    int32_t begin_of(int64_t end) const {
        return int32_t(plan_.window && end > plan_.window ? end - plan_.window : 0);
    }

    void add_tiles() {
        for (int64_t row = sequence_.first_row; row < sequence_.end_row; row += plan_.tile_rows) {
            const int64_t end = row + plan_.tile_rows;
            plan_.tiles[2 * num_tiles_] = int32_t(row);
            plan_.tiles[2 * num_tiles_ + 1] =
                int32_t(end < sequence_.end_row ? end : sequence_.end_row);
            plan_.tile_slots[num_tiles_++] = num_slots_;
        }
    }

    void add_rows() {
        const int64_t num_rows = sequence_.end_row - sequence_.first_row;
        least_begin_ = INT32_MAX;
        for (int64_t each = 0; each < num_rows; ++each) {
            const int64_t row = sequence_.first_row + each;
            if (sequence_.is_tree) {
                add_tree_row(row);
            } else {
                const int64_t end = sequence_.num_keys - num_rows + each + 1;
                plan_.ends[row] = int32_t(end);
                plan_.begins[row] = begin_of(end);
                plan_.own_begins[row] = kNoTree;
                plan_.own_starts[row] = 0;
            }
            if (plan_.begins[row] < least_begin_) least_begin_ = plan_.begins[row];
        }
    }

    // Whole chunks before a tree are the same for all its nodes; from there on a row has its own.
    void add_tree_row(int64_t row) {
        const int64_t own_begin = sequence_.tree_start / kChunkKeys * kChunkKeys;
        const uint64_t* mask = plan_.masks + num_tree_rows_++ * plan_.mask_words;
        int64_t end = sequence_.tree_start;
        for (int64_t word = 0; word < plan_.mask_words; ++word) {
            end += __builtin_popcountll(mask[word]);
        }
        const int64_t begin = begin_of(end);
        int32_t* own = plan_.own_slots + num_own_;
        for (int64_t place = own_begin; place < sequence_.tree_start; ++place) {
            *own++ = place < begin ? 0 : slot(place);
        }
        int64_t place = sequence_.tree_start;
        for (int64_t word = 0; word < plan_.mask_words; ++word) {
            for (uint64_t bits = mask[word]; bits; bits &= bits - 1, ++place) {
                const int64_t offset = 64 * word + __builtin_ctzll(bits);
                *own++ = place < begin ? 0 : slot(sequence_.tree_start + offset);
            }
        }
        plan_.ends[row] = int32_t(end);
        plan_.begins[row] = int32_t(begin);
        plan_.own_begins[row] = int32_t(own_begin);
        plan_.own_starts[row] = num_own_;
        num_own_ = own - plan_.own_slots;
    }

    // A slot that no row sees may be any number, and its block need not be there: it becomes 0.
    void add_slots() {
        int32_t* slots = plan_.slots + num_slots_;
        for (int64_t place = 0; place < sequence_.num_keys; ++place) {
            slots[place] = place < least_begin_ ? 0 : slot(place);
        }
        num_slots_ += sequence_.num_keys;
    }

    const RowPlanCall& plan_;
    PlannedSequence sequence_{};
    const int64_t* blocks_ = nullptr;
    int32_t least_begin_ = 0;
    int64_t num_tiles_ = 0, num_slots_ = 0, num_own_ = 0, num_tree_rows_ = 0;
};

}  // namespace
}  // namespace outrider

// Returns the number of tiles.
EXPORT int64_t outrider_plan_rows(const outrider::RowPlanCall* plan) {
    return outrider::Planner(*plan).run();
}
