"""Every kernel except attention at a model's sizes, with the minimal bytes or operations of its
call.

Part of bench_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from quire.kernels.choice import OWN_LOGITS
from quire.kernels.moe import Experts
from quire.kernels.ops import LogitChanges
from torch import Tensor

BLOCK_SIZE, NUM_PENALISED, NUM_LOGPROBS = 16, 1000, 20
BF16, FP32 = 2, 4  # bytes


@dataclass(frozen=True)
class KernelCall:
    """limit: "bytes" moved to and from memory, or "flops"; amount: the minimum of these that the
    contract allows. waits: whether it reads the host's memory, which no CUDA graph can.
    """

    name: str
    call: Callable[[], Any]
    limit: str
    amount: float
    waits: bool = False


@dataclass(frozen=True)
class Sizes:
    """tokens: of a large prompt, so that its data exceed the GPU's caches; rows: of a decode."""

    tokens: int
    rows: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


def kernel_calls(ops: Any, sizes: Sizes, device: str) -> Iterator[KernelCall]:
    """Yields one call at a time: the tensors of one are freed before the next is created."""
    of_weights = linears, packed_linears, experts
    of_logits = sampling, all_options, tables
    for family in (elementwise, attention_inputs, *of_weights, *of_logits):
        yield from family(ops, sizes, device)


