// Attention of a tile's rows.
//
// Included by each instruction set's file; see rounding.h.
#pragma once

#include <math.h>

#include <initializer_list>

#include "lanes.h"
#include "products.h"
#include "rounding.h"

namespace {

constexpr int64_t kChunk = outrider::kChunkKeys;
constexpr int64_t kStep = outrider::kStepBytes;
constexpr int64_t kCacheLine = 32;  // bfloat16 numbers

// softcap * tanh(score / softcap)
INLINE Lanes capped(Lanes scores, float softcap) {
    return softcap - 2.0f * softcap / (exponential(scores * (2.0f / softcap)) + 1.0f);
}

// The running softmax of a line: one query head of one row.
struct Line {
    Lanes total;
    float highest;
    float kept;  // what the last chunk left of its sums
};

// Keys of a chunk, from the first to before the last.
struct Range {
    bool operator==(const Range& other) const { return from == other.from && to == other.to; }
    int64_t from, to;
};

// A part of the memory of a call, cut for a tile: what the key-value heads share, then theirs.
struct TileMemory {
    TileMemory(char* memory, int64_t lines, int64_t head_dim)
        : panel(memory),
          values(reinterpret_cast<float*>(panel + head_dim * 4 * kChunk)),
          scores(values + head_dim * kChunk),
          heads(reinterpret_cast<char*>(scores + lines * kChunk)) {}
    char* panel;    // keys: [steps][32 keys][4 bytes]
    float* values;  // [32 keys][head_dim]
    float* scores;  // [lines][32 keys], then their weights
    char* heads;
};

// What a key-value head keeps while chunk after chunk is read.
struct HeadMemory {
    HeadMemory(char* memory, int64_t lines, int64_t head_dim)
        : lines(reinterpret_cast<Line*>(memory)),
          outputs(reinterpret_cast<float*>(this->lines + lines)),
          query(reinterpret_cast<char*>(outputs + lines * head_dim)) {}
    static int64_t bytes(int64_t lines, int64_t head_dim) {
        return (lines * (int64_t(sizeof(Line)) + 8 * head_dim) + 63) / 64 * 64;
    }
    Line* lines;
    float* outputs;  // [lines][head_dim]
    char* query;     // groups of lines, [steps][lines of the group][4 bytes]
};

template <class Table>
class TileAttention {
   public:
    TileAttention(const outrider::Attention& call, const outrider::AttendedTile& tile)
        : call_(call),
          tile_(tile),
          first_(call.tiles[2 * tile.tile]),
          num_rows_(call.tiles[2 * tile.tile + 1] - first_),
          slots_(call.slots + call.tile_slots[tile.tile]),
          stride_(call.num_kv_heads * call.head_dim),
          group_(call.num_query_heads / call.num_kv_heads),
          dim_(call.head_dim),
          memory_(tile.memory, num_rows_ * group_, dim_),
          head_(memory_.heads, num_rows_ * group_, dim_) {}

    void run() {
        int64_t begin = INT64_MAX, end = 0;
        for (int64_t row = 0; row < num_rows_; ++row) {
            const int64_t last = shared_end(row);
            if (call_.begins[first_ + row] >= last) continue;
            begin = call_.begins[first_ + row] < begin ? call_.begins[first_ + row] : begin;
            end = last > end ? last : end;
        }
        for_each_head([&] {
            begin_lines();
            if (begin < end) pack_query(0, num_rows_);
        });
        // Head after head in a chunk, as slot after slot lies in memory.
        for (int64_t chunk = begin / kChunk * kChunk; chunk < end; chunk += kChunk) {
            for_each_head([&] {
                take_keys(slots_ + chunk, end - chunk < kChunk ? end - chunk : kChunk);
                fetch(slots_ + chunk + kChunk, end - chunk - kChunk);
                add_chunk(0, num_rows_, chunk, true);
            });
        }
        for_each_head([&] {
            for (int64_t row = 0; row < num_rows_; ++row) add_own(row);
            for (int64_t row = 0; row < num_rows_; ++row) finish(row);
        });
    }

