// The library's C interface. calls.py reads this file and the other abi_*.h: one member or several
// of one type in a declaration, a pointer alone.
// A Call is one operation with its operands' addresses. A Step holds what differs from step to
// step. quire_run runs calls one after another. Row strides and counts are in elements, not bytes.
// Rows of an operand are contiguous; the memory between two rows is not accessed.
#pragma once
#include <cstdint>

#define QUIRE_ABI_VERSION 34
#define QUIRE_EXPORT extern "C" __attribute__((visibility("default")))

enum Dtype : int32_t { BF16 = 0, F32 = 1, INT8 = 2 };  // INT8: only for caches

enum Op : int32_t {
    OP_RMS_NORM = 0,
    OP_ADD_RMS_NORM,
    OP_SILU_AND_MUL,
    OP_EMBEDDING,
    OP_LINEAR,
    OP_LINEAR_INT8,
    OP_LINEAR_INT4,
    OP_ROTARY,
    OP_WRITE_KV,
    OP_ROTARY_AND_WRITE_KV,
    OP_ATTENTION,
    OP_ARGMAX,
    OP_SAMPLE,
    OP_GATHER_ROWS,
    OP_QUANTIZE_INT8,
    OP_QUANTIZE_INT4,
    OP_EMBEDDING_INT8,
    OP_EMBEDDING_PACKED,
    OP_GATHER_LOGPROBS,
    OP_NEXT_TOKENS,
    OP_LINEAR_Q8_0,
    OP_LINEAR_Q4_0,
    OP_LINEAR_Q4_1,
    OP_LINEAR_Q4_K,
    OP_LINEAR_Q5_K,
    OP_LINEAR_Q6_K,
    OP_EMBEDDING_Q8_0,
    OP_EMBEDDING_Q4_0,
    OP_EMBEDDING_Q4_1,
    OP_EMBEDDING_Q4_K,
    OP_EMBEDDING_Q5_K,
    OP_EMBEDDING_Q6_K,
    OP_GELU_TANH_AND_MUL,
    OP_SCALE,
    OP_ADD,
    OP_LINEAR_Q5_0,
    OP_LINEAR_Q5_1,
    OP_LINEAR_IQ4_NL,
    OP_EMBEDDING_Q5_0,
    OP_EMBEDDING_Q5_1,
    OP_EMBEDDING_IQ4_NL,
    OP_LINEAR_INT4_32,
    OP_LINEAR_INT4_128,
    OP_EMBEDDING_INT4_32,
    OP_EMBEDDING_INT4_128,
    OP_ROUTE_EXPERTS,
    OP_SORT_BY_EXPERT,
    OP_COMBINE_EXPERTS,
    OP_ADD_GATED,
    OP_EXPERTS_LINEAR,
    OP_EXPERTS_LINEAR_INT8,
    OP_EXPERTS_LINEAR_INT4,
    OP_EXPERTS_LINEAR_BLOCKS,
    OP_EXTERNAL,
    OP_LINEAR_MXFP4,
    OP_EMBEDDING_MXFP4,
    OP_COUNT_EXPERTS,
    OP_LAYER_NORM,
    OP_ADD_LAYER_NORM,
    OP_GELU,
    OP_GELU_TANH,
    OP_SILU,
    OP_RELU,
    OP_GELU_AND_MUL,
    OP_ENCODER_ATTENTION,
    OP_ADD_LORA,
    OP_ADD_LORA_EMBEDDING,
    OP_SPREAD_LOGITS,
    OP_ALL_REDUCE,
    OP_ALL_GATHER,
    OP_RELU_SQUARED,
    OP_SOFT_CAP,
    OP_MULTIPLY,
    OP_GATED_RMS_NORM,
    OP_SHORT_CONV,
    OP_GATED_DELTA_RULE,
    OP_SELECTIVE_SCAN,
    OP_SCALE_BY_EXPERT,
    OP_ROTARY_INTERLEAVED,
    OP_WRITE_LATENTS,
    OP_HEADS_LINEAR,
    OP_REPLACE_ROWS,
    OP_ADD_ROWS,
    OP_STACK_STREAMS,
    OP_MATCH_MAGNITUDE,
    OP_ALTUP_PREDICT,
    OP_ALTUP_CORRECT,
    OP_GAUSSIAN_TOP_K,
    OP_CLAMP,
    OP_LINEAR_INT2_64,
    OP_LINEAR_INT2_128,
    OP_EMBEDDING_INT2_64,
    OP_EMBEDDING_INT2_128,
    NUM_OPS,
};

