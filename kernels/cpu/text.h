// Growing texts in which the latest occurrences of n-grams are found at once, and looks for what
// followed a text's end where it stood before.
//
// draft/text/suffix_index.py is the reference, whose every chain and number these functions give.
#pragma once

#include <stdint.h>

namespace outrider {

constexpr int64_t kMostIndexes = 3;  // MAX_INDEXES (text_library.py): of a look

struct TextIndex;

// A look for what follows a text; text_library.py declares the same fields in this order.
struct TextLook {
    TextIndex* text;
    const TextIndex* indexes[kMostIndexes];  // places to look in, `text` among them
    int64_t num_indexes, num_new, max_depth;
    // The last best match: its index, where it stood, and the text's length then. 0: there is none.
    int64_t best_number, best_position, best_at;
};

}  // namespace outrider
