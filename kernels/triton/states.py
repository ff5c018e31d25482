"""Implements the operations of layers that keep a state in Triton.

Must not know: models, requests.

A program of a recurrence holds a part of one request's state in registers and computes its tokens
one after another, so that bits do not depend on how these are divided into steps. Grids depend on
shapes alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import AttentionMetadata
from ..registry import register
from .device import PLAIN, PRIORITY, TILE, is_cuda

_COLUMNS = 32  # of a state that a program holds
_CHANNELS = 256  # of a convolution
GATES = {"none": 0, "sigmoid": 1, "silu": 2}


# ---------------------------------------------------------------- gates


@triton.jit
def _gated(x, GATE: tl.constexpr):
    if GATE == 1:
        x = tl.sigmoid(x)
    elif GATE == 2:
        x = x * tl.sigmoid(x)
    return x


@triton.jit
def _softplus(x):
    """log(1 + e**x). With y = e**-|x|, log(1 + y) is twice the inverse hyperbolic tangent of
    y / (2 + y), at most 1/3, by its power series.
    """
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    square = z * z
    series = 1.0 / 13 + square / 15
    series = 1.0 / 11 + square * series
    series = 1.0 / 9 + square * series
    series = 1.0 / 7 + square * series
    series = 1.0 / 5 + square * series
    series = 1.0 / 3 + square * series
    return tl.where(x > 0, x, 0.0) + 2 * z * (1 + square * series)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    num_rows,
    heads,
    x_stride,
    x_head,
    gate_stride,
    gate_head,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GATE: tl.constexpr,
    IS_SHARED: tl.constexpr,
):
    """x [., heads, SIZE] with strides, out [num_rows, SIZE] contiguous. IS_SHARED: a head has one
    gate.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    token, head = (row // heads).to(tl.int64), row % heads
    x_ptrs = x_ptr + (token * x_stride + head * x_head)[:, None] + column[None, :]
    of_gate = token * gate_stride + head * gate_head
    if IS_SHARED:
        gate = tl.load(gate_ptr + of_gate, mask=row < num_rows, other=0.0).to(tl.float32)[:, None]
    else:
        gate_ptrs = gate_ptr + of_gate[:, None] + column[None, :]
        gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * SIZE + column[None, :],
        (x * _gated(gate, GATE)).to(out_ptr.dtype.element_ty),
        mask=mask,
    )