   private:
    template <class Act>
    INLINE void for_each_head(Act act) {
        const int64_t lines = num_rows_ * group_;
        char* memory = memory_.heads;
        for (kv_head_ = tile_.first_head; kv_head_ < tile_.end_head; ++kv_head_) {
            keys_ = call_.keys + kv_head_ * dim_;
            values_ = call_.values + kv_head_ * dim_;
            head_ = HeadMemory(memory, lines, dim_);
            act();
            memory += HeadMemory::bytes(lines, dim_);
        }
    }

    int64_t steps() const { return dim_ / 2 * Table::kPairSteps; }

    int64_t shared_end(int64_t row) const {
        const int64_t end = call_.ends[first_ + row], own = call_.own_begins[first_ + row];
        return end < own ? end : own;
    }

    Range seen(int64_t row, int64_t chunk, bool is_shared) const {
        const int64_t begin = call_.begins[first_ + row];
        const int64_t end = is_shared ? shared_end(row) : call_.ends[first_ + row];
        return {begin > chunk ? begin - chunk : 0, end - chunk < kChunk ? end - chunk : kChunk};
    }

    const uint16_t* query_of(int64_t row) const {
        return call_.query + ((first_ + row) * call_.num_query_heads + kv_head_ * group_) * dim_;
    }

    void begin_lines() {
        for (int64_t line = 0; line < num_rows_ * group_; ++line) {
            head_.lines[line] = Line{Lanes{}, -INFINITY, 0.0f};
        }
        memset(head_.outputs, 0, size_t(num_rows_ * group_ * dim_) * sizeof(float));
    }

    // Packs the lines of the rows [first, last) into groups, as the kernels take them.
    void pack_query(int64_t first, int64_t last) {
        const outrider::Groups groups((last - first) * group_, Table::kMost);
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t start = groups.start(group), size = groups.size(group);
            char* place = head_.query + start * steps() * kStep;
            for (int64_t each = 0; each < size; ++each) {
                const int64_t line = start + each;
                const uint16_t* from = query_of(first + line / group_) + line % group_ * dim_;
                for (int64_t pair = 0; pair < dim_ / 2; ++pair) {
                    Table::pack_pair(place + (pair * Table::kPairSteps * size + each) * kStep,
                                     size * kStep, from + 2 * pair);
                }
            }
        }
    }

    // Makes `count` keys a panel, and their values float32.
    void take_keys(const int32_t* slots, int64_t count) {
        for (int64_t key = 0; key < count; key += kPartLanes) {
            const float* from[kPartLanes];
            for (int64_t each = 0; each < kPartLanes; ++each) {
                const int64_t number = key + each < count ? key + each : key;
                from[each] = reinterpret_cast<const float*>(keys_ + slots[number] * stride_);
            }
            for (int64_t pair = 0; pair < dim_ / 2; pair += 4) {
                const int64_t step = pair * Table::kPairSteps;
                Table::transpose(from, pair, memory_.panel + (step * kChunk + key) * kStep);
            }
        }
        for (int64_t key = 0; key < count; ++key) {
            const uint16_t* from = values_ + slots[key] * stride_;
            for (int64_t d = 0; d < dim_; d += kLanes) {
                store(memory_.values + key * dim_ + d, widened_lanes(from + d));
            }
        }
    }

