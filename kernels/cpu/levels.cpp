// Grows draft trees level by level: what a caller would do with one function after the other.
#include "levels.h"

#include <string.h>

#include <algorithm>
#include <chrono>

#include "parallel.h"
#include "row_plan.h"
#include "rows.h"

using namespace outrider;

EXPORT int32_t outrider_tree_choose(Tree* const* trees, int64_t num_trees, int64_t max_frontier,
                                    double min_path_prob, int64_t* rows, double* gains);
EXPORT int64_t outrider_tree_weigh(Tree* const* trees, int64_t num_trees, const double* weights,
                                   double* probs, double* sums);
EXPORT int32_t outrider_tree_rows(Tree* const* trees, int64_t num_trees, int64_t* counts,
                                  int64_t* token_ids, int64_t* positions, uint64_t* first_words,
                                  uint64_t* masks);
EXPORT int32_t outrider_tree_grow_rows(Tree* const* trees, int64_t num_trees,
                                       const int64_t* are_asked, int64_t width,
                                       const int64_t* token_ids, const float* probs, double floor);
EXPORT int64_t outrider_plan_rows(const RowPlanCall* plan);
EXPORT int32_t outrider_pass(const Model* model, const Pass* pass, int32_t instruction_set,
                             int32_t threads);
EXPORT int32_t outrider_rank(const Likeliest* likeliest, int32_t instruction_set, int32_t threads);

namespace outrider {
namespace {

// A thread more for so many scores (kernels/sampling/compiled.py).
constexpr int64_t kScoresPerThread = 64 << 10;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Memory for numbers of one type.
template <class Number>
class Numbers {
   public:
    explicit Numbers(int64_t count) : memory_(count * int64_t(sizeof(Number))) {}
    operator Number*() const { return reinterpret_cast<Number*>(memory_.data()); }

   private:
    const Scratch memory_;
};

// The rows of a level, sequence after sequence.
struct Level {
    explicit Level(int64_t num_trees, int64_t num_rows)
        : sequences(num_trees),
          counts(num_trees),
          token_ids(num_rows),
          positions(num_rows),
          slots(num_rows),
          wanted(num_rows),
          first_words(num_rows),
          masks(kMaskWords * num_rows) {}

    bool is_whole() const {
        return sequences && counts && token_ids && positions && slots && wanted && first_words &&
               masks;
    }

    Numbers<PlannedSequence> sequences;
    Numbers<int64_t> counts, token_ids, positions, slots, wanted;
    Numbers<uint64_t> first_words, masks;
    int64_t num_rows = 0, num_wanted = 0;
};

// The keys of a level's rows.
class Plan {
   public:
    Plan(const LevelsCall& call, const Level& level, int64_t num_sequences, int64_t window)
        : memory_(bytes(call, level, num_sequences)) {
        if (!memory_.data()) return;
        RowPlanCall plan{};
        plan.num_sequences = num_sequences;
        plan.block_size = call.block_size;
        plan.window = window;
        plan.tile_rows = call.tile_rows;
        plan.mask_words = kMaskWords;
        plan.sequences = level.sequences;
        plan.blocks = call.blocks;
        plan.masks = level.masks;
        char* place = memory_.data();
        attention.own_starts = plan.own_starts = take<int64_t>(place, level.num_rows);
        attention.tile_slots = plan.tile_slots = take<int64_t>(place, num_tiles_);
        attention.tiles = plan.tiles = take<int32_t>(place, 2 * num_tiles_);
        attention.begins = plan.begins = take<int32_t>(place, level.num_rows);
        attention.ends = plan.ends = take<int32_t>(place, level.num_rows);
        attention.own_begins = plan.own_begins = take<int32_t>(place, level.num_rows);
        attention.slots = plan.slots = take<int32_t>(place, num_keys_);
        attention.own_slots = plan.own_slots = reinterpret_cast<int32_t*>(place);
        attention.num_tiles = outrider_plan_rows(&plan);
        attention.max_tile_rows = std::min(most_rows_, call.tile_rows);
    }

