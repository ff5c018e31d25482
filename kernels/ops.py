"""The operations a model is made of, with their contracts: shapes, dtypes, what is written in
place, what a NaN may touch.

Must not know: how an operation is implemented, models, requests.

T is the number of tokens of a step, all requests' one after the other; B the number of requests; NQ
and NKV the query and KV heads; D the head dimension. "dtype" is the model's: every tensor has it
unless another is named. A contract's last dimension is contiguous; other strides are free, so that
query, key and value may be views of one projection. What an operation computes is
kernels/reference/; all other implementations agree with it to rounding
(tests/kernels/test_parity.py).

An engine holds a table of its own, `ops = registry.select(device, dtype, overrides)`, and calls
`ops.rms_norm(...)`: no dispatch per call. The functions of this module do the same for occasional
callers, at the price of a dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .registry import operation


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where each request's tokens and pages are, for one step.

    Built by the model runner, read by all layers.

    Requests are ordered so that the first `num_decodes` have exactly one query token. seq_lens
    count the context with this step's tokens. Entries of block_tables past a request's last block
    are not followed. The lists repeat the tensors on the host, so that nothing waits for the
    device.
    """

    query_start_loc: Tensor  # [B + 1] i32, prefix sums of query_lens
    seq_lens: Tensor  # [B] i32
    block_tables: Tensor  # [B, max_blocks] i32
    slot_mapping: Tensor  # [T] i64, block * block_size + offset; negative: not stored
    num_decodes: int
    query_lens: list[int]  # [B]
    seq_lens_list: list[int]  # [B]
    # what an implementation derives once per step, for its calls in later layers
    scratch: dict[Any, Any] = field(default_factory=dict)


def kv_cache_row(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a KV cache of `dtype` has for a token's head: its numbers and, in int8, the 4
    bytes of a scale (reshape_and_cache).
    """
    return head_dim + 4 if dtype == torch.int8 else head_dim


@operation
def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """token_ids [T] i32 or i64, each in [0, V); table [V, H] -> [T, H], the table's rows."""


@operation
def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """x [T, H], indices [R] i64, each in [0, T) -> [R, H]: the tokens whose logits are wanted."""


@operation
def pack_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """weight [N, K], bias [N], which never change again -> a function of x [T, K] that gives x
    weight^T + bias [T, N].

    Summed in fp32. Called once per layer when the weights are filled, to lay them out as the
    implementation reads them best. What it returns may have a method `logits` too, which gives [T,
    N] in fp32, not rounded to dtype before, and a method `embedding`, which is the operation of
    that name with the weight as its table. An implementation that keeps nothing of the weight may
    have an attribute `from_parts`: the same function of a list of tensors [n, K], together the
    weight's N rows, and the bias; its result has `embedding`. A layer is then packed out of a
    mapped file: `release=` is a function to be called with rows of those tensors that are packed
    and need not stay in memory.
    """


@operation
def pack_quantized_linear(
    weight: Tensor, bias: Tensor | None, bits: int
) -> Callable[[Tensor], Tensor]:
    """As pack_linear, with weight [N, K] quantized to 8 or 4 bits, in groups of 256 or 64 along K
    with a scale each, and x on the way likewise.

    A row's numbers are whole, scale * {-127 .. 127}; at 4 bits a weight is scale * factor * {-8 ..
    7}, where the scale is the group's and the factor, whole and in +-15, that of half a group.
    Products are summed exactly within a group; groups are added in ascending order in fp32, each by
    one fused multiply-add. A row of x that is not finite gives NaN. What it returns has `logits`
    and `embedding`, the latter a function of token ids [T] that gives these rows of the quantized
    weight [T, K].
    """


@operation
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H]: x / sqrt(mean(x**2) + eps), over the last dimension,
    times weight. Zhang & Sennrich 2019.

    Normalised in fp32, rounded to dtype, then multiplied by weight (the order of transformers'
    Qwen2 and Llama). Serves [T, H] and, for q/k-norm, [T, heads, D].
    """


@operation
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """In place, x and residual [T, H], weight [H]: residual += x (rounded to dtype); x =
    rms_norm(residual, weight, eps).
    """


@operation
def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I] -> [T, I]: silu(first half) * second half; the SiLU is rounded to dtype before
    the product.
    """


