"""Declares the operations of a model with their contracts: shapes, dtypes, in-place results, effect
of NaN.

Must not know: how an operation is implemented, models, requests.

T is the number of tokens of a step, those of all requests concatenated; B the number of requests;
NQ and NKV the query and KV heads; D the head dimension. "dtype" is the model's: every tensor has it
unless another is named. The last dimension is contiguous; other strides are free, so query, key and
value may be views of one projection. kernels/reference/ specifies what an operation computes; all
other implementations agree with it up to rounding (tests/kernels/test_parity.py).

An engine has its own table, `ops = registry.select(device, dtype, overrides)`, and calls
`ops.rms_norm(...)` without dispatch. The functions of this module do the same for occasional
callers, at the cost of a dictionary look-up.
"""

# pyright: reportReturnType=false
# (a contract has no body)

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .altup import altup_correct as altup_correct
from .altup import altup_predict as altup_predict
from .altup import gaussian_top_k as gaussian_top_k
from .altup import match_magnitude as match_magnitude
from .altup import stack_streams as stack_streams
from .choice import LogitChanges as LogitChanges
from .choice import change_logits as change_logits
from .choice import choose_tokens as choose_tokens
from .images import add_rows as add_rows
from .images import clamp as clamp
from .images import replace_rows as replace_rows
from .images import rotary_embedding_by_component as rotary_embedding_by_component
from .latent import latent_attention as latent_attention
from .latent import pack_head_linear as pack_head_linear
from .latent import store_latents as store_latents
from .lora import add_lora as add_lora
from .lora import add_lora_embedding as add_lora_embedding
from .metadata import AttentionMetadata as AttentionMetadata
from .metadata import ImageRows as ImageRows
from .metadata import StateRows as StateRows
from .metadata import make_metadata as make_metadata
from .moe import add_gated as add_gated
from .moe import count_experts as count_experts
from .moe import expert_outputs as expert_outputs
from .moe import fused_moe as fused_moe
from .moe import route_experts as route_experts
from .moe import scale_by_expert as scale_by_expert
from .moe import weighted_sum as weighted_sum
from .registry import operation
from .states import gated_delta_rule as gated_delta_rule
from .states import gated_rms_norm as gated_rms_norm
from .states import multiply as multiply
from .states import selective_scan as selective_scan
from .states import short_conv as short_conv

ABSENT = -(2.0**100)  # the logit of a token that a head does not know


