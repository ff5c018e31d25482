// The part of the library's C interface (abi.h) for latent attention (kernels/latent.py).
#pragma once
#include "abi.h"

// latent [rows, rank] and key [rows, rotary_dim] -> the step's slots of the cache [slots, rank +
// rotary_dim]. A negative slot is not written.
struct WriteLatents : Call {
    const void* latent;
    const void* key;
    void* cache;
    int64_t latent_row, key_row, rank, rotary_dim, group;
};

// A linear layer of each head: x [rows, heads, in_features] -> out [rows, heads, out_features]. The
// weight of a head, packed, begins head_bytes after that of the one before. There is no bias.
struct HeadsLinear : Linear {
    int64_t x_head, out_head, head_bytes, heads;
};
