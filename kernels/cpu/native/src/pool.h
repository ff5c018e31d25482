// The threads that run calls: each has a share of a call's pieces, and helps others with theirs when it is through; they go on when all of it is
// done, and sleep between steps.
// May know: the operating system's threads. Must not know: any operation.
//
// Nobody waits for a thread that the system has taken off its core between two calls: the others do its share, and it joins the call that
// is open when it is back. So a process that needs a core for a millisecond (a server, which has just been sent a step's tokens) costs
// that millisecond once, not once per core. Threads offer their cores between calls, where they hold nothing that others wait for.
//
//     thread 0   [ call 1 ][ call 2, alone     ][ call 3, alone   ][ call 4 ][ …
//     thread 1   [ call 1 ] (a server's millisecond on this core  )[ call 4 ][ …
#pragma once
#include <cstddef>
#include <cstdint>

struct Pool;

// One thread's view of a run. Thread 0 is the caller's own.
struct Worker {
    int index;
    int count;
    Pool* pool;

    // A piece of the running phase, which has `count` in all, that nobody has taken; NO_PIECE where none is left. Which thread takes which is
    // not determined: a result must not depend on it, so each element is computed whole by one thread, in an order of its own. But mostly a
    // thread has the same share of as many pieces, and takes them in ascending order: what it wrote in one phase it finds in its caches in
    // the next. (Blumofe and Leiserson 1999: work stealing.)
    int64_t next(int64_t count) const;
    // Which piece this thread takes after that one unless another does before; the same one where its share ends.
    int64_t following(int64_t piece, int64_t count) const;
    static constexpr int64_t NO_PIECE = (int64_t)1 << 40;  // larger than any count, and a piece's size times it is a number still
    // The end of a phase of a call: waits until all pieces are done; the next has pieces of its own. A thread that came to the call in a later
    // phase passes those that are over, without a piece of them: what a call does beside its pieces must not depend on having had one.
    void barrier() const;
    // Memory of this thread alone, 64-byte aligned, valid until the next call asks.
    void* scratch(size_t bytes) const;
    // Memory that all threads of the run share, likewise; every thread must ask for the same number of bytes. It ends a phase, as barrier()
    // does.
    void* shared(size_t bytes) const;
};

// Call number `index` of a run.
using Job = void (*)(const Worker&, void* argument, int32_t index);

// False where the system gives no more threads or memory: the caller's is then the only one.
bool set_threads(int count, const int32_t* cores);
// A run comes soon: threads that sleep wake up and wait for it awake, so that they need not be woken when it is there.
void wake_threads();
// Runs calls 0 to count - 1, one after the other, each on all threads; returns when all is done. Runs from several threads wait for each other.
void run_on_all(Job job, void* argument, int32_t count);