    bool is_there() const { return memory_.data(); }

    Attention attention{};

   private:
    template <class Number>
    static Number* take(char*& place, int64_t count) {
        Number* found = reinterpret_cast<Number*>(place);
        place += count * int64_t(sizeof(Number));
        return found;
    }

    int64_t bytes(const LevelsCall& call, const Level& level, int64_t num_sequences) {
        int64_t num_own = 0;
        for (int64_t number = 0; number < num_sequences; ++number) {
            const PlannedSequence& each = level.sequences[number];
            const int64_t rows = each.end_row - each.first_row;
            num_tiles_ += ceil_div(rows, call.tile_rows);
            most_rows_ = std::max(most_rows_, rows);
            num_keys_ += each.num_keys;
            // A path is at most as long as the tree's slots, behind less than a chunk.
            num_own += rows * (each.num_keys - each.tree_start + kChunkKeys);
        }
        return 8 * (level.num_rows + num_tiles_) +
               4 * (2 * num_tiles_ + 3 * level.num_rows + num_keys_ + num_own);
    }

    int64_t num_tiles_ = 0, num_keys_ = 0, most_rows_ = 0;
    const Scratch memory_;
};

class Growth {
   public:
    Growth(LevelsCall& call, int32_t instruction_set, int32_t threads)
        : call_(call),
          set_(instruction_set),
          threads_(threads),
          trees_(call.num_growing),
          rows_(call.num_growing),
          gains_(call.num_growing) {}

    int32_t run() {
        if (!trees_ || !rows_ || !gains_) return -1;
        is_first_ = call_.first_token_ids;
        for (bool is_chosen = call_.is_chosen; ; is_chosen = is_first_ = false) {
            if (!is_chosen && !is_first_) {
                const int32_t is_worth_it = choose();
                if (is_worth_it <= 0) return is_worth_it;
            }
            gather();
            if (!num_growing_) return kLevelsOver;
            if (!is_first_ && !has_room()) return kLevelsNoRoom;
            if (num_rows_ > call_.max_rows || call_.num_passes == kTreeSlots) return kLevelsTooMany;
            const int32_t failed = compute();
            if (failed) return failed;
            if (!call_.is_ranked) return kLevelsUnranked;
            if (!rank()) return -1;
        }
    }

   private:
    // Chooses the next frontiers. Returns 1 if they are worth a pass, else 0, or -1.
    int32_t choose() {
        for (int64_t each = 0; each < call_.num_growing; ++each) trees_[each] = tree(each);
        if (outrider_tree_choose(trees_, call_.num_growing, call_.max_frontier,
                                 call_.min_path_prob, rows_, gains_)) {
            return -1;
        }
        double gained = 0.0;
        int64_t num_rows = 0, num_trees = 0;
        for (int64_t each = 0; each < call_.num_growing; ++each) {
            LevelTree& own = call_.growing[each];
            own.is_growing = rows_[each] > 0;
            if (!own.is_growing) continue;
            gained += gains_[each] * own.chance * own.urgency;
            num_rows += rows_[each];
            ++num_trees;
        }
        if (!num_trees) return 0;
        return call_.budget ? is_worth_it(gained, num_rows, num_trees) : 1;
    }

    int32_t is_worth_it(double gained, int64_t num_rows, int64_t num_trees) const {
        int64_t most = 0;
        for (int64_t each = 0; each < call_.num_trees; ++each) most += call_.trees[each]->max_nodes;
        const Numbers<double> probs(most), sums(call_.num_trees);
        if (!probs || !sums) return -1;
        const int64_t count =
            outrider_tree_weigh(call_.trees, call_.num_trees, call_.weights, probs, sums);
        return count < 0 ? -1 : is_worth_it(probs, count, gained, num_rows, num_trees);
    }

