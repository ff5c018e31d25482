// What the library asks of the operating system: the time, sleep until a number changes, which
// cores there are, and which core runs a thread.
//
// Must not know: calls, runs.
//
// Linux has futexes and affinities. macOS documents neither, so there threads sleep at a condition
// variable, and no thread is bound to a core. With QUIRE_PORTABLE_SYSTEM every system gets macOS's
// part, for tests.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include <time.h>

#if defined(__linux__) && !defined(QUIRE_PORTABLE_SYSTEM)
#define QUIRE_LINUX 1
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define QUIRE_LINUX 0
#endif

namespace {

// The clock of Python's time.monotonic, in nanoseconds.
inline int64_t now_ns() {
#if defined(__APPLE__)
    return (int64_t)clock_gettime_nsec_np(CLOCK_UPTIME_RAW);  // steady_clock counts sleep, too
#else
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
#endif
}

// Tells the core that this thread polls.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

#if QUIRE_LINUX

inline long futex(std::atomic<uint32_t>& value, int operation, uint32_t argument,
                  const timespec* timeout) {
    return syscall(SYS_futex, &value, operation, argument, timeout, nullptr, 0);
}

// Where threads of this process sleep.
struct Sleepers {
    // Returns when `value` is not `seen`, after `wake`, or without a reason.
    void sleep(std::atomic<uint32_t>& value, uint32_t seen) {
        futex(value, FUTEX_WAIT_PRIVATE, seen, nullptr);
    }
    void wake(std::atomic<uint32_t>& value) {
        futex(value, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr);
    }
};

// Sleeps, for at most `ns` (below a second), until another process changes `value` in memory that
// both share, and calls wake_processes.
inline void sleep_for_process(std::atomic<uint32_t>& value, uint32_t seen, int64_t ns) {
    const timespec timeout = {0, (long)ns};
    futex(value, FUTEX_WAIT, seen, &timeout);
}
inline void wake_processes(std::atomic<uint32_t>& value) {
    futex(value, FUTEX_WAKE, INT32_MAX, nullptr);
}

// How many cores this process may use; 0: the system does not say.
inline int num_cores() {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) ? 0 : CPU_COUNT(&allowed);
}
// The core that runs this thread, or -1.
inline int current_core() { return sched_getcpu(); }
inline void bind(std::thread& thread, int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
}

#if defined(__x86_64__)
// Enables the registers of AMX, once per process (Linux's Documentation/arch/x86/xstate.rst).
inline bool enable_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

#else

struct Sleepers {
    std::mutex lock;
    std::condition_variable changed;

    void sleep(std::atomic<uint32_t>& value, uint32_t seen) {
        std::unique_lock<std::mutex> held(lock);
        // A thread that has changed the value since then waits for the lock before it notifies.
        if (value.load() == seen) changed.wait(held);
    }
    void wake(std::atomic<uint32_t>&) {
        std::lock_guard<std::mutex> held(lock);
        changed.notify_all();
    }
};

inline void sleep_for_process(std::atomic<uint32_t>&, uint32_t, int64_t ns) {
    constexpr int64_t LOOK_NS = 200'000;  // nothing wakes it
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(ns, LOOK_NS)));
}
inline void wake_processes(std::atomic<uint32_t>&) {}

inline int num_cores() { return (int)std::thread::hardware_concurrency(); }
inline int current_core() { return -1; }
inline void bind(std::thread&, int) {}
inline bool enable_tiles() { return false; }

#endif

}  // namespace
