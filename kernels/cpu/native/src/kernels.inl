// All kernels, in terms of Vec. Each isa_*.cpp includes this in its own namespace, under its own
// target. Kernels of the files that all of them include are inline, so that those that an
// instruction set takes from its base are not compiled for it.

#include "math.inl"
#include "norm.inl"
#include "elementwise.inl"
#include "linear.inl"
#include "quantized.inl"
#include "experts.inl"
#include "lora.inl"
#include "kv_cache.inl"
#include "attention_tile.inl"
#include "attention.inl"
#include "attention_encoder.inl"

#if defined(QUIRE_BF16) || defined(QUIRE_INTEGERS)
// Those that multiply bf16 or integers with this instruction set's own instructions; the others are
// its base's.
struct Kernels {
    Kernel by_op[NUM_OPS] = {};
    constexpr Kernels() {
#ifdef QUIRE_BF16
        by_op[OP_LINEAR] = linear;
        by_op[OP_ATTENTION] = attention;
        by_op[OP_ENCODER_ATTENTION] = encoder_attention;
        by_op[OP_EXPERTS_LINEAR] = experts_linear;
        by_op[OP_ADD_LORA] = add_lora;
        by_op[OP_HEADS_LINEAR] = heads_linear;
#endif
#if defined(QUIRE_AMX) || defined(QUIRE_INTEGERS)
        using quantized::Int8Dot, quantized::Int4Dot;
        by_op[OP_LINEAR_INT8] = quantized::quantized_linear<Int8Dot>;
        by_op[OP_LINEAR_INT4] = quantized::quantized_linear<Int4Dot>;
        by_op[OP_EXPERTS_LINEAR_INT8] = quantized::experts_linear_of<Int8Dot>;
        by_op[OP_EXPERTS_LINEAR_INT4] = quantized::experts_linear_of<Int4Dot>;
#ifdef QUIRE_AMX
#define BLOCK_KERNEL(F) quantized::if_many<F>
#else
#define BLOCK_KERNEL(F) F
#endif
#define SET(F) by_op[OP_LINEAR_##F] = BLOCK_KERNEL(quantized::quantized_linear<quantized::F>)
        FOR_BLOCK_TYPES(SET);
#undef SET
        by_op[OP_EXPERTS_LINEAR_BLOCKS] = BLOCK_KERNEL(quantized::experts_linear_blocks);
#undef BLOCK_KERNEL
#endif
    }
};
constexpr Kernels KERNELS;
#else
#include "rotary.inl"
#include "sampling.inl"
#include "ranks.inl"
#include "gates.inl"
#include "states.inl"
#include "altup.inl"

// In the order of Op.
constexpr Kernel KERNELS[NUM_OPS] = {
    rms_norm,
    add_rms_norm,
    silu_and_mul,
    embedding,
    linear,
    quantized::quantized_linear<quantized::Int8Dot>,
    quantized::quantized_linear<quantized::Int4Dot>,
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
    quantized::experts_linear_of<quantized::Int8Dot>,
    quantized::experts_linear_of<quantized::Int4Dot>,
    quantized::experts_linear_blocks,
    external,
    quantized::quantized_linear<quantized::MXFP4>,
    quantized::gguf_embedding<quantized::MXFP4>,
    count_experts,
    layer_norm,
    add_layer_norm,
    gelu,
    gelu_tanh,
    silu,
    relu,
    gelu_and_mul,
    encoder_attention,
    add_lora,
    add_lora_embedding,
    spread_logits,
    all_reduce,
    all_gather,
    relu_squared,
    soft_cap,
    multiply,
    gated_rms_norm,
    short_conv,
    gated_delta_rule,
    selective_scan,
    scale_by_expert,
    rotary,
    write_latents,
    heads_linear,
    replace_rows,
    add_table_rows,
    stack_streams,
    match_magnitude,
    altup_predict,
    altup_correct,
    gaussian_top_k,
    clamp,
    quantized::quantized_linear<quantized::INT2_64>,
    quantized::quantized_linear<quantized::INT2_128>,
    quantized::gguf_embedding<quantized::INT2_64>,
    quantized::gguf_embedding<quantized::INT2_128>,
};
#endif