// The inputs of one step: T tokens of B requests, laid out as in AttentionMetadata
// (kernels/ops.py). OP_NEXT_TOKENS writes the members that are not const.
struct Step {
    int64_t num_tokens;           // T
    int64_t num_requests;         // B
    int32_t* token_ids;           // [T]
    int64_t* positions;           // [T]
    int64_t* slot_mapping;        // [T]
    int32_t* query_start_loc;     // [B + 1]
    int32_t* seq_lens;            // [B]
    const int32_t* block_tables;  // [B, max_blocks]
    int64_t block_table_row;      // elements from one request's table to the next
    int64_t num_logits;           // R
    int64_t* logits_indices;      // [R] in [0, T): the tokens whose logits are needed
    // elements from the slot_mapping and block_tables of a group of layers to the next group's
    int64_t num_groups, slot_mapping_group, block_table_group;
    const int32_t* token_types;  // [T], or null if the model has none
    const int32_t* adapters;     // [T], or null: the place of each token's LoRA adapter, or -1
    // [B], or null if the model keeps no states: as in StateRows (kernels/metadata.py)
    const int32_t* state_places;
    const int64_t* last_positions;
    const int64_t* copy_positions;
    const int32_t* copy_places;
    // null if the model reads no images: as in ImageRows (kernels/metadata.py)
    const int32_t* image_rows;        // [T]
    const int32_t* position_offsets;  // [3, T]
    int64_t position_offset_row;      // elements from one component's offsets to the next's
    const int32_t* later_tokens;      // [T]
};

struct Call {
    int32_t op;     // Op
    int32_t dtype;  // Dtype of the activations
    int64_t rows;   // of the result; -1: the step's num_tokens, -2: its num_logits
};

// x [rows, heads, size] -> out [rows, heads, size]; weight [size]. x and out may be the same
// memory. heads is 1 for a norm of the hidden state. weight_dtype is that of the activations, or
// F32: then nothing is rounded before the product with the weight.
struct RmsNorm : Call {
    const void* x;
    const void* weight;
    void* out;
    int64_t x_row, x_head, out_row, out_head;
    int64_t heads, size;
    double eps;
    int64_t weight_dtype;  // Dtype
};

// In place: residual += x, x = norm(residual) * weight; x and residual [rows, size].
struct AddRmsNorm : Call {
    void* x;
    void* residual;
    const void* weight;
    int64_t x_row, residual_row, size;
    double eps;
    int64_t weight_dtype;  // as in RmsNorm
};

// x [rows, size] -> out [rows, size]; weight and bias [size] of the activations' dtype, or no bias.
struct LayerNorm : Call {
    const void* x;
    const void* weight;
    const void* bias;
    void* out;
    int64_t x_row, out_row, size;
    double eps;
};

// In place: residual += x, x = LayerNorm(residual); x and residual [rows, size].
struct AddLayerNorm : Call {
    void* x;
    void* residual;
    const void* weight;
    const void* bias;
    int64_t x_row, residual_row, size;
    double eps;
};

// In place: x *= factor, x [rows, size].
struct Scale : Call {
    void* x;
    int64_t x_row, size;
    double factor;
};

// In place: x = cap * tanh(x / cap), x [rows, size] fp32.
struct SoftCap : Call {
    float* x;
    int64_t x_row, size;
    double cap;
};

// In place: residual += x, both [rows, size].
struct Add : Call {
    const void* x;
    void* residual;
    int64_t x_row, residual_row, size;
};

// x [rows, size] -> out [rows, size], of OP_GELU, OP_GELU_TANH, OP_SILU, OP_RELU and
// OP_RELU_SQUARED.
struct Activate : Call {
    const void* x;
    void* out;
    int64_t x_row, out_row, size;
};

