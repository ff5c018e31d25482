"""The attention function that transformers' modules call: it writes to and reads the paged cache.

Must not know: architectures, files, requests.

transformers passes no metadata through its layers. The model sets it for the length of a forward
pass (`during`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....ipc.errors import ModelLoadError
from ....kernels.ops import AttentionMetadata

NAME = "quire"  # config._attn_implementation; transformers builds no mask for an unknown name


@dataclass(eq=False)
class PagedAttention:
    """The cache of one attention module of transformers, and how it is read."""

    ops: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int  # 0: none
    softcap: float  # 0: none
    sinks: torch.Tensor | None  # [num_heads] fp32
    has_values: bool = True  # beside the keys, in the cache
    key_cache: Any = None  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Any = None
    kv_cache_group: int = 0  # the group of its block table, set with the cache

    def bind_cache(self, key: torch.Tensor | None, value: torch.Tensor | None, group: int) -> None:
        """Makes these its part of the KV cache. None takes the cache away."""
        self.key_cache, self.value_cache, self.kv_cache_group = key, value, group


class _Pass(local):
    """The forward pass that runs in this thread."""

    metadata: AttentionMetadata | None = None
    # modules in the order of their calls, while a model is explored
    explored: list[tuple[torch.nn.Module, PagedAttention]] | None = None
    ops: Any = None
    is_encoder = False

    @contextmanager
    def exploring(self, ops: Any) -> Iterator[list[tuple[torch.nn.Module, PagedAttention]]]:
        """A context that lists the attention of every module that a forward pass without a cache
        calls.
        """
        self.explored, self.ops = [], ops
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _describe_mask)
        try:
            yield self.explored
        finally:
            self.explored = None
            ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(NAME, None)

    @contextmanager
    def during(self, metadata: AttentionMetadata) -> Iterator[None]:
        """A context whose forward pass uses `metadata`."""
        self.metadata = metadata
        try:
            yield
        finally:
            self.metadata = None

    @contextmanager
    def encoding(self, metadata: AttentionMetadata, ops: Any) -> Iterator[None]:
        """A context whose forward pass is that of a text encoder: tokens attend in both directions,
        without a cache.
        """
        self.metadata, self.ops, self.is_encoder = metadata, ops, True
        try:
            yield
        finally:
            self.metadata, self.is_encoder = None, False


_pass = _Pass()
exploring, during, encoding = _pass.exploring, _pass.during, _pass.encoding


def _describe_mask(*_: Any, local_size: int | None = None, **__: Any) -> torch.Tensor:
    """The mask of the exploring pass. It carries the window that the real mask would have."""
    mask = torch.zeros(1, 1, 2, 2)
    mask.quire_window = local_size  # type: ignore[attr-defined]
    return mask


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    query [1, NQ, T, D], key and value [1, NKV, T, D] -> [1, T, NQ, D]. Only the exploring pass
    reads the other arguments: they do not change between steps.
    """
    if _pass.explored is not None:
        # some modules do not pass their window: it is only in the mask
        window = sliding_window or getattr(attention_mask, "quire_window", None)
        return _explore(module, query, key, value, scaling, window, softcap, s_aux), None
    if _pass.is_encoder:
        return _encode(query, key, value, scaling, sliding_window, softcap), None
    layer: Any = module.quire_attention
    metadata: Any = _pass.metadata
    if metadata.groups:
        metadata = metadata.groups[layer.kv_cache_group]
    ops = layer.ops
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    ops.reshape_and_cache(key, value, layer.key_cache, layer.value_cache, metadata.slot_mapping)
    return ops.paged_attention(
        query,
        layer.key_cache,
        layer.value_cache,
        metadata,
        layer.scale,
        layer.sliding_window,
        layer.softcap,
        layer.sinks,
    ).unsqueeze(0), None


def _encode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    if sliding_window or softcap:
        raise ValueError("an encoder with sliding windows or capped logits is not supported")
    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    attended = _pass.ops.encoder_attention(query, key, value, _pass.metadata, scale)
    return attended.unsqueeze(0)


def _explore(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    kind = type(module).__name__
    if key.shape != value.shape:
        raise ModelLoadError(
            f"{kind} has keys of shape {list(key.shape)} and values of shape {list(value.shape)}, "
            f"which is not supported"
        )
    if query.shape[2] != key.shape[2]:
        raise ModelLoadError(
            f"{kind} has {query.shape[2]} queries for {key.shape[2]} keys, which is not supported"
        )
    explored = _pass.explored
    assert explored is not None
    if any(other is module for other, _ in explored):
        raise ModelLoadError(f"{kind} attends twice in one layer, which is not supported")
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    layer = PagedAttention(
        _pass.ops,
        query.shape[1],
        key.shape[1],
        head_dim,
        scale,
        int(sliding_window or 0),
        float(softcap or 0.0),
        None if sinks is None else sinks.detach().float().contiguous(),
    )
    explored.append((module, layer))
    return query.transpose(1, 2).contiguous()


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
