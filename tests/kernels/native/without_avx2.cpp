// Takes the place of isa_avx2.cpp in the library with emulated instruction sets, which is used for
// those that the processor lacks: AVX2, without which there is no library, takes a third of the
// compiler's time. A call is refused, as one that no kernel computes.
#include "isa.h"

static const Kernel NONE[NUM_OPS] = {};
const Isa isa_avx2 = {"avx2", NONE, nullptr};
