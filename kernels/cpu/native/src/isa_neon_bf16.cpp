// The kernels that multiply bf16, for NEON with products of pairs of bf16: Neoverse V1, Apple M2.
// The other kernels are those of NEON with products of matrices of bytes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "isa.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("dotprod,i8mm,bf16"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm+bf16")
#endif

namespace neon_bf16 {
#define QUIRE_BF16 1
#define QUIRE_BASE isa_neon_i8mm
#define QUIRE_BFMMLA 1
#include "vec_neon.h"
#include "ints_neon.h"
#include "eight_neon.h"
#include "kernels.inl"
}  // namespace neon_bf16

#ifdef __clang__
#pragma clang attribute pop
#endif

const Isa isa_neon_bf16 = {"neon_bf16", neon_bf16::KERNELS.by_op, &QUIRE_BASE};
#endif