def kv_cache_row(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the number of elements per token and head in a KV cache of `dtype`.

    An int8 cache has D numbers and the 4 bytes of a scale (see reshape_and_cache).
    """
    return head_dim + 4 if dtype == torch.int8 else head_dim


@operation
def embedding(token_ids: Tensor, table: Tensor, first_if_absent: bool = False) -> Tensor:
    """token_ids [T] i32 or i64, each in [0, V); table [V, H] -> [T, H], the table's rows. With
    first_if_absent, a larger id has the first row.
    """


@operation
def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """x [T, H], indices [R] i64, each in [0, T) -> [R, H]: the rows whose logits are needed."""


@operation
def spread_logits(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Logits [R, D] f32 of a part of the vocabulary, token_ids [D] i32 ascending, each in [0,
    vocab_size) -> [R, vocab_size] f32. Those of other tokens are ABSENT.
    """


@operation
def soft_cap(logits: Tensor, cap: float) -> None:
    """In place, logits [R, V] f32: x becomes cap * tanh(x / cap), with cap > 0 (Gemma 2)."""


@operation
def pack_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Lays out weight [N, K] and bias [N]; returns a function x [T, K] -> x weight^T + bias [T, N].

    Sums are in fp32. It is called once per layer, after the layer's weights are filled. The
    returned function may have a method `logits`, which returns [T, N] in fp32 without rounding to
    dtype, and a method `embedding`, which is the operation of that name with the weight as its
    table. An implementation that does not keep the weight may have an attribute `from_parts`: the
    same function of a list of tensors [n, K], which are the weight's N rows in order, and the bias;
    its result has `embedding`. A layer is then packed directly from a mapped file. `release=` is
    called with rows of those tensors once they are packed and need not stay in memory.
    """


@operation
def pack_quantized_linear(
    weight: Tensor, bias: Tensor | None, bits: int
) -> Callable[[Tensor], Tensor]:
    """Works as pack_linear, with the weight [N, K] quantized to 8 or 4 bits.

    Groups of 256 (8 bits) or 64 (4 bits) along K have one scale each; x is quantized likewise. The
    quantized x is scale * {-127 .. 127}. A 4-bit weight is scale * factor * {-8 .. 7}: one scale
    per group, and one integer factor in +-15 per half group. Products are summed exactly within a
    group; groups are added in ascending order in fp32, each with one fused multiply-add. A row of x
    that is not finite gives NaN. The returned function has `logits` and `embedding`; the latter
    maps token ids [T] to rows of the quantized weight [T, K].
    """


@operation
def pack_gguf_linear(
    parts: list[Tensor], types: list[str], bias: Tensor | None, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Works as pack_linear, with a weight whose rows are GGUF's blocks: parts [n, bytes] uint8,
    stacked, each of the type at its place in `types`; bias [N] and results have the dtype.

    The types are Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4, Q4_K, Q5_K and Q6_K, INT4_32 and
    INT4_128 for int4 weights of other checkpoints, and INT2_64 and INT2_128 for ternary ones. x is
    quantized as in pack_quantized_linear, but in groups of 32; sums of their products with a
    block's integers are exact. reference/gguf_linear.py states how scales and minima are applied. A
    row of x that is not finite gives NaN. The returned function has `logits`, and for a weight of
    one type `embedding`, whose rows are the dequantized blocks. An implementation may have an
    attribute `from_parts`, the same function with `release=`, as that of pack_linear. One with an
    attribute `takes_fp8` that is true also multiplies FP8_32 and FP8_128: e4m3 numbers with a scale
    in fp32, by x itself. One with an attribute `quantizes_to_fp8` that is true multiplies x in e4m3
    by those whose type ends with _GROUP, _TOKEN or _STATIC, with scales for 128 numbers of a row,
    for a row, or one that is in the blocks.
    """


@operation
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H]: x / sqrt(mean(x**2) + eps) over the last dimension, times
    weight.

    The row is normalised in fp32 and rounded to the weight's dtype, and its product with the weight
    is rounded to x's (Zhang & Sennrich 2019). The weight has x's dtype (the order of transformers'
    Qwen2 and Llama), or it is fp32 and only the product is rounded (Gemma, OLMo 2). x is [T, H], or
    [T, heads, D] for q/k-norm.
    """


@operation
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """In place, x and residual [T, H], weight [H]: residual += x, then x = rms_norm(residual).

    The sum is rounded to dtype.
    """


@operation
def scale(x: Tensor, factor: float) -> None:
    """In place, x [T, H]: x *= factor in fp32, rounded to dtype."""


@operation
def add(x: Tensor, residual: Tensor) -> None:
    """In place, x and residual [T, H]: residual += x, rounded to dtype."""


@operation
def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I] -> [T, I]: silu(first half) * second half.

    The SiLU is rounded to dtype before the product.
    """