@operation
def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    """In place, query [T, NQ, D], key [T, NKV, D]: rotates the first R <= D elements of each head,
    i paired with i + R / 2 (NeoX).

    Su et al. 2021. positions [T] i64, each in [0, max_position); cos_sin_cache [max_position, R]
    fp32: R / 2 cosines, then R / 2 sines. They are rounded to dtype before use, as transformers'
    are.
    """


@operation
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Stores key and value [T, NKV, D] in key_cache and value_cache [num_blocks, block_size, NKV,
    kv_cache_row], both contiguous.

    slot_mapping [T] i64: token t's slot, block * block_size + offset, no slot twice; a token with a
    negative one is not stored. The caches may be in float8_e4m3fn (Micikevicius et al. 2022):
    numbers are rounded to the nearest, ties to even, those beyond 448 become 448. Or in int8: a
    token's head becomes D whole numbers in +-127, x * (127 / max |x|) rounded to even, and the
    scale max |x| / 127 in fp32, NaN where the head is not finite. A key is first turned, in fp32:
    each P numbers are multiplied by the Hadamard matrix, where P is the largest power of two that
    divides D, so that no channel is much larger than others (QuaRot; Ashkboos et al. 2024). The
    bytes of a block are its numbers [block_size, NKV, D], then its scales [NKV, block_size].
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
    """All that stands between a layer's projection and its attention: rms_norm of each head of
    query and key, where there are weights query_norm and key_norm [D] (both or neither),
    rotary_embedding, reshape_and_cache: with their arguments and their roundings.

    In place, query and the two caches; the key is written to the cache alone. One pass over memory
    in place of two or four.
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
) -> Tensor:
    """Causal attention of query [T, NQ, D] over the cached context -> [T, NQ, D].

    Kwon et al. 2023.

    key_cache and value_cache [num_blocks, block_size, NKV, kv_cache_row] already hold this step's
    tokens (reshape_and_cache), perhaps in another type, whose numbers are taken as they are: in
    int8 times their scale, a key turned back. NQ is a multiple of NKV: query head h reads KV head h
    // (NQ / NKV). The i-th of a request's q query tokens stands at position seq_len - q + i and
    sees positions up to its own, with sliding_window w > 0 the last w of these (Beltagy et al.
    2020). softcap c > 0: a logit x becomes c tanh(x / c) (Gemma 2). Softmax and sums in fp32. A
    slot outside a request's context cannot touch its result, whatever it holds (memory never
    written, another request's NaN).
    """


@operation
def copy_blocks(sources: list[Tensor], destinations: list[Tensor], pairs: Tensor) -> None:
    """In place: block pairs[i, 1] of destinations[n] becomes block pairs[i, 0] of sources[n], for
    every i and n: a request's blocks in all layers.

    Each [num_blocks, block_size, NKV, kv_cache_row], contiguous, of any one type. A source and its
    destination are both on the device (perhaps one tensor: a request's last block is copied before
    it writes there), or one of them in host memory, pinned where the device is a GPU (a preempted
    request's blocks are swapped out, and in again). pairs [P, 2] i64, on the host. No block is
    filled twice, and none is both read and filled.
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
    """In place, logits [B, V] fp32 at N pairs of row and token, rows and token_ids [N] i64, no pair
    twice: the tokens that are in a row's sequence. counts [N] i32: how often the output has it, 0
    if only the prompt does. repetition, frequency, presence [N] fp32, the row's.

    A logit above 0 is divided by repetition, another multiplied (Keskar et al. 2019, CTRL); then it
    loses frequency * count, then presence if count > 0. -inf stays -inf; all other logits stay.
    """


@operation
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] fp32 -> [B] i64, the lowest index of each row's largest element; [B] bool,
    whether all of the row are finite. -inf may be among them; a row with a NaN gives an arbitrary
    token, of that row only.
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
) -> Tensor:
    """Draws one token per row of logits [B, V] fp32 -> [B] i64. temperature, top_p, min_p [B] fp32;
    top_k [B] i32 or i64; seeds and positions [B] i64.

    A row with temperature below 1e-5 takes its largest logit, the lowest index of equals. Any other
    is drawn from softmax(logits / temperature) over the tokens that all filters keep. Order the
    row's tokens by logit, the lower index first among equals; each filter keeps a beginning of that
    order (stages as in vLLM V1):
      min_p  probability >= min_p times the largest; 0: all top_k  the first top_k; 0, negative or
      >= V: all top_p  the shortest beginning with at least top_p of the mass that is left; >= 1:
      all
    All three are None, if the caller knows that no row is filtered: the same tokens for less work.
    The draw is Gumbel-max: argmax of logits / temperature + random_gumbel(seed, position, token).
    So it depends on nothing but the row, neither its batch mates nor the step. -inf logits are
    never drawn. A row with a NaN gives an arbitrary token, of that row only.
    """