// x [rows, 2 * size] -> out [rows, size]. Also of OP_GELU_TANH_AND_MUL and OP_GELU_AND_MUL.
struct SiluAndMul : Call {
    const void* x;
    void* out;
    int64_t x_row, out_row, size;
};

enum Ids : int64_t { TOKEN_IDS = 0, POSITIONS = 1, TOKEN_TYPES = 2 };  // members of the step
// What an id gets that the table does not have: NaN, zeros, or the table's first row (that one only
// from OP_EMBEDDING).
enum Absent : int64_t { ABSENT_NAN = 0, ABSENT_ZEROS = 1, ABSENT_FIRST = 2 };

// out [rows, size] = table[ids - first_id], table [num_ids, size]; for OP_EMBEDDING_PACKED in the
// layout of quire_pack_linear. Other ids give what `absent` says.
struct Embedding : Call {
    const void* table;
    void* out;
    int64_t out_row, num_ids, size;
    int64_t ids;               // Ids
    int64_t first_id, absent;  // Absent
};

// out [rows, size] = x[step.logits_indices]
struct GatherRows : Call {
    const void* x;
    void* out;
    int64_t x_row, out_row, size;
};

// In place: rotates the first rotary_dim elements of each head by the step's positions, i paired
// with i + rotary_dim / 2, or 2 * i with 2 * i + 1 for OP_ROTARY_INTERLEAVED. query [rows, heads,
// .], key [rows, kv_heads, .]; cos_sin [., rotary_dim] fp32, cosines before sines.
// components [rotary_dim / 2], unless null: which of the step's position_offsets is added to the
// position that turns a pair, 0, 1 or 2.
struct Rotary : Call {
    void* query;
    void* key;
    const float* cos_sin;
    const int32_t* components;
    int64_t query_row, query_head, key_row, key_head;
    int64_t heads, kv_heads, rotary_dim;
};

// key and value [rows, kv_heads, head_dim] -> the step's slots of the caches [blocks, block_size,
// kv_heads, head_dim]. A negative slot is not written. cache_block: numbers from one block of a
// cache to the next. cache_dtype is that of the activations, or INT8 in the layout of kv_cache.inl;
// head_dim is then a multiple of 16.
struct WriteKv : Call {
    const void* key;
    const void* value;
    void* key_cache;
    void* value_cache;
    int64_t key_row, key_head, value_row, value_head;
    int64_t kv_heads, head_dim, block_size, cache_block;
    int64_t cache_dtype;  // Dtype
    int64_t group;        // of the layer, see Step
};

// Rotary, then WriteKv of the rotated key.
struct RotaryAndWriteKv : Rotary {
    const void* value;
    void* key_cache;
    void* value_cache;
    int64_t value_row, value_head;
    int64_t head_dim, block_size, cache_block;
    int64_t cache_dtype, group;
};

// query [rows, heads, head_dim] over the context in the caches [blocks, block_size, kv_heads,
// head_dim] -> out, contiguous. head_dim is a multiple of 8, at most MAX_HEAD_DIM (kv_cache.inl).
// cache_block and cache_dtype: as in WriteKv. sliding_window: the number of positions a token sees,
// up to and including its own; 0: all. softcap c replaces a logit x by c tanh(x / c); 0: no change.
// sinks [heads], unless null: one more logit of each head's softmax, without a value.
struct Attention : Call {
    const void* query;
    const void* key_cache;
    const void* value_cache;
    void* out;
    int64_t query_row, query_head;
    int64_t heads, kv_heads, head_dim, block_size, cache_block, sliding_window;
    int64_t cache_dtype, group;
    double scale, softcap;
    const float* sinks;
    // Of latent attention (kernels/latent.py), where key_cache is value_cache: a value is the first
    // value_dim numbers of its key, and out is [rows, heads, value_dim]; query holds the first
    // value_dim numbers of a query, rotary_query [rows, heads, head_dim - value_dim] the others.
    // Else value_dim is head_dim, and rotary_query null.
    const void* rotary_query;
    int64_t rotary_query_row, rotary_query_head, value_dim;
    int64_t head_parts;  // items into which the query heads of a KV head are divided
    int64_t
        sees_later;  // whether a token also sees the step's later_tokens positions after its own
};