    // StepBudget.is_worth_a_pass, in its order of operations. path_probs: descending.
    bool is_worth_it(const double* path_probs, int64_t count, double gained, int64_t num_rows,
                     int64_t num_trees) const {
        const LevelBudget& step = *call_.budget;
        const double spent_s =
            step.step_host_s + step.passes_s + double(step.num_levels) * step.part_host_s;
        double sum = 0.0, best_rate = 0.0, tokens = 0.0, step_s = 0.0;
        int64_t num_nodes = 0;
        for (int64_t number = 0; number <= count; ++number) {
            if (number) sum += path_probs[number - 1];
            const double own_tokens = sum + step.base_tokens;
            double own_s = step.target_s[number] + (spent_s + step.part_host_s);
            if (!number) own_s -= step.part_host_s;
            const double rate = number && own_s > step.longest_s ? 0.0 : own_tokens / own_s;
            if (number && !(rate > best_rate)) continue;
            num_nodes = number, best_rate = rate, tokens = own_tokens, step_s = own_s;
        }
        const double level_s = step.draft_s[num_rows] + step.part_host_s;
        const double more_s =
            level_s + (step.target_s[num_nodes + num_trees] - step.target_s[num_nodes]);
        double replaced = 0.0;
        for (int64_t number = std::max<int64_t>(num_nodes - num_trees, 0); number < num_nodes;
             ++number) {
            replaced += path_probs[number];
        }
        const auto pays = [&](double more, double seconds) {
            return step_s + seconds <= step.longest_s && more * step_s > tokens * seconds;
        };
        return pays(gained, more_s) ||
               (num_nodes >= num_trees && pays(gained - replaced, level_s));
    }

    // Lists the trees that have rows.
    void gather() {
        num_growing_ = num_rows_ = 0;
        for (int64_t each = 0; each < call_.num_growing; ++each) {
            if (!call_.growing[each].is_growing) continue;
            trees_[num_growing_++] = tree(each);
            num_rows_ += is_first_ ? call_.growing[each].num_first : rows_of(*tree(each));
        }
    }

    bool has_room() const {
        for (int64_t each = 0; each < call_.num_growing; ++each) {
            const LevelTree& own = call_.growing[each];
            const int64_t end = own.tree->root_slot + own.tree->num_slots + rows_of(*own.tree);
            if (own.is_growing && end > own.num_slots) return false;
        }
        return true;
    }

    int32_t compute() {
        const Clock::time_point started = Clock::now();
        Level level(num_growing_, num_rows_);
        if (!level.is_whole()) return -1;
        if (is_first_) {
            take_text(level);
        } else if (outrider_tree_rows(trees_, num_growing_, level.counts, level.token_ids,
                                      level.positions, level.first_words, level.masks) < 0) {
            return -2;
        }
        place(level);
        const bool is_mixed = call_.window && call_.has_full;
        const Plan own(call_, level, num_growing_, call_.window);
        const Plan full(call_, level, is_mixed ? num_growing_ : 0, 0);
        const Numbers<uint16_t> hidden(level.num_wanted * call_.model->hidden);
        if (!own.is_there() || !full.is_there() || !hidden) return -1;
        Pass pass{};
        pass.num_rows = level.num_rows;
        pass.num_layers = call_.num_layers;
        pass.token_ids = level.token_ids;
        pass.positions = level.positions;
        pass.slots[0] = pass.slots[1] = level.slots;
        pass.attention[0] = is_mixed ? &full.attention : &own.attention;
        pass.attention[1] = &own.attention;
        pass.caches = call_.caches;
        pass.logits = call_.logits;
        pass.last_hidden = hidden;
        if (level.num_wanted < level.num_rows) pass.wanted = level.wanted;
        pass.num_wanted = level.num_wanted;
        const Clock::time_point begun = Clock::now();
        const int32_t failed = outrider_pass(call_.model, &pass, set_, threads_);
        if (failed) return failed;
        note(level, seconds_since(started), seconds_since(begun));
        return 0;
    }

