// The kernels for NEON, which every aarch64 processor has.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "isa.h"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace neon {
#include "vec_neon.h"
#include "ints_neon.h"
#include "eight_neon.h"
#include "kernels.inl"
}  // namespace neon

const Isa isa_neon = {"neon", neon::KERNELS, nullptr};
#endif
