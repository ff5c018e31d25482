/* For kernels from outside Quire, in C or C++: the arguments of a function that native programs
 * call. quire.kernels.cpu.native.external has the Python side, docs/extending.md an example. This
 * header needs no other file of Quire. */
#ifndef QUIRE_PLUGIN_H
#define QUIRE_PLUGIN_H

#include <stdint.h>

#define QUIRE_PLUGIN_ABI 1
#define QUIRE_MAX_TENSORS 8
#define QUIRE_MAX_NUMBERS 4

enum { QUIRE_BF16 = 0, QUIRE_F32 = 1, QUIRE_OTHER = 2 };

/* The tensors [rows, size] and numbers of a call, in the order in which Python passes them. A
 * tensor without rows, such as a weight, has row 0 and its number of elements as size. Elements of
 * a row are contiguous. */
typedef struct {
    void* data[QUIRE_MAX_TENSORS];
    int64_t row[QUIRE_MAX_TENSORS]; /* elements from one row to the next */
    int64_t size[QUIRE_MAX_TENSORS];
    int64_t dtype[QUIRE_MAX_TENSORS];
    double numbers[QUIRE_MAX_NUMBERS];
} quire_arguments;

/* Computes the rows from first to first + count - 1. Several threads call it at once for different
 * rows. A row's result must depend on that row alone, in one order of additions, so that a
 * request's tokens do not depend on its batch. It must not throw. */
typedef void (*quire_function)(const quire_arguments* arguments, int64_t first, int64_t count);

#endif
