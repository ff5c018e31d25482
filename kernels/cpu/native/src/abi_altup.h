// The part of the library's C interface (abi.h) for several streams and sparse activations
// (kernels/altup.py). Results are contiguous; the rows of an operand [rows, n, size] are x_head
// apart.
#pragma once
#include "abi.h"

constexpr int64_t MAX_STREAMS = 16;

// x [rows, size], others [rows, heads, size] -> out [rows, 1 + heads, size]
struct StackStreams : Call {
    const void* x;
    const void* others;
    void* out;
    int64_t x_row, others_row, others_head;
    int64_t heads, size;
};

// In place: x [rows, heads, size], like [rows, size], as match_magnitude.
struct MatchMagnitude : Call {
    void* x;
    const void* like;
    int64_t x_row, x_head, like_row;
    int64_t heads, size;
};

// streams [rows, num_streams, size] -> out, as altup_predict; routed [rows, num_streams], weight
// [num_streams * num_streams, num_streams].
struct AltupPredict : Call {
    const void* streams;
    const float* routed;
    const float* weight;
    void* out;
    int64_t streams_row, streams_head, routed_row;
    int64_t num_streams, size;
};

// In place: streams [rows, num_streams, size], as altup_correct; activated [rows, size], routed
// [rows, num_streams], weight [num_streams, num_streams].
struct AltupCorrect : Call {
    void* streams;
    const void* activated;
    const float* routed;
    const float* weight;
    int64_t streams_row, streams_head, activated_row, routed_row;
    int64_t num_streams, size, active;
};

// In place: x [rows, size], as gaussian_top_k.
struct GaussianTopK : Call {
    void* x;
    int64_t x_row, size;
    double deviations;
};