// query [rows, heads, head_dim] over key and value [rows, kv_heads, head_dim] of the same request
// -> out, contiguous; requests are those of the step's query_start_loc. head_dim is a multiple of
// 8, at most 256.
// window: the largest distance that a token sees; 0: all. bias [heads, 2 * bias_distance + 1],
// unless null, as in encoder_attention (kernels/encoder.py). is_whole: all tokens of the step are
// one request.
struct EncoderAttention : Call {
    const void* query;
    const void* key;
    const void* value;
    const float* bias;
    void* out;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
    int64_t heads, kv_heads, head_dim, window, bias_distance, is_whole;
    double scale;
};

enum Epilogue : int32_t {
    PLAIN = 0,
    GATED = 1,
    GATED_GELU_TANH = 2,
    GATED_CLAMPED = 3,
    GATED_GELU = 4,
    GELU = 5,
    GELU_TANH = 6,
    SILU = 7,
    RELU = 8,
    RELU_SQUARED = 9,
};
constexpr bool is_gated(int32_t epilogue) { return epilogue >= GATED && epilogue <= GATED_GELU; }

// out [rows, out_features] = x [rows, in_features] times weight^T, plus bias; then Activate, if the
// epilogue names one. With GATED the first half of the weight's rows is the gate's, out [rows,
// out_features / 2] is SiluAndMul of the product, and out_features is a multiple of 32;
// GATED_GELU_TANH and GATED_GELU are the same with GELU, GATED_CLAMPED with ClampedSwiGLU
// (kernels/moe.py). weight is packed (quire_pack_linear). bias [out_features] has the activations'
// dtype, or is null.
struct Linear : Call {
    const void* x;
    const void* weight;
    const void* bias;
    void* out;
    int64_t x_row, out_row;
    int64_t in_features, out_features;
    int32_t epilogue;               // Epilogue
    int32_t out_dtype;              // Dtype of out: that of the activations, or F32
    double gate_scale, gate_limit;  // of GATED_CLAMPED
};

// logits fp32 [rows, vocab_size] -> out [rows]: the lowest index of each row's largest logit;
// is_finite [rows]: 1 if the row has no NaN and no infinity.
struct Argmax : Call {
    const float* logits;
    int64_t* out;
    uint8_t* is_finite;
    int64_t logits_row, vocab_size;
};

// logits fp32 [rows, vocab_size] -> out [rows]: one token drawn from each row. The columns [rows]
// are those of sample_tokens (kernels/ops.py).
struct Sample : Call {
    const float* logits;
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const int64_t* seeds;
    const int64_t* positions;
    int64_t* out;
    int64_t logits_row, vocab_size;
};

// As Linear, with an int8 or int4 weight and scales as written by Quantize, or with those of GGUF's
// blocks (gguf_types.inl). x is quantized, and the results are scaled and added in fp32.
struct QuantizedLinear : Linear {
    const void* scales;
};

// Quantizes a linear layer's weight [out_features, in_features] to integers with scales, laid out
// as in quantize.inl. The call's rows are unused. packed is 64-byte aligned.
struct Quantize : Call {
    const void* weight;
    void* packed;
    void* scales;
    int64_t weight_row, in_features, out_features;
};

// As Embedding, from an int8 table written by Quantize or from GGUF's blocks.
struct EmbeddingInt8 : Embedding {
    const void* scales;
};

// logits fp32 [rows, vocab_size], token_ids [rows] -> ids and logprobs [rows, k + 1], ranks [rows],
// as in gather_logprobs (kernels/ops.py).
struct GatherLogprobs : Call {
    const float* logits;
    const int64_t* token_ids;
    int32_t* ids;
    float* logprobs;
    int32_t* ranks;
    int64_t logits_row, vocab_size, k;
};