@register("multiply", name="triton", predicate=is_cuda, priority=PRIORITY)
def multiply(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    out = x.new_empty(x.shape)
    num_rows, size = x.shape[0] * x.shape[1], x.shape[2]
    block = triton.next_power_of_2(size)
    rows = max(1, TILE // block)
    multiply_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        gate,
        out,
        num_rows,
        x.shape[1],
        *x.stride()[:2],
        *gate.stride()[:2],
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        GATE=GATES[activation],
        IS_SHARED=gate.shape[2] != size,
        **PLAIN,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    groups,
    x_stride,
    gate_stride,
    weight_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):
    """x and gate [., groups, SIZE] with a stride, out [num_rows, SIZE] contiguous. weight_stride:
    SIZE, or 0 if all groups have the same weight.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    token, group = (row // groups).to(tl.int64), row % groups
    in_row = (group * SIZE)[:, None] + column[None, :]
    x = tl.load(x_ptr + (token * x_stride)[:, None] + in_row, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + (token * gate_stride)[:, None] + in_row, mask=mask, other=0.0)
    weight_ptrs = weight_ptr + (group * weight_stride)[:, None] + column[None, :]
    weight = tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    gate = _gated(gate.to(tl.float32), 2)
    x = x.to(tl.float32)
    if GATE_FIRST:
        x = x * gate
    x = x * tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
    if GATE_FIRST:
        x = x * weight
    else:
        x = x.to(dtype).to(tl.float32) * weight * gate
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(out_ptrs, x.to(dtype), mask=mask)


@register("gated_rms_norm", name="triton", predicate=is_cuda, priority=PRIORITY)
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, gate_first: bool
) -> Tensor:
    out = x.new_empty(x.shape)
    groups = x.shape[1] // group_size
    num_rows, block = len(x) * groups, triton.next_power_of_2(group_size)
    rows = max(1, TILE // block)
    gated_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        gate,
        weight,
        out,
        num_rows,
        groups,
        x.stride(0),
        gate.stride(0),
        group_size if len(weight) == x.shape[1] else 0,
        eps,
        SIZE=group_size,
        BLOCK=block,
        ROWS=rows,
        GATE_FIRST=gate_first,
        num_warps=8 if block > 2 * TILE else 4,
        **PLAIN,
    )
    return out


# ---------------------------------------------------------------- rows of states


@triton.jit
def _tokens_of(row, starts_ptr, seq_lens_ptr, places_ptr, last_ptr, copy_ptr, copy_places_ptr):
    """A row's tokens [begin, end), its place, or -1 where it begins with zeros, and the tokens
    after which the state is written to `place` and to `copy_place`, or -1.
    """
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    first = (tl.load(seq_lens_ptr + row) - (end - begin)).to(tl.int64)
    place = tl.load(places_ptr + row).to(tl.int64)
    count = (end - begin).to(tl.int64)
    last = tl.minimum(tl.load(last_ptr + row) - first, count - 1)
    last = tl.where((place >= 0) & (last >= 0), begin + last, -1)
    copy = tl.load(copy_ptr + row) - first
    copy = tl.where((place >= 0) & (copy >= 0) & (copy < count), begin + copy, -1)
    source = tl.where(first > 0, place, -1)
    return begin, end, source, place, last, copy, tl.load(copy_places_ptr + row).to(tl.int64)


def _rows(metadata: AttentionMetadata) -> list[Tensor]:
    """The arguments of _tokens_of after the row."""
    rows = metadata.states
    assert rows is not None  # of a model with states
    columns = rows.places, rows.last_positions, rows.copy_positions, rows.copy_places
    return [metadata.query_start_loc, metadata.seq_lens, *columns]


# ---------------------------------------------------------------- short convolutions


@triton.jit
def _conv_input(
    x_ptr, state_ptr, token, begin, source, x_stride, state_stride, channel, mask,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The input of a token of this step, or of one before `begin`, from the state."""
    is_new = token >= begin
    new = tl.load(x_ptr + token.to(tl.int64) * x_stride + channel, mask=mask & is_new, other=0.0)
    ptrs = state_ptr + source * state_stride + (token - begin + TAPS - 1) * CHANNELS + channel
    old = tl.load(ptrs, mask=mask & (source >= 0) & (token < begin), other=0.0)
    return tl.where(is_new, new, old)


@triton.jit(do_not_specialize=["num_rows"])
def short_conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    out_ptr,
    starts_ptr,
    seq_lens_ptr,
    places_ptr,
    last_ptr,
    copy_ptr,
    copy_places_ptr,
    num_rows,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
):
    """One token's results for BLOCK channels. ALL_ROWS: at least num_rows."""
    token = tl.program_id(0)
    rows = tl.arange(0, ALL_ROWS)
    ends = tl.load(starts_ptr + 1 + rows, mask=rows < num_rows, other=2**30)
    row = tl.sum((ends <= token).to(tl.int32), axis=0)
    begin, _, source, _, _, _, _ = _tokens_of(
        row, starts_ptr, seq_lens_ptr, places_ptr, last_ptr, copy_ptr, copy_places_ptr
    )
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=mask, other=0.0)
        x = _conv_input(
            x_ptr, state_ptr, token - TAPS + 1 + tap, begin, source, x_stride, state_stride,
            channel, mask, CHANNELS, TAPS,
        )  # fmt: skip
        total += weight.to(tl.float32) * x.to(tl.float32)
    out_ptrs = out_ptr + token.to(tl.int64) * CHANNELS + channel
    tl.store(out_ptrs, _gated(total, GATE).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def keep_inputs_kernel(
    x_ptr,
    state_ptr,
    starts_ptr,
    seq_lens_ptr,
    places_ptr,
    last_ptr,
    copy_ptr,
    copy_places_ptr,
    x_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes one row's states for BLOCK channels: first the copy, which may need what the place
    holds. Input i of a state is read before it is written, and the ones that follow are later.
    """
    row = tl.program_id(0)
    begin, _, source, place, last, copy, copy_place = _tokens_of(
        row, starts_ptr, seq_lens_ptr, places_ptr, last_ptr, copy_ptr, copy_places_ptr
    )
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    for i in tl.static_range(TAPS - 1):
        x = _conv_input(
            x_ptr, state_ptr, copy - TAPS + 2 + i, begin, source, x_stride, state_stride,
            channel, mask & (copy >= 0), CHANNELS, TAPS,
        )  # fmt: skip
        ptrs = state_ptr + copy_place * state_stride + i * CHANNELS + channel
        tl.store(ptrs, x, mask=mask & (copy >= 0))
    for i in tl.static_range(TAPS - 1):
        x = _conv_input(
            x_ptr, state_ptr, last - TAPS + 2 + i, begin, source, x_stride, state_stride,
            channel, mask & (last >= 0), CHANNELS, TAPS,
        )  # fmt: skip
        ptrs = state_ptr + place * state_stride + i * CHANNELS + channel
        tl.store(ptrs, x, mask=mask & (last >= 0))


@register("short_conv", name="triton", predicate=is_cuda, priority=PRIORITY)
def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    metadata: AttentionMetadata,
    activation: str,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (num_tokens, channels), num_rows = x.shape, len(metadata.seq_lens)
    rows, strides = _rows(metadata), (x.stride(0), state.stride(0))
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    sizes: dict[str, Any] = {"CHANNELS": channels, "TAPS": weight.shape[1], "BLOCK": block}
    blocks = triton.cdiv(channels, block)
    short_conv_kernel[num_tokens, blocks](
        x,
        weight,
        weight if bias is None else bias,
        state,
        out,
        *rows,
        num_rows,
        *strides,
        ALL_ROWS=triton.next_power_of_2(max(1, num_rows)),
        HAS_BIAS=bias is not None,
        GATE=GATES[activation],
        **sizes,
        **PLAIN,
    )
    # a launch of its own, after all tokens have read the old states
    keep_inputs_kernel[num_rows, blocks](x, state, *rows, *strides, **sizes, **PLAIN)
    return out


# ---------------------------------------------------------------- the recurrences


@triton.jit
def _normalised(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def gated_delta_rule_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    decay_ptr,
    beta_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    out_ptr,
    starts_ptr,
    seq_lens_ptr,
    places_ptr,
    last_ptr,
    copy_ptr,
    copy_places_ptr,
    query_stride,
    query_head,
    key_stride,
    key_head,
    value_stride,
    value_head,
    decay_stride,
    decay_head,
    beta_stride,
    state_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    DECAYS_ROWS: tl.constexpr,
):
    """All tokens of one request, for BLOCK columns of one head's state [KEY_SIZE, SIZE].
    DECAYS_ROWS: each row of the state has its own decay.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end, source, place, last, copy, copy_place = _tokens_of(
        row, starts_ptr, seq_lens_ptr, places_ptr, last_ptr, copy_ptr, copy_places_ptr
    )
    of_key = head // (HEADS // KEY_HEADS)
    if IS_INTERLEAVED:
        of_key = head % KEY_HEADS
    k, column = tl.arange(0, KEY_BLOCK), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k_mask, mask = k < KEY_SIZE, column < SIZE
    both = k_mask[:, None] & mask[None, :]
    ptrs = state_ptr + (head * KEY_SIZE + k)[:, None] * SIZE + column[None, :]
    state = tl.load(ptrs + source * state_stride, mask=both & (source >= 0), other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head))
    if DECAYS_ROWS:
        dt_bias = tl.load(dt_bias_ptr + head * KEY_SIZE + k, mask=k_mask, other=0.0)
    else:
        dt_bias = tl.load(dt_bias_ptr + head)
    for t in range(begin, end):
        token = begin.to(tl.int64) + (t - begin)
        q_ptrs = query_ptr + token * query_stride + of_key * query_head + k
        k_ptrs = key_ptr + token * key_stride + of_key * key_head + k
        v_ptrs = value_ptr + token * value_stride + head * value_head + column
        q = _normalised(tl.load(q_ptrs, mask=k_mask, other=0.0).to(tl.float32)) * scale
        key = _normalised(tl.load(k_ptrs, mask=k_mask, other=0.0).to(tl.float32))
        v = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
        decay_ptrs = decay_ptr + token * decay_stride + head * decay_head
        if DECAYS_ROWS:
            decay = tl.load(decay_ptrs + k, mask=k_mask, other=0.0).to(tl.float32)
        else:
            decay = tl.load(decay_ptrs).to(tl.float32)
        raw = tl.load(beta_ptr + token * beta_stride + head)
        beta = tl.sigmoid(raw.to(tl.float32)).to(raw.dtype).to(tl.float32)
        keep = tl.exp(-rate * _softplus(decay + dt_bias))
        if DECAYS_ROWS:
            keep = keep[:, None]
        state = state * keep
        delta = beta * (v - tl.sum(state * key[:, None], axis=0))
        state += key[:, None] * delta[None, :]
        out = tl.sum(state * q[:, None], axis=0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token * HEADS + head) * SIZE + column, out, mask=mask)
        tl.store(ptrs + place * state_stride, state, mask=both & (t == last))
        tl.store(ptrs + copy_place * state_stride, state, mask=both & (t == copy))