    // Has a head's part of the next chunk's slots brought into the level-2 cache: blocks lie
    // anywhere, and level 1 has no room for two chunks. Inlined, because compilers drop the call of
    // a function that does nothing else.
    INLINE void fetch(const int32_t* slots, int64_t count) const {
        const int64_t first = tile_.first_head, heads = tile_.end_head - first;
        const int64_t last = ((kv_head_ - first + 1) * kChunk + heads - 1) / heads;
        for (int64_t key = (kv_head_ - first) * kChunk / heads; key < last && key < count; ++key) {
            const int64_t from = slots[key] * stride_ + first * dim_;
            for (const uint16_t* rows : {call_.keys + from, call_.values + from}) {
                for (int64_t d = 0; d < heads * dim_; d += kCacheLine) {
                    __builtin_prefetch(rows + d, 0, 2);
                }
            }
        }
    }

    // Adds the keys that are ready to the rows [first, last), whose query is packed.
    void add_chunk(int64_t first, int64_t last, int64_t chunk, bool is_shared) {
        multiply_query((last - first) * group_);
        for (int64_t row = first; row < last;) {
            const Range range = seen(row, chunk, is_shared);
            int64_t next = row + 1;
            while (next < last && seen(next, chunk, is_shared) == range) ++next;
            if (range.from < range.to) {
                float* scores = memory_.scores + (row - first) * group_ * kChunk;
                const int64_t lines = (next - row) * group_;
                for (int64_t line = 0; line < lines; ++line) {
                    weigh(head_.lines[row * group_ + line], scores + line * kChunk, range);
                }
                add_values(row * group_, lines, scores, range);
            }
            row = next;
        }
    }

