// Texts that repeat: n-grams' places, matches, and votes on what follows them.
// The reference is draft/text/suffix_index.py; tests/draft/text/test_compiled_index.py compares all.
#include "text.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "parallel.h"

namespace outrider {

namespace {

constexpr int32_t kNowhere = -1, kBreak = -1;
constexpr int64_t kNumGrams = 3;
constexpr int64_t kGrams[kNumGrams] = {8, 4, 2};
constexpr int64_t kMaxCandidates = 6, kMaxMatch = 64, kMinMatch = 2;
constexpr int64_t kMostVoters = 6, kMostDepth = 256, kDepthPerToken = 4;
constexpr double kMinLengthShare = 0.25, kRecency = 0.9, kMinEdgeProb = 0.05;
constexpr int64_t kFirstCapacity = 64;

// The latest place of each n-gram, in a table with open addressing. An entry is the place of the
// n-gram's last token: the tokens themselves are read in the text.
struct PlaceTable {
    int32_t* places;
    int64_t capacity, count;
};

// What lies before each token: the last place with the same n-gram.
struct Links {
    int32_t earlier[kNumGrams];
};

uint64_t hash_of(const int32_t* end, int64_t gram) {
    uint64_t found = 0;
    for (int64_t each = 0; each < gram; ++each) {
        found = (found ^ uint64_t(uint32_t(end[each - gram]))) * 0x9E3779B97F4A7C15u;
        found ^= found >> 29;
    }
    return found;
}

template <typename T>
bool resize(T*& memory, int64_t count) {
    void* moved = realloc(memory, size_t(count) * sizeof(T));
    if (moved) memory = static_cast<T*>(moved);
    return moved;
}

}  // namespace

struct TextIndex {
    int64_t number;  // of all that were ever made: an address may be used again
    int32_t* tokens;
    Links* links;
    int64_t size, capacity, document_start;
    PlaceTable latest[kNumGrams];
};

namespace {

// The entry of the n-gram that ends before `end`, which may be of another text; one that is empty
// where there is none.
int32_t* find_place(const TextIndex& index, int64_t level, const int32_t* end) {
    const PlaceTable& table = index.latest[level];
    const int64_t gram = kGrams[level], last = table.capacity - 1;
    for (int64_t slot = int64_t(hash_of(end, gram)) & last;; slot = (slot + 1) & last) {
        int32_t& place = table.places[slot];
        if (place == kNowhere ||
            !memcmp(index.tokens + place + 1 - gram, end - gram, size_t(gram) * sizeof(int32_t))) {
            return &place;
        }
    }
}

bool make_room(TextIndex& index, int64_t level) {
    PlaceTable& table = index.latest[level];
    if (2 * (table.count + 1) <= table.capacity) return true;
    int32_t* old = table.places;
    const int64_t old_capacity = table.capacity;
    const int64_t capacity = old_capacity ? 2 * old_capacity : kFirstCapacity;
    int32_t* places = static_cast<int32_t*>(malloc(size_t(capacity) * sizeof(int32_t)));
    if (!places) return false;
    std::fill_n(places, capacity, kNowhere);
    table.places = places;
    table.capacity = capacity;
    for (int64_t slot = 0; slot < old_capacity; ++slot) {
        if (old[slot] != kNowhere) {
            *find_place(index, level, index.tokens + old[slot] + 1) = old[slot];
        }
    }
    free(old);
    return true;
}

// Enters the last token's place, now that it is known what follows it.
bool enter_last(TextIndex& index) {
    const int64_t place = index.size - 1;
    for (int64_t level = 0; level < kNumGrams; ++level) {
        if (index.size - index.document_start < kGrams[level]) continue;
        if (!make_room(index, level)) return false;
        int32_t* entry = find_place(index, level, index.tokens + index.size);
        index.latest[level].count += *entry == kNowhere;
        index.links[place].earlier[level] = *entry;
        *entry = int32_t(place);
    }
    return true;
}

bool append(TextIndex& index, int32_t token) {
    if (index.size == index.capacity) {
        const int64_t capacity = index.capacity ? 2 * index.capacity : kFirstCapacity;
        if (capacity > INT32_MAX || !resize(index.tokens, capacity) ||
            !resize(index.links, capacity)) {
            return false;
        }
        index.capacity = capacity;
    }
    index.tokens[index.size] = token;
    index.links[index.size++] = {{kNowhere, kNowhere, kNowhere}};
    return true;
}

bool extend(TextIndex& index, const int32_t* tokens, int64_t count) {
    for (int64_t each = 0; each < count; ++each) {
        if (index.size > index.document_start && !enter_last(index)) return false;
        if (!append(index, tokens[each])) return false;
    }
    return true;
}

// ---- matches ------------------------------------------------------------------------------------

// A place in an index that ends as the text does, in `length` tokens.
struct Match {
    const TextIndex* index;
    int64_t length, position;
};

int64_t common_end(const TextIndex& index, int64_t position, const TextIndex& text) {
    const int64_t limit = std::min({position + 1, text.size, kMaxMatch});
    int64_t length = 0;
    while (length < limit && index.tokens[position - length] == text.tokens[text.size - 1 - length]) {
        ++length;
    }
    return length;
}

// Finds the latest places that share the longest n-gram found, the latest first, and before them
// `hint` if it matches; -1 for none. Returns how many there are: one more than candidates at most.
int64_t find(const TextIndex& index, const TextIndex& text, int64_t hint, Match* found) {
    int64_t count = 0;
    if (hint >= 0 && hint < index.size - 1 && index.tokens[hint + 1] != kBreak) {
        const int64_t length = common_end(index, hint, text);
        if (length >= kMinMatch) found[count++] = {&index, length, hint};
    }
    for (int64_t level = 0; level < kNumGrams; ++level) {
        const int64_t gram = kGrams[level], before = count;
        if (text.size < gram) continue;
        int64_t position = kNowhere;
        if (index.latest[level].capacity) {
            position = *find_place(index, level, text.tokens + text.size);
        }
        for (int64_t seen = 0; position != kNowhere && seen < kMaxCandidates; ++seen) {
            if (position != hint) {
                found[count++] = {&index, common_end(index, position, text), position};
            }
            position = index.links[position].earlier[level];
        }
        if (count > before || (count && found[0].length >= gram)) break;
    }
    return count;
}

// ---- what follows -------------------------------------------------------------------------------

struct Continuation {
    int64_t length, count;
    int32_t tokens[kMostDepth];
};

// Takes the tokens behind a match, as far as they are worth it. A match in the text itself that
// runs into its end goes on with what the text has just said.
void follow(const Match& match, bool repeats, int64_t max_depth, Continuation& found) {
    const int64_t depth = std::min({max_depth, kDepthPerToken * match.length, kMostDepth});
    const int32_t* first = match.index->tokens + match.position + 1;
    const int64_t available = std::min(depth, match.index->size - match.position - 1);
    found.length = match.length;
    found.count = 0;
    while (found.count < available && first[found.count] != kBreak) {
        found.tokens[found.count] = first[found.count];
        ++found.count;
    }
    if (repeats) {
        for (; found.count < depth; ++found.count) {
            found.tokens[found.count] = found.tokens[found.count - available];
        }
    }
}

// How likely the token is that followed the same `length` tokens before.
double trust(int64_t length) {
    const double square = double(length * length);
    return square / (square + 8.0);
}

// Chains of a look, written one behind the other.
struct Chains {
    int64_t count;
    int64_t* lengths;
    int64_t* tokens;
    double* probs;

