// All kernels, in terms of Vec. Each isa_*.cpp includes this in its own namespace, under its own
// target.

#include "math.inl"
#include "norm.inl"
#include "elementwise.inl"
#include "linear.inl"
#include "quantized.inl"
#include "experts.inl"
#include "kv_cache.inl"
#include "attention_tile.inl"
#include "attention.inl"

#ifdef QUIRE_AMX
// Those that use tiles; the others are AVX-512's.
struct Kernels {
    Kernel by_op[NUM_OPS] = {};
    constexpr Kernels() {
        by_op[OP_LINEAR] = linear;
        by_op[OP_LINEAR_INT8] = quantized::linear_int8;
        by_op[OP_LINEAR_INT4] = quantized::linear_int4;
        by_op[OP_ATTENTION] = attention;
        by_op[OP_EXPERTS_LINEAR] = experts_linear;
        by_op[OP_EXPERTS_LINEAR_INT8] = quantized::experts_linear_int8;
        by_op[OP_EXPERTS_LINEAR_INT4] = quantized::experts_linear_int4;
    }
};
constexpr Kernels KERNELS;
#else
#include "rotary.inl"
#include "sampling.inl"

// In the order of Op.
constexpr Kernel KERNELS[NUM_OPS] = {
    rms_norm,
    add_rms_norm,
    silu_and_mul,
    embedding,
    linear,
    quantized::linear_int8,
    quantized::linear_int4,
    rotary,
    write_kv,
    rotary_and_write_kv,
    attention,
    argmax,
    sample,
    gather_rows,
    quantized::quantize_int8,
    quantized::quantize_int4,
    quantized::embedding_int8,
    embedding_packed,
    gather_logprobs,
    next_tokens,
    quantized::quantized_linear<quantized::Q8_0>,
    quantized::quantized_linear<quantized::Q4_0>,
    quantized::quantized_linear<quantized::Q4_1>,
    quantized::quantized_linear<quantized::Q4_K>,
    quantized::quantized_linear<quantized::Q5_K>,
    quantized::quantized_linear<quantized::Q6_K>,
    quantized::gguf_embedding<quantized::Q8_0>,
    quantized::gguf_embedding<quantized::Q4_0>,
    quantized::gguf_embedding<quantized::Q4_1>,
    quantized::gguf_embedding<quantized::Q4_K>,
    quantized::gguf_embedding<quantized::Q5_K>,
    quantized::gguf_embedding<quantized::Q6_K>,
    gelu_tanh_and_mul,
    scale,
    add,
    quantized::quantized_linear<quantized::Q5_0>,
    quantized::quantized_linear<quantized::Q5_1>,
    quantized::quantized_linear<quantized::IQ4_NL>,
    quantized::gguf_embedding<quantized::Q5_0>,
    quantized::gguf_embedding<quantized::Q5_1>,
    quantized::gguf_embedding<quantized::IQ4_NL>,
    quantized::quantized_linear<quantized::INT4_32>,
    quantized::quantized_linear<quantized::INT4_128>,
    quantized::gguf_embedding<quantized::INT4_32>,
    quantized::gguf_embedding<quantized::INT4_128>,
    route_experts,
    sort_by_expert,
    combine_experts,
    add_gated,
    experts_linear,
    quantized::experts_linear_int8,
    quantized::experts_linear_int4,
    quantized::experts_linear_blocks,
    external,
};
#endif
