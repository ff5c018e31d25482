#include "pool.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sched.h>

#include "system.h"

namespace {

// How long a thread polls before it sleeps. Within a run: about the cost of sleeping and being
// woken, so that at most twice the minimum is spent either way. Almost 0 with more threads than
// cores, where the awaited thread may need this core.
constexpr int64_t AWAKE_IN_RUN_NS = 50'000, AWAKE_ON_SHARED_CORE_NS = 1'000;
// Between runs: longer than the preparation of a step after the hint that one follows
// (wake_threads).
constexpr int64_t AWAKE_BETWEEN_RUNS_NS = 100'000;

// How often a thread yields its core between two calls, and the ratio between the time that it then
// keeps the core and the time that it lost it. A thread that yields gives up the rest of its time
// slice (Linux 6.18) and would otherwise get little time next to a program that computes
// continuously.
constexpr int64_t OFFER_EVERY_NS = 100'000, KEEP_TIMES = 4;
constexpr int MAX_THREADS = 4095;  // the largest number that Place can count

// A number that threads wait on until it changes: they poll first, then sleep in the kernel.
//
//     advance:     value += 1    ; if there are sleepers, wake them
//     wait_while:  sleepers += 1 ; if value is still the same, sleep
//
// These operations are sequentially consistent, so at least one of the two threads sees the other's
// change, and no wake-up is lost.
struct Signal {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};
    Sleepers asleep;

    void wait_while(uint32_t seen, int64_t awake_ns) {
        for (;;) {
            for (int64_t since = 0, now = 0; !since || now - since < awake_ns;
                 now = now_ns(), since = since ? since : now)
                for (int i = 0; i < 64; i++) {
                    if (value.load(std::memory_order_acquire) != seen) return;
                    relax();
                }
            sleepers.fetch_add(1);
            if (value.load() == seen) asleep.sleep(value, seen);
            // woken by the change, or by a hint that it is near: polls again
            sleepers.fetch_sub(1);
        }
    }

    void advance() {
        value.fetch_add(1);
        wake();
    }

    void wake() {
        if (sleepers.load()) asleep.wake(value);
    }
};

struct Memory {
    void* at = nullptr;
    size_t size = 0;

    // Ends the process if memory is exhausted: kernels on other threads wait at barriers that this
    // thread could not reach.
    void* reserve(size_t bytes) {
        if (bytes > size) {
            std::free(at);
            size = (bytes + bytes / 2 + 4095) / 4096 * 4096;
            at = std::aligned_alloc(4096, size);
            if (!at) {
                std::fprintf(
                    stderr, "quire: no memory for %zu bytes that a native kernel works in\n", size);
                std::abort();
            }
        }
        return at;
    }
};

}  // namespace

// The state of a run, in one word that threads change by compare-and-swap.
struct Place {
    uint64_t call : 24;   // counts on from run to run
    uint64_t phase : 16;  // of the call; with CHANGING: it is over and the next is being prepared
    // threads between enter and leave; what a call reads stays in place until it is 0
    uint64_t in_call : 12;
    uint64_t in_phase : 12;  // those of them that take pieces
};
static_assert(sizeof(Place) == 8);
// CLOSED: between two calls or two runs, no thread can enter
constexpr uint64_t CHANGING = 0x8000, CLOSED = 0xffff;

// What is left of a thread's share of a phase's pieces, in one word. Its thread takes them from the
// front, other threads that have finished their own take them from the back. The first thread that
// takes from a share in a new phase resets it.
struct alignas(64) Share {
    struct Taken {
        // phase: the low bits of Pool::phase_number, which repeat only after weeks
        uint64_t front : 12, back : 12, phase : 40;
    };
    static constexpr int64_t MAX_PIECES = 0xfff;
    std::atomic<Taken> taken{Taken{0, 0, 0}};
    static_assert(sizeof(Taken) == 8 && std::atomic<Taken>::is_always_lock_free);

    // -> a piece in [0, size), or -1.
    int64_t take(uint64_t phase_number, int64_t size, bool from_front) {
        Taken fresh{};
        fresh.phase = phase_number;
        for (Taken seen = taken.load(std::memory_order_relaxed);;) {
            Taken now = seen.phase == fresh.phase ? seen : fresh;
            if (now.front + now.back >= size) return -1;
            const int64_t place = from_front ? now.front : size - 1 - now.back;
            if (from_front) now.front += 1;
            else now.back += 1;
            if (taken.compare_exchange_weak(seen, now, std::memory_order_relaxed)) return place;
        }
    }
};

// One thread's own position in the run.
struct alignas(64) ThreadState {
    uint64_t last_call = 0, phase = 0;
    uint64_t phase_number = 0;
    bool takes_pieces = false;
    int64_t piece = 0, end = 0;  // the pieces that it has taken
    int64_t next_offer = 0;

