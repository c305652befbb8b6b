// Draft trees: guesses merged, probabilities shared out, the next levels and the best nodes chosen.
// One of four implementations: draft/trees/__init__.py lists them. The reference is
// draft/trees/growing_tree.py; tests/draft/trees/test_compiled_tree.py compares every bit.
#include "tree.h"

#include <algorithm>
#include <initializer_list>

#include "parallel.h"

namespace outrider {
namespace {

constexpr int64_t kNone = -1;
constexpr int64_t kRowsPerTarget = 4;
constexpr int64_t kFirstCapacity = 64;

bool add_candidate(Tree& tree, int64_t token_id, int64_t parent, int64_t depth) {
    if (tree.num_candidates == tree.capacity) {
        const int64_t capacity = tree.capacity ? 2 * tree.capacity : kFirstCapacity;
        void* moved = realloc(tree.candidates, size_t(capacity) * sizeof(Candidate));
        if (!moved) return false;
        tree.candidates = static_cast<Candidate*>(moved);
        tree.capacity = capacity;
    }
    Candidate& found = tree.candidates[tree.num_candidates++];
    found = Candidate{};
    found.token_id = token_id;
    found.parent = parent;
    found.depth = depth;
    found.offset = found.first_child = found.last_child = found.next_sibling = kNone;
    found.confidence = found.edge_prob = found.path_prob = 1.0;
    return true;
}

int64_t find_child(const Tree& tree, int64_t node, int64_t token_id) {
    int64_t child = tree.candidates[node].first_child;
    while (child != kNone && tree.candidates[child].token_id != token_id) {
        child = tree.candidates[child].next_sibling;
    }
    return child;
}

// Returns the child, or -1 where memory is short.
int64_t add_child(Tree& tree, int64_t node, int64_t token_id, double confidence, int64_t source) {
    int64_t child = find_child(tree, node, token_id);
    if (child == kNone) {
        child = tree.num_candidates;
        if (!add_candidate(tree, token_id, node, tree.candidates[node].depth + 1)) return kNone;
        Candidate& parent = tree.candidates[node];
        if (parent.first_child == kNone) {
            parent.first_child = child;
        } else {
            tree.candidates[parent.last_child].next_sibling = child;
        }
        parent.last_child = child;
    }
    Candidate& found = tree.candidates[child];
    found.sources |= source;
    if (source == tree.model_bit) {
        found.model_confidence = confidence;
    } else {
        found.text_confidence = std::max(found.text_confidence, confidence);
    }
    return child;
}

int64_t bin_of(const CalibrationTable& known, double confidence) {
    const double* end = known.edges + known.num_edges;
    return std::upper_bound(known.edges, end, confidence) - known.edges;
}

// The number of the guesses of this evidence at this depth.
int64_t kind_of(const CalibrationTable& known, int64_t evidence, int64_t depth, bool is_greedy) {
    const int64_t place = known.depth_class[std::min(depth, known.num_depths - 1)];
    return (evidence * known.num_classes + place) * 2 + int64_t(is_greedy);
}

double calibrated(const Tree& tree, double confidence, int64_t evidence, int64_t depth) {
    const CalibrationTable* known = tree.calibration;
    if (!known) return confidence;
    const int64_t bin = kind_of(*known, evidence, depth, tree.is_greedy) * (known->num_edges + 1) +
                        bin_of(*known, confidence);
    const double shifted = confidence + known->shifts[bin];
    if (shifted > known->most) return known->most;
    return shifted > known->least ? shifted : known->least;
}

double agreed(double first, double second) {
    const double both = first * second, neither = (1.0 - first) * (1.0 - second);
    return both + neither > 0.0 ? both / (both + neither) : 0.5;
}

// Works out the path probabilities below a node, parents first: a walk by links.
void multiply_down(Tree& tree, int64_t top) {
    Candidate* all = tree.candidates;
    int64_t node = all[top].first_child;
    while (node != kNone) {
        all[node].path_prob = all[all[node].parent].path_prob * all[node].edge_prob;
        if (all[node].first_child != kNone) {
            node = all[node].first_child;
            continue;
        }
        while (all[node].next_sibling == kNone && all[node].parent != top) node = all[node].parent;
        node = all[node].next_sibling;
    }
}

// Works out the children's probabilities: calibrated, and together at most 1. What lies below them
// follows, but for the child `then`.
void share_out(Tree& tree, int64_t node, int64_t then = kNone) {
    Candidate* all = tree.candidates;
    Candidate& parent = all[node];
    double total = 0.0, named = 0.0;
    bool is_named = false;
    for (int64_t each = parent.first_child; each != kNone; each = all[each].next_sibling) {
        Candidate& child = all[each];
        const double text = child.text_confidence;
        int64_t evidence = child.sources;
        double confidence = text != 0.0 ? text : child.model_confidence;
        if (parent.is_expanded && text != 0.0) {
            double of_model = child.model_confidence;
            if (of_model == 0.0) {
                if (!is_named) {
                    for (int64_t other = parent.first_child; other != kNone;
                         other = all[other].next_sibling) {
                        named += all[other].model_confidence;
                    }
                    is_named = true;
                }
                of_model = std::max(1.0 - named, 0.0);
                evidence |= tree.silent_bit;
            }
            confidence = agreed(text, of_model);
        }
        child.evidence = evidence;
        child.confidence = confidence;
        child.edge_prob = calibrated(tree, confidence, evidence, child.depth);
        total += child.edge_prob;
    }
    parent.covered = std::min(total, 1.0);
    for (int64_t each = parent.first_child; each != kNone; each = all[each].next_sibling) {
        if (total > 1.0) all[each].edge_prob /= total;
        all[each].path_prob = parent.path_prob * all[each].edge_prob;
        if (all[each].first_child != kNone && each != then) multiply_down(tree, each);
    }
}

// Ranks the likeliest guesses, parents before children. Returns false where memory is short.
bool rank(Tree& tree) {
    if (tree.num_ranked >= 0) return true;
    const Scratch memory(tree.num_candidates * int64_t(sizeof(int64_t)));
    if (!memory.data()) return false;
    int64_t* order = reinterpret_cast<int64_t*>(memory.data());
    const int64_t num_guesses = tree.num_candidates - 1;
    for (int64_t place = 0; place < num_guesses; ++place) order[place] = place + 1;
    const Candidate* all = tree.candidates;
    const int64_t number = std::min(num_guesses, tree.max_nodes);
    std::partial_sort(order, order + number, order + num_guesses, [all](int64_t a, int64_t b) {
        if (all[a].path_prob != all[b].path_prob) return all[a].path_prob > all[b].path_prob;
        if (all[a].depth != all[b].depth) return all[a].depth < all[b].depth;
        return a < b;
    });
    std::copy(order, order + number, tree.ranking);
    tree.num_ranked = number;
    return true;
}

bool may_be_accepted(const Tree& tree, int64_t node) {
    return !tree.keeps_logits || tree.candidates[tree.candidates[node].parent].has_logits;
}

bool is_open(const Tree& tree, const Candidate& candidate) {
    if (candidate.is_expanded || candidate.is_forced || candidate.depth >= tree.max_depth) {
        return false;
    }
    return !tree.is_stepwise || tree.candidates[candidate.parent].offset != kNone;
}

bool has(const int64_t* nodes, int64_t number, int64_t node) {
    return std::find(nodes, nodes + number, node) != nodes + number;
}

// Lists those of a node and its ancestors that no pass computes yet, root first; returns how many.
int64_t list_missing(const Tree& tree, int64_t node, int64_t* missing) {
    int64_t number = 0;
    missing[number++] = node;
    int64_t parent = tree.candidates[node].parent;
    while (tree.candidates[parent].offset == kNone) {
        if (has(tree.frontier, tree.num_frontier, parent)) break;
        if (has(tree.ancestors, tree.num_ancestors, parent)) break;
        if (number == kTreeSlots) return kTreeSlots + 1;  // more than fit into a pass
        missing[number++] = parent;
        parent = tree.candidates[parent].parent;
    }
    std::reverse(missing, missing + number);
    return number;
}

struct Gain {
    double gain;
    int64_t node;
};

// Chooses a frontier; returns how many rows it has, 0 where nothing is worth a pass. gain: the sum
// over its nodes.
int64_t choose_frontier(Tree& tree, int64_t max_frontier, double min_path_prob, double* gain) {
    *gain = 0.0;
    if (tree.num_passes >= tree.max_depth) return 0;
    Gain worthy[kTreeSlots];
    int64_t num_worthy = 0;
    const int64_t num_before = tree.keeps_logits ? 0 : tree.num_frontier;
    for (int64_t place = 0; place < std::min(tree.num_ranked, tree.max_nodes - 1); ++place) {
        const int64_t node = tree.ranking[place];
        const Candidate& candidate = tree.candidates[node];
        if (candidate.path_prob < min_path_prob) break;
        if (!is_open(tree, candidate)) continue;
        // What only text says is worth a look of the model, however sure it seems.
        const double covered = std::min(candidate.covered, tree.most_believed);
        const double own = candidate.path_prob * (1.0 - covered);
        if (own >= min_path_prob && own > 0.0) worthy[num_worthy++] = {own, node};
    }
    std::sort(worthy, worthy + num_worthy, [](const Gain& a, const Gain& b) {
        return a.gain != b.gain ? a.gain > b.gain : a.node < b.node;
    });
    const int64_t limit =
        std::min(max_frontier * kRowsPerTarget, kTreeSlots - tree.num_slots);
    int64_t missing[kTreeSlots];
    for (int64_t place = 0; place < std::min(num_worthy, max_frontier); ++place) {
        const int64_t node = worthy[place].node;
        const int64_t number = list_missing(tree, node, missing);
        if (tree.num_frontier + tree.num_ancestors + number > limit) continue;
        // An ancestor of an earlier one: now its logits are wanted too.
        int64_t* end = std::remove(tree.ancestors, tree.ancestors + tree.num_ancestors, node);
        end = std::copy(missing, missing + number - 1, end);
        tree.num_ancestors = end - tree.ancestors;
        *gain += worthy[place].gain;
        tree.frontier[tree.num_frontier++] = node;
    }
    if (tree.keeps_logits) {  // every computed node's are wanted
        std::copy_backward(tree.frontier, tree.frontier + tree.num_frontier,
                           tree.frontier + tree.num_frontier + tree.num_ancestors);
        std::copy(tree.ancestors, tree.ancestors + tree.num_ancestors, tree.frontier);
        tree.num_frontier += tree.num_ancestors;
        tree.num_ancestors = 0;
        // A cascade emits a token behind every accepted node that the small model has computed.
        *gain = 0.0;
        for (int64_t place = 0; place < tree.num_frontier; ++place) {
            *gain += tree.candidates[tree.frontier[place]].path_prob;
        }
    }
    return tree.num_frontier > num_before ? tree.num_frontier + tree.num_ancestors : 0;
}

// Lists the rows of the next pass, the frontier's missing ancestors first, and gives them slots.
// Returns how many; -1, and changes nothing, where the root is among them: it has its slot.
int64_t take_rows(Tree& tree, int64_t* rows) {
    int64_t* end = std::copy(tree.ancestors, tree.ancestors + tree.num_ancestors, rows);
    end = std::copy(tree.frontier, tree.frontier + tree.num_frontier, end);
    const int64_t number = end - rows;
    Candidate* all = tree.candidates;
    if (std::any_of(rows, end, [all](int64_t node) { return all[node].parent < 0; })) return -1;
    tree.num_ancestors = 0;
    int64_t by_depth[2 * kTreeSlots];
    for (int64_t row = 0; row < number; ++row) {
        all[rows[row]].offset = tree.num_slots + row;
        by_depth[row] = rows[row];
    }
    // Parents first: their masks are needed.
    std::sort(by_depth, by_depth + number, [all](int64_t a, int64_t b) {
        return all[a].depth != all[b].depth ? all[a].depth < all[b].depth : a < b;
    });
    for (int64_t row = 0; row < number; ++row) {
        Candidate& candidate = all[by_depth[row]];
        const Candidate& parent = all[candidate.parent];
        std::copy_n(parent.mask, kMaskWords, candidate.mask);
        candidate.mask[candidate.offset / 64] |= uint64_t(1) << candidate.offset % 64;
    }
    tree.num_slots += number;
    ++tree.num_passes;
    return number;
}

}  // namespace
}  // namespace outrider

