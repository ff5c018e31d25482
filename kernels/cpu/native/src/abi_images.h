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
