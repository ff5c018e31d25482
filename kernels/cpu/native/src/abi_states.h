// The part of the library's C interface (abi.h) for layers that keep a state (kernels/states.py).
// The distance between the places of a state is state_row. Results are contiguous.
#pragma once
#include "abi.h"

enum Gate : int32_t { GATE_NONE = 0, GATE_SIGMOID = 1, GATE_SILU = 2 };

// x [rows, heads, size] times Gate(gate) -> out; gate [rows, heads, gate_size], where gate_size is
// `size` or 1.
struct Multiply : Call {
    const void* x;
    const void* gate;
    void* out;
    int64_t x_row, x_head, gate_row, gate_head;
    int64_t heads, size, gate_size;
    int64_t activation;  // Gate
};

// x and gate [rows, size] -> out, as gated_rms_norm with groups of group_size; weight [weight_size]
// of weight_dtype, as in RmsNorm, where weight_size is `size` or group_size.
struct GatedRmsNorm : Call {
    const void* x;
    const void* gate;
    const void* weight;
    void* out;
    int64_t x_row, gate_row;
    int64_t size, group_size, weight_size, gate_first;
    double eps;
    int64_t weight_dtype;  // Dtype
};

// x [rows, channels] -> out, as short_conv; weight [channels, taps], bias [channels] or null, state
// [., taps - 1, channels].
struct ShortConv : Call {
    const void* x;
    const void* weight;
    const void* bias;
    void* out;
    void* state;
    int64_t x_row, state_row;
    int64_t channels, taps;
    int64_t activation;  // Gate
};

// query and key [rows, key_heads, key_size], value [rows, value_heads, value_size], decay and beta
// [rows, value_heads] -> out [rows, value_heads, value_size], as gated_delta_rule; state [.,
// value_heads, key_size, value_size]. decays_rows: decay is [rows, value_heads, key_size] and
// dt_bias [value_heads, key_size].
struct GatedDeltaRule : Call {
    const void* query;
    const void* key;
    const void* value;
    const void* decay;
    const void* beta;
    const float* a_log;
    const float* dt_bias;
    void* out;
    float* state;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
    int64_t decay_row, decay_head, beta_row, state_row;
    int64_t key_heads, value_heads, key_size, value_size, is_interleaved, decays_rows;
};

// x [rows, heads, head_size], dt [rows, heads], b and c [rows, groups, state_size] -> out [rows,
// heads, head_size], as selective_scan; state [., heads, head_size, state_size].
struct SelectiveScan : Call {
    const void* x;
    const void* dt;
    const void* b;
    const void* c;
    const float* a_log;
    const float* d;
    const float* dt_bias;
    void* out;
    float* state;
    int64_t x_row, x_head, dt_row, b_row, b_head, c_row, c_head, state_row;
    int64_t heads, head_size, groups, state_size;
};
