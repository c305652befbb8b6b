// The threads of the library: a call is over when its work is done, not when all threads have come.
//
// A thread that the system has taken off its processor before it took a part of the work is not
// waited for. Where other programs keep a processor busy, a pass with its hundreds of joins takes
// a small part of the time that joins of all threads (OpenMP's) would cost it.
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "parallel.h"

namespace outrider {
namespace {

// How often a thread looks for work, or for the end of others' work, before it sleeps or yields:
// some 100 microseconds, about what lies between two passes of a draft.
constexpr int kSpins = 2000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // takes some time, and `yield` next to none
#endif
}

class Pool {
   public:
    void run(void (*work)(void*), void* data, int64_t threads) {
        if (!owner_.try_lock()) return work(data);  // another call has the threads
        for (; num_threads_ + 1 < threads; ++num_threads_) {
            std::thread([this] { serve(); }).detach();
        }
        work_ = work;
        data_ = data;
        state_.store(uint64_t(threads - 1) * kPlace, std::memory_order_release);
        generation_.fetch_add(1);
        if (num_asleep_.load()) {
            std::lock_guard<std::mutex> guard(sleep_);
            more_.notify_all();
        }
        work(data);
        close();
        owner_.unlock();
    }

   private:
    static constexpr uint64_t kPlace = uint64_t(1) << 32;

    // Lets no further thread in and waits for those that are.
    void close() {
        state_.fetch_and(kPlace - 1, std::memory_order_acq_rel);
        for (int spins = 0; state_.load(std::memory_order_acquire); ++spins) {
            if (spins < kSpins) {
                relax();
            } else {
                std::this_thread::yield();
            }
        }
    }

    // Takes one of the places that are left. What is entered is read behind this only.
    bool enter() {
        uint64_t state = state_.load(std::memory_order_acquire);
        while (state >= kPlace) {
            if (state_.compare_exchange_weak(state, state - kPlace + 1)) return true;
        }
        return false;
    }

    void serve() {
        uint32_t seen = 0;
        for (;;) {
            wait_for_other_than(seen);
            seen = generation_.load();
            if (!enter()) continue;
            work_(data_);
            state_.fetch_sub(1, std::memory_order_release);
        }
    }

    void wait_for_other_than(uint32_t seen) {
        for (int spins = 0; spins < kSpins; ++spins, relax()) {
            if (generation_.load(std::memory_order_acquire) != seen) return;
        }
        std::unique_lock<std::mutex> lock(sleep_);
        num_asleep_.fetch_add(1);
        more_.wait(lock, [&] { return generation_.load() != seen; });
        num_asleep_.fetch_sub(1);
    }

    std::mutex owner_, sleep_;
    std::condition_variable more_;
    void (*work_)(void*) = nullptr;
    void* data_ = nullptr;
    std::atomic<uint64_t> state_{0};  // threads inside, and kPlace times the places that are left
    std::atomic<uint32_t> generation_{0};
    std::atomic<int> num_asleep_{0};
    int64_t num_threads_ = 0;
};

// Never destroyed: its threads live as long as the process. A forked child has none of them.
Pool* pool = nullptr;
std::once_flag made;

void make_pool() { pool = new Pool; }

}  // namespace

void run_parallel(void (*work)(void*), void* data, int64_t threads) {
    if (threads < 2) return work(data);
    std::call_once(made, [] {
        make_pool();
        pthread_atfork(nullptr, nullptr, make_pool);
    });
    pool->run(work, data, threads);
}

}  // namespace outrider
