#include "pool.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// About 50 us of waiting awake: longer than any gap within a step, shorter than what a waiting core would cost others.
constexpr int SPINS = 1 << 11;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// A number that threads wait to see change: awake at first, then asleep in the kernel.
struct Signal {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    void wait_while(uint32_t seen) {
        for (int i = 0; i < SPINS; i++) {
            if (value.load(std::memory_order_acquire) != seen) return;
            relax();
        }
        sleepers.fetch_add(1);
        while (value.load() == seen) syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleepers.fetch_sub(1);
    }

    void advance() {
        value.fetch_add(1);
        if (sleepers.load()) syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }
};

struct Memory {
    void* at = nullptr;
    size_t size = 0;

    void* reserve(size_t bytes) {
        if (bytes > size) {
            std::free(at);
            size = (bytes + bytes / 2 + 4095) / 4096 * 4096;
            at = std::aligned_alloc(4096, size);
            if (!at) {
                size = 0;
                throw std::bad_alloc();
            }
        }
        return at;
    }
};

}  // namespace

struct Pool {
    std::mutex running;  // one run at a time
    std::vector<std::thread> threads;
    std::vector<Memory> scratch;
    Memory shared;
    int count = 1;
    bool stopping = false;
    alignas(64) Signal start;
    alignas(64) Signal phase;  // advances when all have arrived at a barrier
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int64_t> ticket{0};
    Job job = nullptr;
    void* argument = nullptr;

    void barrier() {
        if (count == 1) {
            ticket.store(0, std::memory_order_relaxed);
            return;
        }
        uint32_t seen = phase.value.load(std::memory_order_acquire);
        if (arrived.fetch_add(1) + 1 == count) {
            arrived.store(0);
            ticket.store(0);
            phase.advance();
        } else {
            phase.wait_while(seen);
        }
    }

    void work(int index) {
        Worker worker{index, count, this};
        job(worker, argument);
        barrier();
    }

    void serve(int index, uint32_t seen) {
        for (;;) {
            start.wait_while(seen);
            seen = start.value.load();
            if (stopping) return;
            work(index);
        }
    }

    void resize(int new_count, const int32_t* cores) {
        stopping = true;
        start.advance();
        for (auto& thread : threads) thread.join();
        threads.clear();
        stopping = false;
        count = new_count;
        scratch.resize(count);
        uint32_t seen = start.value.load();
        for (int i = 1; i < count; i++) {
            threads.emplace_back([this, i, seen] { serve(i, seen); });
            if (cores && cores[i] >= 0) {
                cpu_set_t set;
                CPU_ZERO(&set);
                CPU_SET(cores[i], &set);
                pthread_setaffinity_np(threads.back().native_handle(), sizeof set, &set);
            }
        }
    }
};

// Never destroyed: its threads may outlive main().
static Pool& the_pool() {
    static Pool* pool = [] {
        auto* made = new Pool;
        made->scratch.resize(1);
        return made;
    }();
    return *pool;
}

int64_t Worker::next() const { return pool->ticket.fetch_add(1, std::memory_order_relaxed); }
void Worker::barrier() const { pool->barrier(); }
void* Worker::scratch(size_t bytes) const { return pool->scratch[index].reserve(bytes); }

void* Worker::shared(size_t bytes) const {
    if (index == 0) pool->shared.reserve(bytes);
    pool->barrier();
    return pool->shared.at;
}

void set_threads(int count, const int32_t* cores) {
    Pool& pool = the_pool();
    std::lock_guard<std::mutex> lock(pool.running);
    pool.resize(count, cores);
}

void run_on_all(Job job, void* argument) {
    Pool& pool = the_pool();
    std::lock_guard<std::mutex> lock(pool.running);
    pool.job = job;
    pool.argument = argument;
    if (pool.count > 1) pool.start.advance();
    pool.work(0);
}
