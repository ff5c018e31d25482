#include "ranks.h"

#include <atomic>

#include "system.h"

namespace {

struct alignas(LINE_BYTES) Line {
    std::atomic<uint32_t> value, sleepers;
};
static_assert(sizeof(Line) == LINE_BYTES && std::atomic<uint32_t>::is_always_lock_free);

// A sleeping rank looks at line 0 so often: whoever sets that need not wake anyone.
constexpr int64_t NAP_NS = 50'000'000;

// counts may pass 2**32
bool has_begun(uint32_t count, uint32_t number) { return (int32_t)(count - number) >= 0; }

int32_t wait_for(const Exchange& a, int64_t rank, uint32_t number) {
    Line* lines = (Line*)a.memory;
    Line& other = lines[1 + rank];
    const int64_t begin = now_ns();
    do {
        for (int i = 0; i < 64; i++) {
            if (has_begun(other.value.load(std::memory_order_acquire), number)) return 0;
            relax();
        }
    } while (now_ns() - begin < a.awake_ns);
    // As Signal in pool.cpp: of "value changes, are there sleepers?" and "one more sleeper, has the
    // value changed?" at least one sees the other.
    other.sleepers.fetch_add(1);
    uint32_t problem = 0;
    for (uint32_t seen; !has_begun(seen = other.value.load(), number);) {
        if ((problem = lines[0].value.load())) break;
        if (now_ns() - begin >= a.timeout_ns) {
            lines[0].value.compare_exchange_strong(problem, (uint32_t)(LATE + rank));
            if (!problem) problem = (uint32_t)(LATE + rank);
            break;
        }
        sleep_for_process(other.value, seen, NAP_NS);
    }
    other.sleepers.fetch_sub(1);
    return (int32_t)problem;
}

}  // namespace

int32_t meet(const Exchange& a) {
    Line* lines = (Line*)a.memory;
    if (uint32_t problem = lines[0].value.load()) return (int32_t)problem;
    Line& mine = lines[1 + a.rank];
    const uint32_t number = (uint32_t)++*a.sequence;
    mine.value.store(number);
    if (mine.sleepers.load()) wake_processes(mine.value);
    for (int64_t rank = 0; rank < a.num_ranks; rank++)
        if (int32_t problem = rank == a.rank ? 0 : wait_for(a, rank, number)) return problem;
    return 0;
}
