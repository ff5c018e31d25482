"""Replaces modules of a model of transformers by Quire's layers.

Must not know: architectures, files, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import GELUActivation
from transformers.pytorch_utils import Conv1D

from ..layers import Embedding, LayerFactory, Linear

# projections of one input, which one multiplication computes
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def multiply(linear: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """x [..., in_features] -> [..., out_features], by a function that takes matrices."""
    product = linear(x.reshape(-1, x.shape[-1]))
    return product.view(*x.shape[:-1], product.shape[-1])


class QuireLinear(nn.Module):
    """Takes the place of nn.Linear, with a layer of the factory."""

    def __init__(self, linear: Linear, weight: torch.Tensor):
        """`weight` is nn.Linear's own, without data: some modules ask for its type."""
        super().__init__()
        self.linear = linear
        self.__dict__["weight"] = weight.data

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        return multiply(self.linear, x)


class QuireHead(QuireLinear):
    """The output head, which adds its bias in f32."""

    def __init__(self, linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__(linear, weight)
        self.added: torch.Tensor | None = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features] f32"""
        logits = multiply(self.linear.logits, x)
        return logits if self.added is None else logits.add_(self.added)


class Merged:
    """Projections of the same input. The first one that is called computes all of them."""

    def __init__(self, linear: Linear):
        self.linear = linear
        self.sizes = list(linear.shards.values())
        self.x: torch.Tensor | None = None
        self.parts: list[torch.Tensor | None] = []

    def take(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if x is not self.x or self.parts[index] is None:
            self.x, self.parts = x, list(multiply(self.linear, x).split(self.sizes, -1))
        part = self.parts[index]
        self.parts[index] = None
        if not any(other is not None for other in self.parts):
            self.x = None
        assert part is not None
        return part


class MergedLinear(nn.Module):
    """One projection of several that are merged."""

    def __init__(self, merged: Merged, index: int, weight: torch.Tensor):
        super().__init__()
        self.merged, self.index = merged, index
        self.__dict__["weight"] = weight.data

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.merged.take(x, self.index)


class QuireEmbedding(nn.Embedding):
    """Takes the place of nn.Embedding. Subclasses of transformers scale its result."""

    quire: Embedding

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.quire(token_ids.view(-1)).view(*token_ids.shape, self.embedding_dim)


class Contiguous(nn.Module):
    """An activation whose input is made contiguous. A batch may have strided memory, on which
    PyTorch's GELU gives other last bits.
    """

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(x.contiguous())


def replace_modules(
    model: nn.Module, make: LayerFactory, tied: dict[str, str], head: str | None
) -> dict[str, torch.Tensor]:
    """Gives memory to every parameter. Returns the tensors to fill by name: those of state_dict, of
    which those of Conv1D are transposed.

    `tied` maps names of parameters to the names of those that they share. `head` is the name of the
    output head; an encoder has none.
    """
    table: dict[str, torch.Tensor] = {}
    embeddings: dict[str, Embedding] = {}
    merged: set[str] = set()
    module: Any
    for name, module in list(model.named_modules()):
        if name in merged:
            continue
        if type(module) is nn.Linear:
            if name == head:
                continue  # it may be tied to an embedding that comes later
            parent, _, leaf = name.rpartition(".")
            group = _group_of(model.get_submodule(parent), leaf)
            names = [f"{parent}.{one}".removeprefix(".") for one in group]
            merged.update(names)
            _replace_linears(model, names, make, table)
        elif isinstance(module, GELUActivation):
            put(model, name, Contiguous(module))
        elif type(module) is Conv1D:
            linear = make.linear(module.nx, {name: module.nf}, bias=True)
            table.update(linear.weights(""))
            put(model, name, QuireLinear(linear, module.weight))
        elif isinstance(module, nn.Embedding):
            is_tied = f"{name}.weight" in tied.values()
            embeddings[f"{name}.weight"] = _replace_embedding(
                model, name, module, make, table, head if is_tied else None
            )
    if head is not None and (module := _submodule(model, head)) is not None:
        _replace_head(model, head, module, make, tied, embeddings, table)
    for name, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            full = f"{name}.{leaf}" if name else leaf
            if parameter is not None and full not in table:
                table[full] = tensor = make.parameter(*parameter.shape)
                module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        for leaf, buffer in list(module._buffers.items()):
            if buffer is None or buffer.is_meta:  # the caller refuses the latter
                continue
            module._buffers[leaf] = buffer = buffer.to(make.device)
            if leaf not in module._non_persistent_buffers_set:
                table[f"{name}.{leaf}"] = buffer
    return table


def _submodule(model: nn.Module, name: str) -> Any:
    return dict(model.named_modules()).get(name)


def _group_of(parent: nn.Module, leaf: str) -> list[str]:
    """The projections that are merged with `leaf`, itself included."""
    for names in MERGED:
        linears: list[Any] = [parent._modules.get(name) for name in names]
        if (
            leaf in names
            and all(type(linear) is nn.Linear for linear in linears)
            and len({linear.in_features for linear in linears}) == 1
            and len({linear.bias is None for linear in linears}) == 1
        ):
            return list(names)
    return [leaf]


def _replace_linears(
    model: nn.Module, names: list[str], make: LayerFactory, table: dict[str, torch.Tensor]
) -> None:
    modules: list[Any] = [model.get_submodule(name) for name in names]
    linear = make.linear(
        modules[0].in_features,
        {name: module.out_features for name, module in zip(names, modules)},
        modules[0].bias is not None,
    )
    table.update(linear.weights(""))
    if len(names) == 1:
        put(model, names[0], QuireLinear(linear, modules[0].weight))
        return
    merged = Merged(linear)
    for index, (name, module) in enumerate(zip(names, modules)):
        put(model, name, MergedLinear(merged, index, module.weight))


def _replace_embedding(
    model: nn.Module,
    name: str,
    module: nn.Embedding,
    make: LayerFactory,
    table: dict[str, torch.Tensor],
    head: str | None,
) -> Embedding:
    """head: the name of the output head that has the same weight."""
    embedding = make.embedding(name, module.num_embeddings, module.embedding_dim, head)
    table.update(embedding.weights(""))
    kind: Any = type(module)
    module.__class__ = (
        QuireEmbedding if kind is nn.Embedding else type(kind.__name__, (kind, QuireEmbedding), {})
    )
    module.__dict__["quire"] = embedding
    del module._parameters["weight"]
    module.__dict__["weight"] = torch.empty(0, dtype=make.dtype)  # transformers asks for its type
    return embedding


def _replace_head(
    model: nn.Module,
    name: str,
    module: nn.Linear,
    make: LayerFactory,
    tied: dict[str, str],
    embeddings: dict[str, Embedding],
    table: dict[str, torch.Tensor],
) -> None:
    original = tied.get(f"{name}.weight")
    if original is not None:
        linear: Any = make.tied_head(embeddings[original])
    else:
        linear = make.head(name, module.in_features, module.out_features)
        table.update(linear.weights(""))
    bias = None
    if module.bias is not None:
        bias = table[f"{name}.bias"] = make.parameter(module.out_features)
    put(model, name, QuireHead(linear, module.weight, bias))


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
