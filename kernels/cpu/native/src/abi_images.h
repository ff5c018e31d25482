// The part of the library's C interface (abi.h) for models that read images.
#pragma once
#include "abi.h"

// In place, x [rows, size]: the row of a token whose image_rows is i >= 0 becomes table[i], or gets
// it added.
struct TableRows : Call {
    void* x;
    const void* table;
    int64_t x_row, table_row, size;
};

// x [rows, size] -> out [rows, size], between bounds[0] and bounds[1], which are rounded to the
// activations' dtype.
struct Clamp : Call {
    const void* x;
    void* out;
    const float* bounds;
    int64_t x_row, out_row, size;
};
