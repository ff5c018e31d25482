// What an instruction set's file offers: one kernel per operation. The same sources (*.inl) are compiled once for each set.
#pragma once
#include "abi.h"
#include "pool.h"

// Runs on every thread of the pool; each takes pieces of the call's work. A barrier follows every call.
using Kernel = void (*)(const Call&, const Step&, const Worker&);

struct Isa {
    const char* name;
    const Kernel* kernels;  // [NUM_OPS], by Op; null: not offered
};

extern const Isa isa_avx2, isa_avx512, isa_amx;

inline int64_t rows_of(const Call& call, const Step& step) {
    return call.rows >= 0 ? call.rows : call.rows == -1 ? step.num_tokens : step.num_logits;
}

// Rows are handed out in pieces, so that a piece is worth being taken: about 4096 elements.
inline int64_t piece_of_rows(int64_t row_size) { return row_size >= 4096 ? 1 : row_size < 1 ? 4096 : (4095 + row_size) / row_size; }