using namespace outrider;

// Of a tree, to be compared with what the caller knows.
EXPORT int64_t outrider_tree_bytes() { return sizeof(Tree) + sizeof(Candidate); }

// Begins a tree, all of zeros but for what its owner decides, with its root. Returns 0, or -1
// where memory is short, as the other functions that return an int32_t do.
EXPORT int32_t outrider_tree_begin(Tree* tree) {
    if (!add_candidate(*tree, tree->root_token_id, kNone, 0)) return -1;
    tree->candidates[0].offset = 0;
    tree->candidates[0].mask[0] = 1;
    tree->num_frontier = tree->num_slots = tree->num_passes = 1;
    tree->num_ranked = kNone;
    return 0;
}

EXPORT void outrider_tree_end(Tree* tree) { free(tree->candidates); }

// Merges a chain of guesses below a node, as far as its path is at least so likely.
EXPORT int32_t outrider_tree_add_chain(Tree* tree, int64_t source, int64_t node, int64_t count,
                                       const int64_t* token_ids, const double* confidences,
                                       double min_path_prob, int32_t is_recalled) {
    tree->num_ranked = kNone;
    for (int64_t each = 0; each < count; ++each) {
        const int64_t child = add_child(*tree, node, token_ids[each], confidences[each], source);
        if (child == kNone) return -1;
        tree->candidates[node].is_forced |= source == tree->grammar_bit;
        share_out(*tree, node, child);
        tree->candidates[child].is_recalled |= is_recalled;
        node = child;
        if (tree->candidates[child].path_prob < min_path_prob) break;
    }
    multiply_down(*tree, node);
    return 0;
}

