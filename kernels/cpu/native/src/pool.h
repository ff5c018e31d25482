// The threads that run calls: they meet at a barrier after each call, share out its work by tickets, and sleep between steps.
// May know: the operating system's threads. Must not know: any operation.
#pragma once
#include <cstddef>
#include <cstdint>

struct Pool;

// One thread's view of a run. Thread 0 is the caller's own.
struct Worker {
    int index;
    int count;
    Pool* pool;

    // The next piece of the running call that nobody has taken, from 0 on. Which thread takes which is not determined: a result must
    // not depend on it, so each element is computed whole by one thread, in an order of its own.
    int64_t next() const;
    // Waits for all threads and starts the tickets again: for operations in several phases.
    void barrier() const;
    // Memory of this thread alone, 64-byte aligned, valid until the next call asks.
    void* scratch(size_t bytes) const;
    // Memory that all threads of the run share, likewise; every thread must ask for the same number of bytes before anyone uses it,
    // and a barrier stands between.
    void* shared(size_t bytes) const;
};

using Job = void (*)(const Worker&, void* argument);

// False where the system gives no more threads or memory: the caller's is then the only one.
bool set_threads(int count, const int32_t* cores);
// A run comes soon: threads that sleep wake up and wait for it awake, so that they need not be woken when it is there.
void wake_threads();
// Runs job on every thread; returns when all have returned. Calls from several threads wait for each other.
void run_on_all(Job job, void* argument);