@operation
def apply_grammar_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """In place, logits [B, V] fp32 without NaN: where bitmask has no bit, -inf. bitmask [G, ceil(V
    / 32)] i32, contiguous; rows [G] i64, all different, the rows of logits that its rows are for;
    the others stay.

    Token t is bit t % 32 of word t // 32 (llguidance's and xgrammar's layout). Bits beyond V mean
    nothing.
    """


@operation
def random_gumbel(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Gumbel(0, 1) noise of each (seed, position, token), seeds and positions [B] i64 -> [B,
    num_tokens] fp32.

    Its bits are those of Philox4x32-10 (Salmon et al. 2011): word(t) = output t % 4 for the counter
    (t // 4, position's low word, its high word, 0) and the key (seed's low word, its high word). u
    = (word rounded to fp32 + 0.5) * 2**-32, at most 1 - 2**-24; noise = -log(-log1p(-u)), in fp32.
    The 0 in the counter is the stream: other uses of randomness at the same position take other
    numbers. A large noise is a small u, where fp32 is finest.
    """


@operation
def gather_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the chosen and of the k most likely tokens. logits [B, V] fp32,
    token_ids [B] i64, 0 <= k <= V.

    Returns ids [B, k + 1] i32 and log_softmax(logits) at them [B, k + 1] fp32, the chosen token
    first, the others by descending probability (equals in any order), and ranks [B] i32: 1 + the
    number of tokens more likely than the chosen one.
    """


# ---------------------------------------------------------------- a step's state, by slot


@operation
def write_runs(memory: Tensor, places: Tensor, starts: Tensor, values: Tensor) -> None:
    """In place, memory [M] i32: values [V] i32 from starts[n] to starts[n + 1] go to
    memory[places[n]] and what follows, for each n.

    places [N] i64, starts [N + 1] i32, ascending. No two runs meet; one may be empty. What a step
    changes in all slots' tables, at once.
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
    """A model's inputs for the tokens [num_computed[r], num_computed[r] + query length) of each of
    B requests, in slots [B] i32, all different; num_computed [B] i32; query_start_loc [B + 1] i32,
    as AttentionMetadata's. token_table [S, L] i32 holds each slot's tokens, block_table [S, W] i32
    its blocks, of `block_size` tokens.

    Writes token_ids [T] i32, positions [T] i64, and slot_mapping [T] i64, seq_lens [R] i32,
    block_tables [R, W'] i32 as AttentionMetadata's; W' * block_size >= the longest. Entries past a
    request's last block are left as they are. Where R > B, each request has one token and T = R:
    the rows behind are padding, token 0 at position 0 of block 0 with a context of 1, not stored.
    """


@operation
def gather_sampling_parameters(
    parameters: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Temperature f32, top_k i32, top_p f32, min_p f32 and seed i64, each [R], of slots [R] i32:
    the columns that sample_tokens takes.

    parameters [S, 8] i32: a slot's values in this order, by their bits; the seed's low word before
    its high one; two words unused.
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
    """In place: token_table[slots[r], positions[r]] and results[r] become token_ids[r]; in a row
    that is not finite 0, which may be computed with, and -1. token_table [S, L] i32; slots [R] i32,
    all different; positions and token_ids [R] i64; is_finite [R] bool; results [R] i32.
    """