@operation
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I] -> [T, I]: gelu(first half) * second half, with GELU's approximation by tanh.

    The GELU is rounded to dtype before the product (Hendrycks & Gimpel 2016).
    """


@operation
def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    """In place, query [T, NQ, D], key [T, NKV, D]: rotates the first R <= D elements of each head.

    Element i is paired with i + R / 2, as in NeoX (Su et al. 2021). positions [T] i64, each in [0,
    max_position); cos_sin_cache [max_position, R] fp32: R / 2 cosines, then R / 2 sines. They are
    rounded to dtype before use, as in transformers.
    """


@operation
def rotary_embedding_interleaved(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor
) -> None:
    """In place, query [T, NQ, D] and key [T, NKV, D]: rotary_embedding with other pairs, element
    2 * i with 2 * i + 1, as in GPT-J. The other arguments are the same.
    """


@operation
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Stores key and value [T, NKV, D] in key_cache and value_cache [num_blocks, block_size, NKV,
    kv_cache_row]. Each block is contiguous. The distance between blocks is free, and equal in both.

    slot_mapping [T] i64: the slot of token t, block * block_size + offset. No slot occurs twice; a
    token with a negative slot is not stored.

    float8_e4m3fn caches (Micikevicius et al. 2022): values are rounded to nearest, ties to even,
    and clamped to 448.

    int8 caches: a token's head becomes D integers in +-127, x * (127 / max |x|) rounded to even,
    and the scale max |x| / 127 in fp32, NaN where the head is not finite. A key is rotated first,
    in fp32: each P elements are multiplied by the Hadamard matrix, where P is the largest power of
    two that divides D, so that no channel dominates (QuaRot; Ashkboos et al. 2024). A block holds
    its integers [block_size, NKV, D], then its scales [NKV, block_size].
    """


@operation
def fused_qk_rope_reshape_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> None:
    """Does `rms_norm` of each query and key head, `rotary_embedding` and `reshape_and_cache` in one
    pass.

    The norms apply where query_norm and key_norm [D] are given (both or neither). Arguments and
    rounding are those of the three operations. In place, query and the two caches; the key is
    written to the cache only.
    """


@operation
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    later: Tensor | None = None,
) -> Tensor:
    """Causal attention of query [T, NQ, D] over the cached context -> [T, NQ, D].

    key_cache and value_cache [num_blocks, block_size, NKV, kv_cache_row], whose blocks are laid out
    as reshape_and_cache says, already hold this step's tokens (Kwon et al. 2023). Values of another
    dtype are used as stored: int8 values times their scale, and keys rotated back. NQ is a multiple
    of NKV: query head h reads KV head h // (NQ / NKV). The i-th of a request's q query tokens has
    position seq_len - q + i and sees positions up to its own; with sliding_window w > 0, the last w
    of these (Beltagy et al. 2020). With softcap c > 0 a logit x becomes c tanh(x / c) (Gemma 2).
    With sinks [NQ] fp32, contiguous, each head's sink is one more logit of all its softmaxes,
    without a value: it only adds to their denominators (Xiao et al. 2023; gpt-oss). With later [T]
    i32, at least 0, a token also sees so many positions after its own, as far as the context
    reaches; position + later does not fall within a request (Gemma 3: tokens of one image). Softmax
    and sums are in fp32. A slot that none of a request's query tokens sees does not affect its
    result, whatever it holds (uninitialised memory, another request's NaN): it is outside the
    context, or before the window.
    """


@operation
def copy_blocks(sources: list[Tensor], destinations: list[Tensor], pairs: Tensor) -> None:
    """In place: block pairs[i, 1] of destinations[n] becomes block pairs[i, 0] of sources[n], for
    every i and n.

    Each tensor is [num_blocks, ...], contiguous, of any one dtype and its own size of blocks. A
    source and its destination are both on the device (possibly the same tensor: a request's last
    block is copied before the request writes to it), or one of them is in host memory, pinned where
    the device is a GPU (swapping). pairs [P, 2] i64 is on the host. No block is written twice, and
    none is both read and written.
    """


@operation
def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """In place, logits [B, V] fp32 at N pairs of row and token, rows and token_ids [N] i64.

    The pairs are the tokens in a row's sequence; no pair occurs twice. counts [N] i32: occurrences
    in the output, 0 if only the prompt has the token. repetition, frequency, presence [N] fp32 are
    the row's. A positive logit is divided by repetition, any other multiplied (Keskar et al. 2019,
    CTRL); then frequency * count is subtracted, then presence if count > 0. -inf stays -inf; all
    other logits stay unchanged.
    """