    void multiply_query(int64_t lines) {
        memset(memory_.scores, 0, size_t(lines * kChunk) * sizeof(float));
        const outrider::Groups groups(lines, Table::kMost);
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t start = groups.start(group);
            outrider::Block block;
            block.weights = memory_.panel;
            block.rows = head_.query + start * steps() * kStep;
            block.prefetch = memory_.panel;
            block.prefetch_stride = 0;
            block.steps = steps();
            block.sums = memory_.scores + start * kChunk;
            Table::kKernels[groups.size(group) - 1](block);
        }
    }

    // Turns a line's scores into weights against the highest score that it has met.
    void weigh(Line& line, float* scores, Range range) const {
        Lanes left = ready(load(scores), range.from, range.to);
        Lanes right = ready(load(scores + kLanes), range.from - kLanes, range.to - kLanes);
        const float top = largest_of(larger(left, right));
        line.kept = 1.0f;
        if (top > line.highest) {
            line.kept = exponential_of(line.highest - top);
            line.highest = top;
        }
        left = weights_of(left, line.highest);
        right = weights_of(right, line.highest);
        line.total = fused(line.total, line.kept, left + right);
        store(scores, left);
        store(scores + kLanes, right);
    }

    // Scaled and capped scores of the keys [from, to), minus infinity for the others.
    INLINE Lanes ready(Lanes scores, int64_t from, int64_t to) const {
        scores = scores * call_.scale;
        if (call_.softcap > 0) scores = capped(scores, call_.softcap);
        if (from <= 0 && to >= kLanes) return scores;
        const float numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const Lanes places = load(numbers);
        const Lanes none = filled(-INFINITY);
        scores = where_greater(places, filled(float(from - 1)), scores, none);
        return where_greater(filled(float(to)), places, scores, none);
    }

    INLINE Lanes weights_of(Lanes scores, float highest) const {
        return where_greater(scores, filled(-INFINITY), exponential(scores - highest), Lanes{});
    }

    void add_values(int64_t first, int64_t lines, const float* weights, Range range) {
        const outrider::Groups groups(lines, Table::kValueLines);
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t start = groups.start(group);
            add_group(groups.size(group), first + start, weights + start * kChunk, range);
        }
    }

    template <int kLines = Table::kValueLines>
    INLINE void add_group(int64_t lines, int64_t first, const float* weights, Range range) {
        if constexpr (kLines > 1) {
            if (lines < kLines) return add_group<kLines - 1>(lines, first, weights, range);
        }
        add_values_of<kLines>(first, weights, range);
    }

    // output = output * kept + weights @ values, one key after the other, for a few lines.
    template <int kLines>
    void add_values_of(int64_t first, const float* weights, Range range) {
        constexpr int kWidth = Table::kValueWidth;
        int64_t d = 0;
        for (; d + kWidth * kLanes <= dim_; d += kWidth * kLanes) {
            add_width<kLines, kWidth>(first, weights, range, d);
        }
        for (; d < dim_; d += kLanes) add_width<kLines, 1>(first, weights, range, d);
    }

    template <int kLines, int kWidth>
    INLINE void add_width(int64_t first, const float* weights, Range range, int64_t d) {
        Lanes sums[kLines][kWidth];
        float* output = head_.outputs + first * dim_ + d;
#pragma GCC unroll 4
        for (int line = 0; line < kLines; ++line) {
#pragma GCC unroll 4
            for (int part = 0; part < kWidth; ++part) {
                sums[line][part] =
                    load(output + line * dim_ + part * kLanes) * head_.lines[first + line].kept;
            }
        }
        for (int64_t key = range.from; key < range.to; ++key) {
            const float* values = memory_.values + key * dim_ + d;
#pragma GCC unroll 4
            for (int part = 0; part < kWidth; ++part) {
                const Lanes value = load(values + part * kLanes);
#pragma GCC unroll 4
                for (int line = 0; line < kLines; ++line) {
                    const float weight = weights[line * kChunk + key];
                    sums[line][part] = fused(value, weight, sums[line][part]);
                }
            }
        }
#pragma GCC unroll 4
        for (int line = 0; line < kLines; ++line) {
#pragma GCC unroll 4
            for (int part = 0; part < kWidth; ++part) {
                store(output + line * dim_ + part * kLanes, sums[line][part]);
            }
        }
    }

    // The keys from the chunk on in which a tree begins: each row has its own path.
    void add_own(int64_t row) {
        const int64_t own_begin = call_.own_begins[first_ + row], end = call_.ends[first_ + row];
        const int32_t* slots = call_.own_slots + call_.own_starts[first_ + row];
        if (own_begin < end) pack_query(row, row + 1);
        for (int64_t chunk = own_begin; chunk < end; chunk += kChunk, slots += kChunk) {
            if (chunk + kChunk <= call_.begins[first_ + row]) continue;
            take_keys(slots, end - chunk < kChunk ? end - chunk : kChunk);
            add_chunk(row, row + 1, chunk, false);
        }
    }

    void finish(int64_t row) {
        uint16_t* y = call_.output +
                      ((first_ + row) * call_.num_query_heads + kv_head_ * group_) * dim_;
        for (int64_t head = 0; head < group_; ++head, y += dim_) {
            const Line& line = head_.lines[row * group_ + head];
            const float* output = head_.outputs + (row * group_ + head) * dim_;
            float total = total_of(line.total), kept = 1.0f;
            if (call_.sinks) {
                const float sink = call_.sinks[kv_head_ * group_ + head];
                const float top = sink > line.highest ? sink : line.highest;
                kept = exponential_of(line.highest - top);
                total = total * kept + exponential_of(sink - top);
            }
            for (int64_t d = 0; d < dim_; d += kLanes) {
                store_rounded(y + d, load(output + d) * kept / filled(total));
            }
        }
    }

    const outrider::Attention& call_;
    const outrider::AttendedTile& tile_;
    const int64_t first_, num_rows_;
    const int32_t* slots_;
    const int64_t stride_;  // from a slot to the next
    const int64_t group_, dim_;
    const TileMemory memory_;
    // Of the head that is being computed:
    int64_t kv_head_ = 0;
    const uint16_t *keys_ = nullptr, *values_ = nullptr;
    HeadMemory head_;
};

template <class Table>
void attend_tile(const outrider::Attention& call, const outrider::AttendedTile& tile) {
    TileAttention<Table>(call, tile).run();
}

}  // namespace
