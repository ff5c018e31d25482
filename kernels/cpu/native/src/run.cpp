// The exported functions: choice of instruction set, number of threads, and the loop over a step's
// calls.
#include <cstring>

#include "isa.h"
#include "system.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

const Isa* chosen = nullptr;

#if defined(__x86_64__)
// __builtin_cpu_supports is not used: with the runtime library of some compilers, such as Zig's, it
// says no to everything.
struct Leaf {
    unsigned a = 0, b = 0, c = 0, d = 0;  // 0 where the processor does not have the leaf
    Leaf(unsigned leaf, unsigned part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};

// Returns whether the system keeps these registers when it switches threads (XCR0: 1 SSE, 2 AVX,
// 5 to 7 AVX-512).
bool keeps(unsigned registers) {
    if (!(Leaf(1, 0).c & bit_OSXSAVE)) return false;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & registers) == registers;
}

bool has_avx2() { return keeps(0x06) && Leaf(1, 0).c & bit_FMA && Leaf(7, 0).b & bit_AVX2; }

#ifdef QUIRE_EMULATED  // isa_avx512.cpp, isa_avx512_bf16.cpp, isa_amx.cpp
bool has_avx512() { return has_avx2(); }
bool has_avx512_bf16() { return has_avx2(); }
bool has_amx() { return has_avx2(); }
#else
bool has_avx512() {
    constexpr unsigned ALL = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    const Leaf seventh(7, 0);
    return has_avx2() && keeps(0xe6) && (seventh.b & ALL) == ALL && seventh.c & bit_AVX512VNNI;
}
bool has_avx512_bf16() { return has_avx512() && Leaf(7, 1).a >> 5 & 1; }

bool has_amx() {
    const unsigned d = Leaf(7, 0).d;
    bool bf16 = d >> 22 & 1, tile = d >> 24 & 1, int8 = d >> 25 & 1;
    return has_avx512_bf16() && bf16 && tile && int8 && enable_tiles();
}
#endif

const Isa* find(const char* name) {
    if (!std::strcmp(name, "amx") && has_amx()) return &isa_amx;
    if (!std::strcmp(name, "avx512_bf16") && has_avx512_bf16()) return &isa_avx512_bf16;
    if (!std::strcmp(name, "avx512") && has_avx512()) return &isa_avx512;
    if (!std::strcmp(name, "avx2") && has_avx2()) return &isa_avx2;
    return nullptr;
}
#elif defined(__aarch64__)
struct Features {
    bool dotprod, i8mm, bf16;
};

#if defined(__linux__)
Features features() {
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    return {(first & HWCAP_ASIMDDP) != 0, (second & HWCAP2_I8MM) != 0, (second & HWCAP2_BF16) != 0};
}
#elif defined(__APPLE__)
bool has(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
Features features() {
    return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_I8MM"),
            has("hw.optional.arm.FEAT_BF16")};
}
#else
Features features() { return {}; }
#endif

const Isa* find(const char* name) {
    const Features has = features();
    const bool i8mm = has.dotprod && has.i8mm;
    if (!std::strcmp(name, "neon_bf16") && i8mm && has.bf16) return &isa_neon_bf16;
    if (!std::strcmp(name, "neon_i8mm") && i8mm) return &isa_neon_i8mm;
    if (!std::strcmp(name, "neon_dotprod") && has.dotprod) return &isa_neon_dotprod;
    if (!std::strcmp(name, "neon")) return &isa_neon;
    return nullptr;
}
#else
const Isa* find(const char*) { return nullptr; }
#endif

struct Run {
    const Call* const* calls;
    const Step* step;
    const Isa* isa;
};

void run(const Worker& worker, void* argument, int32_t index) {
    const Run& all = *static_cast<Run*>(argument);
    const Call& call = *all.calls[index];
    all.isa->kernel(call.op)(call, *all.step, worker);
}

struct TimedRun : Run {
    int64_t* times;
    int32_t num_threads;
};

void run_timed(const Worker& worker, void* argument, int32_t index) {
    const TimedRun& all = *static_cast<TimedRun*>(argument);
    const int64_t begin = now_ns();
    run(worker, static_cast<Run*>(argument), index);
    if (worker.index >= all.num_threads) return;
    int64_t* mine = all.times + 2 * ((int64_t)index * all.num_threads + worker.index);
    mine[0] = begin, mine[1] = now_ns();
}

// 0, or -1 - i if call i cannot run.
int32_t check(const Call* const* calls, int32_t num_calls) {
    for (int32_t i = 0; i < num_calls; i++)
        if (!chosen || calls[i]->op < 0 || calls[i]->op >= NUM_OPS || !chosen->kernel(calls[i]->op))
            return -1 - i;
    return 0;
}

}  // namespace

int32_t quire_isa_supported(const char* isa) { return find(isa) != nullptr; }
int32_t quire_abi_version() { return QUIRE_ABI_VERSION; }

int32_t quire_use_isa(const char* isa) {
    const Isa* found = find(isa);
    if (found) chosen = found;
    return found ? 0 : -1;
}

int32_t quire_set_threads(int32_t num_threads, const int32_t* cores) {
    return num_threads >= 1 && set_threads(num_threads, cores) ? 0 : -1;
}

void quire_wake() { wake_threads(); }

int32_t quire_run(const Call* const* calls, int32_t num_calls, const Step* step) {
    if (int32_t problem = check(calls, num_calls)) return problem;
    Run all{calls, step, chosen};
    return run_on_all(run, &all, num_calls);
}

int32_t quire_run_timed(const Call* const* calls, int32_t num_calls, const Step* step,
                        int64_t* times, int32_t num_threads) {
    if (int32_t problem = check(calls, num_calls)) return problem;
    TimedRun all{{calls, step, chosen}, times, num_threads};
    return run_on_all(run_timed, &all, num_calls);
}
