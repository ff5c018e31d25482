// The kernels of integers for NEON with products of matrices of bytes: Neoverse V1, Apple M2. The
// other kernels are those of NEON.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "isa.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("dotprod,i8mm"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#endif

namespace neon_i8mm {
#define QUIRE_INTEGERS 1
#define QUIRE_DOTPROD 1
#define QUIRE_I8MM 1
#include "vec_neon.h"
#include "ints_neon.h"
#include "eight_neon.h"
#include "kernels.inl"
}  // namespace neon_i8mm

#ifdef __clang__
#pragma clang attribute pop
#endif

const Isa isa_neon_i8mm = {"neon_i8mm", neon_i8mm::KERNELS.by_op, &isa_neon_dotprod};
#endif
