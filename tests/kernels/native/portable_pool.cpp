// Runs calls on the pool of threads, whose sleep is macOS's (QUIRE_PORTABLE_SYSTEM): each piece of
// each phase is done once, after threads have slept, and in a fork. Exits with 0, or the line that
// has failed.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr int PIECES = 37, CALLS = 3;
std::atomic<int> done[CALLS][2][PIECES];

void job(const Worker& worker, void*, int32_t call) {
    for (int phase = 0; phase < 2; phase++) {
        if (phase) worker.barrier();
        for (int64_t piece; (piece = worker.next(PIECES)) != Worker::NO_PIECE;)
            done[call][phase][piece].fetch_add(1);
    }
}

void check(bool holds, int line) {
    if (!holds) _exit(line);
}

void run(int times) {
    for (int i = 0; i < times; i++) {
        for (auto& call : done)
            for (auto& phase : call)
                for (auto& piece : phase) piece.store(0);
        check(run_on_all(job, nullptr, CALLS) == 0, __LINE__);
        for (auto& call : done)
            for (auto& phase : call)
                for (auto& piece : phase) check(piece.load() == 1, __LINE__);
    }
}

}  // namespace

int main() {
    const int32_t cores[] = {-1, -1, -1};
    for (int threads = 1; threads <= 3; threads++) {
        check(set_threads(threads, cores), __LINE__);
        run(200);
        for (int i = 0; i < 5; i++) {  // longer than a thread polls before it sleeps
            std::this_thread::sleep_for(std::chrono::milliseconds(3));
            if (i % 2) wake_threads();
            run(1);
        }
    }
    const pid_t child = fork();
    if (child == 0) {
        run(20);
        _exit(0);
    }
    int status = -1;
    check(waitpid(child, &status, 0) == child && status == 0, __LINE__);
    check(set_threads(1, cores), __LINE__);
    return 0;
}