@register("gated_delta_rule", name="triton", predicate=is_cuda, priority=PRIORITY)
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    metadata: AttentionMetadata,
    is_interleaved: bool,
) -> Tensor:
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    (_, key_heads, key_size), (_, heads, size) = key.shape, value.shape
    block = min(_COLUMNS, triton.next_power_of_2(size))
    gated_delta_rule_kernel[len(metadata.seq_lens), heads, triton.cdiv(size, block)](
        query,
        key,
        value,
        decay,
        beta,
        a_log,
        dt_bias,
        state,
        out,
        *_rows(metadata),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *decay.stride()[:2],
        beta.stride(0),
        state.stride(0),
        key_size**-0.5,
        KEY_HEADS=key_heads,
        HEADS=heads,
        KEY_SIZE=key_size,
        SIZE=size,
        KEY_BLOCK=triton.next_power_of_2(key_size),
        BLOCK=block,
        IS_INTERLEAVED=is_interleaved,
        DECAYS_ROWS=decay.dim() == 3,
        **PLAIN,
    )
    return out


@triton.jit
def selective_scan_kernel(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    a_log_ptr,
    d_ptr,
    dt_bias_ptr,
    state_ptr,
    out_ptr,
    starts_ptr,
    seq_lens_ptr,
    places_ptr,
    last_ptr,
    copy_ptr,
    copy_places_ptr,
    x_stride,
    x_head,
    dt_stride,
    b_stride,
    b_head,
    c_stride,
    c_head,
    state_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
):
    """All tokens of one request, for BLOCK rows of one head's state [SIZE, STATE_SIZE]."""
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end, source, place, last, copy, copy_place = _tokens_of(
        row, starts_ptr, seq_lens_ptr, places_ptr, last_ptr, copy_ptr, copy_places_ptr
    )
    group = head // (HEADS // GROUPS)
    i, n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE_BLOCK)
    mask, n_mask = i < SIZE, n < STATE_SIZE
    both = mask[:, None] & n_mask[None, :]
    ptrs = state_ptr + (head * SIZE + i)[:, None] * STATE_SIZE + n[None, :]
    state = tl.load(ptrs + source * state_stride, mask=both & (source >= 0), other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head))
    d, dt_bias = tl.load(d_ptr + head), tl.load(dt_bias_ptr + head)
    for t in range(begin, end):
        token = begin.to(tl.int64) + (t - begin)
        b_ptrs = b_ptr + token * b_stride + group * b_head + n
        c_ptrs = c_ptr + token * c_stride + group * c_head + n
        x_ptrs = x_ptr + token * x_stride + head * x_head + i
        b = tl.load(b_ptrs, mask=n_mask, other=0.0).to(tl.float32)
        c = tl.load(c_ptrs, mask=n_mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        dt = _softplus(tl.load(dt_ptr + token * dt_stride + head).to(tl.float32) + dt_bias)
        state = state * tl.exp(-dt * rate) + (dt * x)[:, None] * b[None, :]
        out = (tl.sum(state * c[None, :], axis=1) + d * x).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token * HEADS + head) * SIZE + i, out, mask=mask)
        tl.store(ptrs + place * state_stride, state, mask=both & (t == last))
        tl.store(ptrs + copy_place * state_stride, state, mask=both & (t == copy))


@register("selective_scan", name="triton", predicate=is_cuda, priority=PRIORITY)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (_, heads, size), (_, groups, state_size) = x.shape, b.shape
    block = min(_COLUMNS, triton.next_power_of_2(size))
    selective_scan_kernel[len(metadata.seq_lens), heads, triton.cdiv(size, block)](
        x,
        dt,
        b,
        c,
        a_log,
        d,
        dt_bias,
        state,
        out,
        *_rows(metadata),
        *x.stride()[:2],
        dt.stride(0),
        *b.stride()[:2],
        *c.stride()[:2],
        state.stride(0),
        HEADS=heads,
        SIZE=size,
        GROUPS=groups,
        STATE_SIZE=state_size,
        BLOCK=block,
        STATE_BLOCK=triton.next_power_of_2(state_size),
        **PLAIN,
    )
    return out