    void write(const Continuation& chain, const double* edge_probs) {
        *lengths++ = chain.count;
        tokens = std::copy_n(chain.tokens, chain.count, tokens);
        probs = std::copy_n(edge_probs, chain.count, probs);
        ++count;
    }
};

// Occurrences that agree in their first tokens, `num_probs` many; the leader comes first.
struct Group {
    int64_t num_voters, num_probs;
    int64_t voters[kMostVoters];
    double weights[kMostVoters];
    double edge_probs[kMostDepth];

    double weight() const {
        double sum = 0.0;
        for (int64_t each = 0; each < num_voters; ++each) sum += weights[each];
        return sum;
    }
    void add(int64_t voter, double vote) {
        voters[num_voters] = voter;
        weights[num_voters++] = vote;
    }
};

// Writes the leader's chain, and appends those that leave it on the way, by where and with which
// token. Returns the number of groups then.
int64_t split(const Group& group, const Continuation* all, Chains& chains, Group* groups,
              int64_t num_groups) {
    const Continuation& leader = all[group.voters[0]];
    const int64_t start = group.num_probs, first_new = num_groups;
    double edge_probs[kMostDepth];
    std::copy_n(group.edge_probs, start, edge_probs);
    for (int64_t place = start; place < leader.count; ++place) {
        edge_probs[place] = trust(leader.length + place);
    }
    // Weights that say something else from a depth on, or have nothing more to say.
    double lost[kMostDepth + 1] = {}, ended[kMostDepth + 1] = {}, heard[kMostDepth + 1];
    bool is_lost[kMostDepth + 1] = {};
    int64_t places[kMostVoters];  // where each group that leaves begins
    for (int64_t each = 1; each < group.num_voters; ++each) {
        const Continuation& voter = all[group.voters[each]];
        const double vote = group.weights[each];
        const int64_t size = std::min(leader.count, voter.count);
        int64_t depth = start;
        while (depth < size && leader.tokens[depth] == voter.tokens[depth]) ++depth;
        if (depth == voter.count) {
            ended[depth] += vote;
        } else if (depth < leader.count) {
            lost[depth] += vote;
            is_lost[depth] = true;
            int64_t own = first_new;
            while (own < num_groups &&
                   (places[own - first_new] != depth ||
                    all[groups[own].voters[0]].tokens[depth] != voter.tokens[depth])) {
                ++own;
            }
            if (own == num_groups) {
                groups[num_groups++].num_voters = 0;
                places[own - first_new] = depth;
            }
            groups[own].add(group.voters[each], vote);
        }
    }
    double weight = group.weight();
    for (int64_t depth = 0; depth <= leader.count; ++depth) {
        weight -= ended[depth];
        if (!is_lost[depth]) continue;
        heard[depth] = weight;
        weight -= lost[depth];
        edge_probs[depth] *= weight / heard[depth];
    }
    int64_t kept = first_new;
    for (int64_t own = first_new; own < num_groups; ++own) {
        const int64_t depth = places[own - first_new];
        const double share = groups[own].weight() / heard[depth];
        const double edge_prob = share * trust(all[groups[own].voters[0]].length + depth);
        if (edge_prob < kMinEdgeProb) continue;
        groups[kept] = groups[own];
        std::copy_n(edge_probs, depth, groups[kept].edge_probs);
        groups[kept].edge_probs[depth] = edge_prob;
        groups[kept++].num_probs = depth + 1;
    }
    chains.write(leader, edge_probs);
    return kept;
}

// Merges continuations, best first, into chains: each has a vote that grows with its length and its
// place, and a token's confidence is its share of the votes of all that agree so far.
void vote(const Continuation* all, int64_t count, int64_t max_branches, Chains& chains) {
    Group groups[2 * kMostVoters];  // a group's voters make fewer groups than they are
    Group& first = groups[0];
    first.num_voters = first.num_probs = 0;
    for (int64_t rank = 0; rank < count; ++rank) {
        const double length = double(all[rank].length);
        first.add(rank, std::pow(kRecency, double(rank)) * length * length);
    }
    const auto is_first = [&](const Continuation& other) {
        return other.count == all[0].count &&
               std::equal(other.tokens, other.tokens + other.count, all[0].tokens);
    };
    if (std::all_of(all + 1, all + count, is_first)) first.num_voters = 1;
    int64_t num_groups = 1;
    for (int64_t branch = 0; num_groups && branch < max_branches; ++branch) {
        // The heaviest, the last of those that weigh the same, in a stable order.
        for (int64_t each = 1; each < num_groups; ++each) {
            for (int64_t place = each;
                 place && groups[place].weight() < groups[place - 1].weight(); --place) {
                std::swap(groups[place], groups[place - 1]);
            }
        }
        const Group heaviest = groups[--num_groups];
        num_groups = split(heaviest, all, chains, groups, num_groups);
    }
}

void look(TextLook& own, int64_t max_branches, Chains& chains) {
    const TextIndex& text = *own.text;
    Match found[kMostIndexes * (kMaxCandidates + 1)];
    int64_t count = 0;
    for (int64_t each = 0; each < own.num_indexes; ++each) {
        const TextIndex& index = *own.indexes[each];
        const bool is_best = own.best_number == index.number;
        const int64_t hint = is_best ? own.best_position + text.size - own.best_at : kNowhere;
        count += find(index, text, hint, found + count);
    }
    own.best_number = 0;
    if (!count) return;
    for (int64_t each = 1; each < count; ++each) {  // stable: the latest stay first
        for (int64_t place = each; place && found[place].length > found[place - 1].length; --place) {
            std::swap(found[place], found[place - 1]);
        }
    }
    own.best_number = found[0].index->number;
    own.best_position = found[0].position;
    own.best_at = text.size;
    Continuation all[kMostVoters];
    int64_t num_voters = 0;
    for (int64_t each = 0; each < std::min(count, kMostVoters); ++each) {
        if (double(found[each].length) < double(found[0].length) * kMinLengthShare) continue;
        follow(found[each], found[each].index == own.text, own.max_depth, all[num_voters++]);
    }
    vote(all, num_voters, max_branches, chains);
}

}  // namespace

// Returns a text without a token; null where memory is short.
EXPORT TextIndex* outrider_text_begin() {
    static std::atomic<int64_t> numbers{0};
    TextIndex* index = static_cast<TextIndex*>(calloc(1, sizeof(TextIndex)));
    if (index) index->number = ++numbers;
    return index;
}

EXPORT void outrider_text_end(TextIndex* index) {
    free(index->tokens);
    free(index->links);
    for (PlaceTable& table : index->latest) free(table.places);
    free(index);
}

// Appends to the current document.
EXPORT int32_t outrider_text_extend(TextIndex* index, int64_t count, const int32_t* tokens) {
    return extend(*index, tokens, count) ? 0 : -1;
}

// Notes that the next token belongs to another document: no match runs across.
EXPORT int32_t outrider_text_end_document(TextIndex* index) {
    if (index->size == index->document_start) return 0;
    if (!append(*index, kBreak)) return -1;
    index->document_start = index->size;
    return 0;
}

// Takes the new tokens of texts in, which stand one behind the other, and finds what followed their
// ends where they stood before. num_chains: of each look. Their lengths, tokens and chances stand
// one behind the other: `max_branches` chains of a look at most, each of its max_depth at most.
EXPORT int32_t outrider_text_look(TextLook* const* looks, int64_t count, const int32_t* new_tokens,
                                  int64_t max_branches, int64_t* num_chains, int64_t* lengths,
                                  int64_t* tokens, double* probs) {
    Chains chains{0, lengths, tokens, probs};
    for (int64_t each = 0; each < count; ++each) {
        TextLook& own = *looks[each];
        if (!extend(*own.text, new_tokens, own.num_new)) return -1;
        new_tokens += own.num_new;
        chains.count = 0;
        if (own.max_depth > 0) look(own, max_branches, chains);
        num_chains[each] = chains.count;
    }
    return 0;
}

// Takes the new tokens of texts in, and tells whether the last eight of one of them stand in one of
// its indexes, followed by more.
EXPORT int32_t outrider_text_is_sure(TextLook* const* looks, int64_t count,
                                     const int32_t* new_tokens) {
    int32_t is_sure = 0;
    for (int64_t number = 0; number < count; ++number) {
        TextLook& own = *looks[number];
        if (!extend(*own.text, new_tokens, own.num_new)) return -1;
        new_tokens += own.num_new;
        if (own.text->size < kGrams[0]) continue;
        const int32_t* end = own.text->tokens + own.text->size;
        for (int64_t each = 0; each < own.num_indexes && !is_sure; ++each) {
            const TextIndex& index = *own.indexes[each];
            is_sure = index.latest[0].capacity && *find_place(index, 0, end) != kNowhere;
        }
    }
    return is_sure;
}

}  // namespace outrider