// Merges what the drafting model wrote here before. num_named: of each token's rivals, itself
// included, which stand one behind the other.
EXPORT int32_t outrider_tree_add_answer(Tree* tree, int64_t source, int64_t count,
                                        const int64_t* token_ids, const int64_t* num_named,
                                        const int64_t* named, const double* confidences,
                                        double min_path_prob) {
    tree->num_ranked = kNone;
    int64_t node = 0;
    for (int64_t each = 0; each < count; ++each) {
        const int64_t parent = node;
        tree->candidates[parent].is_expanded = 1;
        for (int64_t rival = 0; rival < num_named[each]; ++rival, ++named, ++confidences) {
            if (*named != token_ids[each] &&
                !(tree->candidates[parent].path_prob * *confidences >= min_path_prob)) {
                continue;
            }
            if (add_child(*tree, parent, *named, *confidences, source) == kNone) return -1;
        }
        node = find_child(*tree, parent, token_ids[each]);
        if (node == kNone) return -2;
        share_out(*tree, parent, node);
        tree->candidates[node].is_recalled = 1;
        if (tree->candidates[node].path_prob < min_path_prob) break;
    }
    multiply_down(*tree, node);
    return 0;
}

// Adds the drafting model's children of a tree's frontier. counts: of each of its nodes; their
// tokens and confidences stand one behind the other.
EXPORT int32_t outrider_tree_grow(Tree* tree, const int64_t* counts, const int64_t* token_ids,
                                  const double* confidences) {
    tree->num_ranked = kNone;
    for (int64_t place = 0; place < tree->num_frontier; ++place) {
        const int64_t node = tree->frontier[place];
        tree->candidates[node].is_expanded = 1;
        for (int64_t left = counts[place]; left > 0; --left, ++token_ids, ++confidences) {
            if (add_child(*tree, node, *token_ids, *confidences, tree->model_bit) == kNone) {
                return -1;
            }
        }
        share_out(*tree, node);
    }
    tree->num_frontier = 0;
    return 0;
}

