#include "pool.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// How long a thread waits awake before it sleeps. At a barrier: about what it costs to sleep and to be woken, so that either way at most
// twice the least is spent; next to nothing with more threads than cores, where the one that all wait for may need this very core.
constexpr int64_t AWAKE_AT_BARRIER_NS = 50'000, AWAKE_ON_SHARED_CORE_NS = 1'000;
// Between runs: longer than it takes to prepare a step after the hint that one comes (wake_threads).
constexpr int64_t AWAKE_BETWEEN_RUNS_NS = 100'000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

inline int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// A number that threads wait to see change: awake at first, then asleep in the kernel.
//
//     advance:     value += 1    ; any sleepers? wake them          Whichever comes first in the one order of these operations that all
//     wait_while:  sleepers += 1 ; value still the same? sleep      threads see: one of the two sees the other, and no wake-up is lost.
struct Signal {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    void wait_while(uint32_t seen, int64_t awake_ns) {
        for (;;) {
            for (int64_t since = 0, now = 0; !since || now - since < awake_ns; now = now_ns(), since = since ? since : now)
                for (int i = 0; i < 64; i++) {
                    if (value.load(std::memory_order_acquire) != seen) return;
                    relax();
                }
            sleepers.fetch_add(1);
            if (value.load() == seen) syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
            sleepers.fetch_sub(1);  // woken by the change, or by a hint that it is near: awake again
        }
    }

    void advance() {
        value.fetch_add(1);
        wake();
    }

    void wake() {
        if (sleepers.load()) syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }
};

struct Memory {
    void* at = nullptr;
    size_t size = 0;

    // Where there is none left the process ends: kernels on other threads wait at barriers that this one could not come to.
    void* reserve(size_t bytes) {
        if (bytes > size) {
            std::free(at);
            size = (bytes + bytes / 2 + 4095) / 4096 * 4096;
            at = std::aligned_alloc(4096, size);
            if (!at) {
                std::fprintf(stderr, "quire: no memory for %zu bytes that a native kernel works in\n", size);
                std::abort();
            }
        }
        return at;
    }
};

}  // namespace

struct Pool {
    std::mutex running;  // one run at a time
    std::vector<std::thread> threads;
    std::vector<int> cores{-1};  // of each thread, -1: any; the first is where the caller is expected
    std::vector<Memory> scratch{1};
    Memory shared;
    int count = 1;
    int64_t awake_at_barrier_ns = AWAKE_AT_BARRIER_NS;
    std::atomic<bool> to_start{false};  // after a fork: as many threads as there are cores
    bool stopping = false;
    Job job = nullptr;
    void* argument = nullptr;
    alignas(64) Signal start;
    alignas(64) Signal phase;  // advances when all have arrived at a barrier
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int64_t> ticket{0};

    void barrier() {
        if (count == 1) {
            ticket.store(0, std::memory_order_relaxed);
            return;
        }
        uint32_t seen = phase.value.load(std::memory_order_acquire);
        if (arrived.fetch_add(1) + 1 == count) {
            arrived.store(0, std::memory_order_relaxed);  // nobody looks at these two before phase has advanced
            ticket.store(0, std::memory_order_relaxed);
            phase.advance();
        } else {
            phase.wait_while(seen, awake_at_barrier_ns);
        }
    }

    void work(int index) {
        job(Worker{index, count, this}, argument);
        barrier();
    }

    void serve(int index, uint32_t seen) {
        for (;;) {
            start.wait_while(seen, AWAKE_BETWEEN_RUNS_NS);
            seen = start.value.load();
            if (stopping) return;
            work(index);
        }
    }

    void pin(int index) {
        if (cores[index] < 0) return;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cores[index], &set);
        pthread_setaffinity_np(threads[index - 1].native_handle(), sizeof set, &set);
    }

    // The caller's thread goes where the system puts it. Where that is a worker's core, the worker takes the caller's.
    void make_way() {
        int here = cores[0] < 0 ? -1 : sched_getcpu();
        if (here < 0 || here == cores[0]) return;
        for (int i = 1; i < count; i++)
            if (cores[i] == here) {
                std::swap(cores[0], cores[i]);
                pin(i);
            }
    }

    void stop() {
        stopping = true;
        start.advance();
        for (auto& thread : threads) thread.join();
        threads.clear();
        stopping = false;
        count = 1;
    }

    // Throws where the system gives no more threads or memory; then the caller's is the only one.
    void resize(std::vector<int> new_cores) {
        stop();
        int new_count = (int)new_cores.size();
        cpu_set_t allowed;
        bool shared = !sched_getaffinity(0, sizeof allowed, &allowed) && CPU_COUNT(&allowed) < new_count;
        awake_at_barrier_ns = shared ? AWAKE_ON_SHARED_CORE_NS : AWAKE_AT_BARRIER_NS;
        uint32_t seen = start.value.load();
        cores = std::move(new_cores);
        to_start = false;
        try {
            scratch.resize(new_count);
            for (int i = 1; i < new_count; i++) {
                threads.emplace_back([this, i, seen] { serve(i, seen); });
                pin(i);
            }
        } catch (...) {
            stop();
            cores.assign(1, -1);
            throw;
        }
        count = new_count;  // the threads read it when a run has started
    }
};

namespace {

Pool* the_pool = new Pool;  // never destroyed: its threads may outlive main()
std::mutex resizing;

// A fork has none of its parent's threads, and a lock that nobody there may ever open. It leaves that pool alone and has one like it, whose
// threads start when they are needed.
void before_fork() { resizing.lock(); }
void after_fork_here() { resizing.unlock(); }
void after_fork_there() {
    auto* pool = new Pool;
    pool->cores = the_pool->cores;
    pool->to_start = pool->cores.size() > 1;
    the_pool = pool;
    resizing.unlock();
}
const int watched = pthread_atfork(before_fork, after_fork_here, after_fork_there);

}  // namespace

int64_t Worker::next() const { return pool->ticket.fetch_add(1, std::memory_order_relaxed); }
void Worker::barrier() const { pool->barrier(); }
void* Worker::scratch(size_t bytes) const { return pool->scratch[index].reserve(bytes); }

void* Worker::shared(size_t bytes) const {
    if (index == 0) pool->shared.reserve(bytes);
    pool->barrier();
    return pool->shared.at;
}

bool set_threads(int count, const int32_t* cores) {
    try {
        std::lock_guard<std::mutex> resize(resizing);
        std::lock_guard<std::mutex> lock(the_pool->running);
        the_pool->resize(std::vector<int>(cores, cores + count));
        return true;
    } catch (const std::exception&) {
        return false;
    }
}

void wake_threads() { the_pool->start.wake(); }

void run_on_all(Job job, void* argument) {
    Pool& pool = *the_pool;
    if (pool.to_start) set_threads((int)pool.cores.size(), std::vector<int>(pool.cores).data());
    std::lock_guard<std::mutex> lock(pool.running);
    pool.job = job;
    pool.argument = argument;
    if (pool.count > 1) {
        pool.make_way();
        pool.start.advance();
    }
    pool.work(0);
}
