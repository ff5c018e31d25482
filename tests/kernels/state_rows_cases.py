"""Inputs for the operations of layers that keep a state, and the same operations in other words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from quire.kernels.ops import AttentionMetadata, StateRows
from quire.kernels.ops import make_metadata as join_metadata
from quire.tests.kernels.case import INTERPRETED, Case, copies, rand
from torch import Tensor

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
}


class Row(NamedTuple):
    """A request's tokens in a step, and where its state is and goes."""

    num_tokens: int
    first: int = 0  # the position of its first token
    place: int = 0
    last: int = 2**40  # far beyond any token
    copy: int = -1
    copy_place: int = -1


class Operands(NamedTuple):
    """What an operation takes for `num_tokens` tokens."""

    tokens: tuple[Tensor, ...]  # with a row for each token
    weights: tuple[Tensor | None, ...]
    state: Tensor  # [places, ...]
    options: tuple[Any, ...]  # after the metadata

    def args(self, metadata: AttentionMetadata, tokens: list[Tensor] | None = None) -> tuple:
        tokens = list(self.tokens) if tokens is None else tokens
        return (*tokens, *self.weights, self.state, metadata, *self.options)

    @property
    def state_index(self) -> int:
        return len(self.tokens) + len(self.weights)


def states_metadata(rows: list[Row]) -> AttentionMetadata:
    counts, lengths = [row.num_tokens for row in rows], [row.first + row.num_tokens for row in rows]
    places, last, copy, copy_places = (
        torch.tensor([getattr(row, name) for row in rows], dtype=dtype)
        for name, dtype in (
            ("place", torch.int32),
            ("last", torch.int64),
            ("copy", torch.int64),
            ("copy_place", torch.int32),
        )
    )
    return join_metadata(
        torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        [torch.zeros(len(rows), 0, dtype=torch.int32)],
        [torch.zeros(sum(counts), dtype=torch.int64)],
        next((i for i, count in enumerate(counts) if count != 1), len(counts)),
        counts,
        lengths,
        states=StateRows(places, last, copy, copy_places),
    )