// The same for many trees, by rows of the likeliest tokens, [nodes of all frontiers, width], of
// which those below `floor` are left out. are_asked: trees that get none are expanded all the same.
EXPORT int32_t outrider_tree_grow_rows(Tree* const* trees, int64_t num_trees,
                                       const int64_t* are_asked, int64_t width,
                                       const int64_t* token_ids, const float* probs,
                                       double floor) {
    for (int64_t number = 0; number < num_trees; ++number) {
        Tree& tree = *trees[number];
        tree.num_ranked = kNone;
        for (int64_t place = 0; place < tree.num_frontier; ++place) {
            const int64_t node = tree.frontier[place];
            tree.candidates[node].is_expanded = 1;
            for (int64_t each = 0; each < width; ++each, ++token_ids, ++probs) {
                if (!are_asked[number] || !(double(*probs) >= floor)) continue;
                if (add_child(tree, node, *token_ids, double(*probs), tree.model_bit) == kNone) {
                    return -1;
                }
            }
            share_out(tree, node);
        }
        tree.num_frontier = 0;
    }
    return 0;
}

// Chooses the trees' next frontiers. rows: of each, 0 for none; gains: the sum of each.
EXPORT int32_t outrider_tree_choose(Tree* const* trees, int64_t num_trees, int64_t max_frontier,
                                    double min_path_prob, int64_t* rows, double* gains) {
    for (int64_t number = 0; number < num_trees; ++number) {
        Tree& tree = *trees[number];
        if (!rank(tree)) return -1;
        rows[number] = choose_frontier(tree, max_frontier, min_path_prob, gains + number);
    }
    return 0;
}

