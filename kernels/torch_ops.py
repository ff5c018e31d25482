"""Defines the operations as `torch.ops.quire.*`, for programs that call them from torch, and for
torch.compile, torch.export and torch's profiler. Importing this module defines them.

Must not know: what an operation computes, models, requests.

Each runs the default choice for its arguments, as a direct call of the operation does. Where
torch's schemas do not express arguments or results, the operation has another form: `linear` and
`quantized_linear` replace pack_linear and pack_quantized_linear, and fused_moe takes the experts'
stacked weights. They pack a weight at its first use, and keep the result while the weight lives and
is not changed in place. paged_attention and encoder_attention take the tensors of their metadata.
Left out are pack_gguf_linear, because it packs blocks of a file and not a tensor that a program of
torch has, pack_head_linear, change_logits, and operations over the latent vectors and states of an
engine's requests.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import ops, registry
from .moe import Experts

_UNSUPPORTED = (
    "pack_linear",
    "pack_quantized_linear",
    "pack_gguf_linear",
    "pack_head_linear",
    "latent_attention",
    "short_conv",
    "gated_delta_rule",
    "selective_scan",
    "expert_outputs",  # with weighted_sum the parts of fused_moe
    "weighted_sum",
    "change_logits",  # its parts are there
)
_library = torch.library.Library("quire", "DEF")


def define(op: str) -> None:
    """Defines `torch.ops.quire.<op>`, for an operation of a plugin.

    Raises ValueError if torch's schemas do not express its parameters.
    """
    _define(op, registry.CONTRACTS[op], registry.function(op))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """ops.paged_attention; query_start_loc [B + 1], seq_lens [B] and block_tables [B, W] i32 are
    those of AttentionMetadata. It reads the lengths on the host.
    """
    query_lens = query_start_loc.diff().tolist()
    metadata = ops.make_metadata(
        query_start_loc,
        seq_lens,
        (block_tables,),
        (torch.empty(0, dtype=torch.int64, device=query.device),),
        num_decodes=0,
        query_lens=query_lens,
        seq_lens_list=seq_lens.tolist(),
    )
    call = registry.function("paged_attention")
    return call(query, key_cache, value_cache, metadata, scale, sliding_window, softcap)


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """ops.encoder_attention; query_start_loc [B + 1] i32 is that of AttentionMetadata. It reads
    query_start_loc on the host.
    """
    lens = query_start_loc.diff()
    metadata = ops.make_metadata(
        query_start_loc,
        lens.int(),
        (torch.empty(len(lens), 0, dtype=torch.int32, device=query.device),),
        (torch.empty(0, dtype=torch.int64, device=query.device),),
        num_decodes=0,
        query_lens=lens.tolist(),
        seq_lens_list=lens.tolist(),
    )
    call = registry.function("encoder_attention")
    return call(query, key, value, metadata, scale, window, bias)


class _Packed(NamedTuple):
    versions: list[int]  # of the tensors when they were packed
    others: tuple[Tensor | None, ...]
    value: Any


# A weight maps to the results of packing it, by what it was packed for.
_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _pack_once(
    weight: Tensor, others: tuple[Tensor | None, ...], kind: Any, pack: Callable[..., Any]
) -> Any:
    """pack(weight, *others), or the same result as before."""
    tensors = [tensor for tensor in (weight, *others) if tensor is not None]
    versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    of_weight: Any = _packed.setdefault(weight, {})
    found = of_weight.get(kind)
    is_same = found is not None and all(a is b for a, b in zip(found.others, others))
    if found is None or not is_same or found.versions != versions:
        # The result may hold what it was made of. It gets an alias, so that it does not keep
        # `weight` alive.
        found = of_weight[kind] = _Packed(versions, others, pack(weight.detach(), *others))
    return found.value


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """ops.pack_linear(weight, bias)(x)"""
    return _pack_once(weight, (bias,), "linear", ops.pack_linear)(x)


def quantized_linear(x: Tensor, weight: Tensor, bits: int, bias: Tensor | None = None) -> Tensor:
    """ops.pack_quantized_linear(weight, bias, bits)(x)"""
    return _pack_once(
        weight, (bias,), bits, lambda *tensors: ops.pack_quantized_linear(*tensors, bits)
    )(x)


def fused_moe(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
) -> Tensor:
    """ops.fused_moe; gate_up [E, 2 * I, H] and down [E, H, I] are the experts' weights."""

    def pack(gate_up: Tensor, down: Tensor) -> Experts:
        layers = [[ops.pack_linear(weight, None) for weight in stack] for stack in (gate_up, down)]
        return Experts(layers[0], layers[1], activation)

    experts = _pack_once(gate_up, (down,), ("experts", activation), pack)
    return registry.function("fused_moe")(x, expert_ids, weights, experts)


def _define(op: str, contract: Callable, function: Callable) -> None:
    hints, signature = typing.get_type_hints(contract), inspect.signature(contract)

    def typed(*args, **kwargs): ...

    returns = hints["return"]
    typed.__signature__ = signature.replace(
        parameters=[
            parameter.replace(annotation=hints[name])
            for name, parameter in signature.parameters.items()
        ],
        return_annotation=None if returns is type(None) else returns,
    )
    mutated = "unknown" if returns is type(None) else ()  # those that return nothing work in place
    schema = torch.library.infer_schema(typed, mutates_args=mutated)
    _library.define(op + schema)
    _library.impl(op, function, "CompositeExplicitAutograd")


_OWN = {
    own.__name__: own
    for own in (paged_attention, encoder_attention, fused_moe, linear, quantized_linear)
}
for _op, _own in _OWN.items():
    _define(_op, _own, _own)
for _op, _contract in registry.CONTRACTS.items():
    if _op in _OWN:
        continue
    if _op not in _UNSUPPORTED:
        _define(_op, _contract, registry.function(_op))
