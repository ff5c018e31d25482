// The kernels for AMX, whose tiles multiply matrices of bf16 and int8: Intel since Sapphire Rapids.
// The other kernels are those of AVX-512 with BF16.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

// tests on a processor without AMX: functions with the names of the intrinsics
#if defined(QUIRE_EMULATED)
#pragma GCC target("avx2,fma,f16c,bmi2")
#elif defined(__clang__)
#pragma clang attribute push(                                                                 \
    __attribute__((target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni," \
                          "avx512bf16,amx-tile,amx-bf16,amx-int8"))),                         \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")
#pragma GCC target("amx-tile,amx-bf16,amx-int8")
#endif

namespace amx {
#define QUIRE_BF16 1
#define QUIRE_BASE isa_avx512_bf16
#define QUIRE_AMX 1
#ifdef QUIRE_EMULATED
#include "emulated_avx512.h"
#include "emulated_amx.h"
#endif
#include "vec_avx512.h"
#include "ints_avx512.h"
#include "eight_x86.h"
#include "kernels.inl"
}  // namespace amx

#if defined(__clang__) && !defined(QUIRE_EMULATED)
#pragma clang attribute pop
#endif

const Isa isa_amx = {"amx", amx::KERNELS.by_op, &QUIRE_BASE};
#endif