def normal(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def elementwise(ops: Any, s: Sizes, device: str) -> Iterator[KernelCall]:
    x, weight, row = normal(device, s.tokens, s.hidden), normal(device, s.hidden), s.hidden * BF16
    yield KernelCall("rms_norm", lambda: ops.rms_norm(x, weight, 1e-6), "bytes", 2 * s.tokens * row)
    residual = normal(device, s.tokens, s.hidden)
    yield KernelCall(
        "fused_add_rms_norm",
        lambda: ops.fused_add_rms_norm(x, residual, weight, 1e-6),
        "bytes",
        4 * s.tokens * row,
    )
    table, token_ids = (
        normal(device, s.vocab, s.hidden),
        torch.randint(s.vocab, (s.tokens,), device=device, dtype=torch.int32),
    )
    yield KernelCall(
        "embedding", lambda: ops.embedding(token_ids, table), "bytes", 2 * s.tokens * row
    )
    indices = torch.arange(0, s.tokens, 4, device=device)
    yield KernelCall(
        "gather_rows", lambda: ops.gather_rows(x, indices), "bytes", 2 * len(indices) * row
    )
    yield KernelCall("scale", lambda: ops.scale(x, 0.5), "bytes", 2 * s.tokens * row)
    yield KernelCall("add", lambda: ops.add(x, residual), "bytes", 3 * s.tokens * row)
    both = normal(device, s.tokens, 2 * s.intermediate)
    for name, gate in (
        ("silu_and_mul", ops.silu_and_mul),
        ("gelu_tanh_and_mul", ops.gelu_tanh_and_mul),
    ):
        amount = 3 * s.tokens * s.intermediate * BF16
        yield KernelCall(name, lambda gate=gate: gate(both), "bytes", amount)


def attention_inputs(ops: Any, s: Sizes, device: str) -> Iterator[KernelCall]:
    num_blocks = -(-s.tokens // BLOCK_SIZE)
    caches = normal(device, 2, num_blocks, BLOCK_SIZE, s.kv_heads, s.head_dim)
    query, (key, value) = (
        normal(device, s.tokens, s.heads, s.head_dim),
        normal(device, 2, s.tokens, s.kv_heads, s.head_dim),
    )
    slots, positions = (
        torch.randperm(s.tokens, device=device),
        torch.arange(s.tokens, device=device) % 4096,
    )
    angles = torch.rand(4096, s.head_dim, device=device)
    one, kv = s.tokens * s.heads * s.head_dim * BF16, s.tokens * 2 * s.kv_heads * s.head_dim * BF16
    yield KernelCall(
        "rotary_embedding",
        lambda: ops.rotary_embedding(positions, query, key, angles),
        "bytes",
        2 * one + kv,
    )
    yield KernelCall(
        "reshape_and_cache",
        lambda: ops.reshape_and_cache(key, value, *caches, slots),
        "bytes",
        2 * kv,
    )
    norms = normal(device, 2, s.head_dim)
    for name, weights in (
        ("fused_qk_rope_reshape_and_cache", (None, None)),
        ("fused_qk_rope_reshape_and_cache, with norms", tuple(norms)),
    ):
        arguments = positions, query, key, value, angles, *caches, slots, *weights, 1e-6
        yield KernelCall(
            name,
            lambda arguments=arguments: ops.fused_qk_rope_reshape_and_cache(*arguments),
            "bytes",
            2 * one + 2 * kv,
        )
    half = num_blocks // 2
    pairs = torch.stack([torch.arange(half), torch.arange(half) + half], 1)
    yield KernelCall(
        "copy_blocks",
        lambda: ops.copy_blocks([*caches], [*caches], pairs),
        "bytes",
        2 * half * caches[:, 0].nbytes,
        waits=True,
    )
    outside = torch.empty(caches.shape, dtype=caches.dtype, pin_memory=device != "cpu")
    yield KernelCall(
        "copy_blocks to the host",
        lambda: ops.copy_blocks([*caches], [*outside], pairs),
        "bytes",
        2 * half * caches[:, 0].nbytes,
        waits=True,
    )


def linears(ops: Any, s: Sizes, device: str) -> Iterator[KernelCall]:
    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
    shapes = {
        "qkv": (qkv, s.hidden),
        "output": (s.hidden, s.heads * s.head_dim),
        "gate and up": (2 * s.intermediate, s.hidden),
        "down": (s.hidden, s.intermediate),
        "head": (s.vocab, s.hidden),
    }
    for name, (outputs, inputs) in shapes.items():
        linear = ops.pack_linear(normal(device, outputs, inputs) / inputs**0.5, None)
        for rows in dict.fromkeys((1, s.rows, min(s.tokens, 8192) if name != "head" else s.rows)):
            x = normal(device, rows, inputs)
            bound = (
                ("flops", 2 * rows * outputs * inputs)
                if rows > 512
                else ("bytes", (outputs * inputs + rows * (inputs + outputs)) * BF16)
            )
            yield KernelCall(
                f"linear {name} T={rows}", lambda linear=linear, x=x: linear(x), *bound
            )


# bits of a weight, by how it is packed
FORMS = {"bf16": 16, "int8": 8.1, "int4": 4.5, "INT4_128": 4.25, "FP8_128": 8.25}
FORMS |= {"FP8_128_GROUP": 8.25, "FP8_128_TOKEN": 8.25}  # times rows in FP8
PROMPT = 2048  # rows


def packed(ops: Any, form: str, outputs: int, inputs: int, device: str) -> Any:
    """A linear layer with weights of this form. None: the kernels do not have it, or a row does not
    consist of whole blocks.
    """
    if form in ("bf16", "int8", "int4"):
        weight = normal(device, outputs, inputs) / inputs**0.5
        if form == "bf16":
            return ops.pack_linear(weight, None)
        return ops.pack_quantized_linear(weight, None, int(form[3:]))
    needs = {"FP8_128": "takes_fp8", "FP8_128_GROUP": "quantizes_to_fp8"}
    needs["FP8_128_TOKEN"] = needs["FP8_128_GROUP"]
    has_kernel = form not in needs or getattr(ops.pack_gguf_linear, needs[form], False)
    if inputs % 128 or not has_kernel:
        return None
    shape = outputs, round(inputs * FORMS[form] / 8)
    blocks = torch.randint(32, shape, dtype=torch.uint8, device=device)
    return ops.pack_gguf_linear([blocks], [form], None, torch.bfloat16)


def packed_linears(ops: Any, s: Sizes, device: str) -> Iterator[KernelCall]:
    """A projection of decodes, for each form of weights; of a prompt, for those in FP8."""
    outputs, inputs = s.hidden, s.intermediate
    for form, bits in FORMS.items():
        linear = packed(ops, form, outputs, inputs, device)
        for rows in (1, s.rows) if linear is not None else ():
            x = normal(device, rows, inputs)
            amount = outputs * inputs * bits / 8 + rows * (inputs + outputs) * BF16
            name = f"linear down in {form} T={rows}"
            yield KernelCall(name, lambda linear=linear, x=x: linear(x), "bytes", amount)
        if linear is not None and form.startswith("FP8"):
            x, amount = normal(device, PROMPT, inputs), 2 * PROMPT * outputs * inputs
            name = f"linear down in {form} T={PROMPT}"
            yield KernelCall(name, lambda linear=linear, x=x: linear(x), "flops", amount)


def experts(ops: Any, s: Sizes, device: str) -> Iterator[KernelCall]:
    """Eight experts, of which a token has two, for each form of weights."""
    count, top_k, inner = 8, 2, s.intermediate // 4
    for form, bits in FORMS.items():
        layers = [
            [packed(ops, form, outputs, inputs, device) for _ in range(count)]
            for outputs, inputs in ((2 * inner, s.hidden), (s.hidden, inner))
        ]
        if layers[0][0] is None or layers[1][0] is None:
            continue
        mixture = Experts(layers[0], layers[1], "silu")
        for rows in (1, s.rows):
            x, ids = normal(device, rows, s.hidden), torch.rand(rows, count).argsort(1)[:, :top_k]
            args = x, ids.int().to(device), torch.rand(rows, top_k).to(device), mixture
            read = min(count, rows * top_k) * 3 * inner * s.hidden * bits / 8
            amount = read + 2 * rows * s.hidden * BF16
            name = f"fused_moe in {form} T={rows}"
            yield KernelCall(name, lambda args=args: ops.fused_moe(*args), "bytes", amount)


def sampling(ops: Any, s: Sizes, device: str) -> Iterator[KernelCall]:
    logits, read = normal(device, s.rows, s.vocab, dtype=torch.float32), s.rows * s.vocab * FP32
    yield KernelCall("argmax", lambda: ops.argmax(logits), "bytes", read)

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((s.rows,), value, dtype=dtype, device=device)

    temperature, numbers = column(0.7), torch.arange(s.rows, device=device)
    largest, _ = ops.argmax(logits)
    yield KernelCall(
        "sample_tokens",
        lambda: ops.sample_tokens(logits, temperature, None, None, None, numbers, numbers, largest),
        "bytes",
        read,
    )
    filters = column(50, torch.int32), column(0.9), column(0.01)
    yield KernelCall(
        "sample_tokens, filtered",
        lambda: ops.sample_tokens(logits, temperature, *filters, numbers, numbers, largest),
        "bytes",
        read,
    )
    chosen = torch.randint(s.vocab, (s.rows,), device=device)
    yield KernelCall(
        "gather_logprobs", lambda: ops.gather_logprobs(logits, chosen, NUM_LOGPROBS), "bytes", read
    )
    count = min(NUM_PENALISED, s.vocab)
    rows, token_ids = (
        numbers.repeat_interleave(count),
        (torch.arange(count, device=device) * (s.vocab // count)).repeat(s.rows),
    )
    counts, factors = (
        torch.ones(len(rows), dtype=torch.int32, device=device),
        torch.full((3, len(rows)), 0.1, device=device),
    )
    arguments = rows, token_ids, counts, factors[0] + 0.9, factors[1], factors[2]
    yield KernelCall(
        "apply_penalties",
        lambda: ops.apply_penalties(logits, *arguments),
        "bytes",
        len(rows) * (2 * FP32 + 2 * 8 + 4 + 3 * FP32),
    )
    masks = torch.randint(
        -(2**31), 2**31 - 1, (s.rows, -(-s.vocab // 32)), dtype=torch.int32, device=device
    )
    yield KernelCall(
        "apply_grammar_bitmask",
        lambda: ops.apply_grammar_bitmask(logits, masks, numbers),
        "bytes",
        read / 2 + masks.nbytes,
    )


def all_options(ops: Any, s: Sizes, device: str) -> Iterator[KernelCall]:
    """Decodes whose requests have every option at once, against the same in separate operations."""
    logits, read = normal(device, s.rows, s.vocab, dtype=torch.float32), s.rows * s.vocab * FP32

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((s.rows,), value, dtype=dtype, device=device)

    rows, count = torch.arange(s.rows, device=device), min(NUM_PENALISED, s.vocab)
    token_ids = (torch.arange(count, device=device) * (s.vocab // count)).repeat(s.rows)
    starts = (torch.arange(s.rows + 1, device=device) * count).int()
    # half of the tokens are masked; a penalty of 1 keeps logits from growing call after call
    masks = torch.full((s.rows, -(-s.vocab // 32)), 0x55555555, dtype=torch.int32, device=device)
    penalties = torch.tensor([1.0, 0.0, 0.0], device=device).repeat(s.rows, 1)
    counts = torch.ones(len(token_ids), dtype=torch.int32, device=device)
    nothing = torch.zeros(0, device=device)
    changes = LogitChanges(
        *(rows, rows, rows, masks, torch.zeros_like(starts), nothing.int(), nothing),
        *(starts, token_ids.int(), counts, penalties),
    )
    raw, largest = torch.empty_like(logits), ops.argmax(logits)[0]
    filters = column(50, torch.int32), column(0.9), column(0.01)
    draw = column(0.7), *filters, rows, rows
    k = min(NUM_LOGPROBS, s.vocab)

    def together() -> None:
        ops.change_logits(logits, largest, raw, changes)
        ops.choose_tokens(logits, largest, *draw, raw, rows, k)

    of_pairs = [penalty.repeat_interleave(count) for penalty in penalties.unbind(1)]
    row_of_pair = rows.repeat_interleave(count)

    def separately() -> None:
        raw.copy_(logits)
        ops.apply_grammar_bitmask(logits, masks, rows)
        ops.apply_penalties(logits, row_of_pair, token_ids, counts, *of_pairs)
        logits.amax(-1)
        ops.gather_logprobs(raw, ops.sample_tokens(logits, *draw), k)

    yield KernelCall(
        "change_logits",
        lambda: ops.change_logits(logits, largest, raw, changes),
        "bytes",
        2.5 * read + masks.nbytes,
    )
    own = torch.full_like(rows, OWN_LOGITS)
    unfiltered = draw[0], None, None, None, *draw[4:]
    draws = {"greedy": (None,) * 6, "drawn": unfiltered, "filtered": draw}
    for name, columns in draws.items():
        yield KernelCall(
            f"choose_tokens, {name}",
            lambda columns=columns: ops.choose_tokens(logits, largest, *columns, logits, own, k),
            "bytes",
            read,
        )
    yield KernelCall("choose_tokens, all options", together, "bytes", 3.5 * read)
    yield KernelCall("choose_tokens, all options separately", separately, "bytes", 3.5 * read)


def tables(ops: Any, s: Sizes, device: str) -> Iterator[KernelCall]:
    """The operations around a decode's graph: launches that move hardly any bytes."""
    context = 1024
    slots, computed = (
        torch.arange(s.rows, dtype=torch.int32, device=device),
        torch.full((s.rows,), context - 1, dtype=torch.int32, device=device),
    )
    starts = torch.arange(s.rows + 1, dtype=torch.int32, device=device)
    token_table = torch.zeros(s.rows, 2 * context, dtype=torch.int32, device=device)
    block_table = torch.zeros(s.rows, 2 * context // BLOCK_SIZE, dtype=torch.int32, device=device)
    outputs = [
        torch.empty(s.rows, dtype=dtype, device=device)
        for dtype in (torch.int32, torch.int64, torch.int64, torch.int32)
    ]
    num_bytes = s.rows * 2 * FP32 * (context // BLOCK_SIZE)
    arguments = (
        slots,
        computed,
        starts,
        token_table,
        block_table,
        BLOCK_SIZE,
        *outputs,
        torch.empty_like(block_table),
    )
    yield KernelCall(
        "prepare_step_inputs", lambda: ops.prepare_step_inputs(*arguments), "bytes", num_bytes
    )
    token_ids, is_finite = (
        torch.zeros(s.rows, dtype=torch.int64, device=device),
        torch.ones(s.rows, dtype=torch.bool, device=device),
    )
    appended = token_table, slots, computed.long(), token_ids, is_finite, torch.empty_like(slots)
    yield KernelCall(
        "append_sampled_tokens", lambda: ops.append_sampled_tokens(*appended), "bytes", s.rows * 32
    )
