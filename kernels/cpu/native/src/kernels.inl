// All kernels, in terms of Vec. Each isa_*.cpp includes this in a namespace of its own, under its own target.

#include "math.inl"
#include "norm.inl"
#include "elementwise.inl"
#include "linear.inl"
#include "sampling.inl"

// In the order of Op.
constexpr Kernel KERNELS[NUM_OPS] = {
    rms_norm,
    add_rms_norm,
    silu_and_mul,
    embedding,
    linear,
    nullptr,  // linear_int8
    nullptr,  // linear_int4
    nullptr,  // rotary
    nullptr,  // write_kv
    nullptr,  // rotary_and_write_kv
    nullptr,  // attention
    argmax,
    sample,
    gather_rows,
};
