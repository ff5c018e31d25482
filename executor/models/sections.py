"""The two sections of a decoder whose last layers keep nothing of a request: the layers before
these, and these.

Must not know: architectures, files, requests, which rows of a step the second section computes.

Both are models whose layers and weights are the decoder's own:

    FirstSection   tokens ─▶ residual stream of all of them; writes the KV cache
    LastSection    some rows of that stream ─▶ their hidden states and logits; only reads the cache
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ...kernels.ops import AttentionMetadata
from ..model import Model, RoutedTokens, StateLayer


class WholeModel(Model, Protocol):
    """The decoder, as its sections use it."""

    dtype: torch.dtype
    device: torch.device

    stream_size: int  # of a token's residual stream

    def begin(self, token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """token_ids [T] -> the residual stream before the first layer [T, stream_size]. Computes
        what layers get beside it.
        """
        ...

    def embed(self, token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """token_ids [T] -> their embedding [T, hidden_size]. Computes what layers get beside the
        residual stream.
        """
        ...

    def compute_layers(
        self,
        first: int,
        end: int,
        residual: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """The residual stream [T, stream_size] after layers [first, end), or hidden states."""
        ...


class Section(Model):
    """Layers [first, end) of a decoder."""

    def __init__(self, whole: WholeModel, first: int, end: int):
        self.whole, self.first, self.end = whole, first, end
        self.config, self.adapter_rows = whole.config, whole.adapter_rows
        self.images = whole.images

    def attention_layers(self) -> list[Any]:
        return self.whole.attention_layers()

    def state_layers(self) -> list[StateLayer]:
        return self.whole.state_layers()

    def routed_tokens(self) -> dict[int, RoutedTokens]:
        return self.whole.routed_tokens()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.whole.weights()


class FirstSection(Section):
    """The layers up to the last one that keeps something of a request."""

    has_head = False

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids [T], positions [T] i64 -> residual stream [T, stream_size]"""
        residual = self.whole.begin(token_ids, metadata)
        return self.whole.compute_layers(self.first, self.end, residual, positions, metadata)


class LastSection(Section):
    """The layers behind them. `state` [rows, stream_size] is the residual stream of its rows, each
    of which is a request of its own.
    """

    has_head = True

    def __init__(self, whole: WholeModel, first: int, end: int, num_rows: int):
        """num_rows: of a step at most."""
        super().__init__(whole, first, end)
        shape = num_rows, whole.stream_size
        self.state = torch.zeros(shape, dtype=whole.dtype, device=whole.device)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids [R], positions [R] i64 -> hidden states [R, hidden_size], normed"""
        self.whole.embed(token_ids, metadata)  # for the inputs of layers
        residual = self.state[: len(token_ids)]
        return self.whole.compute_layers(self.first, self.end, residual, positions, metadata)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.whole.compute_logits(hidden)

    def state_layers(self) -> list[StateLayer]:
        return []