// Picks the likeliest nodes whose children are not named yet.
EXPORT int32_t outrider_tree_choose_open(Tree* tree, int64_t most, double min_path_prob) {
    if (!rank(*tree)) return -1;
    tree->num_frontier = 0;
    const int64_t end = std::min(tree->num_ranked, tree->max_nodes - 1);
    for (int64_t place = 0; place < end && tree->num_frontier < most; ++place) {
        const int64_t node = tree->ranking[place];
        const Candidate& candidate = tree->candidates[node];
        if (candidate.path_prob >= min_path_prob && is_open(*tree, candidate)) {
            tree->frontier[tree->num_frontier++] = node;
        }
    }
    return 0;
}

// Makes the rows of the chosen frontiers, all trees' one behind the other: tokens, positions, and
// masks, of which `first_words` are the first. counts: of each tree. Returns 1 if the first words
// are all that there is of the masks, -1 where a frontier is still the root.
EXPORT int32_t outrider_tree_rows(Tree* const* trees, int64_t num_trees, int64_t* counts,
                                  int64_t* token_ids, int64_t* positions, uint64_t* first_words,
                                  uint64_t* masks) {
    int64_t rows[2 * kTreeSlots];
    bool is_narrow = true;
    for (int64_t number = 0; number < num_trees; ++number) {
        Tree& tree = *trees[number];
        counts[number] = take_rows(tree, rows);
        if (counts[number] < 0) return -1;
        is_narrow = is_narrow && tree.num_slots <= 64;
        for (int64_t row = 0; row < counts[number]; ++row) {
            const Candidate& candidate = tree.candidates[rows[row]];
            *token_ids++ = candidate.token_id;
            *positions++ = tree.root_slot + candidate.depth;
            *first_words++ = candidate.mask[0];
            masks = std::copy_n(candidate.mask, kMaskWords, masks);
        }
    }
    return is_narrow;
}

// Writes what trees may have accepted: weighted path probabilities, descending in each tree, all
// one behind the other. sums: of each tree, not weighted. Returns how many there are, or -1.
EXPORT int64_t outrider_tree_weigh(Tree* const* trees, int64_t num_trees, const double* weights,
                                   double* probs, double* sums) {
    double* end = probs;
    for (int64_t number = 0; number < num_trees; ++number) {
        Tree& tree = *trees[number];
        if (!rank(tree)) return -1;
        sums[number] = 0.0;
        for (int64_t place = 0; place < tree.num_ranked; ++place) {
            const int64_t node = tree.ranking[place];
            if (!may_be_accepted(tree, node)) continue;
            const double prob = tree.candidates[node].path_prob;
            sums[number] += prob;
            *end++ = weights[number] * prob;
        }
    }
    if (num_trees > 1) {  // a tree's own are ranked already
        std::sort(probs, end, [](double a, double b) { return a > b; });
    }
    return end - probs;
}