@operation
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] fp32 -> [B] i64, the lowest index of each row's largest element; [B] bool,
    whether the row is finite.

    -inf counts as finite. A row with NaN gives an arbitrary token; other rows are not affected.
    """


@operation
def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    largest: Tensor | None = None,
) -> Tensor:
    """Samples one token per row of logits [B, V] fp32 -> [B] i64.

    temperature, top_p, min_p [B] fp32; top_k [B] i32 or i64; seeds and positions [B] i64. A row
    with temperature below 1e-5 takes its largest logit, the lowest index of equals. Any other row
    samples from softmax(logits / temperature) over the tokens that all filters keep. With the row's
    tokens ordered by logit, the lower index first among equals, each filter keeps a prefix (stages
    as in vLLM V1):

    - min_p: probability >= min_p times the largest; 0 keeps all
    - top_k: the first top_k; 0, negative or >= V keeps all
    - top_p: the shortest prefix with at least top_p of the remaining mass; >= 1 keeps all

    All three are None if no row is filtered, which gives the same tokens with less work. The draw
    is Gumbel-max, the argmax of logits / temperature + random_gumbel(seed, position, token). It
    depends only on the row, not on its batch or the step. -inf logits are never sampled. A row with
    NaN gives an arbitrary token; other rows are not affected.

    largest [B] i64: the tokens that argmax finds in these logits, if they are known; that changes
    no token, and saves a pass over the logits on a GPU.
    """


@operation
def apply_grammar_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """In place, logits [B, V] fp32 without NaN: -inf where the bitmask has no bit.

    bitmask [G, ceil(V / 32)] i32, contiguous. rows [G] i64, all different, are the rows of logits
    that the mask's rows apply to. Token t is bit t % 32 of word t // 32 (the layout of llguidance
    and xgrammar). Bits beyond V are ignored.
    """


@operation
def random_gumbel(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Gumbel(0, 1) noise of each (seed, position, token): seeds and positions [B] i64 -> [B,
    num_tokens] fp32.

    The bits are those of Philox4x32-10 (Salmon et al. 2011): word(t) is output t % 4 for the
    counter (t // 4, low word of position, high word of position, 0) and the key (low word of seed,
    high word of seed). u = (word rounded to fp32 + 0.5) * 2**-32, at most 1 - 2**-24; noise =
    -log(-log1p(-u)), in fp32. The 0 in the counter is the stream: other uses of randomness at the
    same position use other streams. Large noise corresponds to small u, where fp32 is most precise.
    """


