// The kernels for AVX2 with FMA: x86 processors since about 2013.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif

namespace avx2 {
#include "vec_avx2.h"
#include "ints_avx2.h"
#include "eight_x86.h"
#include "kernels.inl"
}  // namespace avx2

#ifdef __clang__
#pragma clang attribute pop
#endif

const Isa isa_avx2 = {"avx2", avx2::KERNELS, nullptr};
#endif