// out [rows, vocab_size] = `absent`, but x [rows, size] at token_ids [size], which ascend.
struct SpreadLogits : Call {
    const float* x;
    const int32_t* token_ids;
    float* out;
    int64_t x_row, out_row;
    int64_t size, vocab_size;
    double absent;
};

// Connects two steps that run as one; all their rows are decodes. Copies this step's chosen
// token_ids and is_finite [rows] to kept and kept_finite [rows], and changes the step into the one
// that computes these tokens. draw_positions [rows], unless null, advance too. is_last: the step is
// not changed.
struct NextTokens : Call {
    const int64_t* token_ids;
    const uint8_t* is_finite;
    int64_t* kept;
    uint8_t* kept_finite;
    int64_t* draw_positions;
    int64_t block_size, is_last;
};

// A function of a plugin (include/quire/plugin.h), called with what lies from data0 on.
struct External : Call {
    void* data0;
    void* data1;
    void* data2;
    void* data3;
    void* data4;
    void* data5;
    void* data6;
    void* data7;
    int64_t row[8];
    int64_t size[8];
    int64_t tensor_dtype[8];
    double numbers[4];
    int64_t function;  // its address
};

// isa is the name of an instruction set, in order of preference "amx", "avx512_bf16", "avx512",
// "avx2". Returns 1 if this processor and operating system support it.
QUIRE_EXPORT int32_t quire_isa_supported(const char* isa);
QUIRE_EXPORT int32_t quire_abi_version();
// Chooses the instruction set of all later runs. Returns 0, or -1 if it is not supported.
QUIRE_EXPORT int32_t quire_use_isa(const char* isa);
// Sets the number of threads of all later runs, the caller's included. cores [num_threads]: what a
// thread is pinned to, -1: none. The caller's is never pinned: if it runs on another one's core,
// that one moves to cores[0]. Returns 0, or -1 if they cannot be created: then there is one.
QUIRE_EXPORT int32_t quire_set_threads(int32_t num_threads, const int32_t* cores);
// A hint that a run follows within 0.1 ms.
QUIRE_EXPORT void quire_wake();
// Runs the calls in order and returns when all are done. Returns 0; -1 - i if call i is no
// operation of the chosen instruction set; line 0 of abi_ranks.h if an exchange ended the run.
QUIRE_EXPORT int32_t quire_run(const Call* const* calls, int32_t num_calls, const Step* step);
// As quire_run, and writes when each thread worked on each call: times [num_calls, num_threads, 2],
// begin and end in nanoseconds of CLOCK_MONOTONIC. Entries of a thread that had no part in a call
// are not written, nor are those of threads from num_threads on.
QUIRE_EXPORT int32_t quire_run_timed(const Call* const* calls, int32_t num_calls, const Step* step,
                                     int64_t* times, int32_t num_threads);

// Packs a linear layer's weight [out_features, in_features] into panels of 16 outputs, on all
// threads. bf16: [panel][k / 2][16][2], with pairs of consecutive k together; F32: [panel][k][16].
// Incomplete panels and pairs are padded with zeros. packed is 64-byte aligned.
QUIRE_EXPORT void quire_pack_linear(const void* weight, int64_t weight_row, int32_t dtype,
                                    int64_t out_features, int64_t in_features, void* packed);

// Where the parts of a block lie, as begin and end in bytes.
constexpr int32_t MAX_BLOCK_BYTES = 256;
struct BlockLayout {
    int32_t num_bytes;  // at most MAX_BLOCK_BYTES
    int32_t numbers[2];
    int32_t num_scales;
    int32_t scales[3][3];  // in the order of the packed scales; then 1, 2 or 4 bytes, kept together
};

// Packs rows of blocks (gguf_types.inl) on all threads: numbers
// [panel][block][bytes / 4][16][4], scales [panel][block], each part [bytes / width][16][width].
// rows [num_rows]: the address of each. Incomplete panels are padded with zeros. numbers and scales
// are 64-byte aligned.
QUIRE_EXPORT void quire_pack_blocks(const void* const* rows, int64_t num_rows, int64_t num_blocks,
                                    const BlockLayout* layout, void* numbers, void* scales);
