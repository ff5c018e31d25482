// The part of the library's C interface (abi.h) for ranks, processes of one machine that have the
// parts of a model between them.
#pragma once
#include "abi.h"

// What the ranks of a group share, zeros at first:
//
//   line 0      why no exchange can end any more, LOST or LATE + rank; else 0
//   line 1 + r  how many exchanges rank r has begun; how many threads sleep until that changes
//   from header_bytes on: [2][num_ranks][part_floats] fp32, the ranks' parts of an exchange
//
// In an exchange a rank writes its part, meets the others once, and reads all parts. The next
// exchange uses the other half: a rank that writes there has met all others since they read it.
constexpr int64_t LINE_BYTES = 64;
constexpr int32_t LOST = 1, LATE = 2;
constexpr int64_t header_bytes(int64_t num_ranks) {
    return (LINE_BYTES * (1 + num_ranks) + 4095) / 4096 * 4096;
}

// One call is an exchange, or several, of as many rows as fit part_floats. All ranks make the same
// calls with the same rows, in the same order; those of a process run one at a time, since runs do.
// sequence: how many exchanges this rank has begun. A rank that waits polls for awake_ns before it
// sleeps. If another one does not come for timeout_ns, or line 0 is set, the run ends with what
// line 0 has then.
struct Exchange : Call {
    void* memory;
    int64_t* sequence;
    int64_t rank, num_ranks, part_floats, awake_ns, timeout_ns;
};

// out [rows, size] = the sum of all ranks' x [rows, size], added in fp32 in the order of ranks and
// rounded once. x_dtype: Dtype of x.
struct AllReduce : Exchange {
    const void* x;
    void* out;
    int64_t x_row, out_row, size, x_dtype;
};

// out [rows, size]: columns starts[r] to starts[r + 1] are rank r's x. starts [num_ranks + 1]. Both
// have the call's dtype.
struct AllGather : Exchange {
    const void* x;
    void* out;
    const int64_t* starts;
    int64_t x_row, out_row, size;
};
