// The part of the library's C interface (abi.h) for LoRA adapters.
#pragma once
#include "abi.h"

constexpr int64_t MAX_LORA_SLICES = 8;

// In place: y [rows, out_features] += scale * B (A x), as add_lora and add_lora_embedding
// (kernels/lora.py) for the adapters in num_places places. Columns begin[s] to begin[s + 1] of y
// belong to slice s. low [rows, num_slices, max_rank] is overwritten. by_logits: row i is the
// step's logits_indices[i], else token i. OP_ADD_LORA_EMBEDDING: x is null, in_features the size of
// the vocabulary. y_dtype: that of the activations, or F32.
struct AddLora : Call {
    const void* x;
    const void* a;
    const void* b;
    const float* scales;  // [num_places, num_slices], as ranks
    const int32_t* ranks;
    void* y;
    float* low;
    int64_t x_row, y_row;
    int64_t in_features, out_features, num_places, num_slices, max_rank;
    int64_t y_dtype, by_logits;
    int64_t begin[9];  // MAX_LORA_SLICES + 1
};
