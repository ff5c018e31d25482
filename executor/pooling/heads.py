"""Computes what follows pooling: the layers of classification heads and of sentence-transformers'
Dense modules, and the last activation.

Must not know: requests, how rows are pooled.

Everything is in fp32 and in host memory. A product gives a row the same bits whatever stands beside
it. Other functions run on the rows of one request at a time, because their vector and scalar loops
round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...ipc.errors import ModelLoadError
from ...ipc.models.forms import Head, HeadLayer
from ...kernels import registry
from ..weights.table import Weight

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    "identity": None,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
Rows = np.ndarray  # f4 [n, features], of one request


class PoolingLayer:
    """One HeadLayer with its parameters."""

    def __init__(self, described: HeadLayer, parameters: dict[str, torch.Tensor]):
        """parameters: by the names of described.shapes()"""
        self.described = described
        self.parameters = parameters
        self._activate = ACTIVATIONS[described.activation]
        self._multiply: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, blocks: list[Rows]) -> list[Rows]:
        """[n, in_features] of each request -> [n, out_features] of each"""
        weight, bias = (
            self.parameters.get(f"{self.described.name}.{x}") for x in ("weight", "bias")
        )
        assert weight is not None
        if self.described.norm_eps is not None:
            size, eps = weight.shape, self.described.norm_eps
            made = [F.layer_norm(torch.from_numpy(x), size, weight, bias, eps) for x in blocks]
        else:
            if self._multiply is None:
                self._multiply = _row_linear(weight, bias)
            rows = torch.from_numpy(np.concatenate(blocks))
            made = list(self._multiply(rows).split([len(x) for x in blocks]))
        if self._activate is not None:
            made = [self._activate(x) for x in made]
        return [x.numpy() for x in made]


class PoolingHead:
    """The layers of a head, one after the other. Most models have none."""

    def __init__(self, layers: list[PoolingLayer]):
        self.layers = layers

    def __call__(self, blocks: list[Rows]) -> list[Rows]:
        for layer in self.layers:
            blocks = layer(blocks)
        return blocks

    def weights(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        for layer in self.layers:
            yield from ((prefix + name, value) for name, value in layer.parameters.items())


class TokenScore(PoolingHead):
    """The logit of a token, or the difference of the second one's and the first one's (no, yes):
    a classifier of one class, from two rows of the output head. `table` has the rows of a tied
    head; without it, they are taken from the head's tensor while it is loaded.
    """

    saved_bytes = 0

    def __init__(
        self, make: Any, config: Any, table: Callable[[torch.Tensor], torch.Tensor] | None
    ):
        super().__init__([])
        self._tokens = torch.tensor(config.score_tokens, device=make.device)
        self._table = table
        self._rows: torch.Tensor | None = None  # [tokens, hidden_size]
        # memory that is never written to
        self._whole = (
            torch.empty(config.vocab_size, config.hidden_size, dtype=make.dtype)
            if table is None
            else None
        )

    def fill(self, tensor: torch.Tensor, values: Any) -> None:
        """values: [vocab_size, hidden_size], or blocks of such a tensor"""
        if not isinstance(values, torch.Tensor):
            values = values.dequantized(tensor.dtype)
        self._rows, self._whole = values[self._tokens.to(values.device)].float(), None

    def __call__(self, blocks: list[Rows]) -> list[Rows]:
        if not self.layers:
            rows = self._rows
            if rows is None:
                assert self._table is not None
                rows = self._table(self._tokens.int()).float()
            row = rows[-1:] if len(rows) == 1 else rows[1:] - rows[:1]
            described = HeadLayer("score", row.shape[1], 1, has_bias=False)
            self.layers = [PoolingLayer(described, {"score.weight": row})]
        return super().__call__(blocks)

    def weights(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        if self._whole is not None:
            yield f"{prefix}lm_head.weight", Weight(self._whole, self)


def make_head(make: Any, head: Head) -> PoolingHead:
    """A head that is not filled, with parameters of a LayerFactory."""
    return PoolingHead(
        [
            PoolingLayer(
                layer,
                {
                    name: make.parameter(*shape, dtype=torch.float32, is_on_host=True)
                    for name, shape in layer.shapes()
                },
            )
            for layer in head
        ]
    )


def filled_head(head: Head, values: Iterable[dict[str, torch.Tensor]]) -> PoolingHead:
    """A head with the tensors of each layer, by the names of its shapes().

    Raises ModelLoadError, naming the layer, for one that is missing or has another shape.
    """
    layers = []
    for described, tensors in zip(head, values, strict=True):
        for name, shape in described.shapes():
            found = list(tensors[name].shape) if name in tensors else "none"
            if found != shape:
                raise ModelLoadError(f"{name}: the model needs a tensor of {shape}, found {found}")
        layers.append(
            PoolingLayer(described, {n: tensors[n].float() for n, _ in described.shapes()})
        )
    return PoolingHead(layers)


def _row_linear(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [R, in_features] -> [R, out_features], each row with the bits that it has alone."""
    weight, bias = weight.cpu(), None if bias is None else bias.cpu()
    ops = registry.select(torch.device("cpu"), torch.float32)
    if ops.chosen["pack_linear"] == "native":
        return ops.pack_linear(weight, bias)
    return lambda x: torch.cat([F.linear(row[None], weight, bias) for row in x])


def normalized(values: np.ndarray) -> np.ndarray:
    """f4 [..., size] divided by the Euclidean norm of its last dimension, of at least 1e-12, as
    torch.nn.functional.normalize does. The norm is summed in fp64.
    """
    squares = np.square(values, dtype=np.float64).sum(-1, keepdims=True)
    return (values / np.maximum(np.sqrt(squares), 1e-12)).astype(np.float32)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-values.astype(np.float64)))).astype(np.float32)


def _softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values.astype(np.float64) - values.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)


LAST_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda values: values,
    "normalize": normalized,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}
