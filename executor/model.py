"""What a model offers to those that run it, fill it and trace it.

Must not know: architectures, files, requests, steps.

Every class of models names `Model` or `TextEncoder` as a base, and has the members without a value
here; those with a value state what most models have. Nobody asks whether a model has a member.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from ..kernels.ops import AttentionMetadata
from .pooling.heads import PoolingHead

if TYPE_CHECKING:
    from .models.adapters import AdapterRows, Modules
    from .weights.converted import Conversion


class AttentionLayer(Protocol):
    """Owns its part of each block of the KV cache, which KVCacheMemory allocates.

    A plugin's layer may lack `sliding_window` and `kv_cache_group`: it keeps the whole context. It
    may lack `bind_cache`: the attributes that this sets are set.
    """

    num_kv_heads: int
    head_dim: int
    sliding_window: int  # tokens; 0: none
    # [num_blocks, block_size, num_kv_heads, row of kernels.ops.kv_cache_row]; None: no cache
    key_cache: Any
    value_cache: Any
    kv_cache_group: int  # of AttentionMetadata.groups, set with the cache

    def bind_cache(self, key: torch.Tensor | None, value: torch.Tensor | None, group: int) -> None:
        """Makes these its key_cache, value_cache and kv_cache_group; None: it has no cache now."""
        ...


class Taps(Protocol):
    """Reads the inputs of layers for a head that drafts. `state` [tokens, hidden_size] must be
    zeroed before a pass of the model.
    """

    state: torch.Tensor

    def __call__(self, layer: int, residual: torch.Tensor) -> None:
        """residual [T, hidden_size]: the input of a layer."""
        ...


@dataclass(eq=False)
class RoutedTokens:
    """How many tokens a layer has sent to each of its experts, since its weights were loaded.

    A block that has one as `routed` counts with `ops.count_experts(ids, routed.slots,
    routed.counts)`; the engine reports it (Model.routed_tokens).
    """

    counts: torch.Tensor  # [E] i64
    # [T] i64: of a step with padding, which has negative slots; None: all tokens count
    slots: torch.Tensor | None = None


class Model(Protocol):
    """A model with its weights. The first pass may follow once its layers have their caches."""

    # its code is that of transformers, like the names of its tensors (`plan_conversions`)
    IS_FALLBACK: ClassVar[bool] = False
    UNRECORDABLE: ClassVar[str] = ""  # why its steps cannot be recorded as one native call

    config: Any  # vocab_size, num_attention_heads, num_key_value_heads, experts, …
    has_head: bool  # whether it has logits: encoders and stages before the last have none
    head_name: str = "lm_head"  # the name of the module
    num_token_types: int = 0  # that it distinguishes; 0: it takes no token_types
    head: PoolingHead = PoolingHead([])  # of pooled rows
    # operations that only its output head is made of
    head_operations: tuple[str, ...] = ()
    # [tokens, hidden_size] that a pass reads beside its tokens and may change: hidden states of a
    # head that drafts, the residual stream of a stage after the first; of others without rows
    state: torch.Tensor = torch.empty(0)
    taps: Taps | None = None
    # of LoRA, None and empty where the engine has none
    adapter_rows: AdapterRows | None = None
    adapted_modules: Modules = {}

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids [T] i32 or i64, positions [T] i64 -> hidden states [T, hidden_size].

        A model that distinguishes token types takes them as its last argument, [T] i32.
        """
        ...

    def use_adapters(self, rows: AdapterRows, modules: Modules) -> None:
        """Its layers have got adapters: see models.adapters."""
        self.adapter_rows, self.adapted_modules = rows, modules

    def use_taps(self, taps: Taps | None) -> None:
        """Each pass from now on shows the inputs of its layers to `taps`."""
        self.taps = taps

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] f32; only of a model that has a head."""
        raise TypeError(f"{type(self).__name__} has no output head")

    def attention_layers(self) -> list[Any]:
        """The AttentionLayers in order; none of a model without a KV cache."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The name of every tensor that the checkpoint must have, with the tensor it fills."""
        ...

    def tied_weights(self) -> dict[str, str]:
        """Names that a checkpoint may have in addition, with the names whose tensors they must
        equal.
        """
        return {}

    def is_of_another_rank(self, name: str) -> bool:
        """Whether another stage, or another engine, has this tensor of the checkpoint."""
        return False

    def routed_tokens(self) -> dict[int, RoutedTokens]:
        """By layer with experts; empty of a model without any, and of one in transformers' code."""
        return {}

    def plan_conversions(self, stored: list[str]) -> list[Conversion]:
        """How the stored tensors become those of `weights`; only of a model in transformers'
        code.
        """
        raise TypeError(f"{type(self).__name__} reads its tensors as they are stored")

    def explore(self) -> int:
        """Finds the attention layers of a model in transformers' code by a pass without a cache.
        Returns its number of tokens.
        """
        raise TypeError(f"{type(self).__name__} knows its layers")

    def reserve_stream(self, num_tokens: int) -> None:
        """Allocates the residual stream of steps of at most `num_tokens`. Only of a model that is
        divided into stages, as the next two.
        """
        raise TypeError(f"{type(self).__name__} is not divided into stages")

    def receive_stream(self, num_tokens: int) -> None:
        """Waits for the residual stream [num_tokens, hidden_size] of the stage before."""
        raise TypeError(f"{type(self).__name__} is not divided into stages")

    def send_stream(self, hidden: torch.Tensor) -> None:
        """Sends the residual stream to the next stage. hidden: what this stage's call returned."""
        raise TypeError(f"{type(self).__name__} is not divided into stages")


class Forward(Protocol):
    """A way to run one pass of a model: operation by operation, as one native call, or as a graph.

    The results are valid until the next pass.
    """

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        token_types: torch.Tensor | None = None,
        /,
    ) -> tuple[torch.Tensor, ...]:
        """token_ids [T] i32, positions [T] i64, logits_indices [R] i64, ascending -> hidden [T,
        hidden_size], logits [R, vocab_size] f32, and the results of argmax over them.

        A model without a head gives the hidden states alone, and logits_indices are not read.
        token_types [T] i32: of a model that distinguishes them.
        """
        ...


class TextEncoder(Model, Protocol):
    """A model whose tokens see the whole text: hidden states, no logits and no cache."""

    has_head: bool = False

    def attention_layers(self) -> list[Any]:
        return []


def expert_load(model: Model) -> dict[int, list[int]]:
    """For each layer with experts, the tokens that each of them got since the weights were loaded.
    Empty for models without such layers, or in transformers' code.
    """
    found = model.routed_tokens()
    if not found:
        return {}
    # one copy from the device
    counts = torch.stack([routed.counts for routed in found.values()])
    return dict(zip(found, counts.tolist()))


@contextmanager
def uncounted(model: Model) -> Iterator[None]:
    """A context whose steps compute no tokens of requests, and are not counted."""
    before = [(routed, routed.counts.clone()) for routed in model.routed_tokens().values()]
    try:
        yield
    finally:
        for routed, counts in before:
            routed.counts.copy_(counts)


@contextmanager
def padded(model: Model, slots: torch.Tensor) -> Iterator[None]:
    """A context whose step has padding tokens, with negative slots [T] i64."""
    found = model.routed_tokens().values()
    for routed in found:
        routed.slots = slots
    try:
        yield
    finally:
        for routed in found:
            routed.slots = None