// Selects the nodes of trees whose weighted chance is at least `floor`, behind the root: tokens,
// parents (places among these nodes), sources, depths, and the candidates that they are. counts: of
// each tree.
EXPORT int32_t outrider_tree_select(Tree* const* trees, int64_t num_trees, const double* weights,
                                    double floor, int64_t* counts, int64_t* token_ids,
                                    int64_t* parents, int64_t* sources, int64_t* depths,
                                    int64_t* nodes) {
    for (int64_t number = 0; number < num_trees; ++number) {
        Tree& tree = *trees[number];
        if (!rank(tree)) return -1;
        const Scratch memory(tree.num_candidates * int64_t(sizeof(int64_t)));
        if (!memory.data()) return -1;
        int64_t* places = reinterpret_cast<int64_t*>(memory.data());
        places[0] = 0;
        *token_ids++ = tree.candidates[0].token_id;
        *parents++ = kNone;
        *sources++ = *depths++ = *nodes++ = 0;
        int64_t count = 1;
        for (int64_t place = 0; place < tree.num_ranked; ++place) {
            const int64_t node = tree.ranking[place];
            const Candidate& candidate = tree.candidates[node];
            if (!may_be_accepted(tree, node)) continue;
            if (!(candidate.path_prob * weights[number] >= floor)) continue;
            places[node] = count++;
            *token_ids++ = candidate.token_id;
            *parents++ = places[candidate.parent];
            *sources++ = candidate.sources | (candidate.is_recalled ? tree.recalled_bit : 0);
            *depths++ = candidate.depth;
            *nodes++ = node;
        }
        counts[number] = count;
    }
    return 0;
}

// Learns from the guesses of many trees whose parents `token_ids` reach, `counts` of them for each tree.
// Returns the number of a curve that is to be fitted before it goes on from `progress` (a tree and how
// many of its guesses are known; 0 and 0 at first), -1 at the end.
EXPORT int64_t outrider_tree_learn(const Tree* const* trees, int64_t num_trees,
                                   const CalibrationTable* const* tables, const int64_t* counts,
                                   const int64_t* token_ids, int64_t* progress) {
    for (int64_t which = 0; which < num_trees; token_ids += counts[which++]) {
        if (which < progress[0]) continue;
        const Tree& tree = *trees[which];
        const CalibrationTable& known = *tables[which];
        const int64_t num_known = which == progress[0] ? progress[1] : 0;
        int64_t number = 0, node = 0;
        for (int64_t each = 0; each < counts[which] && node != kNone; ++each) {
            int64_t right = kNone;
            for (int64_t child = tree.candidates[node].first_child; child != kNone;
                 child = tree.candidates[child].next_sibling) {
                const Candidate& guess = tree.candidates[child];
                const bool is_right = guess.token_id == token_ids[each];
                if (is_right) right = child;
                const int64_t own = kind_of(known, guess.evidence, guess.depth, tree.is_greedy);
                for (const int64_t curve : {guess.evidence, known.num_kinds + own}) {
                    if (number++ < num_known) continue;
                    const int64_t bin =
                        curve * (known.num_edges + 1) + bin_of(known, guess.confidence);
                    known.num_right[bin] = known.kept * known.num_right[bin] + double(is_right);
                    known.num_judged[bin] = known.kept * known.num_judged[bin] + 1.0;
                    known.sum_confidence[bin] =
                        known.kept * known.sum_confidence[bin] + guess.confidence;
                    if (++known.num_unfitted[curve] < known.refit_every) continue;
                    progress[0] = which;
                    progress[1] = number;
                    return curve;
                }
            }
            node = right;
        }
    }
    return kNone;
}

// Finds in many trees the token that the drafting model thought likeliest behind the root, -1 for none,
// and how far the candidates that spell `token_ids` lie behind the root's slot, -1 for what was not
// computed and for all behind the last that is there. `counts`: tokens of each tree.
EXPORT void outrider_tree_judged(const Tree* const* trees, int64_t num_trees, const int64_t* counts,
                                 const int64_t* token_ids, int64_t* first_guesses,
                                 int64_t* offsets) {
    for (int64_t which = 0; which < num_trees; ++which) {
        const Tree& tree = *trees[which];
        const Candidate* best = nullptr;
        for (int64_t child = tree.candidates[0].first_child; child != kNone;
             child = tree.candidates[child].next_sibling) {
            const Candidate& guess = tree.candidates[child];
            if (!(guess.sources & tree.model_bit)) continue;
            if (!best || guess.model_confidence > best->model_confidence) best = &guess;
        }
        first_guesses[which] = best ? best->token_id : kNone;
        int64_t node = 0;
        for (int64_t each = 0; each < counts[which]; ++each) {
            if (node != kNone) node = find_child(tree, node, *token_ids);
            *offsets++ = node == kNone ? kNone : tree.candidates[node].offset;
            ++token_ids;
        }
    }
}

// Ranks a tree's guesses.
EXPORT int32_t outrider_tree_rank(Tree* tree) { return rank(*tree) ? 0 : -1; }
