// What the file of an instruction set exports: one kernel per operation. The same sources (*.inl)
// are compiled once per instruction set.
#pragma once
#include "../include/quire/plugin.h"
#include "abi.h"
#include "abi_altup.h"
#include "abi_experts.h"
#include "abi_images.h"
#include "abi_latents.h"
#include "abi_lora.h"
#include "abi_ranks.h"
#include "abi_states.h"
#include "pool.h"
#include "ranks.h"

// Runs on every thread of the pool; each takes pieces of the call's work. A barrier follows every
// call.
using Kernel = void (*)(const Call&, const Step&, const Worker&);

struct Isa {
    const char* name;
    const Kernel* kernels;  // [NUM_OPS], by Op; null: as in `base`
    const Isa* base;        // an instruction set that this one includes, or null

    Kernel kernel(int32_t op) const {
        return kernels[op] || !base ? kernels[op] : base->kernel(op);
    }
};

extern const Isa isa_avx2, isa_avx512, isa_avx512_bf16, isa_amx;            // x86
extern const Isa isa_neon, isa_neon_dotprod, isa_neon_i8mm, isa_neon_bf16;  // aarch64

inline int64_t rows_of(const Call& call, const Step& step) {
    return call.rows >= 0 ? call.rows : call.rows == -1 ? step.num_tokens : step.num_logits;
}

// Rows per piece, about 4096 elements, so that the work of a piece outweighs the cost of taking it.
inline int64_t piece_of_rows(int64_t row_size) {
    return row_size >= 4096 ? 1 : row_size < 1 ? 4096 : (4095 + row_size) / row_size;
}
