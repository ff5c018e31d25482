// The kernels of integers for NEON with dot products of four bytes: Cortex-A76, Neoverse N1, Apple
// M1. The other kernels are those of NEON.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "isa.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

namespace neon_dotprod {
#define QUIRE_INTEGERS 1
#define QUIRE_DOTPROD 1
#include "vec_neon.h"
#include "ints_neon.h"
#include "eight_neon.h"
#include "kernels.inl"
}  // namespace neon_dotprod

#ifdef __clang__
#pragma clang attribute pop
#endif

const Isa isa_neon_dotprod = {"neon_dotprod", neon_dotprod::KERNELS.by_op, &isa_neon};
#endif
