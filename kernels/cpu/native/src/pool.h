// The threads that run calls. Each thread has a share of a call's pieces and helps others when it
// has finished its own. The next call starts when all pieces are done. Threads sleep between steps.
//
// May know: the operating system's threads. Must not know: any operation.
//
// If the system preempts a thread between two calls, no thread waits for it: the others take its
// share, and it joins the call that is open when it returns. A process that needs a core for a
// millisecond (a server that receives a step's tokens) therefore delays a step by that millisecond
// once, not once per core. Threads yield their cores between calls, where they hold nothing that
// others wait for.
//
// thread 0   [ call 1 ][ call 2, alone     ][ call 3, alone   ][ call 4 ][ …
// thread 1   [ call 1 ] (server: 1 ms on this core           )[ call 4 ][ …
#pragma once
#include <cstddef>
#include <cstdint>

struct Pool;

// One thread's view of a run. Thread 0 is the caller's own.
struct Worker {
    int index;
    int count;
    Pool* pool;

    // Takes a free piece of the running phase, which has `count` pieces; NO_PIECE if none is left.
    // The assignment of pieces to threads is not deterministic, so results must not depend on it:
    // one thread computes an element completely, in an order of its own. A thread usually gets the
    // same share of equally many pieces, in ascending order, so data that it wrote in one phase is
    // in its caches in the next. (Blumofe and Leiserson 1999: work stealing.)
    int64_t next(int64_t count) const;
    // The piece that this thread takes after `piece` unless another thread takes it first; `piece`
    // itself at the end of its share.
    int64_t following(int64_t piece, int64_t count) const;
    // larger than any count, and times a piece's size within 64 bits
    static constexpr int64_t NO_PIECE = (int64_t)1 << 40;
    // Ends a phase of a call: waits until all pieces are done. The next phase has its own pieces. A
    // thread that enters the call in a later phase passes the earlier ones without a piece, so work
    // outside of pieces must not depend on having had one.
    void barrier() const;
    // The run cannot go on: its calls after this one do not run, and run_on_all returns `problem`,
    // the first one if there are several. The phases of this call end as always.
    void fail(int32_t problem) const;
    // Memory of this thread alone, 64-byte aligned, valid until the next request in a later call.
    void* scratch(size_t bytes) const;
    // Memory shared by all threads of the run, likewise. Every thread must request the same number
    // of bytes. Ends a phase, as barrier() does.
    void* shared(size_t bytes) const;
};

// Call number `index` of a run.
using Job = void (*)(const Worker&, void* argument, int32_t index);

// Returns false if the system provides no more threads or memory; the caller's thread is then the
// only one.
bool set_threads(int count, const int32_t* cores);
// Hints that a run follows soon: sleeping threads wake up and poll for it.
void wake_threads();
// Runs calls 0 to count - 1 in order, each on all threads, and returns when all are done: 0, or
// what Worker::fail was called with. Runs from several threads wait for each other.
int32_t run_on_all(Job job, void* argument, int32_t count);
