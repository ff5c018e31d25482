// The C interface of the library: what Python hands over, byte for byte. calls.py mirrors every struct; a test compares sizes and offsets.
// A Call is one operation with its operands' addresses; a Step is what differs from step to step; quire_run runs calls one after another.
// Row strides and counts are in elements, not bytes. Rows of an operand are contiguous; what lies between two rows is never touched.
#pragma once
#include <cstdint>

#define QUIRE_ABI_VERSION 2
#define QUIRE_EXPORT extern "C" __attribute__((visibility("default")))

enum Dtype : int32_t { BF16 = 0, F32 = 1 };

enum Op : int32_t {
    OP_RMS_NORM = 0,
    OP_ADD_RMS_NORM,
    OP_SILU_AND_MUL,
    OP_EMBEDDING,
    OP_LINEAR,
    OP_LINEAR_INT8,
    OP_LINEAR_INT4,
    OP_ROTARY,
    OP_WRITE_KV,
    OP_ROTARY_AND_WRITE_KV,
    OP_ATTENTION,
    OP_ARGMAX,
    OP_SAMPLE,
    OP_GATHER_ROWS,
    NUM_OPS,
};

// What one step brings. T tokens of B requests, laid out as AttentionMetadata (kernels/ops.py) says.
struct Step {
    int64_t num_tokens;               // T
    int64_t num_requests;             // B
    const int32_t* token_ids;         // [T]
    const int64_t* positions;         // [T]
    const int64_t* slot_mapping;      // [T]
    const int32_t* query_start_loc;   // [B + 1]
    const int32_t* seq_lens;          // [B]
    const int32_t* block_tables;      // [B, max_blocks]
    int64_t block_table_row;          // elements from one request's table to the next
};

struct Call {
    int32_t op;     // Op
    int32_t dtype;  // Dtype of the activations
    int64_t rows;   // of the operands; -1: the step's num_tokens
};

// x [rows, heads, size] -> out [rows, heads, size]; weight [size]. Both may be one memory. heads is 1 for a norm of the hidden state.
struct RmsNorm : Call {
    const void* x;
    const void* weight;
    void* out;
    int64_t x_row, x_head, out_row, out_head;
    int64_t heads, size;
    double eps;
};

// In place: residual += x, x = norm(residual) * weight; x and residual [rows, size].
struct AddRmsNorm : Call {
    void* x;
    void* residual;
    const void* weight;
    int64_t x_row, residual_row;
    int64_t size;
    double eps;
};

// x [rows, 2 * size] -> out [rows, size]
struct SiluAndMul : Call {
    const void* x;
    void* out;
    int64_t x_row, out_row;
    int64_t size;
};

// out [rows, size] = table[token_ids]; token_ids null: the step's. An id outside [0, num_ids) gives NaN.
struct Embedding : Call {
    const int32_t* token_ids;
    const void* table;
    void* out;
    int64_t out_row;
    int64_t num_ids, size;
};

// The names of instruction sets in order of preference: "amx", "avx512", "avx2". 1 where this processor and system can run it.
QUIRE_EXPORT int32_t quire_isa_supported(const char* isa);
QUIRE_EXPORT int32_t quire_abi_version();
// Chooses the instruction set of all later runs. 0, or -1 where it is not supported.
QUIRE_EXPORT int32_t quire_use_isa(const char* isa);
// Threads of all later runs, the caller's own among them. cores [num_threads]: the core that each is pinned to, -1: none; the caller's is
// never pinned: where it is found on another's core, that thread moves to cores[0]. 0, or -1 where they cannot be had: then it is one.
QUIRE_EXPORT int32_t quire_set_threads(int32_t num_threads, const int32_t* cores);
// A hint: a run comes within the next tenth of a millisecond.
QUIRE_EXPORT void quire_wake();
// Runs the calls in order; returns when all are done. 0, or -1 - i where call i names no operation of the chosen instruction set.
QUIRE_EXPORT int32_t quire_run(const Call* const* calls, int32_t num_calls, const Step* step);
