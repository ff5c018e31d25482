"""Specifies the operations of layers that keep a state.

Must not know: speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..metadata import AttentionMetadata, StateRows
from ..registry import register

L2_EPS = 1e-6
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
}


def rows_of(metadata: AttentionMetadata) -> StateRows:
    assert metadata.states is not None  # of a model with states
    return metadata.states


def walk(metadata: AttentionMetadata, state: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields (t, state) for each token t of a step, in order. The caller changes this state, fp32,
    in place; `state` gets it where StateRows says so. torch's bits depend on the shape of a tensor,
    so whatever is computed for a token is computed for that token alone.
    """
    rows, begin = rows_of(metadata), 0
    for row, (count, length) in enumerate(zip(metadata.query_lens, metadata.seq_lens_list)):
        place, first = int(rows.places[row]), length - count
        is_fresh = place < 0 or first == 0
        own = torch.zeros_like(state[0]) if is_fresh else state[place].clone()
        own = own.float()
        last = min(int(rows.last_positions[row]), length - 1)
        for position in range(first, length):
            yield begin + position - first, own
            if place >= 0 and position == last:
                state[place].copy_(own)
            if place >= 0 and position == int(rows.copy_positions[row]):
                state[int(rows.copy_places[row])].copy_(own)
        begin += count


@register("short_conv", name="reference", priority=0)
def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    metadata: AttentionMetadata,
    activation: str,
) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for t, own in walk(metadata, state):
        window = torch.cat([own, x[t : t + 1].float()])  # [K, C]
        total = torch.zeros_like(window[0]) if bias is None else bias.float()
        for k, row in enumerate(window):
            total = total + weight[:, k].float() * row
        out[t] = GATES[activation](total)
        own.copy_(window[1:])
    return out


@register("gated_delta_rule", name="reference", priority=0)
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
    heads = torch.arange(value.shape[1], device=value.device)
    num_keys = query.shape[1]
    of_head = heads % num_keys if is_interleaved else heads // (len(heads) // num_keys)
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    for t, own in walk(metadata, state):  # own [HV, DK, DV]
        q, k = (_normalised(x[t])[of_head] for x in (query, key))
        b = beta[t].float().sigmoid().to(beta.dtype).float()
        rate = -a_log.exp() if decay.dim() == 2 else -a_log.exp()[:, None]
        g = rate * F.softplus(decay[t].float() + dt_bias)  # [HV] or [HV, DK]
        own.mul_(g.exp().view(len(heads), -1, 1))
        delta = b[:, None] * (value[t].float() - torch.einsum("hkv,hk->hv", own, k))
        own.add_(k[:, :, None] * delta[:, None, :])
        out[t] = torch.einsum("hkv,hk->hv", own, q * query.shape[-1] ** -0.5)
    return out


def _normalised(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)


@register("selective_scan", name="reference", priority=0)
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
    group = torch.arange(x.shape[1], device=x.device) // (x.shape[1] // b.shape[1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for t, own in walk(metadata, state):  # own [NH, DH, N]
        wide, step = x[t].float(), F.softplus(dt[t].float() + dt_bias)
        keys, queries = b[t].float()[group], c[t].float()[group]  # [NH, N]
        own.mul_((-step * a_log.exp()).exp()[:, None, None])
        own.add_((step[:, None] * wide)[:, :, None] * keys[:, None, :])
        out[t] = torch.einsum("hdn,hn->hd", own, queries) + d[:, None] * wide
    return out


@register("gated_rms_norm", name="reference", priority=0)
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, gate_first: bool
) -> Tensor:
    silu = F.silu(gate.float())
    wide = x.float() * silu if gate_first else x.float()
    groups = wide.unflatten(-1, (-1, group_size))
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    if not gate_first:
        normed = normed.to(x.dtype).float()
    normed = (normed * weight.float().view(-1, group_size)).flatten(-2)
    return (normed if gate_first else normed * silu).to(x.dtype)


@register("multiply", name="reference", priority=0)
def multiply(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    return (x.float() * GATES[activation](gate.float())).to(x.dtype)