    // Lists the rows of the texts in front of their trees, the roots included.
    void take_text(Level& level) const {
        int64_t row = 0, number = 0;
        for (int64_t each = 0; each < call_.num_growing; ++each) {
            const LevelTree& own = call_.growing[each];
            level.counts[number++] = own.num_first;
            for (int64_t left = own.num_first - 1; left >= 0; --left, ++row) {
                level.positions[row] = own.tree->root_slot - left;
            }
        }
        std::copy_n(call_.first_token_ids, row, static_cast<int64_t*>(level.token_ids));
    }

    // Finds where the rows lie in the cache, and which of them get logits.
    void place(Level& level) const {
        int64_t row = 0, number = 0;
        for (int64_t each = 0; each < call_.num_growing; ++each) {
            LevelTree& own = call_.growing[each];
            if (!own.is_growing) continue;
            const Tree& tree = *own.tree;
            const int64_t count = level.counts[number];
            const int64_t num_keys = tree.root_slot + tree.num_slots;
            const int64_t* blocks = call_.blocks + own.first_block;
            level.sequences[number++] = {row, row + count, num_keys,
                                         is_first_ ? num_keys : tree.root_slot, own.first_block,
                                         !is_first_};
            own.num_rows += count;
            for (int64_t left = count; left > 0; --left, ++row) {
                const int64_t logical = num_keys - left;
                level.slots[row] = blocks[logical / call_.block_size] * call_.block_size +
                                   logical % call_.block_size;
                if (left <= tree.num_frontier) level.wanted[level.num_wanted++] = row;
            }
        }
        level.num_rows = row;
    }

    void note(const Level& level, double whole_s, double work_s) {
        int64_t seen = 0;
        for (int64_t number = 0; number < num_growing_; ++number) {
            const PlannedSequence& each = level.sequences[number];
            seen += (each.end_row - each.first_row) * each.num_keys;
        }
        call_.passes[call_.num_passes++] = {level.num_rows, level.num_wanted, whole_s, work_s,
                                            double(seen) / double(level.num_rows)};
        num_wanted_ = level.num_wanted;
        if (LevelBudget* step = call_.budget) {
            step->passes_s += step->draft_s[level.num_rows];
            ++step->num_levels;
        }
    }

    bool rank() {
        const int64_t count = num_wanted_ * call_.num_children;
        const Numbers<int64_t> tokens(count), are_asked(num_growing_);
        const Numbers<float> shares(count);
        if (!tokens || !shares || !are_asked) return false;
        Likeliest best;
        best.num_rows = num_wanted_;
        best.width = best.stride = call_.model->head_features;
        best.count = call_.num_children;
        best.scores = call_.logits;
        best.tokens = tokens;
        best.shares = shares;
        const int64_t threads = 1 + best.num_rows * best.width / kScoresPerThread;
        if (outrider_rank(&best, set_, int32_t(std::min<int64_t>(threads, threads_)))) return false;
        std::fill_n(static_cast<int64_t*>(are_asked), num_growing_, 1);
        return !outrider_tree_grow_rows(trees_, num_growing_, are_asked, best.count, tokens, shares,
                                        call_.min_path_prob);
    }

    Tree* tree(int64_t each) const { return call_.growing[each].tree; }
    static int64_t rows_of(const Tree& tree) { return tree.num_frontier + tree.num_ancestors; }

    LevelsCall& call_;
    const int32_t set_, threads_;
    const Numbers<Tree*> trees_;  // of a level
    const Numbers<int64_t> rows_;
    const Numbers<double> gains_;
    bool is_first_ = false;
    int64_t num_growing_ = 0, num_rows_ = 0, num_wanted_ = 0;
};

}  // namespace
}  // namespace outrider

// Returns a LevelsEnd; -1 where memory is short; -2 for a row, a token or a place that does not
// exist.
EXPORT int32_t outrider_grow_levels(LevelsCall* call, int32_t instruction_set, int32_t threads) {
    return Growth(*call, instruction_set, threads).run();
}