    void start_phase(uint64_t number) { phase_number = number, piece = end = 0; }
};

struct Pool {
    std::mutex running;  // one run at a time
    std::vector<std::thread> threads;
    // of each thread, -1: any; the first is where the caller is expected
    std::vector<int> cores{-1};
    std::vector<ThreadState> thread_states{1};
    std::vector<Share> shares = std::vector<Share>(1);
    std::vector<Memory> scratch{1};
    Memory shared;
    int count = 1;
    int64_t awake_in_run_ns = AWAKE_IN_RUN_NS;
    std::atomic<bool> to_start{false};  // after a fork: starts as many threads as there are cores
    std::atomic<bool> stopping{false};
    Job job = nullptr;  // these four: read within a call, changed while none is open
    void* argument = nullptr;
    int32_t index = 0, num_calls = 0;
    alignas(64) Signal start;
    // shares its cache line with the number that waiting threads poll, the next one's
    alignas(64) std::atomic<Place> place{Place{0, CLOSED, 0, 0}};
    // advances whenever a new call or phase can be entered, and when a run is over
    Signal changes;
    // counts all phases of all calls; threads that take pieces read it, changed while there are
    // none
    uint64_t phase_number = 0;
    std::atomic<bool> is_over{true};
    std::atomic<int32_t> problem{0};  // of a call that failed

    static_assert(std::atomic<Place>::is_always_lock_free);

    // If a call is open, this thread enters it, and takes pieces if it is still in its first phase.
    bool enter(ThreadState& me) {
        for (Place seen = place.load();;) {
            if (seen.phase == CLOSED || seen.call == me.last_call) return false;
            Place now = seen;
            bool is_first = seen.phase == 0;
            now.in_call += 1;
            now.in_phase += is_first;
            if (!place.compare_exchange_weak(seen, now)) continue;
            me.last_call = now.call;
            me.phase = 0;
            me.takes_pieces = is_first;
            if (is_first) me.start_phase(phase_number);
            return true;
        }
    }

    // The last thread to leave has seen that no piece is left, and no other thread holds one: the
    // call is done.
    void leave(ThreadState& me) {
        for (Place seen = place.load();;) {
            Place now = seen;
            now.in_call -= 1;
            now.in_phase -= me.takes_pieces;
            if (now.in_call == 0) now.phase = CLOSED;
            if (!place.compare_exchange_weak(seen, now)) continue;
            if (now.in_call == 0) open(now.call + 1, index + 1);
            return;
        }
    }

    void open(uint64_t call, int32_t next) {
        index = next;
        phase_number += 1;
        if (next < num_calls && !problem.load()) place.store(Place{call, 0, 0, 0});
        else is_over.store(true);
        changes.advance();
    }

    // As leave and enter, for the phases of a call. The thread that ends the phase reserves `bytes`
    // of shared memory.
    void end_phase(ThreadState& me, size_t bytes) {
        if (count == 1) {
            me.start_phase(++phase_number);
            if (bytes) shared.reserve(bytes);
            return;
        }
        const uint64_t next = me.phase + 1;
        if (me.takes_pieces && end_as_last(me, next, bytes)) return;
        me.phase = next;
        for (;;) {
            uint32_t change = changes.value.load();
            Place seen = place.load();
            me.takes_pieces = seen.phase == next;
            // too late for the next phase as well
            if ((seen.phase & ~CHANGING) > next || seen.phase == (CHANGING | next)) return;
            if (!me.takes_pieces) {
                changes.wait_while(change, awake_in_run_ns);
                continue;
            }
            Place now = seen;
            now.in_phase += 1;
            if (!place.compare_exchange_weak(seen, now)) continue;
            me.start_phase(phase_number);
            return;
        }
    }

    bool end_as_last(ThreadState& me, uint64_t next, size_t bytes) {
        for (Place seen = place.load();;) {
            Place now = seen;
            now.in_phase -= 1;
            if (now.in_phase == 0) now.phase |= CHANGING;
            if (!place.compare_exchange_weak(seen, now)) continue;
            if (now.in_phase) return false;
            me.start_phase(++phase_number);
            if (bytes) shared.reserve(bytes);
            for (seen = now;;) {  // other threads may enter the call meanwhile
                now = seen;
                now.phase = next;
                now.in_phase = 1;
                if (place.compare_exchange_weak(seen, now)) break;
            }
            me.phase = next;
            changes.advance();
            return true;
        }
    }

    // A thread's share, [first, second). If there are very many pieces, several are taken at once.
    std::pair<int64_t, int64_t> share_of(int64_t thread, int64_t takes) const {
        return {thread * takes / count, (thread + 1) * takes / count};
    }
    int64_t taken_at_once(int64_t pieces) const { return pieces / (Share::MAX_PIECES * count) + 1; }