def make_state(num_places: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Places that are further apart than their size."""
    size = torch.Size(shape).numel()
    return rand(num_places, size + 16, dtype=dtype)[:, 8 : 8 + size].unflatten(1, shape)


class Stateful(Case):
    """Its results are those of the tokens and the memory of states, both in the model's dtype."""

    def run(self, function: Callable) -> tuple[Tensor, ...]:
        args = copies(self.args)
        result = self.call(function, args)
        return result, args[self.in_place[0]].to(result.dtype)


def stateful(name: str, rows: list[Row], operands: Operands, own: Callable) -> Stateful:
    spoil_unread(rows, operands.state)
    args = operands.args(states_metadata(rows))
    return Stateful(name, args, own, in_place=(operands.state_index,))


def spoil_unread(rows: list[Row], state: Tensor) -> None:
    """Writes NaN to places that no row may read."""
    read = {row.place for row in rows if row.first}
    for place in set(range(len(state))) - read:
        state[place] = torch.nan


def walk(
    metadata: AttentionMetadata, state: Tensor, states_after: Callable[[slice, Tensor], list]
) -> Tensor:
    """The memory after a step. states_after(tokens, state) gives a row's state after each token."""
    rows, before, after, begin = metadata.states, state, state.clone(), 0
    assert rows is not None
    for row, (count, length) in enumerate(zip(metadata.query_lens, metadata.seq_lens_list)):
        place, first = int(rows.places[row]), length - count
        is_fresh = place < 0 or first == 0
        own = torch.zeros_like(state[0]) if is_fresh else before[place]
        found = states_after(slice(begin, begin + count), own)
        last = min(int(rows.last_positions[row]) - first, count - 1)
        copy = int(rows.copy_positions[row]) - first
        if place >= 0 and last >= 0:
            after[place] = found[last]
        if place >= 0 and 0 <= copy < count:
            after[int(rows.copy_places[row])] = found[copy]
        begin += count
    return after


# Rows of a step: decodes, prompts, chunks; drafts, of which some count; copies; padding.
SOME_ROWS = [
    [Row(1, 0, 2)],
    [Row(1, 9, 0), Row(1, 70, 3), Row(2, 0, 1)],
    [Row(1, 5, 4), Row(1, 0, -1), Row(37, 3, 0, copy=20, copy_place=2), Row(3, 0, 1)],
    [Row(1, 8, 0, copy=8, copy_place=4), Row(5, 7, 1, last=9), Row(4, 0, 2, last=0)],
    [Row(6, 2, 3, last=4, copy=6, copy_place=0), Row(6, 2, 1, last=4, copy=3, copy_place=2)],
    [],
]


def some_rows() -> list[list[Row]]:
    return SOME_ROWS[1:4] if INTERPRETED else SOME_ROWS


# ---------------------------------------------------------------- short convolutions


def conv_operands(
    num_tokens: int,
    dtype: torch.dtype,
    channels: int = 24,
    taps: int = 4,
    has_bias: bool = True,
    activation: str = "silu",
) -> Operands:
    x = rand(num_tokens, channels + 40, dtype=dtype)[:, 8 : 8 + channels]
    bias = rand(channels, dtype=dtype) if has_bias else None
    state = make_state(5, (taps - 1, channels), dtype)
    return Operands((x,), (rand(channels, taps, dtype=dtype), bias), state, (activation,))


def short_conv(dtype: torch.dtype) -> list[Case]:
    def own(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        metadata: AttentionMetadata,
        activation: str,
    ) -> tuple[Tensor, ...]:
        out = torch.empty_like(x)

        def states_after(tokens: slice, before: Tensor) -> list[Tensor]:
            whole = torch.cat([before, x[tokens]])
            sums = F.conv1d(whole.T[None], weight[:, None], bias, groups=len(weight))
            out[tokens] = GATES[activation](sums[0].T)
            return list(whole[1:].unfold(0, len(before), 1).mT)

        return out, walk(metadata, state, states_after)

    def case(rows: list[Row], *sizes: Any) -> Case:
        operands = conv_operands(sum(row.num_tokens for row in rows), dtype, *sizes)
        return stateful(f"{rows}, {sizes}", rows, operands, own)

    others = [(8, 3, False, "none"), (300, 4), (17, 7), (1, 2, False)]
    few = SOME_ROWS[3 if INTERPRETED else 2]  # many tokens take seconds in the interpreter
    return [case(rows) for rows in some_rows()] + [case(few, *one) for one in others]


# ---------------------------------------------------------------- the recurrences


def delta_operands(
    num_tokens: int,
    dtype: torch.dtype,
    key_heads: int = 2,
    value_heads: int = 4,
    key_size: int = 16,
    value_size: int = 16,
    is_interleaved: bool = False,
    decays_rows: bool = False,
) -> Operands:
    """decays_rows: each row of a state has its own decay."""
    sizes = [key_heads * key_size] * 2 + [value_heads * value_size]
    query, key, value = rand(num_tokens, sum(sizes), dtype=dtype).split(sizes, 1)
    beta, decay = rand(num_tokens, 2 * value_heads, dtype=dtype).chunk(2, 1)
    a_log, dt_bias = (torch.rand(value_heads) * 16).log(), torch.randn(value_heads)
    if decays_rows:
        decay = rand(num_tokens, value_heads, key_size + 3, dtype=dtype)[..., :key_size]
        dt_bias = torch.randn(value_heads, key_size)
    tokens = (
        query.unflatten(1, (key_heads, key_size)),
        key.unflatten(1, (key_heads, key_size)),
        value.unflatten(1, (value_heads, value_size)),
        decay,
        beta,
    )
    state = make_state(5, (value_heads, key_size, value_size), torch.float32)
    return Operands(tokens, (a_log, dt_bias), state, (is_interleaved,))


def delta_of_rows_operands(num_tokens: int, dtype: torch.dtype) -> Operands:
    return delta_operands(num_tokens, dtype, decays_rows=True)


def own_delta_rule(
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
) -> tuple[Tensor, ...]:
    """The state is multiplied by a matrix, e (I - b k k^T), and b k v^T is added."""
    ratio = value.shape[1] // key.shape[1]

    def per_head(x: Tensor) -> Tensor:
        x = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return x.repeat(1, ratio, 1) if is_interleaved else x.repeat_interleave(ratio, 1)

    q, k, b = per_head(query) / query.shape[-1] ** 0.5, per_head(key), beta.sigmoid()
    rate = -a_log.exp() if decay.dim() == 2 else -a_log.exp()[:, None]
    e = (rate * F.softplus(decay + dt_bias)).exp()[..., None]
    e = e[..., None] if decay.dim() == 2 else e
    eye, out = torch.eye(key.shape[-1], dtype=value.dtype), torch.empty_like(value)

    def states_after(tokens: slice, own: Tensor) -> list[Tensor]:
        found = []
        for t in range(tokens.start, tokens.stop):
            factor = b[t, :, None, None] * k[t, :, :, None]
            own = (eye - factor * k[t, :, None]) @ (own * e[t])
            own = own + factor * value[t, :, None]
            out[t] = (q[t, :, None] @ own)[:, 0]
            found.append(own)
        return found

    return out, walk(metadata, state, states_after)


def gated_delta_rule(dtype: torch.dtype) -> list[Case]:
    def case(rows: list[Row], *sizes: Any) -> Case:
        operands = delta_operands(sum(row.num_tokens for row in rows), dtype, *sizes)
        return stateful(f"{rows}, {sizes}", rows, operands, own_delta_rule)

    others = [(2, 4, 16, 16, True), (1, 1, 8, 8), (1, 3, 16, 40), (2, 2, 32, 24)]
    others += [(2, 4, 16, 24, False, True)]
    if not INTERPRETED:
        others += [(1, 2, 128, 128), (1, 2, 64, 72, True), (16, 16, 8, 32)]
        others += [(3, 3, 128, 128, False, True), (1, 2, 20, 40, True, True)]
    return [case(rows) for rows in some_rows()] + [case(SOME_ROWS[3], *one) for one in others]


def scan_operands(
    num_tokens: int,
    dtype: torch.dtype,
    heads: int = 4,
    head_size: int = 8,
    groups: int = 2,
    state_size: int = 16,
) -> Operands:
    sizes = [heads * head_size, groups * state_size, groups * state_size, heads]
    x, b, c, dt = rand(num_tokens, sum(sizes), dtype=dtype).split(sizes, 1)
    b, c = (part.unflatten(1, (groups, state_size)) for part in (b, c))
    a_log, d, dt_bias = (torch.rand(heads) * 16).log(), torch.randn(heads), torch.randn(heads)
    state = make_state(5, (heads, head_size, state_size), torch.float32)
    tokens = x.unflatten(1, (heads, head_size)), dt, b, c
    return Operands(tokens, (a_log, d, dt_bias), state, ())


def own_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    metadata: AttentionMetadata,
) -> tuple[Tensor, ...]:
    step, out = (1 + (dt + dt_bias).exp()).log(), torch.empty_like(x)
    b, c = (part.repeat_interleave(x.shape[1] // b.shape[1], 1) for part in (b, c))

    def states_after(tokens: slice, own: Tensor) -> list[Tensor]:
        found = []
        for t in range(tokens.start, tokens.stop):
            own = own * (-step[t] * a_log.exp()).exp()[:, None, None]
            own = own + step[t, :, None, None] * x[t, :, :, None] * b[t, :, None]
            out[t] = (own @ c[t, :, :, None])[..., 0] + d[:, None] * x[t]
            found.append(own)
        return found

    return out, walk(metadata, state, states_after)


def selective_scan(dtype: torch.dtype) -> list[Case]:
    def case(rows: list[Row], *sizes: int) -> Case:
        operands = scan_operands(sum(row.num_tokens for row in rows), dtype, *sizes)
        return stateful(f"{rows}, {sizes}", rows, operands, own_scan)

    others = [(1, 8, 1, 8), (3, 5, 1, 24), (2, 40, 2, 32)]
    others += [] if INTERPRETED else [(2, 64, 1, 128), (16, 16, 4, 16)]
    return [case(rows) for rows in some_rows()] + [case(SOME_ROWS[3], *one) for one in others]


# ---------------------------------------------------------------- gates


def gated_rms_norm(dtype: torch.dtype) -> list[Case]:
    def own(
        x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, gate_first: bool
    ) -> tuple[Tensor, ...]:
        wide = x * F.silu(gate) if gate_first else x
        groups = F.rms_norm(wide.unflatten(1, (-1, group_size)), (group_size,), None, eps)
        result = (groups * weight.view(-1, group_size)).flatten(1)
        return (result if gate_first else result * F.silu(gate),)

    def case(tokens: int, size: int, group_size: int, weight_size: int, first: bool) -> Case:
        x, gate = rand(tokens, 2 * size + 8, dtype=dtype)[:, 8:].chunk(2, 1)
        args = x, gate, rand(weight_size, dtype=dtype), 1e-5, group_size, first
        return Case(f"{tokens} x {size} by {group_size}, {weight_size}, {first}", args, own)

    sizes = [(1, 128, 128, 128), (5, 64, 16, 16), (70, 48, 24, 48), (3, 4096, 512, 4096)]
    return [case(*one, first) for one in [*sizes, (0, 8, 8, 8)] for first in (False, True)]


def multiply(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, gate: Tensor, activation: str) -> tuple[Tensor, ...]:
        return (x * GATES[activation](gate),)

    def case(tokens: int, heads: int, size: int, gate_size: int, activation: str) -> Case:
        joined = rand(tokens, heads, size + gate_size, dtype=dtype)
        args = *joined.split((size, gate_size), -1), activation
        return Case(f"{tokens} x {heads} x {size}, {gate_size}, {activation}", args, own)

    sizes = [(1, 8, 64, 64), (9, 3, 17, 17), (33, 4, 24, 1), (4, 1, 1024, 1024), (0, 2, 8, 1)]
    return [case(*one, activation) for one in sizes for activation in GATES]


STATE_ROW_OPS = {
    f.__name__: f for f in (short_conv, gated_delta_rule, selective_scan, gated_rms_norm, multiply)
}
