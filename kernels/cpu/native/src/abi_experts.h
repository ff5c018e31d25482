// The part of the library's C interface (abi.h) for mixtures of experts.
#pragma once
#include "abi.h"

constexpr int64_t MAX_EXPERTS = 1024;  // of a layer

// logits fp32 [rows, count] -> ids and weights [rows, top_k], as route_experts (kernels/moe.py);
// bias [count] or null. count is at most MAX_EXPERTS; group_best is 1 or 2.
struct RouteExperts : Call {
    const float* logits;
    const float* bias;
    int32_t* ids;
    float* weights;
    int64_t logits_row, count, top_k, is_sigmoid, renormalize, num_groups, top_groups, group_best;
    double scale, added;
};

// Orders the pairs of row and expert, ids [rows, top_k], by expert: those of expert e have the
// places starts[e] to starts[e + 1], ascending by row. tokens [rows * top_k]: the row of each
// place; places [rows, top_k]: the place of each pair. counts [count], unless null: as in
// CountExperts.
struct SortByExpert : Call {
    const int32_t* ids;
    int32_t* starts;
    int32_t* tokens;
    int32_t* places;
    int64_t* counts;
    int64_t count, top_k;
};

// counts [count] += how many of ids [rows, top_k] name each expert, as count_experts
// (kernels/moe.py); slots [rows] or null.
struct CountExperts : Call {
    const int32_t* ids;
    const int64_t* slots;
    int64_t* counts;
    int64_t count, top_k;
};

// x fp32 [rows * top_k, size] in the order of SortByExpert -> out [rows, size]: the sum of each
// row's pairs, times weights [rows, top_k], in their order.
struct CombineExperts : Call {
    const float* x;
    const int32_t* places;
    const float* weights;
    void* out;
    int64_t x_row, out_row, size, top_k;
};

// In place: out += sigmoid(gate) * x; x and out [rows, size], gate fp32 [rows].
struct AddGated : Call {
    const void* x;
    const float* gate;
    void* out;
    int64_t x_row, gate_row, out_row, size;
};

// In place: weights [rows, top_k] times the scale of each of ids, both contiguous; scales
// [experts].
struct ScaleByExpert : Call {
    float* weights;
    const int32_t* ids;
    const float* scales;
    int64_t top_k;
};

// A linear layer of each of `count` experts, all of the same kind and size, for their places in the
// order of SortByExpert: out [places, .]. `kind`, for OP_EXPERTS_LINEAR_BLOCKS: the Op of one
// layer.
// x [places, in_features], or with `tokens` x [rows, in_features], whose row tokens[place] belongs
// to a place. weights, scales and biases [count] hold the members of Linear and QuantizedLinear of
// each expert; the members themselves are null. The call's rows are tokens, with top_k places each.
struct ExpertsLinear : QuantizedLinear {
    const int64_t* weights;  // addresses, as all_scales and biases
    const int64_t* all_scales;
    const int64_t* biases;
    const int32_t* starts;
    const int32_t* tokens;
    int64_t count, top_k, kind;
};