    int64_t next(int mine, int64_t pieces) {
        ThreadState& me = thread_states[mine];
        if (me.piece < me.end) return me.piece++;
        if (!me.takes_pieces) return Worker::NO_PIECE;
        const int64_t at_once = taken_at_once(pieces), takes = (pieces + at_once - 1) / at_once;
        for (int i = 0, thread = mine; i < count;
             i++, thread = thread + 1 < count ? thread + 1 : 0) {
            const auto [first, last] = share_of(thread, takes);
            const int64_t taken =
                first < last ? shares[thread].take(me.phase_number, last - first, i == 0) : -1;
            if (taken < 0) continue;
            me.piece = (first + taken) * at_once, me.end = std::min(me.piece + at_once, pieces);
            return me.piece++;
        }
        return Worker::NO_PIECE;
    }

    int64_t following(int mine, int64_t piece, int64_t pieces) const {
        const int64_t at_once = taken_at_once(pieces), takes = (pieces + at_once - 1) / at_once;
        const auto [first, last] = share_of(mine, takes);
        return piece >= first * at_once && piece + 1 < std::min(last * at_once, pieces) ? piece + 1
                                                                                        : piece;
    }

    void work(int mine) {
        ThreadState& me = thread_states[mine];
        for (;;) {
            uint32_t change = changes.value.load();
            if (enter(me)) {
                job(Worker{mine, count, this}, argument, index);
                leave(me);
                offer_core(me);
            } else if (is_over.load()) {
                return;
            } else {
                changes.wait_while(change, awake_in_run_ns);
            }
        }
    }

    static void offer_core(ThreadState& me) {
        int64_t now = now_ns();
        if (now < me.next_offer) return;
        sched_yield();
        int64_t back = now_ns();
        me.next_offer = back + std::max(OFFER_EVERY_NS, KEEP_TIMES * (back - now));
    }

    void run() {
        problem.store(0);
        if (count == 1) {
            thread_states[0].takes_pieces = true;
            for (int32_t i = 0; i < num_calls && !problem.load(); i++) {
                thread_states[0].start_phase(++phase_number);
                job(Worker{0, 1, this}, argument, i);
            }
            return;
        }
        make_way();
        is_over.store(false);
        open(place.load().call + 1, 0);
        start.advance();
        work(0);
    }

    void serve(int mine, uint32_t seen) {
        for (;;) {
            start.wait_while(seen, AWAKE_BETWEEN_RUNS_NS);
            seen = start.value.load();
            if (stopping) return;
            work(mine);
        }
    }

    void pin(int index) {
        if (cores[index] >= 0) bind(threads[index - 1], cores[index]);
    }

    // The system places the caller's thread. If that is a worker's core, the worker takes the
    // caller's.
    void make_way() {
        int here = cores[0] < 0 ? -1 : current_core();
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

    // Throws if the system provides no more threads or memory; the caller's thread is then the only
    // one.
    void resize(std::vector<int> new_cores) {
        stop();
        int new_count = (int)new_cores.size();
        const int allowed = num_cores();
        const bool shared = allowed && allowed < new_count;
        awake_in_run_ns = shared ? AWAKE_ON_SHARED_CORE_NS : AWAKE_IN_RUN_NS;
        uint32_t seen = start.value.load();
        cores = std::move(new_cores);
        to_start = false;
        try {
            scratch.resize(new_count);
            thread_states.assign(new_count, ThreadState{place.load().call});
            shares = std::vector<Share>(new_count);
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

// A forked child has none of its parent's threads, and inherits locks that may stay locked. It
// leaves the parent's pool alone and creates an equal one, whose threads start when they are
// needed.
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

int64_t Worker::next(int64_t count) const { return pool->next(index, count); }
int64_t Worker::following(int64_t piece, int64_t count) const {
    return pool->following(index, piece, count);
}
void Worker::fail(int32_t problem) const {
    int32_t none = 0;
    pool->problem.compare_exchange_strong(none, problem);
}
void Worker::barrier() const { pool->end_phase(pool->thread_states[index], 0); }
void* Worker::scratch(size_t bytes) const { return pool->scratch[index].reserve(bytes); }

void* Worker::shared(size_t bytes) const {
    pool->end_phase(pool->thread_states[index], bytes);
    return pool->shared.at;
}

bool set_threads(int count, const int32_t* cores) {
    if (count > MAX_THREADS) return false;
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

int32_t run_on_all(Job job, void* argument, int32_t count) {
    if (count <= 0) return 0;
    Pool& pool = *the_pool;
    if (pool.to_start) set_threads((int)pool.cores.size(), std::vector<int>(pool.cores).data());
    std::lock_guard<std::mutex> lock(pool.running);
    pool.job = job;
    pool.argument = argument;
    pool.num_calls = count;
    pool.run();
    return pool.problem.load();
}