@operation
def gather_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the chosen token and of the k most likely tokens.

    logits [B, V] fp32, token_ids [B] i64, 0 <= k <= V. Returns ids [B, k + 1] i32 and
    log_softmax(logits) at them [B, k + 1] fp32, the chosen token first, the others by descending
    probability (equals in any order), and ranks [B] i32: 1 + the number of tokens more likely than
    the chosen one.
    """


# ---------------------------------------------------------------- a step's state, by slot


@operation
def write_runs(memory: Tensor, places: Tensor, starts: Tensor, values: Tensor) -> None:
    """In place, memory [M] i32: values [V] i32 from starts[n] to starts[n + 1] are written from
    memory[places[n]] on, for each n.

    places [N] i64, starts [N + 1] i32, ascending. Runs do not overlap and may be empty. One call
    writes all changes of a step to the tables of all slots.
    """


@operation
def prepare_step_inputs(
    slots: Tensor,
    num_computed: Tensor,
    query_start_loc: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> None:
    """Prepares a model's inputs for the tokens [num_computed[r], num_computed[r] + query length) of
    each of B requests.

    slots [B] i32, all different; num_computed [B] i32; query_start_loc [B + 1] i32, as in
    AttentionMetadata. token_table [S, L] i32 holds the tokens of each slot, block_table [S, W] i32
    its blocks, of `block_size` tokens.

    Writes token_ids [T] i32, positions [T] i64, and AttentionMetadata's slot_mapping [T] i64,
    seq_lens [R] i32 and block_tables [R, W'] i32; W' * block_size >= the longest context. Entries
    past a request's last block are left unchanged. Where R > B, each request has one token and T =
    R: the remaining rows are padding, token 0 at position 0 of block 0 with a context of 1, not
    stored.
    """


@operation
def gather_sampling_parameters(
    parameters: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the columns of sample_tokens for slots [R] i32: temperature f32, top_k i32, top_p
    f32, min_p f32, seed i64, each [R].

    parameters [S, 8] i32 holds the bits of a slot's values in this order, the low word of the seed
    before the high word. The last two words are not read.
    """


@operation
def append_sampled_tokens(
    token_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    is_finite: Tensor,
    results: Tensor,
) -> None:
    """In place: token_table[slots[r], positions[r]] and results[r] become token_ids[r].

    A row that is not finite writes 0 to the table, which later steps can compute with, and -1 to
    results. token_table [S, L] i32; slots [R] i32, all different; positions and token_ids [R] i64;
    is_finite [R] bool; results [R] i32.
    """


# ---------------------------------------------------------------- text encoders


@operation
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [T, H], weight and bias [H] -> [T, H]: (x - mean) / sqrt(variance + eps) * weight + bias.

    The variance is the mean of (x - mean)**2, from a second pass over the row. Everything is
    computed in fp32, and the result is rounded to dtype once (Ba et al. 2016).
    """


@operation
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    """In place, x and residual [T, H], weight and bias [H]: residual += x, then x =
    layer_norm(residual).

    The sum is rounded to dtype. Where norms come before the layers, the next layer adds to
    `residual` (ModernBERT). Where they come after them, it adds to x, which is the next call's
    `residual` (BERT).
    """


@operation
def gelu(x: Tensor) -> Tensor:
    """x [T, I] -> [T, I]: x times the normal distribution's cumulative probability of x, which is
    (1 + erf(x / sqrt(2))) / 2.

    It is computed in fp32 and rounded to dtype (Hendrycks & Gimpel 2016).
    """


@operation
def gelu_tanh(x: Tensor) -> Tensor:
    """x [T, I] -> [T, I]: GELU's approximation by tanh. It is computed in fp32 and rounded to
    dtype.
    """


@operation
def silu(x: Tensor) -> Tensor:
    """x [T, I] -> [T, I]: x * sigmoid(x). It is computed in fp32 and rounded to dtype."""


@operation
def relu(x: Tensor) -> Tensor:
    """x [T, I] -> [T, I]: max(x, 0), NaN for NaN."""


@operation
def relu_squared(x: Tensor) -> Tensor:
    """x [T, I] -> [T, I]: max(x, 0)**2, NaN for NaN. It is computed in fp32 and rounded to dtype
    (So et al. 2021).
    """


@operation
def gelu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I] -> [T, I]: gelu(first half) * second half.

    The GELU is rounded to dtype before the product.
    """


@operation
def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of query [T, NQ, D] in both directions over key and value [T, NKV, D] of the same
    request -> [T, NQ, D] (Devlin et al. 2018).

    Requests are those of metadata.query_start_loc, whole in this step; nothing else of the metadata
    is read on the device. NQ is a multiple of NKV: query head h reads KV head h // (NQ / NKV). A
    token sees all tokens of its request or, with window w > 0, those at a distance of at most w
    (Beltagy et al. 2020). With bias [NQ, 2 * R + 1] fp32, contiguous, bias[h, R + clamp(j - i, -R,
    R)] is added to the logit of query token i and key token j of head h (Raffel et al. 2020;
    MPNet). Softmax and sums are in fp32. Tokens of other requests do not affect a request's
    results, whatever they hold.
    """
