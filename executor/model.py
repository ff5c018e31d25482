"""What a model offers to those that run it, fill it and trace it.

Must not know: architectures, files, requests, steps.

Every class of models names `Model` or `TextEncoder` as a base, and has the members without a value
here; those with a value state what most models have. Nobody asks whether a model has a member.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from ..ipc.models.state_layout import StatePart
from ..kernels.ops import AttentionMetadata
from .pooling.heads import PoolingHead

if TYPE_CHECKING:
    from .models.adapters import AdapterRows, Modules
    from .models.images import ImageReader
    from .weights.converted import Conversion


class AttentionLayer(Protocol):
    """Owns its part of each block of the KV cache, which KVCacheMemory allocates.

    A plugin's layer may lack `sliding_window` and `kv_cache_group`: it then keeps the whole
    context. If it lacks `has_values`, it has values. If it lacks `bind_cache`, KVCacheMemory sets
    the attributes that this method sets.
    """

    num_kv_heads: int
    head_dim: int
    has_values: bool  # beside the keys, in the cache
    sliding_window: int  # tokens; 0: none
    # [num_blocks, block_size, num_kv_heads, row of kernels.ops.kv_cache_row]; None: no cache
    key_cache: Any
    value_cache: Any
    kv_cache_group: int  # of AttentionMetadata.groups, set with the cache

    def bind_cache(self, key: torch.Tensor | None, value: torch.Tensor | None, group: int) -> None:
        """Makes these its key_cache, value_cache and kv_cache_group. None takes the cache away."""
        ...


class StateLayer(Protocol):
    """Keeps a state of fixed size for each request, in the memory that StateMemory allocates."""

    state_parts: tuple[StatePart, ...]  # of this rank

    def bind_states(self, parts: Sequence[torch.Tensor]) -> None:
        """Makes these its states: [places, *shape] of each part. An empty list takes them away."""
        ...


class Taps(Protocol):
    """Reads the inputs of layers for a head that drafts. The caller zeroes `state` [tokens,
    hidden_size] before a pass of the model.
    """

    state: torch.Tensor

    def __call__(self, layer: int, residual: torch.Tensor) -> None:
        """residual [T, hidden_size]: the input of a layer."""
        ...


class ImageEncoder(Protocol):
    """Makes of images the rows that take the places of tokens' embeddings."""

    width: int  # of a row: the text model's hidden_size, times the number of its vectors

    def encode(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """images: u8 [height, width, 3] each, RGB, in any memory, with sides that are multiples of
        VisionConfig.unit -> [rows of all images, width] of the model's dtype, in reading order.

        On a CPU an image's rows have the same bits whatever is beside it. Raises ValueError for a
        size that the encoder does not take.
        """
        ...

    def encode_largest(self, num_rows: int) -> None:
        """Encodes a black image of the largest size, or of at most `num_rows` rows where there is
        none, so that its memory can be measured.
        """
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As Model.weights."""
        ...


@dataclass(eq=False)
class RoutedTokens:
    """Counts the tokens that a layer has sent to each of its experts since its weights were loaded.

    A block with a field `routed` of this class counts with `ops.count_experts(ids, routed.slots,
    routed.counts)`, and the engine reports the counts (Model.routed_tokens).
    """

    counts: torch.Tensor  # [E] i64
    # [T] i64; the padding of a step has negative slots; None: all tokens count
    slots: torch.Tensor | None = None


class Model(Protocol):
    """A model with its weights. It may run once its layers have their caches."""

    # whether its code and the names of its tensors are those of transformers (`plan_conversions`)
    IS_FALLBACK: ClassVar[bool] = False
    UNRECORDABLE: ClassVar[str] = ""  # why its steps cannot be recorded as one native call

    config: Any  # vocab_size, num_attention_heads, num_key_value_heads, experts, …
    has_head: bool  # whether it has logits: encoders and stages before the last have none
    head_name: str = "lm_head"  # the name of the module
    num_token_types: int = 0  # that it distinguishes; 0: it takes no token_types
    head: PoolingHead = PoolingHead([])  # of pooled rows
    # the operations that only its output head uses
    head_operations: tuple[str, ...] = ()
    # [tokens, hidden_size], which a pass reads beside its tokens and may change: the hidden states
    # of a head that drafts, or the residual stream of a stage after the first. Other models have no
    # rows here.
    state: torch.Tensor = torch.empty(0)
    taps: Taps | None = None
    encoder: ImageEncoder | None = None  # of a model that reads images
    images: ImageReader | None = None  # of a model that reads images
    # these two belong to LoRA, and are None and empty where the engine has none
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
        """Takes the adapters that its layers have got; see models.adapters."""
        self.adapter_rows, self.adapted_modules = rows, modules

    def use_taps(self, taps: Taps | None) -> None:
        """Makes each pass from now on show the inputs of its layers to `taps`."""
        self.taps = taps

    def use_encoder(self, encoder: ImageEncoder) -> None:
        """Makes it a model that reads images. `weights` has those of the encoder from now on."""
        self.encoder = encoder

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] f32. Only a model with a head has logits."""
        raise TypeError(f"{type(self).__name__} has no output head")

    def attention_layers(self) -> list[Any]:
        """The AttentionLayers in order. A model without a KV cache has none."""
        ...

    def state_layers(self) -> list[StateLayer]:
        """The layers that keep a state of each request, in order. Most models have none."""
        return []

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

    def pass_state(self) -> list[torch.Tensor]:
        """What a pass reads and changes or adds to, beside the caches: a second pass of the same
        tokens finds something else there.
        """
        return [self.state] if self.taps is None else [self.state, self.taps.state]

    def routed_tokens(self) -> dict[int, RoutedTokens]:
        """The counts by layer, for layers with experts. A model in transformers' code has none."""
        return {}

    def plan_conversions(self, stored: list[str]) -> list[Conversion]:
        """How the stored tensors become those of `weights`. Only a model in transformers' code has
        this method.
        """
        raise TypeError(f"{type(self).__name__} reads its tensors as they are stored")

    def explore(self) -> int:
        """Finds the attention layers of a model in transformers' code by a pass without a cache,
        and returns the pass's number of tokens.
        """
        raise TypeError(f"{type(self).__name__} knows its layers")

    def sections(self, num_rows: int) -> tuple[Model, Model] | None:
        """The layers up to the last one that keeps something of a request, and the layers behind
        it, whose `state` is the residual stream of at most `num_rows` rows. None: all layers belong
        together.
        """
        return None

    def reserve_stream(self, num_tokens: int) -> None:
        """Allocates the residual stream of steps of at most `num_tokens`. Only a model that is
        divided into stages has this method and the next two.
        """
        raise TypeError(f"{type(self).__name__} is not divided into stages")

    def receive_stream(self, num_tokens: int) -> None:
        """Waits for the residual stream [num_tokens, hidden_size] of the stage before."""
        raise TypeError(f"{type(self).__name__} is not divided into stages")

    def send_stream(self, hidden: torch.Tensor) -> None:
        """Sends the residual stream to the next stage. hidden: what this stage's call returned."""
        raise TypeError(f"{type(self).__name__} is not divided into stages")


class Forward(Protocol):
    """Runs one pass of a model: operation by operation, as one native call, or as a graph.

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

        A model without a head returns the hidden states alone, and does not read logits_indices.
        Only a model that distinguishes token types takes token_types [T] i32.
        """
        ...


class TextEncoder(Model, Protocol):
    """A model whose tokens see the whole text. It has hidden states, but no logits and no cache."""

    has_head: bool = False

    def attention_layers(self) -> list[Any]:
        return []


def expert_load(model: Model) -> dict[int, list[int]]:
    """For each layer with experts, the tokens that each of them got since the weights were loaded.
    The result is empty for models without such layers, and for models in transformers' code.
    """
    found = model.routed_tokens()
    if not found:
        return {}
    # this needs one copy from the device
    counts = torch.stack([routed.counts for routed in found.values()])
    return dict(zip(found, counts.tolist()))


@contextmanager
def uncounted(model: Model) -> Iterator[None]:
    """A context whose steps compute no tokens of requests and are not counted."""
    before = [(routed, routed.counts.clone()) for routed in model.routed_tokens().values()]
    try:
        yield
    finally:
        for routed, counts in before:
            routed.counts.copy_(counts)


@contextmanager
def padded(model: Model, slots: torch.Tensor) -> Iterator[None]:
    """A context whose step has padding tokens, which have negative slots. slots: [T] i64."""
    found = model.routed_tokens().values()
    for routed in found:
        routed.slots = slots
    try:
        yield
    finally:
        for routed in found:
            routed.slots = None
