// Threads, memory of a call, and small arithmetic that the C functions share.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <atomic>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace outrider {

constexpr int64_t kAlignment = 64;

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

inline int64_t aligned(int64_t num_bytes) { return ceil_div(num_bytes, kAlignment) * kAlignment; }

// Hands out the numbers 0 to `count` - 1, to each thread the next one.
struct Tickets {
    explicit Tickets(int64_t count) : count(count) {}
    int64_t take() { return next.fetch_add(1, std::memory_order_relaxed); }
    std::atomic<int64_t> next{0};
    const int64_t count;
};

// Runs `work` in this thread and in up to `threads` - 1 others (threads.cpp). It has to take its
// parts from `Tickets`: how many threads come is not known, and may be none.
void run_parallel(void (*work)(void*), void* data, int64_t threads);

// Memory of one call, given back at its end; null where there is none.
class Scratch {
   public:
    explicit Scratch(int64_t num_bytes)
        : data_(static_cast<char*>(aligned_alloc(kAlignment, size_t(aligned(num_bytes + 1))))) {}
    ~Scratch() { free(data_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    char* data() const { return data_; }

   private:
    char* data_;
};

}  // namespace outrider
