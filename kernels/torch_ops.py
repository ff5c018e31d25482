"""The operations as `torch.ops.quire.*`, for programs that call them from torch, and for
torch.compile, torch.export and torch's profiler. Importing this module defines them.

Must not know: what an operation computes, models, requests.

Each runs the default choice for its arguments, as a direct call of the operation does. Missing are
operations whose arguments or results torch's schemas do not express: those that pack weights return
functions, and fused_moe takes such functions. paged_attention takes the tensors of its metadata.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable

import torch
from torch import Tensor

from . import ops, registry

_UNSUPPORTED = ("pack_linear", "pack_quantized_linear", "pack_gguf_linear", "fused_moe")
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
    those of AttentionMetadata. Reads the lengths on the host.
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


for _op, _contract in registry.CONTRACTS.items():
    if _op == "paged_attention":
        _define(_op, paged_attention, paged_attention)
    elif _op not in _UNSUPPORTED:
        _define(_op, _contract, registry.function(_op))
