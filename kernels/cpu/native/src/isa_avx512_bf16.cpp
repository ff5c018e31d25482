// The kernels for AVX-512 with BF16, which multiplies pairs of bf16: AMD since Zen 4, Intel since
// Cooper Lake. The other kernels are those of AVX-512.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

// tests on a processor without AVX-512: functions with the names of the intrinsics
#if defined(QUIRE_EMULATED)
#pragma GCC target("avx2,fma,f16c,bmi2")
#elif defined(__clang__)
#pragma clang attribute push(                                                                    \
    __attribute__((                                                                              \
        target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")
#endif

namespace avx512_bf16 {
#define QUIRE_BF16 1
#define QUIRE_BASE isa_avx512
#ifdef QUIRE_EMULATED
#include "emulated_avx512.h"
#endif
#include "vec_avx512.h"
#include "ints_avx512.h"
#include "eight_x86.h"
#include "kernels.inl"
}  // namespace avx512_bf16

#if defined(__clang__) && !defined(QUIRE_EMULATED)
#pragma clang attribute pop
#endif

const Isa isa_avx512_bf16 = {"avx512_bf16", avx512_bf16::KERNELS.by_op, &QUIRE_BASE};
#endif
